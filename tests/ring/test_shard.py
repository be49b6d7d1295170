"""``Ring.shard`` notices a tensor that it has sharded already."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch

from ring_backends.ring.ring import Ring


@pytest.fixture
def ring() -> Ring:
    """A ring of two, without connections. Sharding needs none."""
    return Ring(size=2, rank=1, ranks=(0, 1))


@pytest.mark.parametrize("dim", [1, -2])
def test_a_shard_is_not_sharded_again(ring: Ring, dim: int) -> None:
    local = ring.shard(torch.randn(1, 8, 3))
    with pytest.raises(ValueError, match=r"tensor is \[1, 4, 3\]: .* dim 1 already; pass the whole tensor") as raised:
        ring.shard(local, dim)
    assert "seq_len" in str(raised.value)
    with pytest.raises(ValueError, match="already"):
        ring.with_layout("zigzag").shard(local, dim)


def test_what_may_be_sharded_again(ring: Ring) -> None:
    whole = torch.nn.Parameter(torch.randn(1, 8, 8))
    local = ring.shard(whole)
    assert torch.equal(ring.shard(whole), local)  # the whole tensor, once more
    assert ring.shard(local, 2).shape == (1, 4, 4)
    assert Ring(size=2, rank=0, ranks=(2, 3)).shard(local).shape == (1, 2, 8)  # of another ring
    assert ring.shard(local.clone()).shape == (1, 2, 8)
    local.data = whole.data  # a buffer that is used again for whole rows
    assert ring.shard(local).shape == (1, 4, 8)
    assert ring.shard(ring.shard(torch.zeros(1, 0, 3))).shape == (1, 0, 3)
    alone = Ring()
    assert alone.shard(alone.shard(whole)) is whole


def test_a_shard_is_remembered_only_while_it_lives(ring: Ring) -> None:
    local = ring.shard(torch.randn(1, 8, 3))
    assert vars(local) == {}
    file = io.BytesIO()
    torch.save((local, ring), file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False)
    assert ring.shard(loaded).shape == (1, 2, 3)
    assert copied.shard(local).shape == (1, 2, 3)
    gone = weakref.ref(local)
    del local
    gc.collect()
    assert gone() is None
    assert len(ring.parts) == 0
