"""The values and gradients of every contestant agree with the dense fp64 reference."""

from __future__ import annotations

import dataclasses
import shutil
from functools import lru_cache

import contestants
import pytest
import rank
import torch
from bare_kernels import BareKernels
from case import ALL_GATHER, DENSE_RING, FLEX, MASKED_SDPA, ONE_DEVICE, SDPA, SYNCHRONOUS, Case
from contestants import unusable
from setups import ring_setups
from torch import Tensor
from worlds import Worlds

from ring_backends import Ring
from ring_backends.testing.reference import reference_attention

# A shard has more rows than a block of the dense ring. The last segment, shard and block are shorter than the others.
UNEVEN = Case("", 1101, 1, ((100, 1), (701, 2), (1101, 5)), "fp64", num_heads=4, kv_heads=2, head_dim=8)
NAMES = ("out", "dq", "dk", "dv")


@lru_cache
def reference_results(case: Case) -> list[Tensor]:
    """out, dq, dk and dv of the reference, for a case without contestant. All ranks draw the same inputs."""
    *leaves, grad_out = contestants.inputs(case, Ring(), torch.device("cpu"))
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    out, _ = reference_attention(*leaves, **dataclasses.asdict(case.pattern), is_causal=case.causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def check(worlds: Worlds, case: Case, tolerance: float) -> None:
    found = worlds.of(case).run(rank.results, case)[0]
    wanted = reference_results(dataclasses.replace(case, contestant="", ring_size=1, layout="contiguous"))
    for name, ours, reference in zip(NAMES, found, wanted, strict=True):
        error = (ours.double() - reference).abs().max() / reference.abs().max()
        assert error < tolerance, f"{name} of {case}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ring_size", "layout"), [(2, "contiguous"), (2, "zigzag")])
@pytest.mark.parametrize("contestant", [DENSE_RING, ALL_GATHER, SYNCHRONOUS, "native"])
def test_rings_are_exact(worlds: Worlds, contestant: str, ring_size: int, layout: str, causal: bool) -> None:
    case = dataclasses.replace(UNEVEN, contestant=contestant, ring_size=ring_size, layout=layout, causal=causal)
    check(worlds, case, 1e-12)


@pytest.mark.parametrize("adapter", ["fsdp", "deepspeed", "fairscale"])
def test_other_adapters_are_exact(worlds: Worlds, adapter: str) -> None:
    case = dataclasses.replace(UNEVEN, contestant=adapter, ring_size=2)
    if reason := unusable(case):
        pytest.skip(reason)
    check(worlds, case, 1e-12)


def test_the_dense_ring_sums_in_fp32(worlds: Worlds) -> None:
    check(worlds, dataclasses.replace(UNEVEN, contestant=DENSE_RING, ring_size=2, dtype="bf16"), 2**-6)


@pytest.mark.parametrize("contestant", [ONE_DEVICE, SDPA, DENSE_RING, ALL_GATHER])
@pytest.mark.parametrize("causal", [True, False])
def test_all_are_exact_on_one_rank(worlds: Worlds, contestant: str, causal: bool) -> None:
    case = dataclasses.replace(UNEVEN, contestant=contestant, causal=causal)
    if contestant == SDPA:  # SDPA has no branches
        case = dataclasses.replace(case, branches=((case.seq_len, 1),))
    check(worlds, case, 1e-12)


@pytest.mark.parametrize(("contestant", "ring_size"), [(ONE_DEVICE, 1), (MASKED_SDPA, 1), ("native", 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_are_exact(worlds: Worlds, contestant: str, ring_size: int, causal: bool) -> None:
    branches = ((1101, 1),) if contestant == MASKED_SDPA else UNEVEN.branches
    window = {"window": 90, "branches": branches, "causal": causal}
    check(worlds, dataclasses.replace(UNEVEN, contestant=contestant, ring_size=ring_size, **window), 1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_computes_the_same_window(causal: bool) -> None:
    case = Case(FLEX, 512, branches=((512, 1),), window=90, causal=causal, num_heads=2, kv_heads=1)
    query, key, value, _ = contestants.inputs(case, Ring(), torch.device("cpu"))
    attends = (contestants._attend(dataclasses.replace(case, contestant=name), Ring()) for name in (FLEX, ONE_DEVICE))
    outs = [attend(query, key, value) for attend, _ in attends]
    torch.testing.assert_close(*outs)


def test_dense_ring_counts_the_bytes_of_all_rows(worlds: Worlds) -> None:
    case = Case(DENSE_RING, 512, 2, ((64, 1),), dtype="bf16", num_heads=2, kv_heads=2, head_dim=8)
    rows = 2 * 256 * 2 * 8  # of K and of V
    assert worlds.time(case, "forward")["bytes"] == [rows * 2, rows * 2]
    # K and V once more. dK and dV in fp32 make two hops: to the next rank, and back to the owner.
    assert worlds.time(case, "backward")["bytes"] == [rows * 2 + 2 * rows * 4] * 2


@pytest.mark.parametrize("ring_size", [2, 4])
def test_dilated_hops_carry_a_sixteenth_of_the_bytes(worlds: Worlds, ring_size: int) -> None:
    """Of the branches (2048, 1), (8192, 4), (65536, 16), with divided lengths, only the last one crosses shards.

    In the backward of a ring of p ranks, dK and dV travel p − 1 hops. In the dense ring they travel p hops, since each
    rank also sends the sums of the last chunk to its owner.
    """
    case = dataclasses.replace(ring_setups(128, "fp32")["dilated"], ring_size=ring_size)
    native, dense = (dataclasses.replace(case, contestant=name) for name in ("native", DENSE_RING))
    sent = sum(worlds.time(native, "forward")["bytes"])
    assert sum(worlds.time(dense, "forward")["bytes"]) == 16 * sent > 0
    assert sum(worlds.time(native, "backward")["bytes"]) == 2 * sent
    assert sum(worlds.time(dense, "backward")["bytes"]) == 16 * sent + 16 * sent * ring_size // (ring_size - 1)


def test_bare_kernels_compute_as_many_pairs_as_the_branches_have() -> None:
    case = Case("bare kernels", 512, branches=((128, 1), (256, 4), (1024, 16)))
    bare = BareKernels.of(case, torch.float32, torch.device("cpu"))
    shapes = [tuple(query.shape) for query, *_ in bare.tiles]
    assert shapes == [(4, 8, 128, 64), (2, 8, 64, 64), (1, 8, 32, 64)]
    for (query, key, value, grad_out), (out, lse), grads in zip(
        bare.tiles, bare.forward(), bare.backward(bare.forward()), strict=True
    ):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(grads, torch.autograd.grad(wanted, leaves, grad_out))
        assert lse.shape == query.shape[:3]


def test_tiles_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"branches: \(100, 1\) cuts 512 tokens into unequal tiles"):
        BareKernels.of(Case("bare kernels", 512, branches=((100, 1),)), torch.float32, torch.device("cpu"))
