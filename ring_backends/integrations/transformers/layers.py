"""What one layer of a model computes: which keys a query sees, read from the model's mask, and how it scores them.

Most models of transformers pass the same few masks and options to all their attentions: causal or not, windows
(Mistral), chunks (Llama 4), a scale of their own, soft caps of scores (Gemma 2) and sinks (gpt-oss). A ring computes
these as the model configures them, layer by layer. It refuses other masks and options by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from ring_backends.kernels.score_mod import closure_of
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.score_mods import softcap

MaskFunction = Callable[..., Any]
"""A mask of transformers: (batch, head, q_idx, kv_idx) -> bool."""

_REFUSED = {
    "position_bias": "biases of scores are not supported; use a model with rotary or learned positions",
    "sinks": "only sinks of one score per head are supported, as those of gpt-oss; use a model without them",
    "head_mask": "masking heads is not supported; prune them instead",
    "indices": "attention to selected keys is not supported; use a model of full attention",
    "block_indices": "attention to selected blocks is not supported; use a model of full attention",
}
"""Options of a layer that are not supported. Each maps to what the user can do."""

ANY_LENGTH = 2**31
"""More tokens than any sequence has: a chunk of this length is the whole sequence."""

FULL_ATTENTION = DilatedPattern((None,), (1,))

_OTHER_MASK = (
    "the model requests a mask that is none of these: causal, bidirectional, sliding windows and chunks. Custom masks "
    "are not supported. If position_ids are not consecutive, as in packed sequences or with a zigzag layout, call the "
    "model with shard_inputs(ring, …), which passes an attention_mask."
)


@dataclass(frozen=True)
class RingMask:
    """The mask that a model passes to its layers. It is not a tensor, so no other attention can use it by mistake.

    Attributes:
        padding: bool [batch, rows], False where a token is padding; None without padding.
        is_causal: whether a query sees only keys at or before its own position.
        window: a query sees only keys that are less than this many tokens away; None without a window.
        chunk: the length of the chunks, in tokens, beyond which a query does not see; None without chunks.
        refusal: why the layer cannot have this mask; None if it can. A model may make masks that no layer uses.
        arguments: those of the model that the layer withholds from its attention.
    """

    padding: Tensor | None
    is_causal: bool
    window: int | None = None
    chunk: int | None = None
    refusal: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)


_BOTH = and_masks(causal_mask_function).__code__
_EITHER = or_masks(causal_mask_function).__code__
_WINDOW = sliding_window_overlay(1).__code__
_TWO_SIDED_WINDOW = sliding_window_bidirectional_overlay(1).__code__
_CHUNK = chunked_overlay(1, torch.zeros(1)).__code__
"""The code of the functions of which transformers makes masks."""


def _window_of_gemma(sliding_window: int) -> MaskFunction:
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


def _computation(code: CodeType) -> tuple[object, ...]:
    """What a function computes, wherever its source lies."""
    constants = tuple(value for value in code.co_consts if not (value is None or isinstance(value, str)))
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


_WINDOW_OF_GEMMA = _computation(_window_of_gemma(1).__code__)
_EVERYTHING = _computation((lambda *args: torch.tensor(True, dtype=torch.bool)).__code__)
"""What functions compute that models such as Gemma 3 write themselves, each for its own module."""


class _Reach(NamedTuple):
    """Which keys a query sees: as many before and after its own position, itself not counted, within its chunk."""

    before: float
    after: float
    chunk: int | None = None


def read_mask(function: MaskFunction, padding: Tensor | None) -> RingMask:
    """Recognise a mask of transformers by its code. Any other has a refusal."""
    if function in (causal_mask_function, bidirectional_mask_function):
        return RingMask(padding, function is causal_mask_function)
    return cast(RingMask, _read_overlays(function, padding))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_overlays(function: MaskFunction, padding: Tensor | None) -> RingMask:
    reach = _reach_of(function)
    if reach is None or reach.after not in (0, reach.before):
        return RingMask(padding, is_causal=False, refusal=_OTHER_MASK)
    window = None if math.isinf(reach.before) else int(reach.before) + 1
    return RingMask(padding, reach.after == 0, window, reach.chunk)


def _reach_of(function: MaskFunction) -> _Reach | None:
    """The reach of a mask; None if a mask is not one reach."""
    if function is causal_mask_function:
        return _Reach(math.inf, 0)
    if function is bidirectional_mask_function:
        return _Reach(math.inf, math.inf)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    held = closure_of(function)
    if code in (_BOTH, _EITHER):
        parts = [_reach_of(part) for part in held["mask_functions"]]
        return _joined([part for part in parts if part is not None], code == _BOTH) if all(parts) else None
    if code == _WINDOW:
        return _Reach(held["sliding_window"] - 1, math.inf)
    if code == _TWO_SIDED_WINDOW:
        return _Reach(held["sliding_window"], held["sliding_window"])
    if code == _CHUNK:
        return _Reach(math.inf, math.inf, held["chunk_size"])
    if _computation(code) == _WINDOW_OF_GEMMA:
        return _Reach(held["sliding_window"] - 1, held["sliding_window"] - 1)
    return _Reach(math.inf, math.inf) if _computation(code) == _EVERYTHING else None


def _joined(parts: list[_Reach], is_intersection: bool) -> _Reach | None:
    """The intersection or the union. Every query sees itself, so that the union has no gap."""
    chunks = {part.chunk for part in parts if part.chunk is not None}
    if len(chunks) > 1 or (chunks and not is_intersection):
        return None
    before, after, _ = zip(*parts, strict=True)
    choose = min if is_intersection else max
    return _Reach(choose(before), choose(after), next(iter(chunks), None))


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
        is_causal, window, chunk: as in :class:`RingMask`.
        scale: factor on the scores; None for 1 / sqrt(head_dim).
        softcap: the cap of the scores; None without.
        sinks: floating point [heads], the score of one more key; None without.
    """

    is_causal: bool
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def pattern(self) -> DilatedPattern | None:
        """The layer's own pattern, if it is not full attention."""
        if self.window is None and self.chunk is None:
            return None
        return DilatedPattern((self.chunk,), (1,), window_lengths=(self.window,))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the attention."""
        return {"sinks": self.sinks, "score_mod": None if self.softcap is None else softcap(self.softcap)}

    def __str__(self) -> str:
        parts = ["causal" if self.is_causal else "bidirectional"]
        parts.append("full attention" if self.pattern is None else "")
        parts.append("" if self.window is None else f"window of {self.window} tokens")
        parts.append("" if self.chunk is None else f"chunks of {self.chunk} tokens")
        parts.append("" if self.scale is None else f"scale {self.scale:g}")
        parts.append("" if self.softcap is None else f"soft cap {self.softcap:g}")
        parts.append("" if self.sinks is None else "sinks")
        return ", ".join(part for part in parts if part)


def read_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: RingMask,
    scaling: float | None,
    scale: float | None,
    options: Mapping[str, Any],
) -> LayerAttention:
    """Read the attention of a layer from the arguments of its call.

    Args:
        query, key: [batch, heads, rows, head_dim].
        scaling: factor on the scores; None for 1 / sqrt(head_dim).
        scale: that of the registered attention; None if it has none of its own.
        options: what else the layer passes.

    Raises:
        ValueError: an option is not supported, or ``scaling`` and ``scale`` differ.
    """
    if options.get("output_attentions"):
        raise ValueError("output_attentions = True: a ring has no matrix of attention weights; leave it out.")
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} is given: {instead}.")
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_keys != num_queries:
        raise ValueError(
            f"key has {num_keys} rows and query {num_queries}: key/value caches and cross-attention are not "
            "supported by a ring; call the model on whole sequences, with use_cache=False."
        )
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ValueError(f"{type(module).__name__}: cross-attention is not supported; use a model without it.")
    if options.get("sliding_window") is not None and mask.window is None:
        raise ValueError(
            f"sliding_window = {options['sliding_window']}: {type(module).__name__} has a window, and its mask has "
            "none; which of them it means is unknown. Set sliding_window to None in the configuration."
        )
    default = query.shape[-1] ** -0.5
    wanted = default if scaling is None else scaling
    if scale is not None and abs(wanted - scale) > 1e-9 * abs(scale):
        default_of = " (the default of the layer)" if scaling is None else ""
        raise ValueError(
            f"scaling = {wanted}{default_of}: the attention has scale = {scale}; make it without a scale, and every "
            "layer has its own."
        )
    own_scale = None if scale is not None or abs(wanted - default) <= 1e-9 * default else wanted
    scores = options.get("softcap"), options.get("s_aux")
    return LayerAttention(mask.is_causal, mask.window, mask.chunk, own_scale, *scores)


def documents_of_chunks(
    chunk: int,
    documents: Tensor | None,
    row_numbers: Tensor | None,
    leading_padding: Tensor | None,
    seq_len: int | None,
) -> Tensor:
    """The numbers of the chunks, where these do not begin with the sequence: int64 [batch, rows].

    The chunks of a packed document begin with it, and those of a sequence begin after its leading padding.

    Args:
        documents: int [batch, rows], the number of each row's document; negative without a document.
        row_numbers: int [batch, rows], the number of each row in its document, from 0 on.
        leading_padding: int [batch], the number of rows before the first token.
        seq_len: length of the whole sequence.
    """
    if row_numbers is None or seq_len is None:
        raise ValueError(
            "row_numbers are not given: the layers have chunks, which begin with each packed document and after "
            "padding; call the model with shard_inputs(ring, …)."
        )
    if documents is None:
        assert leading_padding is not None
        row_numbers = row_numbers - leading_padding[:, None]
        documents = torch.where(row_numbers < 0, -1, 0)
    numbers = documents.long() * (seq_len // chunk + 1) + row_numbers // chunk
    return torch.where(documents < 0, -1, numbers)


def with_temperatures(module: nn.Module, query: Tensor, row_numbers: Tensor | None) -> Tensor:
    """The query with the temperatures of its own positions, in those layers of Llama 4 that have temperatures.

    The model numbers the rows that it gets from 0 on, which on a ring are those of one rank.

    Args:
        query: [batch, heads, rows, head_dim].
        row_numbers: int [batch, rows], the number of each row in its document; None if the model has numbered them.
    """
    layer: Any = module
    has_temperatures = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    if row_numbers is None or not has_temperatures:
        return query

    def temperatures(numbers: Tensor) -> Tensor:
        logs = torch.log1p(torch.floor((numbers.float() + 1) / layer.floor_scale))
        return logs * float(layer.attn_scale) + 1

    numbers = torch.arange(query.shape[2], device=query.device)
    factors = temperatures(row_numbers) / temperatures(numbers)
    return (query * factors[:, None, :, None]).to(query.dtype)
