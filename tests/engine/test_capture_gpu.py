"""CUDA graphs of calls on one GPU: captured by hand, and by torch.compile. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import each_gpu_kernel, skip_if_refused
from native_ranks import ADAPTER
from torch import Tensor
from torch._dynamo.utils import counters

from ring_backends.kernels import Kernel, KernelInputs
from ring_backends.ring.ring import Ring
from ring_backends.testing.calls import LocalCall, Results, check_rounded, local_call, new_attention
from ring_backends.testing.marks import needs_gpu
from ring_backends.testing.strategies import AttentionCase

pytestmark = needs_gpu

DEVICE = "cuda"
CASE = AttentionCase(300, (64, 300), (1, 3), batch=2, num_heads=6, num_kv_heads=3, head_dim=16, is_causal=True)
CASES = {
    "plain": CASE,
    "not causal": replace(CASE, is_causal=False),
    "key mask": replace(CASE, masked="random"),
    "documents": replace(CASE, documents="some"),
    "zero keys": replace(CASE, padding="zeros", is_causal=False),
}
SEEDS = (1, 2, 3)

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
each_case = pytest.mark.parametrize("name", CASES)


def case_for(kernel: Kernel, name: str, dtype: torch.dtype) -> AttentionCase:
    """The case, if the kernel can run it on this GPU."""
    case = replace(CASES[name], dtype=dtype)
    marks = {"has_key_mask": case.masked is not None, "has_documents": case.documents is not None}
    skip_if_refused(kernel, KernelInputs(torch.device(DEVICE, 0), dtype, case.head_dim, **marks))
    return case


def call_of(case: AttentionCase, attention: Any) -> LocalCall:
    return local_call(ADAPTER, Ring(), case, device=DEVICE, attention=attention)


def on_host(results: Results) -> Results:
    return Results(*(x.detach().cpu() for x in results if x is not None))


def tensors_of(call: LocalCall) -> list[Tensor]:
    marks = [x for x in call.options.values() if isinstance(x, Tensor)]
    return [*call.inputs, call.grad_out, *marks]


def capture(call: LocalCall) -> tuple[Callable[[], None], Results]:
    """Run a call once, and then capture it. Return what replays it, and the results that a replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.results()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.results()
    return graph.replay, results


@each_dtype
@each_case
@each_gpu_kernel
def test_a_captured_call_is_replayed_with_other_inputs(kernel: Kernel, name: str, dtype: torch.dtype) -> None:
    case = case_for(kernel, name, dtype)
    attention = new_attention(ADAPTER, None, case, kernel=kernel.name)
    call = call_of(case, attention)
    replay, results = capture(call)
    for seed in SEEDS:
        other = replace(case, seed=seed)
        with torch.no_grad():
            for captured, given in zip(tensors_of(call), tensors_of(call_of(other, attention)), strict=True):
                captured.copy_(given)
        replay()
        check_rounded(on_host(results), other, kernel.name)


@each_case
@each_gpu_kernel
def test_inductor_puts_a_call_into_a_cuda_graph(kernel: Kernel, name: str) -> None:
    case = case_for(kernel, name, torch.float16)
    attention = new_attention(ADAPTER, None, case, kernel=kernel.name)
    call_of(case, attention).results()  # copies the constants outside of the memory pool of the CUDA graph
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    for seed in (*SEEDS, *SEEDS):  # the first call warms up, the second records, the others replay
        other = replace(case, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        check_rounded(on_host(call_of(other, compiled).results()), other, kernel.name)
    assert counters["inductor"]["cudagraph_skips"] == 0
