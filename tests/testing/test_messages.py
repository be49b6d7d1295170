"""The harness notices a transport that damages long messages.

``tests/mutants/adapter_mutants.toml`` has many more faults that it notices.
"""

from __future__ import annotations

import pytest

from ring_backends.testing.messages import LONG, MessageTests
from ring_backends.testing.rings import FOUR
from ring_backends.testing.world import RanksFailedError, World


class Damaging(MessageTests):
    adapter = "damaging_adapter"


def test_damage_after_the_first_mebibyte_is_noticed(world: World) -> None:
    with pytest.raises(RanksFailedError, match=f"from number {2**20} on") as raised:
        Damaging().test_every_byte_of_a_message_arrives(world=world, rings=FOUR)
    for rank, outcome in enumerate(raised.value.outcomes):
        assert f"from rank {(rank - 1) % 4}: of {LONG} bytes" in str(outcome)
