"""The multi-head layer: projections act on each row, and rotary angles use global positions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from ring_backends import score_mods
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.marks import THOROUGH

EMBED_DIM, HEADS, HEAD_DIM = 24, 6, 4


class Recorder(nn.Module):
    """A replacement of an attention module. It records its arguments and returns the query."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring = ring

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.query, self.key, self.value, self.options = query, key, value, options
        return query


def full_attention(**options: Any) -> NativeRingDilatedAttention:
    return NativeRingDilatedAttention([1 << 20], [1], **options)


def make(attention: nn.Module, **options: Any) -> RingDilatedMultiheadAttention:
    torch.manual_seed(1)
    options = {"dtype": torch.float64, **options}
    return RingDilatedMultiheadAttention(EMBED_DIM, HEADS, attention, **options)


def random_input(seq_len: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seq_len)
    return torch.randn(2, seq_len, EMBED_DIM, generator=generator, dtype=dtype)


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_plain_attention_between_projections(num_kv_heads: int, is_causal: bool) -> None:
    layer = make(full_attention(), num_kv_heads=num_kv_heads)
    x = random_input(11)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in projections)
    assert key.shape[1] == value.shape[1] == num_kv_heads
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    expected = layer.out_proj(layer.inner_attn_ln(attended.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer(x, is_causal=is_causal), expected)


def test_sinks_and_score_mods_reach_the_attention() -> None:
    layer = make(full_attention(), rotary=True)
    x, sinks = random_input(11), torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    options = {"sinks": sinks, "score_mod": score_mods.alibi(HEADS)}
    whole = layer(x, is_causal=True, **options)
    assert (whole - layer(x, is_causal=True, sinks=sinks)).abs().max() > 1e-3
    assert (whole - layer(x, is_causal=True, score_mod=options["score_mod"])).abs().max() > 1e-3
    cache = layer.attention.new_cache()
    parts = [layer(x[:, :7], seq_len=7, cache=cache, **options), layer(x[:, 7:], cache=cache, **options)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("seq_len", [24, 23, 3])
def test_rotary_angles_belong_to_global_positions(layout: LayoutKind, seq_len: int) -> None:
    x = random_input(seq_len)
    whole = Recorder(Ring())
    expected = make(whole, rotary=True, num_kv_heads=2)(x)
    for rank in range(4):
        part = Recorder(Ring(size=4, rank=rank, ranks=(0, 1, 2, 3), layout_kind=layout))
        out = make(part, rotary=True, num_kv_heads=2)(part.ring.shard(x), seq_len=seq_len)
        rows = part.ring.positions(seq_len)
        for name in ("query", "key", "value"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:, rows])
        torch.testing.assert_close(out, expected[:, rows])
        assert part.options["seq_len"] == seq_len


def test_rotary_is_a_rotation_of_component_pairs() -> None:
    recorder = Recorder(Ring())
    layer = make(recorder, rotary=True, rotary_base=100.0)
    x = random_input(7)
    layer(x)
    unrotated = layer.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))
    pairs = torch.complex(unrotated[..., :2].contiguous(), unrotated[..., 2:].contiguous())
    angle = torch.arange(7.0, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    rotated = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(recorder.query, torch.cat((rotated.real, rotated.imag), dim=-1))
    torch.testing.assert_close(recorder.value, layer.v_proj(x).unflatten(-1, (HEADS, HEAD_DIM)))


def test_rotary_angles_stay_exact_far_into_a_sequence() -> None:
    ring = Ring(size=1_000_000, rank=999_999)
    layer = make(Recorder(ring), rotary=True, dtype=torch.float32)
    cos, sin = layer._rotary_table(ring, 2**30, torch.empty(1, 1, 1, HEAD_DIM))
    position = ring.positions(2**30).double()
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[:, 0, 0].double(), position.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, 1].double(), (position / 100.0).sin(), rtol=0, atol=1e-6)


def test_a_forward_under_inference_mode_leaves_training_possible() -> None:
    layer = make(full_attention(), rotary=True)
    x = random_input(8)
    with torch.inference_mode():
        layer(x)
    layer(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_another_rotary_base() -> None:
    layer, x = make(full_attention(), rotary=True), random_input(8)
    layer(x)
    layer.rotary_base = 500.0
    assert torch.equal(layer(x), make(full_attention(), rotary=True, rotary_base=500.0)(x))


def test_rotary_tables_are_few_and_depend_on_the_layout() -> None:
    recorder = Recorder(Ring(size=2, rank=1, ranks=(0, 1)))
    layer = make(recorder, rotary=True)
    for seq_len in range(2, 40, 2):
        layer(random_input(seq_len // 2))
    assert len(layer._rotary_tables) <= 4
    layer(random_input(10))
    contiguous = recorder.query
    recorder.ring = recorder.ring.with_layout("zigzag")
    layer(random_input(10))
    assert not torch.allclose(recorder.query, contiguous)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    layer = make(full_attention(), rotary=True, dtype=dtype)
    assert layer(random_input(8, dtype), is_causal=True).dtype == dtype
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}


def test_dtypes_by_name() -> None:
    for name, dtype in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        assert make(full_attention(), dtype=name, device="cpu").q_proj.weight.dtype == dtype


def test_autocast_converts_the_input() -> None:
    layer = make(full_attention(), rotary=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(random_input(8, torch.float32)).dtype == torch.bfloat16


def test_state_dict_keys_equal_those_of_torchscale() -> None:
    layer = make(full_attention(), rotary=True)
    layer(random_input(8))
    names = ["q_proj", "k_proj", "v_proj", "inner_attn_ln", "out_proj"]
    assert list(layer.state_dict()) == [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    bare = make(full_attention(), sub_layer_norm=False, bias=False)
    assert list(bare.state_dict()) == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same_and_have_no_tables(copied: Any) -> None:
    layer = make(full_attention(), rotary=True)
    x = random_input(8)
    expected = layer(x)
    twin = copied(layer)
    assert twin._rotary_tables == {}
    assert layer._rotary_tables
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"embed_dim": 0}, ValueError, "embed_dim = 0"),
        ({"embed_dim": 24.0}, TypeError, r"embed_dim = 24\.0"),
        ({"num_heads": 5}, ValueError, "embed_dim = 24: num_heads = 5 must divide it"),
        ({"num_heads": True}, TypeError, "num_heads = True"),
        ({"num_kv_heads": 4}, ValueError, "num_kv_heads = 4: it must divide num_heads = 6"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads = 0"),
        ({"num_heads": 8, "rotary": True}, ValueError, "rotary = True with head dim 3"),
        ({"rotary_base": 0.0}, ValueError, r"rotary_base = 0\.0"),
        ({"attention": nn.Identity()}, TypeError, "attention = Identity: expected a RingDilatedAttention"),
        ({"dtype": "fp8"}, ValueError, "dtype = 'fp8'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        RingDilatedMultiheadAttention(**{"embed_dim": 24, "num_heads": 6, "attention": full_attention(), **arguments})


X = random_input(8, torch.float32)
PACKED = {"cache": full_attention().new_cache(), "document_ids": torch.zeros(2, 8, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("x", "options", "error", "named"),
    [
        (torch.zeros(8, EMBED_DIM), {}, ValueError, r"x has shape \(8, 24\)"),
        (torch.zeros(1, 8, 5), {}, ValueError, r"x has shape \(1, 8, 5\): expected .* embed_dim = 24"),
        (random_input(8), {}, TypeError, r"x is torch\.float64: the parameters are"),
        (X, {"seq_len": 9}, ValueError, "x has 8 rows .* holds 9 of 9; pass the rank's part"),
        (X, {"seq_len": 0}, ValueError, "seq_len = 0"),
        (X, {"cache": [1]}, TypeError, "cache = list: expected a cache"),
        (X, PACKED, ValueError, "document_ids is given: decoding has no packed documents"),
    ],
)
def test_bad_inputs_are_named(x: Tensor, options: dict[str, Any], error: type[Exception], named: str) -> None:
    layer = make(full_attention(), rotary=True, dtype=torch.float32)
    with pytest.raises(error, match=named):
        layer(x, **options)


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_changed_in_place_with_right_gradients(bias: bool) -> None:
    """It is not a view, and not a copy: FSDP2 warns of modules that return a view."""
    layer, x = make(full_attention(), bias=bias), random_input(8)
    projected: list[int] = []
    layer.out_proj.register_forward_hook(lambda module, args, out: projected.append(out.data_ptr()))
    out = layer(x)
    assert (out._base, out.data_ptr()) == (None, projected[0])
    expected = torch.autograd.grad((2 * out).square().sum(), list(layer.parameters()))
    changed = layer(x).mul_(2)
    torch.testing.assert_close(torch.autograd.grad(changed.square().sum(), list(layer.parameters())), expected)


def test_a_change_of_what_the_projection_saved_is_an_error() -> None:
    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(0, 1).exp().view(x.shape)

    layer = make(full_attention())
    layer.out_proj = Exponential(EMBED_DIM, EMBED_DIM, dtype=torch.float64)
    out = layer(random_input(8))
    assert out._base is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(2).sum().backward()


@THOROUGH
def test_a_compiled_layer_has_one_graph_per_length() -> None:
    """This test uses one device. The harness compiles models with attention on a ring."""
    torch.compiler.reset()
    layer, counter = make(full_attention(), rotary=True, num_kv_heads=2), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seq_len, num_graphs in ((11, 1), (11, 1), (6, 2), (6, 2), (11, 2)):
        x = torch.randn(2, seq_len, EMBED_DIM, dtype=torch.float64, requires_grad=True)
        answers = []
        for function in (layer, compiled):
            out = function(x, is_causal=True)
            answers.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        assert counter.frame_count == num_graphs
        torch.testing.assert_close(*answers)
