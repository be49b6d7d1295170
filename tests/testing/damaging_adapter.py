"""An adapter for test_messages.py. It zeroes everything after 1 MiB of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from ring_backends.adapters.native import NativeRingDilatedAttention, initialize
from ring_backends.ring.transfer import Transfer

__all__ = ["RingDilatedAttention", "initialize"]


@dataclass(frozen=True)
class DamagingTransfer(Transfer):
    transfer: Transfer
    incoming: Mapping[int, Tensor]

    def wait(self, timeout: timedelta) -> None:
        self.transfer.wait(timeout)
        for buffer in self.incoming.values():
            buffer[2**20 :] = 0


class RingDilatedAttention(NativeRingDilatedAttention):
    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        return DamagingTransfer(super().ring_pass(outgoing, incoming, tag), incoming)
