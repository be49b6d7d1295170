"""Compares the arguments in docs/patterns.md with the masks of the papers and models that the page names.

Every row of the page's first table is evaluated with small numbers. :func:`shown` computes how often each query sees
each key. The masks are written from the formulas of the papers, without the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from command_line import ROOT
from torch import Tensor

from ring_backends import dilated_attention

PAGE = ROOT / "docs" / "patterns.md"
SEQ_LEN, HEADS = 46, 8
LENGTHS, RATES = [8, 16, 46], [1, 4, 6]
w, d, stride, W, S, C, k, left = 8, 3, 6, 7, 5, 12, 7, 4
SIZES = {"w": w, "d": d, "l": stride, "W": W, "S": S, "C": C, "k": k, "left": left}

query, key = torch.arange(SEQ_LEN)[:, None], torch.arange(SEQ_LEN)


class Row(NamedTuple):
    arguments: str
    causal: str


def rows() -> dict[str, Row]:
    """The rows of the first table of the page, by their first column."""
    table = PAGE.read_text(encoding="utf-8").partition("|---|")[2].partition("\n\n")[0]
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:])
    return {
        name.strip("| ").replace("`", ""): Row(arguments.strip("`"), causal) for name, arguments, causal, _ in cells
    }


def shown(arguments: str, *, is_causal: bool) -> Tensor:
    """How often each query sees each key: int64 [heads, queries, keys].

    All scores are 0, so the weight of a key is its count divided by the sum of all counts, exp(LSE).
    """
    zeros = torch.zeros(1, SEQ_LEN, HEADS, SEQ_LEN, dtype=torch.float64)
    value = torch.eye(SEQ_LEN, dtype=torch.float64)[None, :, None].expand_as(zeros)

    def call(*branches: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return dilated_attention(zeros, zeros, value, *branches, is_causal=is_causal, return_lse=True, **options)

    out, lse = eval(f"call({arguments})", {"call": call, "lengths": LENGTHS, "rates": RATES, **SIZES})
    return (out[0].transpose(0, 1) * lse[0].exp().unsqueeze(2)).round().long()


def torchscale_counts(is_causal: bool) -> Tensor:
    """Counts from torchscale's steps: pad each segment, cut the heads into blocks, take row i of r rows for block i."""
    counts = torch.zeros(HEADS, SEQ_LEN, SEQ_LEN, dtype=torch.int64)
    for (length, rate), head in itertools.product(zip(LENGTHS, RATES, strict=True), range(HEADS)):
        heads_of_block = -(-HEADS // rate)
        for start in range(0, SEQ_LEN, length):
            rows_of_head = range(start + head // heads_of_block, min(start + length, SEQ_LEN), rate)
            for t, u in itertools.product(rows_of_head, repeat=2):
                counts[head, t, u] += u <= t or not is_causal
    return counts


def longnet_counts(is_causal: bool) -> Tensor:
    """Counts from section 3 of LongNet: in each segment, head j takes the rows j mod r, j mod r + r, …"""
    counts = torch.zeros(HEADS, SEQ_LEN, SEQ_LEN, dtype=torch.int64)
    for (length, rate), head in itertools.product(zip(LENGTHS, RATES, strict=True), range(HEADS)):
        for positions in torch.arange(SEQ_LEN).split(length):
            chosen = positions[head % rate :: rate]
            counts[head, chosen[:, None], chosen] += 1
    return counts.tril() if is_causal else counts


def neighbours(is_causal: bool) -> Tensor:
    """NATTEN's 1-D mask: k neighbours of the query's own residue modulo d. At the ends, the window moves inwards."""
    mask = torch.zeros(SEQ_LEN, SEQ_LEN, dtype=torch.bool)
    for t in range(SEQ_LEN):
        group = list(range(t % d, SEQ_LEN, d))
        place = group.index(t)
        first = max(0, place - k + 1) if is_causal else min(max(place - k // 2, 0), len(group) - k)
        mask[t, group[first : place + 1 if is_causal else first + k]] = True
    return mask


def per_head(*masks: Tensor) -> Tensor:
    """One mask for each group of heads: [heads, queries, keys]."""
    return torch.stack([mask for mask in masks for _ in range(HEADS // len(masks))])


CAUSAL = query >= key
LOCAL, DILATED = (query - key).abs() <= w // 2, ((query - key).abs() <= d * (w // 2)) & ((query - key) % d == 0)
SLIDING = CAUSAL & (key > query - W)
STRIDED_LOCAL, STRIDED = CAUSAL & (key >= query - stride), CAUSAL & ((query - key) % stride == 0)

MASKS: dict[str, Callable[[bool], Tensor]] = {
    "full attention": lambda is_causal: CAUSAL if is_causal else torch.ones_like(CAUSAL),
    "LongNet": longnet_counts,
    "torchscale, GigaPath": torchscale_counts,
    "Longformer": lambda _: LOCAL,
    "Longformer, dilated": lambda _: DILATED,
    "Longformer, dilated, two of eight heads": lambda _: per_head(LOCAL, LOCAL, LOCAL, DILATED),
    "Sparse Transformer, strided": lambda _: per_head(STRIDED_LOCAL, STRIDED),
    "Sparse Transformer, fixed": lambda _: CAUSAL & (query // stride == key // stride),
    **dict.fromkeys(("Mistral", "Gemma 2, Gemma 3", "gpt-oss", "StreamingLLM"), lambda _: SLIDING),
    "ModernBERT": lambda _: (query - key).abs() <= S,
    "Llama 4": lambda _: CAUSAL & (query // C == key // C),
    "BigBird": lambda _: (key >= query - w // 2) & (key <= query + w // 2),
    "dilated neighbourhood attention, 1-D, causal": neighbours,
    "flash-attn, window_size=(left, 0)": lambda _: (key >= query - left) & (key <= query),
    "flash-attn, window_size=(left, left)": lambda _: (key >= query - left) & (key <= query + left),
}
NEIGHBOURS = "dilated neighbourhood attention, 1-D"


def test_every_row_has_a_mask() -> None:
    assert set(rows()) == {*MASKS, NEIGHBOURS}


@pytest.mark.parametrize("name", MASKS)
def test_arguments_show_the_keys_of_the_paper(name: str) -> None:
    row = rows()[name]
    for is_causal in {"either": (False, True), "no": (False,), "yes": (True,)}[row.causal]:
        expected = MASKS[name](is_causal).long().expand(HEADS, -1, -1)
        assert torch.equal(shown(row.arguments, is_causal=is_causal), expected), f"is_causal = {is_causal}"


def test_neighbourhood_attention_differs_at_the_ends() -> None:
    counts, expected = shown(rows()[NEIGHBOURS].arguments, is_causal=False), neighbours(is_causal=False).long()
    border = d * (k // 2)
    is_inside = [border <= t < SEQ_LEN - border for t in range(SEQ_LEN)]
    assert (counts == expected).all(2).tolist() == [is_inside] * HEADS
    assert (counts <= expected).all()


def test_merged_heads_of_sparse_transformers_count_keys_twice() -> None:
    grouped = rows()["Sparse Transformer, strided"].arguments
    merged = grouped.replace('head_mode="grouped", ', "")
    union, twice = (STRIDED_LOCAL | STRIDED).long(), (STRIDED_LOCAL & STRIDED).long()
    assert torch.equal(shown(merged, is_causal=True)[0], union + twice)
    assert twice.nonzero().diff(dim=1).unique().tolist() == [-stride, 0]
    narrower = shown(merged.replace("l + 1", "l"), is_causal=True)[0]
    assert torch.equal(narrower, union + torch.eye(SEQ_LEN, dtype=torch.int64))


TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Mistral", "Gemma 2, Gemma 3", "gpt-oss"), ("sliding_window_causal_mask_function", W)),
    "ModernBERT": ("sliding_window_bidirectional_mask_function", S),
    "Llama 4": ("chunked_causal_mask_function", C, torch.zeros(1, dtype=torch.int64)),
}
"""The mask functions of Transformers, with their arguments."""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_arguments_show_the_keys_of_transformers(name: str) -> None:
    masks = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    row, (function, *arguments), first = rows()[name], TRANSFORMERS[name], torch.zeros((), dtype=torch.int64)
    mask = getattr(masks, function)(*arguments)(first, first, query, key)
    assert torch.equal(shown(row.arguments, is_causal=row.causal == "yes"), mask.long().expand(HEADS, -1, -1))
