"""Ready-made functions from papers for the argument ``score_mod`` of an attention.

Each returns a function (score, batch, head, q_idx, kv_idx) -> score, which also works with
``torch.nn.attention.flex_attention``. Positions are those of the whole sequence, so a ring of any size and layout gives
the same result. Tensor arguments must be the same on every rank, on the device of the query, and without a gradient.
Attention computes the scores block by block, so no memory grows with the square of the sequence.

>>> import torch
>>> from ring_backends import dilated_attention, score_mods
>>> x = torch.randn(1, 100, 4, 16)
>>> out = dilated_attention(x, x, x, [50], [1], score_mod=score_mods.softcap(20.0))
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from ring_backends.kernels.score_mod import ScoreMod, with_variants
from ring_backends.schedule.checks import check_integer

__all__ = ["alibi", "alibi_slopes", "distance", "relative", "softcap"]


def softcap(cap: float) -> ScoreMod:
    """Limit scores softly to −cap … cap, as Gemma 2 does (arXiv 2408.00118): cap · tanh(score / cap).

    Args:
        cap: the limit, above 0.

    Raises:
        ValueError, TypeError: ``cap`` is invalid.
    """
    if not isinstance(cap, (int, float)) or isinstance(cap, bool):
        raise TypeError(f"cap = {cap!r}: expected a number; convert it with float().")
    if not 0 < cap < math.inf:
        raise ValueError(f"cap = {cap}: must be above 0 and finite; leave score_mod out for no cap.")

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    def in_place(score: Tensor, *pair: Tensor) -> Tensor:
        return score.div_(cap).tanh_().mul_(cap)

    def with_slope(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        ratio = score.div_(cap).tanh_()
        slope = torch.addcmul(torch.ones((), dtype=ratio.dtype, device=ratio.device), ratio, ratio, value=-1)
        return ratio.mul_(cap), slope

    return with_variants(score_mod, in_place, with_slope)


def alibi(num_heads: int, *, device: torch.device | str | None = None) -> ScoreMod:
    """Subtract the distance of query and key, times a slope for each head (ALiBi, arXiv 2108.12409).

    The slopes are those of :func:`alibi_slopes`. In attention that is not causal, the distance has no sign, as in
    Long-MIL (arXiv 2311.12885).

    Args:
        num_heads: number of query heads.
        device: device of the queries; None means torch's default.
    """
    slopes = alibi_slopes(num_heads, device=device)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[head] * (q_idx - kv_idx).abs().to(score.dtype)

    return score_mod


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the slope of each head in ALiBi (arXiv 2108.12409) and TITAN (arXiv 2411.19666): fp32 [num_heads].

    The slopes are those of the paper: 2^(−8 · 1/H), 2^(−8 · 2/H), … for a number of heads H that is a power of two. For
    another number, they are the slopes of the next lower power of two, and then every other slope of the next higher
    one, as in BLOOM.

    Args:
        num_heads: number of query heads.
        device: device of the queries; None means torch's default.
    """
    check_integer("num_heads", num_heads, 1)
    power = 1 << (num_heads.bit_length() - 1)
    lower, higher = ([2 ** (-8 * (i + 1) / size) for i in range(size)] for size in (power, 2 * power))
    return torch.tensor((lower + higher[::2])[:num_heads], dtype=torch.float32, device=device)


def distance(coords: Tensor, slopes: Tensor) -> ScoreMod:
    """Subtract a multiple of the Euclidean distance of two tiles on a slide (TITAN, arXiv 2411.19666).

    Args:
        coords: fp32, fp64 or integers [batch, n, 2], the place of each tile of the whole sequence, on every rank. bf16
            and fp16 would round pixels.
        slopes: fp32 or fp64 [heads], the factor of each query head; for example those of :func:`alibi_slopes`, divided
            by the distance of neighbouring tiles.

    Raises:
        ValueError, TypeError: a tensor has another shape or dtype, or requires a gradient.
    """
    _check_tensor("coords", coords, "[batch, n, 2]", _PRECISE, width=2, integers=True)
    _check_tensor("slopes", slopes, "[heads]", _PRECISE)
    # Differences of int64 are exact. Those of unsigned integers would wrap around.
    first, second = (coords if coords.is_floating_point() else coords.long()).unbind(2)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        across = first[batch, q_idx] - first[batch, kv_idx]
        down = second[batch, q_idx] - second[batch, kv_idx]
        return score - slopes[head] * torch.hypot(across.to(score.dtype), down.to(score.dtype))

    return score_mod


def relative(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Add a number that depends on the head and on the relative position, as T5 does (arXiv 1910.10683).

    In each direction, half of the buckets hold one distance each, and the others hold ranges of distances that grow up
    to ``max_distance``. T5 does not scale its scores, so give its attention ``scale=1.0``.

    Args:
        table: fp32, fp64, bf16 or fp16 [buckets, heads], ``relative_attention_bias.weight.detach()`` of a model. It is
            read now: later changes of the weight have no effect.
        bidirectional: whether keys after the query have buckets of their own, as in T5's encoder. In its decoder, which
            is causal, all buckets are for keys before the query.
        max_distance: from this distance on, in tokens, all keys are in one bucket.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    _check_tensor("table", table, "[buckets, heads]", _FLOATING)
    check_integer("max_distance", max_distance, 1)
    per_direction = table.shape[0] // 2 if bidirectional else table.shape[0]
    single = per_direction // 2
    if single < 1 or max_distance <= single:
        raise ValueError(
            f"table has {table.shape[0]} buckets with max_distance = {max_distance}: each direction needs at least 2 "
            f"buckets, and max_distance must be above the {single} single distances."
        )
    # The bias of each relative position from −max_distance to max_distance. Beyond them it does not change.
    positions = torch.arange(-max_distance, max_distance + 1, device=table.device)
    behind = positions.abs() if bidirectional else (-positions).clamp(min=0)
    # In fp32, as in T5: in fp64, a distance at the end of a range could fall into another bucket.
    ratio = torch.log(behind.clamp(min=1).float() / single) / math.log(max_distance / single)
    ranges = (single + (ratio * (per_direction - single)).to(torch.int64)).clamp(max=per_direction - 1)
    buckets = torch.where(behind < single, behind, ranges)
    if bidirectional:
        buckets = buckets + per_direction * (positions > 0)
    biases = table[buckets].T.contiguous()

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + biases[head, (kv_idx - q_idx).clamp(-max_distance, max_distance) + max_distance]

    return score_mod


_PRECISE = torch.float32, torch.float64
_FLOATING = *_PRECISE, torch.bfloat16, torch.float16


def _check_tensor(
    name: str,
    tensor: object,
    shape: str,
    dtypes: Collection[torch.dtype],
    width: int | None = None,
    integers: bool = False,
) -> None:
    """Check an argument's shape, whose last dimension has the size ``width``, and its dtype.

    Args:
        dtypes: the floating-point dtypes that it may have.
        integers: whether it may hold integers.
    """
    wanted = " or ".join([*(str(dtype) for dtype in dtypes), *["integers"] * integers])
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} = {tensor!r}: expected a tensor {shape} of {wanted}.")
    has_shape = tensor.dim() == shape.count(",") + 1 and width in (None, *tensor.shape[-1:])
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not has_shape or not (tensor.dtype in dtypes or (integers and is_integer)):
        way_out = "reshape it"
        if has_shape:
            rounds = tensor.is_floating_point() and dtypes is _PRECISE
            way_out = "make it in that dtype, since this one rounds it" if rounds else "convert it with .to()"
        raise ValueError(f"{name} is {tensor.dtype} {[*tensor.shape]}: expected {shape} of {wanted}; {way_out}.")
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, which is not computed: pass {name}.detach().")
