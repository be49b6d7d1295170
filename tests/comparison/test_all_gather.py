"""The all-gather method is exact and sends only needed rows. The fp64 reference of ``compare`` is exact."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from native_ranks import assert_near, on_ring
from torch import Tensor

from ring_backends.comparison import exact
from ring_backends.comparison.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.comparison.setup import TENSORS
from ring_backends.engine.call import AttentionInputs
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.testing.calls import difference, expected
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.rings import FOUR, TWO
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World


def by_reference(case: AttentionCase) -> dict[str, Tensor]:
    """out, dq, dk and dv of the dense reference."""
    out, _, *grads = expected(case).computed().values()
    return dict(zip(TENSORS, (out, *grads), strict=True))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(96, (16, 48, 96), (1, 2, 4), num_heads=4, num_kv_heads=4),
        AttentionCase(101, (7, 40, 500), (1, 3, 5), num_heads=6, num_kv_heads=3),
        AttentionCase(50, (50,), (7,), num_heads=2),  # most positions are covered by no head
        AttentionCase(5, (3,), (8,), num_heads=2, num_kv_heads=2),  # a rate above the segment length
        AttentionCase(61, (None, 40, None), (1, 3, 4), num_heads=4, num_kv_heads=2, window_lengths=(7, None, 20)),
        # the smallest window, and one longer than its segment
        AttentionCase(40, (None, 16), (1, 2), num_heads=2, num_kv_heads=2, window_lengths=(1, 500)),
    ],
    ids=str,
)
def test_the_fp64_values_of_compare_equal_the_reference(monkeypatch, case, is_causal):
    case = replace(case, is_causal=is_causal, dtype=torch.float64)
    *tensors, _ = case.tensors()
    branches = case.segment_lengths, case.dilation_rates, case.window_lengths
    for query_rows in (512, 3):
        monkeypatch.setattr(exact, "_QUERY_ROWS", query_rows)
        got = exact.exact_attention(*(x[0] for x in tensors), *branches, is_causal=is_causal)
        wanted = {name: x[0] for name, x in by_reference(case).items()}
        assert_near(dict(zip(TENSORS, got, strict=True)), wanted, 1e-13)


def attend(ring: Ring, case: AttentionCase) -> tuple[AttentionInputs, dict[str, Tensor]]:
    """This rank's inputs, and its out, dq, dk and dv of the all-gather method."""
    *tensors, grad_out, _ = case.tensors()
    leaves = [ring.shard(x).clone().requires_grad_() for x in tensors]
    sharded: dict[str, Any] = {"is_causal": case.is_causal, "seq_len": case.seq_len}
    out = all_gather_attention(*leaves, DilatedPattern(**case.pattern_options()), ring, **sharded)
    grads = torch.autograd.grad(out, leaves, ring.shard(grad_out))
    return AttentionInputs(*leaves, **sharded), dict(zip(TENSORS, (out.detach(), *grads), strict=True))


def gathered(ring: Ring, cut: bool, case: AttentionCase) -> dict[str, Tensor]:
    """out, dq, dk and dv of the all-gather method for the whole sequence. Every rank calls this."""
    with fine_cuts() if cut else contextlib.nullcontext():
        _, results = attend(ring, case)
    return {name: ring.unshard(x, seq_len=case.seq_len) for name, x in results.items()}


CASES = {
    "several branches": AttentionCase(96, (16, 48, 96), (1, 2, 4), num_heads=4, num_kv_heads=4),
    "nothing divides anything": AttentionCase(101, (7, 40, 101), (1, 3, 5), num_heads=6, num_kv_heads=3),
    "no branch crosses": AttentionCase(64, (4, 8), (1, 2), num_heads=2),
    "grouped": AttentionCase(
        90, (10, 45, 90), (1, 2, 4), num_heads=6, num_kv_heads=2, head_mode="grouped", offset="branch"
    ),
    "offsets by block": AttentionCase(70, (16, 64, 128), (1, 2, 4), num_heads=4, num_kv_heads=2, offset="block"),
    "windows": AttentionCase(
        101, (None, 60, 101), (1, 2, 4), num_heads=4, num_kv_heads=2, window_lengths=(20, None, 70)
    ),
    "every offset": AttentionCase(90, (None, 45), (4, 2), num_heads=2, offset="every", window_lengths=(30, None)),
    "shorter than the ring": AttentionCase(3, (3,), (1,), num_heads=2, num_kv_heads=2),
}


QUICK = "nothing divides anything", "windows", "shorter than the ring"


@pytest.mark.parametrize(
    ("rings", "layout", "cut", "is_causal"),
    [
        (FOUR, "zigzag", False, True),
        pytest.param(TWO, "contiguous", False, False, marks=MORE_CASES),
        pytest.param(FOUR, "contiguous", True, True, marks=MORE_CASES),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", matrix_but(*QUICK, of=CASES))
def test_all_gather_is_exact(world, name, is_causal, rings, layout, cut):
    case = replace(CASES[name], is_causal=is_causal, batch=2, dtype=torch.float64)
    for got in world.run(on_ring, gathered, cut, case, rings=rings, layout=layout):
        assert_near(got, by_reference(case), 1e-12)


HALF = AttentionCase(256, (64, 256), (1, 2), batch=2, num_heads=2, num_kv_heads=2, is_causal=True, dtype=torch.bfloat16)


def test_all_gather_sums_in_fp32(world: World) -> None:
    got, *_ = world.run(on_ring, gathered, False, HALF, rings=FOUR)
    for name, reference in by_reference(HALF).items():
        assert got[name].dtype == torch.bfloat16
        assert difference(got[name], reference) < 2**-7 * reference.abs().max(), name


def tcp_bytes_sent() -> int:
    """The bytes that the TCP sockets of this process have sent, without retransmissions.

    Linux counts them in ``struct tcp_info``: ``tcpi_bytes_sent``, followed by ``tcpi_bytes_retrans``.
    """
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_socket():
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, sent_again = struct.unpack_from("QQ", information, 200)
                    total += sent - sent_again
    return total


def collectives(ring: Ring, case: AttentionCase) -> dict[str, Any]:
    """The buffer bytes of each collective of a call, the stated bytes, and the sent bytes. Every rank calls this."""
    dist.barrier()
    before = tcp_bytes_sent()
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather,
        mock.patch.object(dist, "reduce_scatter", wraps=dist.reduce_scatter) as reduce_scatter,
    ):
        inputs, _ = attend(ring, case)
    dist.barrier()
    executor = AllGatherExecutor(inputs, DilatedPattern(**case.pattern_options()), ring)
    return {
        "all-gather": [call.args[1].nbytes for call in all_gather.call_args_list],
        "reduce-scatter": [call.args[0].nbytes for call in reduce_scatter.call_args_list],
        "stated": executor.wire_bytes(inputs.key),
        "sent": tcp_bytes_sent() - before,
    }


@THOROUGH
@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs the socket option TCP_INFO")
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        # A shard has 4,096 rows, so (2048, 1) sends nothing. Two ranks share a segment of (8192, 4): the first sends
        # 1,024 rows for each of 4 (key/value head, offset) pairs. For (16384, 16), a rank sends 256 rows for each.
        ({"segment_lengths": (2048, 8192, 16384), "dilation_rates": (1, 4, 16)}, 4 * 1024 + 4 * 256),
        # The last 1,024 rows of a shard, of 2 key/value heads.
        ({"segment_lengths": (None,), "dilation_rates": (1,), "window_lengths": (1025,)}, 2 * 1024),
    ],
    ids=["dilated", "window"],
)
def test_all_gather_sends_only_needed_rows_and_states_the_bytes(world, options, rows):
    gathered, reduced = rows * 2 * (2 * 4) * 2, rows * 2 * (2 * 4) * 4  # batch 2; K and V of 4; bf16 and fp32
    for found in world.run(on_ring, collectives, replace(HALF, seq_len=16384, num_heads=4, **options), rings=FOUR):
        assert found["all-gather"] == [gathered, gathered]
        assert found["reduce-scatter"] == [reduced]
        assert found["stated"] == {"forward": 3 * gathered, "backward": 3 * gathered + 2 * 3 * reduced}
        stated = sum(found["stated"].values())
        assert stated <= found["sent"] < 1.01 * stated


def test_all_gather_calls_no_collective_where_no_branch_crosses(world: World) -> None:
    for found in world.run(on_ring, collectives, replace(HALF, seq_len=128, segment_lengths=(16, 32)), rings=FOUR):
        assert found["all-gather"] == found["reduce-scatter"] == []
        assert found["stated"] == {"forward": 0, "backward": 0}
