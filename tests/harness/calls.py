"""Attention calls on a ring: the ranks make them, and the test joins and compares their results.

An :class:`AttentionCase` becomes one call per rank, each on its own rows. Rings of one world get different numbers, so
that a leak between rings changes the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import FOUR, RingSpec, backend, ring_here, ring_of, rows_of_ranks
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

FP64_TOLERANCE = 1e-10


class Results(NamedTuple):
    """The results of one call, for the rows of a rank or for the whole sequence. A gradient not computed is None."""

    out: Tensor
    lse: Tensor
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    grad_sinks: Tensor | None = None

    def computed(self) -> dict[str, Tensor]:
        """The results that were computed, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


@dataclass(frozen=True)
class RankResult:
    """The results of one rank, the index of its ring, and (bytes, messages) that it sent in forward and backward."""

    results: Results
    data_rank: int
    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True)
class LocalCall:
    """The call of one rank: attention module, local tensors, and options."""

    attention: Any
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    options: dict[str, Any]
    case: AttentionCase

    @property
    def inputs(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    def __call__(self, **options: Any) -> Any:
        return self.attention(*self.inputs, **{**self.options, **options})

    def gradients(self, out: Tensor, **options: Any) -> list[Tensor]:
        """dq, dk and dv, and the gradient of the sinks if the call has sinks."""
        sinks = [self.options["sinks"]] if "sinks" in self.options else []
        return list(torch.autograd.grad(out, [*self.inputs, *sinks], self.grad_out, **options))

    def results(self) -> Results:
        """Make the call and run its backward."""
        out, lse = self(return_lse=True)
        assert not lse.requires_grad
        return Results(out.detach(), lse, *self.gradients(out))

    def expected(self) -> Results:
        """The results of the dense fp64 reference for the rows of this rank."""
        ring = self.attention.ring
        wanted = expected(replace(self.case, replica=ring.data_rank))
        rows = rows_of_ranks(self.case.seq_len, ring.size, ring.layout_kind)[ring.rank]
        of_rows = {name: x[:, rows] for name, x in wanted.computed().items() if name not in ("lse", "grad_sinks")}
        return wanted._replace(lse=wanted.lse[:, :, rows], **of_rows)

    def check(self, tolerance: float = FP64_TOLERANCE) -> None:
        """Make the call, and compare its results with the reference. Every rank of the ring does so."""
        got, ring = self.results(), self.attention.ring
        if got.grad_sinks is not None and ring.size > 1:  # each rank has the gradient by its rows
            dist.all_reduce(got.grad_sinks, group=ring.group)
        check_results(got, self.expected(), tolerance, self.case)


def new_attention(adapter: str, ring: Ring | None, case: AttentionCase, **options: Any) -> Any:
    """Construct the adapter's attention module with the options of a case."""
    if ring is not None:
        ring = case.on_ring(ring)
    return backend(adapter).RingDilatedAttention(
        **case.pattern_options(), ring=ring, scale=case.scale, dropout_p=case.dropout_p, **options
    )


def local_call(
    adapter: str, ring: Ring, case: AttentionCase, *, device: str = "cpu", gradients: bool = True, attention: Any = None
) -> LocalCall:
    """The call of a rank. With ``attention=None``, it constructs a new module."""
    rows = rows_of_ranks(case.seq_len, ring.size, ring.layout_kind)[ring.rank]
    *tensors, mask = case.tensors()
    query, key, value, grad_out = (x[:, rows].to(device) for x in tensors)
    marks = {"key_padding_mask": mask, "document_ids": case.document_ids()}
    for tensor in (query, key, value):
        tensor.requires_grad_(gradients)
    options: dict[str, Any] = {"is_causal": case.is_causal, "seq_len": case.seq_len}
    options["dropout_seed"] = case.seed if case.dropout_p else None
    options |= {name: None if x is None else x[:, rows].to(device) for name, x in marks.items()}
    if case.score_mod is not None:
        options["score_mod"] = case.score_function(device)
    if (sinks := case.sink_scores()) is not None:
        options["sinks"] = sinks.to(device).requires_grad_(gradients)
    if attention is None:
        attention = new_attention(adapter, ring, case)
    return LocalCall(attention, query, key, value, grad_out, options, case)


def call_here(
    adapter: str,
    case: AttentionCase,
    rings: RingSpec = FOUR,
    layout: LayoutKind = "contiguous",
    *,
    device: str = "cpu",
    gradients: bool = True,
    **options: Any,
) -> LocalCall:
    """The call of this rank, on its cached ring and with the numbers of this ring. ``options`` are the module's."""
    ring, place = ring_of(adapter, rings, layout), rings.place(dist.get_rank())
    assert place is not None
    case = case_of_ring(case, place[0])
    attention = new_attention(adapter, ring, case, **options)
    return local_call(adapter, ring, case, device=device, gradients=gradients, attention=attention)


def case_of_ring(case: AttentionCase, index: int) -> AttentionCase:
    """The case with the seed of ring ``index``."""
    return replace(case, seed=case.seed + 7919 * index)


def run_case_here(
    adapter: str,
    rings: RingSpec,
    layout: LayoutKind,
    case: AttentionCase,
    *,
    gradients: bool = True,
    device: str = "cpu",
) -> RankResult | None:
    """Run one case on this rank."""
    if ring_here(adapter, rings) is None:
        return None
    call = call_here(adapter, case, rings, layout, device=device, gradients=gradients)
    ring = call.attention.ring
    ring.traffic.reset()
    out, lse = call(return_lse=True)
    assert not lse.requires_grad
    forward = ring.traffic.bytes, ring.traffic.messages
    ring.traffic.reset()
    grads = call.gradients(out) if gradients else (None,) * 3
    results = Results(*(None if x is None else x.detach().cpu() for x in (out, lse, *grads)))  # type: ignore[arg-type]
    return RankResult(results, ring.data_rank, forward, (ring.traffic.bytes, ring.traffic.messages))


def run_cases_here(
    adapter: str, rings: RingSpec, layout: LayoutKind, cases: Sequence[AttentionCase], **how: Any
) -> list[RankResult | None]:
    return [run_case_here(adapter, rings, layout, case, **how) for case in cases]


def run_cases(
    world: World, adapter: str, rings: RingSpec, layout: LayoutKind, cases: Sequence[AttentionCase], **how: Any
) -> list[list[list[RankResult]]]:
    """Run cases on all ranks, as :func:`run_case_here` does. Returns results indexed by case, ring and ring rank."""
    by_rank = world.run(run_cases_here, adapter, rings, layout, cases, **how)
    return [rings.by_ring([answers[index] for answers in by_rank]) for index in range(len(cases))]


def whole(results: Sequence[Results], seq_len: int, layout: LayoutKind) -> Results:
    """Join the results of the ranks of a ring to those of the whole sequence."""
    rows = torch.cat(rows_of_ranks(seq_len, len(results), layout)).argsort()
    fields: list[Tensor | None] = []
    for name in Results._fields:
        parts = [getattr(result, name) for result in results]
        dim = 2 if name == "lse" else 1
        if parts[0] is None:
            fields.append(None)
        elif name == "grad_sinks":
            fields.append(torch.stack(parts).sum(0))
        else:
            fields.append(torch.cat(parts, dim).index_select(dim, rows))
    return Results(*fields)  # type: ignore[arg-type]


def join(answers: Sequence[RankResult], seq_len: int, layout: LayoutKind = "contiguous") -> Results:
    """Join the answers of the ranks of a ring to the results of the whole sequence."""
    return whole([answer.results for answer in answers], seq_len, layout)


def expected(case: AttentionCase, *, gradients: bool = True) -> Results:
    """The results of the dense fp64 reference."""
    return _dense(case, torch.float64, gradients)


def plain(case: AttentionCase) -> Results:
    """The results of dense PyTorch attention in the dtype of the case. Its error bounds the error of a kernel."""
    return _dense(case, case.dtype, True)


@lru_cache(maxsize=512)
def _dense(case: AttentionCase, dtype: torch.dtype, gradients: bool) -> Results:
    *tensors, grad_out, _ = case.tensors()
    options = case.reference_options()
    leaves = [tensor.to(dtype) for tensor in tensors] + ([options["sinks"]] if case.sinks else [])
    for leaf in leaves:
        leaf.requires_grad_(gradients)
    out, lse = reference_attention(*leaves[:3], **options, dtype=dtype)
    grads = torch.autograd.grad(out, leaves, grad_out.to(dtype)) if gradients else ()
    return Results(out.detach(), lse, *grads)


def difference(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest absolute difference. It is infinite if shapes, NaNs or infinities differ."""
    assert got is not None
    assert wanted is not None
    if got.shape != wanted.shape:
        return float("inf")
    got, wanted = got.detach().double(), wanted.detach().double()
    unequal = got != wanted  # equal infinities are equal; a NaN never is
    gap = (got - wanted).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(gap.masked_fill(~unequal, 0).amax()) if gap.numel() else 0.0


def check_results(got: Results, wanted: Results, tolerance: float, what: object = "") -> None:
    """Check that every field is within ``tolerance``. The message lists the differences of all fields."""
    gaps = {name: difference(tensor, getattr(wanted, name)) for name, tensor in got.computed().items()}
    assert max(gaps.values()) <= tolerance, f"{what}: differences {gaps} exceed {tolerance}"


def check_exact(
    world: World, adapter: str, rings: RingSpec, layout: LayoutKind, cases: Sequence[AttentionCase], **how: Any
) -> list[list[list[RankResult]]]:
    """Run fp64 cases and compare the results of every ring with the reference."""
    answers = run_cases(world, adapter, rings, layout, cases, **how)
    for index, got, case in _results_of_rings(answers, cases, layout):
        check_results(got, expected(case, **how), FP64_TOLERANCE, f"{case} on ring {index}")
    return answers


def check_rounding(
    world: World, adapter: str, rings: RingSpec, layout: LayoutKind, cases: Sequence[AttentionCase], **how: Any
) -> None:
    """Run cases of lower precision, and check them as :func:`check_rounded` does."""
    answers = run_cases(world, adapter, rings, layout, cases, **how)
    for index, got, case in _results_of_rings(answers, cases, layout):
        check_rounded(got, case, f"ring {index}")


def _results_of_rings(
    answers: Sequence[Sequence[Sequence[RankResult]]], cases: Sequence[AttentionCase], layout: LayoutKind
) -> Iterator[tuple[int, Results, AttentionCase]]:
    """The index, the joined results, and the case of every ring, for each case."""
    for case, by_ring in zip(cases, answers, strict=True):
        for index, of_ring in enumerate(by_ring):
            (replica,) = {answer.data_rank for answer in of_ring}
            yield index, join(of_ring, case.seq_len, layout), replace(case_of_ring(case, index), replica=replica)


def check_rounded(got: Results, case: AttentionCase, what: str = "") -> None:
    """Check results of lower precision. No error may exceed twice the error of plain attention in the same dtype.

    With few numbers, both errors can be small by chance. The bound therefore allows one rounding of the largest
    number. A flash backward recomputes the weights from the LSE. The rounding of the LSE is a relative error of the
    weights that grows with the LSE.
    """
    lse_rounding = torch.finfo(got.lse.dtype).eps * max(1.0, largest(expected(case).lse))

    def allowed(name: str, tensor: Tensor, wanted: Tensor) -> float:
        return lse_rounding if name == "lse" else (precision(case, name, tensor) + lse_rounding) * largest(wanted)

    check_bounded(got, case, allowed, what=what)


def precision(case: AttentionCase, name: str, tensor: Tensor) -> float:
    """The machine epsilon of a result. Sinks are fp64, but their gradient is computed from rounded rows."""
    return torch.finfo(case.dtype if name == "grad_sinks" else tensor.dtype).eps


def check_bounded(
    got: Results,
    case: AttentionCase,
    allowed: Callable[[str, Tensor, Tensor], float],
    error: Callable[[Tensor, Tensor], float] = difference,
    what: str = "",
) -> None:
    """Check that no error exceeds twice the error of plain attention in the same dtype, and what ``allowed`` adds.

    Args:
        allowed: a function of the name, the result, and the exact result.
        error: the error of a result. The first argument is the result, the second the exact result.
    """
    exact, yardstick = expected(case), plain(case)
    for name, tensor in got.computed().items():
        wanted, other = getattr(exact, name), getattr(yardstick, name)
        assert tensor.dtype == other.dtype, f"{case}: {name} is {tensor.dtype}"
        bound, found = 2 * error(other, wanted) + allowed(name, tensor, wanted), error(tensor, wanted)
        assert found <= bound, f"{case} {what}: {name} has error {found}, which exceeds {bound}"


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude, or 0."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
