"""``info``: its short form on machines with several devices, and where the rest is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import shown

from ring_backends.cli import info

GPU = {"name": "GPU, 80 GiB", "dtype": "bfloat16"}
CALLS = {
    "bfloat16, head_dim 128": "cudnn",
    "bfloat16, head_dim 64": "cudnn",
    "bfloat16, head_dim 128, dilated": "triton",
    "bfloat16, head_dim 128, key mask": "triton",
    "float32, head_dim 64": "efficient",
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a machine with a CPU and three GPUs, the first two of which are equal, shows."""
    devices = [{"device": "cpu", "name": "2 cores", "dtype": "float32"}]
    devices += [{"device": f"cuda:{index}", **GPU} for index in range(2)]
    devices += [{"device": "cuda:2", **GPU, "name": "GPU, 40 GiB"}]
    why, one_gpu = "no CUDA device", "the tests have run it on one GPU"
    kernels = {"cudnn": (None, one_gpu), "triton": (None, one_gpu), "efficient": (why, None), "flash": (why, None)}
    values = {
        "versions": {"torch": "2.99.0", "cuda": None, "deepspeed": "0.19.8"},
        "untested": {"torch": "the tests have not run with 2.99.0"},
        "devices": devices,
        "adapters": {"native": None, "fsdp": None, "deepspeed": "it needs [brackets]"},
        "kernels": {name: {"unusable": no, "unverified": tested} for name, (no, tested) in kernels.items()},
        "kernel_choice": [
            {"device": device["device"], "call": call, "kernel": kernel, "why": "it is the fastest"}
            for device in devices
            for call, kernel in (CALLS if device["device"] != "cpu" else dict.fromkeys(CALLS, "math")).items()
        ],
        "dtype_advice": [{"device": "Volta", "dtype": "fp32", "why": "no bf16"}],
        "hops": {"gloo": "over TCP"},
        "nccl": {"release": None},
    }
    monkeypatch.setattr(info, "collect", lambda: values)
    return values


def test_the_short_form_names_what_works_and_what_is_missing(found: dict[str, Any]) -> None:
    chosen = "cudnn; triton for dilated, key mask; efficient for float32 with head_dim 64"
    assert [" ".join(line.split()) for line in shown("info").splitlines()] == [
        "Versions torch 2.99.0, deepspeed 0.19.8; not installed: cuda",
        "Devices cpu: 2 cores; recommended dtype: float32",
        "cuda:0 to cuda:1: GPU, 80 GiB; recommended dtype: bfloat16",
        "cuda:2: GPU, 40 GiB; recommended dtype: bfloat16",
        "Adapters native, fsdp",
        "Kernels cpu: math",
        f"cuda:0 to cuda:1: {chosen}",
        f"cuda:2: {chosen}",
        "NCCL none in this build of torch; hops go over gloo",
        "Missing adapter deepspeed: it needs [brackets]",
        "kernels efficient, flash: no CUDA device",
        "Tests torch: the tests have not run with 2.99.0",
        "kernels cudnn, triton: the tests have run it on one GPU",
        "Pass --verbose for every kernel, dtype advice and NCCL's settings.",
    ]


def test_verbose_shows_the_rest_and_json_has_everything(found: dict[str, Any], tmp_path: Path) -> None:
    text = shown("info --verbose --json", tmp_path / "info.json")
    for part in ("it is the fastest", "Volta", "over TCP", "the tests have run it on one GPU", "no: no CUDA device"):
        assert part in text
    shown("info --json", tmp_path / "short.json")
    assert json.loads((tmp_path / "info.json").read_text()) == found
    assert json.loads((tmp_path / "short.json").read_text()) == found


def test_info_of_this_machine_is_short() -> None:
    lines = shown("info").splitlines()
    assert len(lines) < 25, lines
    assert lines[0].startswith("Versions  python ")
    assert any(line.startswith("Kernels   cpu: aten_cpu_flash; math for dropout, score_mod") for line in lines)
