"""``ring.halo`` and ``ring.entering_state`` equal their definitions on one device, with their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.marks import MORE_CASES
from ring_backends.testing.rings import ALL_RINGS, FOUR, THREE, RingSpec, in_every_layout, ring_here, rows_of_ranks
from ring_backends.testing.world import on_every_rank

HALOS = [*itertools.product((1, 3, 8, 21), (0, 1, 3, 9))]
"""(length, width). Some lengths are shorter than the ring, and some shards shorter than the width."""


class Maps(NamedTuple):
    """Shapes and dtypes of the maps of pieces, as :meth:`ring_backends.Ring.entering_state` takes them."""

    decay: Sequence[int]
    state: Sequence[int]
    matrix: bool = False
    decay_dtype: torch.dtype = torch.float64
    state_dtype: torch.dtype = torch.float64


MAPS = (
    Maps((2, 3, 1), (2, 3, 4)),
    Maps((), (2, 3)),
    Maps((4,), (2, 3, 4)),
    Maps((2, 3, 3), (2, 3, 4), matrix=True),
    Maps((3, 3), (2, 3, 1), matrix=True, decay_dtype=torch.complex128, state_dtype=torch.complex128),
    Maps((2, 1), (2, 3), decay_dtype=torch.complex128, state_dtype=torch.complex128),
    Maps((2, 1), (2, 3), state_dtype=torch.complex128),
)
"""Decays per head, one for all, per column, matrices, and complex numbers."""


def starts_of_pieces(seq_len: int, ring_size: int, layout: LayoutKind) -> list[list[int]]:
    """The first position of each piece of each ring rank, by ``torch.tensor_split``."""
    pieces = torch.arange(seq_len).tensor_split(ring_size * (2 if layout == "zigzag" else 1))
    starts = [0, *itertools.accumulate(map(len, pieces))][:-1]
    if layout == "contiguous":
        return [[start] for start in starts]
    return [[starts[rank], starts[-1 - rank]] for rank in range(ring_size)]


def check_halo(ring: Ring, seq_len: int, width: int, dim: int = 1, atol: float = 1e-12) -> None:
    """Compare a halo and the gradient of the rows with slices of the padded sequence."""
    generator = torch.Generator().manual_seed(100 * seq_len + width)
    shape = [2, 3, 4]
    shape[dim] = seq_len
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    shape[dim] = width
    padded = torch.cat([torch.zeros(shape, dtype=torch.float64), whole], dim)
    starts_of_ranks = starts_of_pieces(seq_len, ring.size, ring.layout_kind)
    wanted = [torch.cat([padded.narrow(dim, start, width) for start in starts], dim) for starts in starts_of_ranks]
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in wanted]
    (grad_whole,) = torch.autograd.grad(wanted, whole, grads)
    own = rows_of_ranks(seq_len, ring.size, ring.layout_kind)[ring.rank]
    rows = whole.detach().index_select(dim, own).requires_grad_()
    out = ring.halo(rows, width, dim, seq_len)
    (grad,) = torch.autograd.grad(out, rows, grads[ring.rank])
    torch.testing.assert_close(out, wanted[ring.rank], rtol=0, atol=0)
    torch.testing.assert_close(grad, grad_whole.index_select(dim, own), rtol=0, atol=atol)


def check_entering_state(ring: Ring, maps: Maps, atol: float = 1e-11) -> None:
    """Compare the entering states and both gradients with the recurrence over the pieces, one after the other."""
    generator = torch.Generator().manual_seed(7)
    num = ring.size * (2 if ring.layout_kind == "zigzag" else 1)
    decays = (0.5 * torch.randn(num, *maps.decay, generator=generator, dtype=maps.decay_dtype)).requires_grad_()
    states = torch.randn(num, *maps.state, generator=generator, dtype=maps.state_dtype).requires_grad_()
    state, entering = 0 * states[0], []
    for decay, added in zip(decays, states, strict=True):
        entering.append(state)
        state = (decay.to(state.dtype) @ state if maps.matrix else decay * state) + added
    wanted = torch.stack(entering)
    grads = torch.randn(wanted.shape, generator=generator, dtype=maps.state_dtype)
    right = [wanted.detach(), *torch.autograd.grad(wanted, [decays, states], grads, materialize_grads=True)]
    own = [ring.rank, num - 1 - ring.rank] if ring.layout_kind == "zigzag" else ring.rank
    decay, state = (x.detach()[own].requires_grad_() for x in (decays, states))
    out = ring.entering_state(decay, state, matrix=maps.matrix)
    got = [out.detach(), *torch.autograd.grad(out, [decay, state], grads[own])]
    torch.testing.assert_close(got, [x[own] for x in right], rtol=0, atol=atol)


class PassingOnTests(AdapterSuite):
    @on_every_rank
    def test_positions_and_states_are_passed_on(self) -> None:
        check_halo(self.ring(), 10, 4)
        for maps in (MAPS[0], MAPS[3]):
            check_entering_state(self.ring(), maps)

    @core
    @in_every_layout("rings", ALL_RINGS, core=(FOUR, THREE), quick_every=3)
    @on_every_rank
    def test_the_halo_has_the_positions_before_each_piece(self, rings: RingSpec, layout: LayoutKind) -> None:
        if (ring := ring_here(self.adapter, rings)) is not None:
            for seq_len, width in HALOS:
                check_halo(ring.with_layout(layout), seq_len, width)

    @core
    @pytest.mark.parametrize("dim", [0, pytest.param(-1, marks=MORE_CASES)])
    @on_every_rank
    def test_the_halo_of_other_dims(self, dim: int) -> None:
        check_halo(self.ring(layout="zigzag"), 13, 3, dim)

    @core
    @in_every_layout("rings", ALL_RINGS, core=(FOUR, THREE), quick_every=3)
    @on_every_rank
    def test_the_entering_state_is_that_of_the_recurrence(self, rings: RingSpec, layout: LayoutKind) -> None:
        if (ring := ring_here(self.adapter, rings)) is not None:
            for maps in MAPS:
                check_entering_state(ring.with_layout(layout), maps)
