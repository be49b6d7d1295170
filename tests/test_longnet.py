"""LongNet's encoder and decoder give what torchscale's give, from its parameters, and `convert` rewrites its files.

The rule of this file: torchscale's published algorithm is written down here a second time, step by step and in fp64
(pad, cut into segments, take every r-th row per group of heads, attend, put back, mix by the exponentials of the LSEs,
of which 0 means "absent"), and shares no code with the package.
"""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from ring_backends import DilatedPattern, Ring, RingMismatchError, dilated_attention
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.cli import app
from ring_backends.longnet import LongNetDecoder, LongNetEncoder
from ring_backends.testing.failing_calls import SHORT, Ended, ending
from ring_backends.testing.rings import TWO, new_ring, ring_here
from ring_backends.testing.world import World

EMBED_DIM, FFN_DIM, LAYERS, VOCABULARY, POSITIONS = 24, 40, 2, 19, 80
BRANCHES = ((8, 16, 64), (1, 2, 4))
HEADS = (4, 3)  # 3 is no multiple of the rates: torchscale pads the heads too
MODELS = {"encoder": LongNetEncoder, "decoder": LongNetDecoder}


# torchscale's algorithm


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, branches: Any, is_causal: bool, *, detach: bool, zero_is_absent: bool
) -> Tensor:
    """[batch, n, heads, head_dim] in and out."""
    n, heads = query.shape[1:3]
    outs, lses = [], []
    for w, r in zip(*branches, strict=True):
        w = min(w, n)
        rows = -(-w // r)
        of_head = []
        for head in range(heads):
            group = head // -(-heads // r)
            q, k, v = (_sparse(x[:, :, head], w, r, group) for x in (query, key, value))
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if is_causal:
                scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
            out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
            dense_out = out.new_zeros(*out.shape[:2], rows * r, out.shape[-1])
            dense_lse = lse.new_zeros(*lse.shape[:2], rows * r)
            dense_out[:, :, group::r], dense_lse[:, :, group::r] = out, lse
            absent = dense_lse == 0
            if not zero_is_absent:
                absent = torch.ones_like(absent)
                absent[:, :, group::r] = False
            dense_lse = dense_lse.masked_fill(absent, -1e8)
            # The segments are joined as long as they have become, not as long as they were.
            of_head.append((dense_out.flatten(1, 2)[:, :n], dense_lse.flatten(1, 2)[:, :n]))
        outs.append(torch.stack([out for out, _ in of_head], 2))
        lses.append(torch.stack([lse for _, lse in of_head], 2))
    weights = torch.stack(lses).softmax(0)
    if detach:
        weights = weights.detach()
    return (torch.stack(outs) * weights[..., None]).sum(0)


def _sparse(x: Tensor, w: int, r: int, group: int) -> Tensor:
    """[batch, n, head_dim] to [batch, segments, rows, head_dim]."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % w)).unflatten(1, (-1, w))
    return F.pad(x, (0, 0, 0, -w % r))[:, :, group::r]


def reference_model(
    state: dict[str, Tensor],
    x: Tensor,
    heads: int,
    branches: Any,
    is_causal: bool,
    *,
    detach: bool = True,
    scale: float = 1.0,
    eps: float = 1e-5,
    activation: Any = F.gelu,
) -> list[Tensor]:
    """The embeddings, what each layer gives, and the output."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        weight = state.get(f"{name}.weight")
        return x if weight is None else F.layer_norm(x, weight.shape, weight, state[f"{name}.bias"], eps)

    if not x.is_floating_point():
        x = state["embed_tokens.weight"][x]
    x = scale * x
    if "embed_positions.weight" in state:
        x = x + state["embed_positions.weight"][2 : 2 + x.shape[1]]
    states = [x]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        normed = norm(x, f"{name}.self_attn_layer_norm")
        q, k, v = (linear(normed, f"{name}.self_attn.{part}_proj").unflatten(-1, (heads, -1)) for part in "qkv")
        out = reference_attention(q, k, v, branches, is_causal, detach=detach, zero_is_absent=True).flatten(2)
        x = x + linear(norm(out, f"{name}.self_attn.inner_attn_ln"), f"{name}.self_attn.out_proj")
        hidden = activation(linear(norm(x, f"{name}.final_layer_norm"), f"{name}.ffn.fc1"))
        x = x + linear(norm(hidden, f"{name}.ffn.ffn_layernorm"), f"{name}.ffn.fc2")
        states.append(x)
    x = norm(x, "layer_norm")
    return [*states, linear(x, "output_projection") if "output_projection.weight" in state else x]


def torchscale_state(
    *, subln: bool = True, normalize_output: bool = True, tokens: bool = False, tied: bool = False
) -> dict[str, Tensor]:
    """Random parameters, by torchscale's names, large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(5)
    state = {}

    def add(name: str, *shape: int, norm: bool = False) -> None:
        fan_in = 4.0 if len(shape) == 1 else shape[-1]
        random = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)
        state[name] = 1 + random if norm else 2 * random

    def add_norm(name: str, size: int) -> None:
        add(f"{name}.weight", size, norm=True)
        add(f"{name}.bias", size)

    for layer in range(LAYERS):
        for part in "kvq":
            add(f"layers.{layer}.self_attn.{part}_proj.weight", EMBED_DIM, EMBED_DIM)
            add(f"layers.{layer}.self_attn.{part}_proj.bias", EMBED_DIM)
        add(f"layers.{layer}.self_attn.out_proj.weight", EMBED_DIM, EMBED_DIM)
        add(f"layers.{layer}.self_attn.out_proj.bias", EMBED_DIM)
        add(f"layers.{layer}.ffn.fc1.weight", FFN_DIM, EMBED_DIM)
        add(f"layers.{layer}.ffn.fc1.bias", FFN_DIM)
        add(f"layers.{layer}.ffn.fc2.weight", EMBED_DIM, FFN_DIM)
        add(f"layers.{layer}.ffn.fc2.bias", EMBED_DIM)
        add_norm(f"layers.{layer}.self_attn_layer_norm", EMBED_DIM)
        add_norm(f"layers.{layer}.final_layer_norm", EMBED_DIM)
        if subln:
            add_norm(f"layers.{layer}.self_attn.inner_attn_ln", EMBED_DIM)
            add_norm(f"layers.{layer}.ffn.ffn_layernorm", FFN_DIM)
    if normalize_output:
        add_norm("layer_norm", EMBED_DIM)
    if tokens:
        add("embed_tokens.weight", VOCABULARY, EMBED_DIM)
        add("embed_positions.weight", POSITIONS, EMBED_DIM)
        add("output_projection.weight", VOCABULARY, EMBED_DIM)
        if tied:
            state["output_projection.weight"] = state["embed_tokens.weight"]
    return state


def inputs(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    if kind == "decoder":
        return torch.randint(VOCABULARY, (2, n), generator=generator)
    return torch.randn(2, n, EMBED_DIM, generator=generator, dtype=torch.float64)


def attention(ring: Ring | None = None, branches: Any = BRANCHES) -> NativeRingDilatedAttention:
    return NativeRingDilatedAttention(*branches, offset="block", padding="zeros", ring=ring)


def make(kind: str, heads: int = 4, ring: Ring | None = None, **options: Any) -> Any:
    state = torchscale_state(tokens=kind == "decoder")
    return MODELS[kind].from_state_dict(state, num_heads=heads, attention=attention(ring), **options)


def reference(kind: str, heads: int, n: int, **options: Any) -> Tensor:
    state = torchscale_state(tokens=kind == "decoder")
    return reference_model(state, inputs(kind, n), heads, BRANCHES, kind == "decoder", **options)[-1]


def close(got: Tensor, right: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, right, rtol=0, atol=atol)


# Outputs and gradients


@pytest.mark.parametrize("n", [1, 5, 8, 37, 64, 70])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", MODELS)
def test_gives_what_torchscale_gives(kind: str, heads: int, n: int) -> None:
    close(make(kind, heads)(inputs(kind, n)).detach(), reference(kind, heads, n))


@pytest.mark.parametrize(
    ("state_options", "model_options", "reference_options"),
    [
        ({"subln": False}, {}, {}),
        ({"normalize_output": False}, {}, {}),
        ({"tokens": True, "tied": True}, {"scale_embedding": True}, {"scale": math.sqrt(EMBED_DIM)}),
        ({}, {"activation": "relu", "layer_norm_eps": 0.1}, {"activation": F.relu, "eps": 0.1}),
    ],
    ids=["without sub-layer norm", "as LongViT", "tied and scaled", "relu and eps"],
)
def test_options(state_options: Any, model_options: Any, reference_options: Any) -> None:
    state = torchscale_state(**state_options)
    x = inputs("decoder" if "tokens" in state_options else "encoder", 37)
    model = LongNetEncoder.from_state_dict(state, num_heads=4, attention=attention(), **model_options)
    right = reference_model(state, x, 4, BRANCHES, False, **reference_options)
    got, states = model(x, return_hidden_states=True)
    close(got.detach(), right[-1])
    for one, other in zip(states, right[:-1], strict=True):
        close(one.detach(), other)
    if "tokens" in state_options:
        assert model.output_projection.weight is model.embed_tokens.weight
        features = states[-1] if model.layer_norm is None else model.layer_norm(states[-1])
        close(model(x, features_only=True), features)


def reference_gradients(kind: str, n: int, *, detach: bool) -> dict[str, Tensor]:
    state = {name: value.requires_grad_() for name, value in torchscale_state(tokens=kind == "decoder").items()}
    out = reference_model(state, inputs(kind, n), 3, BRANCHES, kind == "decoder", detach=detach)[-1]
    return dict(zip(state, torch.autograd.grad(out, list(state.values()), cotangent(out)), strict=True))


def cotangent(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_exact_mixing(kind: str) -> None:
    model = make(kind, 3)
    out = model(inputs(kind, 37))
    out.backward(cotangent(out))
    exact, detached = (reference_gradients(kind, 37, detach=detach) for detach in (False, True))
    for name, parameter in model.named_parameters():
        close(parameter.grad, exact[name], 1e-9)
    name = "layers.0.self_attn.q_proj.weight"
    assert (exact[name] - detached[name]).abs().max() > 1e-3


def on_ring(kind: str, layout: Any, n: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole output, and this rank's share of every gradient."""
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    ring = ring.with_layout(layout)
    model = make(kind, 3, ring)
    out = model(ring.shard(inputs(kind, n)), seq_len=n)
    whole = ring.unshard(out.detach(), seq_len=n)
    out.backward(ring.shard(cotangent(whole)))
    return whole, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "n", [37, *(pytest.param(n, marks=pytest.mark.matrix(reason="another length")) for n in (5, 70))]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_give_what_torchscale_gives_on_one(pair: World, kind: str, layout: str, n: int) -> None:
    by_rank = pair.run(on_ring, kind, layout, n)
    right, gradients = reference(kind, 3, n), reference_gradients(kind, n, detach=False)
    for whole, _ in by_rank:
        close(whole, right)
    for name, gradient in gradients.items():
        close(sum(shares[name] for _, shares in by_rank), gradient, 1e-9)


# Where torchscale's own behaviour is peculiar


def attend(query: Tensor, key: Tensor, value: Tensor, branches: Any, is_causal: bool) -> Tensor:
    return dilated_attention(query, key, value, *branches, is_causal=is_causal, offset="block", padding="zeros")


def random_heads(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, n, 4, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def test_an_lse_of_zero_counts() -> None:
    """The first query of a causal segment sees one key; where its score is 0, torchscale drops that branch."""
    query, key, value = random_heads(32)
    query = torch.zeros_like(query)
    got = attend(query, key, value, BRANCHES, True)
    as_published = reference_attention(query, key, value, BRANCHES, True, detach=True, zero_is_absent=True)
    close(got, reference_attention(query, key, value, BRANCHES, True, detach=True, zero_is_absent=False))
    differs = (got - as_published).abs().amax((0, 2, 3)) > 1e-9
    # The first r rows of each branch's segments, each the first that some head covers.
    assert differs.nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 16, 17, 24]


def test_an_uncovered_position_has_output_zero() -> None:
    query, key, value = random_heads(21)
    got = attend(query, key, value, ((8,), (4,)), False)
    close(got, reference_attention(query, key, value, ((8,), (4,)), False, detach=True, zero_is_absent=True))
    assert (got[:, 1::4, 0] == 0).all()


def test_padding_with_zero_embeddings_is_torchscales_and_a_mask_ignores() -> None:
    model, x = make("encoder"), inputs("encoder", 37)
    pads = torch.zeros(2, 37, dtype=torch.bool)
    pads[1, 30:] = True
    zeroed = x.masked_fill(pads[..., None], 0)
    right = reference_model(torchscale_state(), zeroed, 4, BRANCHES, False)[-1]
    close(model(zeroed).detach(), right)
    masked = model(x, key_padding_mask=pads)
    close(masked[~pads], model(zeroed, key_padding_mask=pads)[~pads])
    assert (masked[1, :30] - right[1, :30]).abs().max() > 1e-3


def gigapath_segment_lengths(slide_size: int) -> tuple[int, ...]:
    """GigaPath's: five, from 1,024 to the tiles of a slide, equally far apart in their logarithms."""
    top = int(math.log2((slide_size // 256) ** 2))
    return tuple(int(2 ** (10 + (top - 10) * index / 4)) for index in range(5))


def test_where_the_rate_does_not_divide_torchscale_moves_outputs_and_the_error_says_so() -> None:
    w, r, n = 10, 4, 20
    query, key, value = random_heads(n)
    options: Any = {"branches": ((w,), (r,)), "is_causal": False, "detach": True, "zero_is_absent": True}
    joined = reference_attention(query, key, value, **options)
    second = reference_attention(*(x[:, w:] for x in (query, key, value)), **options)
    close(joined[:, w + 2 :], second[:, : w - 2])
    with pytest.raises(
        ValueError, match=r"pads every segment to 12 rows .* the 2 padded rows.*a sequence of at most 10 tokens"
    ):
        attend(query, key, value, ((w,), (r,)), False)
    close(attend(query[:, :w], key[:, :w], value[:, :w], ((w,), (r,)), False), joined[:, :w])


def test_the_gigapath_patterns_that_the_error_names() -> None:
    rates = (1, 2, 4, 8, 16)
    misplaced = {
        size: [(w, r) for w, r in zip(gigapath_segment_lengths(size), rates, strict=True) if w % r]
        for size in (262144, 250000)
    }
    assert misplaced == {262144: [(185363, 8)], 250000: [(23170, 4), (110217, 8)]}
    default = DilatedPattern.torchscale(gigapath_segment_lengths(262144), rates)
    default.check(seq_len=185363, num_heads=16)
    with pytest.raises(ValueError, match="segment length 185363 and dilation rate 8 on 185364 tokens"):
        default.check(seq_len=185364, num_heads=16)


# Parameters


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_load_strictly_by_torchscales_names(kind: str) -> None:
    state = torchscale_state(tokens=kind == "decoder")
    tables = {"vocab_size": VOCABULARY, "num_positions": POSITIONS, "output_size": VOCABULARY}
    model = MODELS[kind](
        EMBED_DIM, 4, FFN_DIM, LAYERS, attention(), dtype=torch.float64, **tables if kind == "decoder" else {}
    )
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }
    model.load_state_dict(state, strict=True)
    close(model(inputs(kind, 37)).detach(), reference(kind, 4, 37))


def test_dtype_is_that_of_the_parameters_or_as_asked() -> None:
    assert make("encoder").layers[0].ffn.fc1.weight.dtype == torch.float64
    model = make("encoder", dtype=torch.bfloat16)
    out = model(inputs("encoder", 37).bfloat16())
    assert out.dtype == torch.bfloat16
    right = reference("encoder", 4, 37)
    assert (out - right).norm() < 4 * 2**-8 * right.norm()  # four roundings; two layers make half as much


def test_initial_weights_have_magnetos_gain() -> None:
    torch.manual_seed(0)
    model = LongNetEncoder(64, 4, 64, 6, attention(), vocab_size=1000)
    plain = 64**-0.5 / math.sqrt(3)
    for name, gain in (("self_attn.q_proj", 1.0), ("self_attn.v_proj", math.sqrt(math.log(12))), ("ffn.fc1", 1.5764)):
        assert model.get_parameter(f"layers.3.{name}.weight").std().item() == pytest.approx(plain * gain, rel=0.05)
    assert model.embed_tokens is not None
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.125, rel=0.05)


# Refusals


def with_name(name: str, *shape: int) -> dict[str, Tensor]:
    return {**torchscale_state(), name: torch.zeros(shape or (2,))}


def without(text: str) -> dict[str, Tensor]:
    return {name: value for name, value in torchscale_state().items() if text not in name}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (with_name("layers.1.moe_layer.gate.wg.weight"), "moe_layer.gate.wg.weight: mixture of experts"),
        (with_name("layers.0.encoder_attn.k_proj.weight"), "cross attention"),
        (with_name("layers.0.self_attn.q_proj.A.weight"), "multiway"),
        (with_name("layers.0.self_attn.xpos.scale"), "xPos"),
        (with_name("relative_position.relative_attention_bias.weight"), "rel_pos_buckets"),
        (with_name("self_attn_relative_position.relative_attention_bias.weight"), "rel_pos_buckets"),
        (with_name("layernorm_embedding.weight"), "layernorm_embedding"),
        (with_name("embed_positions._float_tensor"), "not learned"),
        (with_name("layers.0.self_attn.qkv_proj.weight"), "fused query, key and value"),
        (with_name("layers.0.self_attn.in_proj_weight"), "fused query, key and value"),
        (with_name("layers.0.flat_param_0"), "flattened"),
        (with_name("layers.0.ffn.gate.weight"), "Unexpected key.*ffn.gate.weight"),
        (with_name("version"), "Unexpected key.*version"),
        ({**torchscale_state(), "layers.1.ffn.fc2.bias": torch.zeros(3)}, "size mismatch for layers.1.ffn.fc2.bias"),
        (without("layers.1.self_attn.k_proj"), "Missing key.*layers.1.self_attn.k_proj"),
        (without("layers.0."), r"has layers \[1\]"),
        (without("layers."), r"has layers \[\]"),
        (without("layers.0.ffn.fc1"), "no matrix layers.0.ffn.fc1.weight"),
        (torchscale_state(subln=False, normalize_output=False), "post-norm or DeepNorm"),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(state: dict[str, Tensor], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LongNetEncoder.from_state_dict(state, num_heads=4, attention=attention())


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"ffn_dim": 0}, ValueError, "ffn_dim = 0"),
        ({"num_layers": 2.0}, TypeError, r"num_layers = 2\.0"),
        ({"vocab_size": -1}, ValueError, "vocab_size = -1"),
        ({"num_heads": 5}, ValueError, "num_heads = 5 must divide it"),
        ({"activation": "swish"}, ValueError, "activation = 'swish'"),
        ({"tied": True, "output_size": 7}, ValueError, "vocab_size = None and output_size = 7"),
        ({"attention": torch.nn.Identity()}, TypeError, "attention = Identity"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], told: str) -> None:
    sizes = {"embed_dim": EMBED_DIM, "num_heads": 4, "ffn_dim": FFN_DIM, "num_layers": 1, "attention": attention()}
    with pytest.raises(error, match=told):
        LongNetEncoder(**{**sizes, **options})


@pytest.mark.parametrize(
    ("kind", "x", "options", "error", "told"),
    [
        ("encoder", inputs("decoder", 5), {}, TypeError, "the model has no embed_tokens"),
        ("encoder", inputs("decoder", 5).bool(), {}, TypeError, "torch.bool"),
        ("encoder", inputs("encoder", 5)[0], {}, ValueError, r"x has shape \(5, 24\)"),
        ("encoder", inputs("encoder", 5)[..., :7], {}, ValueError, "embed_dim = 24"),
        ("encoder", inputs("encoder", 5).float(), {}, TypeError, "float32"),
        (
            "encoder",
            inputs("encoder", 5),
            {"seq_len": 9},
            ValueError,
            "x has 5 local rows: this rank holds 9 of",
        ),
        ("decoder", inputs("decoder", 79), {}, ValueError, "embed_positions has rows for 78 tokens"),
    ],
)
def test_inputs_that_do_not_fit(kind: str, x: Tensor, options: Any, error: type[Exception], told: str) -> None:
    model = LongNetEncoder(EMBED_DIM, 4, FFN_DIM, 1, attention(), dtype=torch.float64) if x.dim() == 3 else make(kind)
    with pytest.raises(error, match=told):
        model(x, **options)


def one_refuses() -> Ended:
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    model, x = make("encoder", ring=ring), ring.shard(inputs("encoder", 20))
    return ending(lambda: model(x[0] if ring.rank == 1 else x))


def test_the_other_rank_raises(pair: World) -> None:
    told, refused = pair.run(one_refuses)
    assert refused.is_a(ValueError), refused
    assert told.is_a(RingMismatchError), told
    assert "x has shape" in told.message


def layers_in_another_order() -> Ended:
    """Attention of the layers, which all are of one shape: in order, and then backwards on rank 1."""
    ring = new_ring("ring_backends.adapters.native", TWO, timeout=timedelta(seconds=SHORT))
    assert ring is not None
    layers, x = list(make("encoder", ring=ring).layers), ring.shard(inputs("encoder", 20))
    for layer in layers:
        layer.self_attn(x)
    return ending(lambda: [layer.self_attn(x) for layer in (layers[::-1] if ring.rank == 1 else layers)])


def test_layers_are_distinguished(pair: World) -> None:
    for ended in pair.run(layers_in_another_order):
        assert ended.is_a(RingMismatchError), ended
        assert "order of calls" in ended.message, ended


# convert


def convert(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["convert", *map(str, arguments)])


def prefixed(prefix: str, **options: Any) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in torchscale_state(**options).items()}


@pytest.fixture
def slide_encoder(tmp_path: Path) -> Path:
    """As GigaPath's: an encoder, and what lies around it."""
    around = {
        "cls_token": torch.zeros(1, 1, EMBED_DIM),
        "patch_embed.proj.weight": torch.zeros(EMBED_DIM, 7),
        "patch_embed.proj.bias": torch.zeros(EMBED_DIM),
        "norm.weight": torch.zeros(EMBED_DIM),
        "norm.bias": torch.zeros(EMBED_DIM),
    }
    path = tmp_path / "slide_encoder.pth"
    torch.save({"model": {**around, **prefixed("encoder.")}, "epoch": 3}, path)
    return path


def said_branches(branches: Any = BRANCHES) -> list[str]:
    lengths, rates = (",".join(map(str, numbers)) for numbers in branches)
    return ["--segment-lengths", lengths, "--dilation-rates", rates]


def test_convert_and_load_a_slide_encoder(slide_encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "encoder.pt"
    done = convert(slide_encoder, target, "--num-heads", 4, *said_branches())
    assert done.exit_code == 0, done.stderr
    for told in ("LongNetEncoder", "'encoder.'", "2, 24, 4, 40", "(8, 1), (16, 2), (64, 4)", "float64"):
        assert told in done.stdout, done.stdout
    left = done.stdout.partition("Left out")[2]
    for name, entries in (("cls_token", 1), ("patch_embed", 2), ("norm", 2), ("epoch", 1)):
        assert any(name in line and str(entries) in line for line in left.splitlines()), left
    model = LongNetEncoder.from_checkpoint(target, attention())
    close(model(inputs("encoder", 37)).detach(), reference("encoder", 4, 37))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.pt", "slide_encoder.pth"]
    with pytest.raises(ValueError, match="holds a LongNet encoder, and this is LongNetDecoder"):
        LongNetDecoder.from_checkpoint(target, attention())
    with pytest.raises(ValueError, match="attention has DilatedPattern"):
        LongNetEncoder.from_checkpoint(target, attention(branches=((8,), (1,))))


def test_convert_a_decoder_and_what_was_converted(tmp_path: Path) -> None:
    source, target, again = (tmp_path / name for name in ("lm.pt", "decoder.pt", "again.pt"))
    torch.save(prefixed("module.decoder.", tokens=True), source)
    done = convert(source, target, "--num-heads", 4)
    assert done.exit_code == 0, done.stderr
    assert "19, 80, 19" in done.stdout
    assert "not given" in done.stdout
    assert "Left out" not in done.stdout
    close(
        LongNetDecoder.from_checkpoint(target, attention())(inputs("decoder", 37)).detach(),
        reference("decoder", 4, 37),
    )
    options = ("--kind", "decoder", "--scale-embedding", "--activation", "relu", "--layer-norm-eps", "0.1")
    done = convert(source, again, "--num-heads", 3, *options)
    assert done.exit_code == 0, done.stderr
    model = LongNetDecoder.from_checkpoint(again, attention(), dtype=torch.float32)
    assert (model.layers[0].self_attn.num_heads, model.layer_norm.eps, model.scale) == (3, 0.1, math.sqrt(EMBED_DIM))
    assert model.layers[0].ffn.activation == "relu"
    assert next(model.parameters()).dtype == torch.float32
    # What it has written it converts to the same, and to nothing else: the number of heads is not in the tensors.
    assert convert(target, tmp_path / "the same.pt", "--num-heads", 4).exit_code == 0
    for changed in (["--num-heads", 3], ["--num-heads", 4, "--activation", "relu"]):
        refused = convert(target, tmp_path / "another.pt", *changed)
        assert refused.exit_code == 2
        assert f"{changed[-2]}: {changed[-2][2:].replace('-', '_')} = " in refused.stderr
        assert "was written by `convert` with" in refused.stderr


def test_convert_writes_only_what_was_converted(tmp_path: Path) -> None:
    source, target = tmp_path / "views.pt", tmp_path / "encoder.pt"
    parts = prefixed("encoder.")
    flat = torch.cat([value.flatten() for value in parts.values()] + [torch.zeros(100_000, dtype=torch.float64)])
    pieces = flat.split([value.numel() for value in parts.values()] + [100_000])
    torch.save(
        {name: piece.view(value.shape) for (name, value), piece in zip(parts.items(), pieces[:-1], strict=True)}, source
    )
    assert convert(source, target, "--num-heads", 4).exit_code == 0
    assert target.stat().st_size < source.stat().st_size - 700_000


def test_convert_replaces_only_by_force(slide_encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.pt"
    target.write_text("precious")
    refused = convert(slide_encoder, target, "--num-heads", 4)
    assert refused.exit_code == 2
    assert "--target: target = " in refused.stderr
    assert "exists already; give another file, or --force" in refused.stderr
    assert target.read_text() == "precious"
    assert convert(slide_encoder, target, "--num-heads", 4, "--force").exit_code == 0
    LongNetEncoder.from_checkpoint(target, attention())


class Custom:
    """What no file of tensors may hold."""


@pytest.mark.parametrize(
    ("saved", "options", "told"),
    [
        ({"model": {"a": torch.zeros(1)}}, [], "source has no names such as layers.0.self_attn.q_proj.weight"),
        ({"epoch": 3}, [], "holds no state_dict, neither at the top nor under model, state_dict"),
        ([torch.zeros(1)], [], "holds no state_dict"),
        ({"model": Custom()}, [], "not a whole file of tensors and plain values.*torch.save\\(model.state_dict"),
        (b"PK\x03\x04 cut off", [], "not a whole file of tensors"),
        (b"", [], "not a whole file of tensors"),
        (
            {**prefixed("encoder."), **prefixed("decoder.")},
            [],
            "--prefix: there are several LongNets, 'decoder.', 'enc",
        ),
        (prefixed("encoder."), ["--prefix", "decoder"], "--prefix: prefix = 'decoder.': no layers.*are: 'encoder.'"),
        (torchscale_state(tokens=True), [], "--kind: the names do not tell"),
        (torchscale_state(), ["--kind", "both"], "--kind: kind = 'both'"),
        (torchscale_state(), ["--num-heads", "5"], "num_heads = 5 must divide it"),
        (torchscale_state(), ["--activation", "swish"], "--activation: activation = 'swish'"),
        (prefixed("encoder.", subln=False, normalize_output=False), [], "post-norm or DeepNorm"),
        ({f"encoder.{name}": value for name, value in with_name("layers.0.self_attn.xpos.scale").items()}, [], "xPos"),
        (torchscale_state(), ["--segment-lengths", "8,16"], "--dilation-rates: dilation_rates is missing"),
        (
            torchscale_state(),
            said_branches(((8, 10), (1, 4))),
            "--segment-lengths: .*pads every segment.*with --seq-len",
        ),
        (torchscale_state(), [*said_branches(((8, 10), (1, 4))), "--seq-len", "11"], "10 and dilation rate 4 on 11"),
    ],
)
def test_convert_refuses_unusable_files(saved: Any, options: list[str], told: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.pt", tmp_path / "target.pt"
    if isinstance(saved, bytes):
        source.write_bytes(saved)
    else:
        torch.save(saved, source)
    refused = convert(source, target, "--num-heads", 4, *options)
    assert refused.exit_code == 2, refused.stderr
    assert refused.stderr.startswith("ring-backends convert: error: ")
    assert "Traceback" not in refused.stderr
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(refused.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_convert_refuses_paths(slide_encoder: Path, tmp_path: Path) -> None:
    for source, target, told in (
        (tmp_path / "none", tmp_path / "to.pt", "--source: source = .*: not a file"),
        (slide_encoder, tmp_path / "none" / "to.pt", "--target: target = .*none is no directory"),
        (slide_encoder, tmp_path, "--target: target = .*: is a directory"),
        (slide_encoder, slide_encoder, "SOURCE itself"),
    ):
        refused = convert(source, target, "--num-heads", 4, "--force")
        assert refused.exit_code == 2
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(refused.stderr)


def test_a_misplacing_pattern_is_fine_for_shorter_sequences(slide_encoder: Path, tmp_path: Path) -> None:
    branches = ((8, 10), (1, 4))
    done = convert(slide_encoder, tmp_path / "to.pt", "--num-heads", 4, *said_branches(branches), "--seq-len", 10)
    assert done.exit_code == 0, done.stderr
    x = inputs("encoder", 10)
    got = LongNetEncoder.from_checkpoint(tmp_path / "to.pt", attention(branches=branches))(x)
    close(got.detach(), reference_model(torchscale_state(), x, 4, branches, False)[-1])


def test_a_file_that_convert_did_not_write(slide_encoder: Path) -> None:
    with pytest.raises(ValueError, match="not what `ring-backends convert` writes"):
        LongNetEncoder.from_checkpoint(slide_encoder, attention())
    with pytest.raises(FileNotFoundError):
        LongNetEncoder.from_checkpoint("no such file", attention())
