"""Hugging Face models that take whole batches on a ring: every rank of the ring calls the model with the same batch.

Hooks of the model cut the batch into this rank's rows, and compute the loss over the labels of all ranks. So a training
loop for one device stays as it is.
"""

from __future__ import annotations

import copy
import inspect
import secrets
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.models.auto import modeling_auto

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import RingMismatchError
from ring_backends.integrations.parameters import agree_on_parameters
from ring_backends.integrations.transformers import router_losses
from ring_backends.integrations.transformers.attention import (
    Registration,
    attention_on,
    check_config,
    check_layerdrop,
    first_position_of,
    register_as,
)
from ring_backends.integrations.transformers.caches import current_generation
from ring_backends.integrations.transformers.inner_arguments import pass_down
from ring_backends.integrations.transformers.inputs import (
    IGNORED,
    MARKS,
    check_padding_tokens,
    marks_documents,
    next_labels,
    shard_inputs,
)
from ring_backends.integrations.transformers.local_rows import LocalRows
from ring_backends.integrations.transformers.pooled_heads import PooledHead
from ring_backends.integrations.transformers.probe import (
    Findings,
    LabelOf,
    Probe,
    hooks_of,
    inner_model,
    models_of,
    takes_use_cache,
)
from ring_backends.integrations.transformers.recurrent import RecurrentLayers, recurrent_layers_of
from ring_backends.ring.collectives import agree, broadcast
from ring_backends.ring.describe import checksum, describe
from ring_backends.ring.pooling import sum_of_ranks
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.training.losses import cross_entropy_sum

_PREDICT_NEXT = frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_PREDICT_OWN = frozenset(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()) | frozenset(
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()
)
_WITHOUT_HEAD = frozenset(
    name
    for names in modeling_auto.MODEL_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
)
_PREDICT_ONCE = frozenset(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
"""Names of model classes, by what they predict: the next token, something about the token, nothing, or something about
the sequence."""

_LABELS_OF_LOSS: dict[Any, LabelOf] = {ForCausalLMLoss: "next", ForMaskedLMLoss: "own", ForTokenClassification: "own"}
"""The labels of the losses that transformers chooses for classes that it does not list."""

_REFUSED = {
    "inputs_embeds": "it is not supported; give input_ids",
    "cache": "key/value caches are not supported by a ring; call the model on whole sequences",
    "past_key_values": "key/value caches are not supported by a ring; call the model on whole sequences",
    "encoder_hidden_states": "cross-attention is not supported; use a model without it",
    "ignore_index": "the loss of a ring ignores labels of -100; set the labels that it is to ignore to -100",
}
"""Arguments of a model that must be absent. Each maps to what the user can do."""

LABELS = frozenset(("labels", "shift_labels"))


def use_ring(
    model: nn.Module, attention: RingDilatedAttention | Ring, *, label_smoothing: float = 0.0, probe: bool = True
) -> None:
    """Put a Hugging Face model on a ring, with whole batches as its arguments.

    After this call every rank of a ring calls the model with the same whole batch, as on one device. The ranks share
    the work. ``loss`` of the result is the mean over all labels of the batch, the same on every rank; an argument
    ``num_items_in_batch`` replaces the number of labels. All other results, such as ``logits``, are this rank's rows;
    ``ring.unshard(logits, seq_len=…)`` makes them whole. Averaged over all ranks, as by DistributedDataParallel, FSDP2
    and DeepSpeed, the gradients are those of one device.

    The head of a sequence classifier, and the pooler of a model without a head, pool the rows of all ranks
    (:meth:`~ring_backends.Ring.pool`). Their ``logits``, ``loss`` and ``pooler_output`` are those of the whole
    sequences, the same on every rank.

    Args:
        model: a causal or masked language model, a token or sequence classifier, or a model without a head, as
            transformers lists its class or chooses its loss; also within a ``PeftModel``. Call this function before the
            model is wrapped or compiled.
        attention: a ring, on which every layer computes its own attention as the model configures it
            (:func:`~ring_backends.integrations.transformers.register`); or a RingDilatedAttention of any adapter, whose
            pattern then takes the place of full attention.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`. With it, the loss has no router losses, as in
            Transformers' Trainer.
        probe: whether to try the model with short random sequences first
            (:mod:`ring_backends.integrations.transformers.probe`).

    Raises:
        TypeError: ``model`` is not such a model, or ``attention`` is not a RingDilatedAttention or a ring.
        ValueError: the model has a part that is not supported by a ring, or is on a ring already. Its forward raises
            ValueError for arguments that are not supported, and RingMismatchError if the batches of the ranks differ.
        RingMismatchError: the ranks' parameters differ.
    """
    attention = attention_on(attention)
    agree_on_parameters(attention.ring, inner_model(model), "model")
    put_on_ring(model, attention, label_smoothing, probe)


def share_parameters(ring: Ring, model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, if they differ, as DistributedDataParallel does later."""
    world = world_ring(ring)
    try:
        agree_on_parameters(world, inner_model(model), "model")
    except RingMismatchError:
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            broadcast(world, name, [tensor])


def put_on_ring(
    model: nn.Module, attention: RingDilatedAttention, label_smoothing: float, probe: bool
) -> ShardedForward:
    """Do what :func:`use_ring` does, and return the model's hooks."""
    inner = inner_model(model)
    if hooks_of(model, ShardedForward) or hooks_of(inner, ShardedForward, LocalRows):
        raise ValueError(
            f"model = {type(inner).__name__}: is on a ring already; call "
            "ring_backends.integrations.transformers.remove_ring(model) first."
        )
    for config in (inner.config, inner.config.get_text_config()):
        check_config(config, len(recurrent_layers_of(inner)))
    name = f"ring_dilated_{secrets.token_hex(8)}"  # unlike a number, not that of a model of another process
    registration = Registration(attention, probes=False, takes_whole_batches=True)
    register_as(name, registration)
    sharded = ShardedForward(inner, registration, name, label_smoothing)
    try:
        with attention.ring.report_refusals():
            inner.set_attn_implementation(name)
            sharded.check_implementation("it has an attention of its own; use a model of the attention interface")
            can_probe = probe and not any(parameter.is_meta for parameter in inner.parameters())
            if sharded.head is None and can_probe:
                skip = "use_ring(…, probe=False) and attach(…, probe=False) skip this check"
                sharded.use(Probe(inner, skip, model).findings())
            elif sharded.head is not None:
                needed = "A head that pools rows needs this check, which finds out how it pools"
                if not can_probe:
                    raise ValueError(
                        f"model = {type(inner).__name__}: only a probe can find out how its head pools rows; pass "
                        "probe=True, and load the parameters before, so that none is on the meta device."
                    )
                sharded.use(Probe(sharded.head.body, needed, ignored=("pooler_output",)).findings())
                Probe(inner, needed, model).find_pooling(sharded.head)
    except Exception:
        sharded.remove()
        raise
    sharded.hooks.append(model.register_forward_pre_hook(sharded.before, with_kwargs=True))
    sharded.hooks.append(model.register_forward_hook(sharded.after, with_kwargs=True, always_call=True))
    return sharded


def remove_ring(model: nn.Module) -> None:
    """Take a model off its ring, on which ``use_ring``, ``register`` or ``attach`` has put it. It computes alone then.

    Args:
        model: the model that was put on a ring, or a ``PeftModel`` that was made of it later.

    Raises:
        TypeError, ValueError: ``model`` is not a model of transformers, or is not on a ring.
    """
    inner = inner_model(model)
    hooks = hooks_of(model, ShardedForward) or hooks_of(inner, ShardedForward, LocalRows)
    if not hooks:
        raise ValueError(f"model = {type(inner).__name__}: is not on a ring; give the model that was put on one.")
    for owner in hooks:
        owner.remove()


def is_sequence_classifier(model: Any) -> bool:
    return bool(_class_names(model) & _PREDICT_ONCE)


def label_of_class(model: Any) -> LabelOf | None:
    """The label with which the loss compares a row's logits, as the class of a model suggests; None without a loss."""
    names = _class_names(model)
    listed: LabelOf | None = "next" if names & _PREDICT_NEXT else "own" if names & _PREDICT_OWN else None
    return listed or _LABELS_OF_LOSS.get(LOSS_MAPPING.get(model.loss_type))


def _class_names(model: Any) -> set[str]:
    return {base.__name__ for base in type(model).__mro__}


class ShardedForward:
    """The hooks of one model: ``before`` cuts its arguments, and ``after`` adds the loss to its result."""

    def __init__(
        self, inner: Any, registration: Registration, attn_implementation: str, label_smoothing: float
    ) -> None:
        names = _class_names(inner)
        self.label_of = label_of_class(inner)
        has_pooler = getattr(inner, "pooler", None) is not None
        has_head = inner.base_model is not inner and not names & _WITHOUT_HEAD
        if self.label_of is None and has_head and not names & _PREDICT_ONCE:
            raise ValueError(
                f"model = {type(inner).__name__}: transformers does not list it as a language model, a token or "
                "sequence classifier or a model without a head, so its head may pool rows, of which each rank has only "
                "a part; use the model without a head, and pool its rows with ring.pool()."
            )
        self.recurrent = RecurrentLayers(inner, registration)
        self.head = PooledHead(inner) if has_pooler or is_sequence_classifier(inner) else None
        self.inner, self.ring, self.attn_implementation = inner, registration.ring, attn_implementation
        self.label_smoothing = label_smoothing
        self.models = models_of(inner)
        self.first_position = first_position_of(inner.config)
        self.skips_padding = self.first_position > 0
        self.takes_num_items: bool | None = None
        self.batches = ComparedBatches(self.ring)
        self.labels: Tensor | None = None  # of the call that has begun
        self.count: Any = None
        self.fused_len: int | None = None
        self.own_implementation = inner.config._attn_implementation
        self.loss_function = getattr(inner, "loss_function", None)
        self.hooks = [*pass_down(inner), *([] if self.head is None else self.head.hooks)]
        self.router_rows: tuple[Tensor | None, int, int] | None = None  # mask, batch size, length of a call with a loss
        self.router_loss: Tensor | None = None
        if router_losses.has_router_loss(inner):
            # The losses are those of the body's outputs, which TRL's head does not return.
            self.hooks.append(inner.base_model.register_forward_hook(self._after_body))

    def remove(self) -> None:
        """Take the hooks off the model, and give it its own attention back."""
        self.recurrent.remove()
        for hook in self.hooks:
            hook.remove()
        self.inner.set_attn_implementation(self.own_implementation)

    def use(self, findings: Findings) -> None:
        """Replace what the class of the model suggests by what a probe has found."""
        self.skips_padding, self.takes_num_items = findings.skips_padding, findings.takes_num_items
        if findings.labels_of is not None and self.label_of not in findings.labels_of:
            self.label_of = next(iter(findings.labels_of), None)

    @property
    def _findings(self) -> dict[str, object]:
        """What the class or the probe of the model says, which decides what a rank computes.

        It could differ if only some ranks probe: those on which the parameters have values.
        """
        names = (f"{name} (as use_ring() found them)" for name in ("labels", "skips_padding", "num_items", "pooling"))
        pooling = None if self.head is None else self.head.way
        return dict(zip(names, (self.label_of, self.skips_padding, self.takes_num_items, pooling), strict=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedForward:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self.inner).__name__} is on a ring, and cannot be pickled: save model.state_dict(), or call "
            "model.save_pretrained(), and call use_ring() on the model that loads it."
        )

    def check_implementation(self, what_to_do: str) -> None:
        for model in self.models:
            found = model.config._attn_implementation
            if found != self.attn_implementation:
                raise ValueError(
                    f"attn_implementation of {type(model).__name__} = {found!r}: expected "
                    f"{self.attn_implementation!r}, the ring's; {what_to_do}."
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut a whole batch into this rank's rows."""
        self.end()
        if current_generation.get() is not None:  # the call is one of generate(), which cuts the prompt itself
            return args, kwargs
        names = [*inspect.signature(self.inner.forward).parameters]  # train() may put Liger's forward in its place
        by_place = names
        if args and module is not self.inner:  # the arguments of a PeftModel may have another order
            own = [*inspect.signature(module.forward).parameters]
            by_place = names if "args" in own else own
        by_name = {**dict(zip(by_place, args, strict=False)), **kwargs}
        batch = {name: value for name, value in by_name.items() if value is not None}
        with self.ring.report_refusals():
            self._check(batch)
        self.batches.compare(batch, self._findings)
        given = dict(batch)
        num_items, labels = batch.pop("num_items_in_batch", None), labels_of_rows(batch, self.label_of)
        is_fused = batch.get("fused_lm_head", False)  # TRL's own head: it returns log-probabilities, and no logits
        # Liger's forward computes the sum of the losses without logits.
        has_sum = "skip_logits" in names and batch.pop("skip_logits", self.inner.training)
        if labels is not None and not is_fused and not self.has_own_loss:
            self.labels = self.ring.shard(labels)
            self.count = (labels != IGNORED).sum() if num_items is None else num_items
        batch = {name: value for name, value in batch.items() if name not in LABELS}
        if is_fused:
            self.fused_len = batch["input_ids"].shape[1]
            self.fused_columns = self.fused_len - ("shift_labels" not in given)
            batch["shift_labels"] = labels
        if takes_use_cache(self.inner):
            batch["use_cache"] = False
        if self.skips_padding and "position_ids" not in batch and not marks_documents(batch):
            with self.ring.report_refusals():
                positions = self._positions_after_padding(batch)
            batch |= {} if positions is None else {"position_ids": positions}
        if self.recurrent.layers:
            batch["num_passing"] = len(self.recurrent.layers)
        has_router_loss, shape = self._has_router_loss(batch), batch["input_ids"].shape
        whole = {name for name, value in batch.items() if isinstance(value, Tensor) or name in MARKS}
        options = {name: batch.pop(name) for name in batch.keys() - whole}
        local = {**options, **shard_inputs(self.ring, first_position=self.first_position, **batch)}
        self.recurrent.begin(local)
        if has_router_loss:
            self.router_rows = local.get("attention_mask"), *shape
        if self.labels is not None and has_sum and not self.label_smoothing:
            local |= {"shift_labels": self.labels, "num_items_in_batch": 1, "skip_logits": True}
        return (), local if self.head is None else self.head.begin(self.ring, given, local)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Add the loss of the whole batch. The results of TRL's head are those of all rows."""
        labels, seq_len, router_loss = self.labels, self.fused_len, self.router_loss
        self.end()
        if outputs is None:  # the forward has raised an error
            return outputs
        if router_loss is not None:
            outputs = type(outputs)(**{**outputs, "aux_loss": router_loss})
        if seq_len is not None:
            rows = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and value.dim() == 2}
            whole = {name: self.ring.unshard(value, seq_len=seq_len) for name, value in rows.items()}
            whole = {name: value[:, : self.fused_columns] for name, value in whole.items()}
            return type(outputs)(**{**whole, "aux_loss": getattr(outputs, "aux_loss", None)})
        if labels is None:
            return outputs
        logits = outputs.get("logits")
        smoothing = self.label_smoothing
        own_sum = outputs["loss"] if logits is None else cross_entropy_sum(logits, labels, label_smoothing=smoothing)
        loss = sum_of_ranks(self.ring, own_sum) / self.count
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is not None and not self.label_smoothing:
            loss = loss + router_losses.router_coefficient(self.inner) * aux_loss
        return type(outputs)(**{**outputs, "loss": loss})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_body(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self.router_rows is not None:  # here, since autocast may end before the call of the model does
            logits = outputs["router_logits"]
            self.router_loss = router_losses.loss_over_all_rows(self.inner, self.ring, logits, *self.router_rows)

    def end(self) -> None:
        """End a call of the model."""
        self.labels = self.fused_len = self.router_rows = self.router_loss = None
        self.recurrent.called = {}
        if self.head is not None:
            self.head.call = None

    @property
    def has_own_loss(self) -> bool:
        """Whether the model computes its loss, from a result for the whole sequence."""
        return self.head is not None and self.head.is_classifier

    def _has_router_loss(self, batch: Mapping[str, Any]) -> bool:
        configured = getattr(self.inner.config.get_text_config(), "output_router_logits", False)
        return bool(batch.get("output_router_logits", configured))

    def _check(self, batch: Mapping[str, Any]) -> None:
        self.check_implementation("do not change it after use_ring()")
        if self.ring.size > 1:
            check_layerdrop(self.models)
        for name, instead in _REFUSED.items():
            if name in batch:
                raise ValueError(f"{name} is given: {instead}.")
        if not isinstance(batch.get("input_ids"), Tensor):
            raise ValueError("input_ids is not given: a ring cuts the batch by its tokens; give input_ids.")
        for name, expected in {"use_cache": False, "logits_to_keep": 0, "return_dict": True}.items():
            value = batch.get(name, expected)
            if isinstance(value, Tensor) or value != expected:
                raise ValueError(f"{name} = {batch[name]}: not supported by a ring; leave it out. generate() sets it.")
        if self._has_router_loss(batch) and not router_losses.has_router_loss(self.inner):
            raise ValueError(
                f"output_router_logits = True: {type(self.inner).__name__} has another router loss than "
                "load_balancing_loss_func; set it to False."
            )
        if LABELS & batch.keys() and getattr(self.inner, "loss_function", None) != self.loss_function:
            raise ValueError(
                f"loss_function of {type(self.inner).__name__} was replaced after the model was put on a ring, which "
                "computes the loss that the model had; replace it before, or compute the loss from the logits."
            )
        if self.head is not None:
            self.head.check_padding(batch)
        shape = batch["input_ids"].shape
        for name in () if self.has_own_loss else LABELS & batch.keys():
            if batch[name].shape != shape:
                raise ValueError(f"{name} is {[*batch[name].shape]}: expected {[*shape]}, as input_ids.")
            if self.label_of is None:
                raise ValueError(
                    f"{name} is given: {type(self.inner).__name__} has no loss, or not the mean cross entropy of its "
                    "logits; leave it out, and compute the loss from the logits."
                )

    def _positions_after_padding(self, batch: Mapping[str, Any]) -> Tensor | None:
        """The position ids of a model that does not count padding; None without padding.

        Raises:
            ValueError: there is padding between tokens, or the mask does not mark it.
        """
        mask, input_ids = batch.get("attention_mask"), batch["input_ids"]
        is_real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
        is_counted = is_real
        if self.first_position:
            check_padding_tokens(input_ids, is_real, self.first_position - 1)
            is_counted = input_ids != self.first_position - 1
        if bool(is_counted.all()):
            return None
        num_runs = (is_counted[:, 1:] & ~is_counted[:, :-1]).sum(1) + is_counted[:, 0]
        if int(num_runs.max()) > 1:
            raise ValueError(
                f"input_ids has padding between tokens: {self.inner.config.model_type} does not count its positions; "
                "pad on one side."
            )
        return torch.where(is_counted, is_counted.cumsum(1), 0) - 1 + self.first_position


class ComparedBatches:
    """Compares the batches of a model between the ranks of a ring, without a message per batch.

    The ranks compare the first batch in full. Afterwards a description of the batch, with checksums, is part of the
    tags of all messages of the ring. Ranks with different batches wait for each other's messages, and all of them raise
    RingMismatchError.

    The host does not wait for checksums of tensors on a GPU. They are copied to pinned memory, and are part of the tags
    after ``LAG`` further batches.
    """

    LAG = 2

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.is_first = True
        self.copied: deque[tuple[dict[str, Tensor], torch.cuda.Event]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> ComparedBatches:
        return type(self)(self.ring)

    def compare(self, batch: Mapping[str, Any], findings: Mapping[str, object]) -> None:
        """Compare a batch with those of the other ranks, now or in the next messages.

        Args:
            findings: further values that must be equal on all ranks. They do not change.

        Raises:
            RingMismatchError, RingPeerError: the first batch differs, or a rank is gone.
        """
        agreement = self.ring.agreement
        if agreement is None:
            return
        if self.is_first:
            agree(self.ring, "the batch of a model", {**describe(batch), **findings})
            self.is_first = False
            return
        on_gpu = {name: value for name, value in batch.items() if is_on_gpu(value)}
        described = describe({name: value for name, value in batch.items() if name not in on_gpu})
        described |= {name: f"{value.dtype} {[*value.shape]}" for name, value in on_gpu.items()}
        if on_gpu:
            self._copy({name: checksum(value) for name, value in on_gpu.items()})
        if len(self.copied) > self.LAG:
            checksums, event = self.copied.popleft()
            event.synchronize()  # of an earlier batch: the GPU has finished its checksums long ago
            earlier = {f"{name}, {self.LAG} batches before": f"checksum {int(x)}" for name, x in checksums.items()}
            described |= earlier
        agreement.context = described

    def _copy(self, checksums: Mapping[str, Tensor]) -> None:
        on_host = {name: torch.empty_like(x, device="cpu", pin_memory=True) for name, x in checksums.items()}
        for name, pinned in on_host.items():
            pinned.copy_(checksums[name], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.copied.append((on_host, event))


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def labels_of_rows(batch: Mapping[str, Any], label_of: LabelOf | None) -> Tensor | None:
    """The label of each row of a whole batch; None if the batch has no labels."""
    shifted: Tensor | None = batch.get("shift_labels")
    labels: Tensor | None = batch.get("labels")
    if shifted is not None or labels is None:
        return shifted
    return next_labels(labels) if label_of == "next" else labels
