"""The all-gather method is exact and sends only needed rows. The fp64 reference of ``compare`` is exact."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from native_ranks import ADAPTER as NATIVE
from torch import Tensor

from ring_backends.comparison import exact
from ring_backends.comparison.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.comparison.compare import TENSORS
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import FOUR, TWO, RingSpec, ring_of
from ring_backends.testing.world import World


def tensors(seq_len: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random query, key, value and gradient of out."""
    generator = torch.Generator().manual_seed(seq_len)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(2, seq_len, size, 4, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def by_reference(inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool) -> list[Tensor]:
    """out, dq, dk and dv of the dense reference."""
    *leaves, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out, _ = reference_attention(*leaves, **asdict(pattern), is_causal=is_causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ((96, 4, 4), ((16, 48, 96), (1, 2, 4))),
        ((101, 6, 3), ((7, 40, 500), (1, 3, 5))),
        ((50, 2, 1), ((50,), (7,))),  # most positions are covered by no head
        ((5, 2, 2), ((3,), (8,))),  # a rate above the segment length
        ((61, 4, 2), ((None, 40, None), (1, 3, 4), (7, None, 20))),
        ((40, 2, 2), ((None, 16), (1, 2), (1, 500))),  # the smallest window, and one longer than its segment
    ],
    ids=str,
)
def test_the_fp64_values_of_compare_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], pattern: Any, is_causal: bool
) -> None:
    inputs = [x[:1] for x in tensors(*sizes)]
    branches = dict(zip(("segment_lengths", "dilation_rates", "window_lengths"), pattern, strict=False))
    wanted = by_reference(inputs, DilatedPattern(**branches), is_causal)
    for query_rows in (512, 3):
        monkeypatch.setattr(exact, "_QUERY_ROWS", query_rows)
        got = exact.exact_attention(*(x[0].detach() for x in inputs), **branches, is_causal=is_causal)
        for what, ours, reference in zip(TENSORS, got, wanted, strict=True):
            assert (ours - reference[0]).abs().max() < 1e-13, what


def attend(
    ring: Ring, inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's query, key and value, and its out, dq, dk and dv of the all-gather method."""
    *leaves, grad_out = (ring.shard(x) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = all_gather_attention(*leaves, pattern, ring, is_causal=is_causal, seq_len=inputs[0].shape[1])
    return leaves, [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def gathered(
    rings: RingSpec, layout: LayoutKind, cut: bool, inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool
) -> list[Tensor]:
    """out, dq, dk and dv of the all-gather method for the whole sequence. Every rank calls this."""
    ring = ring_of(NATIVE, rings, layout)
    with fine_cuts() if cut else contextlib.nullcontext():
        _, results = attend(ring, inputs, pattern, is_causal)
    return [ring.unshard(x, seq_len=inputs[0].shape[1]) for x in results]


CASES = {
    "several branches": (96, 4, 4, DilatedPattern((16, 48, 96), (1, 2, 4))),
    "nothing divides anything": (101, 6, 3, DilatedPattern((7, 40, 101), (1, 3, 5))),
    "no branch crosses": (64, 2, 1, DilatedPattern((4, 8), (1, 2))),
    "grouped": (90, 6, 2, DilatedPattern.grouped((10, 45, 90), (1, 2, 4))),
    "offsets by block": (70, 4, 2, DilatedPattern((16, 64, 128), (1, 2, 4), offset="block")),
    "windows": (101, 4, 2, DilatedPattern((None, 60, 101), (1, 2, 4), window_lengths=(20, None, 70))),
    "every offset": (90, 2, 1, DilatedPattern((None, 45), (4, 2), offset="every", window_lengths=(30, None))),
    "shorter than the ring": (3, 2, 2, DilatedPattern((3,), (1,))),
}


QUICK = "nothing divides anything", "windows", "shorter than the ring"

HOW_CUT: list[tuple[RingSpec, LayoutKind, bool]] = [
    (TWO, "contiguous", False),
    (FOUR, "zigzag", False),
    (FOUR, "contiguous", True),
]


@pytest.mark.parametrize("is_causal", matrix_but(True, of=(True, False)))
@pytest.mark.parametrize("name", matrix_but(*QUICK, of=CASES))
def test_all_gather_is_exact(world: World, name: str, is_causal: bool) -> None:
    seq_len, heads, kv_heads, pattern = CASES[name]
    inputs = tensors(seq_len, heads, kv_heads)
    wanted = by_reference(inputs, pattern, is_causal)
    plain = [x.detach() for x in inputs]
    for how in HOW_CUT:
        for rank, got in enumerate(world.run(gathered, *how, plain, pattern, is_causal)):
            for what, ours, reference in zip(TENSORS, got, wanted, strict=True):
                assert (ours - reference).abs().max() < 1e-12, f"{what}, rank {rank} of {how}"


def test_all_gather_sums_in_fp32(world: World) -> None:
    inputs = tensors(256, 2, 2, torch.bfloat16)
    pattern = DilatedPattern((64, 256), (1, 2))
    got, *_ = world.run(gathered, FOUR, "contiguous", False, inputs, pattern, True)
    for ours, reference in zip(got, by_reference(inputs, pattern, True), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - reference).abs().max() < 2**-7 * reference.abs().max()


def tcp_bytes_sent() -> int:
    """The bytes that the TCP sockets of this process have sent, without retransmissions.

    Linux counts them in ``struct tcp_info``: ``tcpi_bytes_sent``, followed by ``tcpi_bytes_retrans``.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # os.listdir() has closed this descriptor
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, sent_again = struct.unpack_from("QQ", information, 200)
                total += sent - sent_again
    return total


def collectives(inputs: list[Tensor], pattern: DilatedPattern) -> dict[str, Any]:
    """The buffer bytes of each collective of a call, the stated bytes, and the sent bytes. Every rank calls this."""
    ring = ring_of(NATIVE)
    dist.barrier()
    before = tcp_bytes_sent()
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather,
        mock.patch.object(dist, "reduce_scatter", wraps=dist.reduce_scatter) as reduce_scatter,
    ):
        (query, key, value), _ = attend(ring, inputs, pattern, True)
    dist.barrier()
    stated = AttentionInputs(query, key, value, is_causal=True, seq_len=inputs[0].shape[1])
    return {
        "all-gather": [call.args[1].nbytes for call in all_gather.call_args_list],
        "reduce-scatter": [call.args[0].nbytes for call in reduce_scatter.call_args_list],
        "stated": AllGatherExecutor.of(stated, pattern, ring).wire_bytes(key),
        "sent": tcp_bytes_sent() - before,
    }


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs the socket option TCP_INFO")
@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        # A shard has 4,096 rows, so (2048, 1) sends nothing. Two ranks share a segment of (8192, 4): the first sends
        # 1,024 rows for each of 4 (key/value head, offset) pairs. For (16384, 16), a rank sends 256 rows for each.
        (DilatedPattern((2048, 8192, 16384), (1, 4, 16)), 4 * 1024 + 4 * 256),
        # The last 1,024 rows of a shard, of 2 key/value heads.
        (DilatedPattern((None,), (1,), window_lengths=(1025,)), 2 * 1024),
    ],
    ids=["dilated", "window"],
)
def test_all_gather_sends_only_needed_rows_and_states_the_bytes(
    world: World, pattern: DilatedPattern, rows: int
) -> None:
    gathered, reduced = rows * 2 * (2 * 4) * 2, rows * 2 * (2 * 4) * 4  # batch 2; K and V of 4; bf16 and fp32
    for found in world.run(collectives, tensors(16384, 4, 2, torch.bfloat16), pattern):
        assert found["all-gather"] == [gathered, gathered]
        assert found["reduce-scatter"] == [reduced]
        assert found["stated"] == {"forward": 3 * gathered, "backward": 3 * gathered + 2 * 3 * reduced}
        stated = sum(found["stated"].values())
        assert stated <= found["sent"] < 1.01 * stated


def test_all_gather_calls_no_collective_where_no_branch_crosses(world: World) -> None:
    for found in world.run(collectives, tensors(128, 2, 2), DilatedPattern((16, 32), (1, 2))):
        assert found["all-gather"] == found["reduce-scatter"] == []
        assert found["stated"] == {"forward": 0, "backward": 0}
