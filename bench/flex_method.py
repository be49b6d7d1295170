"""Dilated attention by torch's ``flex_attention``: the pattern as a block mask, and log m for a key seen m times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Branches = Sequence[tuple[int, int]]


def multiplicity(branches: Branches, is_causal: bool, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """How many branches show ``key`` to ``query``: both positions, for ``head`` with offset ``head % rate``."""
    count = torch.zeros_like(query + key)
    for length, rate in branches:
        together = query // length == key // length
        covered = (query % length % rate == head % rate) & (key % length % rate == head % rate)
        count = count + (together & covered).to(count.dtype)
    return count * (key <= query).to(count.dtype) if is_causal else count


def flex_method(
    branches: Branches, num_heads: int, seq_len: int, *, is_causal: bool, device: torch.device, is_compiled: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make a function of query, key and value, [batch, seq, heads, head_dim]. The block mask is made here."""
    shown = partial(multiplicity, tuple(branches), is_causal)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return shown(head, query, key) > 0

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + shown(head, query, key).to(score.dtype).log()

    torch._dynamo.reset()  # each pattern is a function of its own, and dynamo limits how often one is compiled again
    make_mask: Any = torch.compile(create_block_mask) if is_compiled else create_block_mask
    block_mask = make_mask(mask_mod, 1, num_heads, seq_len, seq_len, device=device)
    attend: Any = torch.compile(flex_attention) if is_compiled else flex_attention

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        out: Tensor = attend(*heads, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run
