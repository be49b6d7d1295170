"""Helpers of the tests of the FSDP adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import FOUR, RingSpec, ring_of

pytest.importorskip("numpy")  # the adapter needs NumPy

from ring_backends.adapters import fsdp

ADAPTER = "ring_backends.adapters.fsdp"


STRATEGIES = ("fsdp2", "hsdp", "fsdp1")


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


COPIES = {"copies of a wrapped model": "each rank holds shards, and FSDP's modules hold process groups"}


def parallelize(options: Mapping[str, Any], model: nn.Module | None = None, rings: RingSpec = FOUR) -> Any:
    return fsdp.parallelize(OneParameter() if model is None else model, unit_sgd, ring_of(ADAPTER, rings), **options)
