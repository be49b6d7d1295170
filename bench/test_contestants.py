"""The values and gradients of every contestant agree with the dense fp64 reference."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import contestants
import pytest
import ranks
import torch
from case import ALL_GATHER, BARE_KERNELS, CALLS, DENSE_RING, ONE_DEVICE, SDPA, SYNCHRONOUS, Case
from clock import CPU
from ranks import Worlds
from torch import Tensor

from ring_backends import Ring, available_adapters
from ring_backends.testing.reference import reference_attention

# A shard has more rows than a block of the dense ring. The last segment, shard and block are shorter than the others.
UNEVEN = Case("", 1101, 1, ((100, 1), (701, 2), (1101, 5)), "fp64", num_heads=4, kv_heads=2, head_dim=8)


@lru_cache
def reference_results(case: Case) -> list[Tensor]:
    """out, dq, dk and dv of the reference, for a case without contestant. All ranks draw the same inputs."""
    *leaves, grad_out = contestants.inputs(case, Ring(), CPU)
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    out, _ = reference_attention(*leaves, **dataclasses.asdict(case.pattern), is_causal=case.causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def check(worlds: Worlds, case: Case, tolerance: float = 1e-12) -> None:
    found = worlds.of(case).run(ranks.results, case)[0]
    wanted = reference_results(case.but(contestant="", ring_size=1, layout="contiguous"))
    for name, ours, reference in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (ours.double() - reference).abs().max() / reference.abs().max()
        assert error < tolerance, f"{name} of {case}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("contestant", [DENSE_RING, ALL_GATHER, SYNCHRONOUS, "native"])
def test_rings_are_exact(worlds: Worlds, contestant: str, layout: str, causal: bool) -> None:
    check(worlds, UNEVEN.but(contestant=contestant, ring_size=2, layout=layout, causal=causal))


@pytest.mark.parametrize("adapter", ["fsdp", "deepspeed", "fairscale"])
def test_other_adapters_are_exact(worlds: Worlds, adapter: str) -> None:
    if reason := available_adapters()[adapter]:
        pytest.skip(reason)
    check(worlds, UNEVEN.but(contestant=adapter, ring_size=2))


def test_the_dense_ring_sums_in_fp32(worlds: Worlds) -> None:
    check(worlds, UNEVEN.but(contestant=DENSE_RING, ring_size=2, dtype="bf16"), 2**-6)


@pytest.mark.parametrize("contestant", [ONE_DEVICE, SDPA, DENSE_RING, ALL_GATHER])
def test_all_are_exact_on_one_rank(worlds: Worlds, contestant: str) -> None:
    branches = ((UNEVEN.seq_len, 1),) if contestant == SDPA else UNEVEN.branches
    check(worlds, UNEVEN.but(contestant=contestant, branches=branches))


@pytest.mark.parametrize("ring_size", [2, 4])
def test_dilated_hops_carry_a_sixteenth_of_the_bytes(worlds: Worlds, ring_size: int) -> None:
    """Of the branches (2048, 1), (8192, 4), (65536, 16), with divided lengths, only the last one crosses shards.

    In the backward of a ring of p ranks, dK and dV travel p − 1 hops. In the dense ring they travel p hops, since each
    rank also sends the sums of the last chunk to its owner.
    """
    case = CALLS["dilated"]["dilated"].shortened(128).but(ring_size=ring_size)
    native, dense = (case.but(contestant=name) for name in ("native", DENSE_RING))
    sent = sum(worlds.time(native, "forward")["bytes"])
    assert sum(worlds.time(dense, "forward")["bytes"]) == 16 * sent > 0
    assert sum(worlds.time(native, "backward")["bytes"]) == 2 * sent
    assert sum(worlds.time(dense, "backward")["bytes"]) == 16 * sent + 16 * sent * ring_size // (ring_size - 1)


def test_bare_kernels_compute_as_many_pairs_as_the_branches_have() -> None:
    case = Case(BARE_KERNELS, 512, branches=((128, 1), (256, 4), (1024 // 2, 16)))
    call = contestants.prepare(case, Ring(), CPU)
    shapes = [tuple(query.shape) for query in call.tensors[::3]]
    assert shapes == [(4, 8, 128, 64), (2, 8, 64, 64), (1, 8, 32, 64)]
    outs = call.forward()
    assert [tuple(out.shape) for out in outs] == shapes
    assert [x.shape for x in call.backward(outs)] == [x.shape for x in call.tensors]
    with pytest.raises(ValueError, match=r"branches: \(100, 1\) cuts 512 tokens into unequal tiles"):
        contestants.prepare(case.but(branches=((100, 1),)), Ring(), CPU)
