"""Adapters by name: built-in adapters, those of other distributions, and unavailable ones."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run

from ring_backends import (
    AdapterUnavailableError,
    DilatedPattern,
    RingDilatedAttention,
    available_adapters,
    create_attention,
    registry,
)
from ring_backends.adapters import native
from ring_backends.ring.ring import Ring
from ring_backends.testing.marks import THOROUGH

OTHER = "other_distribution.adapter"


class OtherRingDilatedAttention(native.NativeRingDilatedAttention):
    """The attention class of a third party."""


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an installed distribution with one working adapter and two unavailable ones."""
    module = types.ModuleType(OTHER)
    module.RingDilatedAttention = OtherRingDilatedAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, OTHER, module)
    found = {"other": OTHER, "absent": "no_such_distribution.adapter", "broken": "broken_distribution"}

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "ring_backends.adapters"
        return [EntryPoint(name, value, group) for name, value in found.items()]

    def import_module(name: str) -> types.ModuleType:
        if name == "broken_distribution":
            raise AdapterUnavailableError("it needs a machine with wings; pip install wings")
        return imported(name)

    imported = registry.import_module
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "import_module", import_module)


def test_the_abstract_class_says_which_import_makes_it_concrete() -> None:
    with pytest.raises(TypeError, match=r"from ring_backends\.adapters import native as backend"):
        RingDilatedAttention([8], [1])  # type: ignore[abstract]


def test_attention_modules_show_only_what_users_and_adapters_call() -> None:
    public = {name for name in vars(RingDilatedAttention) if not name.startswith("_")}
    assert public == {"ring", "binding", "ring_pass", "forward", "new_cache", "prefill", "decode", "extra_repr"}


def test_every_adapter_is_listed_with_its_reason(announced: None) -> None:
    reasons = available_adapters()
    assert reasons["native"] is reasons["other"] is None
    assert reasons["broken"] == "it needs a machine with wings; pip install wings"
    assert "no_such_distribution.adapter" in str(reasons["absent"])


def test_listing_adapters_hides_the_warnings_of_frameworks(
    announced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recwarn: Any
) -> None:
    import_module, logger = registry.import_module, logging.getLogger("framework")

    def import_with_warnings(name: str) -> types.ModuleType:
        logger.warning("no accelerator")
        warnings.warn("deprecated", stacklevel=1)
        return import_module(name)

    monkeypatch.setattr(registry, "import_module", import_with_warnings)
    assert available_adapters()["other"] is None
    assert (caplog.messages, recwarn.list) == ([], [])
    registry.load_adapter("other")
    assert (caplog.messages, len(recwarn)) == (["no accelerator"], 1)


def test_auto_selects_the_adapter_of_the_ring(announced: None) -> None:
    ring = Ring(adapter="other")
    assert type(create_attention("auto", [8], [1], ring=ring)) is OtherRingDilatedAttention
    assert type(create_attention("auto", [8], [1], ring=native.initialize())) is native.RingDilatedAttention


def test_a_name_selects_the_adapter(announced: None) -> None:
    ring = Ring(layout_kind="zigzag")
    attention = create_attention(
        "other", [8, None], [1, 2], ring=ring, head_mode="grouped", window_lengths=[None, 5], scale=0.5
    )
    assert (type(attention), attention.scale) == (OtherRingDilatedAttention, 0.5)
    assert attention.ring is ring
    assert attention.pattern == DilatedPattern((8, None), (1, 2), head_mode="grouped", window_lengths=(None, 5))
    x = torch.randn(1, 16, 2, 4)
    assert attention(x, x, x).shape == x.shape


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("horovod", [8], [1]), ValueError, "backend = 'horovod': .* choose one of absent, broken, .*native, .*other"),
        (([8], [1]), TypeError, r"backend = \[8\]: expected the name"),
        (("native",), ValueError, "segment_lengths is empty"),
        (("broken", [8], [1]), AdapterUnavailableError, "machine with wings"),
        (("absent", [8], [1]), AdapterUnavailableError, "adapter 'absent' cannot be imported"),
    ],
)
def test_refused_arguments(announced: None, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create_attention(*arguments)


@THOROUGH
def test_missing_frameworks_are_listed_with_install_commands() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("numpy", "deepspeed", "fairscale")))
from ring_backends import available_adapters
for name, reason in available_adapters().items():
    print(name, reason)
"""
    done = run(["-c", code], Path.cwd())
    reasons = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert reasons.pop("native") == "None"
    assert sorted(reasons) == ["deepspeed", "fairscale", "fsdp"]
    for name, reason in reasons.items():
        assert f"pip install 'ring-backends[{name}]'" in reason
