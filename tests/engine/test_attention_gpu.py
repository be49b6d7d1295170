"""Calls on one GPU with every kernel, against the dense fp64 reference. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from kernel_cases import each_gpu_kernel, skip_if_refused
from native_ranks import ADAPTER
from test_capture_gpu import DEVICE, call_of, each_dtype, on_host

from ring_backends import score_mods
from ring_backends.kernels import Kernel, KernelInputs
from ring_backends.testing.calls import Results, check_bounded, expected, largest, new_attention, precision
from ring_backends.testing.marks import needs_gpu
from ring_backends.testing.score_functions import NAMES
from ring_backends.testing.strategies import AttentionCase, attention_cases

pytestmark = needs_gpu

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"masks": [None], "documents": [None], "dropout_ps": [0.0]},
    "key mask": {"masks": ["random", "rows", "all"], "documents": [None], "dropout_ps": [0.0]},
    "documents": {"documents": ["some", "shuffled"], "paddings": ["masked"], "dropout_ps": [0.0]},
    "dropout": {"masks": [None], "documents": [None], "dropout_ps": [0.3]},
    "all": {"masks": ["random"], "documents": ["some"], "paddings": ["masked"], "dropout_ps": [0.3]},
    "score_mod": {"documents": [None], "score_mods": NAMES, "dropout_ps": [0.0]},
}


SIZES: dict[str, Any] = {"head_dims": (64, 16, 128), "value_dims": (None, 32)}


def check(got: Results, case: AttentionCase) -> None:
    """No error may exceed twice the error of plain attention in the same dtype, and four roundings.

    They are roundings of a sum of head_dim products as large as the largest number in any result: the gradient of a
    query with a single key is the difference of two such sums.
    """
    terms = 4 * max(map(largest, expected(case).computed().values())) * case.head_dim**0.5
    check_bounded(got, case, lambda name, tensor, wanted: terms * precision(case, name, tensor))


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@each_gpu_kernel
def test_random_calls_equal_the_reference(kernel: Kernel, kind: str, dtype: torch.dtype) -> None:
    names = {"has_key_mask": "key mask", "has_documents": "documents", "has_dropout": "dropout"}
    marks: dict[str, Any] = {name: kind in (option, "all") for name, option in names.items()}
    marks["score_mod"] = score_mods.softcap(1.5) if kind == "score_mod" else None
    skip_if_refused(kernel, KernelInputs(torch.device(DEVICE, 0), dtype, 64, **marks))

    @seed(crc32(repr((kernel.name, kind, dtype)).encode()))
    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=attention_cases(max_n=400, dtypes=[dtype], **SIZES, **{"score_mods": [None], **KINDS[kind]}))
    def check_case(case: AttentionCase) -> None:
        case = replace(case, batch=min(case.batch, 2))
        attention = new_attention(ADAPTER, None, case, kernel=kernel.name)
        check(on_host(call_of(case, attention).results()), case)

    check_case()
