"""Training data and seeds: ranks of a ring share documents, rings do not, and every run is equal."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_ranks import assert_near
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


def drawn(ring: Ring, count: int, epoch: int = 0, **options: Any) -> list[int]:
    sampler = ring_sampler(TensorDataset(torch.arange(count)), ring, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def same_in_each(of_rings: list[list[Ring]], count: int, **options: Any) -> list[list[int]]:
    """The documents of each ring, after a check that its ranks draw the same."""
    by_rank = [[drawn(rank, count, **options) for rank in ring] for ring in of_rings]
    assert all(other == first for first, *others in by_rank for other in others)
    return [first for first, *_ in by_rank]


@pytest.mark.parametrize(("data_size", "ring_size"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_ring_shares_its_documents_and_all_rings_cover_them(data_size: int, ring_size: int) -> None:
    by_ring = same_in_each(rings(data_size, ring_size), 24, seed=5)
    assert sorted(itertools.chain(*by_ring)) == list(range(24))


def test_an_uneven_number_of_documents_is_padded_or_cut() -> None:
    for is_cut, lengths, documents in ((False, [4, 4], 7), (True, [3, 3], 6)):
        parts = [drawn(ring, 7, seed=1, drop_last=is_cut) for ring, _ in rings(2, 2)]
        assert [len(part) for part in parts] == lengths
        found = set(itertools.chain(*parts))
        assert found <= set(range(7))
        assert len(found) == documents


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    ring = rings(2, 2)[1][0]
    torch.manual_seed(1)
    before = drawn(ring, 40, seed=3)
    torch.manual_seed(2)
    assert drawn(ring, 40, seed=3) == before
    assert drawn(ring, 40, seed=4) != before
    assert drawn(ring, 40, epoch=1, seed=3) != before
    assert drawn(ring, 6, shuffle=False) == [1, 3, 5]


LENGTHS = torch.randint(10, 1000, (203,), generator=torch.Generator().manual_seed(0)) ** 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_rings_work_on_documents_of_similar_length_at_the_same_time(shuffle: bool) -> None:
    """The time of a step is that of its longest document."""
    by_ring = same_in_each(rings(4, 2), 203, shuffle=shuffle, lengths=LENGTHS)
    assert set(itertools.chain(*by_ring)) == set(range(203))
    naive = torch.stack([LENGTHS[drawn(ring, 203, shuffle=shuffle)] for ring, *_ in rings(4, 2)])
    sorted_ = torch.stack([LENGTHS[order] for order in by_ring])
    assert naive.shape == sorted_.shape == (4, 51)
    assert naive.amax(0).sum() > 1.7 * naive.double().mean(0).sum()
    assert sorted_.amax(0).sum() < 1.2 * sorted_.double().mean(0).sum()
    if shuffle:
        assert by_ring[0] != drawn(rings(4, 2)[0][0], 203, epoch=1, lengths=LENGTHS)
        assert len({*sorted_.argmax(0).tolist()}) == 4  # each ring has the longest document at times
        middle = sorted_.amax(0)[1:].diff().sign()
        assert (middle > 0).any()
        assert (middle < 0).any()


@pytest.mark.parametrize("lengths", [None, range(1, 5)])
def test_weights(lengths: object) -> None:
    """Documents come as often as their weights say, and different rings draw different ones."""
    counts = torch.zeros(4)
    for epoch in range(1500):
        by_ring = [drawn(ring, 4, epoch=epoch, weights=[1, 0, 2, 5], lengths=lengths) for ring, *_ in rings(2, 2)]
        counts += torch.bincount(torch.tensor(by_ring).flatten(), minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / counts.sum(), torch.tensor([1, 0, 2, 5]) / 8, rtol=0, atol=0.03)
    of_ring = [drawn(rank, 40, weights=[1.0] * 40) for rank in rings(2, 2)[1]]
    assert of_ring[0] == of_ring[1] != drawn(rings(2, 2)[0][0], 40, weights=[1.0] * 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1, 2]}, r"lengths is \[2\]: expected one element per document, \[3\]"),
        ({"lengths": [1, -2, 4]}, "lengths has values from -2 to 4: expected numbers from 0"),
        ({"weights": [0, 0, 0]}, "weights has values from 0 to 0: expected numbers from 0, not all 0"),
        ({"weights": [1, float("nan"), 0]}, "weights has values from nan to nan"),
        ({"weights": [1, 1, 1], "shuffle": False}, "weights with shuffle = False: weighted documents are drawn at"),
    ],
)
def test_invalid_lengths_and_weights(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(Ring(), 3, **options)


def test_a_loader_gives_every_rank_its_shard_of_the_document() -> None:
    dataset = TensorDataset(torch.arange(4 * 10).view(4, 10))
    seen: dict[int, list[Tensor]] = {}
    for rank in itertools.chain(*rings(2, 2)):
        for (document,) in DataLoader(dataset, batch_size=1, sampler=ring_sampler(dataset, rank)):
            seen.setdefault(int(document[0, 0]), []).append(rank.shard(document, dim=1))
    assert sorted(seen) == [0, 10, 20, 30]
    for start, shards in seen.items():
        assert torch.cat(shards, dim=1).tolist() == [list(range(start, start + 10))]


def test_rank_seeds_differ_and_are_reproducible() -> None:
    seeds = [rank_seed(seed, rank) for seed in range(-2, 20) for rank in itertools.chain(*rings(4, 8))]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rank_seed(0, Ring()) == 300471914551172981
    draws = {tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds}
    assert len({*seeds}) == len({seed % 2**32 for seed in seeds}) == len(draws) == len(seeds)


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
    lengths = (24, 40, 9, 7)  # the last rows belong to no document
    tensors = torch.randn(3, 1, 80, 4, 8, dtype=torch.float64)
    ids = torch.tensor([0, 1, 2, -1]).repeat_interleave(torch.tensor(lengths))[None]
    options = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "is_causal": is_causal}
    *packed, padding = dilated_attention(*tensors, **options, document_ids=ids).split(lengths, 1)
    for out, rows in zip(packed, tensors.split(lengths, 2), strict=False):
        assert_near(out, dilated_attention(*rows, **options), 1e-12)
    assert not padding.any()
