"""What ranks have to have in common of their arguments."""

from __future__ import annotations

import pytest
import torch

from ring_backends.training.describe import describe_options


def test_values_of_one_rank_are_not_compared() -> None:
    def options(rank: int) -> dict[str, object]:
        return {
            "device_ids": [rank],
            "device_id": torch.device("cuda", rank),
            "device": torch.device("cuda", rank),
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": f"/disk{rank}"}},
        }

    assert describe_options(options(0)) == describe_options(options(1))
    assert describe_options({"device": torch.device("cpu")}) != describe_options({"device": torch.device("cuda", 0)})


def test_plain_values_are_compared_and_of_others_the_class() -> None:
    assert describe_options({"a": {"x": 1, "y": 2}}) == describe_options({"a": {"y": 2, "x": 1}})
    assert describe_options({"a": {"x": 1}}) != describe_options({"a": {"x": 2}})
    assert describe_options({"a": object()}) == describe_options({"a": object()})
    assert describe_options({"a": torch.bfloat16}) != describe_options({"a": None})


def test_numbers_of_numpy_are_compared() -> None:
    numpy = pytest.importorskip("numpy")
    assert describe_options({"a": numpy.float32(0.5)}) != describe_options({"a": numpy.float32(0.25)})
