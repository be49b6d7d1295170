"""Functions of scores for test cases, and the same functions of all scores of a sequence at once, for the reference.

The functions of all scores are written from the papers' formulas, without the package under test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_backends import score_mods

NAMES = ("softcap", "alibi", "distance", "parity")
_CAP = 1.5
_DIRECTLY = "donot_use_mm_for_euclid_dist"  # a product of matrices cancels digits


def tiles(batch: int, seq_len: int, num_heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Places of tiles on a slide, fp64 [batch, n, 2], and a slope for each head."""
    generator = torch.Generator().manual_seed(seed + 3)
    coords = 4 * torch.rand(batch, seq_len, 2, generator=generator, dtype=torch.float64)
    return coords, torch.rand(num_heads, generator=generator, dtype=torch.float64)


def score_function(name: str, batch: int, seq_len: int, num_heads: int, seed: int, device: str = "cpu") -> Any:
    """A score_mod of the package, or one that a user would write."""
    if name == "softcap":
        return score_mods.softcap(_CAP)
    if name == "alibi":
        return score_mods.alibi(num_heads, device=device)
    if name == "distance":
        return score_mods.distance(*(x.to(device) for x in tiles(batch, seq_len, num_heads, seed)))
    assert name == "parity", name
    return see_even_distances


def see_even_distances(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Every other head hides the keys at odd distances. The scores of the others depend on the entry of the batch."""
    is_hidden = (head % 2 == 0) & ((q_idx - kv_idx) % 2 == 1)
    return torch.where(is_hidden, -float("inf"), score * (1 + 0.1 * batch))


def modified_scores(name: str, scores: Tensor, seed: int) -> Tensor:
    """The modified scores of a whole sequence, [batch, heads, n, n]."""
    batch, num_heads, seq_len, _ = scores.shape
    t, u = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    if name == "softcap":
        return torch.tanh(scores / _CAP) * _CAP
    if name == "alibi":
        return scores - _slopes(num_heads).to(scores.dtype)[:, None, None] * (t - u).abs()
    if name == "distance":
        coords, slopes = tiles(batch, seq_len, num_heads, seed)
        return scores - slopes[:, None, None] * torch.cdist(coords, coords, compute_mode=_DIRECTLY)[:, None]
    assert name == "parity", name
    is_hidden = (torch.arange(num_heads) % 2 == 0)[:, None, None] & ((t - u) % 2 == 1)
    return (scores * (1 + 0.1 * torch.arange(batch))[:, None, None, None]).masked_fill(is_hidden, -float("inf"))


def _slopes(num_heads: int) -> Tensor:
    """The slopes of ALiBi, from the recursion in the paper's code."""
    if num_heads & (num_heads - 1) == 0:
        start = 2.0 ** (-8.0 / num_heads)
        return torch.tensor([start ** (i + 1) for i in range(num_heads)])
    lower = 2 ** (num_heads.bit_length() - 1)
    return torch.cat([_slopes(lower), _slopes(2 * lower)[0::2][: num_heads - lower]])
