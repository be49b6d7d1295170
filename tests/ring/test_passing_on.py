"""``Ring.halo`` and ``Ring.entering_state``: refusals, traffic, precision, and tensors and modes of every kind.

The suite ``PassingOnTests`` of the harness compares them with their definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from native_ranks import assert_near, native_ring, on_ring
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_backends import Ring, RingMismatchError
from ring_backends.testing.failing_calls import ODD_RANK, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.passing_on import HALOS, MAPS, check_entering_state, check_halo
from ring_backends.testing.rings import FOUR, LAYOUTS
from ring_backends.testing.thread_ring import run_in_threads
from ring_backends.testing.world import World, on_every_rank

Sent = tuple[int, int]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_equals_the_definitions(layout: Any) -> None:
    ring = Ring(layout_kind=layout)
    for seq_len, width in HALOS:
        check_halo(ring, seq_len, width)
    for maps in MAPS:
        check_entering_state(ring, maps)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", matrix_but(7, of=(3, 7, 8, 16)))
def test_longer_rings_equal_the_definitions(size: int, layout: Any) -> None:
    def check(ring: Ring) -> None:
        check_halo(ring, 20, 4)
        for maps in (MAPS[0], MAPS[3]):
            check_entering_state(ring, maps)

    run_in_threads(size, check, layout=layout)


# --- shapes and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "pieces"), [("contiguous", 1), ("zigzag", 2)])
def test_shapes_without_positions(layout: Any, pieces: int) -> None:
    ring = Ring(layout_kind=layout)
    assert ring.halo(torch.zeros(2, 0, 3), 4).shape == (2, 4 * pieces, 3)
    assert ring.halo(torch.zeros(2, 5, 3), 0).shape == (2, 0, 3)
    assert ring.halo(torch.zeros(0, 5), 2, dim=-1).shape == (0, 2 * pieces)


@on_every_rank
def test_bad_arguments_are_refused_by_name() -> None:
    """All ranks refuse, so the ring is usable afterwards."""
    ring = native_ring(rings=FOUR)
    rows, states = ring.shard(torch.zeros(2, 8, 3)), torch.zeros(2, 3, 4)
    zigzag = ring.with_layout("zigzag")
    refusals: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: ring.halo(rows, -1), ValueError, "width = -1: must be at least 0"),
        (lambda: ring.halo(rows, 1.0), TypeError, "width = 1.0: expected an int"),
        (lambda: ring.halo(rows, 2**62), ValueError, f"width = {2**62}: must be below 2**62"),
        (lambda: ring.halo(rows, 1, 3), ValueError, "dim = 3: rows is [2, 2, 3]"),
        (lambda: ring.halo(torch.zeros(()), 1, 0), ValueError, "dim = 0: rows is []"),
        (lambda: ring.halo(rows, 1, seq_len=9), Exception, "rows has 2 rows along dim 1"),
        (lambda: ring.unshard(rows, -4), ValueError, "dim = -4: tensor is [2, 2, 3]"),
        (lambda: ring.entering_state(1.0, states), TypeError, "decay = float: expected a floating-point or complex"),
        (lambda: ring.entering_state(states, states.int()), TypeError, "state = torch.int32: expected a floating"),
        (lambda: ring.entering_state(states.cfloat(), states), TypeError, "state = torch.float32: expected a complex"),
        (lambda: ring.entering_state(states.to("meta"), states), ValueError, "decay is on meta, and state on cpu"),
        (lambda: ring.entering_state(torch.zeros(2, 4), states), ValueError, "decay is [2, 4], and state [2, 3, 4]"),
        (lambda: ring.entering_state(torch.zeros(1, 2, 3, 4), states), ValueError, "decay must broadcast to the shape"),
        (lambda: ring.entering_state(states, states, matrix=True), ValueError, "expected [..., K, K] and [..., K, V]"),
        (lambda: ring.entering_state(states, states[0, 0], matrix=True), ValueError, "[..., K, K]"),
        (lambda: zigzag.entering_state(states[0], states), ValueError, "decay is [3, 4]: expected [2, …]"),
        (lambda: zigzag.entering_state(states, states[:1]), ValueError, "state is [1, 3, 4]: expected [2, …]"),
    ]
    for call, error, text in refusals:
        ending(call).check(error, text)
    check_halo(ring, 8, 3)
    check_entering_state(ring, MAPS[0])


@on_every_rank
def test_different_calls_are_reported() -> None:
    ring = native_ring(rings=FOUR)
    is_odd = ring.rank == ODD_RANK
    rows, states = torch.zeros(2, 2, 3), torch.zeros(2, 3, 3)
    differences: list[tuple[str, Callable[[], Any]]] = [
        ("width (rank 0: 1, rank 1: 2,", lambda: ring.halo(rows, 2 if is_odd else 1)),
        ("dim (rank 0: 1, rank 1: 0,", lambda: ring.halo(rows, 1, 0 if is_odd else -2)),
        ("sizes of the other dims (rank 0: [2, 3], rank 1: [2, 1],", lambda: ring.halo(rows[..., : 3 - 2 * is_odd], 1)),
        ("dtype (rank 0: torch.float32, rank 1: torch.int64,", lambda: ring.halo(rows.long() if is_odd else rows, 1)),
        ("layout (rank 0: contiguous, rank 1: zigzag,", lambda: zigzag_if(ring, is_odd).halo(rows, 1)),
        ("seq_len (rank 0: 8, rank 1: 4,", lambda: ring.halo(rows[:, : 2 - is_odd], 1)),
        ("matrix (rank 0: False, rank 1: True,", lambda: ring.entering_state(states, states, matrix=is_odd)),
        ("state (rank 0: [2, 3, 3], rank 1: [1, 3, 3],", lambda: ring.entering_state(rows[0, 0], states[is_odd:])),
        (
            "decay (rank 0: torch.float32 [3], rank 1: torch.float64 [1],",
            lambda: ring.entering_state(torch.zeros(1).double() if is_odd else torch.zeros(3), states),
        ),
        (
            "gradients (rank 0: needed, rank 1: not needed,",
            lambda: ring.entering_state(states, torch.zeros(2, 3, 3, requires_grad=not is_odd)),
        ),
        (
            "order of calls (rank 0: halo, rank 1: entering_state,",
            lambda: ring.entering_state(states, states) if is_odd else ring.halo(rows, 1),
        ),
    ]
    for text, call in differences:
        ending(call).check(RingMismatchError, text)
    refused = ending(ring.halo, rows, -1 if is_odd else 5)
    error, text = (ValueError, "width = -1") if is_odd else (RingMismatchError, "rank 1 refused its arguments with Val")
    refused.check(error, text)
    check_halo(ring, 8, 3)


def zigzag_if(ring: Ring, is_zigzag: bool) -> Ring:
    return ring.with_layout("zigzag" if is_zigzag else "contiguous")


# --- traffic ----------------------------------------------------------------------------------------------------------


def sent_by(ring: Ring, call: Callable[[Ring], Tensor]) -> tuple[Sent, Sent]:
    """(messages, bytes) of this rank in the forward and in the backward."""
    ring.traffic.reset()
    out = call(ring)
    forward = ring.traffic.messages, ring.traffic.bytes
    ring.traffic.reset()
    out.sum().backward()
    return forward, (ring.traffic.messages, ring.traffic.bytes)


def halo_of_eight(width: int, ring: Ring) -> Tensor:
    """Rows of 4 bytes, two on each of four ranks."""
    return ring.halo(torch.zeros(1, 2, requires_grad=True), width)


def states_of_48_bytes(matrix: bool, ring: Ring) -> Tensor:
    """Decays have 8 bytes, or 36 bytes if they are matrices."""
    pieces = (2,) if ring.layout_kind == "zigzag" else ()
    decay = torch.ones(*pieces, *((3, 3) if matrix else (2, 1, 1)), requires_grad=True)
    return ring.entering_state(decay, torch.zeros(*pieces, 2, 3, 2, requires_grad=True), matrix=matrix)


NOTHING = (0, 0)
TRAFFIC: dict[str, tuple[Any, Callable[[Ring], Tensor], list[Sent], list[Sent]]] = {
    "to the next rank": (
        "contiguous",
        partial(halo_of_eight, 2),
        [(1, 8), (1, 8), (1, 8), NOTHING],
        [NOTHING, (1, 8), (1, 8), (1, 8)],
    ),
    "to the next two ranks": (
        "contiguous",
        partial(halo_of_eight, 3),
        [(2, 12), (2, 12), (1, 8), NOTHING],
        [NOTHING, (1, 8), (2, 12), (2, 12)],
    ),
    # Pieces of one row, of ranks 0, 1, 2, 3, 3, 2, 1, 0. All ranks but the last send one row upwards and get one back.
    "both ways": (
        "zigzag",
        partial(halo_of_eight, 1),
        [(1, 4), (2, 8), (2, 8), (1, 4)],
        [(1, 4), (2, 8), (2, 8), (1, 4)],
    ),
    # From piece 0 to 1 and 2, and from 1 to 3, travel states of all earlier pieces, without a decay.
    "states": (
        "contiguous",
        partial(states_of_48_bytes, False),
        [(2, 96), (2, 56 + 48), (1, 56), NOTHING],
        [NOTHING, (1, 56), (2, 56 + 48), (2, 96)],
    ),
    "states with matrices": (
        "contiguous",
        partial(states_of_48_bytes, True),
        [(2, 96), (2, 84 + 48), (1, 84), NOTHING],
        [NOTHING, (1, 84), (2, 84 + 48), (2, 96)],
    ),
    # Pieces 0 … 7 are on ranks 0, 1, 2, 3, 3, 2, 1, 0. In three rounds they send to the piece 1, 2 and 4 later. Piece 0
    # in the first round, 0 and 1 in the second, and 0 to 3 in the third send states without a decay. The messages of
    # rank 0 are 0 → 1, 2, 4; of rank 1: 1 → 2, 3, 5 and 6 → 7; of rank 2: 2 → 3, 4, 6 and 5 → 6, 7; of rank 3: 3 → 5, 7
    # and 4 → 5, 6. Pieces 3 and 4 are on the same rank.
    "states both ways": (
        "zigzag",
        partial(states_of_48_bytes, False),
        [(3, 3 * 48), (4, 2 * 48 + 2 * 56), (5, 48 + 4 * 56), (4, 48 + 3 * 56)],
        [(3, 3 * 48), (4, 2 * 48 + 2 * 56), (5, 48 + 4 * 56), (4, 48 + 3 * 56)],
    ),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_counted_by_hand(world: World, name: str) -> None:
    layout, call, forward, backward = TRAFFIC[name]
    sent = world.run(on_ring, sent_by, call, layout=layout, rings=FOUR)
    assert sent == [*zip(forward, backward, strict=True)]


# --- precision --------------------------------------------------------------------------------------------------------


@on_every_rank
def test_half_precision_is_computed_in_fp32() -> None:
    """In bf16, 256 + 1 is 256. So a sum of 256, 1 and 1 is 258 only if it is rounded once."""
    ring = native_ring(rings=FOUR)
    value = torch.tensor([256.0 if ring.rank == 0 else 1.0], dtype=torch.bfloat16)
    state = ring.entering_state(torch.ones(1), value)
    right = [0, 256, 257, 258][ring.rank]
    assert_near(state, torch.tensor([float(right)]).bfloat16(), 0)
    rows = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    ring.halo(rows, 4, 0).backward(torch.full((4,), 256.0 if ring.rank == 1 else 1.0).bfloat16())
    assert rows.grad is not None
    assert_near(rows.grad, torch.tensor([[258.0, 2.0, 1.0, 0.0][ring.rank]]).bfloat16(), 0)


@on_every_rank
def test_a_decay_of_zero_keeps_earlier_states_out() -> None:
    """As for packed documents, of which one begins on rank 2."""
    ring = native_ring(rings=FOUR)
    decay = torch.tensor(0.0 if ring.rank == 2 else 1.0)
    state = torch.tensor(ring.rank + 1.0, requires_grad=True)
    out = ring.entering_state(decay, state)
    out.backward()
    assert (out.item(), state.grad) == ([0.0, 1.0, 3.0, 3.0][ring.rank], [2.0, 1.0, 1.0, 0.0][ring.rank])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_every_rank
def test_dtypes_of_results_and_gradients(dtype: torch.dtype) -> None:
    """Each has that of its tensor, also under autocast, which does not lower the precision of what is computed."""
    ring = native_ring(rings=FOUR)
    for decay_dtype, state_dtype in ((dtype, dtype), (dtype, torch.float32), (torch.float32, dtype)):
        decay = torch.full((2, 2), 1 / 3).to(decay_dtype).requires_grad_()
        state = torch.full((2, 1), 1 / 3).to(state_dtype).requires_grad_()
        plain = ring.entering_state(decay, state, matrix=True)
        wanted = torch.autograd.grad(plain, [decay, state], plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = ring.entering_state(decay, state, matrix=True)
            got = torch.autograd.grad(out, [decay, state], out)
            assert ring.halo(state, 1, 0).dtype == state_dtype
        assert [out.dtype, *(x.dtype for x in got)] == [state_dtype, decay_dtype, state_dtype]
        torch.testing.assert_close((out, *got), (plain, *wanted), rtol=0, atol=0)


# --- tensors and modes of every kind ----------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sequence last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "channels last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every second element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "conjugated": lambda x: x.to(torch.complex128, copy=True).conj(),
    "negated": lambda x: x.to(torch.complex128, copy=True).conj().imag,
    "expanded": lambda x: x[:1, :, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("view", matrix_but("channels last", "conjugated", of=VIEWS))
@pytest.mark.parametrize("dim", [0, 1])
@on_every_rank
def test_views_give_the_results_of_contiguous_copies(view: str, dim: int) -> None:
    """The views are on odd ranks only, so that strides differ between ranks. Also of ``ring.unshard``."""
    ring = native_ring("zigzag", rings=FOUR)
    numbers = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(ring.rank), dtype=torch.float64)

    def copied(x: Tensor) -> Tensor:
        return VIEWS[view](x).resolve_conj().resolve_neg().contiguous()

    results = []
    for make in (VIEWS[view] if ring.rank % 2 else copied, copied):
        rows, grad = make(numbers).requires_grad_(), make(numbers.flip(0))
        halo = ring.halo(rows, 2, dim)
        decay, state = rows[:2], rows[2:]
        outs = [halo, ring.entering_state(decay, state), ring.unshard(rows, dim)]
        grad_whole = make(torch.cat([numbers] * 4, dim))
        of_each = [
            torch.autograd.grad(out, rows, x)[0] for out, x in zip(outs, [grad, grad[:2], grad_whole], strict=True)
        ]
        results.append([*(out.detach() for out in outs), *of_each])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@on_every_rank
def test_tensors_of_any_dtype_have_a_halo() -> None:
    ring = native_ring(rings=FOUR)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.complex64):
        whole = torch.arange(8).to(dtype)
        halo = ring.halo(ring.shard(whole, 0), 1, 0)
        right = whole[2 * ring.rank - 1 : 2 * ring.rank] if ring.rank else torch.zeros(1, dtype=dtype)
        torch.testing.assert_close(halo, right, rtol=0, atol=0)


@on_every_rank
def test_modes_of_autograd() -> None:
    """Without gradients, with a gradient of one argument, with results that are changed in place, and twice."""
    ring = native_ring(rings=FOUR)
    rows, ones = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2)
    with torch.no_grad():
        assert not ring.halo(rows, 1).requires_grad
        assert not ring.entering_state(rows, rows).requires_grad
    grads = []
    for decay, state in ((rows, rows), (rows, ones), (ones, rows)):
        out = ring.entering_state(decay, state)
        grads += torch.autograd.grad(out, rows, ones)
    assert_near(grads[1] + grads[2], grads[0], 0)
    assert_near(grads[2], 3.0 - ring.rank + 0 * ones, 0)
    ring.halo(rows, 1).mul_(2).sum().backward()
    ring.entering_state(ones, rows).mul_(2).sum().backward()
    right = 2 * (torch.tensor([[0.0, float(ring.rank < 3)]]) + 3 - ring.rank)
    assert_near(rows.grad, right, 0)
    for out in (ring.halo(rows, 1), ring.entering_state(rows, rows)):
        (grad,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
        ended = ending(lambda grad=grad: grad.sum().backward())
        ended.check(RuntimeError, "once_differentiable")


def region(ring: Ring, rows: Tensor) -> Tensor:
    """A convolution of three positions, and a recurrent state after it."""
    rows = torch.cat([ring.halo(rows.sin(), 2), rows], 1).unfold(1, 3, 1).sum(-1)
    state = ring.entering_state(rows.sigmoid().prod(1), rows.cos().sum(1))
    return rows * state.unsqueeze(1).tanh()


@pytest.mark.parametrize("how", matrix_but("non-reentrant", of=("non-reentrant", "reentrant", "compiled")))
@on_every_rank
def test_activation_checkpointing_and_compile(how: str) -> None:
    """Checkpointing repeats the messages of the forward, as of ``ring.unshard``. torch.compile leaves the calls out."""
    ring = native_ring(rings=FOUR)
    numbers = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(ring.rank), dtype=torch.float64)
    plain = partial(region, ring)
    ways = {
        "compiled": torch.compile(plain, backend="eager"),
        "non-reentrant": partial(checkpoint, plain, use_reentrant=False),
        "reentrant": partial(checkpoint, plain, use_reentrant=True),
    }
    results, sent = [], []
    for way in (plain, ways[how]):
        rows = numbers.clone().requires_grad_()
        ring.traffic.reset()
        out = way(rows)
        forward = ring.traffic.messages
        out.backward(numbers)
        results.append([out.detach(), rows.grad])
        sent.append((forward, ring.traffic.messages))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)
    (forward, both), repeated = sent
    assert repeated == (forward, both if how == "compiled" else both + forward), sent


def test_tensors_without_values_on_one_device() -> None:
    rows = torch.zeros(2, 8, 3, device="meta", requires_grad=True)
    assert Ring().halo(rows, 2).shape == (2, 2, 3)
    assert Ring().entering_state(rows, rows).shape == rows.shape
