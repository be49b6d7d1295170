"""The functions of transformers' modules that compute rows from earlier rows, on a ring.

The earlier rows come from the ring (:meth:`~ring_backends.Ring.halo`), or the state that they leave behind
(:meth:`~ring_backends.Ring.entering_state`).

A recurrence is linear in its state. So one call on a rank's own rows gives what these rows compute from a state of 0,
their map of states, and how their results respond to the state that enters. Ranks need not wait for each other's rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ring_backends.integrations.transformers.caches import from_last_row
from ring_backends.ring.ring import Ring


@dataclass(frozen=True)
class CalledSequence:
    """The rows of a rank in one call of a model.

    Attributes:
        row_numbers: int [batch, rows], the number of each row in its packed document, in the memory of the host; None
            for one document per entry.
    """

    ring: Ring
    seq_len: int
    row_numbers: Tensor | None = None

    @classmethod
    def of_arguments(cls, ring: Ring, arguments: Mapping[str, Any]) -> CalledSequence | None:
        """The sequence that the arguments of :func:`shard_inputs` describe; None if they describe none."""
        seq_len = arguments.get("seq_len")
        if seq_len is None:
            return None
        is_packed = arguments.get("document_ids") is not None
        return cls(ring, seq_len, arguments["row_numbers"].cpu() if is_packed else None)

    @property
    def pieces(self) -> list[range]:
        """The local rows of each piece of the sequence."""
        bounds, first = [], 0
        for piece in self.ring.layout(self.seq_len).pieces(self.ring.rank):
            bounds.append(range(first, first + len(piece)))
            first += len(piece)
        return bounds

    @property
    def are_first(self) -> list[bool]:
        """Whether each piece begins with position 0."""
        return [piece.start == 0 for piece in self.ring.layout(self.seq_len).pieces(self.ring.rank)]

    def entering_states(self, maps: Sequence[tuple[Tensor, Tensor]], *, is_matrix: bool = False) -> list[Tensor]:
        """The state that enters each piece, from the decay and the state of each."""
        decay, state = (torch.stack(of_pieces) for of_pieces in zip(*maps, strict=True))
        if self.ring.layout_kind == "contiguous":
            decay, state = decay[0], state[0]
        entering = self.ring.entering_state(decay, state, matrix=is_matrix)
        return [entering] if self.ring.layout_kind == "contiguous" else [*entering.unbind(0)]


@dataclass(frozen=True)
class Called:
    """A call of a function of transformers, in the form in which its caller has written it.

    A kernel that takes the function's place may have other names for positional arguments, so these stay positional.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        by_place = dict(zip(self.names, self.args, strict=False))
        return by_place[name] if name in by_place else self.kwargs.get(name)

    def with_changes(self, **changes: Any) -> Called:
        by_place = {name: changes.pop(name) for name in self.names[: len(self.args)] if name in changes}
        args = tuple(by_place.get(name, value) for name, value in zip(self.names, self.args, strict=False))
        return replace(self, args=args, kwargs={**self.kwargs, **changes})

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


class _Run(NamedTuple):
    """What a recurrence computes from rows.

    Attributes:
        out: the results of the rows after a state of 0.
        decay, state: the rows map a state S to decay · S + state.
        response: what S adds to ``out``; None where no state enters. ``decay`` is 0 then.
    """

    out: Tensor
    decay: Tensor
    state: Tensor
    response: Callable[[Tensor], Tensor] | None


class RowFunction(ABC):
    """A function of transformers that computes rows from earlier rows.

    Attributes:
        rows: the dimension of the rows in each argument that has rows. Dimension 0 is the batch.
        out_rows: the dimension of the rows in the result.
        results: the argument that the result has the shape of.
        needs: names that the parameters of the function must have.
    """

    rows: ClassVar[Mapping[str, int]]
    out_rows: ClassVar[int]
    results: ClassVar[str] = "hidden_states"
    needs: ClassVar[frozenset[str]]

    def cut(self, called: Called, rows: range, entry: int | None = None) -> Called:
        """The call with some of its rows, of all entries of the batch or of one."""
        changes = {}
        for name, dim in self.rows.items():
            if called[name] is not None:
                part = called[name].narrow(dim, rows.start, len(rows))
                changes[name] = part if entry is None else part[entry : entry + 1]
        marks = {name: None for name in ("seq_idx", "cu_seqlens") if called[name] is not None}
        return called.with_changes(**changes, **marks)

    def alone(self, called: Called) -> Any:
        """What a probe gets instead of the results: rows that depend on their own arguments alone."""
        results: Tensor = called[self.results]
        factors = torch.ones((), device=results.device)
        for name, dim in self.rows.items():
            if called[name] is not None:
                rows = called[name].movedim(dim, 1).flatten(2).float()
                weights = torch.linspace(-1, 1, rows.shape[2], device=rows.device)
                factors = factors + torch.asinh(rows @ weights)
        by_row = results.movedim(self.out_rows, -1)  # [batch, …, rows]
        by_row = by_row * factors.unflatten(0, (-1, *[1] * (by_row.dim() - 2)))
        return by_row.to(results.dtype).movedim(-1, self.out_rows)

    @abstractmethod
    def on_ring(self, called: Called, sequence: CalledSequence) -> Any:
        """What the function returns for the rows of this rank."""

    @abstractmethod
    def describe(self, called: Called) -> str:
        """What the function passes on, in words."""


class _Convolution(RowFunction):
    """A causal convolution of each channel: [batch, channels, rows]."""

    rows: ClassVar = {"hidden_states": 2}
    out_rows = 2
    needs = frozenset(("hidden_states", "weight", "bias", "activation"))

    def on_ring(self, called: Called, sequence: CalledSequence) -> Tensor:
        rows, width = called["hidden_states"], called["weight"].shape[-1] - 1
        before = sequence.ring.halo(rows, width, 2, sequence.seq_len)
        outs = []
        for number, piece in enumerate(sequence.pieces):
            halo = before.narrow(2, number * width, width)
            outs += self._of_entries(called, sequence, piece, halo)
        return torch.cat(outs, 2)

    def _of_entries(self, called: Called, sequence: CalledSequence, piece: range, halo: Tensor) -> list[Tensor]:
        if not len(piece):
            return []
        if sequence.row_numbers is None:
            return [self._of_run(self.cut(called, piece), halo)]
        by_entry = []
        for entry, numbers in enumerate(sequence.row_numbers[:, piece.start : piece.stop]):
            outs, own = [], halo[entry : entry + 1]
            # Rows of the halo that belong to the document of the first row.
            num_own = min(int(numbers[0]), own.shape[2])
            own = F.pad(own[:, :, own.shape[2] - num_own :], (own.shape[2] - num_own, 0))
            for run in _runs(numbers, piece):
                outs.append(self._of_run(self.cut(called, run, entry), own))
                own = torch.zeros_like(own)
            by_entry.append(torch.cat(outs, 2))
        return [torch.cat(by_entry)]

    @staticmethod
    def _of_run(called: Called, halo: Tensor) -> Tensor:
        rows = torch.cat([halo, called["hidden_states"]], 2)
        out: Tensor = called.with_changes(hidden_states=rows)()
        return out[:, :, halo.shape[2] :]

    def describe(self, called: Called) -> str:
        width = called["weight"].shape[-1]
        return f"convolution of {width} positions (passes on {width - 1})"


class _Recurrence(RowFunction):
    """A function that is linear in a state.

    Attributes:
        is_matrix: whether the decay of a state is a matrix.
        asks_for_state: the argument with which a caller asks for the state after the last row.
    """

    is_matrix: ClassVar[bool] = False
    asks_for_state: ClassVar[str]

    @abstractmethod
    def run(self, called: Called, *, is_entered: bool) -> _Run:
        """Compute rows, and how they respond to a state, if one enters."""

    @abstractmethod
    def unchanged(self, called: Called) -> tuple[Tensor, Tensor]:
        """The decay and the state of no rows."""

    def finish(self, called: Called, out: Tensor) -> Tensor:
        """What the function does to the sum of both results."""
        return out

    def on_ring(self, called: Called, sequence: CalledSequence) -> Any:
        pieces = [
            self._piece(called, sequence, *piece) for piece in zip(sequence.pieces, sequence.are_first, strict=True)
        ]
        entered = sequence.entering_states([(run.decay, run.state) for run in pieces], is_matrix=self.is_matrix)
        outs = []
        for run, entering_piece in zip(pieces, entered, strict=True):
            out = run.out
            if run.response is not None:
                out = out + run.response(entering_piece).to(out.dtype)
            outs.append(_After.apply(out, entering_piece))  # type: ignore[no-untyped-call]
        out = self.finish(called, torch.cat(outs, self.out_rows))
        last_state = None
        if called[self.asks_for_state]:
            last, before = pieces[-1], entered[-1]
            after = last.decay @ before if self.is_matrix else last.decay * before
            last_state = from_last_row(sequence.ring, sequence.seq_len, after + last.state)
        return self.result(called, out, last_state)

    def alone(self, called: Called) -> Any:
        return self.result(called, super().alone(called), None)

    def result(self, called: Called, out: Tensor, last_state: Tensor | None) -> Any:
        """The result in the form in which the function returns it."""
        return out if last_state is None else (out, last_state)

    def _piece(self, called: Called, sequence: CalledSequence, piece: range, is_first: bool) -> _Run:
        """The rows of one piece."""
        if not len(piece):
            one = self.run(self.cut(called, range(1)), is_entered=False)
            return _Run(one.out.narrow(self.out_rows, 0, 0), *self.unchanged(called), None)
        if sequence.row_numbers is None:
            return self.run(self.cut(called, piece), is_entered=not is_first)
        entries = [
            self._entry(called, piece, entry, numbers)
            for entry, numbers in enumerate(sequence.row_numbers[:, piece.start : piece.stop])
        ]

        def response(state: Tensor) -> Tensor:
            parts = []
            for run, of_entry in zip(entries, state.split(1), strict=True):
                parts.append(torch.zeros_like(run.out) if run.response is None else run.response(of_entry))
            return torch.cat(parts)

        out, decay, state = (torch.cat(parts) for parts in zip(*(run[:3] for run in entries), strict=True))
        return _Run(out, decay, state, None if all(run.response is None for run in entries) else response)

    def _entry(self, called: Called, piece: range, entry: int, numbers: Tensor) -> _Run:
        """The documents of one entry in a piece. Only the first may have begun before it."""
        is_entered = bool(numbers[0] > 0)
        runs: list[_Run] = []
        for run in _runs(numbers, piece):
            runs.append(self.run(self.cut(called, run, entry), is_entered=is_entered and not runs))
        first = runs[0]
        if len(runs) == 1:
            return first

        def response(state: Tensor) -> Tensor:
            assert first.response is not None
            others = [torch.zeros_like(run.out) for run in runs[1:]]
            return torch.cat([first.response(state), *others], self.out_rows)

        out = torch.cat([run.out for run in runs], self.out_rows)
        return _Run(out, torch.zeros_like(first.decay), runs[-1].state, response if is_entered else None)

    def _start(self, called: Called, out: Tensor, state: Tensor) -> _Run:
        """The run of rows that no state enters."""
        return _Run(out, torch.zeros_like(self.unchanged(called)[0]), state, None)


class _DeltaRule(_Recurrence):
    """Gated delta rules: S → exp(g) (I − beta k kᵀ) S + beta k vᵀ with S [batch, heads, K, V]; g is a number, or K.

    The columns of a state and of the values do not mix. So K further columns, with values of 0 and the identity as
    their state, give the rows' map of states. Their results are the rows' response to each row of a state.
    """

    rows = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    out_rows = 1
    results = "value"
    needs = frozenset((*rows, "initial_state", "output_final_state"))
    is_matrix = True
    asks_for_state = "output_final_state"

    def run(self, called: Called, *, is_entered: bool) -> _Run:
        value = called["value"]
        width = value.shape[-1]
        if not is_entered:
            return self._start(called, *called.with_changes(initial_state=None, output_final_state=True)())
        decay, state = self.unchanged(called)
        wide = torch.cat([value, value.new_zeros(*value.shape[:-1], decay.shape[-1])], -1)
        changes = {"value": wide, "initial_state": torch.cat([state, decay], -1), "output_final_state": True}
        out, after = called.with_changes(**changes)()
        responses: Tensor = out[..., width:].transpose(1, 2)

        def response(state: Tensor) -> Tensor:
            return (responses.to(state.dtype) @ state).transpose(1, 2)

        return _Run(out[..., :width], after[..., width:], after[..., :width], response)

    def unchanged(self, called: Called) -> tuple[Tensor, Tensor]:
        key, value = called["key"], called["value"]
        shape = value.shape[0], value.shape[2], key.shape[-1]
        identity = torch.eye(key.shape[-1], dtype=torch.float32, device=key.device).expand(*shape, key.shape[-1])
        return identity, torch.zeros(*shape, value.shape[-1], dtype=torch.float32, device=key.device)

    def result(self, called: Called, out: Tensor, last_state: Tensor | None) -> Any:
        return out, last_state

    def describe(self, called: Called) -> str:
        heads, keys, values = called["value"].shape[2], called["key"].shape[-1], called["value"].shape[-1]
        return f"delta rule (passes on {heads} × {keys} × {values} numbers and {heads} matrices of {keys} × {keys})"


class _Mamba2(_Recurrence):
    """Mamba 2: S → exp(A dt) S + dt x Bᵀ with S [batch, heads, head_dim, state size]; A dt is a number per head."""

    rows = dict.fromkeys(("hidden_states", "dt", "B", "C"), 1)
    out_rows = 1
    needs = frozenset((*rows, "A", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"))
    asks_for_state = "return_final_states"

    def run(self, called: Called, *, is_entered: bool) -> _Run:
        _refuse_gate(called)
        out, state = called.with_changes(initial_states=None, return_final_states=True)()
        if not is_entered:
            return self._start(called, out, state)
        steps = called["dt"].float()
        if called["dt_bias"] is not None:
            steps = steps + called["dt_bias"].float()
        if called["dt_softplus"]:
            steps = F.softplus(steps)
        steps = steps.clamp(*(called["dt_limit"] or (0.0, math.inf)))
        decays: Tensor = (called["A"].float() * steps).cumsum(1).exp()  # [batch, rows, heads]
        reads = called["C"].float()  # [batch, rows, groups, state size]

        def response(state: Tensor) -> Tensor:
            by_group = state.unflatten(1, (reads.shape[2], -1))
            found: Tensor = torch.einsum("blgn,bghpn->blghp", reads.to(state.dtype), by_group).flatten(2, 3)
            return found * decays.unsqueeze(-1)

        return _Run(out, decays[:, -1, :, None, None], state, response)

    def unchanged(self, called: Called) -> tuple[Tensor, Tensor]:
        rows, reads = called["hidden_states"], called["C"]
        batch, _, heads, width = rows.shape
        options: Any = {"dtype": torch.float32, "device": rows.device}
        of_state = torch.zeros(batch, heads, width, reads.shape[-1], **options)
        return torch.ones(batch, heads, 1, 1, **options), of_state

    def describe(self, called: Called) -> str:
        heads, width = called["hidden_states"].shape[2:]
        return f"Mamba 2 (passes on {heads} × {width} × {called['C'].shape[-1]} numbers and {heads} decays)"


class _After(torch.autograd.Function):
    """``out``, which also depends on the state that enters: every rank then makes the call's backward, at one place."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, entering: Tensor) -> Tensor:
        ctx.save_for_backward(entering)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (entering,) = ctx.saved_tensors
        return grad, torch.zeros_like(entering)


_RESPONSE_ELEMENTS = 2**24
"""How many elements the response of Mamba 1 holds at a time."""


class _Mamba1(_Recurrence):
    """Mamba 1: S → exp(A dt) S + dt x Bᵀ with S [batch, channels, state size]; A dt is a number per element of S."""

    rows = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2)
    out_rows = 2
    needs = frozenset((*rows, "A", "delta_bias", "delta_softplus", "return_last_state"))
    asks_for_state = "return_last_state"

    def run(self, called: Called, *, is_entered: bool) -> _Run:
        out, state = self._with_state(called)
        if not is_entered:
            return self._start(called, out, state)
        steps = called["dt"].float()
        if called["delta_bias"] is not None:
            steps = steps + called["delta_bias"].float()[:, None]
        if called["delta_softplus"]:
            steps = F.softplus(steps)
        rates, steps, reads = called["A"].float(), steps.cumsum(2), called["C"].float()

        def of_rows(steps: Tensor, reads: Tensor, state: Tensor) -> Tensor:
            decays = (steps.unsqueeze(-1) * rates[:, None]).exp()
            found: Tensor = torch.einsum("bdln,bnl,bdn->bdl", decays, reads, state)
            return found

        def response(state: Tensor) -> Tensor:
            size = max(1, _RESPONSE_ELEMENTS // state.numel())
            blocks = zip(steps.split(size, 2), reads.split(size, 2), strict=True)
            if steps.shape[2] <= size:
                return of_rows(steps, reads, state)
            parts = [checkpoint(of_rows, *block, state, use_reentrant=False) for block in blocks]
            return torch.cat(parts, 2)

        return _Run(out, (steps[:, :, -1:] * rates).exp(), state, response)

    def _with_state(self, called: Called) -> tuple[Tensor, Tensor]:
        """The results, and the state after the last row.

        The backward of mamba_ssm ignores the gradient of this state. So the gradient comes from further rows, which
        leave the state as it is (dt is 0), and read one of its elements each.
        """
        rows, reads, size = called["hidden_states"], called["C"], called["A"].shape[1]
        further = {name: F.pad(called[name], (0, size)) for name in ("hidden_states", "B")}
        further["dt"] = F.pad(called["dt"], (0, size), value=-1e4 if called["delta_softplus"] else 0.0)
        identity = torch.eye(size, dtype=reads.dtype, device=reads.device).expand(len(reads), size, size)
        further["C"] = torch.cat([reads, identity], 2)
        out, state = called.with_changes(**further, z=None, return_last_state=True)()
        out, read = out.split([rows.shape[2], size], 2)
        return out, state.detach() + (read - read.detach()).to(state.dtype)

    def unchanged(self, called: Called) -> tuple[Tensor, Tensor]:
        rows, rates = called["hidden_states"], called["A"]
        shape = rows.shape[0], *rates.shape
        options: Any = {"dtype": torch.float32, "device": rows.device}
        return torch.ones(shape, **options), torch.zeros(shape, **options)

    def finish(self, called: Called, out: Tensor) -> Tensor:
        return out if called["z"] is None else out * F.silu(called["z"])

    def describe(self, called: Called) -> str:
        channels, size = called["A"].shape
        return f"Mamba 1 (passes on {channels} × {size} numbers and as many decays)"


def _refuse_gate(called: Called) -> None:
    if called["z"] is not None:
        raise ValueError("z is given to Mamba 2's scan: a gate within the scan is not supported by a ring.")


class _NoFusion(RowFunction):
    """A kernel that fuses a convolution with a scan. Without it, the layer computes both one after another."""

    rows: ClassVar[Mapping[str, int]] = {}
    out_rows = 1
    needs = frozenset()

    def alone(self, called: Called) -> None:
        return None

    def on_ring(self, called: Called, sequence: CalledSequence) -> None:
        return None

    def describe(self, called: Called) -> str:
        return ""


FUNCTIONS: dict[str, RowFunction] = {
    "causal_conv1d_fn": _Convolution(),
    "torch_chunk_gated_delta_rule": _DeltaRule(),
    "chunk_kimi_delta_attention": _DeltaRule(),
    "mamba2_chunk_scan": _Mamba2(),
    "mamba_selective_scan": _Mamba1(),
    "mamba2_split_conv1d_scan_combined": _NoFusion(),
    "mamba_inner_fn": _NoFusion(),
}
"""The functions of transformers' modules that compute rows from earlier rows, by name."""

_checked: set[tuple[Callable[..., Any], str]] = set()
"""The functions that :func:`check_cut` has checked, with the device."""


def check_cut(called: Called, of_rows: RowFunction) -> None:
    """Check that a function computes the same from two pieces of its rows as from all, as a ring does.

    Raises:
        ValueError: it does not, so it is another function than the one of this name that is known.
    """
    device = _device_of(called, of_rows)
    if isinstance(of_rows, _NoFusion) or (called.function, device) in _checked:
        return
    name = next(iter(of_rows.rows))
    alone = Ring(layout_kind="zigzag")  # a ring of one, with two pieces
    sequence = CalledSequence(alone, called[name].shape[of_rows.rows[name]])
    whole, pieces = (x[0] if isinstance(x, tuple) else x for x in (called(), of_rows.on_ring(called, sequence)))
    given = [called[name] for name in of_rows.rows if called[name] is not None]
    tolerance = (1e-3 if all(x.dtype.itemsize >= 4 for x in given) else 5e-2) * float(whole.abs().max())
    if whole.shape != pieces.shape or not bool(((whole - pieces).abs() <= tolerance).all()):
        raise ValueError(
            f"{called.function.__name__} of this release of transformers gives rows other values if they are computed "
            "in two pieces, so it is not the function that a ring knows; use a model without it."
        )
    _checked.add((called.function, device))


def _device_of(called: Called, of_rows: RowFunction) -> str:
    return "" if not of_rows.rows else str(called[next(iter(of_rows.rows))].device)


def _runs(numbers: Tensor, piece: range) -> Iterator[range]:
    """The rows of each document in a piece, from the numbers of the piece's rows in their documents."""
    starts = [0, *((numbers[1:] == 0).nonzero().flatten() + 1).tolist(), len(piece)]
    for start, stop in pairwise(starts):
        yield range(piece.start + start, piece.start + stop)
