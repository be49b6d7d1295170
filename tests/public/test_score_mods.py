"""Functions of scores: those of the package against others' code, and what happens with invalid ones.

The random cases of all other tests contain them too.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import environment, output_of
from kernel_cases import CountOperators
from native_ranks import assert_near, on_ring
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ring_backends import DilatedPattern, Ring, RingMismatchError, dilated_attention, score_mods
from ring_backends.activation_checkpointing import remember_attention
from ring_backends.adapters import native
from ring_backends.engine.call import AttentionInputs, check_call
from ring_backends.engine.run import backward, forward
from ring_backends.kernels import score_mod
from ring_backends.kernels.score_mod import captured_values, check_score_mod, identity
from ring_backends.testing.failing_calls import AT_ONCE, Ended, ending
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.world import World

HEADS, LENGTH = 4, 40


def make(length: int = LENGTH, batch: int = 2) -> list[Tensor]:
    """query, key, value and the gradient of out."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(batch, length, HEADS, 8, generator=generator, dtype=torch.float64) for _ in range(4)]


def attend(score_mod: Any, rows: Any = None, **options: Any) -> Any:
    """The output for these queries, keys and values, or those of :func:`make`."""
    return dilated_attention(*(rows or make()[:3]), [None], [1], score_mod=score_mod, **options)


def attend_with_gradients(score_mod: Any) -> list[Tensor]:
    *rows, grad = make()
    out = attend(score_mod, [x.requires_grad_() for x in rows])
    return [out.detach(), *torch.autograd.grad(out, rows, grad)]


COORDS, SLOPES = torch.rand(2, LENGTH, 2).double(), torch.rand(HEADS).double()
TABLE = torch.randn(12, HEADS).double()


def by_vectors(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """It reads vectors, and an index is a number."""
    gap = COORDS[batch, q_idx] - COORDS[batch, kv_idx]
    return score - gap.square().sum().sqrt() * SLOPES[head] + TABLE[q_idx % 12, 2] * TABLE[3, head]


FUNCTIONS = {
    "softcap": score_mods.softcap(2.0),
    "alibi": score_mods.alibi(HEADS),
    "distance": score_mods.distance(COORDS, SLOPES),
    "relative": score_mods.relative(TABLE, max_distance=9),
    "vectors": by_vectors,
    "constant": lambda score, batch, head, q_idx, kv_idx: SLOPES[head] * (q_idx < kv_idx),
    "within another": lambda score, *pair: torch.where(pair[3] < 4, score, score_mods.softcap(1.0)(score, *pair)),
    "partial": functools.partial(lambda cap, score, *pair: torch.tanh(score) * cap, 2.0),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", matrix_but("alibi", of=FUNCTIONS))
def test_equals_flex_attention(name: str) -> None:
    query, key, value, grad_out = make()
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    wanted = flex_attention(*heads_first, score_mod=FUNCTIONS[name]).transpose(1, 2)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attend(FUNCTIONS[name], leaves)
    assert_near(out, wanted, 1e-12)
    # flex_attention has no backward on the CPU. This is the derivative of what it computes.
    scores = torch.einsum("bthd,buhd->bhtu", *leaves[:2]) * 8**-0.5
    indices = torch.cartesian_prod(*map(torch.arange, scores.shape)).unbind(1)
    modified = torch.stack([FUNCTIONS[name](*pair) for pair in zip(scores.flatten(), *indices, strict=True)])
    dense = torch.einsum("bhtu,buhd->bthd", modified.view_as(scores).softmax(3), leaves[2])
    options = {"allow_unused": True, "materialize_grads": True}
    assert_near(*(torch.autograd.grad(x, leaves, grad_out, **options) for x in (out, dense)), 1e-11)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (12, 9), (4, 1000)])
def test_relative_has_the_buckets_of_t5(bidirectional: bool, buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    positions = torch.arange(-3000, 3001)
    options = {"bidirectional": bidirectional, "num_buckets": buckets, "max_distance": max_distance}
    wanted = t5.T5Attention._relative_position_bucket(positions, **options)
    table = torch.arange(buckets).double()[:, None]
    score_mod = score_mods.relative(table, bidirectional=bidirectional, max_distance=max_distance)
    zeros = torch.zeros(len(positions), dtype=torch.int64)
    assert torch.equal(score_mod(zeros.double(), zeros, zeros, zeros, positions), wanted.double())


@pytest.mark.parametrize("num_heads", [1, 2, 8, 12, 20, 32])
def test_alibi_has_the_slopes_of_bloom(num_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    wanted = bloom.build_alibi_tensor(torch.ones(1, 5), num_heads, torch.float32)[:, 0]  # slopes times key positions
    heads, zero = torch.arange(num_heads), torch.tensor(0)
    found = -score_mods.alibi(num_heads)(torch.tensor(0.0), zero, heads, zero, torch.tensor(4))
    torch.testing.assert_close(found, wanted[:, 4])


def test_no_tensor_has_all_pairs() -> None:
    """Between 2,000 and 4,000 tokens, the largest tensor does not grow: it has the pairs of one block."""
    sizes = []
    for length in (2000, 4000):
        query, key, value, grad_out = (x[:, :, :1].float() for x in make(length, 1))
        score_mod = score_mods.distance(torch.rand(1, length, 2), torch.ones(1))
        inputs = AttentionInputs(query, key, value, score_mod=score_mod)
        inputs, call = check_call(inputs, DilatedPattern([None], [1]), Ring(), None, "auto")
        with CountOperators() as launched:
            out, lse = forward(call, inputs, None)
            backward(call, inputs, out, lse, grad_out, None)
        sizes.append(max(shape.numel() for _, shape in launched.results))
    assert 700 * 700 < sizes[0] == sizes[1] < 2000 * 2000


MODULE = native.RingDilatedAttention([20, None], [1, 2])


def scaled_call(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return MODULE(query * 2, key, value, score_mod=FUNCTIONS["distance"])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing_keeps_no_pairs(policy: CheckpointPolicy) -> None:
    *rows, grad_out = (x.requires_grad_() for x in make())
    kept = []

    def remember(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept.append(str(op))
        return policy

    contexts = functools.partial(create_selective_checkpoint_contexts, remember)
    call = functools.partial(checkpoint, scaled_call, use_reentrant=False, context_fn=contexts)
    assert_near(*(torch.autograd.grad(call(*rows), rows, grad_out) for call in (scaled_call, call)), 0)
    assert any("mul" in op for op in kept)
    assert not any("bmm" in op for op in kept)


def test_minus_infinity_hides_a_pair() -> None:
    leaves = [x.requires_grad_() for x in make()[:3]]
    options = {"rows": leaves, "return_lse": True}
    out, lse = attend(lambda score, b, h, q, k: torch.where((k <= q) & (q > 4), score, -torch.inf), **options)
    torch.testing.assert_close(out[:, 5:], attend(None, is_causal=True)[:, 5:])
    assert (out[:, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :5] == 0).all()


@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
def test_nan_does_not_pass_a_hidden_pair(name: str) -> None:
    """Keys 0 … 19 and queries 20 … 39 do not see each other."""
    tensors = dict(zip(("query", "key", "value", "grad_out"), make(), strict=True))
    tensors[name][:, 30] = float("nan")
    leaves = [tensors[x].requires_grad_() for x in ("query", "key", "value")]
    out = attend(lambda score, b, h, q, k: torch.where((q < 20) == (k < 20), score, -torch.inf), leaves)
    grads = torch.autograd.grad(out, leaves, tensors["grad_out"])
    assert all(x[:, :20].isfinite().all() for x in (out, *grads))
    assert any(x[:, 20:].isnan().any() for x in (out, *grads))


def test_a_function_may_change_its_indices() -> None:
    """They are copies. Later calls read other ones."""

    def change(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        head *= 0
        q_idx -= 5
        return score - SLOPES[head] * (q_idx - kv_idx)

    first, second = attend(change), attend(change)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, attend(lambda score, b, h, q, k: score - SLOPES[h * 0] * (q - 5 - k)))


def change_the_score(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    score += 1
    return score


def test_a_function_that_changes_the_score_is_refused_before_the_backward() -> None:
    with pytest.raises(ValueError, match=r"score_mod = change_the_score: failed with RuntimeError: .*in-place"):
        attend(change_the_score, [x.requires_grad_() for x in make()[:3]])
    torch.testing.assert_close(attend(change_the_score), attend(lambda score, b, h, q, k: score + 1))


def spoil(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where((q_idx == 7) & (head == 1) & (kv_idx < 20), torch.nan, score)


def test_nan_reaches_the_queries_that_see_the_pair() -> None:
    out = attend(spoil)
    is_nan = torch.zeros(out.shape, dtype=torch.bool)
    is_nan[:, 7, 1] = True
    assert torch.equal(out.isnan(), is_nan)
    hidden = attend(spoil, key_padding_mask=(torch.arange(LENGTH) < 20).expand(2, -1))
    assert hidden.isfinite().all()


def test_infinite_derivatives_of_hidden_pairs_are_dropped() -> None:
    """The derivative of a square root is infinite at 0, where a masked key has its score."""
    leaves = [x.abs().requires_grad_() for x in make()[:3]]
    mask = (torch.arange(LENGTH) % 3 == 0).expand(2, -1)
    out = attend(lambda score, *pair: score.sqrt(), leaves, key_padding_mask=mask)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


LEARNED = nn.Parameter(torch.ones(HEADS))


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.ones(HEADS))

    def forward(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.slopes[head] * (q_idx - kv_idx)


class Biased:
    def __init__(self) -> None:
        self.bias = nn.Parameter(torch.ones(HEADS))

    def score_mod(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.bias[head]


INVALID: dict[str, Any] = {
    r"<lambda>: returned 1\.0; it must return the score as a tensor": lambda score, b, h, q, k: 1.0,
    r"returned shape \[4\] for one pair; .*index captured": lambda score, b, h, q, k: score + SLOPES,
    r"returned torch\.bool; .*torch\.where\(mask, score": lambda score, b, h, q, k: k <= q,
    r"reads LEARNED with requires_grad=True; .*detach": lambda score, b, h, q, k: score + LEARNED[h],
    "score_mod = Learned: reads slopes with requires_grad=True": Learned(),
    "reads argument 0 with requires_grad=True": functools.partial(lambda t, s, b, h, q, k: s + t[h], LEARNED),
    r"failed .*torch\.where takes the place": lambda score, b, h, q, k: score if q >= k else -score,
    r"failed with TypeError: .*positional arguments.* It is called as score_mod\(score, batch": lambda score, b: score,
    "failed .*randomness": lambda score, b, h, q, k: score + torch.rand(()),
    r"score_mod = Biased\.score_mod: reads bias with requires_grad=True": Biased().score_mod,
    "IndexError.*whole sequence of 40": lambda score, b, h, q, k: score + COORDS[b, q + 1, 0],
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_functions_are_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(INVALID[message])


def test_a_wrapper_with_the_attributes_of_another_function() -> None:
    cap, bias = score_mods.softcap(2.0), torch.randn(HEADS, LENGTH, LENGTH)

    @functools.wraps(cap)
    def wrapper(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap(score, batch, head, q_idx, kv_idx) + bias[head, q_idx, kv_idx]

    wanted = attend_with_gradients(lambda *pair: wrapper(*pair))
    assert all(map(torch.equal, attend_with_gradients(wrapper), wanted))
    assert not torch.allclose(attend(wrapper), attend(cap))


@pytest.mark.parametrize("change", [lambda bias: bias + 1, lambda bias: bias.mul_(2)], ids=["rebind", "in place"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_a_function_reads_must_stay_until_the_backward(change: Any, is_nested: bool) -> None:
    bias = torch.randn(HEADS)

    def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score + bias[head])

    *rows, grad = (x.requires_grad_() for x in make())
    out = attend((lambda *pair: add(*pair)) if is_nested else add, rows)
    bias = change(bias)
    with pytest.raises(RuntimeError, match=r"bias.* has changed since the forward"):
        out.backward(grad)


@pytest.mark.parametrize("change", [lambda caps: caps.pop(), lambda caps: caps.__setitem__(0, None)])
def test_numbers_that_are_gone_in_the_backward_are_noticed(change: Any) -> None:
    caps: list[Any] = [2.0]
    *rows, grad = (x.requires_grad_() for x in make())
    out = attend(lambda score, *pair: score * caps[0] if caps and caps[0] else score, rows)
    change(caps)
    with pytest.raises(RuntimeError, match=r"caps\[0\] has changed since the forward"):
        out.backward(grad)


def test_a_function_is_checked_again_when_what_it_captures_changes() -> None:
    calls = []

    def make_function(table: Tensor, factor: float) -> Any:
        return lambda score, b, h, q, k: calls.append(score.shape) or score + factor * table[h]

    def checks(table: Tensor, factor: float = 1.0) -> int:
        calls.clear()
        check_score_mod(make_function(table, factor), make()[0], LENGTH, needs_gradients=True)
        return len(calls)

    table = torch.rand(HEADS).double()
    score_mod._passed.clear()
    assert checks(table) > 0
    assert checks(table) == checks(table.clone()) == 0
    assert checks(table, 2.0) > 0
    assert checks(table[None].expand(2, -1).T[:, 0].float()) > 0
    with pytest.raises(ValueError, match="reads table with requires_grad=True"):
        checks(table.requires_grad_())


def test_a_captured_layer_must_stay_until_the_backward() -> None:
    layer = nn.Embedding(64, HEADS).requires_grad_(False)
    *rows, grad = (x.requires_grad_() for x in make())
    out = attend(lambda score, b, head, q_idx, k: score + layer.weight[q_idx, head], rows)
    layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight of layer has changed since the forward"):
        out.backward(grad)


@pytest.mark.parametrize("name", ["softcap", "alibi", "square"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("remembers", [False, True])
def test_activation_checkpointing(name: str, use_reentrant: bool, remembers: bool) -> None:
    score_mod = FUNCTIONS.get(name, lambda score, b, h, q, k: score * score)

    def block(*rows: Tensor) -> Any:
        return attend(score_mod, [x * 2 for x in rows]).sin()

    results = []
    region = remember_attention(block) if remembers else block
    for checkpointed in (block, functools.partial(checkpoint, region, use_reentrant=use_reentrant)):
        *rows, grad = make()
        out = checkpointed(*(x.requires_grad_() for x in rows))
        out.backward(grad)  # torch.autograd.grad does not run with a reentrant checkpoint
        results.append([out.detach(), *(x.grad for x in rows)])
    assert all(map(torch.equal, *results))


def test_a_variable_without_a_value_yet() -> None:
    def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (1.0 if head.dim() == 0 else later)

    out = attend_with_gradients(add)[0]
    later = 2.0
    assert torch.equal(out, attend(lambda score, *pair: score + 1.0))


@pytest.mark.parametrize("is_learned_first", [True, False])
def test_a_captured_tensor_that_needs_a_gradient_is_refused(is_learned_first: bool) -> None:
    learned_bias = torch.zeros(HEADS)

    def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + learned_bias[head]

    for is_learned in (is_learned_first, not is_learned_first):
        learned_bias.requires_grad_(is_learned)
        refusal = pytest.raises(ValueError, match="reads learned_bias with requires_grad=True")
        with refusal if is_learned else contextlib.nullcontext():
            attend(add)


PLACES = LEARNED[None, None, :2]
NO_FUNCTION = r"score_mod = 'alibi': expected a function \(score, batch, head, q_idx, kv_idx\), or None"


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: attend("alibi"), TypeError, NO_FUNCTION),
        (lambda: score_mods.softcap(0), ValueError, "cap = 0: must be above 0 and finite"),
        (lambda: score_mods.softcap("30"), TypeError, "cap = '30': expected a number"),
        (lambda: score_mods.alibi(0), ValueError, "num_heads = 0"),
        (lambda: score_mods.distance(torch.zeros(3, 2), SLOPES), ValueError, r"coords is torch.float32 \[3, 2\]"),
        (lambda: score_mods.distance(COORDS.bfloat16(), SLOPES), ValueError, "coords is torch.bfloat16.*rounds it"),
        (lambda: score_mods.distance(COORDS.half(), SLOPES), ValueError, "coords is torch.float16.*or integers; make"),
        (lambda: score_mods.distance(COORDS > 0, SLOPES), ValueError, "coords is torch.bool"),
        (lambda: score_mods.distance(COORDS, SLOPES.bfloat16()), ValueError, "slopes is torch.bfloat16.*rounds it"),
        (lambda: score_mods.distance(COORDS, SLOPES.long()), ValueError, "slopes is torch.int64"),
        (lambda: score_mods.distance(COORDS, 1.0), TypeError, r"slopes = 1\.0"),
        (lambda: score_mods.distance(PLACES, SLOPES), ValueError, "coords requires a gradient, .*coords"),
        (lambda: score_mods.relative(LEARNED[:, None]), ValueError, r"table requires .* pass table\.detach"),
        (lambda: score_mods.relative(torch.zeros(3)), ValueError, r"table is torch.float32 \[3\]"),
        (lambda: score_mods.relative(torch.zeros(2, 4)), ValueError, "at least 2 buckets"),
        (lambda: score_mods.relative(TABLE, max_distance=3), ValueError, "above the 3 single distances"),
    ],
)
def test_what_is_no_function_and_arguments_of_functions(make_it: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_it()


def test_another_floating_dtype_is_converted() -> None:
    wanted = attend(lambda score, b, h, q, k: torch.tanh(score.float()).double())
    torch.testing.assert_close(attend(lambda score, b, h, q, k: torch.tanh(score.float())), wanted)


def test_a_kernel_that_cannot_call_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"aten_cpu_flash.*it cannot call a score_mod"):
        attend(FUNCTIONS["softcap"], kernel="aten_cpu_flash")


@THOROUGH
def test_a_compiled_module_gives_the_same() -> None:
    *rows, grad_out = (x.requires_grad_() for x in make())
    outs = [call(*rows) for call in (scaled_call, torch.compile(scaled_call, backend="aot_eager"))]
    assert_near(*outs, 0)
    assert_near(*(torch.autograd.grad(out, rows, grad_out) for out in outs), 0)


def test_identities_are_of_code() -> None:
    one, two = (score_mods.softcap(cap) for cap in (1.0, 2.0))
    assert identity(one) == identity(two) != identity(score_mods.alibi(2))
    assert re.fullmatch(r"softcap\.<locals>\.score_mod #[0-9a-f]{8}", identity(one))
    here, there = (functools.partial(x, 1) for x in (by_vectors, FUNCTIONS["constant"]))
    assert identity(here) != identity(there)
    assert identity(Learned()).startswith("Learned #")
    assert identity(math.hypot).startswith("hypot #")
    assert identity(applied(torch.tanh)) != identity(applied(torch.sin))


@dataclass
class Capped:
    """A score_mod with attributes. It reads one by a method, and does not read ``rank``."""

    cap: float
    rank: int = 0

    def capped(self, score: Tensor) -> Tensor:
        return torch.tanh(score) * self.cap

    def __call__(self, score: Tensor, *pair: Tensor) -> Tensor:
        return self.capped(score)


@dataclass(slots=True)
class SlottedCap:
    cap: float

    def __call__(self, score: Tensor, *pair: Tensor) -> Tensor:
        return torch.tanh(score) * self.cap


class CappedModule(nn.Module):
    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, score: Tensor, *pair: Tensor) -> Tensor:
        return torch.tanh(score) * self.cap


def with_default(cap: float) -> Any:
    return lambda score, b, h, q, k, limit=cap: torch.tanh(score) * limit


def with_table(caps: Any) -> Any:
    return lambda score, *pair: torch.tanh(score) * caps["all"][0]


def with_settings(settings: Any) -> Any:
    return lambda score, *pair: torch.tanh(score) * settings.cap


def of_class(cap: float) -> Any:
    return with_settings(type("Settings", (), {"cap": cap})())


def with_cap_of_itself(cap: float) -> Any:
    def score_mod(score: Tensor, *pair: Tensor) -> Tensor:
        return torch.tanh(score) * score_mod.cap  # type: ignore[attr-defined]

    score_mod.cap = cap  # type: ignore[attr-defined]
    return score_mod


def with_choices(caps: Any) -> Any:
    return lambda score, *pair: torch.tanh(score) * sum(caps)


CAPS = SimpleNamespace(cap=1.0, name="unused")
CAP = 1.0

CAPTURING: dict[str, Callable[[float], Any]] = {
    "closure": score_mods.softcap,
    "function in a closure": lambda cap: applied(score_mods.softcap(cap)),
    "partial": lambda cap: functools.partial(lambda cap, score, *pair: torch.tanh(score) * cap, cap),
    "default": with_default,
    "list in a dictionary": lambda cap: with_table({"all": [cap]}),
    "attribute of an object": lambda cap: with_settings(SimpleNamespace(cap=cap)),
    "attribute of a class": of_class,
    "attribute of a function": with_cap_of_itself,
    "set": lambda cap: with_choices({cap, 1.0}),
    "attribute": Capped,
    "slot": SlottedCap,
    "slot of an object": lambda cap: with_settings(SlottedCap(cap)),
    "attribute of a module": CappedModule,
    "method": lambda cap: Capped(cap).__call__,
}


@pytest.mark.parametrize("name", CAPTURING)
def test_captured_numbers_are_compared(name: str) -> None:
    texts = [captured_values(CAPTURING[name](cap)) for cap in (3.0, 50.0, 3.0)]
    assert texts[0] == texts[2] != texts[1]
    assert re.search(r"= 3\.0", texts[0])


def test_what_is_compared_of_what_a_function_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    device, table = "cuda:1", torch.zeros(3, 2)

    def score_mod(score: Tensor, *pair: Tensor) -> Tensor:
        return score.clamp(max=CAP * CAPS.cap) + table.to(device)[0, 0] * math.pi

    assert captured_values(score_mod) == (
        f"CAP = 1.0, CAPS.cap = 1.0, math.pi = {math.pi}, table is torch.float32 [3, 2]"
    )
    monkeypatch.setitem(globals(), "CAP", 2.0)
    assert captured_values(score_mod).startswith("CAP = 2.0, ")
    assert captured_values(Capped(3.0, rank=0)) == captured_values(Capped(3.0, rank=1)) == "cap = 3.0"
    one, two = (captured_values(with_table({"all": [1.0, *[0.0] * 999, last]})) for last in (1.0, 2.0))
    assert len(one) == len(two) < 420
    assert one != two


class Shape(enum.Enum):
    TANH = "tanh"
    LINE = "line"


@pytest.mark.parametrize("values", [("tanh", "line"), (Shape.TANH, Shape.LINE), (None, 2.0)], ids=str)
def test_captured_choices_are_compared(values: tuple[object, object]) -> None:
    one, two = (captured_values(lambda score, *pair, value=value: score) for value in values)
    assert one != two


class Attributes(dict[str, float]):
    __getattr__ = dict.__getitem__


def test_a_function_may_call_what_has_no_module() -> None:
    calls: list[float] = []
    note, attributes = calls.append, Attributes(cap=3.0)

    def score_mod(score: Tensor, *pair: Tensor) -> Tensor:
        note(1.0)
        return torch.tanh(score) * attributes.cap

    assert captured_values(score_mod) == "attributes['cap'] = 3.0"
    assert torch.isfinite(attend(score_mod)).all()


def test_parameters_that_a_method_does_not_name_are_not_read() -> None:
    module = CappedModule(3.0)
    module.weight = nn.Parameter(torch.zeros(2))
    assert captured_values(module.forward) == "cap = 3.0"


def applied(function: Any) -> Any:
    return lambda score, batch, head, q_idx, kv_idx: function(score)


@THOROUGH
def test_identities_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """A set is a constant whose order depends on the seed of hashes."""
    imported = "from ring_backends.kernels.score_mod import captured_values, identity"
    program = ["-c", f"{imported}; print(identity(lambda x: x in {{'a', 'b', 'c', 'd'}}))"]
    found = {output_of(program, tmp_path, environment(PYTHONHASHSEED=seed)) for seed in ("1", "2", "3")}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_distances_of_integers_are_those_of_their_numbers(dtype: torch.dtype) -> None:
    """Far from zero fp32 has no odd integers, and differences of unsigned integers could wrap around."""
    generator = torch.Generator().manual_seed(3)
    begin = torch.iinfo(dtype).max // 2 - 100
    coords = begin + torch.randint(200, (2, LENGTH, 2), generator=generator)
    found = attend(score_mods.distance(coords.to(dtype), SLOPES))
    torch.testing.assert_close(found, attend(score_mods.distance((coords - begin).double(), SLOPES)))


def test_alibi_ignores_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        score_mod = score_mods.alibi(1)
    finally:
        torch.set_default_dtype(torch.float32)
    zero = torch.tensor(0)
    found = score_mod(torch.zeros(()), zero, zero, torch.tensor(1001), zero)
    assert float(found) == -1001 / 256


def check_error(ring: Ring, score_mod: Any, error: type[Exception], message: str) -> None:
    rows = [ring.shard(x) for x in make()[:3]]
    module = native.RingDilatedAttention([None], [1], ring=ring)
    with pytest.raises(error, match=message):
        module(*rows, score_mod=score_mod, seq_len=LENGTH)


def check_different_functions(ring: Ring) -> None:
    names = r"rank 0: distance\.<locals>\.score_mod #.*rank 1: softcap\.<locals>\.score_mod #"
    check_error(ring, FUNCTIONS["softcap" if ring.rank else "distance"], RingMismatchError, rf"score_mod \({names}")


def check_different_numbers(ring: Ring) -> None:
    message = r"captured by score_mod \(rank 0: cap = 3\.0, rank 1: cap = 50\.0\)"
    check_error(ring, score_mods.softcap(50.0 if ring.rank else 3.0), RingMismatchError, message)


def check_one_that_fails(ring: Ring) -> None:
    score_mod = score_mods.distance(COORDS[:, : LENGTH if ring.rank else 0], SLOPES)
    own = ValueError, "failed with IndexError"
    reported = RingMismatchError, "rank 0 refused its arguments with ValueError"
    check_error(ring, score_mod, *(reported if ring.rank else own))


def changed_here() -> Ended:
    """Rank 1 changes a captured number between the forward and the backward."""
    ring, caps = native.initialize(), [2.0]
    rows = [ring.shard(x).requires_grad_() for x in make()[:3]]
    module = native.RingDilatedAttention([None], [1], ring=ring)
    out = module(*rows, score_mod=lambda score, *pair: torch.tanh(score) * caps[0], seq_len=LENGTH)
    caps[0] += ring.rank
    return ending(out.sum().backward)


def test_a_change_on_one_rank_is_reported_to_all() -> None:
    with World(2) as ranks:
        other, own = ranks.run(changed_here)
    own.check(RuntimeError, "caps[0] has changed since the forward")
    other.check(RingMismatchError, "rank 1 refused its arguments with RuntimeError", within=AT_ONCE)


@pytest.mark.parametrize("check", [check_different_functions, check_different_numbers, check_one_that_fails])
def test_errors_of_one_rank_are_reported_on_all(pair: World, check: Any) -> None:
    pair.run(on_ring, check)
