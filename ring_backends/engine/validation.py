"""Checks of the arguments of attention. An error names the argument, its value, the rule, and what to do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_SHAPES = dict.fromkeys(("query", "key"), "[batch, seq, heads, head_dim]")
_SHAPES["value"] = "[batch, seq, heads, value_dim]"


def check_tensors(
    query: object, key: object, value: object, key_padding_mask: object, document_ids: object = None
) -> None:
    """Check that the tensors are [batch, local seq, heads, …] and fit each other in shape, dtype and device."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} = {tensor!r}: expected a torch.Tensor of shape {_SHAPES[name]}.")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected {_SHAPES[name]}; split or add dimensions first."
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}: expected fp64, fp32, bf16 or fp16; convert it with .to()."
            )
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and query {query.dtype}: they must be the same; convert one, or "
                "run under autocast."
            )
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}: move them to one device.")
        if tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and query {list(query.shape)}: batch and seq must be the same; "
                "pass query, key and value of the same rows of one sequence."
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key has shape {list(key.shape)} and query {list(query.shape)}: head_dim must be the same; only value may "
            "have another one."
        )
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key has {key.shape[2]} heads and value {value.shape[2]}: the numbers must be the same.")
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}: the number of key/value heads must be at least 1 and "
            "divide the number of query heads; change one of the two."
        )
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[3] < 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: the last dim must be at least 1.")
    if key_padding_mask is not None:
        _check_marks("key_padding_mask", key_padding_mask, query, (torch.bool,), "bool, True for a key to ignore")
    if document_ids is not None:
        _check_marks("document_ids", document_ids, query, (torch.int32, torch.int64), "int32 or int64")


def check_sinks(sinks: object, query: Tensor) -> None:
    """Check that ``sinks`` is a floating-point tensor [heads] on the device of ``query`` [batch, seq, heads, …]."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks = {sinks!r}: expected a tensor [heads], the score of each head's sink, or None.")
    if sinks.dtype not in DTYPES:
        raise ValueError(f"sinks has dtype {sinks.dtype}: expected fp64, fp32, bf16 or fp16; convert it with .to().")
    if sinks.shape != query.shape[2:3]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [heads] = [{query.shape[2]}].")
    if sinks.device != query.device:
        raise ValueError(f"sinks is on {sinks.device} and query on {query.device}: move it to one device.")


def _check_marks(name: str, marks: object, query: Tensor, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    """Refuse anything but a [batch, seq] tensor that fits ``query``."""
    if not isinstance(marks, Tensor):
        raise TypeError(f"{name} = {marks!r}: expected a tensor [batch, seq] of dtype {expected}, or None.")
    if marks.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {marks.dtype}: expected {expected}; convert it with .to({dtypes[-1]}).")
    if marks.shape != query.shape[:2]:
        raise ValueError(f"{name} has shape {list(marks.shape)}: expected [batch, seq] = {list(query.shape[:2])}.")
    if marks.device != query.device:
        raise ValueError(f"{name} is on {marks.device} and query on {query.device}: move it to one device.")


def check_documents(document_ids: Tensor | None, pattern: DilatedPattern) -> None:
    """Refuse documents together with zero padding, since its zero keys belong to no document."""
    if document_ids is not None and pattern.padding == "zeros":
        raise ValueError(
            "document_ids with padding = 'zeros': the zero keys beyond the sequence belong to no document; use "
            "padding='masked'."
        )


def check_layout(local_len: int, seq_len: int | None, ring: Ring) -> SequenceLayout:
    """Return the layout of the sequence. Check that this rank holds ``local_len`` of its rows."""
    if seq_len is None:
        seq_len = local_len * ring.size
        if seq_len < 1:
            raise ValueError(
                "query has no rows and seq_len is not given: the length of the global sequence is unknown; pass "
                "seq_len."
            )
    layout = ring.layout(seq_len)
    if layout.local_len(ring.rank) != local_len:
        raise ValueError(
            f"query has {local_len} rows, but with seq_len = {seq_len} rank {ring.rank} of a {layout.kind} ring of "
            f"{ring.size} holds {layout.local_len(ring.rank)}; cut the sequence with ring.shard, and pass its length "
            "as seq_len."
        )
    return layout


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: expected True or False.")


def check_scale(scale: object) -> float | None:
    """Check that ``scale`` is a finite number, or None for 1 / sqrt(head_dim)."""
    if scale is None:
        return None
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale = {scale!r}: expected a float, or None for 1 / sqrt(head_dim).")
    if not math.isfinite(scale):
        raise ValueError(f"scale = {scale}: must be finite; None gives 1 / sqrt(head_dim).")
    return float(scale)


def check_grad_wire_dtype(dtype: object) -> torch.dtype | None:
    """Check that ``dtype`` is ``torch.bfloat16``, or None for the dtype of the sums."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"grad_wire_dtype = {dtype!r}: expected torch.bfloat16, or None for fp32.")
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"grad_wire_dtype = {dtype}: must be torch.bfloat16, or None for fp32.")
    return dtype


def check_dropout(dropout_p: object) -> float:
    """Check that ``dropout_p`` is at least 0 and below 1."""
    if not isinstance(dropout_p, (int, float)) or isinstance(dropout_p, bool):
        raise TypeError(f"dropout_p = {dropout_p!r}: expected a number, 0 for no dropout; convert it with float().")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {dropout_p}: must be at least 0 and below 1; 0 is no dropout.")
    return float(dropout_p)


def draw_seed(dropout_seed: object, dropout_p: float) -> Tensor | None:
    """Return the seed of one call's dropout, int64 [1]; None without dropout.

    If ``dropout_seed`` is None, the seed is drawn from torch's CPU generator. Activation checkpointing restores that
    generator, so a recomputation draws the same seed.
    """
    if dropout_seed is None:
        if not dropout_p:
            return None
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    seed = check_integer("dropout_seed", dropout_seed, 0, advice="leave it out to draw one")
    if seed >= 2**63:
        raise ValueError(f"dropout_seed = {seed}: must be below 2**63; leave it out to draw one.")
    return torch.tensor([seed], dtype=torch.int64, device="cpu") if dropout_p else None
