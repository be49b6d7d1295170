"""What the rows of a rank pass on to later rows: the positions before each piece of a sequence, and recurrent states.

A piece is a range of positions that a rank holds: one with the contiguous layout, two with the zigzag layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_backends.ring.calls import Call, Configuration, backward_of
from ring_backends.ring.members import Members, Traffic
from ring_backends.schedule.layout import LayoutKind, SequenceLayout


def halo(members: Members, traffic: Traffic, layout: SequenceLayout, rows: Tensor, width: int, dim: int) -> Tensor:
    """See :meth:`ring_backends.Ring.halo`."""
    fields = {
        "order of calls": "halo",
        "seq_len": layout.seq_len,
        "layout": layout.kind,
        "width": width,
        "dim": dim % rows.dim(),
        "sizes of the other dims": [size for axis, size in enumerate(rows.shape) if axis != dim % rows.dim()],
    }
    exchange = _Exchange.begin(members, traffic, fields, rows)
    return cast(Tensor, _Halo.apply(rows, exchange, layout, width, dim))  # type: ignore[no-untyped-call]


def entering_state(
    members: Members, traffic: Traffic, kind: LayoutKind, decay: Tensor, state: Tensor, *, is_matrix: bool
) -> Tensor:
    """See :meth:`ring_backends.Ring.entering_state`."""
    fields = {
        "order of calls": "entering_state",
        "layout": kind,
        "matrix": is_matrix,
        "decay": f"{decay.dtype} {[*decay.shape]}",
        "state": [*state.shape],
    }
    exchange = _Exchange.begin(members, traffic, fields, state, decay)
    layout = SequenceLayout(1, members.size, kind)  # read for the order of the pieces alone
    return cast(Tensor, _EnteringState.apply(decay, state, exchange, layout, is_matrix))  # type: ignore[no-untyped-call]


def check_maps(kind: LayoutKind, decay: Tensor, state: Tensor, *, is_matrix: bool) -> None:
    """Check the arguments of :meth:`ring_backends.Ring.entering_state`.

    Raises:
        TypeError, ValueError: they are not maps of states, or not one for each piece of the rank.
    """
    for name, tensor in {"decay": decay, "state": state}.items():
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} = {given}: expected a floating-point or complex tensor; convert it.")
    if decay.is_complex() and not state.is_complex():
        raise TypeError(f"state = {state.dtype}: expected a complex dtype, as decay is {decay.dtype}; convert it.")
    if decay.device != state.device:
        raise ValueError(f"decay is on {decay.device}, and state on {state.device}; move one of them.")
    num_pieces = 2 if kind == "zigzag" else 1
    shapes = [tensor.shape for tensor in (decay, state)]
    if num_pieces > 1:
        for name, shape in zip(("decay", "state"), shapes, strict=True):
            if not shape or shape[0] != num_pieces:
                raise ValueError(
                    f"{name} is {[*shape]}: expected [{num_pieces}, …], since a rank of the zigzag layout holds two "
                    "pieces of the sequence; stack those of the first and of the second piece."
                )
        shapes = [shape[1:] for shape in shapes]
    of_decay, of_state = shapes
    if is_matrix:
        rows = of_state[-2] if len(of_state) > 1 else None
        if len(of_decay) < 2 or of_decay[-1] != rows or of_decay[-2] != rows:
            raise ValueError(
                f"decay is {[*decay.shape]}, and state {[*state.shape]}: expected [..., K, K] and [..., K, V] with "
                "matrix=True."
            )
        of_decay, of_state = of_decay[:-2], of_state[:-2]
    try:
        fits = torch.broadcast_shapes(of_decay, of_state) == of_state
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"decay is {[*decay.shape]}, and state {[*state.shape]}: decay must broadcast to the shape of state; give "
            "it dims of size 1."
        )


@dataclass(frozen=True)
class _Exchange:
    """The messages of one direction of a call. ``call`` is None in a ring of one, which sends none."""

    members: Members
    traffic: Traffic
    call: Call | None

    @classmethod
    def begin(cls, members: Members, traffic: Traffic, fields: dict[str, object], *tensors: Tensor) -> _Exchange:
        members.check_connected()
        if members.agreement is None:
            return cls(members, traffic, None)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        fields |= {
            "dtype": str(tensors[0].dtype),
            "device": tensors[0].device.type,
            "gradients": "needed" if needs_gradient else "not needed",
        }
        return cls(members, traffic, members.agreement.begin(Configuration(fields)))

    @property
    def backward(self) -> _Exchange:
        if self.call is None:
            return self
        assert self.members.agreement is not None
        direction = backward_of(self.call.number)
        call = self.members.agreement.begin(self.call.configuration, direction=direction)
        return _Exchange(self.members, self.traffic, call)

    def send(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], index: int) -> None:
        """Send contiguous tensors to ring ranks, and receive tensors from them."""
        if self.call is None:
            return
        assert self.members.agreement is not None
        with self.members.agreement.report_errors(self.call):
            self.members.exchange(self.call, outgoing, incoming, index)
        sent = [tensor for tensor in outgoing.values() if tensor.numel()]
        self.traffic.messages += len(sent)
        self.traffic.bytes += sum(tensor.nbytes for tensor in sent)


# --- halo -------------------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """Rows of a halo, on the rank that holds them and on the rank that they are sent to."""

    source: int
    destination: int
    held: slice
    wanted: slice

    @property
    def num_rows(self) -> int:
        return int(self.held.stop - self.held.start)


@lru_cache(maxsize=256)
def _copies(layout: SequenceLayout, width: int, rank: int) -> tuple[_Copy, ...]:
    """The rows that ``rank`` sends, keeps or gets. Those between two ranks have the same order on both."""
    others = range(layout.ring_size)
    pairs = dict.fromkeys([*((rank, other) for other in others), *((other, rank) for other in others)])
    return tuple(copy for pair in pairs for copy in _copies_between(layout, width, *pair))


def _copies_between(layout: SequenceLayout, width: int, source: int, destination: int) -> Iterator[_Copy]:
    for number, piece in enumerate(layout.pieces(destination)):
        first = 0
        for held in layout.pieces(source):
            start, stop = max(held.start, piece.start - width, 0), min(held.stop, piece.start)
            if start < stop:
                in_halo = start - piece.start + width * (number + 1)
                yield _Copy(
                    source,
                    destination,
                    slice(first + start - held.start, first + stop - held.start),
                    slice(in_halo, in_halo + stop - start),
                )
            first += len(held)


class _Halo(torch.autograd.Function):
    """Sends rows to the ranks that hold the next positions. The backward returns and adds their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange, layout: SequenceLayout, width: int, dim: int) -> Tensor:
        ctx.exchange, ctx.layout, ctx.width, ctx.dim = exchange, layout, width, dim
        ctx.num_rows = rows.shape[dim]
        held = rows.movedim(dim, 0).resolve_conj().resolve_neg()
        rank = exchange.members.rank
        wanted = held.new_zeros((width * len(layout.chunks(rank)), *held.shape[1:]))
        for copy, part in _exchanged(exchange, _copies(layout, width, rank), held, to_wanted=True):
            wanted[copy.wanted] = part
        return wanted.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted, rank = grad.movedim(ctx.dim, 0).resolve_conj().resolve_neg(), ctx.exchange.members.rank
        dtype = torch.promote_types(grad.dtype, torch.float32)
        held = wanted.new_zeros((ctx.num_rows, *wanted.shape[1:]), dtype=dtype)
        copies = _copies(ctx.layout, ctx.width, rank)
        for copy, part in _exchanged(ctx.exchange.backward, copies, wanted, to_wanted=False):
            held[copy.held] += part
        return held.to(grad.dtype).movedim(0, ctx.dim), None, None, None, None


def _exchanged(
    exchange: _Exchange, copies: Sequence[_Copy], rows: Tensor, *, to_wanted: bool
) -> Iterator[tuple[_Copy, Tensor]]:
    """Send rows, and return those that this rank gets: of the halo, or the gradients of its own rows."""
    rank = exchange.members.rank
    leaving: dict[int, list[_Copy]] = defaultdict(list)
    arriving: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        sender, receiver = (copy.source, copy.destination) if to_wanted else (copy.destination, copy.source)
        if sender == rank:
            leaving[receiver].append(copy)
        if receiver == rank:
            arriving[sender].append(copy)
    parts = {
        peer: torch.cat([rows[copy.held if to_wanted else copy.wanted] for copy in of_peer])
        for peer, of_peer in leaving.items()
    }
    own = parts.pop(rank, None)
    received = {
        peer: rows.new_empty((sum(copy.num_rows for copy in of_peer), *rows.shape[1:]))
        for peer, of_peer in arriving.items()
        if peer != rank
    }
    exchange.send(parts, received, 0)
    if own is not None:
        received[rank] = own
    for peer in sorted(received):
        of_peer = arriving[peer]
        yield from zip(of_peer, received[peer].split([copy.num_rows for copy in of_peer]), strict=True)


# --- recurrent states -------------------------------------------------------------------------------------------------


class _Map(NamedTuple):
    """What rows do to a state S: decay · S + state. ``decay`` is None where it acts on the state 0 before position 0."""

    decay: Tensor | None
    state: Tensor

    def after(self, earlier: _Map, *, is_matrix: bool) -> _Map:
        """This map after an earlier one."""
        assert self.decay is not None
        state = _apply(self.decay, earlier.state, is_matrix) + self.state
        decay = None if earlier.decay is None else _apply(self.decay, earlier.decay, is_matrix)
        return _Map(decay, state)


class _EnteringState(torch.autograd.Function):
    """The states that enter each piece: an exclusive scan over the pieces in order of position.

    With S the entering states and g the gradients of them, the gradient X of what a piece leaves behind is
    X_i = g_{i+1} + decay_{i+1}ᵀ X_{i+1}: the same scan from the last piece to the first. The gradient of a piece's
    decay is X_i S_iᵀ.
    """

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, state: Tensor, exchange: _Exchange, layout: SequenceLayout, is_matrix: bool
    ) -> Tensor:
        ctx.exchange, ctx.layout, ctx.is_matrix = exchange, layout, is_matrix
        dtype = torch.promote_types(torch.promote_types(decay.dtype, state.dtype), torch.float32)
        own = [
            _Map(*of_piece) for of_piece in zip(*(_by_piece(x.to(dtype), layout) for x in (decay, state)), strict=True)
        ]
        entering = _joined(_scan(exchange, layout, own, is_matrix=is_matrix, is_reversed=False), layout)
        ctx.save_for_backward(decay, entering)
        ctx.dtypes = decay.dtype, state.dtype
        return entering.to(state.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, entering = ctx.saved_tensors
        layout, is_matrix = ctx.layout, ctx.is_matrix
        decays, grads, states = (_by_piece(x.to(entering.dtype), layout) for x in (decay, grad, entering))
        decays = tuple(x.mH if is_matrix else x.conj() for x in decays)
        own = [_Map(*of_piece) for of_piece in zip(decays, grads, strict=True)]
        leaving = _scan(ctx.exchange.backward, layout, own, is_matrix=is_matrix, is_reversed=True)
        grad_decays = []
        for of_state, entered, like in zip(leaving, states, decays, strict=True):
            with torch.autocast(of_state.device.type, enabled=False):
                of_decay = of_state @ entered.mH if is_matrix else of_state * entered.conj()
            grad_decays.append(of_decay.sum_to_size(like.shape))
        of_decay, of_state = (_joined(x, layout) for x in (grad_decays, leaving))
        if not ctx.dtypes[0].is_complex:
            of_decay = of_decay.real
        if not ctx.dtypes[1].is_complex:
            of_state = of_state.real
        return of_decay.to(ctx.dtypes[0]), of_state.to(ctx.dtypes[1]), None, None, None


def _by_piece(tensor: Tensor, layout: SequenceLayout) -> tuple[Tensor, ...]:
    return (tensor,) if layout.kind == "contiguous" else tensor.unbind(0)


def _joined(of_pieces: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
    return of_pieces[0] if layout.kind == "contiguous" else torch.stack([*of_pieces])


def _apply(decay: Tensor, state: Tensor, is_matrix: bool) -> Tensor:
    with torch.autocast(state.device.type, enabled=False):
        return decay @ state if is_matrix else decay * state


def _scan(
    exchange: _Exchange, layout: SequenceLayout, own: Sequence[_Map], *, is_matrix: bool, is_reversed: bool
) -> list[Tensor]:
    """The state after all earlier pieces, for each piece of this rank, in the order of its pieces.

    First every piece sends its map to the next piece. Then it sends the map of up to d pieces to the piece d later, for
    d = 1, 2, 4, … (Hillis and Steele, 1986). A map of all earlier pieces is sent without its decay.
    """
    num, rank = layout.num_chunks, exchange.members.rank
    owners = layout.chunk_ranks().tolist()
    places = list(layout.chunks(rank))
    if is_reversed:
        owners, places = owners[::-1], [num - 1 - chunk for chunk in places]
    before = {place: _Map(None, torch.zeros_like(own[0].state)) for place in places}
    arrived = _pass_on(exchange, owners, dict(zip(places, own, strict=True)), range(num - 1), 1, 0, own[0], 0)
    before |= arrived
    distance = 1
    while distance < num - 1:
        senders = range(1, num - distance)
        arrived = _pass_on(exchange, owners, before, senders, distance, distance, own[0], distance)
        before |= {place: before[place].after(earlier, is_matrix=is_matrix) for place, earlier in arrived.items()}
        distance *= 2
    return [before[place].state for place in places]


def _pass_on(
    exchange: _Exchange,
    owners: Sequence[int],
    maps: Mapping[int, _Map],
    senders: range,
    distance: int,
    last_complete: int,
    like: _Map,
    index: int,
) -> dict[int, _Map]:
    """Send the maps of some pieces to the pieces ``distance`` later. Returns those that reach pieces of this rank.

    Args:
        owners: the rank of each piece.
        maps: those of this rank's pieces.
        last_complete: maps of the pieces up to this one have no decay.
        like: a map with a decay, for the shapes.
        index: number of the exchange within the call.
    """
    rank = exchange.members.rank
    leaving: dict[int, list[Tensor]] = defaultdict(list)
    arriving: dict[int, list[int]] = defaultdict(list)
    arrived: dict[int, _Map] = {}
    for place in senders:
        source, destination = owners[place], owners[place + distance]
        if source == rank:
            passed = maps[place] if place > last_complete else _Map(None, maps[place].state)
            if destination == rank:
                arrived[place + distance] = passed
            else:
                leaving[destination] += [part.flatten() for part in passed if part is not None]
        elif destination == rank:
            arriving[source].append(place)

    def shapes(place: int) -> list[torch.Size]:
        return [part.shape for part in (like if place > last_complete else like[1:])]

    received = {
        peer: like.state.new_empty(sum(shape.numel() for place in of_peer for shape in shapes(place)))
        for peer, of_peer in arriving.items()
    }
    exchange.send({peer: torch.cat(parts) for peer, parts in leaving.items()}, received, index)
    for peer, of_peer in arriving.items():
        parts = iter(received[peer].split([shape.numel() for place in of_peer for shape in shapes(place)]))
        for place in of_peer:
            *decay, state = (next(parts).view(shape) for shape in shapes(place))
            arrived[place + distance] = _Map(decay[0] if decay else None, state)
    return arrived
