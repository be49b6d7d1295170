"""A model that a ring cannot run is refused by name before its first step, whatever its class is called."""

from __future__ import annotations

import copy
import io
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import output_of
from native_ranks import assert_near, on_ring
from small_models import transformers
from tiny_models import BY_TYPE, VOCABULARY, tiny_fields
from torch import Tensor
from torch.nn import functional as F

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.errors import RingMismatchError
from ring_backends.integrations.transformers import (
    generate,
    inner_arguments,
    recurrent,
    register,
    remove_ring,
    shard_inputs,
    use_ring,
)
from ring_backends.integrations.transformers.whole_batches import put_on_ring
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.world import World

N = 24
SCALES = dict.fromkeys(("OPTForCausalLM", "WhisperForCausalLM", "EsmForMaskedLM"), 1.0)
"""The scale of the scores, where it is not that of the head dim."""


def make(name: str = "LlamaForCausalLM", **options: Any) -> Any:
    """A small random model, in evaluation mode."""
    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        pytest.skip(f"this release of transformers has no {name}")
    torch.manual_seed(0)
    config_class = model_class.config_class
    config = config_class(**(tiny_fields(config_class) | BY_TYPE.get(config_class.model_type, {}) | options))
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # many are 0 or 1 in a new model
            parameter += torch.randn_like(parameter) * 0.1
    return model


def batch_of(padding: str) -> dict[str, Tensor]:
    """Two documents, the second with padding."""
    input_ids = torch.randint(4, VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[1, slice(0, 15) if padding == "left" else slice(9, N)] = 0
    input_ids[mask == 0] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


TOKENS, MASK = batch_of("right").values()


def attention(ring: Ring | None = None, model: Any = None) -> Any:
    return native.RingDilatedAttention([4 * N], [1], ring=ring, scale=SCALES.get(type(model).__name__))


def on_a_ring(model: Any, ring: Ring | None = None, **options: Any) -> Any:
    use_ring(model, attention(ring, model), **options)
    return model


def registered(model: Any, ring: Ring, **options: Any) -> Any:
    register(attention(ring, model), model=model, **options)
    return model


def call_on_a_ring(model: Any, ring: Ring, way: str, batch: dict[str, Tensor]) -> Any:
    """Call a model, whose attention has been put on a ring by ``way``, with a whole batch."""
    return model(**(batch if way == "use_ring" else shard_inputs(ring, **batch)))


WAYS: dict[str, Any] = {"use_ring": on_a_ring, "register": registered}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Layers that mix rows without the attention.
    ("FNetForMaskedLM", {}, "FNetForMaskedLM: .*FNetBasicFourierTransform"),
    ("xLSTMForCausalLM", {}, "xLSTMForCausalLM: backbone"),
    ("MobileBertForMaskedLM", {}, "MobileBertForMaskedLM: .*embedding_transformation"),
    ("EsmForMaskedLM", {"token_dropout": True}, "EsmForMaskedLM: .*EsmEmbeddings"),
    # The attention's mask or its arguments are used in another way.
    ("DogeForCausalLM", {}, "DogeForCausalLM: it computes with the attention mask, which on a ring is not a tensor"),
    # The position_ids do not reach the embedding of positions.
    ("Sam3LiteTextTextModel", {}, "Sam3LiteTextTextModel: embeddings.position_embedding"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [pytest.param(*case, marks=MORE_CASES if index else ()) for index, case in enumerate(REFUSED)],
    ids=lambda value: str(value)[:30],
)
def test_models_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """By use_ring(), which leaves the model as it was."""
    model, tokens = make(name, **options), torch.arange(4, 4 + N)[None]
    before = model(input_ids=tokens)[0]
    with pytest.raises(ValueError, match=message):
        on_a_ring(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(input_ids=tokens)[0], before)


def test_an_attention_that_gets_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_arguments, "_WITHHOLDING", frozenset())
    with pytest.raises(ValueError, match="NemotronAttention does not pass the arguments of the model on"):
        on_a_ring(make("NemotronForCausalLM"))


def test_an_embedding_of_positions_that_is_replaced_later() -> None:
    """PEFT's modules_to_save does this."""
    model = on_a_ring(make("BartForCausalLM"))
    decoder = model.model.decoder
    decoder.embed_positions = copy.deepcopy(decoder.embed_positions)
    with pytest.raises(
        ValueError, match="embed_positions of BartDecoder was replaced after the model was put on a ring"
    ):
        model(torch.arange(4, 4 + N)[None])


@pytest.mark.matrix(reason="makes models of many classes")
def test_parts_of_a_composite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the whole says nothing about the layers of its text model."""
    monkeypatch.setattr(recurrent, "_RELEASE", (5, 16))  # whose recurrent layers a ring does not know
    if not hasattr(transformers, "Qwen3_5ForTokenClassification"):
        pytest.skip("this release of transformers has no Qwen 3.5")
    config = transformers.AutoConfig.for_model("qwen3_5")
    text = {**tiny_fields(type(config.text_config)), "layer_types": ["linear_attention"] * 2}
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text)
    with pytest.raises(ValueError, match="layer_types has linear_attention"):
        on_a_ring(transformers.Qwen3_5ForTokenClassification(config))


def test_a_model_without_a_probe() -> None:
    model = on_a_ring(make("FNetForMaskedLM"), probe=False)
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


def mixing(mix: Any) -> Any:
    model = make()
    model.__class__, model.mix = Mixing, mix
    return model


def blocks_of(size: int) -> Any:
    """Add the mean of each block of rows, such as that of a strided convolution."""

    def mix(rows: Tensor, positions: Any) -> Tensor:
        whole = rows.shape[1] // size * size
        means = rows[:, :whole].unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1)
        return torch.cat([rows[:, :whole] + means, rows[:, whole:]], 1)

    return mix


COLUMN = torch.linspace(0, 1, 99)[:, None]
MIXTURES: dict[str, Any] = {
    "mean of the batch": lambda rows, positions: rows - rows.mean((0, 1)),
    "number of rows": lambda rows, positions: rows * rows.shape[1],
    "largest position": lambda rows, positions: rows * (0 if positions is None else positions.max()),
    **{f"blocks of {size}": blocks_of(size) for size in (2, 4, 8, 16)},
    "numbers of rows": lambda rows, positions: rows + torch.arange(rows.shape[1])[:, None] // 8192,
    "numbers as indices": lambda rows, positions: rows + torch.randn(99, 32)[torch.arange(rows.shape[1])],
    "numbers of an embedding": lambda rows, positions: rows + F.embedding(torch.arange(rows.shape[1]), COLUMN),
    "numbers and indices": lambda rows, positions: rows + rows[:, torch.arange(rows.shape[1]).flip(0)],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", matrix_but(torch.float32, of=(torch.float32, torch.bfloat16)))
def test_mixtures_of_rows(mixture: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="model = Mixing: "):
        on_a_ring(mixing(MIXTURES[mixture]).to(dtype))


@pytest.mark.parametrize("size", [32, 1])
@pytest.mark.parametrize("value", [0.0, 1e-5])
def test_mixtures_that_a_parameter_hides(value: float, size: int) -> None:
    """Until it is trained."""
    scale = torch.nn.Parameter(torch.full((size,), value))
    model = mixing(lambda rows, positions: rows + scale * rows.roll(1, 1))
    model.scale = scale
    with pytest.raises(ValueError, match="model = Mixing: "):
        on_a_ring(model)
    assert torch.equal(scale.detach(), torch.full((size,), value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_of_many_experts_are_accepted(dtype: torch.dtype) -> None:
    """Rounding must not send a row to another expert."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "num_hidden_layers": 4}
    on_a_ring(make("Qwen3MoeForCausalLM", **sizes).to(dtype))


def test_a_probe_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        on_a_ring(make())


def check_sharded_model(ring: Ring, way: str) -> None:
    """``fully_shard`` has sharded the model before it comes on the ring."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, batch = make(), batch_of("right")
    wanted = model(**batch).logits.detach()
    fully_shard(model, mesh=DeviceMesh("cpu", [*ring.ranks]))
    logits = call_on_a_ring(WAYS[way](model, ring), ring, way, batch).logits
    assert_near(ring.unshard(logits.detach(), seq_len=N)[0], wanted[0], 1e-5)


def test_a_probe_leaves_nothing_behind() -> None:
    model = make().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    on_a_ring(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules() if module is not model)


def check_findings(ring: Ring) -> None:
    """As by loaders that give only the first rank parameters with values."""
    model = on_a_ring(make("OPTForCausalLM"), ring, probe=ring.rank == 0)
    with pytest.raises(RingMismatchError, match=r"skips_padding \(as use_ring\(\) found them\)"):
        model(**batch_of("left"))


def check_skipped_layers(ring: Ring, way: str) -> None:
    model, batch = WAYS[way](make("OPTForCausalLM", layerdrop=0.5).train(), ring), batch_of("right")
    with pytest.raises(ValueError, match=r"^layerdrop = 0\.5: each rank of a ring would skip other layers"):
        call_on_a_ring(model, ring, way, batch)
    call_on_a_ring(model.eval(), ring, way, batch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", [check_sharded_model, check_skipped_layers])
def test_both_ways_to_put_a_model_on_a_ring(pair: World, check: Any, way: str) -> None:
    pair.run(on_ring, check, way)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_every_dtype(dtype: torch.dtype) -> None:
    for padding in ("left", "right"):
        batch = batch_of(padding)
        inputs = shard_inputs(Ring(), **{**batch, "attention_mask": batch["attention_mask"].to(dtype)})
        assert ("is_padded_before_tokens" in inputs) == (padding == "left")


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_tokens_that_the_mask_does_not_mark(padding: str) -> None:
    """RoBERTa gives every padding token the position before the first, whatever the mask says."""
    model, input_ids = on_a_ring(make("RobertaForMaskedLM")), batch_of(padding)["input_ids"]
    model(TOKENS[:1])
    for call in (model, partial(shard_inputs, Ring(), first_position=2)):
        with pytest.raises(ValueError, match="input_ids has the padding token 1 where there is no padding"):
            call(input_ids=input_ids)


def test_sequences_shorter_than_the_ring() -> None:
    with pytest.raises(ValueError, match="input_ids has 1 tokens for 2 ranks"):
        shard_inputs(Ring(2, 0), input_ids=torch.ones(1, 1, dtype=torch.int64))


def test_shards_of_another_layout() -> None:
    model, ring = registered(make(), Ring(), probe=False), Ring(2, 0, layout_kind="zigzag")
    with pytest.raises(ValueError, match="rows of a zigzag layout, and the attention is on a contiguous ring"):
        model(**shard_inputs(ring, input_ids=batch_of("right")["input_ids"][:1], **MARKS["seq_idx"]))


def loss_of(model: Any, padding: str = "right") -> Any:
    batch = batch_of(padding)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(**batch, labels=labels).loss.detach()


def loss_on(ring: Ring, name: str, padding: str, options: dict[str, Any]) -> Any:
    return loss_of(on_a_ring(make(name, **options), ring), padding)


@pytest.mark.parametrize(
    ("name", "padding", "options"),
    [
        ("WhisperForCausalLM", "right", {}),
        ("LlamaForCausalLM", "right", {}),
        ("BertForMaskedLM", "right", {}),
        ("RobertaForCausalLM", "left", {"is_decoder": True}),  # a row of padding has the first token's label
    ],
)
def test_losses_of_shifted_and_other_labels(pair: World, name: str, padding: str, options: dict[str, Any]) -> None:
    """The class of a model does not tell whether it shifts its labels."""
    model = make(name, **options)
    model.set_attn_implementation("sdpa")  # a row that sees no key is 0, as on a ring
    wanted = loss_of(model, padding)
    for loss in pair.run(on_ring, loss_on, name, padding, options, layout="zigzag"):
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
    on_a_ring(model)
    with pytest.raises(ValueError, match="labels is given: Weighted has no loss, or not the mean cross entropy"):
        loss_of(model)


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
    model = adapt(make(), config, task_type="CAUSAL_LM", **options)
    with pytest.raises(ValueError, match=message):
        loss_of(on_a_ring(model))


def adapt(model: Any, config: str = "LoraConfig", **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, getattr(peft, config)(target_modules=["q_proj"], **options))


# --- register() and shard_inputs() ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_whose_attention_is_not_registered(implementation: str) -> None:
    model = registered(make(), Ring())
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


SKIP = r"(?s)Mixing: model\.layers\.0\.input_layernorm.*register\(attention, probe=False\) skips this check"


def check_registered_models(ring: Ring) -> None:
    """They are probed. A model that was not given warns, and is probed when it generates."""
    inputs, refused = shard_inputs(ring, **batch_of("right")), mixing(MIXTURES["mean of the batch"])
    with pytest.raises(ValueError, match=SKIP):
        registered(refused, ring)
    assert refused.config._attn_implementation == "eager"
    assert not refused._forward_pre_hooks
    llama = registered(make(), ring)
    llama(**inputs)
    generate(llama, ring, **batch_of("left"), max_new_tokens=2)
    remove_ring(llama)
    with pytest.raises(ValueError, match="is on a ring already, and takes whole batches"):
        registered(on_a_ring(make(), ring), ring)
    assert llama.config._attn_implementation == "eager"
    assert not any(part._forward_pre_hooks for part in llama.modules())
    registered(refused, ring, probe=False)(**inputs)
    register(attention(ring))
    not_given = mixing(MIXTURES["mean of the batch"])
    not_given.set_attn_implementation("ring_dilated")
    with pytest.warns(UserWarning, match=r"register\(attention, model=model\)"):
        not_given(**inputs)
    with pytest.raises(ValueError, match=SKIP):
        generate(not_given, ring, **batch_of("left"), max_new_tokens=2)


def test_an_import_changes_nothing_in_transformers(tmp_path: Path) -> None:
    program = """
        import transformers
        from transformers.models.mixtral import modeling_mixtral
        names = transformers.PreTrainedModel, transformers.GenerationMixin, modeling_mixtral
        before = [dict(vars(owner)) for owner in names]
        import ring_backends.integrations.transformers, ring_backends.integrations.trainer
        assert [dict(vars(owner)) for owner in names] == before
    """
    output_of(["-c", textwrap.dedent(program)], tmp_path)


def check_other_weights(ring: Ring) -> None:
    model = make()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += ring.rank
    message = r"(?s)load the same checkpoint on every rank.*the ranks differ in lm_head\.weight"
    with pytest.raises(RingMismatchError, match=message):
        on_a_ring(model, ring)


@pytest.mark.parametrize("check", [check_findings, check_registered_models, check_other_weights])
def test_models_on_two_ranks(pair: World, check: Any) -> None:
    pair.run(on_ring, check)


def check_positions_of_opt(ring: Ring) -> None:
    """With the positions of a whole sequence, and with positions that begin after the padding."""
    batch, model = batch_of("left"), registered(make("OPTForCausalLM"), ring)
    positions = (batch["attention_mask"].cumsum(1) - 1).where(batch["attention_mask"] > 0, 1)
    with pytest.raises(ValueError, match="attention_mask has padding before tokens: OPTForCausalLM counts positions"):
        model(**shard_inputs(ring, **batch))
    logits = model(**shard_inputs(ring, **batch, position_ids=positions)).logits
    wanted = make("OPTForCausalLM")(**batch).logits
    assert_near(ring.unshard(logits.detach(), seq_len=N)[1, 15:], wanted[1, 15:].detach(), 1e-5)


def check_labels(ring: Ring) -> None:
    """Labels of the next token, and those of the rows themselves."""
    batch = batch_of("right")
    batch["labels"] = batch["input_ids"]
    shifted, own = (shard_inputs(ring, **batch, next_token_labels=is_next) for is_next in (True, False))
    whisper, llama = (registered(make(f"{name}ForCausalLM"), ring) for name in ("Whisper", "Llama"))
    refusal = r"(?s)labels are shifted, and the loss of WhisperForCausalLM.*next_token_labels=False"
    with pytest.raises(ValueError, match=refusal):
        whisper(**shifted)
    with pytest.raises(ValueError, match="labels are not shifted, and the loss of LlamaForCausalLM"):
        llama(**own)
    llama(**shifted)
    registered(whisper, ring)(**own)


@pytest.mark.parametrize("check", [check_positions_of_opt, check_labels])
def test_arguments_that_registered_models_refuse(pair: World, check: Any) -> None:
    """A ring of one refuses the same."""
    check(Ring())
    pair.run(on_ring, check)


def test_a_ring_of_one_runs_what_others_refuse() -> None:
    batch, model = batch_of("right"), mixing(MIXTURES["numbers and indices"])
    wanted = model(**batch).logits
    assert_near(registered(model, Ring())(**shard_inputs(Ring(), **batch)).logits, wanted, 1e-5)


# --- calls that go around the hooks of use_ring() ---------------------------------------------------------------------


WAYS_AROUND: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "forward": ("LlamaForCausalLM", lambda model: model.forward),
    "forward without a head": ("LlamaModel", lambda model: model.forward),
    "base model": ("LlamaForCausalLM", lambda model: model.model),
    "configuration": ("LlamaForCausalLM", lambda model: transformers.LlamaForCausalLM(copy.deepcopy(model.config))),
}


def check_way_around(ring: Ring, way: str) -> None:
    name, go_around = WAYS_AROUND[way]
    model = go_around(on_a_ring(make(name), ring))
    with pytest.raises(ValueError, match=r"use_ring\(\) cuts the batch in a call of the model that it was given"):
        model(**batch_of("right"))


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_calls_around_the_hooks(pair: World, way: str) -> None:
    pair.run(on_ring, check_way_around, way)


def check_peft(ring: Ring) -> None:
    model, batch = on_a_ring(adapt(make(), init_lora_weights=False), ring), batch_of("right")
    model(**batch)
    refusal = r"merge_and_unload\(\) or a copy of the configuration, call use_ring\(\)"
    with pytest.raises(ValueError, match=refusal):
        model.base_model(**batch)
    merged = model.merge_and_unload()
    with pytest.raises(ValueError, match=refusal):
        merged(**batch)
    on_a_ring(merged, ring)(**batch)


def adapted_later(ring: Ring | None) -> dict[str, Tensor]:
    """The logits of all rows, the loss, and this rank's gradients of adapters that a model gets on a ring, or alone."""
    model, batch = make(), batch_of("right")
    model = adapt(model if ring is None else on_a_ring(model, ring))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    found = model(**batch, labels=batch["input_ids"])
    found.loss.backward()
    logits = found.logits if ring is None else ring.unshard(found.logits, seq_len=N)
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach(), "loss": found.loss.detach(), **gradients}


def test_adapters_on_a_model_on_a_ring(pair: World) -> None:
    wanted, by_rank = adapted_later(None), pair.run(on_ring, adapted_later)
    is_token = batch_of("right")["attention_mask"].bool()
    for found in by_rank:
        assert_near(found.pop("logits")[is_token], wanted["logits"][is_token], 1e-5)
        assert_near(found.pop("loss"), wanted["loss"], 1e-5)
        assert len(found) == 2 * len(make().model.layers)
    for name in by_rank[0]:
        assert_near(sum(found[name] for found in by_rank) / len(by_rank), wanted[name], 1e-5)


def check_removal(ring: Ring) -> None:
    batch, model = batch_of("right"), make()
    wanted = model(**batch).logits
    remove_ring(on_a_ring(model, ring))
    assert_near(model(**batch).logits, wanted, 1e-9)
    adapted = adapt(on_a_ring(model, ring), task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"is on a ring already; call .*remove_ring\(model\) first"):
        on_a_ring(adapted, ring)
    remove_ring(adapted)
    with pytest.raises(ValueError, match="is not on a ring"):
        remove_ring(adapted)
    on_a_ring(adapted, ring)
    places = batch["input_ids"], batch["attention_mask"], None, batch["input_ids"]  # labels are the fourth of PEFT
    found = adapted(*places)
    assert_near(ring.unshard(found.logits, seq_len=N), wanted, 1e-5)
    assert found.loss is not None
    classifier = make("LlamaForSequenceClassification", pad_token_id=1)
    wanted = classifier(**batch).logits
    remove_ring(on_a_ring(classifier, ring))
    assert_near(classifier(**batch).logits, wanted, 1e-9)


@pytest.mark.parametrize("check", [check_peft, check_removal])
def test_peft_on_two_ranks(pair: World, check: Any) -> None:
    pytest.importorskip("peft")
    pair.run(on_ring, check)


ROUTER = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_router_coefficient_that_is_set_later() -> None:
    for owner in (lambda model: model, lambda model: model.config):
        losses = []
        for model in (make("MixtralForCausalLM", **ROUTER), on_a_ring(make("MixtralForCausalLM", **ROUTER))):
            owner(model).router_aux_loss_coef = 5.0
            batch = batch_of("right")
            losses.append(model(**batch, labels=batch["input_ids"], output_router_logits=True).loss)
        assert_near(losses[1], losses[0], 1e-5)


def check_router_loss(ring: Ring) -> None:
    """The router loss is that of all rows, and the code of transformers stays as it is."""
    modeling = transformers.models.mixtral.modeling_mixtral
    before, batch, own = dict(vars(modeling)), batch_of("right"), make("MixtralForCausalLM", **ROUTER)
    arguments = {**batch, "labels": batch["input_ids"], "output_router_logits": True}
    wanted = own(**arguments)  # the first call adds hooks of transformers, which capture the router's logits
    hooks = [(dict(part._forward_hooks), dict(part._forward_pre_hooks)) for part in own.modules()]
    found = on_a_ring(own, ring)(**arguments)
    assert_near(found.aux_loss, wanted.aux_loss, 1e-5)
    assert_near(found.loss, wanted.loss, 1e-5)
    assert vars(modeling) == before
    remove_ring(own)
    assert [(dict(part._forward_hooks), dict(part._forward_pre_hooks)) for part in own.modules()] == hooks
    assert own.config._attn_implementation == "eager"
    assert_near(own(**arguments).loss, wanted.loss, 1e-9)


def test_router_losses_change_no_code_of_transformers(pair: World) -> None:
    pair.run(on_ring, check_router_loss)


def test_a_loss_that_is_replaced_later_is_refused() -> None:
    model, batch = on_a_ring(make()), batch_of("right")
    model(**batch, labels=batch["input_ids"])
    model.loss_function = lambda logits, labels, **_: logits.sum()
    model(**batch)
    with pytest.raises(ValueError, match="loss_function of LlamaForCausalLM was replaced"):
        model(**batch, labels=batch["input_ids"])


IS_KEPT, EMPTY = torch.arange(N) != 3, TOKENS.where(torch.tensor([[True], [False]]), 1)
BETWEEN = {"input_ids": TOKENS.where(IS_KEPT, 1), "attention_mask": MASK * IS_KEPT}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "LlamaForCausalLM",
            {"labels": TOKENS, "ignore_index": 0},
            "ignore_index is given: the loss of a ring ignore",
        ),
        ("LlamaForSequenceClassification", {"input_ids": EMPTY}, "input_ids has only padding in sequence 1"),
        ("RobertaForMaskedLM", BETWEEN, "input_ids has padding between tokens: roberta"),
        *[
            ("LlamaForCausalLM", {name: transformers.DynamicCache()}, f"{name} is given: key/value caches")
            for name in ("cache", "past_key_values")
        ],
    ],
)
def test_calls_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_a_ring(make(name))(**{"input_ids": TOKENS, "attention_mask": MASK, **changes})


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


PADDED = {"attention_mask": torch.tensor([[1] * 12 + [2] * 8 + [0] * 4])}
CASES = [*((marks, LENGTHS) for marks in MARKS.values()), (PADDED, (12, 8))]


@pytest.mark.parametrize(("marks", "lengths"), CASES, ids=[*MARKS, "padded"])
def test_every_mark_of_documents_is_used(marks: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Padding belongs to no document."""
    model, tokens, number = make(), batch_of("right")["input_ids"][:1], sum(lengths)
    wanted = torch.cat([model(input_ids=document).logits for document in tokens[:, :number].split(lengths, 1)], 1)
    assert_near(on_a_ring(model)(input_ids=tokens, **marks).logits[:, :number], wanted, 1e-5)


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
