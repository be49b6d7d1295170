"""Messages of ``ring_pass``: every byte arrives at its rank, from its hop, and a wait ends at its timeout.

The tests call ``ring_pass`` themselves and compare bytes. In calls of attention, the other suites send messages of some
KiB, and a wrong byte of a row with a small weight would hardly change a result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.transfer import Transfer
from ring_backends.testing.calls import new_attention
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.failing_calls import SMALL_CASE, ending
from ring_backends.testing.rings import BY_HOSTS, FOUR, TWO, RingSpec
from ring_backends.testing.world import on_every_rank

LONG = 12 * 2**20 + 5
"""Bytes of a message that is longer than the buffers of common transports. It is not a multiple of 2."""

TAG = 2**31 - 20
"""The first of the tags of these hops. It has as many bits as a tag may have."""

_GUARD = 16
_PATIENCE = timedelta(seconds=60)


def _content(sender: int, receiver: int, number: int, size: int) -> Tensor:
    """Random bytes that differ between messages. The ranks are global."""
    generator = torch.Generator().manual_seed(hash((sender, receiver, number)))
    return torch.empty(size // 8 + 1, dtype=torch.int64).random_(generator=generator).view(torch.uint8)[:size]


def _guarded(content: Tensor) -> Tensor:
    """The bytes within guards, which no transport may write to."""
    guard = torch.full((_GUARD,), 165, dtype=torch.uint8)
    return torch.cat([guard, content, guard])


class Hop:
    """One hop of this rank.

    Args:
        sizes: the bytes of each message of the hop, by (sender, receiver).
        number: the number of the hop. Hops of other numbers have other bytes.
    """

    def __init__(self, attention: Any, sizes: Mapping[tuple[int, int], int], number: int = 0) -> None:
        self.attention, self.rank = attention, attention.ring.rank
        self.sizes, self.number = sizes, number
        self.outgoing = {peer: _guarded(x) for peer, x in self._contents(0).items()}
        self.incoming = {peer: _guarded(torch.zeros_like(x)) for peer, x in self._contents(1).items()}

    def _contents(self, end: int) -> dict[int, Tensor]:
        """The bytes of the messages that this rank sends (``end`` 0) or receives (1), by peer."""
        global_ranks = self.attention.ring.ranks
        return {
            ranks[1 - end]: _content(global_ranks[ranks[0]], global_ranks[ranks[1]], self.number, size)
            for ranks, size in self.sizes.items()
            if ranks[end] == self.rank
        }

    def post(self, tag: int) -> Transfer:
        outgoing, incoming = (
            {peer: x[_GUARD:-_GUARD] for peer, x in buffers.items()} for buffers in (self.outgoing, self.incoming)
        )
        transfer: Transfer = self.attention.ring_pass(outgoing, incoming, tag)
        return transfer

    def exchange(self, tag: int) -> None:
        """Post the hop and wait for it."""
        self.post(tag).wait(_PATIENCE)

    def check(self) -> None:
        """Check that the messages have arrived, and that nothing else was written to."""
        for end, buffers in enumerate((self.outgoing, self.incoming)):
            for peer, content in self._contents(end).items():
                wrong = (buffers[peer] != _guarded(content)).nonzero().flatten() - _GUARD
                what = f"hop {self.number}, {'from' if end else 'to'} rank {peer}: of {len(content)} bytes, "
                assert not len(wrong), what + f"{len(wrong)} are wrong, from number {int(wrong[0])} on"


def _all_to_all(sizes: tuple[int, ...], ring_size: int) -> dict[tuple[int, int], int]:
    """Every rank sends ``sizes[0]`` bytes to the next rank, ``sizes[1]`` bytes to the one after it, and so on."""
    ranks = range(ring_size)
    return {(rank, (rank + 1 + step) % ring_size): sizes[step] for rank in ranks for step in range(ring_size - 1)}


def _is_over(work: Any, seconds: float) -> bool:
    """Whether the work is over within some seconds."""
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(work.is_completed())


class MessageTests(AdapterSuite):
    def new_attention(self, rings: RingSpec = FOUR) -> Any:
        """On a rank: a module on a new ring."""
        return new_attention(self.adapter, self.new_ring(rings), SMALL_CASE)

    @pytest.mark.parametrize("rings", [FOUR, TWO, BY_HOSTS], ids=str)
    @on_every_rank
    def test_every_byte_of_a_message_arrives(self, rings: RingSpec) -> None:
        """Four hops are in flight. Two have messages of equal sizes, and one has only one message."""
        ring = self.ring(rings)
        attention = new_attention(self.adapter, ring, SMALL_CASE)
        long = _all_to_all((LONG if rings == FOUR else 5000, 1, 65536), ring.size)
        short = _all_to_all((70001, 17, 1), ring.size)
        all_sizes = [long, short, short, {(0, 1): 1000}]
        hops = [Hop(attention, sizes, number) for number, sizes in enumerate(all_sizes)]
        transfers = [hop.post(TAG + hop.number) for hop in hops if hop.outgoing or hop.incoming]
        for transfer in transfers:
            transfer.wait(_PATIENCE)
        for hop in hops:
            hop.check()

    @on_every_rank
    def test_a_message_waits_for_a_late_rank(self) -> None:
        """The receiver of one message and the sender of another post after the other two ranks.

        The rank that sends early writes to its buffer after its wait.
        """
        attention = self.new_attention()
        hop = Hop(attention, {(0, 1): LONG, (3, 2): LONG})
        is_late, is_posted = hop.rank in (1, 3), True
        dist.barrier()
        if is_late:
            others_have_posted = dist.barrier(async_op=True)
            is_posted = _is_over(others_have_posted, 20)
            time.sleep(0.2)  # in which a wait that ends too early ends
        transfer = hop.post(TAG)
        if not is_late:
            dist.barrier()
        transfer.wait(_PATIENCE)
        if hop.rank == 0:
            hop.outgoing[1].zero_()
        else:
            hop.check()
        assert is_posted, "ring_pass on ranks 0 and 2 waits until ranks 1 and 3 post the hop"

    @on_every_rank
    def test_a_wait_ends_at_its_timeout(self) -> None:
        """Three messages arrive, each within the timeout after the one before. The hop takes longer.

        A busy machine may stop the receiver until all have arrived. It therefore has three tries.
        """
        attention, has_raised = self.new_attention(), torch.zeros(1)
        for number in range(3):
            hop = Hop(attention, {(sender, 0): 1000 for sender in (1, 2, 3)}, number)
            dist.barrier()
            if hop.rank == 0:
                ended = ending(hop.post(TAG + number).wait, timedelta(seconds=0.5))
                has_raised.fill_(ended.error != "no error")
                dist.broadcast(has_raised, 0)
            else:
                receiver_has_ended = dist.broadcast(has_raised, 0, async_op=True)
                if not _is_over(receiver_has_ended, 0.35 * hop.rank):
                    ending(hop.exchange, TAG + number)  # fails if the receiver has just ended
                receiver_has_ended.wait()
            if has_raised:
                return
        raise AssertionError("a wait of 0.5 s raises nothing, although the last message is sent after 1 s")

    @on_every_rank
    def test_a_message_of_another_hop_is_not_delivered(self) -> None:
        """Rank 0 receives no message of its tag, and rank 2 none of its ring."""
        attention, other = self.new_attention(), self.new_attention()
        hop = Hop(other if attention.ring.rank == 3 else attention, {(1, 0): 1000, (3, 2): 1000})
        transfer = hop.post(TAG - 2**30 if hop.rank == 1 else TAG)
        dist.barrier()
        ended = ending(transfer.wait, timedelta(seconds=0.2))
        dist.barrier()
        assert hop.rank in (1, 3) or ended.error != "no error", "the message of another hop was delivered"
