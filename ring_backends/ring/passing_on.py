"""What the rows of a rank pass on to later rows: the positions before each piece of a sequence, and recurrent states.

A piece is a range of positions that a rank holds: one with the contiguous layout, two with the zigzag layout.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

from ring_backends.kernels.dtype import without_autocast
from ring_backends.ring.calls import Call, Configuration, backward_of
from ring_backends.ring.members import Members, Traffic
from ring_backends.schedule.layout import LayoutKind, SequenceLayout


def halo(members: Members, traffic: Traffic, layout: SequenceLayout, rows: Tensor, width: int, dim: int) -> Tensor:
    """See :meth:`ring_backends.Ring.halo`."""
    dim %= rows.dim()
    fields: dict[str, object] = {
        "order of calls": "halo",
        "seq_len": layout.seq_len,
        "layout": layout.kind,
        "width": width,
        "dim": dim,
        "sizes of the other dims": [size for axis, size in enumerate(rows.shape) if axis != dim],
    }
    pairs = {(copy.source, copy.destination) for copy in _copies(layout, width, members.rank)}
    exchange = _Exchange.begin(members, traffic, fields, [rows], pairs)
    return cast(Tensor, _Halo.apply(rows, exchange, layout, width, dim))  # type: ignore[no-untyped-call]


def entering_state(
    members: Members, traffic: Traffic, kind: LayoutKind, decay: Tensor, state: Tensor, *, is_matrix: bool
) -> Tensor:
    """See :meth:`ring_backends.Ring.entering_state`."""
    fields: dict[str, object] = {
        "order of calls": "entering_state",
        "layout": kind,
        "matrix": is_matrix,
        "decay": f"{decay.dtype} {[*decay.shape]}",
        "state": [*state.shape],
    }
    layout = SequenceLayout(1, members.size, kind)  # for the order of the pieces alone
    exchange = _Exchange.begin(members, traffic, fields, [state, decay], _pairs_of_scan(layout, members.rank))
    if kind == "contiguous":
        decay, state = decay.unsqueeze(0), state.unsqueeze(0)
    decay = decay.reshape(len(decay), *(1,) * (state.dim() - decay.dim()), *decay.shape[1:])
    entering = _EnteringState.apply(decay, state, exchange, layout, is_matrix)  # type: ignore[no-untyped-call]
    return cast(Tensor, entering.squeeze(0) if kind == "contiguous" else entering)


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
    def begin(
        cls,
        members: Members,
        traffic: Traffic,
        fields: dict[str, object],
        tensors: Sequence[Tensor],
        pairs: Iterable[tuple[int, int]],
    ) -> _Exchange:
        """Begin a call on all ranks.

        Args:
            fields: those that must be equal on all ranks, besides dtype and device of the first of ``tensors`` and
                whether any of them needs a gradient.
            pairs: (source, destination) of the forward's messages to and from this rank, and possibly to itself.
        """
        members.check_connected()
        if members.agreement is None:
            return cls(members, traffic, None)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        fields |= {
            "dtype": str(tensors[0].dtype),
            "device": tensors[0].device.type,
            "gradients": "needed" if needs_gradient else "not needed",
        }
        call = members.agreement.begin(Configuration(fields))
        to_others = {pair for pair in pairs if pair[0] != pair[1]}
        back = {(destination, source) for source, destination in to_others} if needs_gradient else set()
        members.connect(call, to_others | back, tensors[0])
        return cls(members, traffic, call)

    @property
    def backward(self) -> _Exchange:
        """The backward of this call, which begins it on all ranks."""
        if self.call is None:
            return self
        assert self.members.agreement is not None
        direction = backward_of(self.call.number)
        call = self.members.agreement.begin(self.call.configuration, direction=direction)
        return _Exchange(self.members, self.traffic, call)

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Wraps this rank's part in the call: without autocast, and an error in it is published for the other ranks."""
        with contextlib.ExitStack() as stack:
            if self.call is not None:
                assert self.members.agreement is not None
                stack.enter_context(self.members.agreement.report_errors(self.call))
            stack.enter_context(without_autocast(device))
            yield

    def swap(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Size]], like: Tensor, index: int
    ) -> dict[int, Sequence[Tensor]]:
        """Send tensors to ring ranks, one message to each, and return those that each of them sends to this rank.

        Args:
            outgoing: by ring rank. What this rank sends to itself it gets as it is.
            incoming: the shapes of the tensors of each ring rank.
            like: a tensor of the device and dtype of all of them.
            index: number of the exchange within the call.
        """
        rank = self.members.rank
        leaving = {
            peer: torch.cat([tensor.flatten() for tensor in tensors])
            for peer, tensors in outgoing.items()
            if peer != rank
        }
        arriving = {
            peer: like.new_empty(sum(shape.numel() for shape in shapes))
            for peer, shapes in incoming.items()
            if peer != rank
        }
        if self.call is not None:
            self.members.exchange(self.call, leaving, arriving, index)
            sent = [tensor for tensor in leaving.values() if tensor.numel()]
            self.traffic.messages += len(sent)
            self.traffic.bytes += sum(tensor.nbytes for tensor in sent)
        arrived = {rank: outgoing[rank]} if rank in incoming else {}
        for peer, buffer in arriving.items():
            parts = buffer.split([shape.numel() for shape in incoming[peer]])
            arrived[peer] = [part.view(shape) for part, shape in zip(parts, incoming[peer], strict=True)]
        return arrived


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
        ctx.exchange, ctx.layout, ctx.width, ctx.dim, ctx.shape = exchange, layout, width, dim, rows.shape
        rank = exchange.members.rank
        with exchange.running(rows.device):
            shape = [*rows.shape]
            shape[dim] = width * len(layout.chunks(rank))
            wanted = rows.new_zeros(shape)
            for copy, part in _copied(exchange, _copies(layout, width, rank), rows.movedim(dim, 0), to_wanted=True):
                wanted.movedim(dim, 0)[copy.wanted] = part
        return wanted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, dim = ctx.exchange.backward, ctx.dim
        with exchange.running(grad.device):
            held = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
            copies = _copies(ctx.layout, ctx.width, exchange.members.rank)
            for copy, part in _copied(exchange, copies, grad.movedim(dim, 0), to_wanted=False):
                held.movedim(dim, 0)[copy.held] += part
            return held.to(grad.dtype), None, None, None, None


def _copied(
    exchange: _Exchange, copies: Sequence[_Copy], rows: Tensor, *, to_wanted: bool
) -> Iterator[tuple[_Copy, Tensor]]:
    """Send rows, and return those that this rank gets: of the halo, or the gradients of its own rows."""
    rank = exchange.members.rank
    leaving: defaultdict[int, list[Tensor]] = defaultdict(list)
    arriving: defaultdict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        sender, receiver = (copy.source, copy.destination) if to_wanted else (copy.destination, copy.source)
        if sender == rank:
            leaving[receiver].append(rows[copy.held if to_wanted else copy.wanted])
        if receiver == rank:
            arriving[sender].append(copy)
    shapes = {
        peer: [Size((copy.num_rows, *rows.shape[1:])) for copy in of_peer] for peer, of_peer in sorted(arriving.items())
    }
    arrived = exchange.swap(leaving, shapes, rows, 0)
    for peer in shapes:  # in the order of ranks, so that sums are reproducible
        yield from zip(arriving[peer], arrived[peer], strict=True)


# --- recurrent states -------------------------------------------------------------------------------------------------


class _Map(NamedTuple):
    """What rows do to a state S: decay · S + state. ``decay`` is None where they begin at position 0, so S is 0."""

    state: Tensor
    decay: Tensor | None

    def after(self, earlier: _Map, *, is_matrix: bool) -> _Map:
        """The map of earlier rows and these rows together."""
        assert self.decay is not None
        multiply = torch.matmul if is_matrix else torch.mul
        decay = None if earlier.decay is None else multiply(self.decay, earlier.decay)
        return _Map(multiply(self.decay, earlier.state) + self.state, decay)


class _EnteringState(torch.autograd.Function):
    """The states that enter each piece: an exclusive scan over the pieces in order of position.

    With S the entering states and g their gradients, the gradient X of what a piece leaves behind is
    X_i = g_{i+1} + decay_{i+1}ᴴ X_{i+1}: the same scan from the last piece to the first. The gradient of a piece's
    decay is X_i S_iᴴ.

    ``decay`` and ``state`` are [pieces of this rank, …], with equally many dims.
    """

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, state: Tensor, exchange: _Exchange, layout: SequenceLayout, is_matrix: bool
    ) -> Tensor:
        ctx.exchange, ctx.layout, ctx.is_matrix, ctx.dtypes = exchange, layout, is_matrix, (decay.dtype, state.dtype)
        with exchange.running(state.device):
            dtype = torch.promote_types(torch.promote_types(decay.dtype, state.dtype), torch.float32)
            decay, state_dtype = decay.to(dtype), state.dtype
            entering = _scan(exchange, layout, decay, state.to(dtype), is_matrix=is_matrix, is_reversed=False)
            ctx.save_for_backward(decay, entering if ctx.needs_input_grad[0] else None)
            return entering.to(state_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, (decay, entering) = ctx.exchange.backward, ctx.saved_tensors
        with exchange.running(grad.device):
            turned = decay.mH if ctx.is_matrix else decay.conj()
            grad = grad.to(decay.dtype)
            grad_state = _scan(exchange, ctx.layout, turned, grad, is_matrix=ctx.is_matrix, is_reversed=True)
            grad_decay = None
            if entering is not None:
                grad_decay = grad_state @ entering.mH if ctx.is_matrix else grad_state * entering.conj()
                grad_decay = grad_decay.sum_to_size(decay.shape)
                grad_decay = (grad_decay if ctx.dtypes[0].is_complex else grad_decay.real).to(ctx.dtypes[0])
            return grad_decay, grad_state.to(ctx.dtypes[1]), None, None, None


def _distances(layout: SequenceLayout) -> list[int]:
    """How many pieces the messages of each round of a scan go."""
    return [2**index for index in range((layout.num_chunks - 1).bit_length())]


@lru_cache
def _pairs_of_scan(layout: SequenceLayout, rank: int) -> set[tuple[int, int]]:
    """The (source, destination) pairs of a scan with ``rank``."""
    owners = layout.chunk_ranks().tolist()
    pairs = {pair for distance in _distances(layout) for pair in zip(owners, owners[distance:], strict=False)}
    return {pair for pair in pairs if rank in pair}


def _scan(
    exchange: _Exchange, layout: SequenceLayout, decay: Tensor, state: Tensor, *, is_matrix: bool, is_reversed: bool
) -> Tensor:
    """The state after all earlier pieces, for each piece of this rank: [pieces of this rank, …].

    In the rounds d = 1, 2, 4, …, each piece sends the map of the last d pieces up to itself to the piece d later
    (Hillis and Steele, 1986). If d pieces reach back to the first one, the map is sent without its decay.
    """
    owners, places = layout.chunk_ranks().tolist(), [*layout.chunks(exchange.members.rank)]
    if is_reversed:
        owners, places = owners[::-1], [len(owners) - 1 - place for place in places]
    own = {place: _Map(*of_piece) for place, *of_piece in zip(places, state.unbind(0), decay.unbind(0), strict=True)}
    maps, before = dict(own), dict[int, _Map]()  # of the last d pieces up to each one, and of those before it alone
    for distance in _distances(layout):
        for place, earlier in _pass_on(exchange, owners, maps, distance, next(iter(own.values()))).items():
            before[place] = before[place].after(earlier, is_matrix=is_matrix) if place in before else earlier
            maps[place] = own[place].after(before[place], is_matrix=is_matrix)
    return torch.stack([before[place].state if place in before else torch.zeros_like(state[0]) for place in places])


def _pass_on(
    exchange: _Exchange, owners: Sequence[int], maps: Mapping[int, _Map], distance: int, like: _Map
) -> dict[int, _Map]:
    """Send maps to the pieces ``distance`` later, and return those that reach pieces of this rank.

    Args:
        owners: the rank of each piece.
        maps: those of the last ``distance`` pieces up to each piece of this rank.
        like: a map with a decay, for the shapes.
    """
    rank = exchange.members.rank
    leaving: defaultdict[int, list[Tensor]] = defaultdict(list)
    arriving: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    shapes: defaultdict[int, list[Size]] = defaultdict(list)
    for place, (source, destination) in enumerate(zip(owners, owners[distance:], strict=False)):
        num_parts = 1 if place < distance else 2
        if source == rank:
            leaving[destination] += cast("tuple[Tensor, ...]", maps[place][:num_parts])
        if destination == rank:
            arriving[source].append((place + distance, num_parts))
            shapes[source] += [part.shape for part in cast("tuple[Tensor, ...]", like[:num_parts])]
    arrived = exchange.swap(leaving, shapes, like.state, distance)
    parts = {peer: iter(of_peer) for peer, of_peer in arrived.items()}
    return {
        place: _Map(next(parts[peer]), next(parts[peer]) if num_parts == 2 else None)
        for peer, of_peer in arriving.items()
        for place, num_parts in of_peer
    }
