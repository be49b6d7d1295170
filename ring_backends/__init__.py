"""Exact ring dilated attention (LongNet's pattern, sharded over devices by a point-to-point ring)."""

from ring_backends.attention import RingDilatedAttention, dilated_attention
from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError
from ring_backends.layout import SequenceLayout
from ring_backends.pattern import DilatedPattern
from ring_backends.registry import available_adapters
from ring_backends.ring import Ring, Transfer
from ring_backends.schedule import RingSchedule

__all__ = [
    "AdapterUnavailableError",
    "DilatedPattern",
    "Ring",
    "RingDilatedAttention",
    "RingMismatchError",
    "RingPeerError",
    "RingSchedule",
    "SequenceLayout",
    "Transfer",
    "available_adapters",
    "dilated_attention",
]
__version__ = "0.1.0"
