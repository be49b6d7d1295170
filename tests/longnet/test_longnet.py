"""LongNet's encoder and decoder equal those of torchscale, on one device and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchscale_reference as ts
from gigapath_reference import LongNetViT
from native_ranks import assert_near, on_ring
from torch import Tensor
from torchscale_modules import reference_attention

from ring_backends import DilatedPattern, Ring, dilated_attention
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.longnet import LongNetDecoder, LongNetEncoder
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.world import World


@pytest.mark.parametrize("n", [1, 5, 8, 37, 64, 70])
@pytest.mark.parametrize("heads", ts.HEADS)
@pytest.mark.parametrize("kind", ts.MODELS)
def test_equals_torchscale(kind: str, heads: int, n: int) -> None:
    assert_near(ts.make(kind, heads)(ts.inputs(kind, n)).detach(), ts.reference(kind, heads, n))


@pytest.mark.parametrize(
    ("state_options", "model_options", "reference_options"),
    [
        ({"subln": False}, {}, {}),
        ({"normalize_output": False}, {}, {}),
        ({"tokens": True, "tied": True}, {"scale_embedding": True}, {"no_scale_embedding": False}),
        ({}, {"activation": "relu", "layer_norm_eps": 0.1}, {"activation_fn": "relu", "eps": 0.1}),
    ],
    ids=["without sub-layer norm", "as LongViT", "tied and scaled", "relu and eps"],
)
def test_options(state_options: Any, model_options: Any, reference_options: Any) -> None:
    state = ts.make_state(**state_options)
    x = ts.inputs("decoder" if "tokens" in state_options else "encoder", 37)
    model = LongNetEncoder.from_state_dict(state, num_heads=4, attention=ts.attention(), **model_options)
    right = ts.reference_model(state, x, 4, ts.BRANCHES, False, **reference_options)
    got, states = model(x, return_hidden_states=True)
    assert_near([*states, got], right)
    if "tokens" in state_options:
        assert model.output_projection.weight is model.embed_tokens.weight
        features = states[-1] if model.layer_norm is None else model.layer_norm(states[-1])
        assert_near(model(x, features_only=True), features)


def reference_gradients(kind: str, n: int) -> dict[str, Tensor]:
    state = {name: value.requires_grad_() for name, value in ts.make_state(tokens=kind == "decoder").items()}
    out = ts.reference_model(state, ts.inputs(kind, n), 3, ts.BRANCHES, kind == "decoder", detach=False)[-1]
    return dict(zip(state, torch.autograd.grad(out, list(state.values()), cotangent(out)), strict=True))


def cotangent(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def run(ring: Ring, kind: str, n: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole output, and this rank's contribution to every gradient."""
    model = ts.make(kind, 3, ring)
    out = model(ring.shard(ts.inputs(kind, n)), seq_len=n)
    whole = ring.unshard(out.detach(), seq_len=n)
    out.backward(ring.shard(cotangent(whole)))
    return whole, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("n", matrix_but(37, of=(5, 37, 70)))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ts.MODELS)
def test_two_ranks_equal_torchscale(pair: World, kind: str, layout: str, n: int) -> None:
    """Gradients are those of torchscale with gradients of the mixing weights, also on one device."""
    right, gradients = ts.reference(kind, 3, n), reference_gradients(kind, n)
    for by_rank in (pair.run(on_ring, run, kind, n, layout=layout), [run(Ring(), kind, n)]):
        for whole, _ in by_rank:
            assert_near(whole, right)
        for name, gradient in gradients.items():
            assert_near(sum(shares[name] for _, shares in by_rank), gradient, 1e-9)


def attend(query: Tensor, key: Tensor, value: Tensor, branches: Any, is_causal: bool) -> Tensor:
    return dilated_attention(query, key, value, *branches, is_causal=is_causal, offset="block", padding="zeros")


def random_heads(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, n, 4, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def test_a_branch_with_an_lse_of_zero_is_kept() -> None:
    """The first query of a causal segment sees one key. If its score is 0, torchscale drops the branch."""
    query, key, value = random_heads(32)
    query = torch.zeros_like(query)
    got = attend(query, key, value, ts.BRANCHES, True)
    as_published = reference_attention(query, key, value, ts.BRANCHES, True)
    assert_near(got, reference_attention(query, key, value, ts.BRANCHES, True, zero_is_absent=False))
    differs = (got - as_published).abs().amax((0, 2, 3)) > 1e-9
    # These are the first r rows of each segment. Each is the first row that some head covers.
    assert differs.nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 16, 17, 24]


def test_an_uncovered_position_has_output_zero() -> None:
    query, key, value = random_heads(21)
    got = attend(query, key, value, ((8,), (4,)), False)
    assert_near(got, reference_attention(query, key, value, ((8,), (4,)), False))
    assert (got[:, 1::4, 0] == 0).all()


def test_zero_embeddings_as_in_torchscale_differ_from_a_mask() -> None:
    model, x = ts.make("encoder"), ts.inputs("encoder", 37)
    pads = torch.zeros(2, 37, dtype=torch.bool)
    pads[1, 30:] = True
    zeroed = x.masked_fill(pads[..., None], 0)
    right = ts.reference_model(ts.make_state(), zeroed, 4, ts.BRANCHES, False)[-1]
    assert_near(model(zeroed).detach(), right)
    masked = model(x, key_padding_mask=pads)
    assert_near(masked[~pads], model(zeroed, key_padding_mask=pads)[~pads])
    assert (masked[1, :30] - right[1, :30]).abs().max() > 1e-3


def test_a_pattern_that_torchscale_misplaces_is_refused() -> None:
    w, r, n = 10, 4, 20
    query, key, value = random_heads(n)
    options: Any = {"branches": ((w,), (r,)), "is_causal": False}
    joined = reference_attention(query, key, value, **options)
    second = reference_attention(*(x[:, w:] for x in (query, key, value)), **options)
    assert_near(joined[:, w + 2 :], second[:, : w - 2])
    message = r"pads every segment to 12 rows .* the 2 padded rows.*a sequence of at most 10 tokens"
    with pytest.raises(ValueError, match=message):
        attend(query, key, value, ((w,), (r,)), False)
    assert_near(attend(query[:, :w], key[:, :w], value[:, :w], ((w,), (r,)), False), joined[:, :w])


def test_the_gigapath_patterns_that_the_error_names() -> None:
    rates = (1, 2, 4, 8, 16)
    lengths = {size: eval(LongNetViT.get_optimal_segment_length(None, size)) for size in (262144, 250000)}
    misplaced = {size: [(w, r) for w, r in zip(found, rates, strict=True) if w % r] for size, found in lengths.items()}
    assert misplaced == {262144: [(185363, 8)], 250000: [(23170, 4), (110217, 8)]}
    default = DilatedPattern.torchscale(lengths[262144], rates)
    default.check(seq_len=185363, num_heads=16)
    with pytest.raises(ValueError, match="segment length 185363 and dilation rate 8 on 185364 tokens"):
        default.check(seq_len=185364, num_heads=16)


def decoded(ring: Ring) -> Tensor:
    """The logits of the last 5 tokens of 21, with caches."""
    model = decoder(ring)
    caches = model.new_caches(21)
    model(ring.shard(DECODED[:, :16]), seq_len=16, caches=caches)
    return torch.cat([model(DECODED[:, at : at + 1], caches=caches) for at in range(16, 21)], 1).detach()


DECODED = torch.randint(ts.VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(5))


def decoder(ring: Ring) -> LongNetDecoder:
    torch.manual_seed(0)
    attention = NativeRingDilatedAttention([6, 64], [2, 3], ring=ring)
    sizes = {"vocab_size": ts.VOCABULARY, "output_size": ts.VOCABULARY, "num_positions": 40}
    return LongNetDecoder(ts.EMBED_DIM, 4, ts.FFN_DIM, ts.LAYERS, attention, **sizes).double().eval()


def test_a_decoder_with_caches(pair: World) -> None:
    wanted = decoder(Ring())(DECODED)[:, 16:].detach()
    assert_near(decoded(Ring()), wanted)
    for layout in ("contiguous", "zigzag"):
        for found in pair.run(on_ring, decoded, layout=layout):
            assert_near(found, wanted)


def test_caches_that_do_not_fit() -> None:
    model = decoder(Ring())
    with pytest.raises(ValueError, match="caches has 1 caches and the model 2 layers"):
        model(DECODED, caches=model.new_caches()[:1])
    encoder = LongNetEncoder(ts.EMBED_DIM, 4, ts.FFN_DIM, 1, NativeRingDilatedAttention([6], [1]))
    with pytest.raises(ValueError, match="caches is given: LongNetEncoder is not causal"):
        encoder(torch.zeros(1, 4, ts.EMBED_DIM), caches=model.new_caches()[:1])
