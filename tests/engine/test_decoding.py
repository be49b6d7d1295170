"""Decoding against a cache that is distributed over a ring equals the last rows of a causal call."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from native_ranks import ADAPTER as NATIVE
from native_ranks import native_ring, on_ring
from torch import Tensor

from ring_backends import DilatedPattern, Ring, RingMismatchError, available_adapters
from ring_backends.adapters import native
from ring_backends.engine.cache import horizon
from ring_backends.engine.decoding import groups
from ring_backends.kernels.math import MathKernel
from ring_backends.testing.calls import expected, new_attention
from ring_backends.testing.failing_calls import A_MOMENT, SHORT, ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.reference import reference_attention, reference_counts
from ring_backends.testing.rings import FOUR, LAYOUTS, THREE, TWO, RingSpec, new_ring
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World, on_every_rank


def assert_equal(got: Any, wanted: Any, what: object = "") -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}")


@cache
def draw_cases(of_seed: int, number: int = 20, max_n: int = 60) -> list[AttentionCase]:
    """Random causal calls. In every tenth, all scores are 0."""
    options: Any = {"paddings": ["masked"], "causal": [True], "documents": [None], "dropout_ps": [0.0]}
    options["ulysses_sizes"] = [12]  # steps do not depend on it, but the prefill does
    found: list[AttentionCase] = []

    @seed(of_seed)
    @settings(max_examples=3 * number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(attention_cases(dtypes=[torch.float64], max_n=max_n, **options))
    def collect(case: AttentionCase) -> None:
        found.append(case)

    collect()
    return [case if i % 10 else replace(case, scale=0.0) for i, case in enumerate(found[:number])]


def check_cases(ring: Ring | None, adapter: str, cases: list[AttentionCase]) -> None:
    for case in cases:
        check(case, new_attention(adapter, ring, case))


def check(case: AttentionCase, module: Any) -> None:
    """Decode the sequence of a case in random steps after a prompt of random length."""
    ring, random_ = module.ring, random.Random(case.seed)
    prompt = random_.choice([0, random_.randint(0, case.seq_len)])
    *tensors, _, mask = case.tensors()
    right = expected(case, gradients=False)
    cache = module.new_cache(random_.choice([None, case.seq_len]))
    scores = {"sinks": case.sink_scores(), "score_mod": case.score_function()}
    if prompt:
        *rows, ignored = (None if x is None else ring.shard(x[:, :prompt]) for x in (*tensors, mask))
        out = module.prefill(*rows, cache, seq_len=prompt, key_padding_mask=ignored, **scores)
        assert_equal(out, ring.shard(right.out[:, :prompt]), case)
    start = prompt
    while start < case.seq_len:
        new = slice(start, start + random_.choice([1, 1, 1, random_.randint(2, 9), random_.randint(9, 30)]))
        *rows, ignored = (None if x is None else x[:, new] for x in (*tensors, mask))
        found = module.decode(*rows, cache, key_padding_mask=ignored, return_lse=True, **scores)
        assert_equal(found, (right.out[:, new], right.lse[:, :, new]), case)
        start += found[0].shape[1]
    assert cache.seq_len == case.seq_len
    assert cache.num_rows <= -(-prompt // ring.size) + -(-(case.seq_len - prompt) // ring.size) + 1


@pytest.mark.parametrize("of_seed", matrix_but(0, of=range(3)))
def test_one_device(of_seed: int) -> None:
    check_cases(None, NATIVE, draw_cases(of_seed))


RINGS = [(NATIVE, *ring, 500 + 20 * i) for i, ring in enumerate(itertools.product((TWO, THREE, FOUR), LAYOUTS))]
CASES = [*(pytest.param(*case, marks=MORE_CASES) for case in RINGS[:-1]), RINGS[-1]]


@pytest.mark.parametrize(
    ("adapter", "spec", "layout", "first"),
    [*CASES, pytest.param("ring_backends.adapters.fsdp", FOUR, "zigzag", 620, marks=MORE_CASES)],
    ids=str,
)
def test_rings(world: World, adapter: str, spec: RingSpec, layout: str, first: int) -> None:
    if reason := available_adapters()[adapter.rpartition(".")[2]]:
        pytest.skip(reason)
    world.run(on_ring, check_cases, adapter, draw_cases(first), layout=layout, rings=spec, adapter=adapter)


PATTERN = {"segment_lengths": [6, 32], "dilation_rates": [1, 3]}
B, H, HK, D = 2, 4, 2, 3


def tokens(number: int, seed: int = 0, batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (H, HK, HK)
    return [torch.randn(batch, number, h, D, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def last_rows(sequence: list[Tensor], number: int, pattern: Any = PATTERN, mask: Tensor | None = None) -> Tensor:
    return reference_attention(*sequence, **pattern, is_causal=True, key_padding_mask=mask)[0][:, -number:]


def check_step(module: Any, cache: Any, new: list[Tensor], *before: list[Tensor], tolerance: float = 1e-10) -> None:
    """Decode tokens after those ``before``, and compare them with the last rows of a causal call."""
    out = module.decode(*new, cache)
    sequence = [torch.cat(tensors, 1) for tensors in zip(*before, new, strict=True)]
    wanted = last_rows(sequence, new[0].shape[1], asdict(module.pattern))
    assert out.dtype == new[0].dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)


def first(number: int, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor[:, :number] for tensor in tensors]


def attending(ring: Ring | None = None, pattern: Any = PATTERN, **options: Any) -> tuple[Any, Any]:
    """A module and a cache for it."""
    module = native.RingDilatedAttention(**pattern, ring=ring)
    return module, module.new_cache(**options)


def row_bytes(rows: int) -> int:
    """The bytes of keys and values of this number of rows."""
    return 2 * rows * B * HK * D * 8


def check_edits(ring: Ring) -> None:
    """Truncate a cache, copy it, and reorder its batch."""
    module, cache = attending(ring)
    prompt, draft, new = tokens(9, 1), tokens(5, 2), tokens(4, 3)
    module.prefill(*(ring.shard(tensor) for tensor in prompt), cache, seq_len=9)
    module.decode(*draft, cache)
    copied = copy.deepcopy(cache)
    cache.truncate(11)  # two of the new tokens stay
    check_step(module, cache, new, prompt, first(2, draft))
    cache.truncate(4)  # a part of the prompt
    check_step(module, cache, new, first(4, prompt))
    order = torch.tensor([1, 1, 0])
    copied.select_batch(order)
    check_step(module, copied, *([tensor[order] for tensor in tensors] for tensors in (new, prompt, draft)))


def test_truncate_copy_and_reorder(pair: World) -> None:
    check_edits(Ring())
    pair.run(on_ring, check_edits)


WINDOW = 16
WINDOWS = [
    {"segment_lengths": [None], "dilation_rates": [1], "window_lengths": [WINDOW]},
    {"segment_lengths": [None, 14], "dilation_rates": [3, 2], "window_lengths": [WINDOW, None], "offset": "every"},
    {"segment_lengths": [None, 300], "dilation_rates": [1, 2], "window_lengths": [8, WINDOW - 1]},
    {"segment_lengths": [7, WINDOW], "dilation_rates": [1, 2]},
]


def check_memory(ring: Ring, patterns: Any) -> None:
    """Decode 20 windows. At most one is held, in at most twice its memory.

    Each rank holds its share of the new tokens, and before that its rows of the prompt.
    """
    prompt, new, share = 40, 20 * WINDOW, -(-WINDOW // ring.size)
    sequence = tokens(prompt + new)
    mask = torch.rand(B, prompt + new, generator=torch.Generator().manual_seed(1)) < 0.2
    for index, pattern in enumerate(patterns):
        max_len = 10_000 if index % 2 else None
        module, cache = attending(ring, pattern, max_len=max_len)
        local = [ring.shard(tensor[:, :prompt]) for tensor in sequence]
        module.prefill(*local, cache, seq_len=prompt, key_padding_mask=ring.shard(mask[:, :prompt]))
        assert cache.num_rows <= min(WINDOW, local[0].shape[1])
        most, reserved, outs = cache.num_rows, cache.nbytes, []
        assert max_len is None or reserved <= row_bytes(2 * (most + share))
        for position in range(prompt, prompt + new):
            *step, ignored = (x[:, position : position + 1] for x in (*sequence, mask))
            outs.append(module.decode(*step, cache, key_padding_mask=ignored))
            most = max(most, cache.num_rows)
            assert cache.nbytes == reserved if max_len else cache.nbytes <= row_bytes(2 * most)
            assert most <= WINDOW
        assert cache.num_rows <= share
        assert_equal(torch.cat(outs, 1), last_rows(sequence, new, pattern, mask), pattern)


@THOROUGH
def test_memory_is_bounded(world: World) -> None:
    check_memory(Ring(), WINDOWS)
    world.run(on_ring, check_memory, WINDOWS[:1], layout="zigzag", rings=THREE)


@pytest.mark.parametrize("index", range(40))
def test_what_is_forgotten(index: int) -> None:
    """The first position that the query at t or any later one sees, from the definition; exact without dilation."""
    pattern = {**draw_cases(7, 40, 24)[index].pattern_options(), "head_mode": "all"}
    rates = pattern["dilation_rates"]
    if index % 2:
        pattern["dilation_rates"] = rates = (1,) * len(rates)
    found = [horizon(DilatedPattern(**pattern), t) for t in range(50)]
    del pattern["padding"]
    sees = reference_counts(150, 6, **pattern, is_causal=True).any(0)
    for t in range(50):  # all later segments begin and end below 150
        first = int(sees[t:].any(0).nonzero()[0])
        assert found[t] <= first
        assert found[t] == first or max(rates) > 1


def calls_of_a_chunk(ring: Ring, chunk: int) -> int:
    """How often a step calls the kernel, after a prompt of a few windows."""
    module = native.RingDilatedAttention(**WINDOWS[0], ring=ring, kernel="math")
    cache, prompt, new = module.new_cache(), tokens(50, 1), tokens(chunk, 2)
    module.decode(*prompt, cache)
    with mock.patch.object(MathKernel, "forward", autospec=True, side_effect=MathKernel.forward) as forward:
        check_step(module, cache, new, prompt)
    return forward.call_count


def test_tokens_of_a_step_share_kernel_calls(world: World) -> None:
    for chunk in (60, 240, 250):
        assert calls_of_a_chunk(Ring(), chunk) <= 8
        assert max(filter(None, world.run(on_ring, calls_of_a_chunk, chunk, rings=THREE))) <= 12


def test_a_step_reads_no_keys_before_the_window() -> None:
    """Where another branch needs all tokens, the cache holds them."""
    pattern = DilatedPattern([None, None], [2, 1], window_lengths=[9, None], offset="every")
    found = [(group.begin, group.rows) for group in groups(pattern, 1, 100, 3)]
    assert found == [(92, range(0, 3, 2)), (93, range(1, 3, 2)), (0, range(3))]


def test_truncation_of_forgotten_tokens() -> None:
    pattern = {"segment_lengths": [None, 40], "dilation_rates": [1, 1], "window_lengths": [8, 3]}
    module, cache = attending(None, pattern)
    prompt, draft, new = tokens(90, 1), tokens(6, 2), tokens(4, 3)
    module.prefill(*prompt, cache)
    with pytest.raises(ValueError, match="seq_len = 89: the next token would see tokens before position 83, which the"):
        cache.truncate(89)
    module.decode(*draft, cache)
    for tokens_left in (3, 0):  # of the last step
        cache.truncate(90 + tokens_left)
        check_step(module, copy.copy(cache), new, prompt, first(tokens_left, draft))
    for seq_len in (1, 80, 89):
        with pytest.raises(ValueError, match="has forgotten; truncate to at least 90, or to 0 and begin again"):
            cache.truncate(seq_len)
    assert cache.seq_len == 90
    cache.truncate(0)
    module.prefill(*draft, cache)
    check_step(module, cache, new, draft)


def test_a_batch_that_is_selected_after_tokens_are_forgotten() -> None:
    pattern, order = WINDOWS[2], torch.tensor([1, 1, 0])
    module, cache = attending(None, pattern)
    sequence = tokens(150, 1)
    mask = torch.rand(B, 150, generator=torch.Generator().manual_seed(1)) < 0.5
    for start in range(0, 150, 10):
        if start == 120:
            cache.select_batch(order)
            sequence, mask = [tensor[order] for tensor in sequence], mask[order]
        *rows, ignored = (x[:, start : start + 10] for x in (*sequence, mask))
        out = module.decode(*rows, cache, key_padding_mask=ignored)
    assert_equal(out, last_rows(sequence, 10, pattern, mask))


@on_every_rank
@pytest.mark.parametrize("reorders", [False, True])
def test_ranks_without_rows(reorders: bool) -> None:
    """Inference mode, in which the batch may be reordered, ends when only rank 0 holds a row."""
    module, cache = attending(native_ring(rings=FOUR))
    order = [1, 0] if reorders else [0, 1]
    with torch.inference_mode():
        module.decode(*tokens(1, 1), cache)
        if reorders:
            cache.select_batch(torch.tensor(order))
    check_step(module, cache, tokens(1, 2), [tensor[order] for tensor in tokens(1, 1)])


INVALID: dict[str, Callable[[Any, Any], Any]] = {
    r"ValueError: cache has 4 tokens: prefill\(\) begins a sequence": lambda m, c: m.prefill(*tokens(4), c),
    "ValueError: seq_len = 4: the cache has max_len = 3": lambda m, c: m.prefill(*tokens(4), m.new_cache(max_len=3)),
    r"TypeError: query = \[1\]: expected a torch\.Tensor": lambda m, c: m.prefill([1], *tokens(4)[1:], m.new_cache()),
    "ValueError: query has no tokens": lambda m, c: m.decode(*tokens(0), c),
    "ValueError: key has batch = 3, but the cache has 2": lambda m, c: m.decode(*tokens(1, batch=3), c),
    "ValueError: key has dtype = torch.float32, but the cache has torch.float64": (
        lambda m, c: m.decode(*tokens(1, dtype=torch.float32), c)
    ),
    "ValueError: key has key/value heads = 4, but the cache has 2": lambda m, c: m.decode(*[tokens(1)[0]] * 3, c),
    r"ValueError: dropout_p = 0.1: decoding has no dropout; call eval\(\)": (
        lambda m, c: native.RingDilatedAttention(**PATTERN, dropout_p=0.1, ring=m.ring).decode(*tokens(1), c)
    ),
    r"ValueError: cache was made for .*window_lengths=\(16,\)\), and this module has Dilated": (
        lambda m, c: m.decode(*tokens(1), attending(m.ring, WINDOWS[0])[1])
    ),
    "ValueError: cache holds the keys of module 0, and this is module 0, copy 1": (
        lambda m, c: copy.deepcopy(m).decode(*tokens(1), c)
    ),
    "TypeError: cache = list": lambda m, c: m.decode(*tokens(1), []),
    "ValueError: seq_len = 5: the cache has 4 tokens": lambda m, c: c.truncate(5),
    "ValueError: indices = .*2.*: expected at least one number from 0 to 1": (
        lambda m, c: c.select_batch(torch.tensor([2]))
    ),
    r"TypeError: indices = \[0\]: expected a tensor": lambda m, c: c.select_batch([0]),
    "ValueError: cache has seq_len = 0: there is no batch yet": lambda m, c: m.new_cache().select_batch(
        torch.arange(1)
    ),
    "ValueError: max_len = 0": lambda m, c: m.new_cache(max_len=0),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_arguments(message: str) -> None:
    module, cache = attending()
    module.prefill(*tokens(4), cache)
    with pytest.raises((TypeError, ValueError)) as raised:
        INVALID[message](module, cache)
    assert re.match(message, f"{raised.typename}: {raised.value}")


def after_steps(number: int) -> tuple[Any, Any]:
    """A module on a new ring of two, and its cache after a prompt and this number of steps."""
    ring = new_ring(NATIVE, TWO, SHORT)
    module, cache = attending(ring)
    module.prefill(*(ring.shard(tensor) for tensor in tokens(8)), cache, seq_len=8)
    for step in range(number):
        module.decode(*tokens(1, step), cache)
    return module, cache


DIFFERENCES = {
    "tokens": "the ranks differ in the new tokens: the key of token 0 in batch entry 0",
    "length": "the ranks differ in the length of the cache (rank 0: 9, rank 1: 8)",
    "edits": "the ranks differ in the calls of truncate() and select_batch()",
    "number": "new tokens (rank 0: 1, rank 1: 2)",
    "cache": "cache was made for a contiguous ring of 1, but this module is on a contiguous ring of 2",
}


@pytest.mark.parametrize("what", matrix_but("tokens", "cache", of=DIFFERENCES))
@on_every_rank
def test_ranks_that_differ(what: str) -> None:
    """Rank 1 of a ring of two decodes something else than rank 0."""
    module, cache = after_steps(1)
    if what == "edits":
        cache.select_batch(torch.tensor([0, 1]).roll(module.ring.rank))
    changed = what if module.ring.rank == 1 else ""
    if changed == "length":
        cache.truncate(8)
    if changed == "cache":
        cache.ring = Ring()
    ended = ending(module.decode, *tokens(2 if changed == "number" else 1, 5 if changed == "tokens" else 2), cache)
    ended.check(ValueError if changed == "cache" else RingMismatchError, DIFFERENCES[what], within=SHORT + A_MOMENT)
