"""The Triton kernels: in Triton's interpreter against the dense fp64 reference, and compiled for GPUs without running.

Both parts need Triton, and neither needs a GPU. ``tox run -e triton`` runs them.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
from command_line import environment, run
from hypothesis import given, seed
from hypothesis import strategies as st
from kernel_cases import Case, cases, check_a_row_without_keys, run_tile
from kernel_cases import check as check_tile
from native_ranks import ADAPTER
from triton_interpreter import check, check_call, fixed_examples, interpreted, patch_interpreter, results

from ring_backends.engine.call import forget_calls
from ring_backends.kernels import KernelInputs, select_kernel, triton_launch
from ring_backends.kernels.aten_cpu import AtenCpuFlashKernel
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.tile_table import NUMBER_ALIGNMENT
from ring_backends.kernels.triton_dilated import TritonDilatedKernel
from ring_backends.schedule.bands import Band
from ring_backends.testing.calls import Results, local_call, new_attention, whole
from ring_backends.testing.correctness import EDGE_CASES
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.rings import TWO, ring_of
from ring_backends.testing.score_functions import NAMES
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World

triton = pytest.importorskip("triton", reason="Triton is not installed")

patch_interpreter()
KERNEL = TritonDilatedKernel()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"masks": [None], "documents": [None], "dropout_ps": [0.0], "score_mods": [None]},
    "key mask": {"masks": ["random", "rows", "all"], "documents": [None], "dropout_ps": [0.0], "score_mods": [None]},
    "documents": {"documents": ["some", "shuffled"], "paddings": ["masked"], "dropout_ps": [0.0], "score_mods": [None]},
    "dropout": {"dropout_ps": [0.3], "score_mods": [None]},
    "score_mod": {"dropout_ps": [0.0], "score_mods": NAMES},
}


@interpreted
@pytest.mark.parametrize("is_causal", [False, True], ids=["not causal", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_equal_the_reference(kind: str, is_causal: bool) -> None:
    sizes: dict[str, Any] = {"max_n": 20, "max_heads": 2, "head_dims": (4, 1, 3, 16), "dtypes": [torch.float32]}

    # Without a seed of its own, every test would draw the same lengths and rates.
    @seed(crc32(repr((kind, is_causal)).encode()))
    @fixed_examples(8)
    @given(case=attention_cases(**sizes, causal=[is_causal], **KINDS[kind]))
    def check_cases(case: AttentionCase) -> None:
        check_call(replace(case, batch=min(case.batch, 2)))

    check_cases()


@interpreted
# The kernels call no score_mod in a call with dropout.
@pytest.mark.parametrize("name", [name for name, x in EDGE_CASES.items() if x.score_mod is None or not x.dropout_p])
def test_edge_cases_equal_the_reference(name: str) -> None:
    check_call(replace(EDGE_CASES[name], dtype=torch.float32))


LONGER = AttentionCase(45, (45,), (1,), batch=2, num_heads=2, head_dim=16, is_causal=True)
TWO_BRANCHES = replace(LONGER, seq_len=40, segment_lengths=(16, 40), dilation_rates=(1, 3))


HALF: dict[str, dict[str, Any]] = {
    "causal": {},
    "key mask": {"masked": "random", "num_kv_heads": 2, "is_causal": False},
    "documents": {"documents": "some", "segment_lengths": (32, 45), "dilation_rates": (1, 2)},
    "dropout": {"dropout_p": 0.3, "head_dim": 20},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "plain": {},
    "key mask": {"masked": "random", "num_kv_heads": 1},
    "documents": {"documents": "some"},
    "dropout": {"dropout_p": 0.3, "offset": "every"},
}
IN_WINDOWS = replace(LONGER, segment_lengths=(None, 24), dilation_rates=(1, 3), window_lengths=(5, 10), batch=1)
WIDE = replace(TWO_BRANCHES, segment_lengths=(30, 40), batch=1)
CALLS = {
    **{f"bf16, {name}": replace(LONGER, dtype=torch.bfloat16, **options) for name, options in HALF.items()},
    "fp16": replace(LONGER, dtype=torch.float16),
    **{f"windows, {name}": replace(IN_WINDOWS, **options) for name, options in WINDOWED.items()},
    "windows, not causal": replace(IN_WINDOWS, is_causal=False),
    **{f"head_dim {head_dim}": replace(WIDE, head_dim=head_dim) for head_dim in (17, 256)},
}


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_longer_calls_equal_the_reference(name: str) -> None:
    check_call(CALLS[name])


@interpreted
def test_scores_of_a_whole_block_that_overflow() -> None:
    query, key, *_ = tensors = torch.randn(4, 1, 1, 24, 16, generator=torch.Generator().manual_seed(0))
    query.fill_(40.0)
    key[:, :, :8], key[:, :, 8:] = -3e38 / 16, key[:, :, 8:] * 1e-2  # scores of the first block: -inf
    by_kernel = [run_tile(kernel, tensors, scale=1.0) for kernel in (KERNEL, MathKernel())]
    torch.testing.assert_close(*by_kernel, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("options", [{}, {"documents": "some"}])
@pytest.mark.parametrize("num_queries", [(16, 16), (64, 16)])
def test_a_backward_reads_only_the_statistics_that_it_stored(monkeypatch, num_queries, options):
    queries = dict(zip(("grad_query", "grad_key_value"), num_queries, strict=True))
    monkeypatch.setattr(
        triton_launch, "block_sizes", lambda name, *_, **__: triton_launch.Blocks(queries.get(name, 16), 8, 4, 1)
    )
    forget_calls()  # plans keep launches with other blocks
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        assert torch.empty(1).isnan()
        check_call(replace(LONGER, segment_lengths=(20, 45), dilation_rates=(1, 2), **options))
    finally:
        torch.use_deterministic_algorithms(False)
        forget_calls()


@interpreted
def test_a_row_that_sees_no_key_has_gradient_0_beside_nan() -> None:
    tensors = torch.randn(4, 1, 1, 4, 16, generator=torch.Generator().manual_seed(0))
    tensors[2, :, :, 1] = math.nan  # a value
    mask = torch.tensor([[[True, False, False, False]]])  # the first row is causal, and sees only the first key
    out, lse, grad_query, _, _ = run_tile(KERNEL, tensors, is_causal=True, scale=0.25, key_mask=mask)
    assert lse[0, 0, 0] == float("-inf")
    assert out[:, :, 0].eq(0).all()
    assert grad_query[:, :, 0].eq(0).all()


def assert_same_bits(first: Results, second: Results) -> None:
    assert all(map(torch.equal, first.computed().values(), second.computed().values()))


NO_DOCUMENTS = replace(LONGER, seq_len=40, segment_lengths=(40,), documents="shuffled", batch=1)


@interpreted
@pytest.mark.parametrize("spoiled", [("key",), ("value",), ("query", "key", "value", "grad_out")], ids=len)
def test_nan_in_ignored_keys_and_in_rows_without_a_document_reaches_nothing(spoiled: tuple[str, ...]) -> None:
    case = replace(TWO_BRANCHES, masked="rows", seed=3) if len(spoiled) == 1 else NO_DOCUMENTS
    ignored = case.tensors()[4].all(0) if len(spoiled) == 1 else case.document_ids()[0] < 0
    broken = replace(case, spoiled=tuple((name, int(ignored.nonzero()[-1]), math.nan) for name in spoiled))
    assert_same_bits(results(broken), results(case))


@interpreted
def test_two_runs_are_bitwise_equal_and_inputs_unchanged() -> None:
    case = replace(TWO_BRANCHES, dilation_rates=(1, 2), dropout_p=0.2)
    before = case.tensors()
    assert_same_bits(results(case), results(case))
    assert all(map(torch.equal, before[:4], case.tensors()[:4]))


# The harness calls a kernel with single tiles too: comparisons with other methods do.
@interpreted
@fixed_examples(24)
@given(case=st.booleans().flatmap(lambda banded: cases(head_dims=st.integers(1, 20), banded=banded)))
def test_single_tiles_with_and_without_bands_equal_the_dense_softmax(case: Case) -> None:
    check_tile(KERNEL, case, torch.float32)


# Blocks have 16 queries and 8 keys.
@interpreted
@pytest.mark.parametrize(
    "band",
    [
        Band(2, 0),  # smaller than a block
        Band(15, 7),  # no block is whole for all rows
        Band(30, 9),  # one row begins another block
        Band(40, -16),  # begins a block later
        Band(-9, None),  # some queries see no key, and some keys no query
        Band(-3, 3),  # one diagonal
    ],
    ids=str,
)
def test_bands_of_one_tile(band: Band) -> None:
    for seq_q, seq_k in ((50, 50), (20, 50), (50, 20)):
        check_tile(KERNEL, Case(1, 1, 2, seq_q, seq_k, is_causal=False, band=band), torch.float32)


@interpreted
def test_a_row_with_infinite_lse_has_no_gradient() -> None:
    check_a_row_without_keys(KERNEL, torch.float32, 1e-6)


def run_on_ring(case: AttentionCase, layout: Any, min_bytes: int, is_beside: bool = False) -> Results:
    """Run a case on a ring of two processes, with blocks of heads and hops cut down to ``min_bytes``."""
    with fine_cuts(min_bytes), beside_another_kernel() if is_beside else contextlib.nullcontext():
        attention = new_attention(ADAPTER, ring_of(ADAPTER, TWO, layout), case, kernel="triton_dilated")
        return local_call(ADAPTER, attention.ring, case, attention=attention).results()


def check_on_ring(world: World, case: AttentionCase, layout: Any, *how: Any) -> None:
    check(case, whole(world.run(run_on_ring, case, layout, *how, ranks=(0, 1))[:2], case.seq_len, layout))


RINGED = AttentionCase(22, (6, 22), (1, 2), num_heads=2, is_causal=True)


ON_RING: dict[str, dict[str, Any]] = {
    "causal": {},
    "block offsets": {"is_causal": False, "offset": "block", "head_dim": 7},
    "documents": {"masked": "random", "documents": "some"},
    "key mask": {"masked": "rows", "dtype": torch.bfloat16},
    "dropout": {"dropout_p": 0.3, "num_heads": 3, "batch": 2},
    "zero keys": {"is_causal": False, "padding": "zeros", "segment_lengths": (8, 30), "dilation_rates": (4, 3)},
    "causal windows": {"window_lengths": (3, 13), "segment_lengths": (None, None), "masked": "random"},
    "windows": {"window_lengths": (7, 8), "segment_lengths": (None, 20), "is_causal": False, "dropout_p": 0.3},
    "distances": {"score_mod": "distance", "num_heads": 3, "batch": 2, "masked": "random"},
    "even distances": {"score_mod": "parity", "num_kv_heads": 2, "is_causal": False, "documents": "some"},
    "wide values": {"value_dim": 7, "num_heads": 4, "num_kv_heads": 2},
}


@interpreted
@pytest.mark.parametrize(("number", "name"), enumerate(ON_RING))
def test_a_ring_of_two_equals_the_reference(world: World, number: int, name: str) -> None:
    """Every second case is on a contiguous ring, with fine cuts."""
    layout, min_bytes = (("contiguous", 128), ("zigzag", 2**20))[number % 2]
    check_on_ring(world, replace(RINGED, **ON_RING[name]), layout, min_bytes)


BESIDE = replace(RINGED, seq_len=48, segment_lengths=(8, 24, 48), dilation_rates=(1, 2, 4), num_heads=4, num_kv_heads=2)


def beside_another_kernel() -> Any:
    """Let the CPU kernel compute the dense branch and the second one, and Triton the last, as ``auto`` may on a GPU."""
    kernels = AtenCpuFlashKernel(), {2: KERNEL}
    return mock.patch("ring_backends.engine.call.kernels_of_call", return_value=kernels)


@interpreted
@pytest.mark.parametrize("layout", [None, "contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_branch_beside_another_kernel(world: World, dtype: torch.dtype, layout: str | None) -> None:
    case = replace(BESIDE, dtype=dtype)
    if layout is None:
        with beside_another_kernel():
            check_call(case, "auto")
    else:
        check_on_ring(world, case, layout, 2**20, True)


@interpreted
def test_auto_never_chooses_it_on_the_cpu() -> None:
    inputs = KernelInputs(torch.device("cpu"), torch.float32, head_dim=64, has_dropout=True)
    assert select_kernel("triton_dilated", inputs).name == "triton_dilated"
    assert select_kernel("auto", inputs).name != "triton_dilated"
    with pytest.raises(ValueError, match="head_dim must be at most 256"):
        select_kernel("triton_dilated", replace(inputs, head_dim=257))


def test_a_backward_stores_the_numbers_that_it_reads() -> None:
    tables = triton_launch._HOPPER_BLOCKS, triton_launch._AMPERE_BLOCKS, triton_launch._PAIRWISE_BLOCKS
    pairs = [(table["grad_query"][dim], table["grad_key_value"][dim]) for table in tables for dim in (64, 128, 256)]
    for both in (*triton_launch._FP32_BLOCKS.values(), triton_launch._INTERPRETED_BLOCKS):
        pairs.append((both, both))
    for stored, read in pairs:
        assert stored.queries % read.queries == 0
        assert NUMBER_ALIGNMENT % read.queries == 0


CAPABILITIES = {86: 99, 90: 227}
"""Shared memory of a block, in KiB, by compute capability (CUDA C++ Programming Guide, technical specifications)."""

COMPILED = [("full", 86), ("full", 90), ("window", 90), ("others", 90)]
"""Variants and compute capability, with head_dim 128, which needs most. Compiling one takes half a minute."""

SHARED_ON_AMD, REGISTERS_ON_AMD = 64 * 1024, 512
"""Shared memory of a block in bytes, and registers of a thread, of gfx90a and gfx942 (CDNA 2 and 3, ISA references)."""

SPILLED = {
    ("3.6", "full"): {
        (86, "grad_key_value_kernel"): {"packed": 28, "documents, dropout": 60},
        (90, "grad_key_value_kernel"): {"plain": 140, "packed": 124, "key mask, packed": 100},
    },
    ("3.6", "window"): {(90, "grad_key_value_kernel"): {"plain": 212, "packed": 188, "key mask, packed": 164}},
    ("3.6", "others"): {},
    ("3.9", "full"): {
        (86, "grad_key_value_kernel"): {"packed": 28},
        (90, "grad_key_value_kernel"): {"plain": 188, "packed": 208, "key mask, packed": 184},
    },
}
"""By release of Triton, variants, and launch: the bytes that a thread stores and loads for lack of registers.

None of them is stored or loaded in an innermost loop. Most are loaded once per run of rows, or after all of them. With
196 such bytes, dK and dV with head_dim 128 took 2.65 ms on an H100, and 3.16 ms with the fastest blocks that need none
(Triton 3.6). The limits of other releases are not known, nor those of Triton 3.9 with windows.
"""


def run_with_compiler(script: str, *arguments: str) -> Any:
    """Run a script of this folder without the interpreter, which replaces Triton's compiler, and return its JSON."""
    folder = Path(__file__).parent
    # In later releases, a launch has to ask for fusion.
    env = environment(folder, TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="0")
    done = run([str(folder / script), *arguments], folder, env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for NVIDIA GPUs runs on Linux only")
def test_a_launch_that_is_alike_finds_the_compiled_kernel() -> None:
    """The second of two launches starts the same kernel with the same arguments, without Triton's lookup."""
    report = run_with_compiler("launch_triton.py")
    assert report.pop("alignment") == [True, True]
    assert report == {"rows": [6, True], "plain": [3, True], "documents, dropout": [3, True], "soft cap": [3, True]}


@pytest.mark.matrix(reason="compiles for minutes")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for NVIDIA GPUs runs on Linux only")
@pytest.mark.parametrize(("variants", "capability"), COMPILED)
def test_compiled_kernels_fit_into_registers_and_shared_memory(variants: str, capability: int) -> None:
    release = version("triton").rpartition(".")[0]
    for kernel in run_with_compiler("compile_triton.py", str(capability), "128", variants):
        assert kernel["registers"] <= 255, kernel
        assert kernel["inner_loops"] == (2 if "rows" not in kernel["kernel"] else 0), kernel
        if (spilled := SPILLED.get((release, variants))) is not None:
            by_variant = spilled.get((capability, kernel["kernel"]), {})
            assert kernel["spilled"] <= by_variant.get(kernel["variant"].removesuffix(", window"), 0), kernel
        assert kernel["spills_in_inner_loops"] == 0, kernel
        assert kernel["fuses"], kernel
        assert kernel["shared"] <= CAPABILITIES[capability] * 1024, kernel


@pytest.mark.matrix(reason="compiles for minutes")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for GPUs of AMD runs on Linux only")
@pytest.mark.parametrize(("variants", "gpu"), [("full", "gfx90a"), ("full", "gfx942"), ("others", "gfx942")])
def test_kernels_compile_for_gpus_of_amd(variants: str, gpu: str) -> None:
    """No such GPU has run them. What they spill is not limited."""
    for kernel in run_with_compiler("compile_triton.py", gpu, "128", variants):
        assert kernel["registers"] <= REGISTERS_ON_AMD, kernel
        assert kernel["shared"] <= SHARED_ON_AMD, kernel
        assert kernel["products"] == ("rows" not in kernel["kernel"]), kernel
        assert kernel["fuses"], kernel
