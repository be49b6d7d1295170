"""Times the Triton kernels in blocks of several sizes, for the tables in ``kernels/triton_launch.py``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from case import Case
from gpu_clock import Budget, Clock, or_note
from gpu_replay import Replay
from report import Row
from setups import shortened
from torch import Tensor

from ring_backends.engine.backward import backward
from ring_backends.engine.call import local_rows
from ring_backends.engine.forward import forward
from ring_backends.kernels import triton_launch
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.tile_table import NUMBER_ALIGNMENT
from ring_backends.kernels.triton_dilated import TritonDilatedKernel
from ring_backends.kernels.triton_launch import Blocks

SIZES = ((64, 64), (128, 64), (128, 128), (64, 128), (64, 32), (32, 64), (128, 32), (32, 128), (32, 32))
CANDIDATES = tuple(Blocks(*size, warps, 3) for size in SIZES for warps in (4, 8))
STAGES = (1, 2, 3, 4)
PRODUCTS = {"forward": 2, "grad_query": 3, "grad_key_value": 4}
"""The kernels, by their fields in :class:`~ring_backends.kernels.triton_launch.Kernels`, and their matrix products."""


def block_sizes(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """Each Triton kernel on a branch (8192, 4) of 131,072 tokens: first with the blocks in use, then with others.

    With ``shrink``, blocks of dK and dV that reach beyond the numbers of a segment are left out: they would read past
    the end of the statistics.

    The fastest blocks are also timed with other numbers of pipeline stages.
    """
    for is_pairwise, head_dim in itertools.product((False, True), (128, 64)):
        case = Case("", 131_072, branches=((8192, 4),), num_heads=16, kv_heads=16, head_dim=head_dim, dtype="bf16")
        case = shortened(case, shrink)
        call = _Call.of(case, clock.device, is_pairwise=is_pairwise)
        ((length, rate),) = case.branches
        num_numbers = math.ceil(length / rate / NUMBER_ALIGNMENT) * NUMBER_ALIGNMENT
        for name, products in PRODUCTS.items():
            in_use = call.blocks_in_use(name)
            times: dict[Blocks, float] = {}
            for blocks in _search(in_use, times):
                if budget.is_spent:
                    return
                if name == "grad_key_value" and num_numbers % blocks.queries:
                    continue
                row: Row = {"kernel": name, "options": "documents, dropout" if is_pairwise else "none"}
                row |= {"head_dim": head_dim, **blocks._asdict(), "in_use": blocks == in_use}
                row |= _timed(clock, call, name, blocks, products)
                if row["ms"] is not None:
                    times[blocks] = row["ms"]
                yield row


def _search(in_use: Blocks, times: dict[Blocks, float]) -> Iterator[Blocks]:
    """Blocks to time. ``times`` receives the time of each before the next one is asked for."""
    yield in_use
    yield from (blocks for blocks in CANDIDATES if blocks != in_use)
    if times:
        fastest = min(times, key=lambda blocks: times[blocks])
        yield from (blocks for stages in STAGES if (blocks := fastest._replace(stages=stages)) not in times)


def _timed(clock: Clock, call: _Call, name: str, blocks: Blocks, products: int) -> Row:
    timed = _TimedKernel(getattr(triton_launch.kernels(), name), clock)

    def measure() -> dict[str, Any]:  # it fails for blocks that Triton cannot compile, or that the GPU has no room for
        with call.only(name, timed, blocks):
            return {"seconds": timed.seconds(call.forward if name == "forward" else call.backward)}

    found = or_note(measure)
    seconds = found.get("seconds")
    rate = None if seconds is None else products * call.product_flops / seconds / 1e12
    return {"ms": None if seconds is None else seconds * 1e3, "TFLOPs": rate, "note": found.get("note", "")}


class _NoKernel:
    """Stands for a kernel whose launches are left out."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _TimedKernel:
    """A kernel whose launches are timed alone, without the zeros and sums of the call around them."""

    def __init__(self, kernel: Any, clock: Clock) -> None:
        self.kernel, self.clock = kernel, clock
        self.launches: list[Callable[[], float]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.append(self.clock.once(lambda: self.kernel[grid](*args, **kwargs)))

        return launch

    def seconds(self, call: Callable[[], None]) -> float:
        """Median seconds of the launches in one call."""

        def start() -> Callable[[], float]:
            self.launches = launches = []
            call()
            return lambda: sum(seconds() for seconds in launches)

        return self.clock.median(start)


@dataclass(frozen=True)
class _Call:
    """The forward and the backward of one call in Triton. Values mean nothing if some of its kernels do not run.

    Attributes:
        out, lse: stand for the result of the forward.
        product_flops: the FLOPs of one matrix product over the visible pairs.
    """

    replay: Replay
    out: Tensor
    lse: Tensor
    product_flops: float

    @classmethod
    def of(cls, case: Case, device: torch.device, *, is_pairwise: bool) -> _Call:
        replay = Replay.of(case, device)
        call, inputs = replace(replay.call, kernel=TritonDilatedKernel(), in_place={}), replay.inputs
        inputs = replace(inputs, **{name: getattr(inputs, name).detach() for name in ("query", "key", "value")})
        if is_pairwise:
            call = replace(call, dropout=Dropout(0.1, 0))
            documents = torch.arange(case.seq_len, device=device)[None] * 4 // case.seq_len
            inputs = replace(inputs, document_ids=documents, dropout_seed=torch.tensor([1]))
        flops = replay.flops(backward=False) / PRODUCTS["forward"]
        lse = torch.zeros(inputs.query.shape[:3], device=device)
        return cls(replace(replay, call=call, inputs=inputs), torch.randn_like(inputs.query), lse, flops)

    def forward(self) -> None:
        forward(self.replay.call, self.replay.inputs, None)

    def backward(self) -> None:
        backward(self.replay.call, self.replay.inputs, self.out, self.lse, self.replay.grad_out, None)

    @staticmethod
    def only(name: str, kernel: _TimedKernel, blocks: Blocks) -> Any:
        """While this is entered, ``kernel`` is the one called ``name``, with these blocks. The others do not run."""
        alone = triton_launch.kernels()._replace(**{other: _NoKernel() for other in PRODUCTS} | {name: kernel})
        return mock.patch.multiple(triton_launch, kernels=lambda: alone, block_sizes=lambda *_, **__: blocks)

    def blocks_in_use(self, name: str) -> Blocks:
        """The blocks that the kernel called ``name`` has without :meth:`only`."""
        rows = local_rows(self.replay.call, self.replay.inputs)
        return triton_launch.block_sizes(name, rows, is_interpreted=False)
