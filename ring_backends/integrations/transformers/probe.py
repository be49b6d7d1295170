"""Try whether a model can run on a ring: whether its rows depend on each other only through the attention.

The ring gives every rank some rows of the sequence. Layers outside of the attention must compute each row from this row
and its position alone. The probe runs the model with three short random sequences, whole and cut as on two ranks. It
replaces the attention by a function of each row alone, so that both runs must give the same rows. If they differ,
another layer has mixed rows or numbered them.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ring_backends.integrations.transformers.attention import (
    Registration,
    first_position_of,
    is_probing,
)
from ring_backends.integrations.transformers.inputs import IGNORED, next_labels, shard_inputs
from ring_backends.integrations.transformers.pooled_heads import WAYS, PooledHead
from ring_backends.ring.ring import Ring
from ring_backends.training.reducer import device_of

_SEQUENCES, _LEN = 3, 52
_REAL = _LEN // 4
"""Tokens of the sequences with padding: so few that a rank of the zigzag layout has only padding.

A prime, so that the parts of the sequence do not end where blocks of rows end.
"""

_RANKS = [Ring(2, rank, layout_kind="zigzag") for rank in range(2)]
_MASKED = 1e9
"""Larger logits stand for -inf."""

_FAR = 1 << 24
"""Added to the numbers of rows that a model makes itself."""

LabelOf = Literal["next", "own"]
Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Findings:
    """What a probe has found out about a model.

    Attributes:
        skips_padding: whether the model counts positions from the first token that is not padding.
        labels_of: the labels with which the loss may have compared a row's logits: its ``"own"`` or the ``"next"``.
            Empty if it is another loss; None if the model takes no labels.
        takes_num_items: whether the loss is the sum over labels, divided by the argument ``num_items_in_batch``.
    """

    skips_padding: bool
    labels_of: list[LabelOf] | None
    takes_num_items: bool


_found: weakref.WeakKeyDictionary[Any, Findings | None] = weakref.WeakKeyDictionary()
"""The findings about the models that have been probed, and about the models within them."""


def models_of(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers within a model, and itself."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def takes_use_cache(model: Any) -> bool:
    """Whether the forward of a model, or that of its body with further arguments, has the argument ``use_cache``."""
    own, of_body = (inspect.signature(part.forward).parameters for part in (model, model.base_model))
    return "use_cache" in own or ("kwargs" in own and "use_cache" in of_body)


def inner_model(model: nn.Module) -> Any:
    """The model of transformers within a ``PeftModel``, or the model itself."""
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model = {type(model).__name__}: expected a model of transformers, or a PeftModel of one; pass it before "
            "it is wrapped or compiled."
        )
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError("model has virtual tokens (prompt learning): not supported by a ring; use LoRA instead.")
    if getattr(adapter, "alora_invocation_tokens", None):
        raise ValueError(
            "alora_invocation_tokens are given: each rank would look for them in its own rows; use LoRA without them."
        )
    return inner


def hooks_of(model: nn.Module, *classes: type) -> list[Any]:
    """The objects of these classes whose methods are forward pre-hooks of a model."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, classes)]


def probe_once(model: Any, registration: Registration) -> Findings | None:
    """Probe a model once, unless the registration decides otherwise.

    Returns:
        The findings; None without a probe. On a ring of one, a model that other rings refuse has none.

    Raises:
        ValueError: as :meth:`Probe.findings`, on several ranks.
    """
    if not registration.probes:
        return None
    is_alone = registration.attention.ring.size == 1
    is_known = model in _found and (is_alone or _found[model] is not None)
    if not is_known:
        try:
            findings = Probe(model, "register(attention, probe=False) skips this check").findings()
        except ValueError:
            if not is_alone:
                raise
            findings = None
        _found.update(dict.fromkeys(models_of(model), findings))
    return _found[model]


class Probe:
    """Runs a model of transformers whose ``attn_implementation`` is a registered one.

    Args:
        without: how to use the model without a probe, for the errors.
        outer: the ``PeftModel`` of the model, whose forward is called instead.
        ignored: names of results that need not be equal.
    """

    def __init__(self, model: Any, without: str, outer: nn.Module | None = None, ignored: Sequence[str] = ()) -> None:
        self.model, self.without, self.outer, self.ignored = model, without, outer or model, ignored
        self.parameters = inspect.signature(model.forward).parameters
        self.batch: dict[str, Any] = _batch(model)
        self.is_real = self.batch["attention_mask"].bool()

    def findings(self) -> Findings:
        """Find out whether the model can run on a ring.

        It takes seven forward passes of three sequences of 52 tokens, in evaluation mode and without gradients. It does
        not see what a model does only in training mode, with longer sequences or with other arguments.

        Raises:
            ValueError: the rows depend on each other in other layers, or a layer has an attention that a ring does not
                support.
        """
        first_position = first_position_of(self.model.config)
        rings = (Ring(), *_RANKS)
        whole_rows, *shards = (shard_inputs(ring, **self.batch, first_position=first_position) for ring in rings)
        with _at_rest(self.outer), _with_whole_parameters(self.model):
            whole = self._run(lambda: self._call(whole_rows))
            if not any(value.isfinite().any() for value in whole.values() if value.is_floating_point()):
                self._refuse("it has no finite output")
            parts = self._run(lambda: _joined([self._call_twice(rows) for rows in shards]))
            if self._first_difference(whole, parts) is not None:
                parts = self._run(lambda: _joined([self._call(rows) for rows in shards]))
                difference = self._first_difference(whole, parts)
                if difference is not None:
                    self._refuse(self._place_of(difference, whole[difference], whole_rows, shards))
            if self._numbers_rows(shards, parts):
                self._refuse("it numbers its rows itself")
            return self._compare_with_defaults(whole, first_position)

    def find_pooling(self, head: PooledHead) -> None:
        """Find out how a head pools rows, on one device: compare its results with those for one pooled row.

        Raises:
            ValueError: the head pools rows in no way that :meth:`ring_backends.Ring.pool` knows.
        """
        padding = self.model.config.get_text_config().pad_token_id
        if padding is None:  # some heads then refuse several sequences
            batch = {name: rows[1:2] for name, rows in self.batch.items()}
        else:
            batch = {**self.batch, "input_ids": self.batch["input_ids"].clone()}
            batch["input_ids"][0, -1] = padding  # the mask counts this token
        output = "logits" if head.is_classifier else "pooler_output"
        local = {**batch, "seq_len": _LEN}
        if "use_cache" in inspect.signature(head.body.forward).parameters:
            local["use_cache"] = False

        def result() -> Tensor:
            found: Tensor = self._run(lambda: self.outer(**head.begin(Ring(), batch, local))[output])
            head.call = None
            return found

        with _at_rest(self.outer), _with_whole_parameters(self.model):
            expected = result()
            for head.way in WAYS:
                if not _differ(expected, result(), None):
                    return
        raise ValueError(
            f"model = {type(self.model).__name__}: its head pools rows in another way than their mean, their maximum, "
            "the first or the last of them; use the model without a head, and pool its rows with ring.pool()."
        )

    def _compare_with_defaults(self, whole: Outputs, first_position: int) -> Findings:
        """Compare with a call as on one device, without position_ids, and with labels."""
        options: dict[str, Tensor] = {}
        if "logits" in whole:
            # Every second label is the likeliest, so that the loss of the next label is another one.
            likeliest, places = whole["logits"].argmax(-1), torch.arange(_LEN, device=self.is_real.device)
            varied = (likeliest + (places % 2) * places) % whole["logits"].shape[-1]
            options["labels"] = varied.masked_fill(~self.is_real, IGNORED)
        arguments = {**self.batch, "seq_len": _LEN, **options}
        plain = self._run(lambda: self._call(arguments))
        if self._first_difference(whole, plain, slice(0, 2)) is not None:
            self._refuse(f"its first position is not {first_position}, or a sequence has positions of its own")
        skips_padding = self._first_difference(whole, plain, slice(2, 3)) is not None
        if "loss" not in plain:
            return Findings(skips_padding, None, False)
        labels_of = _labels_of(plain, **options)
        counted = self._run(lambda: self._call({**arguments, "num_items_in_batch": 1}))
        # With one item, the loss is the sum over all labels.
        is_sum = bool(labels_of) and float(counted["loss"]) > 2 * float(plain["loss"])
        return Findings(skips_padding, labels_of, is_sum)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            origin = traceback.extract_tb(error.__traceback__)[-1].filename
            if isinstance(error, ValueError) and "ring_backends" in origin:
                raise
            found = f"{type(error).__name__}: {error}"
            if "RingMask" in found:
                self._refuse(f"it computes with the attention mask, which on a ring is not a tensor ({found})", error)
            self._refuse(f"its forward raised {found}", error)

    def _call(self, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        options = dict.fromkeys({"output_router_logits"} & self.parameters.keys(), False)
        if takes_use_cache(self.model):
            options["use_cache"] = False
        outputs = self.outer(**arguments, **options, return_dict=True)
        return {
            name: value for name, value in outputs.items() if isinstance(value, Tensor) and name not in self.ignored
        }

    def _call_twice(self, rows: dict[str, Any]) -> dict[str, Tensor]:
        """One rank's rows, twice in one batch, so that matrix products have as many rows as those of the whole."""
        twice = {name: torch.cat([value] * 2) for name, value in rows.items() if isinstance(value, Tensor)}
        return {name: value.chunk(2)[0] for name, value in self._call({**rows, **twice}).items() if value.dim()}

    def _numbers_rows(self, shards: list[dict[str, Any]], parts: Outputs) -> bool:
        """Whether the rows change with numbers of rows that the model makes itself."""
        for change in (lambda numbers: (numbers + _FAR).as_subclass(_LargeNumbers), lambda numbers: numbers.flip(0)):
            with contextlib.suppress(IndexError), _Renumbered(_LEN // 2, change):
                numbered = _joined([self._call_twice(rows) for rows in shards])
                return self._first_difference(parts, numbered) is not None
        return False

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _first_difference(self, one: Outputs, other: Outputs, sequences: slice = slice(None)) -> str | None:
        """Name the first output that differs by more than rounding, in rows that are not padding."""
        for name, value in one.items():
            if name in other and value.is_floating_point() and value.dim():
                is_real = self.is_real[sequences] if _has_rows(value) else None
                if _differ(value[sequences], other[name][sequences], is_real):
                    return name
        return None

    def _place_of(self, output: str, value: Tensor, whole: dict[str, Any], shards: list[dict[str, Any]]) -> str:
        """Name the first module whose rows of the whole sequence and of the shards differ."""
        if not _has_rows(value):
            return f"its {output}, {[*value.shape]}, depends on a part of the rows; pool the rows with ring.pool()"
        records = [_record(self.model, partial(self._call, rows)) for rows in (whole, *shards)]
        if len({len(calls) for calls in records}) == 1:
            for (name, module, rows), *parts in zip(*records, strict=True):
                local = _joined([{"rows": part[2]} for part in parts])["rows"]
                is_real = self.is_real if _has_rows(rows) else None
                if local.shape == rows.shape and _differ(rows, local, is_real):
                    what = f"{name or 'it'} ({type(module).__name__})"
                    return f"{what} gives rows other values if it gets only a part of them"
        return "a row has other values if the model gets only a part of the rows"

    def _refuse(self, what: str, error: Exception | None = None) -> Any:
        raise ValueError(
            f"model = {type(self.model).__name__}: {what}. On a ring only the attention may mix rows or number them, "
            f"and the model must be callable with input_ids and attention_mask. {self.without}."
        ) from error


def _batch(model: Any) -> dict[str, Tensor]:
    """Three sequences: one without padding, one padded on the right, one padded on the left."""
    config: Any = model.config
    try:
        num_embeddings: Any = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        num_embeddings = None
    vocabulary = int(num_embeddings or getattr(config.get_text_config(), "vocab_size", 2))
    # A configuration may name tokens beyond the embeddings, such as the defaults of a larger model.
    special = {name: token for name, token in _special_tokens(config.to_dict()) if 0 <= token < vocabulary}
    padding = special.pop("pad_token_id", 0)
    plain = torch.arange(vocabulary)
    plain = plain[~torch.isin(plain, torch.tensor([padding, *special.values()]))]
    choice = torch.randint(max(1, len(plain)), (_SEQUENCES, _LEN), generator=torch.Generator().manual_seed(0))
    input_ids = plain[choice] if len(plain) else choice
    marks = [special[name] for name in _MARKS if name in special and special[name] != padding]
    for place, mark in enumerate(marks):
        input_ids[:, place] = mark  # on one rank only
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, _REAL:] = 0
    attention_mask[2, :-_REAL] = 0
    input_ids[attention_mask == 0] = padding
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    return {name: tensor.to(device_of(model)) for name, tensor in batch.items()}


_MARKS = [f"{name}_token_id" for name in ("mask", "sep", "cls", "bos", "eos")]
"""Tokens that a model may count."""


def _special_tokens(config: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    """The tokens that a configuration names, such as those that stand for a picture, by name."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_tokens(value)
        elif isinstance(value, int) and value >= 0 and str(name).endswith(("_token_id", "_token_index")):
            yield str(name), value


@contextlib.contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients, with the stand-in for attention. Afterwards the model is as before."""
    was_training = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module, _ in was_training
        for name, buffer in module.named_buffers(recurse=False)
    ]
    token = is_probing.set(True)
    device = device_of(model)
    devices = [] if device.type == "cpu" else [device]
    random_numbers = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    try:
        model.eval()
        with torch.no_grad(), random_numbers, _without_constants(model):
            yield
    finally:
        is_probing.reset(token)
        for module, mode in was_training:
            module.training = mode
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


@contextlib.contextmanager
def _without_constants(model: nn.Module) -> Iterator[None]:
    """Replace the parameters of one value, such as the 0 of a branch that training opens, by numbers from 0.5 to 1.5.

    A parameter of one element has one value in any case, so it is replaced only if it is near 0. Parameters that a
    framework shards or partitions stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    saved: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter in model.parameters():
            is_plain = type(parameter) is nn.Parameter and not hasattr(parameter, "ds_id")
            if is_plain and parameter.is_floating_point() and (parameter.numel() > 1 or _is_small(parameter)):
                few = parameter.flatten()[:64] if parameter.is_contiguous() else parameter
                if bool((few == few.flatten()[0]).all()) and bool((parameter == parameter.flatten()[0]).all()):
                    saved.append((parameter, parameter.detach().clone()))
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        yield
    finally:
        for parameter, value in saved:
            parameter.copy_(value)


def _is_small(parameter: Tensor) -> bool:
    return parameter.numel() == 1 and abs(float(parameter)) < 0.1


class _LargeNumbers(Tensor):
    """Integers that raise IndexError where they are indices. A GPU could not be used any more after such an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        index = args[1] if name == "__getitem__" else ()
        indices = index if isinstance(index, (tuple, list)) else (index,)
        if name in _INDEXING or any(isinstance(own, cls) for own in indices):
            raise IndexError(f"{name}: a number of a row is an index")
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        is_index = isinstance(result, cls) and not result.is_floating_point()
        return result if is_index or not isinstance(result, cls) else result.as_subclass(Tensor)


_INDEXING = {
    *("__setitem__", "embedding", "gather", "index_add", "index_copy", "index_fill", "index_put", "index_select"),
    *("index_add_", "index_copy_", "index_fill_", "index_put_", "one_hot", "scatter", "scatter_", "scatter_add"),
    *("scatter_add_", "take", "take_along_dim"),
}


class _Renumbered(TorchFunctionMode):
    """Changes the numbers of rows that a model makes by torch.arange."""

    def __init__(self, num_rows: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_rows, self.change = num_rows, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.change(result) if func is torch.arange and len(result) == self.num_rows else result


@contextlib.contextmanager
def _with_whole_parameters(model: nn.Module) -> Iterator[None]:
    """Gather the parameters that DeepSpeed's ZeRO 3 has partitioned, those of each module while it runs.

    A module may also read the parameters of the modules directly within it. So those of the embeddings and of the head
    are whole all the time. Parameters that a module around it has gathered are left out: DeepSpeed does not nest them.
    """
    parameters: dict[nn.Module, list[Any]] = {
        part: [own for module in (part, *part.children()) for own in module.parameters(False) if hasattr(own, "ds_id")]
        for part in model.modules()
    }
    partitioned = [part for part, own in parameters.items() if own]
    with contextlib.ExitStack() as stack:
        if partitioned:
            zero = import_module("deepspeed").zero
            gathered: dict[nn.Module, Any] = {}

            def gather(module: nn.Module, args: Any) -> None:
                gathered[module] = contextlib.ExitStack()
                missing = [own for own in parameters[module] if own.ds_status.name == "NOT_AVAILABLE"]
                gathered[module].enter_context(zero.GatheredParameters(missing))

            def partition(module: nn.Module, args: Any, output: Any) -> None:
                if module in gathered:
                    gathered.pop(module).close()

            stack.callback(lambda: [context.close() for context in gathered.values()])
            for part in partitioned:
                stack.enter_context(part.register_forward_pre_hook(gather))
                stack.enter_context(part.register_forward_hook(partition, always_call=True))
        yield


def _record(model: nn.Module, call: Callable[[], Any]) -> list[tuple[str, nn.Module, Tensor]]:
    """One number for each row that a module returns in a call, in the order in which the modules return."""
    names = {module: name for name, module in model.named_modules()}
    records: list[tuple[str, nn.Module, Tensor]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if module in names and isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point():
            records.append((names[module], module, first.abs().float().sum(-1)))

    with register_module_forward_hook(record):
        call()
    return records


def _joined(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of the whole sequence, from those of both ranks. What has no rows is that of rank 1."""
    order = torch.cat([ring.positions(_LEN) for ring in _RANKS]).argsort()
    whole = {}
    for name, of_rank_1 in by_rank[1].items():
        whole[name] = of_rank_1
        if of_rank_1.dim() > 1 and of_rank_1.shape[1] == _LEN // 2:
            whole[name] = torch.cat([outputs[name] for outputs in by_rank], 1)[:, order.to(of_rank_1.device)]
    return whole


def _has_rows(value: Tensor) -> bool:
    return value.dim() > 1 and value.shape[:2] == (_SEQUENCES, _LEN)


def _differ(one: Tensor, other: Tensor, is_real: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding in real rows, or only one of them is finite in the others."""
    if one.shape != other.shape or bool((one.isfinite() & ~other.isfinite()).any()):
        return True
    if is_real is not None:
        one, other = one[is_real.to(one.device)], other[is_real.to(other.device)]
    tolerance = _tolerance(one)
    one, other = one.float().nan_to_num(0, 0, 0), other.float().nan_to_num(0, 0, 0)
    usual = one.abs()[one.abs() < _MASKED]
    scale = usual.median() if usual.numel() else 1.0
    return bool(((one - other).abs() > tolerance * (one.abs() + scale)).any())


def _tolerance(rows: Tensor) -> float:
    return 1e-4 if rows.dtype in (torch.float32, torch.float64) else 3e-2


def _labels_of(outputs: Outputs, labels: Tensor) -> list[LabelOf]:
    """Which labels the loss of a model may have compared its logits with."""
    logits, loss = outputs["logits"].float(), float(outputs["loss"])
    tolerance = _tolerance(outputs["loss"]) * max(1.0, abs(loss))
    candidates: dict[LabelOf, Tensor] = {"next": next_labels(labels), "own": labels}
    expected = {
        name: float(F.cross_entropy(logits.flatten(0, 1), candidate.flatten(), ignore_index=IGNORED))
        for name, candidate in candidates.items()
    }
    return [name for name, own in expected.items() if abs(loss - own) <= tolerance]
