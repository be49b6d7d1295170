"""Hugging Face models that take whole batches on a ring: every rank of the ring calls the model with the same batch.

Hooks of the model cut the batch into this rank's rows, and compute the loss over the labels of all ranks. So a training
loop for one device stays as it is.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import AdapterUnavailableError
from ring_backends.integrations.describe import describe
from ring_backends.integrations.transformers.attention import check_config, current_step, first_position_of, register
from ring_backends.integrations.transformers.inputs import FOR_FLASH_ATTENTION, IGNORED, next_labels, shard_inputs
from ring_backends.ring.collectives import agree
from ring_backends.ring.pooling import sum_of_ranks
from ring_backends.ring.ring import Ring

try:
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto
except ImportError as error:
    raise AdapterUnavailableError(
        f"transformers cannot be imported ({error}); install it with pip install 'ring-backends[hf]'."
    ) from error

_PREDICT_NEXT = frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_PREDICT_OWN = frozenset(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()) | frozenset(
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()
)
_WITHOUT_HEAD = frozenset(name for name in modeling_auto.MODEL_MAPPING_NAMES.values() if isinstance(name, str))
"""Names of model classes, by what they predict at a token: the next token, something about the token, or nothing."""

_REFUSED = {
    "inputs_embeds": "it is not supported; give input_ids",
    "past_key_values": "key/value caches are not supported by a ring; call the model on whole sequences",
    "encoder_hidden_states": "cross-attention is not supported; use a model without it",
}
"""Arguments of a model that must be absent. Each maps to what the user can do."""

LABELS = frozenset(("labels", "shift_labels"))
_registrations = itertools.count(1)


def use_ring(model: nn.Module, attention: RingDilatedAttention, *, label_smoothing: float = 0.0) -> None:
    """Put a Hugging Face model on the ring of ``attention``, with whole batches as its arguments.

    After this call every rank of a ring calls the model with the same whole batch, as on one device. The ranks share
    the work. ``loss`` of the result is the mean over all labels of the batch, the same on every rank; an argument
    ``num_items_in_batch`` replaces the number of labels. All other results, such as ``logits``, are this rank's rows;
    ``ring.unshard(logits, seq_len=…)`` makes them whole. Averaged over all ranks, as by DistributedDataParallel, FSDP2
    and DeepSpeed, the gradients are those of one device.

    Args:
        model: a causal or masked language model, a token classifier, or a model without a head; also within a
            ``PeftModel``. Call this function before the model is wrapped or compiled.
        attention: a RingDilatedAttention of any adapter. Every layer gets a copy.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.

    Raises:
        TypeError: ``model`` is not such a model, or ``attention`` is not a RingDilatedAttention.
        ValueError: the model has a part that is not supported by a ring, or is on a ring already. Its forward raises
            ValueError for arguments that are not supported, and RingMismatchError if the batches of the ranks differ.
    """
    inner = inner_model(model)
    for hook in model._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), _ShardedForward):
            raise ValueError(f"model = {type(inner).__name__}: is on a ring already; call this once for each model.")
    check_config(inner.config)
    name = f"ring_dilated_{next(_registrations)}"
    register(attention, name)
    sharded = _ShardedForward(inner, attention.ring, name, label_smoothing)
    inner.set_attn_implementation(name)
    sharded.check_implementation("it has an attention of its own; use a model of transformers' attention interface")
    model.register_forward_pre_hook(sharded.before, with_kwargs=True)
    model.register_forward_hook(sharded.after, with_kwargs=True)


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
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("model has virtual tokens (prompt learning): not supported by a ring; use LoRA instead.")
    return inner


class _ShardedForward:
    """The hooks of one model: ``before`` cuts its arguments, and ``after`` adds the loss to its result."""

    def __init__(self, inner: Any, ring: Ring, attn_implementation: str, label_smoothing: float) -> None:
        self.predicts_next = predicts_next(inner)
        self.predicts = self.predicts_next or bool(_class_names(inner) & _PREDICT_OWN)
        is_known = self.predicts or bool(_class_names(inner) & _WITHOUT_HEAD)
        if not is_known or getattr(inner, "pooler", None) is not None:
            raise ValueError(
                f"model = {type(inner).__name__}: its head may pool rows, of which each rank has only a part; use the "
                "model without a head (add_pooling_layer=False), and pool its rows with ring.pool()."
            )
        self.inner, self.ring, self.attn_implementation = inner, ring, attn_implementation
        self.label_smoothing = label_smoothing
        self.models = [module for module in inner.modules() if isinstance(module, PreTrainedModel)]
        self.names = [*inspect.signature(inner.forward).parameters]
        self.first_position = first_position_of(inner.config)
        self.labels: Tensor | None = None  # of the call that has begun
        self.count: Any = None

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
        self.labels = None
        if current_step.get() is not None:  # generate() cuts the prompt itself
            return args, kwargs
        batch = {name: value for name, value in self._by_name(args, kwargs) if value is not None}
        with self.ring.report_refusals():
            self._check(batch)
        if self.ring.size > 1:
            agree(self.ring, "the batch of a model", {name: describe(value) for name, value in batch.items()})
        num_items, labels = batch.pop("num_items_in_batch", None), labels_of_rows(batch, self.predicts_next)
        if labels is not None:
            self.labels = self.ring.shard(labels)
            self.count = (labels != IGNORED).sum() if num_items is None else num_items
        batch = {name: value for name, value in batch.items() if name not in LABELS}
        if "use_cache" in self.names:
            batch["use_cache"] = False
        whole = {name for name, value in batch.items() if isinstance(value, Tensor) or name in FOR_FLASH_ATTENTION}
        options = {name: batch.pop(name) for name in batch.keys() - whole}
        return (), {**options, **shard_inputs(self.ring, first_position=self.first_position, **batch)}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Add the loss of the whole batch."""
        if self.labels is None:
            return outputs
        logits, labels, self.labels = outputs["logits"], self.labels, None
        own_sum = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
            labels.to(logits.device).flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return type(outputs)(**{"loss": sum_of_ranks(self.ring, own_sum) / self.count, **outputs})

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from zip(self.names, args, strict=False)
        yield from kwargs.items()

    def _check(self, batch: Mapping[str, Any]) -> None:
        self.check_implementation("do not change it after use_ring()")
        for name, instead in _REFUSED.items():
            if name in batch:
                raise ValueError(f"{name} is given: {instead}.")
        if not isinstance(batch.get("input_ids"), Tensor):
            raise ValueError("input_ids is not given: a ring cuts the batch by its tokens; give input_ids.")
        for name, expected in {"use_cache": False, "logits_to_keep": 0, "return_dict": True}.items():
            if batch.get(name, expected) != expected:
                raise ValueError(f"{name} = {batch[name]}: not supported by a ring; leave it out. generate() sets it.")
        has_router_loss = batch.get("output_router_logits", getattr(self.inner.config, "output_router_logits", False))
        if has_router_loss:
            raise ValueError("output_router_logits = True: the loss of routers is not supported; set it to False.")
        shape = batch["input_ids"].shape
        for name in LABELS & batch.keys():
            if batch[name].shape != shape:
                raise ValueError(f"{name} is {[*batch[name].shape]}: expected {[*shape]}, as input_ids.")
            if not self.predicts:
                raise ValueError(f"{name} is given: {type(self.inner).__name__} has no loss; leave it out.")
        if self.first_position and "position_ids" not in batch:
            self._check_padding(batch["input_ids"])

    def _check_padding(self, input_ids: Tensor) -> None:
        """These models count positions from the first token that is no padding."""
        is_padding = input_ids == self.inner.config.pad_token_id
        if bool((is_padding[:, :-1] & ~is_padding[:, 1:]).any()):
            raise ValueError(
                f"input_ids has padding before a token: {self.inner.config.model_type} does not count its positions; "
                "pad on the right (padding_side='right')."
            )


def predicts_next(inner: Any) -> bool:
    """Whether the label of a row is the next token."""
    return bool(_class_names(inner) & _PREDICT_NEXT)


def _class_names(model: Any) -> set[str]:
    return {base.__name__ for base in type(model).__mro__}


def labels_of_rows(batch: Mapping[str, Any], predicts_next: bool) -> Tensor | None:
    """The label of each row of a whole batch; None if the batch has no labels."""
    shifted: Tensor | None = batch.get("shift_labels")
    labels: Tensor | None = batch.get("labels")
    if shifted is not None or labels is None:
        return shifted
    return next_labels(labels) if predicts_next else labels
