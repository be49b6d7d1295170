"""torchscale's LongNet in other models has on rings the results and gradients of its own code on one process."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import gigapath_cases
import pytest
import torch
import torch.distributed as dist
import torchscale_cases as cases
import torchscale_modules
from native_ranks import assert_near, world_of
from torch import nn

from ring_backends import AdapterUnavailableError, Ring, RingMismatchError
from ring_backends.adapters import native
from ring_backends.integrations import gigapath, torchscale
from ring_backends.longnet import LongNetDecoder, LongNetEncoder
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import THREE_OF_THREE, TWO_OF_TWO, new_ring
from ring_backends.testing.world import World, on_every_rank

LONG = pytest.mark.matrix(reason="runs many models")

PRELOAD = ("torchscale_cases",)
world, three = world_of(2), world_of(3)


def check(ranks: World, kind: str, layout: str, numbers: Any, how: str, exact: bool = True, **options: Any) -> Any:
    """Compare a batch on all ranks and on one with torchscale's own code, whose results are returned."""
    own, rings = "alone" if how == "kept" else how, TWO_OF_TWO if ranks.size == 2 else THREE_OF_THREE
    call = {"constant_mixing": not exact, **options}
    expected = cases.by_own_code(kind, numbers, own, exact=exact, **options)
    by_rank = ranks.run(cases.here, kind, rings, layout, numbers, how, **call)
    for found in (by_rank, [cases.here(kind, None, layout, numbers, how, **call)]):
        gigapath_cases.assert_same(found, expected, 1e-10)
    return expected


@pytest.mark.parametrize("kind", matrix_but("embeddings", "decoder", of=cases.KINDS))
def test_two_ranks(world: World, kind: str) -> None:
    """Without a mask and with one, which sets embeddings to zero in encoders and does nothing in decoders."""
    check(world, kind, "zigzag", (61, 61), "whole")
    check(world, kind, "contiguous", (34, 61), "masked")


@pytest.mark.parametrize("kind", matrix_but("embeddings", of=cases.KINDS))
def test_without_padding(world: World, kind: str) -> None:
    """With ``ignore_padding``, each sequence has the outputs and gradients of this sequence alone."""
    check(world, kind, "zigzag", (34, 1, 61), "kept")


@pytest.mark.parametrize("kind", matrix_but("embeddings", of=cases.KINDS))
def test_constant_mixing(world: World, kind: str) -> None:
    """Then gradients are those of torchscale's own code, which has none of the weights that mix its branches."""
    _, own = check(world, kind, "zigzag", (61, 61), "whole", exact=False)
    _, exact = cases.by_own_code(kind, (61, 61), "whole")
    name = f"{'decoder' if kind == 'decoder' else 'encoder'}.layers.0.self_attn.q_proj.weight"
    assert gigapath_cases.largest_error(exact[name], own[name]) > 1e-2


@LONG
@pytest.mark.parametrize("numbers", [(2, 1), (120, 90)], ids=str)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_three_ranks(three: World, kind: str, numbers: Any) -> None:
    """One of the batches has fewer tokens than ranks."""
    for how in ("whole", "masked", "kept"):
        check(three, kind, "contiguous", numbers, how)


@LONG
@pytest.mark.parametrize(
    "options", [{}, {"deepnorm": True}, {"layernorm_embedding": True, "checkpoint_activations": True}], ids=str
)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_published_classes(three: World, world: World, kind: str, options: Any) -> None:
    if find_spec("torchscale") is None or find_spec("torchscale.model.LongNet") is None:
        if "RING_BACKENDS_NEEDS_PEERS" in os.environ:
            pytest.fail("RING_BACKENDS_NEEDS_PEERS is set, but torchscale.model.LongNet cannot be imported")
        pytest.skip("no torchscale with torchscale.model.LongNet is installed")
    for ranks in (world, three):
        for how in ("whole", "masked", "kept"):
            check(ranks, kind, "contiguous", (61, 34), how, real=True, **options)
        check(ranks, kind, "zigzag", (61, 34), "masked", exact=False, real=True, **options)


@LONG
def test_random_numbers(world: World) -> None:
    """A ring draws the numbers of one process for stochastic depth and attention dropout, whatever the ranks' seeds."""
    options = {"drop_path_rate": 0.6, "attention_dropout": 0.2}
    call = ((61, 61), "whole", 5)
    expected = cases.here("embeddings", None, "contiguous", *call, **options)
    found = world.run(cases.here, "embeddings", TWO_OF_TWO, "contiguous", *call, **options)
    gigapath_cases.assert_same(found, expected, 1e-10)
    outs = world.run(cases.here, "embeddings", TWO_OF_TWO, "contiguous", *call, dropout=0.3)
    assert all(map(torch.equal, outs[0][0], outs[1][0]))


@on_every_rank
def test_every_rank_computes_its_own_rows() -> None:
    """The feed-forward networks of rank 0 compute 31 of 61 rows, and those of rank 1 the others."""
    model, found = cases.on_ring("embeddings", TWO_OF_TWO), []
    model.encoder.layers[0].ffn.register_forward_hook(lambda module, args, out: found.append(out.shape[1]))
    model(torch.zeros(1, 61, cases.IN_CHANNELS, dtype=torch.float64))
    assert found == [30 if dist.get_rank() else 31], found


CHANGES = ("rounding", "token_embeddings", "src_tokens", "encoder_padding_mask", "training mode")


@pytest.mark.parametrize("change", matrix_but(*CHANGES[:2], of=CHANGES))
@on_every_rank
def test_ranks_with_different_inputs(change: str) -> None:
    kind = "tokens" if change in ("src_tokens", "encoder_padding_mask") else "embeddings"
    model, (x, mask) = cases.make_model(kind), cases.make_batch(kind, (30, 20))
    cases.use(model, new_ring(cases.ADAPTER, TWO_OF_TWO))  # a mismatch closes the ring
    if dist.get_rank() == 1:
        x = x * (1 + 1e-9) if change == "rounding" else x.flip(0) if change in ("src_tokens", "token_embeddings") else x
        mask = mask.flip(0) if change == "encoder_padding_mask" else mask
        model.train(change != "training mode")
    is_refused = pytest.raises(RingMismatchError, match=change) if change != "rounding" else contextlib.nullcontext()
    with is_refused:
        model(x, mask)


@on_every_rank
def test_an_error_of_one_rank_is_that_of_all() -> None:
    model, (x, _) = cases.on_ring("tokens", TWO_OF_TWO), cases.make_batch("tokens", (30, 20))
    x[0, 29] = cases.VOCABULARY  # only the last rank would look it up
    message = r"src_tokens of model\.encoder reaches 19: model\.encoder\.embed_tokens has rows 0 … 18"
    with pytest.raises(ValueError, match=message):
        model(x)


def test_a_decoder_makes_no_states_unless_told() -> None:
    model, (x, _) = cases.on_ring("decoder", None), cases.make_batch("decoder", (9, 9))
    assert model.decoder(x)[1]["inner_states"] == []
    assert len(model.decoder(x, return_all_hiddens=True)[1]["inner_states"]) == 1 + cases.LAYERS


@pytest.mark.parametrize("options", [{"positions": torch.arange(9).flip(0)[None]}, {"features_only": True}])
def test_options_of_a_call(options: dict[str, Any]) -> None:
    model, own, (x, _) = cases.on_ring("tokens", None), cases.make_model("tokens"), cases.make_batch("tokens", (9, 9))
    found, expected = (one.encoder(x, **options) for one in (model, own))
    assert_near(found["encoder_out"], expected["encoder_out"])


@pytest.mark.parametrize("kind", cases.KINDS[1:])
def test_conversion_to_the_longnet_of_this_package(kind: str) -> None:
    """Heads, activation, scale and epsilon are those of the module. Its parameters are copied."""
    part, (x, _) = next(cases.make_model(kind).children()), cases.make_batch(kind, (30, 30))
    for module in part.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-2
    own = part(x)["encoder_out"] if kind == "tokens" else part(x)[0]
    attention = native.RingDilatedAttention(**vars(torchscale.pattern_of(part)))
    convert, other = LongNetEncoder.from_torchscale, LongNetDecoder.from_torchscale
    if kind == "decoder":
        convert, other = other, convert
    converted = convert(part, attention)
    assert_near(converted(x), own)
    copies, originals = ({x.data_ptr() for x in module.parameters()} for module in (converted, part))
    assert copies.isdisjoint(originals)
    with pytest.raises(TypeError, match=f"module = {type(part).__name__}: expected a LongNet.* of torchscale; give it"):
        other(part, attention)
    part.args.activation_fn = "swish"
    with pytest.raises(ValueError, match="activation = 'swish': unknown option; choose 'gelu' or 'relu'"):
        convert(part, attention)


def test_copies_and_remove_ring() -> None:
    model, (x, mask) = cases.on_ring("tokens", None), cases.make_batch("tokens", (9, 5))
    expected = cases.make_model("tokens")(x, mask)
    assert model.state_dict().keys() == cases.make_model("tokens").state_dict().keys()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.encoder.forward.__self__.part is copied.encoder
        cases.use(copied, Ring(), {"constant_mixing": True})  # as in a process with another ring
        assert_near(copied(x, mask), expected)
        torchscale.remove_ring(copied)
        replaced = ("forward", "_replicate_for_data_parallel")
        assert not any(name in vars(module) for module in copied.modules() for name in replaced)
        assert_near(copied(x, mask), expected)
        with pytest.raises(ValueError, match="model = Genomes: is not on a ring; give a model"):
            torchscale.remove_ring(copied)


def test_a_slide_encoder_is_a_model_with_an_encoder() -> None:
    """Its own integration shards the tiles before the projection, and cannot be used at the same time."""
    model, slide = gigapath_cases.make_model(), gigapath_cases.make_slide(30)
    (expected,) = model(*slide)
    cases.use(model, Ring())
    assert_near(model(*slide)[0], expected)
    message = r"slide_encoder.encoder.forward was replaced, .*; call torchscale.remove_ring"
    with pytest.raises(ValueError, match=message):
        gigapath.use_ring(model, gigapath_cases.attention_of(model))
    torchscale.remove_ring(model)
    gigapath.use_ring(model, gigapath_cases.attention_of(model))
    with pytest.raises(ValueError, match=r"model.encoder is on a ring by gigapath.use_ring; call gigapath.remove_ring"):
        cases.use(model, Ring())


def test_patterns_and_attentions() -> None:
    both = nn.ModuleList([cases.make_model("embeddings"), cases.make_model("decoder", segment_length="[8, 16, 32]")])
    several = r"ModuleList has several patterns; .*model.0.encoder has .*model.1.decoder has"
    with pytest.raises(ValueError, match=several):
        torchscale.pattern_of(both)
    advice = r"not the pattern of model.encoder; use RingDilatedAttention\(\[8, 16, 64\], "
    with pytest.raises(ValueError, match=advice):
        cases.use(cases.make_model("tokens"), Ring(), offset="mod")
    with pytest.raises(ValueError, match=r"dropout_p = 0.0: model.encoder has 0.2"):
        cases.use(cases.make_model("tokens", attention_dropout=0.2), Ring())


def test_what_has_no_longnet() -> None:
    attention = native.RingDilatedAttention([8], [1])
    with pytest.raises(TypeError, match="model = Linear: contains no LongNetEncoder or LongNetDecoder of torchscale"):
        torchscale.use_ring(nn.Linear(1, 1), attention)
    with pytest.raises(TypeError, match=r"a LongNet of ring_backends.longnet has its ring from its attention"):
        torchscale.use_ring(LongNetEncoder(8, 2, 8, 1, attention), attention)
    with pytest.raises(TypeError, match="attention = Linear: expected a RingDilatedAttention"):
        torchscale.use_ring(cases.make_model("tokens"), nn.Linear(1, 1))  # type: ignore[arg-type]


class OtherEncoder(torchscale_modules.LongNetEncoder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class ShiftedLayer(torchscale_modules.LongNetEncoderLayer):
    def forward(self, x: Any, encoder_padding_mask: Any, incremental_state: Any = None) -> Any:
        return super().forward(x.roll(1, 1), encoder_padding_mask, incremental_state)


def put(path: str, name: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(attrgetter(path)(model), name, value)


def swap(path: str, new: type) -> Callable[[Any], None]:
    return put(path, "__class__", new)


OPTIONS = ("xpos_rel_pos", "multiway", "moe_freq", "rel_pos_buckets", "seq_parallel")
ARGS, LINEAR, OPTION, RELEASE = "encoder.args", nn.Linear(1, 1), ValueError, AdapterUnavailableError
CROSS_ATTENTION = r"model.encoder.layers\[0\].encoder_attn = Linear: not supported"
Q_NORM = r"layers\[1\].self_attn.q_norm: a module that a ring does not know; use a release that docs/torchscale"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (swap("encoder.layers.1", ShiftedLayer), OPTION, r"model.encoder.layers\[1\] is a ShiftedLayer, and Shi"),
        (put("encoder", "forward", print), OPTION, "model.encoder.forward was replaced; call use_ring before"),
        *[
            (put(ARGS, name, 1), OPTION, f"encoder.args.{name} = 1: not supported by a ring, since .*; use")
            for name in OPTIONS
        ],
        (put("encoder", "relative_position", LINEAR), OPTION, "encoder.relative_position = Linear: not"),
        (put("encoder", "embed_positions", nn.Embedding(9, 2)), OPTION, "encoder.embed_positions = Embedding: "),
        (put("encoder.layers.0", "encoder_attn", LINEAR), OPTION, CROSS_ATTENTION),
        (swap("encoder", OtherEncoder), RELEASE, "model.encoder.forward has no parameter 'encoder_pa"),
        (put("encoder.layers.1.self_attn", "q_norm", LINEAR), RELEASE, Q_NORM),
    ],
)
def test_other_classes_options_and_releases(change: Any, error: type[Exception], message: str) -> None:
    model = cases.make_model("tokens")
    change(model)
    with pytest.raises(error, match=message):
        cases.use(model, Ring())


def test_a_decoder_without_flash_attention() -> None:
    with pytest.raises(ValueError, match=r"model.decoder.args.flash_attention = False: the decoder would make a mask"):
        cases.use(cases.make_model("decoder", flash_attention=False), Ring())


TOKENS, MASK = cases.make_batch("tokens", (6, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"src_tokens": None}, "src_tokens and token_embeddings of model.encoder are None: give one"),
        ({"src_tokens": TOKENS[0]}, r"src_tokens of model.encoder is \[6\]: expected \[batch, n\], at least"),
        ({"src_tokens": TOKENS[:, :0]}, r"is \[2, 0\]: expected \[batch, n\], at least one token"),
        ({"token_embeddings": torch.zeros(2, 5, 24)}, r"token_embeddings of model.encoder is \[2, 5, 24\]: e"),
        ({"encoder_padding_mask": MASK.double()}, "encoder_padding_mask of model.encoder is torch.float64"),
        ({"encoder_padding_mask": MASK | True}, "is True at all tokens of sequence 0: a sequence needs"),
        ({"positions": torch.zeros(6)}, r"positions of model.encoder is \[6\]: expected \[batch, n\]"),
        ({"positions": torch.full((1, 6), 130)}, r"positions of model.encoder reaches 130: .* rows 0 … 129"),
        ({"attn_mask": MASK}, "attn_mask of model.encoder is given: not supported, since dilated attention"),
        ({"incremental_state": []}, "incremental_state of model.encoder is given: not supported, since a ri"),
        ({"graph": 1}, "graph of model.encoder is given: not supported, since a ring does not know it"),
    ],
)
def test_arguments_of_a_call(options: dict[str, Any], message: str) -> None:
    model = cases.on_ring("tokens", None, ignore_padding=True)
    with pytest.raises(ValueError, match=message):
        model.encoder(**{"src_tokens": TOKENS, **options})


def test_tokens_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"src_tokens of model\.encoder = list: expected a tensor"):
        cases.on_ring("tokens", None, ignore_padding=True).encoder([1])


def test_a_layer_by_itself_and_data_parallel() -> None:
    encoder = cases.on_ring("embeddings", None).encoder
    with pytest.raises(ValueError, match=r"a layer of model.encoder was called by itself: .*; call model.encoder\."):
        encoder.layers[0](torch.zeros(1, 4, cases.WIDTH, dtype=torch.float64), None)
    message = r"nn.DataParallel would call it from several threads .*: start one process p"
    with pytest.raises(RuntimeError, match=message):
        encoder._replicate_for_data_parallel()


def test_export() -> None:
    model, (x, _) = cases.on_ring("embeddings", None), cases.make_batch("embeddings", (6, 6))
    message = r"do not support its communication; call .* torchscale.remove_ring\(model\) first"
    with pytest.raises(Exception, match=message):
        torch.export.export(model, (x,))
