"""Kernels of other packages in the place of transformers' own functions: which arguments a ring passes to them.

The stand-ins have the signatures of the packages: fla 0.4, mamba_ssm 2.2 and causal_conv1d 1.5. They compute what the
functions of transformers compute, and like the kernels, nothing else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from recurrent_models import Batch, alone, assert_equal, make_model, on_ranks
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from ring_backends import Ring
from ring_backends.integrations.transformers import use_ring
from ring_backends.testing.marks import matrix_but

BATCHES = (Batch(48, documents=((3, 13, 8, 24), (7, 38, 3))), Batch(37, left=5), Batch(2))


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    assert activation in (None, "silu", "swish"), activation
    assert x.stride(2) == 1 or x.stride(1) == 1, x.stride()
    assert (seq_idx, initial_states, return_final_states) == (None, None, False)
    width = weight.shape[1]
    out = F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=len(weight))
    return out if activation is None else F.silu(out)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    assert (scale, cu_seqlens, kwargs) == (None, None, {})
    assert initial_state is None or initial_state.dtype == torch.float32
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    decays = g.exp()[..., None, None] if g.dim() == 3 else g.exp()[..., None]  # [batch, rows, heads, 1 or K, 1]
    state = k.new_zeros(len(k), v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outs = []
    for row in range(q.shape[1]):
        state = state * decays[:, row]
        new = (v[:, row] - torch.einsum("bhk,bhkv->bhv", k[:, row], state)) * beta[:, row, :, None]
        state = state + k[:, row, :, :, None] * new[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, row] * q.shape[3] ** -0.5, state))
    return torch.stack(outs, 1), state if output_final_state else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    assert (chunk_size, z, seq_idx, cu_seqlens, return_varlen_states) == (16, None, None, None, False)
    steps = dt if dt_bias is None else dt + dt_bias
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    outs = []
    for row in range(x.shape[1]):
        new = (steps[:, row, :, None] * x[:, row])[..., None] * B[:, row, :, None]
        state = state * (A * steps[:, row]).exp()[..., None, None] + new
        outs.append((state * C[:, row, :, None]).sum(-1))
    out = torch.stack(outs, 1) if D is None else torch.stack(outs, 1) + D[:, None] * x
    return (out, state) if return_final_states else out


class SelectiveScan(torch.autograd.Function):
    """As in mamba_ssm, the gradient of the last state is ignored."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            ctx.inputs = [tensor.detach().requires_grad_() for tensor in tensors]
            ctx.out, state = SelectiveScan.compute(*ctx.inputs)
        return ctx.out.detach(), state.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *ignored: Tensor) -> Any:
        return torch.autograd.grad(ctx.out, ctx.inputs, grad)

    @staticmethod
    def compute(u: Tensor, steps: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        state, outs = u.new_zeros(len(u), *A.shape), []
        for row in range(u.shape[2]):
            new = (steps[:, :, row] * u[:, :, row])[..., None] * B[:, None, :, row]
            state = state * (A * steps[:, :, row, None]).exp() + new
            outs.append((state * C[:, None, :, row]).sum(-1))
        return torch.stack(outs, 2), state


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    steps = delta if delta_bias is None else delta + delta_bias[:, None]
    steps = F.softplus(steps) if delta_softplus else steps
    out, state = SelectiveScan.apply(u, steps, A, B, C)  # type: ignore[no-untyped-call]
    out = out if D is None else out + D[:, None] * u
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def fused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel that fuses a convolution with a scan was called on a ring")


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d.causal_conv1d_fn": causal_conv1d_fn,
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda.chunk_kda": chunk_gated_delta_rule,
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": fused,
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": selective_scan_fn,
    "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn": fused,
}
FUNCTIONS = {
    "causal_conv1d_fn": ("causal_conv1d_fn", "causal_conv1d"),
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", "fla"),
    "chunk_kimi_delta_attention": ("chunk_kda", "fla"),
    "mamba2_chunk_scan": ("mamba_chunk_scan_combined", "mamba_ssm"),
    "mamba2_split_conv1d_scan_combined": ("mamba_split_conv1d_scan_combined", "mamba_ssm"),
    "mamba_selective_scan": ("selective_scan_fn", "mamba_ssm"),
    "mamba_inner_fn": ("mamba_inner_fn", "mamba_ssm"),
}
"""The functions of transformers, and the kernels that it looks for."""


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with these kernels."""
    for path, kernel in KERNELS.items():
        *parts, name = path.split(".")
        for number in range(1, len(parts) + 1):
            full = ".".join(parts[:number])
            if full not in sys.modules:
                monkeypatch.setitem(sys.modules, full, ModuleType(full))
                if number > 1:
                    setattr(sys.modules[".".join(parts[: number - 1])], parts[number - 1], sys.modules[full])
        setattr(sys.modules[".".join(parts)], name, kernel)


def use_kernels(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the functions of a model call the kernels, as if the packages had been there at the import of the model."""
    module = import_module(type(make_model(kind)).__module__)
    for name in FUNCTIONS.keys() & vars(module).keys():
        own = inspect.unwrap(getattr(module, name))
        monkeypatch.setattr(module, name, use_kernel_func_from_hub_with_fallback(*FUNCTIONS[name])(own))


KINDS = ("qwen3_next", "olmo_hybrid", "kimi_linear", "bamba", "mamba2", "nemotron_h", "falcon_h1", "mamba", "jamba")


@pytest.mark.parametrize("kind", matrix_but("qwen3_next", "mamba", of=(*KINDS, "lfm2")))
def test_kernels(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With documents that lie in both pieces of a ring of one, so that states pass from one to the other."""
    wanted = alone(kind, BATCHES)
    use_kernels(monkeypatch, kind)
    found = on_ranks(Ring(layout_kind="zigzag"), kind, BATCHES)
    assert_equal([found], wanted, BATCHES)


@pytest.mark.parametrize("kind", ["bamba", "mamba"])
def test_fused_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In training, a model that is not on a ring calls them."""
    use_kernels(monkeypatch, kind)
    model, batch = make_model(kind).train(), BATCHES[0]
    with pytest.raises(AssertionError, match="a kernel that fuses a convolution"):
        model(**batch.inputs)
    use_ring(model, Ring(layout_kind="zigzag"))
    assert model(**batch.inputs).logits.isfinite().all()
