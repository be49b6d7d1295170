"""Compiles the Triton kernels for GPUs that need not be there, and prints what each one uses, as JSON.

Run it without ``TRITON_INTERPRET``:
``python tests/kernels/compile_triton.py GPU HEAD_DIM full|window|others [DTYPE]``.
GPU is a compute capability such as 90, or the architecture of a GPU of AMD such as gfx942.
The launches of a forward and a backward are recorded instead of run, so that the kernels are compiled as a launch would
compile them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ring_backends import dilated_attention, score_mods
from ring_backends.kernels import rows as dilated
from ring_backends.kernels import triton_launch
from ring_backends.kernels.rows import Rows, add_rows, fill_rows, gather_many, merge_rows, scatter_many
from ring_backends.kernels.triton_dilated import TritonDilatedKernel
from ring_backends.schedule.rows import DilatedRows, head_runs

ATTENTION = ("plain", "packed", "key mask, packed", "documents, dropout")
VARIANTS = {
    "full": (*ATTENTION, "rows"),
    "window": tuple(f"{variant}, window" for variant in ATTENTION),
    "others": ("soft cap", "distances, packed, window", "narrow values, packed"),
}


ROWS = DilatedRows(0, 2, 256, 2, 128, head_runs(range(4), [0, 1, 0, 1]))

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel and the arguments of its launch."""


@dataclass(eq=False)
class Recorder:
    """Stands for a kernel, and records the arguments of its launches."""

    kernel: Any
    calls: list[Launch] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def recorded(variant: str, target: GPUTarget, head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """The launches of a variant."""
    is_amd = target.backend == "hip"
    recorders = [Recorder(kernel) for kernel in triton_launch.kernels()[:-1]]
    replaced = triton_launch.Kernels(*recorders, is_interpreted=False)
    with (
        mock.patch.object(triton_launch, "kernels", return_value=replaced),
        mock.patch.object(triton_launch, "capability", return_value=(9, 4) if is_amd else divmod(target.arch, 10)),
        mock.patch.object(torch.version, "hip", "7.0" if is_amd else None),
    ):
        if variant == "rows":
            move_and_merge_rows(head_dim, dtype)
        else:
            attend(variant, head_dim, dtype)
    calls = [call for recorder in recorders for call in recorder.calls]
    for _, _, arguments in calls:
        if "packed" in variant and "PACKED" in arguments:
            arguments["PACKED"] = True
    return calls


def attend(variant: str, head_dim: int, dtype: torch.dtype) -> None:
    """A forward and a backward with one branch."""
    query = torch.zeros(2, 512, 4, head_dim, dtype=dtype, requires_grad=True)
    value_dim = head_dim // 2 if "narrow values" in variant else head_dim
    key, value = (torch.zeros(2, 512, 2, dim, dtype=dtype, requires_grad=True) for dim in (head_dim, value_dim))
    options: dict[str, Any] = {}
    for name, added in {
        "key mask": {"key_padding_mask": torch.zeros(2, 512, dtype=torch.bool)},
        "documents": {"document_ids": torch.zeros(2, 512, dtype=torch.int64)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 0},
        "soft cap": {"score_mod": score_mods.softcap(30.0)},
        "distances": {"score_mod": score_mods.distance(torch.zeros(2, 512, 2), torch.zeros(4))},
        "window": {"window_lengths": [200]},
    }.items():
        options |= added if name in variant else {}
    with mock.patch("ring_backends.engine.call.select_kernel", return_value=TritonDilatedKernel()):
        out = dilated_attention(query, key, value, [512], [2], is_causal=True, **options)
        out.backward(torch.zeros_like(out))


def move_and_merge_rows(head_dim: int, dtype: torch.dtype) -> None:
    """What a call does with rows: gather those of a tile, scatter its gradients, merge its result, finish the sums."""
    rows = ROWS
    tensors = [torch.zeros(2, 512, 4, head_dim, dtype=dtype) for _ in range(5)]
    tile = [torch.zeros(4, 4, 128, head_dim, dtype=dtype) for _ in range(5)]
    lse, tile_lse = torch.zeros(2, 512, 4), torch.zeros(4, 4, 128)
    sums = [torch.zeros(2, 512, 4, head_dim) for _ in range(3)]
    with mock.patch.object(dilated, "can_launch", return_value=True):
        gather_many([Rows(x, rows, values) for x, values in zip([*tensors, lse], [*tile, tile_lse], strict=True)])
        query, *keys = (Rows(x, rows, grad) for x, grad in zip(sums, tile, strict=False))
        scatter_many([query], keys)
        merge_rows(sums[0], lse, rows, tile[0], tile_lse)
        merge_rows(tensors[0], lse, rows, sums[0], torch.zeros_like(lse), same_rows=True, takes=True)
        add_rows([Rows(x, rows, values) for x, values in zip(tensors, sums, strict=False)], takes=True)
        fill_rows([(x, rows) for x in sums], 0.0)


def resources(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    """Compile one launch, and return its registers, its shared memory in bytes, and what it spills.

    ``spilled`` counts the bytes that a thread stores and loads for lack of registers, or on a GPU of AMD the registers.
    ``products`` says whether instructions for matrix products compute them.
    """
    backend = make_backend(target)
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **kwargs
    )
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    return {
        "kernel": kernel.__name__,
        "shared": compiled.metadata.shared,
        "fuses": compiled.metadata.enable_fp_fusion,
        **(_of_amd(compiled) if target.backend == "hip" else _of_nvidia(compiled, target)),
    }


def _of_amd(compiled: Any) -> dict[str, Any]:
    assembly = compiled.asm["amdgcn"]
    registers, spilled = (int(re.search(rf"\.vgpr_{name}:\s+(\d+)", assembly)[1]) for name in ("count", "spill_count"))
    return {"registers": registers, "spilled": spilled, "products": "v_mfma_" in assembly}


def _of_nvidia(compiled: Any, target: GPUTarget) -> dict[str, Any]:
    """``spills_in_inner_loops`` counts the instructions that spill in the innermost loops with matrix products."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        architecture = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        ptxas = get_ptxas(target.arch).path
        report = run_tool(ptxas, "-v", f"--gpu-name={architecture[1]}", str(ptx), "-o", str(cubin)).stderr
        cubin.write_bytes(compiled.asm["cubin"])  # which a launch would load
        assembly = run_tool(knobs.nvidia.nvdisasm.path, "-c", str(cubin)).stdout
    loops = inner_loops(assembly)
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None, report
    return {
        "registers": int(registers[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "products": "MMA" in assembly,
        "inner_loops": len(loops),
        "spills_in_inner_loops": sum(len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in loops),
    }


def run_tool(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a tool of Triton's."""
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True, timeout=120)


def inner_loops(assembly: str) -> list[str]:
    """The loops of disassembled code that hold matrix products and no other loop."""
    begins = {label[1]: label.end() for label in re.finditer(r"^(\.L_x_\d+):", assembly, re.MULTILINE)}
    spans: dict[int, int] = {}
    for jump in re.finditer(r"\bBRA\b.*\((\.L_x_\d+)\)", assembly):
        begin = begins[jump[1]]
        if begin < jump.start() and "MMA" in assembly[begin : jump.end()]:
            spans[begin] = jump.end()  # the last jump to the begin of a loop is its end
    return [
        assembly[begin:end]
        for begin, end in spans.items()
        if not any(begin < other_begin and other_end <= end for other_begin, other_end in spans.items())
    ]


def main(gpu: str, head_dim: int, variants: str, dtype: str = "bfloat16") -> None:
    target = GPUTarget("hip", gpu, 64) if gpu.startswith("gfx") else GPUTarget("cuda", int(gpu), 32)
    results = []
    for variant in VARIANTS[variants]:
        for kernel, args, kwargs in recorded(variant, target, head_dim, getattr(torch, dtype)):
            results.append({"variant": variant, **resources(kernel, args, kwargs, target)})
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
