"""Decoding against a cache that is distributed over a ring equals the last rows of a causal call."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends import Ring, RingPeerError, available_adapters
from ring_backends.adapters import native
from ring_backends.engine.cache import Run
from ring_backends.testing.failing_calls import A_MOMENT, SHORT, Ended, ending
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import FOUR, THREE, TWO, RingSpec, backend, new_ring, ring_here, ring_of
from ring_backends.testing.world import RanksFailedError, World

NATIVE = "ring_backends.adapters.native"


@dataclass(frozen=True)
class Case:
    """A random pattern, and a sequence that is decoded in random steps after a prompt of ``prompt`` tokens."""

    pattern: dict[str, Any]
    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    prompt: int
    steps: tuple[int, ...]
    max_len: int | None

    @classmethod
    def random(cls, seed: int) -> Case:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        branches = draw.randint(1, 3)
        kv_heads = draw.randint(1, 3)
        heads, head_dim = kv_heads * draw.randint(1, 3), draw.randint(1, 5)
        pattern = {
            "segment_lengths": [draw.randint(1, 24) for _ in range(branches)],
            "dilation_rates": [draw.randint(1, 6) for _ in range(branches)],
            "head_mode": draw.choice(["all", "grouped"]) if heads >= branches else "all",
            "offset": draw.choice([None, "mod", "block", "branch"]),
            "scale": draw.choice([None, None, 0.7, -0.3, 0.0]),
        }
        batch, prompt = draw.randint(1, 3), draw.choice([0, draw.randint(1, 30)])
        steps = tuple(draw.choice([1, 1, 1, draw.randint(2, 9)]) for _ in range(draw.randint(1, 9)))
        total = prompt + sum(steps)

        def normal(heads: int) -> Tensor:
            return torch.randn(batch, total, heads, head_dim, generator=generator, dtype=torch.float64)

        mask = torch.zeros(batch, total, dtype=torch.bool)
        for row in mask:  # padding on the left or on the right of the prompt, or anywhere
            first, last = sorted(draw.randint(0, prompt) for _ in range(2))
            row[slice(first) if draw.random() < 0.5 else slice(last, prompt)] = True
        if draw.random() < 0.3:
            mask |= torch.rand(batch, total, generator=generator) < 0.2
        tensors = normal(heads), normal(kv_heads), normal(kv_heads)
        has_mask, max_len = draw.random() < 0.5, draw.choice([None, total])
        return cls(pattern, tensors, mask if has_mask else None, prompt, steps, max_len)

    def expected(self) -> tuple[Tensor, Tensor]:
        """out and LSE of the dense reference."""
        return reference_attention(*self.tensors, **self.pattern, is_causal=True, key_padding_mask=self.mask)

    def decoded(self, module: Any) -> tuple[Tensor, Tensor]:
        """The out and LSE of the tokens after the prompt."""
        ring = module.ring
        cache = module.new_cache(self.max_len)
        if self.prompt:
            local = [ring.shard(tensor[:, : self.prompt]) for tensor in self.tensors]
            mask = None if self.mask is None else ring.shard(self.mask[:, : self.prompt])
            out = module.prefill(*local, cache, seq_len=self.prompt, key_padding_mask=mask)
            wanted = ring.shard(self.expected()[0][:, : self.prompt])
            assert_equal(out, wanted)
        outs, lses, start = [], [], self.prompt
        for step in self.steps:
            tensors = [tensor[:, start : start + step] for tensor in self.tensors]
            mask = None if self.mask is None else self.mask[:, start : start + step]
            out, lse = module.decode(*tensors, cache, key_padding_mask=mask, return_lse=True)
            outs.append(out)
            lses.append(lse)
            start += step
        assert cache.seq_len == start
        assert cache.num_rows <= -(-self.prompt // ring.size) + -(-sum(self.steps) // ring.size) + 1
        return torch.cat(outs, 1), torch.cat(lses, 2)


def assert_equal(got: Any, wanted: Any, what: object = "") -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}")


def check(seed: int, module_of: Any) -> None:
    case = Case.random(seed)
    out, lse = case.expected()
    assert_equal(case.decoded(module_of(case.pattern)), (out[:, case.prompt :], lse[:, :, case.prompt :]), seed)


@pytest.mark.parametrize("begin", range(0, 60, 20))
def test_one_device(begin: int) -> None:
    for seed in range(begin, begin + 20):
        check(seed, lambda pattern: native.RingDilatedAttention(**pattern))


def check_here(adapter: str, spec: RingSpec, layout: Any, seeds: range) -> None:
    ring = ring_here(adapter, spec)
    if ring is None:
        return
    ring = ring.with_layout(layout)
    for seed in seeds:
        check(seed, lambda pattern: backend(adapter).RingDilatedAttention(**pattern, ring=ring))


ANOTHER_RING = pytest.mark.matrix(reason="another ring")


@pytest.mark.parametrize(
    ("adapter", "spec", "layout", "first"),
    [
        pytest.param(NATIVE, TWO, "contiguous", 100, marks=ANOTHER_RING),
        pytest.param(NATIVE, TWO, "zigzag", 120, marks=ANOTHER_RING),
        (NATIVE, THREE, "contiguous", 140),
        pytest.param(NATIVE, THREE, "zigzag", 160, marks=ANOTHER_RING),
        pytest.param(NATIVE, FOUR, "contiguous", 180, marks=ANOTHER_RING),
        (NATIVE, FOUR, "zigzag", 200),
        ("ring_backends.adapters.fsdp", FOUR, "zigzag", 220),
    ],
    ids=str,
)
def test_rings(world: World, adapter: str, spec: RingSpec, layout: str, first: int) -> None:
    if reason := available_adapters()[adapter.rpartition(".")[2]]:
        pytest.skip(reason)
    world.run(check_here, adapter, spec, layout, range(first, first + 20))


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_the_rows_of_a_run(stride: int) -> None:
    run = Run(start=5, stride=stride, count=7, first=2)
    positions = [5 + stride * k for k in range(7)]
    for begin in range(12):
        for end in range(begin, 40):
            for rate in range(1, 7):
                wanted = [2 + k for k, u in enumerate(positions) if begin <= u < end and (u - begin) % rate == 0]
                assert [*range(40)][run.rows(begin, end, rate)] == wanted


PATTERN = {"segment_lengths": [6, 32], "dilation_rates": [1, 3]}
B, H, HK, D = 2, 4, 2, 3


def tokens(number: int, seed: int = 0, batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (H, HK, HK)
    return [torch.randn(batch, number, h, D, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def joined(*parts: list[Tensor]) -> list[Tensor]:
    return [torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)]


def last_rows(sequence: list[Tensor], number: int) -> Tensor:
    return reference_attention(*sequence, **PATTERN, is_causal=True)[0][:, -number:]


def attending(ring: Ring | None = None, **options: Any) -> tuple[Any, Any]:
    """A module and a cache for it."""
    module = native.RingDilatedAttention(**PATTERN, ring=ring)
    return module, module.new_cache(**options)


def edit_here() -> None:
    check_edits(ring_of(NATIVE, TWO))


def check_edits(ring: Ring) -> None:
    """Truncate a cache, copy it, and reorder its batch."""
    module, cache = attending(ring)
    prompt, first, second, third = tokens(9, 1), tokens(5, 2), tokens(4, 3), tokens(2, 4)
    module.prefill(*(ring.shard(tensor) for tensor in prompt), cache, seq_len=9)
    module.decode(*first, cache)
    copied = copy.deepcopy(cache)

    cache.truncate(11)  # two of the new tokens stay
    kept = joined(prompt, [tensor[:, :2] for tensor in first])
    out = module.decode(*second, cache)
    assert_equal(out, last_rows(joined(kept, second), 4))

    cache.truncate(4)  # a part of the prompt
    out = module.decode(*third, cache)
    wanted = last_rows(joined([tensor[:, :4] for tensor in prompt], third), 2)
    assert_equal(out, wanted)

    order = torch.tensor([1, 1, 0])
    copied.select_batch(order)
    third = [tensor[order] for tensor in third]
    out = module.decode(*third, copied)
    whole = joined([tensor[order] for tensor in joined(prompt, first)], third)
    assert_equal(out, last_rows(whole, 2))


def test_truncate_copy_and_reorder(pair: World) -> None:
    check_edits(Ring())
    pair.run(edit_here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    module, cache = attending()
    prompt, new = tokens(20, 1, dtype=dtype), tokens(3, 2, dtype=dtype)
    module.prefill(*prompt, cache)
    out = module.decode(*new, cache)
    assert out.dtype == dtype
    wanted = last_rows(joined(prompt, new), 3)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)


def test_a_nan_in_an_ignored_key() -> None:
    module, cache = attending()
    prompt, new = tokens(10, 1), tokens(1, 2)
    ignored = torch.zeros(B, 10, dtype=torch.bool)
    ignored[:, 7] = True
    prompt[1][:, 7] = prompt[2][:, 7] = torch.nan
    module.prefill(*prompt, cache, key_padding_mask=ignored)
    assert module.decode(*new, cache).isfinite().all()


def test_memory_does_not_exceed_max_len() -> None:
    module, cache = attending(max_len=100)
    module.prefill(*tokens(10), cache)
    reserved = cache.nbytes
    for step in range(90):
        module.decode(*tokens(1, step), cache)
    assert cache.nbytes == reserved == 2 * 101 * B * HK * D * 8
    with pytest.raises(ValueError, match="query has 1 tokens, and the cache 100 of max_len = 100"):
        module.decode(*tokens(1), cache)


def test_a_module_does_not_take_the_cache_of_another() -> None:
    module, cache = attending()
    module.decode(*tokens(1), cache)
    other = copy.deepcopy(module)
    with pytest.raises(ValueError, match="cache holds the keys of module 0, and this is module 0, copy 1"):
        other.decode(*tokens(1), cache)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (tokens(3, batch=1), "key has batch = 1, and the cache 2"),
        (tokens(3, dtype=torch.float32), r"key has dtype = torch\.float32"),
    ],
)
def test_a_prompt_after_truncation_fits_the_memory(prompt: list[Tensor], message: str) -> None:
    module, cache = attending()
    module.decode(*tokens(4), cache)
    cache.truncate(0)
    with pytest.raises(ValueError, match=message):
        module.prefill(*prompt, cache)
    assert cache.seq_len == 0
    module.prefill(*tokens(6, 1), cache)
    out = module.decode(*tokens(1, 2), cache)
    assert_equal(out, last_rows(joined(tokens(6, 1), tokens(1, 2)), 1))


def early_here() -> None:
    """A batch is reordered, and inference mode ends, when rank 1 holds no row yet."""
    module, cache = attending(ring_of(NATIVE, TWO))
    first, second = tokens(1, 1), tokens(1, 2)
    with torch.inference_mode():
        module.decode(*first, cache)
    cache.select_batch(torch.tensor([1, 0]))
    out = module.decode(*second, cache)
    whole = joined([tensor[[1, 0]] for tensor in first], second)
    assert_equal(out, last_rows(whole, 1))


def test_ranks_without_rows(pair: World) -> None:
    pair.run(early_here)


def test_invalid_arguments() -> None:
    module = native.RingDilatedAttention(**PATTERN, dropout_p=0.1)
    cache = module.new_cache()
    with pytest.raises(ValueError, match=r"dropout_p = 0.1: decoding has no dropout; call eval\(\)"):
        module.decode(*tokens(1), cache)
    module.eval()
    module.prefill(*tokens(4), cache)
    with pytest.raises(ValueError, match=r"cache has 4 tokens: prefill\(\) begins a sequence"):
        module.prefill(*tokens(4), cache)
    with pytest.raises(ValueError, match="key has batch = 3, and the cache 2"):
        module.decode(*tokens(1, batch=3), cache)
    with pytest.raises(ValueError, match=r"key has dtype = torch.float32, and the cache torch.float64"):
        module.decode(*tokens(1, dtype=torch.float32), cache)
    query, key, value = tokens(1)
    with pytest.raises(ValueError, match="key has key/value heads = 4, and the cache 2"):
        module.decode(query, key.repeat(1, 1, 2, 1), value.repeat(1, 1, 2, 1), cache)
    with pytest.raises(ValueError, match="query has no tokens"):
        module.decode(*tokens(0), cache)
    with pytest.raises(ValueError, match="cache is of a contiguous ring of 1, and the module on a"):
        module.decode(*tokens(1), native.RingDilatedAttention(**PATTERN, ring=Ring()).new_cache())
    with pytest.raises(TypeError, match="cache = list"):
        module.decode(*tokens(1), [])
    with pytest.raises(ValueError, match="seq_len = 5: the cache has 4 tokens"):
        cache.truncate(5)
    with pytest.raises(ValueError, match=r"indices = .*2.*: expected at least one number from 0 to 1"):
        cache.select_batch(torch.tensor([2]))
    with pytest.raises(ValueError, match="seq_len = 4: the cache has max_len = 3"):
        module.prefill(*tokens(4), module.new_cache(max_len=3))
    with pytest.raises(TypeError, match=r"indices = \[0\]: expected a tensor"):
        cache.select_batch([0])
    with pytest.raises(TypeError, match=r"query = \[1\]: expected a torch\.Tensor"):
        module.prefill([1], *tokens(4)[1:], module.new_cache(max_len=3))
    with pytest.raises(ValueError, match="cache has seq_len = 0: there is no batch yet"):
        module.new_cache().select_batch(torch.tensor([0]))
    with pytest.raises(ValueError, match="max_len = 0"):
        module.new_cache(max_len=0)


def after_steps(number: int) -> tuple[Any, Any]:
    """A module on a new ring of two, and its cache after a prompt and this number of steps."""
    ring = new_ring(NATIVE, TWO, timeout=timedelta(seconds=SHORT))
    module, cache = attending(ring)
    module.prefill(*(ring.shard(tensor) for tensor in tokens(8)), cache, seq_len=8)
    for step in range(number):
        module.decode(*tokens(1, step), cache)
    return module, cache


def unequal_here(what: str) -> Ended:
    """Rank 1 decodes something else than rank 0, on a new ring of two."""
    module, cache = after_steps(1)
    other = module.ring.rank == 1
    if what == "length" and other:
        cache.truncate(8)
    if what == "cache" and other:
        cache.ring = Ring()
    if what == "edits":
        cache.select_batch(torch.tensor([1, 0] if other else [0, 1]))
    step = tokens(2 if what == "number" and other else 1, 5 if what == "tokens" and other else 2)
    return ending(lambda: module.decode(*step, cache))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tokens", "the ranks differ in the new tokens: the key of token 0 in batch entry 0"),
        ("length", r"the ranks differ in the length of the cache \(rank 0: 9, rank 1: 8\)"),
        ("edits", r"the ranks differ in the calls of truncate\(\) and select_batch\(\)"),
        ("number", r"new tokens \(rank 0: 1, rank 1: 2\)"),
        ("cache", "cache is of a contiguous ring of 1, and the module on a contiguous ring of 2"),
    ],
)
def test_ranks_that_differ(pair: World, what: str, message: str) -> None:
    for ended in pair.run(unequal_here, what):
        assert re.search(message, ended.message), ended
        assert ended.error == "RingMismatchError" or (what == "cache" and ended.error == "ValueError")
        assert ended.seconds < SHORT + A_MOMENT


def killed_here() -> Ended:
    """Rank 1 kills itself in the midst of decoding."""
    module, cache = after_steps(3)
    if module.ring.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ending(lambda: module.decode(*tokens(1, 9), cache))


@pytest.mark.matrix(reason="waits for a timeout")
def test_a_killed_rank() -> None:
    with World(2) as ranks, pytest.raises(RanksFailedError) as raised:
        ranks.run(killed_here)
    survivor, killed = raised.value.outcomes
    assert killed.status == "died"
    assert survivor.status == "returned", survivor
    assert survivor.value.is_a(RingPeerError), survivor.value
    assert survivor.value.seconds < SHORT + A_MOMENT
