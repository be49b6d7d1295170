"""LongNet's parameters and inputs: names of parameters, and refused arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchscale_reference as ts
from native_ranks import ADAPTER, assert_near, on_ring
from torch import Tensor

from ring_backends import Ring, RingMismatchError
from ring_backends.longnet import LongNetEncoder
from ring_backends.testing.failing_calls import SHORT
from ring_backends.testing.rings import TWO, new_ring
from ring_backends.testing.world import World


@pytest.mark.parametrize("kind", ts.MODELS)
def test_parameters_load_strictly_by_torchscales_names(kind: str) -> None:
    state = ts.make_state(tokens=kind == "decoder")
    tables = {"vocab_size": ts.VOCABULARY, "num_positions": ts.POSITIONS, "output_size": ts.VOCABULARY}
    options = {"dtype": torch.float64, **(tables if kind == "decoder" else {})}
    model = ts.MODELS[kind](ts.EMBED_DIM, 4, ts.FFN_DIM, ts.LAYERS, ts.attention(), **options)
    of_model, right = ({name: x.shape for name, x in found.items()} for found in (model.state_dict(), state))
    assert of_model == right
    model.load_state_dict(state, strict=True)
    assert_near(model(ts.inputs(kind, 37)).detach(), ts.reference(kind, 4, 37))


def test_dtype_follows_the_parameters_or_the_argument() -> None:
    assert ts.make("encoder").layers[0].ffn.fc1.weight.dtype == torch.float64
    model = ts.make("encoder", dtype=torch.bfloat16)
    out = model(ts.inputs("encoder", 37).bfloat16())
    assert out.dtype == torch.bfloat16
    right = ts.reference("encoder", 4, 37)
    assert (out - right).norm() < 4 * 2**-8 * right.norm()  # allows four roundings; two layers cause about two


def test_initial_weights_have_the_gain_of_magneto() -> None:
    torch.manual_seed(0)
    model = LongNetEncoder(64, 4, 64, 6, ts.attention(), vocab_size=1000)
    plain = 64**-0.5 / math.sqrt(3)
    for name, gain in (("self_attn.q_proj", 1.0), ("self_attn.v_proj", math.sqrt(math.log(12))), ("ffn.fc1", 1.5764)):
        assert model.get_parameter(f"layers.3.{name}.weight").std().item() == pytest.approx(plain * gain, rel=0.05)
    assert model.embed_tokens is not None
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.125, rel=0.05)


def without(text: str) -> dict[str, Tensor]:
    return {name: value for name, value in ts.make_state().items() if text not in name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (ts.with_name("layers.1.moe_layer.gate.wg.weight"), "moe_layer.gate.wg.weight: mixture of experts"),
        (ts.with_name("layers.0.encoder_attn.k_proj.weight"), "cross attention"),
        (ts.with_name("layers.0.self_attn.q_proj.A.weight"), "multiway"),
        (ts.with_name("layers.0.self_attn.xpos.scale"), "xPos"),
        (ts.with_name("relative_position.relative_attention_bias.weight"), "rel_pos_buckets"),
        (ts.with_name("self_attn_relative_position.relative_attention_bias.weight"), "rel_pos_buckets"),
        (ts.with_name("layernorm_embedding.weight"), "layernorm_embedding"),
        (ts.with_name("embed_positions._float_tensor"), "not learned"),
        (ts.with_name("layers.0.self_attn.qkv_proj.weight"), "fused query, key and value"),
        (ts.with_name("layers.0.self_attn.in_proj_weight"), "fused query, key and value"),
        (ts.with_name("layers.0.flat_param_0"), "flattened"),
        (ts.with_name("layers.0.ffn.gate.weight"), "Unexpected key.*ffn.gate.weight"),
        (ts.with_name("version"), "Unexpected key.*version"),
        (ts.with_name("layers.1.ffn.fc2.bias", 3), "size mismatch for layers.1.ffn.fc2.bias"),
        (without("layers.1.self_attn.k_proj"), "Missing key.*layers.1.self_attn.k_proj"),
        (without("layers.0."), r"has layers \[1\]"),
        (without("layers."), r"has layers \[\]"),
        (without("layers.0.ffn.fc1"), "no matrix layers.0.ffn.fc1.weight"),
        (ts.make_state(subln=False, normalize_output=False), "post-norm or DeepNorm"),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongNetEncoder.from_state_dict(state, num_heads=4, attention=ts.attention())


@pytest.mark.parametrize(
    ("options", "error", "message"),
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
def test_invalid_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    sizes = {"embed_dim": ts.EMBED_DIM, "num_heads": 4, "ffn_dim": ts.FFN_DIM, "num_layers": 1}
    with pytest.raises(error, match=message):
        LongNetEncoder(**{**sizes, "attention": ts.attention(), **options})


X = ts.inputs("encoder", 5)
NO_SHARD = "x has 5 rows .* ring of 1 holds 9 of 9; pass the rank's part, ring.shard"


@pytest.mark.parametrize(
    ("kind", "x", "options", "error", "message"),
    [
        ("encoder", ts.inputs("decoder", 5), {}, TypeError, "the model has no embed_tokens"),
        ("encoder", ts.inputs("decoder", 5).bool(), {}, TypeError, "torch.bool"),
        ("encoder", X[0], {}, ValueError, r"x has shape \(5, 24\)"),
        ("encoder", X[..., :7], {}, ValueError, "embed_dim = 24"),
        ("encoder", X.float(), {}, TypeError, "float32"),
        ("encoder", X, {"seq_len": 9}, ValueError, NO_SHARD),
        ("decoder", ts.inputs("decoder", 129), {}, ValueError, "embed_positions has rows for 128 tokens"),
    ],
)
def test_invalid_inputs_are_refused(kind: str, x: Tensor, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ts.make(kind)(x, **options)


def check_one_that_refuses(ring: Ring) -> None:
    model, x = ts.make("encoder", ring=ring), ring.shard(ts.inputs("encoder", 20))
    with pytest.raises(ValueError if ring.rank == 1 else RingMismatchError, match="x has shape"):
        model(x[0] if ring.rank == 1 else x)


def test_the_other_rank_raises(pair: World) -> None:
    pair.run(on_ring, check_one_that_refuses)


def check_layers_in_another_order() -> None:
    """Call the attention of all layers, which have equal shapes. Then rank 1 calls them in reverse order."""
    ring = new_ring(ADAPTER, TWO, SHORT)
    layers, x = list(ts.make("encoder", ring=ring).layers), ring.shard(ts.inputs("encoder", 20))
    for layer in layers:
        layer.self_attn(x)
    with pytest.raises(RingMismatchError, match="order of calls"):
        [layer.self_attn(x) for layer in (layers[::-1] if ring.rank == 1 else layers)]


def test_layers_are_distinguished(pair: World) -> None:
    pair.run(check_layers_in_another_order)
