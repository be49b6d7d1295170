"""Hugging Face models on a ring equal one rank, and with a plain pattern their own attention."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

import transformers

from ring_backends import Ring, RingMismatchError
from ring_backends.adapters import native
from ring_backends.integrations.transformers import IGNORED, register, shard_inputs
from ring_backends.testing.failing_calls import SHORT, Ended, ending
from ring_backends.testing.rings import TWO, new_ring, ring_here
from ring_backends.testing.world import World

N, VOCABULARY = 45, 23
DILATED = ((9, 45), (1, 2))
PLAIN = ((64,), (1,))
KINDS = ("llama", "bert")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def make_model(kind: str, attn_implementation: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    else:
        config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=attn_implementation)
    return model.double()


def make_inputs(padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs for the whole sequence, and the gradient of the logits."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(1, VOCABULARY, (2, N), generator=generator)}
    grad = torch.randn(2, N, VOCABULARY, generator=generator, dtype=torch.float64)
    if padded:
        inputs["attention_mask"] = torch.ones(2, N, dtype=torch.int64)
        inputs["attention_mask"][1, 31:] = 0
        grad[1, 31:] = 0
    return inputs, grad


def run(kind: str, ring: Ring, pattern: Any, padded: bool) -> tuple[Tensor, list[Tensor]]:
    """The logits of the whole sequence, and this rank's contribution to every gradient."""
    register(native.RingDilatedAttention(*pattern, ring=ring))
    model = make_model(kind, "ring_dilated")
    inputs, grad = make_inputs(padded)
    logits = model(**shard_inputs(ring, **inputs)).logits
    return ring.unshard(logits.detach(), seq_len=N), gradients(model, logits, ring.shard(grad))


def gradients(model: Any, logits: Tensor, grad: Tensor) -> list[Tensor]:
    got = torch.autograd.grad(logits, list(model.parameters()), grad, allow_unused=True)
    return [torch.zeros(()) if one is None else one for one in got]


def run_here(kind: str, layout: Any, pattern: Any, padded: bool) -> tuple[Tensor, list[Tensor]]:
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    return run(kind, ring.with_layout(layout), pattern, padded)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_rank(pair: World, kind: str, layout: str, padded: bool) -> None:
    wanted_logits, wanted = run(kind, Ring(), DILATED, padded)
    by_rank = pair.run(run_here, kind, layout, DILATED, padded)
    for logits, _ in by_rank:
        torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-10)
    for of_rank_0, of_rank_1, right in zip(by_rank[0][1], by_rank[1][1], wanted, strict=True):
        torch.testing.assert_close(of_rank_0 + of_rank_1, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_pattern_gives_plain_attention(kind: str, padded: bool) -> None:
    got_logits, got = run(kind, Ring(), PLAIN, padded)
    model = make_model(kind, "sdpa")
    inputs, grad = make_inputs(padded)
    logits = model(**inputs).logits
    seen = inputs.get("attention_mask", torch.ones(2, N)).bool()
    torch.testing.assert_close(got_logits[seen], logits.detach()[seen], rtol=0, atol=1e-10)
    for one, right in zip(got, gradients(model, logits, grad), strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-9)


LENGTHS = (11, 1, 20, 13)
"""Packed documents; N in all."""


def packed_batch(given: str) -> dict[str, Any]:
    """What DataCollatorWithFlattening makes of the documents."""
    tokens = make_inputs(padded=False)[0]["input_ids"][0].split(LENGTHS)
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=given != "position_ids")
    batch = dict(collator([{"input_ids": document.tolist()} for document in tokens]))
    del batch["labels"]
    if given == "cu_seq_lens":
        del batch["position_ids"]
    return batch


def run_packed(kind: str, ring: Ring, given: str) -> tuple[Tensor, list[Tensor]]:
    register(native.RingDilatedAttention(*PLAIN, ring=ring))
    model = make_model(kind, "ring_dilated")
    logits = model(**shard_inputs(ring, **packed_batch(given))).logits
    grad = ring.shard(make_inputs(padded=False)[1][:1])
    return ring.unshard(logits.detach(), seq_len=N), gradients(model, logits, grad)


def run_packed_here(kind: str, layout: Any, given: str) -> tuple[Tensor, list[Tensor]]:
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    return run_packed(kind, ring.with_layout(layout), given)


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_single_ones(pair: World, kind: str, given: str) -> None:
    """On one rank and on two in both layouts, each document has the logits of a call of its own."""
    model = make_model(kind, "sdpa")
    tokens, grad = make_inputs(padded=False)
    documents = tokens["input_ids"][:1].split(LENGTHS, 1)
    logits = torch.cat([model(input_ids=document).logits for document in documents], 1)
    wanted = gradients(model, logits, grad[:1])
    runs = [[run_packed(kind, Ring(), given)]]
    runs += [pair.run(run_packed_here, kind, layout, given) for layout in ("contiguous", "zigzag")]
    for by_rank in runs:
        for got, _ in by_rank:
            torch.testing.assert_close(got, logits.detach(), rtol=0, atol=1e-10)
        for right, *of_ranks in zip(wanted, *(grads for _, grads in by_rank), strict=True):
            torch.testing.assert_close(torch.stack(of_ranks).sum(0), right, rtol=0, atol=1e-9)


def classified(ring: Ring) -> tuple[Tensor, list[Tensor]]:
    """The logits of a sequence classifier, and this rank's contribution to every gradient."""
    register(native.RingDilatedAttention(*PLAIN, ring=ring))
    model = make_classifier("ring_dilated")
    inputs = shard_inputs(ring, **make_inputs(padded=True)[0])
    rows = model.model(**inputs).last_hidden_state
    logits = model.score(ring.pool(rows, inputs["attention_mask"], "last", seq_len=N))
    return logits.detach(), gradients(model, logits, CLASSIFIED_GRAD / ring.size)


CLASSIFIED_GRAD = torch.tensor([[1.0, -0.5, 0.25], [-1.0, 2.0, 0.5]], dtype=torch.float64)


def make_classifier(attn_implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, num_labels=3)
    maker = transformers.AutoModelForSequenceClassification
    return maker.from_config(config, attn_implementation=attn_implementation).double()


def classified_here(layout: Any) -> tuple[Tensor, list[Tensor]]:
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    return classified(ring.with_layout(layout))


def test_a_sequence_classifier_on_a_ring(pair: World) -> None:
    model = make_classifier("sdpa")
    inputs, _ = make_inputs(padded=True)
    inputs["input_ids"][1, 31:] = 0  # the model finds the last token by its pad_token_id
    wanted_logits = model(**inputs).logits
    wanted = gradients(model, wanted_logits, CLASSIFIED_GRAD)
    for by_rank in [[classified(Ring())], *(pair.run(classified_here, layout) for layout in ("contiguous", "zigzag"))]:
        for logits, _ in by_rank:
            torch.testing.assert_close(logits, wanted_logits.detach(), rtol=0, atol=1e-10)
        for right, *of_ranks in zip(wanted, *(grads for _, grads in by_rank), strict=True):
            torch.testing.assert_close(torch.stack(of_ranks).sum(0), right, rtol=0, atol=1e-9)


def losses_here(next_token: bool) -> tuple[float, int]:
    """The summed loss of this rank's labels, and their number."""
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    return losses(ring, next_token)


def losses(ring: Ring, next_token: bool) -> tuple[float, int]:
    register(native.RingDilatedAttention(*DILATED, ring=ring))
    model = make_model("llama" if next_token else "bert", "ring_dilated")
    inputs, _ = make_inputs(padded=False)
    labels = inputs["input_ids"].masked_fill(torch.arange(N) % 3 == 0, IGNORED)
    local = shard_inputs(ring, **inputs, labels=labels, next_token_labels=next_token)
    count = int((local["labels"] != IGNORED).sum())
    return model(**local).loss.item() * count, count


@pytest.mark.parametrize("next_token", [True, False], ids=["causal", "masked"])
def test_the_loss_of_all_labels(pair: World, next_token: bool) -> None:
    """No label is lost or counted twice at the boundary of two shards."""
    inputs, _ = make_inputs(padded=False)
    labels = inputs["input_ids"].masked_fill(torch.arange(N) % 3 == 0, IGNORED)
    wanted_count = int((labels[:, 1:] if next_token else labels).ne(IGNORED).sum())
    alone, count = losses(Ring(), next_token)
    assert count == wanted_count
    by_rank = pair.run(losses_here, next_token)
    assert sum(number for _, number in by_rank) == wanted_count
    assert sum(loss for loss, _ in by_rank) == pytest.approx(alone, rel=1e-6)  # transformers computes losses in fp32


def call(model: Any, **changes: Any) -> None:
    inputs, _ = make_inputs(padded=False)
    model(**{**shard_inputs(Ring(), **inputs), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 16}, "sliding_window is given: a window is not a dilated pattern"),
        ({"softcap": 30.0}, "softcap is given"),
        ({"output_attentions": True}, "output_attentions = True"),
        ({"attention_mask": torch.zeros(2, 1, N, N)}, r"attention_mask is \[2, 1, 45, 45\]"),
        ({"position_ids": torch.arange(N).flip(0)[None], "attention_mask": torch.ones(2, N)}, "position_ids = "),
        ({"position_ids": torch.arange(N)[None] % 20}, "in packed sequences or .* call the model with shard_inputs"),
        ({"use_cache": True, "past_key_values": ...}, "past_key_values is given: key/value caches"),
    ],
    ids=["sliding window", "soft-capping", "weights", "4-D mask", "local positions", "packed", "cache"],
)
def test_unsupported_options_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    register(native.RingDilatedAttention(*DILATED))
    model = make_model("llama", "ring_dilated")
    if "past_key_values" in changes:
        changes = {**changes, "past_key_values": transformers.DynamicCache(config=model.config)}
    with pytest.raises(ValueError, match=message):
        call(model, **changes)


def call_here(changes: dict[str, Any], config: dict[str, Any]) -> tuple[Ended, Ended]:
    """Make a call with changed arguments or configuration, then a valid call."""
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    register(native.RingDilatedAttention(*DILATED, ring=ring))
    model = make_model("llama", "ring_dilated")
    right, (inputs, _) = dict(vars(model.config)), make_inputs(padded=False)
    local = shard_inputs(ring, **inputs)
    for name, value in config.items():
        setattr(model.config, name, value)
    arguments = {name: value for name, value in {**local, **changes}.items() if value is not None}
    first = ending(lambda: model(**arguments))
    for name in config:
        setattr(model.config, name, right.get(name))
    return first, ending(lambda: model(**local))


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"seq_len": None, "position_ids": None}, {}, "seq_len is not given"),
        ({}, {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({}, {"layer_types": ["conv", "full_attention"]}, "layer_types has conv"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ],
    ids=["no shard_inputs", "encoder-decoder", "convolutions", "angles by length"],
)
def test_models_that_a_ring_cannot_run_are_refused_by_name(
    pair: World, changes: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    for first, right in pair.run(call_here, changes, config):
        assert first.is_a(ValueError), first
        assert message in first.message, first
        assert right.error == "no error", right


def layers_in_another_order() -> Ended:
    """Make two calls. In the second, rank 1 has the layers in another order."""
    ring = new_ring("ring_backends.adapters.native", TWO, timeout=timedelta(seconds=SHORT))
    assert ring is not None
    register(native.RingDilatedAttention(*DILATED, ring=ring))
    model, (whole, _) = make_model("llama", "ring_dilated"), make_inputs(padded=False)
    local = shard_inputs(ring, **whole)
    model(**local)
    if ring.rank == 1:
        model.model.layers = model.model.layers[::-1]
    return ending(lambda: model(**local))


def test_layers_are_distinguished(pair: World) -> None:
    for ended in pair.run(layers_in_another_order):
        assert ended.is_a(RingMismatchError), ended
        assert "order of calls" in ended.message, ended


def test_first_position_after_padding() -> None:
    register(native.RingDilatedAttention(*PLAIN))
    inputs = {"input_ids": make_inputs(padded=False)[0]["input_ids"].clamp(min=2)}  # 1 is padding
    models = []
    for implementation in ("ring_dilated", "sdpa"):
        torch.manual_seed(0)
        config = transformers.RobertaConfig(**{**SIZES, "pad_token_id": 1}, hidden_dropout_prob=0.0)
        model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=implementation)
        models.append(model.double().eval())
    on_ring, alone = models
    got = on_ring(**shard_inputs(Ring(), **inputs, first_position=2)).logits
    right = alone(input_ids=inputs["input_ids"], position_ids=torch.arange(2, N + 2)[None]).logits
    torch.testing.assert_close(got, right, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"first_position=2"):
        on_ring(**shard_inputs(Ring(), **inputs))


def test_models_without_the_attention_interface_fail() -> None:
    register(native.RingDilatedAttention(*PLAIN))
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ring_dilated")
    with pytest.raises((TypeError, AttributeError)):
        model(torch.ones(1, 5, dtype=torch.int64))


def test_generation_is_refused_by_name() -> None:
    register(native.RingDilatedAttention(*DILATED))
    model = make_model("llama", "ring_dilated")
    inputs, _ = make_inputs(padded=False)
    with pytest.raises(ValueError, match="key/value caches"):
        model.generate(**inputs, max_new_tokens=3, do_sample=False, use_cache=True)


def with_dropout(kind: str, ring: Ring) -> tuple[Tensor, ...]:
    """The logits of the whole sequence in training mode with two seeds and again the first one, and after eval()."""
    register(native.RingDilatedAttention(*DILATED, ring=ring).eval())
    model = make_model(kind, "ring_dilated")
    for module in model.modules():  # both read it when they were made
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
        if kind == "bert" and type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.3
    local = shard_inputs(ring, **make_inputs(padded=False)[0])
    found = []
    for seed, is_training in ((1, True), (2, True), (1, True), (1, False)):
        torch.manual_seed(seed)
        found.append(ring.unshard(model.train(is_training)(**local).logits.detach(), seq_len=N))
    return tuple(found)


def with_dropout_here(kind: str) -> tuple[Tensor, ...]:
    ring = ring_here("ring_backends.adapters.native", TWO)
    assert ring is not None
    return with_dropout(kind, ring.with_layout("zigzag"))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_follows_train_and_eval(pair: World, kind: str) -> None:
    alone = with_dropout(kind, Ring())
    first, other_seed, again, evaluated = alone
    assert torch.equal(first, again)
    assert not torch.allclose(first, other_seed)
    register(native.RingDilatedAttention(*DILATED))
    without = make_model(kind, "ring_dilated").eval()(**shard_inputs(Ring(), **make_inputs(padded=False)[0])).logits
    torch.testing.assert_close(evaluated, without, rtol=0, atol=1e-10)
    for by_rank in pair.run(with_dropout_here, kind):
        for got, wanted in zip(by_rank, alone, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_a_scale_that_differs_from_the_model_is_refused() -> None:
    register(native.RingDilatedAttention(*DILATED, scale=0.5))
    with pytest.raises(ValueError, match=r"the attention has scale = 0\.5; make it with scale="):
        call(make_model("llama", "ring_dilated"))


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="attention = Linear: expected a RingDilatedAttention"):
        register(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dropout_p = 0\.1: .*dropout_p=0"):
        register(native.RingDilatedAttention(*DILATED, dropout_p=0.1))
    with pytest.raises(TypeError, match="name = 3"):
        register(native.RingDilatedAttention(*DILATED), 3)  # type: ignore[arg-type]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seq_len is given: shard_inputs\(\) computes it"):
        shard_inputs(Ring(), input_ids=tokens, seq_len=4)
    with pytest.raises(ValueError, match=r"position_ids is \[1, 3\]: expected \[1, 4\]"):
        shard_inputs(Ring(), input_ids=tokens, position_ids=torch.arange(3)[None])
    for wrong in ([1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match=r"position_ids = .*: expected numbers that begin with 0"):
            shard_inputs(Ring(), input_ids=tokens, position_ids=torch.tensor([wrong]))
    packed = {"position_ids": torch.tensor([[0, 1, 0, 1]]), "cu_seq_lens_q": torch.tensor([0, 3, 4])}
    with pytest.raises(ValueError, match=r"position_ids = .*those of cu_seq_lens_q"):
        shard_inputs(Ring(), input_ids=tokens, **packed)
    with pytest.raises(ValueError, match="cu_seq_lens_q is given for a batch of 2"):
        shard_inputs(Ring(), input_ids=torch.zeros(2, 4), cu_seq_lens_q=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"token_type_ids is \[1, 3\]: expected \[batch, 4"):
        shard_inputs(Ring(), input_ids=torch.zeros(1, 4), token_type_ids=torch.zeros(1, 3))


def test_registration_under_another_name() -> None:
    register(native.RingDilatedAttention(*PLAIN), "plain_ring")
    call(make_model("llama", "plain_ring"))
