"""The description of options that has to be equal on all ranks."""

from __future__ import annotations

import pytest
import torch

from ring_backends.training.describe import describe_options


def test_values_that_differ_between_ranks_are_ignored() -> None:
    def options(rank: int) -> dict[str, object]:
        return {
            "device_ids": [rank],
            "device_id": torch.device("cuda", rank),
            "device": torch.device("cuda", rank),
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": f"/disk{rank}"}},
        }

    assert describe_options(options(0)) == describe_options(options(1))
    assert describe_options({"device": torch.device("cpu")}) != describe_options({"device": torch.device("cuda", 0)})


def test_plain_values_are_compared_and_other_objects_by_class() -> None:
    assert describe_options({"a": {"x": 1, "y": 2}}) == describe_options({"a": {"y": 2, "x": 1}})
    assert describe_options({"a": {"x": 1}}) != describe_options({"a": {"x": 2}})
    assert describe_options({"a": object()}) == describe_options({"a": object()})
    assert describe_options({"a": torch.bfloat16}) != describe_options({"a": None})


def test_numbers_of_numpy_are_compared() -> None:
    numpy = pytest.importorskip("numpy")
    assert describe_options({"a": numpy.float32(0.5)}) != describe_options({"a": numpy.float32(0.25)})
