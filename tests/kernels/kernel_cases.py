"""Tiles for the tests of kernels, and the check of a kernel against a dense softmax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_backends.kernels import Kernel, KernelInputs, TileInputs, blockwise, kernels
from ring_backends.kernels.aten_cpu import AtenCpuFlashKernel
from ring_backends.kernels.aten_cuda import AtenCudaEfficientKernel, AtenCudaFlashKernel
from ring_backends.kernels.aten_cudnn import AtenCudaCudnnKernel
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.per_tile import backward_tile, forward_tile
from ring_backends.schedule.bands import CAUSAL, Band, trimmed
from ring_backends.testing.calls import difference, largest


class MathInBlocks(MathKernel):
    """The math kernel with so many rows and keys at a time."""

    def __init__(self, block: int) -> None:
        self.block = mock.patch.object(blockwise, "block_size", return_value=block)

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        with self.block:
            return super().forward(*given)

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        with self.block:
            return super().backward(*given)


CPU_KERNELS = [AtenCpuFlashKernel(), MathKernel(), MathInBlocks(4)]
CUDA_KERNELS = [AtenCudaFlashKernel(), AtenCudaEfficientKernel(), AtenCudaCudnnKernel()]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]

each_gpu_kernel = pytest.mark.parametrize(
    "kernel", [kernel for kernel in kernels() if "cpu" not in kernel.name], ids=lambda x: x.name
)


def skip_if_refused(kernel: Kernel, inputs: KernelInputs) -> None:
    if reasons := kernel.not_supported_reasons(inputs):
        pytest.skip(f"{kernel.name} cannot run this call: {'; '.join(reasons)}")


class CountOperators(TorchDispatchMode):
    """Counts the operators that a call launches, and records the shapes of the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.results: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[str(func)] += 1
        self.results += [(str(func), x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)]
        return result


def kernel_id(value: object) -> str | None:
    if isinstance(value, MathInBlocks):
        return "math-blocks"
    return value.name if isinstance(value, Kernel) else None


@dataclass(frozen=True)
class Case:
    batch: int = 2
    kv_heads: int = 2
    repeats: int = 2
    seq_q: int = 9
    seq_k: int = 9
    seq_older: int = 5
    head_dim: int = 8
    value_dim: int | None = None
    is_causal: bool = True
    band: Band | None = None
    masked: bool = False
    layout: str = "contiguous"
    seed: int = 0

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim outside": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second element": lambda x: torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2],
    "every second row": lambda x: torch.stack([x, x + 1], dim=3).flatten(2, 3)[:, :, ::2],
    "odd offset": lambda x: torch.nn.functional.pad(x, (1, 7))[..., 1:-7],
}


@st.composite
def bands(draw: st.DrawFn, max_rows: int = 33) -> tuple[int, int, Band]:
    """Numbers of queries and keys, and a band as kernels get it: trimmed, and neither full nor causal."""
    seq_q, seq_k = draw(st.integers(1, max_rows)), draw(st.integers(1, max_rows))
    limit = st.one_of(st.none(), st.integers(-seq_k, seq_q), st.integers(-4, 4))
    below, above = draw(limit), draw(limit)
    assume(below is None or above is None or below + above >= 0)
    part = trimmed(range(seq_q), range(seq_k), Band(below, above))
    assume(part is not None and part.band is not None and (part.band != CAUSAL or len(part.queries) != len(part.keys)))
    return len(part.queries), len(part.keys), part.band


@st.composite
def cases(draw: st.DrawFn, *, head_dims: st.SearchStrategy[int], masks: bool = True, banded: bool = False) -> Case:
    """Tiles. With ``banded``, they have a band that is neither full nor causal."""
    is_causal = not banded and draw(st.booleans())
    seq_q, seq_k, band = draw(bands()) if banded else (draw(st.integers(1, 33)), 0, None)
    if not banded:
        seq_k = seq_q if is_causal else draw(st.integers(1, 33))
    return Case(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        repeats=draw(st.integers(1, 3)),
        seq_q=seq_q,
        seq_k=seq_k,
        seq_older=draw(st.integers(1, 17)),
        head_dim=draw(head_dims),
        value_dim=draw(st.one_of(st.none(), head_dims)),
        is_causal=is_causal,
        band=band,
        masked=masks and draw(st.booleans()),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        seed=draw(st.integers(0, 2**31)),
    )


def make_inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and grad_out in ``dtype``, in contiguous memory, and the mask of all keys."""
    generator = torch.Generator().manual_seed(case.seed)
    of_queries, of_keys = (case.kv_heads * case.repeats, case.seq_q), (case.kv_heads, case.seq_k + case.seq_older)
    value_dim = case.value_dim or case.head_dim
    shapes = (*of_queries, case.head_dim), (*of_keys, case.head_dim), (*of_keys, value_dim), (*of_queries, value_dim)
    query, key, value, grad_out = (
        torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    key_mask = torch.rand(case.batch, *of_keys, generator=generator) < 0.4
    # Some rows see no key (first head), only keys of the older tile (last head), or no key at the start (causal).
    key_mask[0, 0] = True
    key_mask[-1, -1, : case.seq_k] = True
    key_mask[..., 0] = True
    return query, key, value, grad_out, key_mask & case.masked


def hidden_pairs(case: Case, key_mask: Tensor) -> Tensor:
    """bool [B, Hq, Sq, Sk + older]: True where a query does not see a key."""
    outside = torch.zeros(case.seq_q, key_mask.shape[-1], dtype=torch.bool)
    band = CAUSAL if case.is_causal else case.band
    if band is not None:
        outside[:, : case.seq_k] = outside_of(band, case.seq_q, case.seq_k)
    return key_mask.repeat_interleave(case.repeats, 1)[:, :, None, :] | outside


def outside_of(band: Band, seq_q: int, seq_k: int) -> Tensor:
    """bool [Sq, Sk]: True where a query does not see a key."""
    distance = torch.arange(seq_q)[:, None] - torch.arange(seq_k)
    below, above = (seq_q + seq_k if limit is None else limit for limit in (band.below, band.above))
    return (distance > below) | (-distance > above)


def dense(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention and its LSE, in the dtype of the inputs."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    blind = hidden.all(-1, keepdim=True)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden & ~blind, -torch.inf)
    out = scores.softmax(-1).masked_fill(blind, 0.0) @ value
    return out, scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)


NAMES = ("out", "lse", "dq", "dk", "dv")


def dense_with_grads(tensors: Sequence[Tensor], hidden: Tensor, scale: float) -> dict[str, Tensor]:
    *leaves, grad_out = (x.detach().requires_grad_() for x in tensors)
    out, lse = dense(*leaves, hidden, scale)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def magnitudes(tensors: Sequence[Tensor], lse: Tensor, hidden: Tensor, scale: float) -> dict[str, float]:
    """The magnitude of the terms that each result sums. Rounding errors are relative to it."""
    query, key, value, grad_out = tensors
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    p = torch.exp(query @ key.transpose(-1, -2) * scale - lse.unsqueeze(-1)).masked_fill(hidden, 0.0)
    q, k, v, do = (x.abs() for x in (query, key, value, grad_out))
    ds = p * (do @ v.transpose(-1, -2) + (do * (p @ v)).sum(-1, keepdim=True)) * scale
    return {
        "out": (p @ v).max().item(),
        "lse": (q @ k.transpose(-1, -2) * scale).max().item() + 1.0,
        "dq": (ds @ k).max().item(),
        "dk": (ds.transpose(-1, -2) @ q).max().item() * repeats,
        "dv": (p.transpose(-1, -2) @ do).max().item() * repeats,
    }


def tile_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, hidden: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by formula, with the weights P computed from the LSE. Rows with infinite LSE have P = 0."""
    repeats = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    p = torch.exp(query @ k.transpose(-1, -2) * scale - lse.unsqueeze(-1))
    p = p.masked_fill(hidden | lse.isinf().unsqueeze(-1), 0.0)
    ds = p * (grad_out @ v.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * scale
    dk, dv = ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad_out
    return ds @ k, *(x.unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))


def run_tile(kernel: Kernel, tensors: Iterable[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv of one tile: of queries, keys and values, and the gradient of out."""
    *rows, grad_out = tensors
    tile = TileInputs(*rows, **options)
    out, lse = kernel.forward(tile)
    return out, lse, *kernel.backward(tile, grad_out, out, lse)


def check_a_row_without_keys(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    """A row with infinite LSE has no gradient, as if it had no gradient of out."""
    query, key, value, grad_out, _ = make_inputs(Case(seq_older=0), dtype)
    tile = TileInputs(query, key, value, scale=0.4, is_causal=True)
    out, lse = kernel.forward(tile)
    lse[:, :, 4] = -torch.inf
    out[:, :, 4] = 0.0
    grads = kernel.backward(tile, grad_out, out, lse)
    grad_out[:, :, 4] = 0.0
    lse[:, :, 4] = 0.0
    wanted = kernel.backward(tile, grad_out, out, lse)
    assert (grads[0][:, :, 4] == 0).all()
    assert max(map(difference, grads, wanted)) < tolerance


def run_tiles(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of both tiles, merged in fp64 to one softmax."""
    *tensors, key_mask = make_inputs(case, dtype)
    query, key, value, grad_out = (LAYOUTS[case.layout](x.to(device)) for x in tensors)
    key_mask = key_mask.to(device)
    versions = [x._version for x in (query, key, value, grad_out, key_mask)]
    tiles = []
    for keys, is_causal, band in (
        (slice(0, case.seq_k), case.is_causal, case.band),
        (slice(case.seq_k, None), False, None),
    ):
        mask = key_mask[:, :, keys] if case.masked else None
        tiles.append(TileInputs(query, key[:, :, keys], value[:, :, keys], case.scale, is_causal, mask, band))

    forwards = [forward_tile(kernel, tile) for tile in tiles]
    assert all((x.dtype, y.dtype) == (dtype, statistics_dtype(dtype)) for x, y in forwards)
    lse = torch.logaddexp(*(tile_lse.double() for _, tile_lse in forwards))
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    out = torch.stack([x.double() * torch.exp(y.double() - shift).unsqueeze(-1) for x, y in forwards]).sum(0)

    # Rows are the outermost dim of the LSE in memory, as of the CPU operator's.
    given = LAYOUTS[case.layout](out.to(dtype)), LAYOUTS["heads inside"](lse.to(statistics_dtype(dtype)))
    grads = [backward_tile(kernel, tile, grad_out, *given) for tile in tiles]
    assert all(grad.dtype in (dtype, statistics_dtype(dtype)) for tile_grads in grads for grad in tile_grads)
    assert versions == [x._version for x in (query, key, value, grad_out, key_mask)], "the kernel modified an input"
    (dq1, *of_first), (dq2, *of_second) = grads
    of_keys = (torch.cat(pair, dim=2) for pair in zip(of_first, of_second, strict=True))
    results = out, lse, dq1.double() + dq2.double(), *of_keys
    return {name: x.cpu() for name, x in zip(NAMES, results, strict=True)}


def check(kernel: Kernel, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    *tensors, key_mask = make_inputs(case, dtype)
    how = {"hidden": hidden_pairs(case, key_mask), "scale": case.scale}
    query, key, value, grad_out = exact = [x.double() for x in tensors]
    expected = dense_with_grads(exact, **how)
    actual = run_tiles(kernel, case, dtype, device)
    errors = {name: difference(actual[name], expected[name]) for name in expected}
    if dtype == torch.float64:
        limits = dict.fromkeys(expected, 1e-10)
    else:
        plain = dense_with_grads(tensors, **how)
        # The backward receives a merged out that is rounded to dtype. The limits allow for this rounding.
        rounded = actual["out"].to(dtype).double()
        grads = tile_backward(grad_out, query, key, value, rounded, expected["lse"], **how)
        given = {name: difference(grad, expected[name]) for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}
        sizes = magnitudes(exact, expected["lse"], **how)
        limits = {
            name: 2.0 * difference(plain[name], expected[name])
            + given.get(name, 0.0)
            + torch.finfo(dtype).eps * largest(expected[name])
            + 8.0 * torch.finfo(torch.float32).eps * sizes[name]
            for name in expected
        }
    assert all(errors[name] <= limits[name] for name in expected), (kernel.name, errors, limits)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
