"""What the tests of Triton kernels share: the interpreter, settings of random cases, and a check of a whole call."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from native_ranks import ADAPTER
from torch import Tensor

from ring_backends import Ring
from ring_backends.testing.calls import Results, check_bounded, expected, largest, local_call, new_attention
from ring_backends.testing.strategies import AttentionCase

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 is not set, so Triton needs a GPU")


def fixed_examples(number: int) -> settings:
    """The same examples in every run: a bound is the error of another computation, which can be small by chance."""
    # A failing example is not shrunk, since that takes hundreds of interpreted calls.
    options: dict[str, Any] = {"database": None, "deadline": None, "phases": [Phase.explicit, Phase.generate]}
    unwanted = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return settings(max_examples=number, derandomize=True, suppress_health_check=unwanted, **options)


@cache
def patch_interpreter() -> None:
    """Let the interpreter patch ``triton.language`` once per module of device functions, not in every call of one.

    This halves the time of a kernel. Launches still patch it, and undo that.

    The interpreter gives a comparison the type of its operands. Repeated into a block, a scalar one is then numbers,
    which Triton 3.9 refuses as a mask. Here comparisons have the type of booleans.
    """
    if not IS_INTERPRETED:  # the interpreter needs NumPy, and Triton does not install it
        return
    from triton.runtime import interpreter

    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call  # type: ignore[method-assign]

    binary_op = interpreter.InterpreterBuilder.binary_op

    def typed_binary_op(self: Any, *args: Any) -> Any:
        result = binary_op(self, *args)
        if result.data.dtype == bool:
            result.dtype = interpreter.tl.int1
        return result

    interpreter.InterpreterBuilder.binary_op = typed_binary_op  # type: ignore[method-assign]


def results(case: AttentionCase, kernel: str = "triton_dilated") -> Results:
    """The results of one device with a kernel."""
    attention = new_attention(ADAPTER, None, case, kernel=kernel)
    return local_call(ADAPTER, Ring(), case, attention=attention).results()


def check_call(case: AttentionCase, kernel: str = "triton_dilated") -> None:
    """Check the results of one device with a kernel."""
    check(case, results(case, kernel))


def error_norm(actual: Tensor, wanted: Tensor) -> float:
    """The norm of the difference. It is infinite if NaNs or infinities differ."""
    actual, wanted = actual.double(), wanted.double()
    gap = torch.where(actual == wanted, 0.0, actual - wanted)
    return float(gap.norm()) if gap.isfinite().all() else math.inf


def check(case: AttentionCase, actual: Results) -> None:
    """No error may exceed twice the error of plain attention in the same dtype, and a few fp32 roundings per number."""
    rounding = 4 * max(map(largest, expected(case).computed().values())) * torch.finfo(torch.float32).eps
    check_bounded(actual, case, lambda name, tensor, wanted: rounding * math.sqrt(tensor.numel()), error_norm)
