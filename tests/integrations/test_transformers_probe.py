"""A model that a ring cannot run is refused by name before its first step, whatever its class is called."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends.testing.marks import matrix_but

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

import transformers
from native_ranks import assert_near, assert_sums, native_ring

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.errors import RingMismatchError
from ring_backends.integrations.transformers import generate, register, remove_ring, shard_inputs, use_ring
from ring_backends.integrations.transformers.whole_batches import put_on_ring
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.world import World

N, VOCABULARY = 24, 40
_NAMES_BY_SIZE = {
    32: "hidden_size d_model",
    48: "intermediate_size ffn_dim decoder_ffn_dim",
    2: "num_hidden_layers num_layers decoder_layers bos_token_id eos_token_id decoder_start_token_id",
    4: "num_attention_heads decoder_attention_heads num_heads num_key_value_heads",
    128: "max_position_embeddings max_target_positions",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
SIZES |= {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3}
SIZES |= {"forced_eos_token_id": None, "use_cache": False}
"""Sizes of small models. A configuration ignores those that it does not have."""

_LLAMA_4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": None}
_DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "xlstm": {"hidden_size": 32, "embedding_dim": 32, "num_blocks": 2, "chunk_size": 8},
    "llama4_text": {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2, **_LLAMA_4},
    "mllama_text_model": {"num_key_value_heads": 4, "cross_attention_layers": [1]},
    "deepseek_v3": {"first_k_dense_replace": 2, **_DEEPSEEK},
}


def make(name: str = "LlamaForCausalLM", **options: Any) -> Any:
    """A small random model, in evaluation mode."""
    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        pytest.skip(f"this release of transformers has no {name}")
    torch.manual_seed(0)
    model_type = model_class.config_class.model_type
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **OWN_SIZES.get(model_type, {}), **options})
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # many are 0 or 1 in a new model
            parameter += torch.randn_like(parameter) * 0.1
    return model


def attention(ring: Ring | None = None, **options: Any) -> Any:
    return native.RingDilatedAttention([4 * N], [1], ring=ring, **options)


def on_a_ring(model: Any, ring: Ring | None = None, **options: Any) -> Any:
    use_ring(model, attention(ring, **options))
    return model


def registered(ring: Ring, model: Any, **options: Any) -> Any:
    register(attention(ring, **options))
    model.set_attn_implementation("ring_dilated")
    return model


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # The position_ids do not reach the embedding of positions.
    ("BartForCausalLM", {}, r"BartForCausalLM: model\.decoder\.embed_positions"),
    ("MBartForCausalLM", {}, r"MBartForCausalLM: model\.decoder\.embed_positions"),
    ("PegasusForCausalLM", {}, "PegasusForCausalLM: model.decoder"),
    # Layers that mix rows without the attention.
    ("FNetForMaskedLM", {}, "FNetForMaskedLM: .*FNetBasicFourierTransform"),
    ("xLSTMForCausalLM", {}, "xLSTMForCausalLM: backbone"),
    ("MobileBertForMaskedLM", {}, "MobileBertForMaskedLM: .*embedding_transformation"),
    ("EsmForMaskedLM", {"token_dropout": True}, "EsmForMaskedLM: .*EsmEmbeddings"),
    # The attention's mask or its arguments are used in another way.
    ("DogeForCausalLM", {}, "DogeForCausalLM: it computes with the attention mask, which on a ring is not a tensor"),
    ("GitForCausalLM", {}, "GitForCausalLM: it computes with the attention mask, which on a ring is not a tensor"),
    ("NemotronForCausalLM", {}, "NemotronAttention does not pass the arguments of the model on"),
    ("Sam3LiteTextTextModel", {}, "Sam3LiteTextTextModel: embeddings.position_embedding"),
    ("StableLmForCausalLM", {}, "StableLmAttention does not pass the arguments of the model on"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_models_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """By use_ring(), which leaves the model as it was."""
    model = make(name, **options)
    scale = 1.0 if name == "EsmForMaskedLM" else None
    batch = {"input_ids": torch.arange(4, 4 + N)[None]}
    before = model(**batch)[0]
    with pytest.raises(ValueError, match=message):
        use_ring(model, attention(scale=scale))
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**batch)[0], before)


@pytest.mark.matrix(reason="makes models of many classes")
def test_parts_of_a_composite_are_refused() -> None:
    """The configuration of the whole says nothing about the layers of its text model."""
    if not hasattr(transformers, "Qwen3_5ForTokenClassification"):
        pytest.skip("this release of transformers has no Qwen 3.5")
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["linear_attention"] * 2}
    text |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    text |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text)
    model = transformers.Qwen3_5ForTokenClassification(config)
    with pytest.raises(ValueError, match="layer_types has linear_attention"):
        use_ring(model, attention())


def test_a_model_without_a_probe() -> None:
    model = make("FNetForMaskedLM")
    use_ring(model, attention(), probe=False)
    assert model(torch.arange(4, 4 + N)[None]).logits.shape == (1, N, VOCABULARY)


class Mixing(transformers.LlamaForCausalLM):
    """A model whose embeddings are mixed by ``mix``, [batch, rows, features] to the same."""

    mix: Any

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        handle = self.model.embed_tokens.register_forward_hook(lambda module, args, rows: self.mix(rows, position_ids))
        try:
            return super().forward(input_ids, attention_mask, position_ids, **kwargs)
        finally:
            handle.remove()


def blocks_of(size: int) -> Any:
    """Add the mean of each block of rows, such as that of a strided convolution."""

    def mix(rows: Tensor, positions: Any) -> Tensor:
        whole = rows.shape[1] // size * size
        means = rows[:, :whole].unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1)
        return torch.cat([rows[:, :whole] + means, rows[:, whole:]], 1)

    return mix


MIXTURES: dict[str, Any] = {
    "mean of the batch": lambda rows, positions: rows - rows.mean((0, 1)),
    "number of rows": lambda rows, positions: rows * rows.shape[1],
    "largest position": lambda rows, positions: rows * (0 if positions is None else positions.max()),
    **{f"blocks of {size}": blocks_of(size) for size in (2, 4, 8, 16)},
    "numbers of rows": lambda rows, positions: rows + torch.arange(rows.shape[1])[:, None] // 8192,
    "numbers as indices": lambda rows, positions: rows + torch.randn(99, 32)[torch.arange(rows.shape[1])],
    "numbers of an embedding": lambda rows, positions: (
        torch.nn.functional.embedding(torch.arange(rows.shape[1]), torch.linspace(0, 1, 99)[:, None]) + rows
    ),
    "numbers and indices": lambda rows, positions: rows + rows[:, torch.arange(rows.shape[1]).flip(0)],
}


MORE = pytest.mark.matrix(reason="other models and dtypes run in the quick tests")


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", matrix_but(torch.float32, of=(torch.float32, torch.bfloat16)))
def test_mixtures_of_rows(mixture: str, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    model.__class__, model.mix = Mixing, MIXTURES[mixture]
    with pytest.raises(ValueError, match="model = Mixing: "):
        use_ring(model, attention())


@pytest.mark.parametrize("size", [32, 1])
@pytest.mark.parametrize("value", [0.0, 1e-5])
def test_mixtures_that_a_parameter_hides(value: float, size: int) -> None:
    """Until it is trained."""
    model = make()
    model.__class__ = Mixing
    model.scale = scale = torch.nn.Parameter(torch.full((size,), value))
    model.mix = lambda rows, positions: rows + scale * rows.roll(1, 1)
    with pytest.raises(ValueError, match="model = Mixing: "):
        use_ring(model, attention())
    assert torch.equal(scale.detach(), torch.full((size,), value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_of_many_experts_are_accepted(dtype: torch.dtype) -> None:
    """Rounding must not send a row to another expert."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "num_hidden_layers": 4}
    use_ring(make("Qwen3MoeForCausalLM", **sizes).to(dtype), attention())


def test_a_probe_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        use_ring(make(), attention())


def sharded_here(way: str) -> Ended:
    """A call of a model that ``fully_shard`` has sharded before it comes on the ring."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ring, model, batch = native_ring(), make(), batch_of("right")
    wanted = model(**batch).logits.detach()
    fully_shard(model, mesh=DeviceMesh("cpu", [*ring.ranks]))
    if way == "use_ring":
        logits = on_a_ring(model, ring)(**batch).logits
    else:
        logits = registered(ring, model)(**shard_inputs(ring, **batch)).logits
    whole = ring.unshard(logits.detach(), seq_len=N)
    return ending(lambda: assert_near(whole[0], wanted[0], 1e-5))


@pytest.mark.parametrize("way", ["use_ring", "register"])
def test_a_probe_of_sharded_parameters(pair: World, way: str) -> None:
    for ended in pair.run(sharded_here, way):
        assert ended.error == "no error", ended


def test_a_probe_leaves_nothing_behind() -> None:
    model = make().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    use_ring(model, attention())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules() if module is not model)


PADDED_LEFT = [
    ("RobertaForMaskedLM", None),
    ("OPTForCausalLM", 1.0),
    ("LlamaForCausalLM", None),
    ("DeepseekV3ForCausalLM", None),
]


def batch_of(padding: str) -> dict[str, Tensor]:
    """Two documents, the second with padding."""
    input_ids = torch.randint(4, VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[1, slice(0, 15) if padding == "left" else slice(9, N)] = 0
    input_ids[mask == 0] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def logits_and_gradients(model: Any, batch: dict[str, Tensor], ring: Ring) -> tuple[Tensor, list[Tensor]]:
    logits = model(**batch).logits
    weights = torch.randn(2, N, VOCABULARY, generator=torch.Generator().manual_seed(2))
    weights = weights * batch["attention_mask"].unsqueeze(-1)
    grads = torch.autograd.grad(logits, [*model.parameters()], ring.shard(weights), allow_unused=True)
    found = [torch.zeros(()) if grad is None else grad for grad in grads]
    return ring.unshard(logits.detach(), seq_len=N) * batch["attention_mask"].unsqueeze(-1), found


def padded_left_here(name: str, scale: float | None, layout: Any) -> tuple[Tensor, list[Tensor]]:
    ring = native_ring(layout)
    return logits_and_gradients(on_a_ring(make(name), ring, scale=scale), batch_of("left"), ring)


def probed_on_the_first_rank(layout: Any) -> str:
    """As by loaders that give only the first rank parameters with values."""
    ring = native_ring(layout)
    model = make("OPTForCausalLM")
    use_ring(model, attention(ring, scale=1.0), probe=ring.rank == 0)
    with pytest.raises(RingMismatchError) as raised:
        model(**batch_of("left"))
    return str(raised.value)


def test_findings_that_differ_between_the_ranks(pair: World) -> None:
    for message in pair.run(probed_on_the_first_rank, "contiguous"):
        assert "skips_padding (as use_ring() found them)" in message


@pytest.mark.parametrize("way", ["use_ring", "register"])
def test_layers_that_are_skipped_at_random(pair: World, way: str) -> None:
    for message in pair.run(skip_layers_here, way):
        assert message.startswith("layerdrop = 0.5: each rank of a ring would skip other layers")


def skip_layers_here(way: str) -> str:
    ring = native_ring("contiguous")
    model = make("OPTForCausalLM", layerdrop=0.5).train()
    batch: dict[str, Any] = batch_of("right")
    if way == "use_ring":
        on_a_ring(model, ring, scale=1.0)
    else:
        registered(ring, model, scale=1.0)
        batch = shard_inputs(ring, **batch)
    with pytest.raises(ValueError, match="layerdrop") as raised:
        model(**batch)
    model.eval()
    model(**batch)
    return str(raised.value)


@pytest.mark.parametrize(("name", "scale"), PADDED_LEFT, ids=lambda value: str(value))
@pytest.mark.parametrize("layout", matrix_but("zigzag", of=("contiguous", "zigzag")))
def test_padding_on_the_left(pair: World, name: str, scale: float | None, layout: str) -> None:
    """Also of models that count positions from the first token after the padding, or have values of another width."""
    wanted, gradients = logits_and_gradients(make(name), batch_of("left"), Ring())
    by_rank = pair.run(padded_left_here, name, scale, layout)
    for logits, _ in by_rank:
        assert_near(logits, wanted, 1e-5)
    assert_sums([grads for _, grads in by_rank], gradients, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_every_dtype(dtype: torch.dtype) -> None:
    for padding in ("left", "right"):
        batch = batch_of(padding)
        inputs = shard_inputs(Ring(), **{**batch, "attention_mask": batch["attention_mask"].to(dtype)})
        assert ("is_padded_before_tokens" in inputs) == (padding == "left")


def test_padding_tokens_that_the_mask_does_not_mark() -> None:
    """RoBERTa gives every padding token the position before the first, whatever the mask says."""
    model = on_a_ring(make("RobertaForMaskedLM"))
    model(batch_of("right")["input_ids"][:1])
    for padding in ("left", "right"):
        input_ids = batch_of(padding)["input_ids"]
        with pytest.raises(ValueError, match="input_ids has the padding token 1 where there is no padding"):
            model(input_ids)
        with pytest.raises(ValueError, match="input_ids has the padding token 1 where there is no padding"):
            shard_inputs(Ring(), input_ids=input_ids, first_position=2)


def test_sequences_shorter_than_the_ring() -> None:
    with pytest.raises(ValueError, match="input_ids has 1 tokens for 2 ranks"):
        shard_inputs(Ring(2, 0), input_ids=torch.ones(1, 1, dtype=torch.int64))


def test_shards_of_another_layout() -> None:
    model, ring = make(), Ring(2, 0, layout_kind="zigzag")
    register(attention(), probe=False)
    model.set_attn_implementation("ring_dilated")
    with pytest.raises(ValueError, match="rows of a zigzag layout, and the attention is on a contiguous ring"):
        model(**shard_inputs(ring, input_ids=batch_of("right")["input_ids"][:1], **MARKS["seq_idx"]))


def test_padding_between_tokens() -> None:
    model, batch = on_a_ring(make("RobertaForMaskedLM")), batch_of("right")
    batch["input_ids"][0, 3], batch["attention_mask"][0, 3] = 1, 0
    with pytest.raises(ValueError, match="input_ids has padding between tokens: roberta"):
        model(**batch)


LABELS_OF = [
    ("WhisperForCausalLM", {}, 1.0, "right"),
    ("LlamaForCausalLM", {}, None, "right"),
    ("BertForMaskedLM", {}, None, "right"),
    # A row of padding has the first token's label.
    ("RobertaForCausalLM", {"is_decoder": True}, None, "left"),
]


def loss_of(model: Any, padding: str) -> Tensor:
    batch = batch_of(padding)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss: Tensor = model(**batch, labels=labels).loss
    return loss.detach()


def loss_here(name: str, options: dict[str, Any], scale: float | None, padding: str) -> Tensor:
    return loss_of(on_a_ring(make(name, **options), native_ring("zigzag"), scale=scale), padding)


@pytest.mark.parametrize("case", LABELS_OF, ids=lambda case: case[0])
def test_losses_of_shifted_and_other_labels(pair: World, case: Any) -> None:
    """The class of a model does not tell whether it shifts its labels."""
    name, options, _, padding = case
    model = make(name, **options)
    model.set_attn_implementation("sdpa")  # a row that sees no key is 0, as on a ring
    wanted = loss_of(model, padding)
    for loss in pair.run(loss_here, *case):
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)


def test_losses_of_another_kind_are_refused() -> None:
    class Weighted(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            outputs = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                outputs.loss = outputs.loss + outputs.logits.logsumexp(-1).square().mean()
            return outputs

    model = make()
    model.__class__ = Weighted
    use_ring(model, attention())
    with pytest.raises(ValueError, match="labels is given: Weighted has no loss, or not the mean cross entropy"):
        loss_of(model, "right")


def test_whether_a_loss_is_divided_by_the_number_of_items() -> None:
    class Overriding(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    overriding = make()
    overriding.__class__ = Overriding
    classifier = make("LlamaForTokenClassification")  # it drops the argument
    for model, takes_num_items in ((overriding, True), (classifier, False)):
        assert put_on_ring(model, attention(), 0.0, probe=True).takes_num_items == takes_num_items


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("AdaLoraConfig", {"total_step": 10}, "labels is given: LlamaForCausalLM has no loss, or not the mean cross"),
        ("LoraConfig", {"alora_invocation_tokens": [5]}, "alora_invocation_tokens are given: each rank would look for"),
    ],
)
def test_adapters_that_need_the_whole_sequence_or_loss(config: str, options: dict[str, Any], message: str) -> None:
    peft = pytest.importorskip("peft")
    adapter = getattr(peft, config)(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(make(), adapter)
    with pytest.raises(ValueError, match=message):
        loss_of(on_a_ring(model), "right")


# --- register() and shard_inputs() ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_whose_attention_is_not_registered(implementation: str) -> None:
    register(attention())
    model = make()
    model.set_attn_implementation(implementation)
    inputs = shard_inputs(Ring(), **batch_of("right"))
    with pytest.raises(ValueError, match=f"attn_implementation of LlamaForCausalLM = '{implementation}'"):
        model(**inputs)
    with pytest.raises(ValueError, match=f"attn_implementation of LlamaModel = '{implementation}'"):
        model.model(**inputs)
    model.set_attn_implementation("ring_dilated")
    model(**inputs)
    model.set_attn_implementation(implementation)  # after a right call
    with pytest.raises(ValueError, match=f"attn_implementation of LlamaForCausalLM = '{implementation}'"):
        model(**inputs)
    model(**batch_of("right"))  # the arguments of a whole sequence


def registered_here(name: str, probe: bool, is_compiled: bool = False) -> Ended:
    ring, model = native_ring(), make(name)
    register(attention(ring), probe=probe)
    model.set_attn_implementation("ring_dilated")
    called: Any = torch.compile(model, backend="eager") if is_compiled else model
    return ending(lambda: called(**shard_inputs(ring, **batch_of("right"))))


def test_registered_models_are_probed(pair: World) -> None:
    for is_compiled in (False, True):
        for ended in pair.run(registered_here, "BartForCausalLM", True, is_compiled):
            assert is_compiled or ended.is_a(ValueError), ended
            assert "BartForCausalLM: model.decoder.embed_positions" in ended.message, ended
            assert "register(attention, probe=False) skips this check" in ended.message, ended
    for name, probe in (("BartForCausalLM", False), ("LlamaForCausalLM", True)):
        for ended in pair.run(registered_here, name, probe):
            assert ended.error == "no error", ended


def generated_by_register_here(name: str) -> Ended:
    ring = native_ring()
    model = registered(ring, make(name))
    return ending(lambda: generate(model, ring, **batch_of("left"), max_new_tokens=2))


def test_registered_models_are_probed_before_they_generate(pair: World) -> None:
    for ended in pair.run(generated_by_register_here, "BartForCausalLM"):
        assert "BartForCausalLM: model.decoder.embed_positions" in ended.message, ended
    for ended in pair.run(generated_by_register_here, "LlamaForCausalLM"):
        assert ended.error == "no error", ended


def padded_left_by_register_here() -> list[Ended]:
    """With the positions of a whole sequence, and with positions that begin after the padding."""
    ring, batch = native_ring(), batch_of("left")
    model = registered(ring, make("OPTForCausalLM"), scale=1.0)
    positions = (batch["attention_mask"].cumsum(1) - 1).where(batch["attention_mask"] > 0, 1)
    found = [ending(lambda: model(**shard_inputs(ring, **batch)))]
    logits = model(**shard_inputs(ring, **batch, position_ids=positions)).logits
    whole = ring.unshard(logits.detach(), seq_len=N)
    wanted = make("OPTForCausalLM")(**batch).logits
    found.append(ending(lambda: assert_near(whole[1, 15:], wanted[1, 15:], 1e-5)))
    return found


def test_registered_models_that_do_not_count_padding(pair: World) -> None:
    for refused, counted in pair.run(padded_left_by_register_here):
        assert "attention_mask has padding before tokens: OPTForCausalLM counts positions from" in refused.message
        assert counted.error == "no error", counted


def labels_by_register_here(name: str, scale: float | None) -> list[Ended]:
    """Calls with labels of the next token, and with those of the rows themselves."""
    ring, batch, found = native_ring(), batch_of("right"), []
    model = registered(ring, make(name), scale=scale)
    for is_next in (True, False):
        inputs = shard_inputs(ring, **batch, labels=batch["input_ids"], next_token_labels=is_next)
        found.append(ending(partial(model, **inputs)))
    return found


def test_registered_models_with_labels_of_another_kind(pair: World) -> None:
    for shifted, own in pair.run(labels_by_register_here, "WhisperForCausalLM", 1.0):
        assert "labels are shifted, and the loss of WhisperForCausalLM" in shifted.message
        assert "next_token_labels=False" in shifted.message
        assert own.error == "no error", own
    for shifted, own in pair.run(labels_by_register_here, "LlamaForCausalLM", None):
        assert shifted.error == "no error", shifted
        assert "labels are not shifted, and the loss of LlamaForCausalLM" in own.message


def test_a_ring_of_one_refuses_arguments_as_others_do() -> None:
    ring, batch = Ring(), batch_of("left")
    model = registered(ring, make("OPTForCausalLM"), scale=1.0)
    with pytest.raises(ValueError, match="attention_mask has padding before tokens"):
        model(**shard_inputs(ring, **batch))
    model, labels = registered(ring, make("WhisperForCausalLM"), scale=1.0), batch["input_ids"]
    with pytest.raises(ValueError, match="labels are shifted"):
        model(**shard_inputs(ring, **batch, labels=labels))


def test_a_ring_of_one_runs_what_others_refuse() -> None:
    batch, model = batch_of("right"), make()
    model.__class__, model.mix = Mixing, MIXTURES["numbers and indices"]
    wanted = model(**batch).logits
    assert_near(registered(Ring(), model)(**shard_inputs(Ring(), **batch)).logits, wanted, 1e-5)


# --- calls that go around the hooks of use_ring() ---------------------------------------------------------------------


WAYS_AROUND: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "forward": ("LlamaForCausalLM", lambda model: model.forward),
    "forward without a head": ("LlamaModel", lambda model: model.forward),
    "base model": ("LlamaForCausalLM", lambda model: model.model),
    "configuration": ("LlamaForCausalLM", lambda model: transformers.LlamaForCausalLM(copy.deepcopy(model.config))),
}


def around_here(way: str) -> Ended:
    name, go_around = WAYS_AROUND[way]
    model = on_a_ring(make(name), native_ring())
    return ending(lambda: go_around(model)(**batch_of("right")))


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_calls_around_the_hooks(pair: World, way: str) -> None:
    for ended in pair.run(around_here, way):
        ended.check(ValueError, "use_ring() cuts the batch in a call of the model that it was given")


def adapted_here() -> list[Ended]:
    import peft

    ring, batch = native_ring(), batch_of("right")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = on_a_ring(peft.get_peft_model(make(), lora), ring)
    found = [ending(lambda: model(**batch)), ending(lambda: model.base_model(**batch))]
    merged = model.merge_and_unload()
    found.append(ending(lambda: merged(**batch)))
    return [*found, ending(lambda: on_a_ring(merged, ring)(**batch))]


def test_calls_around_the_hooks_of_peft(pair: World) -> None:
    pytest.importorskip("peft")
    for whole, base, merged, again in pair.run(adapted_here):
        assert whole.error == again.error == "no error", (whole, again)
        for ended in (base, merged):
            assert "merge_and_unload() or a copy of the configuration, call use_ring()" in ended.message, ended


def adapted_later_here(ring: Ring | None = None) -> dict[str, Tensor]:
    """The logits of all rows, the loss, and this rank's gradients of adapters that a model gets on a ring, or alone."""
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model, batch = make(), batch_of("right")
    model = peft.get_peft_model(model if ring is None else on_a_ring(model, ring), lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    found = model(**batch, labels=batch["input_ids"])
    found.loss.backward()
    logits = found.logits if ring is None else ring.unshard(found.logits, seq_len=N)
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach(), "loss": found.loss.detach(), **gradients}


def adapted_on_a_ring() -> dict[str, Tensor]:
    return adapted_later_here(native_ring())


def test_adapters_on_a_model_on_a_ring(pair: World) -> None:
    pytest.importorskip("peft")
    wanted, by_rank = adapted_later_here(), pair.run(adapted_on_a_ring)
    is_token = batch_of("right")["attention_mask"].bool()
    for found in by_rank:
        assert_near(found.pop("logits")[is_token], wanted["logits"][is_token], 1e-5)
        assert_near(found.pop("loss"), wanted["loss"], 1e-5)
        assert len(found) == 2 * len(make().model.layers)
    for name in by_rank[0]:
        assert_near(sum(found[name] for found in by_rank) / len(by_rank), wanted[name], 1e-5)


def removed_here() -> list[Ended]:
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ring, batch, plain, model = native_ring(), batch_of("right"), make(), make()
    wanted = plain(**batch).logits
    remove_ring(on_a_ring(model, ring))
    found = [ending(lambda: assert_near(model(**batch).logits, wanted, 1e-9))]  # alone
    adapted = peft.get_peft_model(on_a_ring(model, ring), lora)
    found.append(ending(lambda: use_ring(adapted, attention(ring))))
    remove_ring(adapted)
    found.append(ending(lambda: remove_ring(adapted)))
    on_a_ring(adapted, ring)
    places = batch["input_ids"], batch["attention_mask"], None, batch["input_ids"]  # labels are the fourth of PEFT
    got = adapted(*places)
    found.append(ending(lambda: assert_near(ring.unshard(got.logits, seq_len=N), wanted, 1e-5)))
    assert got.loss is not None
    classifier = make("LlamaForSequenceClassification", pad_token_id=1)
    wanted_classes = classifier(**batch).logits
    remove_ring(on_a_ring(classifier, ring))
    found.append(ending(lambda: assert_near(classifier(**batch).logits, wanted_classes, 1e-9)))
    return found


def test_models_that_are_taken_off_a_ring(pair: World) -> None:
    pytest.importorskip("peft")
    for alone, twice, not_there, again, classifier in pair.run(removed_here):
        twice.check(ValueError, "is on a ring already; call", "remove_ring(model) first")
        not_there.check(ValueError, "is not on a ring")
        assert alone.error == again.error == classifier.error == "no error", (alone, again, classifier)


def other_weights_here() -> Ended:
    ring, model = native_ring(), make()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += ring.rank
    return ending(lambda: on_a_ring(model, ring))


def test_ranks_with_different_weights(pair: World) -> None:
    for ended in pair.run(other_weights_here):
        ended.check(RingMismatchError, "load the same checkpoint on every rank", "the ranks differ in lm_head.weight")


ROUTER = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_router_coefficient_that_is_set_later() -> None:
    for owner in (lambda model: model, lambda model: model.config):
        losses = []
        for model in (make("MixtralForCausalLM", **ROUTER), on_a_ring(make("MixtralForCausalLM", **ROUTER))):
            owner(model).router_aux_loss_coef = 5.0
            batch = batch_of("right")
            losses.append(model(**batch, labels=batch["input_ids"], output_router_logits=True).loss)
        assert_near(losses[1], losses[0], 1e-5)


def test_an_ignored_index_of_the_users_is_refused() -> None:
    batch = batch_of("right")
    with pytest.raises(ValueError, match="ignore_index is given: the loss of a ring ignores labels of -100"):
        on_a_ring(make())(**batch, labels=batch["input_ids"], ignore_index=0)


def test_a_loss_that_is_replaced_later_is_refused() -> None:
    model, batch = on_a_ring(make()), batch_of("right")
    model(**batch, labels=batch["input_ids"])
    model.loss_function = lambda logits, labels, **_: logits.sum()
    model(**batch)
    with pytest.raises(ValueError, match="loss_function of LlamaForCausalLM was replaced"):
        model(**batch, labels=batch["input_ids"])


def test_a_sequence_without_tokens_is_refused() -> None:
    model, batch = on_a_ring(make("LlamaForSequenceClassification", pad_token_id=1)), batch_of("right")
    batch["input_ids"][1] = 1
    with pytest.raises(ValueError, match="input_ids has only padding in sequence 1"):
        model(**batch)


def test_a_model_on_a_ring_is_copied_but_not_pickled() -> None:
    model = on_a_ring(make())
    copied = copy.deepcopy(model)
    batch = batch_of("right")
    assert torch.equal(copied(**batch).logits, model(**batch).logits)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert not torch.equal(copied(**batch).logits, model(**batch).logits)
    with pytest.raises(TypeError, match="LlamaForCausalLM is on a ring, and cannot be pickled"):
        torch.save(model, io.BytesIO())


# --- documents that are packed into one sequence ----------------------------------------------------------------------

LENGTHS = (9, 1, 14)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
DOCUMENTS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
BOUNDS = torch.tensor([0, 9, 10, 24])

MARKS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": POSITIONS},
    "seq_idx": {"seq_idx": DOCUMENTS.int()},
    "cu_seq_lens_k": {"cu_seq_lens_k": BOUNDS, "max_length_k": 14},
    "attention_mask": {"attention_mask": DOCUMENTS + 1},
}
MARKS["all"] = {name: mark for marks in MARKS.values() for name, mark in marks.items() if name != "max_length_k"}
MARKS["all"] |= {"seq_idx": DOCUMENTS, "cu_seq_lens_q": BOUNDS, "max_length_q": 14}


@pytest.mark.parametrize("marks", MARKS)
def test_every_mark_of_documents_is_used(marks: str) -> None:
    model, tokens = make(), batch_of("right")["input_ids"][:1]
    wanted = torch.cat([model(input_ids=document).logits for document in tokens.split(LENGTHS, 1)], 1)
    assert_near(on_a_ring(model)(input_ids=tokens, **MARKS[marks]).logits, wanted, 1e-5)


def test_documents_with_padding() -> None:
    """Padding belongs to no document."""
    model, tokens = make(), batch_of("right")["input_ids"][:1]
    wanted = torch.cat([model(input_ids=document).logits for document in tokens[:, :20].split((12, 8), 1)], 1)
    mask = torch.tensor([[1] * 12 + [2] * 8 + [0] * 4])
    assert_near(on_a_ring(model)(input_ids=tokens, attention_mask=mask).logits[:, :20], wanted, 1e-5)


OTHER = torch.tensor([0, 8, 10, 24])
IN_TWO_PLACES = torch.tensor([[1] * 8 + [0] * 2 + [1] * 8 + [2] * 6])


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": OTHER}, "cu_seq_lens_q and cu_seq_lens_k mark different documents"),
        ({"cu_seq_lens_k": OTHER, "seq_idx": DOCUMENTS}, "cu_seq_lens_k and seq_idx mark different documents"),
        ({"seq_idx": DOCUMENTS, "attention_mask": 1 + (DOCUMENTS > 0).int()}, "seq_idx and attention_mask mark"),
        ({"seq_idx": DOCUMENTS, "position_ids": torch.arange(N)[None]}, "position_ids = .*those of seq_idx"),
        ({"max_length_q": 14}, "max_length_q is given without cu_seq_lens_q"),
        ({"seq_idx": DOCUMENTS[:, 1:]}, r"seq_idx is \[1, 23\]: expected \[1, 24\]"),
        ({"attention_mask": IN_TWO_PLACES}, "attention_mask has a document in two"),
        ({"attention_mask": (1 + DOCUMENTS).bfloat16()}, "numbers of documents in torch.bfloat16, which rounds"),
    ],
)
def test_marks_that_contradict(marks: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_inputs(Ring(), input_ids=torch.ones(1, N, dtype=torch.int64), **marks)


# --- generation -------------------------------------------------------------------------------------------------------

GENERATING = [
    ("LlamaForCausalLM", {}),
    ("Llama4ForCausalLM", {}),  # its base_model is the model itself
    ("DiffLlamaForCausalLM", {}),  # two attentions in a layer
    ("HrmTextForCausalLM", {}),  # layers that run several times
    ("MllamaForCausalLM", {}),  # layers that do not run
    ("OPTForCausalLM", {"scale": 1.0}),
]


def generated_here(name: str, options: dict[str, Any]) -> Tensor:
    ring = native_ring()
    model = on_a_ring(make(name), ring, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokens: Tensor = generate(model, ring, **batch_of("left"), max_new_tokens=6, do_sample=False)
    assert not [warning for warning in found if "past_key_values" in str(warning.message)], found
    return tokens


@MORE
@pytest.mark.parametrize(("name", "options"), GENERATING, ids=lambda value: str(value))
def test_generation(pair: World, name: str, options: dict[str, Any]) -> None:
    wanted = make(name).generate(**batch_of("left"), max_new_tokens=6, do_sample=False)
    for found in pair.run(generated_here, name, options):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_caches_of_ones_own_are_refused(name: str) -> None:
    ring = Ring()
    model = on_a_ring(make(), ring)
    with pytest.raises(ValueError, match=f"{name} is given: key/value caches"):
        model(torch.ones(1, N, dtype=torch.int64), **{name: transformers.DynamicCache()})
    with pytest.raises(ValueError, match=f"{name} is given: not supported by a ring"):
        generate(model, ring, torch.ones(1, 3, dtype=torch.int64), **{name: transformers.DynamicCache()})
