"""Hugging Face models on a ring equal one rank, and with a plain pattern their own attention."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from native_ranks import ADAPTER, assert_near, assert_sums, on_ring
from small_models import VOCABULARY, build, transformers
from torch import Tensor

from ring_backends import Ring, RingMismatchError
from ring_backends.adapters import native
from ring_backends.integrations.transformers import IGNORED, register, shard_inputs
from ring_backends.testing.failing_calls import SHORT
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.rings import LAYOUTS, TWO, new_ring
from ring_backends.testing.world import World, on_every_rank

N = 45
DILATED = ((9, 45), (1, 2))
PLAIN = ((64,), (1,))
WINDOW = 9
KINDS = ("llama", "bert")
CACHE = transformers.DynamicCache()
_CAUSAL = {"num_key_value_heads": 2, "use_cache": False}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "ForCausalLM", _CAUSAL),
    "mistral": ("mistral", "ForCausalLM", {**_CAUSAL, "sliding_window": None}),
    "classifier": ("llama", "ForSequenceClassification", {**_CAUSAL, "num_labels": 3}),
    "bert": ("bert", "ForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "roberta": ("roberta", "ForMaskedLM", {"hidden_dropout_prob": 0.0, "pad_token_id": 1}),
}


def make_model(name: str, attention: str = "ring_dilated", **changes: Any) -> Any:
    kind, task, fields = MODELS[name]
    return build(kind, task, attention, **{**fields, **changes}).double()


def put_on(ring: Ring, pattern: Any = DILATED, model: Any = None, **options: Any) -> None:
    """Register the attention of the models whose attention is "ring_dilated"."""
    register(native.RingDilatedAttention(*pattern, ring=ring, **options), model=model)


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


Results = tuple[Tensor, list[Tensor]]
"""Logits, and the gradients of the parameters."""


def run(ring: Ring, kind: str, pattern: Any, inputs: dict[str, Any], grad: Tensor, **options: Any) -> Results:
    """The logits of the whole sequence, and this rank's contribution to every gradient."""
    put_on(ring, pattern, **options)
    model = make_model(kind)
    logits, gradients = results(model, model(**shard_inputs(ring, **inputs)).logits, ring.shard(grad))
    return ring.unshard(logits, seq_len=N), gradients


def results(model: Any, logits: Tensor, grad: Tensor) -> Results:
    found = torch.autograd.grad(logits, list(model.parameters()), grad, allow_unused=True)
    return logits.detach(), [torch.zeros(()) if one is None else one for one in found]


def check(by_rank: list[Results], logits: Tensor, gradients: list[Tensor]) -> None:
    """Compare the logits of every rank and the sums of their gradients."""
    for got, _ in by_rank:
        assert_near(got, logits)
    assert_sums([grads for _, grads in by_rank], gradients, 1e-9)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_rank(pair: World, kind: str, layout: str, padded: bool) -> None:
    arguments = (kind, DILATED, *make_inputs(padded))
    check(pair.run(on_ring, run, *arguments, layout=layout), *run(Ring(), *arguments))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_pattern_gives_plain_attention(kind: str, padded: bool) -> None:
    inputs, grad = make_inputs(padded)
    got_logits, got = run(Ring(), kind, PLAIN, inputs, grad)
    model = make_model(kind, "sdpa")
    logits, gradients = results(model, model(**inputs).logits, grad)
    seen = inputs.get("attention_mask", torch.ones(2, N)).bool()
    check([(got_logits[seen], got)], logits[seen], gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_the_pattern_equals_that_of_the_model(pair: World, layout: str) -> None:
    model, (inputs, grad) = make_model("mistral", "sdpa", sliding_window=WINDOW), make_inputs(padded=False)
    arguments = ("mistral", ((None,), (1,)), inputs, grad)
    by_rank = pair.run(on_ring, run, *arguments, layout=layout, window_lengths=[WINDOW])
    check(by_rank, *results(model, model(**inputs).logits, grad))


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


@pytest.mark.parametrize("given", matrix_but("both", of=("position_ids", "cu_seq_lens", "both")))
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_single_ones(pair: World, kind: str, given: str) -> None:
    """On one rank and on two in both layouts, each document has the logits of a call of its own."""
    model = make_model(kind, "sdpa")
    tokens, grad = make_inputs(padded=False)
    documents = tokens["input_ids"][:1].split(LENGTHS, 1)
    wanted = results(model, torch.cat([model(input_ids=document).logits for document in documents], 1), grad[:1])
    arguments = (kind, PLAIN, packed_batch(given), grad[:1])
    check([run(Ring(), *arguments)], *wanted)
    for layout in LAYOUTS:
        check(pair.run(on_ring, run, *arguments, layout=layout), *wanted)


def classified(ring: Ring) -> Results:
    """The logits of a sequence classifier, and this rank's contribution to every gradient."""
    put_on(ring, PLAIN)
    model = make_model("classifier")
    inputs = shard_inputs(ring, **make_inputs(padded=True)[0])
    rows = model.model(**inputs).last_hidden_state
    logits = model.score(ring.pool(rows, inputs["attention_mask"], "last", seq_len=N))
    return results(model, logits, CLASSIFIED_GRAD / ring.size)


CLASSIFIED_GRAD = torch.tensor([[1.0, -0.5, 0.25], [-1.0, 2.0, 0.5]], dtype=torch.float64)


def test_a_sequence_classifier_on_a_ring(pair: World) -> None:
    model = make_model("classifier", "sdpa")
    inputs, _ = make_inputs(padded=True)
    inputs["input_ids"][1, 31:] = 0  # the model finds the last token by its pad_token_id
    wanted = results(model, model(**inputs).logits, CLASSIFIED_GRAD)
    for by_rank in [[classified(Ring())], *(pair.run(on_ring, classified, layout=layout) for layout in LAYOUTS)]:
        check(by_rank, *wanted)


def losses(ring: Ring, next_token: bool, inputs: dict[str, Tensor], labels: Tensor) -> tuple[float, int]:
    """The summed loss of this rank's labels, and their number."""
    put_on(ring)
    model = make_model("llama" if next_token else "bert")
    local = shard_inputs(ring, **inputs, labels=labels, next_token_labels=next_token)
    count = int((local["labels"] != IGNORED).sum())
    return model(**local).loss.item() * count, count


@pytest.mark.parametrize("next_token", [True, False], ids=["causal", "masked"])
def test_the_loss_of_all_labels(pair: World, next_token: bool) -> None:
    """No label is lost or counted twice at the boundary of two shards."""
    inputs, _ = make_inputs(padded=False)
    labels = inputs["input_ids"].masked_fill(torch.arange(N) % 3 == 0, IGNORED)
    wanted_count = int((labels[:, 1:] if next_token else labels).ne(IGNORED).sum())
    alone, count = losses(Ring(), next_token, inputs, labels)
    assert count == wanted_count
    by_rank = pair.run(on_ring, losses, next_token, inputs, labels)
    assert sum(number for _, number in by_rank) == wanted_count
    assert sum(loss for loss, _ in by_rank) == pytest.approx(alone, rel=1e-6)  # transformers computes losses in fp32


def call(model: Any, **changes: Any) -> None:
    inputs, _ = make_inputs(padded=False)
    model(**{**shard_inputs(Ring(), **inputs), **changes})


def check_refusal(ring: Ring, changes: dict[str, Any], config: dict[str, Any], message: str) -> None:
    """Make a call with changed arguments or configuration, then a valid call."""
    model, (inputs, _) = make_model("llama", "eager"), make_inputs(padded=False)
    put_on(ring, model=model)
    local = shard_inputs(ring, **inputs)
    arguments = {name: value for name, value in {**local, **changes}.items() if value is not None}
    with mock.patch.dict(vars(model.config), config), pytest.raises(ValueError, match=message):
        model(**arguments)
    model(**local)


CALLS = {
    "window": ({"sliding_window": 16}, "sliding_window = 16: LlamaAttention has a window, and its mask has none"),
    "bias": ({"position_bias": torch.zeros(1, 4, N, N)}, "position_bias is given: biases of scores are not supported"),
    "weights": ({"output_attentions": True}, "output_attentions = True"),
    "mask of pairs": ({"attention_mask": torch.zeros(2, 1, N, N)}, r"attention_mask is \[2, 1, 45, 45\]"),
    "order": ({"position_ids": torch.arange(N).flip(0)[None], "attention_mask": torch.ones(2, N)}, "position_ids = "),
    "documents": ({"position_ids": torch.arange(N)[None] % 20}, "in packed sequences or .* call the model with shard_"),
    "cache": ({"past_key_values": CACHE, "use_cache": True}, "past_key_values is given: key/value caches"),
}
ON_TWO_RANKS = {
    "no shard_inputs": ({"seq_len": None, "position_ids": None}, {}, "seq_len is not given"),
    "encoder-decoder": ({}, {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
    "convolutions": ({}, {"layer_types": ["conv", "full_attention"]}, "layer_types has conv"),
    "angles by length": ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_unsupported_options_are_refused_by_name(name: str) -> None:
    changes, message = CALLS[name]
    check_refusal(Ring(), changes, {}, message)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_models_that_a_ring_cannot_run_are_refused_by_name(pair: World, name: str) -> None:
    pair.run(on_ring, check_refusal, *ON_TWO_RANKS[name])


def masks_of_layers(ring: Ring, kind: str, num_padding: int, is_plain_call: bool = False) -> set[bool]:
    """Whether the layers of a model got a mask. Padding is at the end of the second sequence."""
    attention, found = native.RingDilatedAttention(*DILATED, ring=ring), set[bool]()

    def remember(module: Any, rows: Any, options: dict[str, Any]) -> None:
        found.add(options.get("key_padding_mask") is not None)

    attention.register_forward_pre_hook(remember, with_kwargs=True)
    register(attention)
    inputs = {"input_ids": make_inputs(padded=False)[0]["input_ids"], "attention_mask": torch.ones(2, N)}
    inputs["attention_mask"][1, N - num_padding :] = 0
    make_model(kind)(**(inputs if is_plain_call else shard_inputs(ring, **inputs)))
    return found


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_without_padding_costs_nothing(pair: World, kind: str, layout: str) -> None:
    """Kernels take longer with a mask. Either all ranks or no rank pass one."""
    for num_padding in (0, 2):
        found = pair.run(on_ring, masks_of_layers, kind, num_padding, layout=layout)
        found += [masks_of_layers(Ring(), kind, num_padding, is_plain_call) for is_plain_call in (False, True)]
        assert found == [{num_padding > 0}] * 4


@THOROUGH
@on_every_rank
def test_layers_are_distinguished() -> None:
    """Make two calls. In the second, rank 1 has the layers in another order."""
    ring = new_ring(ADAPTER, TWO, SHORT)
    put_on(ring)
    model, (whole, _) = make_model("llama"), make_inputs(padded=False)
    local = shard_inputs(ring, **whole)
    model(**local)
    if ring.rank == 1:
        model.model.layers = model.model.layers[::-1]
    with pytest.raises(RingMismatchError, match="order of calls"):
        model(**local)


def test_first_position_after_padding() -> None:
    put_on(Ring(), PLAIN)
    inputs = {"input_ids": make_inputs(padded=False)[0]["input_ids"].clamp(min=2)}  # 1 is padding
    model, alone = (make_model("roberta", attention).eval() for attention in ("ring_dilated", "sdpa"))
    got = model(**shard_inputs(Ring(), **inputs, first_position=2)).logits
    assert_near(got, alone(**inputs, position_ids=torch.arange(2, N + 2)[None]).logits)
    with pytest.raises(ValueError, match=r"first_position=2"):
        model(**shard_inputs(Ring(), **inputs))


def test_models_without_the_attention_interface_fail() -> None:
    put_on(Ring(), PLAIN)
    model = build("bloom", attention="ring_dilated", use_cache=False)
    with pytest.raises((TypeError, AttributeError)):
        model(torch.ones(1, 5, dtype=torch.int64))


def test_generation_is_refused_by_name() -> None:
    put_on(Ring())
    with pytest.raises(ValueError, match="key/value caches"):
        make_model("llama").generate(**make_inputs(padded=False)[0], max_new_tokens=3, do_sample=False, use_cache=True)


def with_dropout(ring: Ring, kind: str) -> tuple[Tensor, ...]:
    """The logits of the whole sequence in training mode with two seeds and again the first one, and after eval()."""
    register(native.RingDilatedAttention(*DILATED, ring=ring).eval())
    model = make_model(kind)
    for module in model.modules():  # both read it when they were made
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
        if kind == "bert" and type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.3
    local, found = shard_inputs(ring, **make_inputs(padded=False)[0]), []
    for seed, is_training in ((1, True), (2, True), (1, True), (1, False)):
        torch.manual_seed(seed)
        found.append(ring.unshard(model.train(is_training)(**local).logits.detach(), seq_len=N))
    return tuple(found)


@THOROUGH
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_follows_train_and_eval(pair: World, kind: str) -> None:
    alone = with_dropout(Ring(), kind)
    first, other_seed, again, evaluated = alone
    assert torch.equal(first, again)
    assert not torch.allclose(first, other_seed)
    put_on(Ring())
    assert_near(evaluated, make_model(kind).eval()(**shard_inputs(Ring(), **make_inputs(padded=False)[0])).logits)
    for of_rank in pair.run(on_ring, with_dropout, kind, layout="zigzag"):
        assert_near(of_rank, alone)


def test_a_scale_that_differs_from_the_model_is_refused() -> None:
    register(native.RingDilatedAttention(*DILATED, scale=0.5))
    with pytest.raises(ValueError, match=r"the attention has scale = 0\.5; make it without a scale"):
        call(make_model("llama"))


def test_a_model_without_a_scale_of_its_own_has_the_default() -> None:
    """As torch's own attention would."""
    rows = torch.randn(1, 2, 8, 4)
    register(native.RingDilatedAttention(*DILATED, scale=0.25))
    attend = transformers.AttentionInterface()["ring_dilated"]
    mask = transformers.AttentionMaskInterface()["ring_dilated"](1, kv_length=8, q_length=8)
    message = r"scaling = 0\.5 \(the default of the layer\): the attention has scale = 0\.25"
    with pytest.raises(ValueError, match=message):
        attend(torch.nn.Module(), rows, rows, rows, mask)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.nn.Linear(2, 2),), TypeError, "attention = Linear: expected a RingDilatedAttention"),
        ((native.RingDilatedAttention(*DILATED, dropout_p=0.1),), ValueError, r"dropout_p = 0\.1: .*dropout_p=0"),
        ((native.RingDilatedAttention(*DILATED), 3), TypeError, "name = 3"),
    ],
)
def test_invalid_registrations_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register(*arguments)


BEGIN_WITH_0 = r"position_ids = .*: expected numbers that begin with 0"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"seq_len": 4}, r"seq_len is given: shard_inputs\(\) computes it"),
        ({"position_ids": [[0, 1, 2]]}, r"position_ids is \[1, 3\]: expected \[1, 4\]"),
        *[({"position_ids": [wrong]}, BEGIN_WITH_0) for wrong in ([1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 2])],
        ({"position_ids": [[0, 1, 0, 1]], "cu_seq_lens_q": [0, 3, 4]}, r"position_ids = .*those of cu_seq_lens_q"),
        ({"input_ids": [[0] * 4] * 2, "cu_seq_lens_q": [0, 4]}, "cu_seq_lens_q is given for a batch of 2"),
        ({"token_type_ids": [[0, 0, 0]]}, r"token_type_ids is \[1, 3\]: expected \[batch, 4"),
    ],
)
def test_invalid_inputs_are_refused(inputs: dict[str, Any], message: str) -> None:
    tensors = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in inputs.items()}
    with pytest.raises(ValueError, match=message):
        shard_inputs(Ring(), **{"input_ids": torch.zeros(1, 4, dtype=torch.int64), **tensors})


def test_registration_under_another_name() -> None:
    register(native.RingDilatedAttention(*PLAIN), "plain_ring")
    call(make_model("llama", "plain_ring"))
