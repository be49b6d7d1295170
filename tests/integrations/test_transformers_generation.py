"""Text that Hugging Face models generate on a ring is what transformers generates on one device."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from native_ranks import assert_near, on_ring
from small_models import VOCABULARY, build, transformers
from torch import Tensor

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.integrations.transformers import generate, register, use_ring
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR, TWO
from ring_backends.testing.world import RanksFailedError, World

NEW = 12
CONFIGS: dict[str, Any] = {"llama": {"num_key_value_heads": 2}, "qwen3": {"num_key_value_heads": 2, "head_dim": 8}}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_p": 0.9, "temperature": 1.5},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "stopping": {"eos_token_id": 7, "pad_token_id": 0},
}
OPTIONS = {name: {"max_new_tokens": NEW, **options} for name, options in OPTIONS.items()}


def make_model(kind: str = "llama", attention: str = "ring_dilated") -> Any:
    # With larger differences between logits, rounding decides nothing.
    fields = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.5, **CONFIGS[kind]}
    return build(kind, attention=attention, **fields).double().eval()


def registered(ring: Ring, kind: str = "llama", pattern: Any = ((64,), (1,))) -> tuple[Any, Ring]:
    """A model whose attention is on this ring, and the ring."""
    register(native.RingDilatedAttention(*pattern, ring=ring))
    return make_model(kind), ring


def prompts(padded: bool = False) -> tuple[Tensor, Tensor | None]:
    input_ids = torch.randint(1, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    if not padded:
        return input_ids, None
    mask = torch.ones_like(input_ids)
    mask[1, :6] = 0
    return input_ids * mask, mask


def expected(kind: str = "llama", options: str = "greedy", padded: bool = False) -> Any:
    input_ids, mask = prompts(padded)
    mask = torch.ones_like(input_ids) if mask is None else mask
    model = make_model(kind, "sdpa")
    torch.manual_seed(3)
    return model.generate(input_ids, attention_mask=mask, **OPTIONS[options])


def generated(ring: Ring, kind: str, options: str, padded: bool) -> Any:
    model, _ = registered(ring, kind)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*past_key_values")  # newer releases call it cache
        return generate(model, ring, *prompts(padded), **OPTIONS[options])


QUICK = [("qwen3", "sampling", True)]
CASES = itertools.product(CONFIGS, OPTIONS, (False, True))


@pytest.mark.parametrize("case", matrix_but(*QUICK, of=CASES), ids=str)
def test_rings_of_one_two_and_four(world: World, case: tuple[str, str, bool]) -> None:
    """Cases are a model, options, and whether the second prompt has padding."""
    wanted = expected(*case)
    assert torch.equal(generated(Ring(), *case), wanted)
    for spec, layout in ((TWO, "contiguous"), (FOUR, "zigzag")):
        for found in world.run(on_ring, generated, *case, rings=spec, layout=layout):
            assert torch.equal(found, wanted)


def test_short_prompts_and_the_result_of_use_ring() -> None:
    """A prompt of one token, and a model whose forward takes whole batches."""
    wanted = make_model("llama", "sdpa").generate(torch.tensor([[5]]), max_new_tokens=NEW, do_sample=False)
    ring, model = Ring(), make_model("llama", "sdpa")
    use_ring(model, native.RingDilatedAttention([64], [1], ring=ring))
    assert torch.equal(generate(model, ring, torch.tensor([[5]]), max_new_tokens=NEW, do_sample=False), wanted)
    assert model(wanted, labels=wanted).loss.isfinite()


def test_a_dilated_pattern_generates_what_whole_calls_do() -> None:
    model, ring = registered(Ring(), pattern=([4, 64], [1, 3]))
    text = input_ids = prompts()[0]
    with torch.no_grad():
        for _ in range(NEW):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, ring, input_ids, max_new_tokens=NEW, do_sample=False), text)


STATIC = transformers.GenerationConfig(cache_implementation="static")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values is given: not supported by a ring"),
        ({"cache": transformers.DynamicCache()}, "cache is given: not supported by a ring"),
        ({"cache_implementation": "static"}, "cache_implementation is given"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size is given"),
        ({"use_cache": False}, "use_cache = False"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is given"),
        ({"guidance_scale": 0.0}, "guidance_scale is given"),
        ({"inputs_embeds": torch.zeros(2, 21, 32)}, "inputs_embeds is given: .* give input_ids"),
        ({"max_time": 5.0}, "max_time is given: .* the clocks of the ranks differ"),
        ({"generation_config": STATIC}, "cache_implementation is"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask is \[2, 3\]: expected \[2, 21\]"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(*registered(Ring()), prompts()[0], max_new_tokens=2, **options)


def test_a_configuration_without_cache() -> None:
    """A model that was trained often has use_cache=False."""
    model, ring = registered(Ring())
    model.generation_config.use_cache = False
    assert torch.equal(generate(model, ring, prompts()[0], **OPTIONS["greedy"]), expected())


def test_after_training_with_dropout() -> None:
    (model, ring), (input_ids, _) = registered(Ring()), prompts()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()(input_ids, use_cache=False)
    assert torch.equal(generate(model.eval(), ring, input_ids, **OPTIONS["greedy"]), expected())


def test_models_that_are_refused() -> None:
    (model, ring), (input_ids, _) = registered(Ring()), prompts()
    with pytest.raises(ValueError, match="attn_implementation = 'sdpa': expected a registered one"):
        generate(make_model(attention="sdpa"), ring, input_ids)
    with pytest.raises(ValueError, match="a contiguous ring of 1: expected that of the registered attention"):
        generate(model, Ring(), input_ids)
    with pytest.raises(ValueError, match=r"input_ids is torch.int64 \[21\]: expected int64"):
        generate(model, ring, input_ids[0])
    with pytest.raises(ValueError, match=r"input_ids is torch.float32 \[2, 21\]: expected int64"):
        generate(model, ring, input_ids.float())
    with pytest.raises(ValueError, match=r"model is in training mode: .* call model.eval\(\)"):
        generate(model.train(), ring, input_ids)


def continued(model: Any, ring: Ring | None, input_ids: Tensor, **options: Any) -> Any:
    """A text that is generated on a ring, or on one device without one."""
    options["do_sample"] = False
    return model.generate(input_ids, **options) if ring is None else generate(model, ring, input_ids, **options)


class Judge(transformers.LogitsProcessor):  # type: ignore[misc]
    """Avoids what a model says about the whole text: its logits, or the next token that it generates."""

    def __init__(self, model: Any, ring: Ring | None, way: str) -> None:
        self.model, self.ring, self.way = model, ring, way

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.way == "generate":
            text = continued(self.model, self.ring, input_ids, max_new_tokens=1)
            return scores.scatter_add(1, text[:, -1:], torch.full_like(scores[:, :1], -9.0))
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        whole = logits if self.ring is None else self.ring.unshard(logits, seq_len=input_ids.shape[1])
        return scores - 2 * whole[:, -1]


def judged(ring: Ring | None, way: str, own: bool) -> Tensor:
    """The scores of a text with a judge, which is the model itself (``own``) or another one on the same ring."""
    models = [make_model(kind, "sdpa") for kind in ("llama", "qwen3")]
    for model in models if ring is not None else ():
        use_ring(model, ring)
    judge = Judge(models[0 if own else 1], ring, way)
    options = {"logits_processor": [judge], "return_dict_in_generate": True, "output_scores": True}
    return torch.stack(continued(models[0], ring, prompts()[0], max_length=21 + NEW, **options).scores)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("way", matrix_but("logits", of=("logits", "generate")))
def test_a_judge_on_the_same_ring(pair: World, way: str, own: bool) -> None:
    """Calls without the caches of a generation compute what they compute outside of it."""
    wanted = judged(None, way, own)
    for found in [judged(Ring(), way, own), *pair.run(on_ring, judged, way, own)]:
        assert_near(found, wanted, 1e-4)


def with_classes_of_transformers(ring: Ring | None, difference: float = 0.0) -> Tensor:
    """A text with objects and functions of every kind, one of which reads a number that may differ between ranks."""
    table = torch.zeros(5000)
    table[2500] = difference * (0 if ring is None else ring.rank)
    options: dict[str, Any] = {
        "logits_processor": [
            transformers.RepetitionPenaltyLogitsProcessor(1.5),
            transformers.SuppressTokensLogitsProcessor([5, 9]),
            lambda input_ids, scores: scores + table[0],
        ],
        "stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(21 + NEW - 2)]),
        "prefix_allowed_tokens_fn": lambda batch, input_ids: range(1, VOCABULARY),
        "streamer": None if ring is None or ring.rank else Silent(),
    }
    model = make_model(attention="sdpa")
    if ring is not None:
        use_ring(model, ring)
    return continued(model, ring, prompts()[0], max_new_tokens=NEW, num_beams=1, **options)


class Silent(transformers.generation.BaseStreamer):  # type: ignore[misc]
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def test_processors_and_criteria(pair: World) -> None:
    wanted = with_classes_of_transformers(None)
    assert wanted.shape[1] == 21 + NEW - 2
    for found in pair.run(on_ring, with_classes_of_transformers):
        assert torch.equal(found, wanted)
    with pytest.raises(
        RanksFailedError, match=r"the ranks differ in logits_processor\[2\].table \(rank 0: torch.float32"
    ):
        pair.run(on_ring, with_classes_of_transformers, 1.0)


def test_a_model_within_another() -> None:
    (model, ring), (input_ids, _) = registered(Ring()), prompts()
    other = make_model("qwen3")
    model.model.layers[0].register_forward_hook(lambda *_: other(input_ids, use_cache=False))
    with pytest.raises(ValueError, match="Qwen3Attention is of another model than the one that generates"):
        generate(model, ring, input_ids, max_new_tokens=2)


def generate_differently(ring: Ring, what: str) -> None:
    (model, _), (input_ids, _) = registered(ring), prompts()
    if what == "prompts":
        input_ids[0, 0] = 1 + ring.rank
    torch.manual_seed(ring.rank)
    number = 50 + ring.rank if what == "options" else 50
    generate(model, ring, input_ids, max_new_tokens=number, do_sample=True, temperature=5.0)


BEAMS = {"max_new_tokens": 4, "num_beams": 3}


def beams(ring: Ring) -> Any:
    """Beams from a prompt of one token, of which rank 1 holds no row."""
    return generate(*registered(ring), torch.tensor([[5]]), **BEAMS)


def test_beams_of_a_short_prompt(pair: World) -> None:
    wanted = make_model(attention="sdpa").generate(torch.tensor([[5]]), **BEAMS)
    for found in pair.run(on_ring, beams):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("prompts", r"the ranks differ in input_ids \(rank 0"),
        ("seeds", "the ranks differ in the new tokens"),
        ("options", r"the ranks differ in max_new_tokens \(rank 0: 50, rank 1: 51"),
    ],
)
def test_ranks_that_differ(pair: World, what: str, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message) as raised:
        pair.run(on_ring, generate_differently, what)
    assert [outcome.error_type for outcome in raised.value.outcomes] == ["RingMismatchError"] * 2
