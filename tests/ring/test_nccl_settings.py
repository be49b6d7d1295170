"""This package's defaults for NCCL, where settings come from, and what ``info`` says of them. No GPU runs here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DebugLevel  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion

from ring_backends.cli import info
from ring_backends.ring import nccl_settings, rendezvous
from ring_backends.ring.nccl_settings import LAUNCH_ORDER, SETTINGS

NAMES = [name for setting in SETTINGS for name in (setting.name, setting.earlier_name) if name]
DOCS = Path(__file__).parents[2] / "docs" / "nccl.md"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NCCL's file of settings, in an environment without any setting."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that a variable that a test sets is removed afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    return tmp_path / "nccl.conf"


@pytest.fixture
def host_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this host pass for one with NCCL and two GPUs that reach each other."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)


def test_a_choice_in_a_file_of_nccl_stays(file: Path) -> None:
    """NCCL prefers the environment to its files, so the package must not set the variable."""
    file.write_text(f"#{LAUNCH_ORDER.name}=1\nNCCL_DEBUG=INFO\n{LAUNCH_ORDER.name}=0\n")
    nccl_settings.order_launches()
    assert LAUNCH_ORDER.name not in os.environ
    assert LAUNCH_ORDER.in_force() == ("0", str(file))


@pytest.mark.parametrize(
    ("release", "level", "is_refused"),
    [
        ("2.11.0", DebugLevel.DETAIL, True),
        ("2.11.0", DebugLevel.INFO, False),
        ("2.12.0+cu130", DebugLevel.DETAIL, False),
    ],
)
def test_detail_is_refused_where_torch_cannot_abort(release: str, level: Any, is_refused: bool) -> None:
    """The refusal comes before the rank tells the others that it is there."""
    store: Any = mock.Mock(add=mock.Mock(side_effect=InterruptedError))
    with (
        mock.patch.object(torch, "__version__", TorchVersion(release)),
        mock.patch.object(nccl_settings, "get_debug_level", return_value=level),
        mock.patch.object(dist, "get_rank", return_value=0),
        pytest.raises(RuntimeError if is_refused else InterruptedError) as caught,
    ):
        rendezvous._new_group((0, 1), store, "ring", rendezvous.START_TIMEOUT)
    if is_refused:
        assert "TORCH_DISTRIBUTED_DEBUG = 'DETAIL': with it, torch 2.11.0 wraps" in str(caught.value)


def test_info_with_gpus(host_with_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    found = nccl_settings.describe()
    info._show_nccl(found)
    rows = {row["name"]: (row["value"], row["source"]) for row in found["settings"]}
    assert rows["NCCL_LAUNCH_ORDER_IMPLICIT"] == ("1", "this package's default")
    assert rows["NCCL_BUFFSIZE"] == ("4194304", "NCCL's default")
    assert rows["TORCH_FR_BUFFER_SIZE"] == ("0", "environment")  # by its earlier name
    assert [row["setting"] for row in found["advice"]] == ["NCCL_MAX_P2P_NCHANNELS=8", "NCCL_NCHANNELS_PER_NET_PEER=8"]
    text = capsys.readouterr().out
    assert all(title in text for title in ("NCCL 2.29.7, settings around a ring", "Advice for rings over NCCL")), text


def test_advice_follows_the_choices(host_with_gpus: None, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("NCCL_MAX_P2P_NCHANNELS=16\nNCCL_NCHANNELS_PER_NET_PEER=4\nNCCL_LAUNCH_ORDER_IMPLICIT=0\n")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    settings = [row["setting"] for row in nccl_settings.describe()["advice"]]
    assert settings == ["NCCL_LAUNCH_ORDER_IMPLICIT=1", "TORCH_NCCL_BLOCKING_WAIT=0", "TORCH_DISTRIBUTED_DEBUG=OFF"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_page_lists_every_setting(setting: nccl_settings.Setting) -> None:
    rows = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("|") and setting.name in line]
    assert rows
    if setting.ours is not None:
        assert any(f"; {setting.ours} " in row for row in rows), rows
