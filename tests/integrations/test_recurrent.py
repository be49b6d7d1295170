"""Models of transformers with convolutions and recurrent layers on a ring equal one process."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import pytest
import torch
from native_ranks import assert_near, on_ring
from recurrent_models import KINDS, Batch, alone, assert_equal, computed, logits_of, make_model, on_ranks
from small_models import build
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers_checks import PRELOAD as PRELOAD
from transformers_checks import Computed, compare

from ring_backends import Ring
from ring_backends.integrations.transformers import describe, register, remove_ring, shard_inputs, use_ring
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.rings import LAYOUTS, RingSpec
from ring_backends.testing.world import World

QUICK = ("jamba",)
PACKED = ((3, 13, 8, 24), (7, 38, 3))
"""Documents of which some share a rank, one begins with the rows of a rank, and one lies on all ranks."""


def test_early_tokens_change_late_logits() -> None:
    """Otherwise a ring that passes nothing on would be equal, too."""
    tokens = Batch(32).inputs["input_ids"]
    changed = tokens.clone()
    changed[:, 15] = tokens[:, 15] % 22 + 1
    for kind in KINDS:
        model = make_model(kind)
        first, second = (model(input_ids=x).logits for x in (tokens, changed))
        assert (first - second)[:, 16:].abs().max() > 0.01, kind


def batches_of(kind: str, size: int) -> list[Batch]:
    """A batch with padding on each side, packed ones, and sequences shorter than a convolution."""
    packed = [] if kind == "minimax" else [Batch(48, documents=PACKED), Batch(5, documents=((1, 2, 2),))]
    return [Batch(61, right=17), Batch(40, left=17), *packed, Batch(size), Batch(2 * size + 1)]


def check(world: World, kind: str, size: int, layouts: Iterable[Any], ulysses_size: int = 1) -> None:
    spec = RingSpec(str(size), (tuple(range(size)),), "size", ulysses_size=ulysses_size)
    batches = batches_of(kind, size)
    wanted = alone(kind, batches)
    for layout in layouts:
        assert_equal(world.run(on_ring, on_ranks, kind, batches, layout=layout, rings=spec), wanted, batches)


@pytest.mark.parametrize("kind", matrix_but(*QUICK, of=KINDS))
def test_rings_of_two(pair: World, kind: str) -> None:
    check(pair, kind, 2, LAYOUTS)


@pytest.mark.parametrize("kind", matrix_but(of=KINDS))
def test_rings_of_three(worlds: Callable[[int], World], kind: str) -> None:
    check(worlds(3), kind, 3, ("zigzag",))


@pytest.mark.parametrize("kind", matrix_but(of=("olmo_hybrid", "falcon_h1")))
def test_groups_of_ranks(world: World, kind: str) -> None:
    """Pairs of ranks exchange rows for heads in the attention, and pass on states as other ranks do."""
    check(world, kind, 4, ("zigzag",), ulysses_size=2)


# --- activation checkpointing, copies, adapters -----------------------------------------------------------------------

LENGTHS = (Batch(31), Batch(44, right=9))


def with_outstanding_backwards(ring: Ring | None, kind: str, way: str) -> list[Computed]:
    """Both forwards come before both backwards."""
    model = make_model(kind).train()
    if ring is not None:
        use_ring(model, ring)
    if way == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, GradientCheckpointingLayer))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    outputs = [model(**batch.inputs) for batch in LENGTHS]
    return [computed(model, found.logits, batch, ring) for found, batch in zip(outputs, LENGTHS, strict=True)]


@pytest.mark.parametrize("kind", matrix_but("jamba", of=("qwen3_next", "bamba", "mamba", "jamba", "minimax")))
def test_activation_checkpointing_with_two_outstanding_backwards(pair: World, kind: str) -> None:
    """The arguments of the first call still hold in its backward."""
    for way in ("reentrant", "not reentrant", *(() if kind == "mamba" else ("wrapper",))):
        wanted = with_outstanding_backwards(None, kind, way)
        assert_equal(pair.run(on_ring, with_outstanding_backwards, kind, way, layout="zigzag"), wanted, LENGTHS)


def test_wrapped_blocks_that_get_no_arguments(pair: World) -> None:
    """Their layers cannot find their rows when torch's own wrapper computes the blocks again."""
    found = pair.run(on_ring, ending_of_wrapped_blocks)
    for ended in found:
        ended.check(ValueError, "MambaMixer does not know", "call model.gradient_checkpointing_enable()")


def ending_of_wrapped_blocks(ring: Ring) -> Ended:
    return ending(with_outstanding_backwards, ring, "mamba", "wrapper")


def with_lora(ring: Ring | None, kind: str) -> list[Computed]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*(in_proj\w*|q_proj|o_proj)", init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(make_model(kind), config).train()
    if ring is not None:
        use_ring(model, ring)
    batch = LENGTHS[1]
    return [computed(model, model(**batch.inputs).logits, batch, ring)]


@pytest.mark.parametrize("kind", matrix_but("qwen3_next", of=("qwen3_next", "jamba", "nemotron_h")))
def test_lora(pair: World, kind: str) -> None:
    wanted = with_lora(None, kind)
    assert {name.rpartition("lora_")[1] for name in wanted[0].gradients} == {"lora_"}
    assert_equal(pair.run(on_ring, with_lora, kind), wanted, LENGTHS[1:])


def with_a_loss(ring: Ring | None, kind: str) -> Computed:
    """The loss of next tokens and of routers, and the gradients of it."""
    model = make_model(kind, output_router_logits=True, router_aux_loss_coef=0.5).train()
    if ring is not None:
        use_ring(model, ring)
    inputs = LENGTHS[1].inputs
    outputs = model(**inputs, labels=inputs["input_ids"].where(LENGTHS[1].rows, -100))
    (outputs.loss / (1 if ring is None else ring.size)).backward()
    assert outputs.aux_loss > 0
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Computed(torch.zeros(1), gradients, float(outputs.loss))


@pytest.mark.parametrize("kind", matrix_but("jamba", of=("jamba", "qwen3_next")))
def test_router_losses(pair: World, kind: str) -> None:
    verdict = compare(pair.run(on_ring, with_a_loss, kind), with_a_loss(None, kind), None, 1e-5)
    assert verdict.status == "EQUAL", verdict.why


def with_others(ring: Ring, kind: str) -> list[Any]:
    """Calls of several models of one class: on a ring, alone, and on a ring of another layout."""
    (batch,) = ONE_BATCH
    model, other, zigzag = make_model(kind), make_model(kind, seed=1), make_model(kind, seed=2)
    use_ring(model, ring)
    use_ring(zigzag, ring.with_layout("zigzag"))
    copied = copy.deepcopy(model)
    found = {
        "on the ring": ring.unshard(model(**batch.inputs).logits, seq_len=batch.length),
        "alone": other(**batch.inputs).logits,
        "zigzag": ring.with_layout("zigzag").unshard(zigzag(**batch.inputs).logits, seq_len=batch.length),
        "copied": ring.unshard(copied(**batch.inputs).logits, seq_len=batch.length),
    }
    remove_ring(model)
    found["removed"] = model(**batch.inputs).logits
    found["still on the ring"] = ring.unshard(copied(**batch.inputs).logits, seq_len=batch.length)
    remove_ring(copied)
    found["removed from the copy"] = copied(**batch.inputs).logits
    text = model.generate(**batch.inputs, max_new_tokens=3, do_sample=False, use_cache=True)
    return [{name: logits.detach() for name, logits in found.items()}, text]


ONE_BATCH = (Batch(37, left=5),)


@pytest.mark.parametrize("kind", matrix_but("jamba", of=("jamba", "qwen3_5_text", "minimax")))
def test_copies_and_models_beside_those_on_a_ring(pair: World, kind: str) -> None:
    models = [make_model(kind, seed=seed) for seed in range(3)]
    of_model, of_other, of_zigzag = (logits_of(model, ONE_BATCH[0]).detach() for model in models)
    text = models[0].generate(**ONE_BATCH[0].inputs, max_new_tokens=3, do_sample=False, use_cache=True)
    rows = ONE_BATCH[0].rows
    for found, generated in pair.run(on_ring, with_others, kind):
        assert torch.equal(generated, text)
        for name, logits in found.items():
            wanted = {"alone": of_other, "zigzag": of_zigzag}.get(name, of_model)
            assert_near(logits[rows], wanted[rows], 1e-4)


# --- shard_inputs -----------------------------------------------------------------------------------------------------


def with_local_rows(ring: Ring, kind: str, batch: Batch, use_cache: bool) -> list[Computed]:
    model = make_model(kind, use_cache=use_cache)
    register(ring, model=model)
    outputs = model(**shard_inputs(ring, **batch.inputs))
    assert outputs.get("cache") is None
    return [computed(model, outputs.logits, batch, ring)]


@pytest.mark.parametrize("kind", matrix_but("jamba", of=("jamba", "mamba", "bamba", "qwen3_next", "lfm2", "minimax")))
def test_shard_inputs_with_the_default_of_use_cache(pair: World, kind: str) -> None:
    """There are fewer rows than the window of a convolution."""
    for batch in (Batch(5), Batch(30, left=7)):
        found = pair.run(on_ring, with_local_rows, kind, batch, True, layout="zigzag")
        assert_equal(found, alone(kind, [batch]), [batch])


def refusals(ring: Ring, kind: str) -> dict[str, Ended]:
    """How calls end that a ring does not compute."""
    model, batch = make_model(kind), Batch(9)
    register(ring, model=model)
    local = shard_inputs(ring, **batch.inputs)
    with torch.no_grad():
        model(**local)
        found = {"cache": ending(model, **local, use_cache=True)}
        found["other rows"] = ending(model, **Batch(local["input_ids"].shape[1]).inputs)
        found["one row"] = ending(model, **shard_inputs(ring, **Batch(2, right=1).inputs))
    return found


@pytest.mark.parametrize("kind", matrix_but("jamba", of=("jamba", "mamba", "mamba2", "qwen3_next", "lfm2", "minimax")))
def test_calls_that_are_refused(pair: World, kind: str) -> None:
    """Rows that do not come from shard_inputs() are refused, as many as there were in the call before."""
    for found in pair.run(on_ring, refusals, kind):
        found["cache"].check(ValueError, "use_cache = True: not supported by a ring; leave it out.")
        found["other rows"].check(ValueError, "does not know which rows of a sequence it gets")
        if kind != "mamba":  # transformers masks also a single row of it
            found["one row"].check(ValueError, "gets one row on this rank", "pad the sequence to at least 4 tokens")


def test_one_row_with_padding(pair: World) -> None:
    batches = (Batch(2, right=1), Batch(2, left=1))
    assert_equal(pair.run(on_ring, on_ranks, "mamba", batches), alone("mamba", batches), batches)


def refused_documents(ring: Ring) -> Ended:
    model = make_model("minimax")
    use_ring(model, ring)
    return ending(model, **Batch(48, documents=PACKED).inputs)


def test_packed_documents_with_lightning_attention(pair: World) -> None:
    for found in (refused_documents(Ring()), *pair.run(on_ring, refused_documents)):
        found.check(
            ValueError, "document_ids are given: MiniMaxLightningAttention does not keep packed documents apart"
        )


def by_name(ring: Ring, kind: str) -> Ended:
    register(ring, probe=False)
    model = make_model(kind)
    model.set_attn_implementation("ring_dilated")
    return ending(model, **shard_inputs(ring, **Batch(9).inputs))


@pytest.mark.parametrize("kind", matrix_but("qwen3_next", of=("qwen3_next", "falcon_h1", "lfm2", "jamba")))
def test_models_that_were_not_given_to_register(pair: World, kind: str) -> None:
    for found in pair.run(on_ring, by_name, kind):
        found.check(ValueError, "layer_types has ", "the model was given to use_ring(), attach() or register(")


def test_layers_of_unknown_types() -> None:
    model = make_model("lfm2")
    model.config.layer_types = ["conv", "telepathy"]
    with pytest.raises(ValueError, match="layer_types has telepathy: a ring does not know how these layers mix"):
        use_ring(model, Ring())


def test_layers_of_two_models_on_rings() -> None:
    """Two sets of hooks would end their calls in the wrong order, and leave one that other models would join."""
    policy, value = make_model("jamba"), make_model("jamba", seed=1)
    value.model = policy.model
    register(Ring(), "ring_of_policy", model=policy)
    for put in (register, use_ring):
        with pytest.raises(ValueError, match="its JambaMambaMixer is on a ring already, in another model"):
            put(Ring(), "ring_of_value", model=value) if put is register else use_ring(value, Ring())
    remove_ring(policy)
    use_ring(value, Ring())


def test_a_function_that_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would compute its own rows alone."""
    model = make_model("lfm2")
    use_ring(model, Ring())
    module = import_module(type(model).__module__)
    monkeypatch.setattr(module, "causal_conv1d_fn", module.causal_conv1d_fn.__wrapped__)
    with pytest.raises(ValueError, match=r"causal_conv1d_fn of .*modeling_lfm2 was replaced after the model was"):
        model(**Batch(8).inputs)


def test_an_interrupted_call() -> None:
    """torch runs no hooks after an interrupt, so the call would go on in every model of the class."""
    batch, other = Batch(5, documents=((1, 2, 2),)), make_model("jamba")
    model = make_model("jamba")
    use_ring(model, Ring())
    wanted, beside = model(**batch.inputs).logits, other(**Batch(5).inputs).logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].mamba.x_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch.inputs)
    hook.remove()
    assert torch.equal(model(**batch.inputs).logits, wanted)
    assert torch.equal(other(**Batch(5).inputs).logits, beside)


def test_a_reentrant_wrapper_on_one_rank() -> None:
    """What is computed again knows nothing of the documents, unless the arguments of the model reach the layer."""
    model = make_model("mamba").train()
    use_ring(model, Ring())
    wrapped = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(model, wrapped, lambda part: isinstance(part, GradientCheckpointingLayer))
    logits = model(**Batch(5, documents=((1, 2, 2),)).inputs).logits
    with pytest.raises(ValueError, match=r"MambaMixer does not know which rows .*gradient_checkpointing_enable"):
        logits.sum().backward()


def test_pickles() -> None:
    llama, hybrid = build("llama"), make_model("lfm2")
    for model in (llama, hybrid):
        register(Ring(), "ring_of_pickles", model=model)
    assert pickle.loads(pickle.dumps(llama)).config.hidden_size == llama.config.hidden_size
    with pytest.raises(TypeError, match=r"recurrent layers is on a ring, and cannot be pickled: save model.state_dict"):
        pickle.dumps(hybrid)
    remove_ring(hybrid)
    pickle.dumps(hybrid)


# --- what is passed on ------------------------------------------------------------------------------------------------

DESCRIBED = {
    "qwen3_next": "model.layers.0.linear_attn: convolution of 4 positions (passes on 3); delta rule (passes on "
    "4 × 8 × 6 numbers and 4 matrices of 8 × 8)\nmodel.layers.1.self_attn: causal, full attention",
    "bamba": "model.layers.0.mamba: convolution of 4 positions (passes on 3); Mamba 2 (passes on 4 × 16 × 8 numbers "
    "and 4 decays)\nmodel.layers.1.self_attn: causal, full attention",
    "mamba": "backbone.layers.0.mixer, backbone.layers.1.mixer: convolution of 4 positions (passes on 3); Mamba 1 "
    "(passes on 48 × 8 numbers and as many decays)",
    "minimax": "model.layers.0.self_attn: lightning attention (passes on 4 × 8 × 8 numbers)\n"
    "model.layers.1.self_attn: causal, full attention",
}


def described(ring: Ring, kind: str) -> str:
    model = make_model(kind)
    use_ring(model, ring)
    return describe(model)


@pytest.mark.parametrize("kind", DESCRIBED)
def test_what_each_layer_passes_on_in_words(kind: str) -> None:
    assert described(Ring(), kind) == DESCRIBED[kind]


def sent_bytes(ring: Ring, kind: str, length: int) -> list[int]:
    """What this rank sends in the forward and in the backward of a model without an attention."""
    model, found = make_model(kind), []
    use_ring(model, ring)
    logits = None
    for _ in range(2):  # the first call compares the batches
        ring.traffic.reset()
        logits = model(**Batch(length).inputs).logits
    assert logits is not None
    found.append(ring.traffic.bytes)
    ring.traffic.reset()
    logits.sum().backward()
    return [*found, ring.traffic.bytes]


def test_traffic_does_not_grow_with_the_length(pair: World) -> None:
    """A layer sends 3 rows of its convolution, and the state, to the next rank; and their gradients back."""
    rows, state = 3 * 48, 48 * 8
    expected = 4 * 2 * 2 * (rows + state)  # bytes of 2 layers and 2 sequences
    for length in (24, 61):
        assert pair.run(on_ring, sent_bytes, "mamba", length) == [[expected, 0], [0, expected]]


# --- precision, compilation, unknown functions ------------------------------------------------------------------------


def rounded(ring: Ring | None, kind: str, dtype: torch.dtype) -> Computed:
    batch, model = LENGTHS[1], make_model(kind).to(dtype)
    if ring is not None:
        use_ring(model, ring)
    return computed(model, model(**batch.inputs).logits.float(), batch, ring)


def error_of(found: Iterable[Computed], wanted: Computed) -> tuple[float, float]:
    """The largest error of logits, and the relative error of all gradients."""
    by_rank, rows = list(found), LENGTHS[1].rows
    of_logits = max(float((computed.logits - wanted.logits)[rows].abs().max()) for computed in by_rank)
    sums = [sum(computed.gradients[name].float() for computed in by_rank) for name in wanted.gradients]
    norms = [(one - other).norm() for one, other in zip(sums, wanted.gradients.values(), strict=True)]
    return of_logits, float(
        torch.stack(norms).norm() / torch.stack([x.norm() for x in wanted.gradients.values()]).norm()
    )


@pytest.mark.parametrize("kind", matrix_but(of=("qwen3_next", "kimi_linear", "bamba", "jamba", "lfm2", "minimax")))
def test_bf16(pair: World, kind: str) -> None:
    exact = rounded(None, kind, torch.float32)
    own = error_of([rounded(None, kind, torch.bfloat16)], exact)
    found = error_of(pair.run(on_ring, rounded, kind, torch.bfloat16, layout="zigzag"), exact)
    assert own[0] > 0
    for of_ring, of_one in zip(found, own, strict=True):
        assert of_ring <= 2 * of_one, (found, own)


def compiled(ring: Ring, kind: str) -> list[Computed]:
    model, batch = make_model(kind), LENGTHS[1]
    use_ring(model, ring)
    outputs: Any = torch.compile(model, backend="eager")(**batch.inputs)
    return [computed(model, outputs.logits, batch, ring)]


@pytest.mark.parametrize("kind", matrix_but(of=("lfm2", "bamba", "minimax")))
def test_a_compiled_model(pair: World, kind: str) -> None:
    assert_equal(pair.run(on_ring, compiled, kind), alone(kind, LENGTHS[1:]), LENGTHS[1:])


@THOROUGH
def test_another_model_of_the_class_compiles_in_one_graph() -> None:
    use_ring(make_model("lfm2"), Ring())
    model, inputs = make_model("lfm2"), Batch(9).inputs
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert_near(whole(**inputs).logits, model(**inputs).logits, 1e-6)


OTHERS: dict[str, tuple[str, str, Callable[[Any], Callable[..., Any]]]] = {
    "a convolution that reads the whole sequence": (
        "lfm2",
        "causal_conv1d_fn",
        lambda own: lambda rows, *args, **kwargs: own(rows + rows.mean(2, keepdim=True), *args, **kwargs),
    ),
    "a delta rule that counts its rows": (
        "qwen3_next",
        "torch_chunk_gated_delta_rule",
        lambda own: (
            lambda *args, beta, **kwargs: own(*args, beta=beta / torch.arange(1, beta.shape[1] + 1)[:, None], **kwargs)
        ),
    ),
    "a scan with another state": (
        "bamba",
        "mamba2_chunk_scan",
        lambda own: (
            lambda *args, **kwargs: (
                (found[0], found[1].flip(3)) if isinstance(found := own(*args, **kwargs), tuple) else found
            )
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_unknown_functions_of_known_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, function, change = OTHERS[name]
    model = make_model(kind)
    module = import_module(type(model).__module__)
    own = inspect.unwrap(getattr(module, function))
    monkeypatch.setattr(module, function, functools.wraps(own)(change(own)))
    with pytest.raises(ValueError, match=f"{function} of this release of transformers gives rows other values"):
        use_ring(model, Ring())


def test_unknown_lightning_attention() -> None:
    model = make_model("minimax")
    model.model.layers[0].self_attn.slope_rate *= 2
    with pytest.raises(ValueError, match=r"MiniMaxLightningAttention of this release .* computes another recurrence"):
        use_ring(model, Ring())
