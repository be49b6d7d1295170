"""Each layer of a model on a ring computes its own attention: windows, chunks, soft caps, sinks and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_ranks import assert_near, on_ring
from small_models import VOCABULARY, build, transformers
from tiny_models import TinyModel, models
from torch import Tensor
from transformers_checks import PRELOAD as PRELOAD
from transformers_checks import Check, Computed, Verdict, compare, compute, find_configuration, further_check

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.integrations.transformers import describe, generate, register, shard_inputs, use_ring
from ring_backends.integrations.transformers.layers import read_mask
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.rings import LAYOUTS
from ring_backends.testing.world import World

TOLERANCE = 1e-5
UNLISTED = TinyModel("Mistral4ForCausalLM", "mistral4", "causal")
"""A class that transformers lists under no kind of language model."""

MODELS = {model.name: model for model in (*models("causal"), *models("masked"), UNLISTED)}
QUICK = ("GptOssForCausalLM", "Gemma2ForCausalLM", "Llama4ForCausalLM")
CLASSES = (
    *QUICK,
    *(f"{name}ForCausalLM" for name in ("Gemma3", "Mistral", "Qwen2", "Phi3", "Cohere2", "DeepseekV3")),
    # Two attentions in a layer, layers that run several times, layers that do not run, and positions after padding.
    *(f"{name}ForCausalLM" for name in ("DiffLlama", "HrmText", "Mllama", "OPT")),
    *("ModernBertForMaskedLM", UNLISTED.name),
    # Layers that keep the arguments of the model from their attention, and decoders that number their rows.
    *(f"{name}ForCausalLM" for name in ("StableLm", "Nemotron", "Bart", "Marian")),
)
PADDED = ("RobertaForMaskedLM", "OPTForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM")
CHECKS = {
    "padded": Check(seq_len=61, layout="zigzag"),
    "packed": Check(padding="packed"),
    "generate": Check(seq_len=32, padding="left", way="generate"),
}


@pytest.fixture(params=matrix_but(2, of=(2, 3)))
def ranks(request: pytest.FixtureRequest, worlds: Callable[[int], World]) -> World:
    return worlds(request.param)


def configured(ranks: World, name: str) -> TinyModel:
    (found,) = ranks.run(find_configuration, MODELS[name], ranks=[0])[:1]
    assert not isinstance(found, Verdict), found
    return found[0]


@pytest.mark.parametrize("name", matrix_but(QUICK[0], of=CLASSES))
def test_rings_of_two_and_three_equal_one_process(ranks: World, name: str) -> None:
    """Logits and gradients, padded and packed, and the logits of new tokens."""
    model = configured(ranks, name)
    for way, check in CHECKS.items():
        if way != "generate" or model.kind == "causal":
            verdict = further_check(ranks, model, check, TOLERANCE)
            has_chunks = name == "Llama4ForCausalLM" and way == "generate"
            assert verdict.status == ("REFUSED" if has_chunks else "EQUAL"), (way, verdict)


@pytest.mark.parametrize("name", matrix_but("OPTForCausalLM", of=PADDED))
@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
def test_padding_on_the_left(ranks: World, name: str, layout: Any) -> None:
    """Also of models that count positions from the first token after the padding, or have values of another width."""
    verdict = further_check(ranks, configured(ranks, name), Check(layout=layout, padding="left"), TOLERANCE)
    assert verdict.status == "EQUAL", verdict


def gradients(ring: Ring, kind: str, use_reentrant: bool) -> dict[str, Tensor]:
    model = make_model(kind).train()
    use_ring(model, ring)
    if ring.size > 1:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.matrix(reason="few models are built like these")
@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_the_arguments(pair: World, kind: str, use_reentrant: bool) -> None:
    by_rank = pair.run(on_ring, gradients, kind, use_reentrant)
    for name, expected in gradients(Ring(), kind, use_reentrant).items():
        assert_near(sum(of_rank[name] for of_rank in by_rank) / 2, expected)


N, WINDOW = 45, 9
TOKENS = torch.randint(1, VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1))
CHUNKED = {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8, "head_dim": 8}


def make_model(kind: str = "mistral", **fields: Any) -> Any:
    return build(kind, attention="eager", num_key_value_heads=2, **fields).double().eval()


def described(ring: Ring) -> str:
    options = {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 16}
    model = make_model("gemma2", **options)
    with pytest.raises(ValueError, match="model = Gemma2ForCausalLM: no layer of it has been called on a ring"):
        describe(model)
    use_ring(model, ring)
    return describe(model)


def test_what_each_layer_computes_in_words(pair: World) -> None:
    expected = (
        "model.layers.0.self_attn: causal, window of 9 tokens, scale 0.25, soft cap 2\n"
        "model.layers.1.self_attn: causal, full attention, scale 0.25, soft cap 2"
    )
    assert [described(Ring()), *pair.run(on_ring, described)] == [expected] * 3


def with_a_pattern(ring: Ring, segment: int) -> Tensor:
    """The logits of a model whose second layer has full attention, with segments in its place."""
    model = make_model("gemma2", sliding_window=WINDOW, head_dim=8)
    use_ring(model, native.RingDilatedAttention([segment], [1], ring=ring))
    assert f"replaced by DilatedPattern(segment_lengths=({segment},)" in describe(model)
    return ring.unshard(model(input_ids=TOKENS).logits.detach(), seq_len=N)


def test_a_pattern_takes_the_place_of_full_attention_alone(pair: World) -> None:
    model = make_model("gemma2", sliding_window=WINDOW, head_dim=8)
    own = model(input_ids=TOKENS).logits.detach()
    segmented = with_a_pattern(Ring(), 15)
    assert not torch.allclose(segmented, own)
    for segment, expected in ((N, own), (15, segmented)):
        for logits in (with_a_pattern(Ring(), segment), *pair.run(on_ring, with_a_pattern, segment)):
            assert_near(logits, expected)


@THOROUGH
def test_a_compiled_model_with_windows() -> None:
    expected = make_model(sliding_window=WINDOW)(input_ids=TOKENS).logits
    register(Ring())
    model = make_model(sliding_window=WINDOW)
    model.set_attn_implementation("ring_dilated")
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        assert_near(compiled(**shard_inputs(Ring(), input_ids=TOKENS)).logits, expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_chunks_begin_after_padding_on_the_left(sharded: bool) -> None:
    """Also in a direct call on a ring of one."""
    mask = (torch.arange(N) >= torch.tensor([[0], [5]])).long()
    model = make_model("llama4_text", **CHUNKED)
    inputs = {"input_ids": TOKENS, "attention_mask": mask}
    expected = model(**inputs).logits
    register(Ring())
    model.set_attn_implementation("ring_dilated")
    found = model(**(shard_inputs(Ring(), **inputs) if sharded else inputs)).logits
    assert_near(found[mask.bool()], expected[mask.bool()])


def test_a_mask_that_contradicts_is_causal() -> None:
    """The masks of chunks in transformers are causal, whatever the configuration says."""
    model = make_model("llama4_text", is_causal=False, **CHUNKED)
    with pytest.raises(ValueError, match=r"is_causal = False: the model's mask is causal, and .* leave it out, or use"):
        use_ring(model, Ring())


def generated_in_chunks(ring: Ring | None) -> Tensor:
    """The logits of new tokens of texts without padding; without a ring, those of transformers."""
    model = make_model("llama4_text", **CHUNKED)
    arguments: dict[str, Any] = {"input_ids": TOKENS, "attention_mask": torch.ones(2, N, dtype=torch.int64)}
    arguments |= {"max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    if ring is None:
        return torch.stack(model.generate(**arguments).logits)
    use_ring(model, ring)
    return torch.stack(generate(model, ring, **arguments).logits)


def test_chunks_in_generation(pair: World) -> None:
    expected = generated_in_chunks(None)
    for logits in (generated_in_chunks(Ring()), *pair.run(on_ring, generated_in_chunks)):
        assert_near(logits, expected)


def bidirectional(ring: Ring | None) -> Computed:
    """Gemma 3 as EmbeddingGemma configures it: all layers are bidirectional, and a window is W // 2 + 1 tokens."""
    sizes = {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    model = make_model("gemma3_text", use_bidirectional_attention=True, **sizes)
    if ring is not None:
        use_ring(model, ring)
        assert [line.partition(": ")[2] for line in describe(model).splitlines()] == [
            "bidirectional, window of 9 tokens, scale 0.0625",
            "bidirectional, full attention, scale 0.0625",
        ]
    mask = (torch.arange(N) < torch.tensor([[N], [N - 7]])).long()
    labels = TOKENS.masked_fill(mask == 0, -100)
    return compute(model, model(input_ids=TOKENS, attention_mask=mask, labels=labels), mask.bool(), ring)


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
def test_a_bidirectional_gemma(pair: World, layout: Any) -> None:
    wanted = bidirectional(None)
    rows = torch.ones(2, N, dtype=torch.bool)
    rows[1, N - 7 :] = False
    for found in ([bidirectional(Ring())], pair.run(on_ring, bidirectional, layout=layout)):
        assert [x.loss for x in found] == [pytest.approx(wanted.loss, abs=1e-5)] * len(found)  # transformers' is fp32
        verdict = compare(found, replace(wanted, loss=None), rows, 1e-7)  # its norms are fp32
        assert verdict.status == "EQUAL", verdict


masks = transformers.masking_utils
window_of_gemma = transformers.models.gemma3.modeling_gemma3._bidirectional_window_overlay
causal = masks.causal_mask_function


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal, (True, None, None)),
        (masks.bidirectional_mask_function, (False, None, None)),
        (masks.sliding_window_causal_mask_function(5), (True, 5, None)),
        (masks.sliding_window_bidirectional_mask_function(5), (False, 6, None)),
        (masks.chunked_causal_mask_function(5, torch.zeros(1)), (True, None, 5)),
        (masks.or_masks(masks.sliding_window_causal_mask_function(5), window_of_gemma(5)), (False, 5, None)),
        (masks.or_masks(causal, lambda *args: torch.tensor(True, dtype=torch.bool)), (False, None, None)),
        (masks.or_masks(masks.sliding_window_causal_mask_function(4), causal), (True, None, None)),
        (masks.or_masks(masks.sliding_window_causal_mask_function(5), window_of_gemma(4)), None),  # 4 before, 3 after
        (masks.or_masks(masks.chunked_causal_mask_function(5, torch.zeros(1)), window_of_gemma(4)), None),
        (masks.sliding_window_overlay(5), None),  # without a limit on later keys
        (masks.or_masks(causal, lambda batch, head, q_idx, kv_idx: q_idx // 4 == kv_idx // 4), None),
        (masks.and_masks(causal, lambda batch, head, q_idx, kv_idx: kv_idx % 2 == 0), None),
        (masks.packed_sequence_mask_function(torch.zeros(1, N, dtype=torch.int64)), None),
    ],
)
def test_masks(mask: Any, expected: tuple[bool, int | None, int | None] | None) -> None:
    """A mask is recognised, with the pairs that it shows, or refused."""
    found = read_mask(mask, None)
    if expected is None:
        assert found.refusal is not None
        return
    assert (found.is_causal, found.window, found.chunk) == expected
    assert found.refusal is None
    queries, keys = torch.arange(N)[:, None], torch.arange(N)
    seen = (keys <= queries) | (not found.is_causal)
    if found.window is not None:
        seen &= (queries - keys).abs() < found.window
    if found.chunk is not None:
        seen &= queries // found.chunk == keys // found.chunk
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(torch.broadcast_to(mask(zero, zero, queries, keys), (N, N)), seen)
