"""Which cases the quick command leaves out, and which tests need a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

MORE_CASES = pytest.mark.matrix(reason="more cases like those of the quick command")
THOROUGH = pytest.mark.matrix(reason="takes seconds, and quick tests take most of the same path")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def matrix_but(*quick: Any, of: Iterable[Any], reason: str | None = None) -> list[Any]:
    """Values for ``parametrize``. Those that are not in ``quick`` are marked ``matrix``."""
    mark = MORE_CASES if reason is None else pytest.mark.matrix(reason=reason)
    return [value if value in quick else pytest.param(value, marks=mark) for value in of]


def once_but(*every: Any, of: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``. Those in ``every`` run with every adapter, and the others with one, in the matrix."""
    return [value if value in every else pytest.param(value, marks=[MORE_CASES, pytest.mark.core]) for value in of]
