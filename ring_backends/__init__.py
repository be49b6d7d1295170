"""Exact ring dilated attention: LongNet's pattern over a sequence that is sharded over a ring of ranks.

The names below are imported on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_backends.attention import RingDilatedAttention, dilated_attention
    from ring_backends.cost.arrangement import AutoOptions, RingSize
    from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError
    from ring_backends.registry import available_adapters, create_attention
    from ring_backends.ring.ring import Ring
    from ring_backends.ring.topology import RingOrder
    from ring_backends.ring.transfer import Transfer, WorkTransfer
    from ring_backends.schedule.layout import LayoutKind, SequenceLayout
    from ring_backends.schedule.pattern import DilatedPattern
    from ring_backends.schedule.ring_schedule import RingSchedule

__all__ = [
    "AdapterUnavailableError",
    "AutoOptions",
    "DilatedPattern",
    "LayoutKind",
    "Ring",
    "RingDilatedAttention",
    "RingMismatchError",
    "RingOrder",
    "RingPeerError",
    "RingSchedule",
    "RingSize",
    "SequenceLayout",
    "Transfer",
    "WorkTransfer",
    "available_adapters",
    "create_attention",
    "dilated_attention",
]
__version__ = "0.1.0"

_MODULES = {
    "AdapterUnavailableError": "errors",
    "AutoOptions": "cost.arrangement",
    "DilatedPattern": "schedule.pattern",
    "LayoutKind": "schedule.layout",
    "Ring": "ring.ring",
    "RingDilatedAttention": "attention",
    "RingMismatchError": "errors",
    "RingOrder": "ring.topology",
    "RingPeerError": "errors",
    "RingSchedule": "schedule.ring_schedule",
    "RingSize": "cost.arrangement",
    "SequenceLayout": "schedule.layout",
    "Transfer": "ring.transfer",
    "WorkTransfer": "ring.transfer",
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
