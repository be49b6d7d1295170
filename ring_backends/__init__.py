"""Exact ring dilated attention (LongNet's pattern, sharded over devices by a point-to-point ring).

The names below are imported when they are first asked for: the command line, the pattern and the registry need no
torch, and answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_backends.arrange import AutoOptions
    from ring_backends.attention import RingDilatedAttention, dilated_attention
    from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError
    from ring_backends.layout import SequenceLayout
    from ring_backends.pattern import DilatedPattern
    from ring_backends.registry import available_adapters, create_attention
    from ring_backends.ring import Ring
    from ring_backends.schedule import RingSchedule
    from ring_backends.transfer import Transfer

__all__ = [
    "AdapterUnavailableError",
    "AutoOptions",
    "DilatedPattern",
    "Ring",
    "RingDilatedAttention",
    "RingMismatchError",
    "RingPeerError",
    "RingSchedule",
    "SequenceLayout",
    "Transfer",
    "available_adapters",
    "create_attention",
    "dilated_attention",
]
__version__ = "0.1.0"

_MODULES = {
    "AdapterUnavailableError": "errors",
    "AutoOptions": "arrange",
    "DilatedPattern": "pattern",
    "Ring": "ring",
    "RingDilatedAttention": "attention",
    "RingMismatchError": "errors",
    "RingPeerError": "errors",
    "RingSchedule": "schedule",
    "SequenceLayout": "layout",
    "Transfer": "transfer",
    "available_adapters": "registry",
    "create_attention": "registry",
    "dilated_attention": "attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
