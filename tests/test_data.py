"""Training data and seeds: ranks of a ring share documents, rings do not, and every run is equal."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ring_backends import dilated_attention
from ring_backends.data import document_ids, rank_seed, ring_sampler
from ring_backends.ring.ring import Ring


def rings(data_size: int, ring_size: int) -> list[list[Ring]]:
    """The ring objects of all ranks, indexed by data rank and ring rank. Consecutive ranks form a ring."""
    places = [range(first, first + ring_size) for first in range(0, data_size * ring_size, ring_size)]
    return [
        [Ring(ring_size, rank, data_size, data_rank, tuple(ranks)) for rank in range(ring_size)]
        for data_rank, ranks in enumerate(places)
    ]


def documents(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def drawn(ring: Ring, count: int, epoch: int = 0, **options: object) -> list[int]:
    sampler = ring_sampler(documents(count), ring, **options)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(("data_size", "ring_size"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_ring_shares_its_documents_and_all_rings_cover_them(data_size: int, ring_size: int) -> None:
    by_ring = []
    for ring in rings(data_size, ring_size):
        first, *others = (drawn(rank, 24, seed=5) for rank in ring)
        assert all(other == first for other in others)
        by_ring.append(first)
    assert sorted(itertools.chain(*by_ring)) == list(range(24))


def test_an_uneven_number_of_documents_is_padded_or_cut() -> None:
    ((first, *_), (second, *_)) = rings(2, 2)
    padded = drawn(first, 7, seed=1), drawn(second, 7, seed=1)
    assert [len(part) for part in padded] == [4, 4]
    assert set(itertools.chain(*padded)) == set(range(7))
    cut = drawn(first, 7, drop_last=True), drawn(second, 7, drop_last=True)
    assert [len(part) for part in cut] == [3, 3]
    assert len(set(itertools.chain(*cut))) == 6


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    ring = rings(2, 2)[1][0]
    torch.manual_seed(1)
    before = drawn(ring, 40, seed=3)
    torch.manual_seed(2)
    assert drawn(ring, 40, seed=3) == before
    assert drawn(ring, 40, seed=4) != before
    assert drawn(ring, 40, epoch=1, seed=3) != before
    assert drawn(ring, 6, shuffle=False) == [1, 3, 5]


def test_a_loader_gives_every_rank_its_shard_of_the_document() -> None:
    dataset = TensorDataset(torch.arange(4 * 10).view(4, 10))
    seen: dict[int, list[Tensor]] = {}
    for ring in rings(2, 2):
        for rank in ring:
            for (document,) in DataLoader(dataset, batch_size=1, sampler=ring_sampler(dataset, rank)):
                seen.setdefault(int(document[0, 0]), []).append(rank.shard(document, dim=1))
    assert sorted(seen) == [0, 10, 20, 30]
    for start, shards in seen.items():
        assert torch.cat(shards, dim=1).tolist() == [list(range(start, start + 10))]


def test_rank_seeds_differ_and_are_reproducible() -> None:
    every = [rank for ring in rings(4, 8) for rank in ring]
    seeds = {(seed, rank.data_rank, rank.rank): rank_seed(seed, rank) for seed in range(-2, 20) for rank in every}
    assert len(set(seeds.values())) == len(seeds)
    assert len({seed % 2**32 for seed in seeds.values()}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert rank_seed(0, Ring()) == 300471914551172981
    draws = {tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds.values()}
    assert len(draws) == len(seeds)


def test_a_seed_is_an_int() -> None:
    with pytest.raises(TypeError, match=r"seed = 1\.5: expected an int"):
        rank_seed(1.5, Ring())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cu_seqlens", "expected"),
    [
        ([0, 3, 5], [0, 0, 0, 1, 1, -1]),
        ([0, 2, 2, 6], [0, 0, 2, 2, 2, 2]),
        ([0], [-1] * 6),
        (torch.tensor([0, 6], dtype=torch.int32), [0] * 6),
    ],
)
def test_documents_are_numbered(cu_seqlens: Tensor | list[int], expected: list[int]) -> None:
    ids = document_ids(cu_seqlens, 6)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [expected]


@pytest.mark.parametrize(
    "cu_seqlens", [[1, 3], [0, 4, 3], [0, 7], [], [0.0, 3.0], torch.zeros(2, 2).int(), None, ["a"], [[0], [1]], 5]
)
def test_invalid_cu_seqlens_are_refused(cu_seqlens: Tensor | list[int]) -> None:
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        document_ids(cu_seqlens, 6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_packed_document_has_the_results_of_a_single_one(is_causal: bool) -> None:
    """If documents start at multiples of the segment lengths, each has the same pattern as it has alone."""
    lengths = (24, 40, 9)
    query, key, value = torch.randn(3, 1, 80, 4, 8, dtype=torch.float64)
    ids = torch.full((1, 80), -1)
    starts = (0, 24, 64)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        ids[:, start : start + length] = number
    options = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "is_causal": is_causal}
    packed = dilated_attention(query, key, value, **options, document_ids=ids)
    for start, length in zip(starts, lengths, strict=True):
        rows = slice(start, start + length)
        alone = dilated_attention(query[:, rows], key[:, rows], value[:, rows], **options)
        torch.testing.assert_close(packed[:, rows], alone, rtol=0, atol=1e-12)
    assert not packed[:, 73:].any()
