"""GigaPath's slide encoder on rings returns what its own code returns on one process, with the same gradients."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from typing import Any

import gigapath_cases as cases
import gigapath_reference
import pytest
import torch
from native_ranks import assert_near, world_of

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.integrations import gigapath
from ring_backends.testing.rings import FOUR, ONE_OF_TWO, TWO, TWO_OF_TWO
from ring_backends.testing.world import World

LONG = pytest.mark.matrix(reason="runs many models")


two = world_of(2, "gigapath_cases")


def check_embeddings(
    ranks: World, layout: str, num_tiles: int, all_layer_embed: bool, tolerance: float, **options: Any
) -> None:
    """Compare two ranks and one with GigaPath's own code."""
    expected = cases.embed_by_own_code(num_tiles, all_layer_embed, **options)
    found = ranks.run(cases.embed_here, TWO_OF_TWO, layout, num_tiles, all_layer_embed, **options)
    cases.assert_same(found, expected, tolerance)
    cases.assert_same([cases.embed(cases.on_ring(None, **options), num_tiles, all_layer_embed)], expected, tolerance)


@pytest.mark.parametrize("num_tiles", [1, 61, *(pytest.param(number, marks=LONG) for number in (2, 129))])
@pytest.mark.parametrize("global_pool", [False, True], ids=["cls", "global_pool"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=LONG)], ids=str)
def test_two_ranks(two: World, dtype: torch.dtype, global_pool: bool, num_tiles: int) -> None:
    options = {"dtype": dtype, "global_pool": global_pool}
    tolerance = 1e-11 if dtype is torch.float64 else 1e-5
    for all_layer_embed, layout in ((False, "zigzag"), (True, "contiguous")):
        check_embeddings(two, layout, num_tiles, all_layer_embed, tolerance, **options)


@pytest.mark.parametrize("rings", [FOUR, pytest.param(TWO, marks=LONG)], ids=str)
def test_four_ranks(world: World, rings: Any) -> None:
    for num_tiles, layout in ((2, "contiguous"), (100, "zigzag")):
        found = world.run(cases.embed_here, rings, layout, num_tiles, True)
        cases.assert_same(found, cases.embed_by_own_code(num_tiles, True), 1e-11)


def test_layers_that_the_loss_does_not_use_have_no_gradients(two: World) -> None:
    """GigaPath's recipes take the embeddings of chosen layers, ``feat_layer``. Optimizers skip the layers above."""
    model = cases.make_model()
    with cases.own_code(model):
        expected = cases.gradients_of_one_layer(model, 1)
    assert "encoder.layers.0.ffn.fc1.weight" in expected
    assert not any(name.startswith(("encoder.layers.1", "encoder.layers.2")) for name in expected)
    of_ranks = two.run(cases.gradients_of_one_layer_here, TWO_OF_TWO, 1)
    for grads in (cases.mean_of_ranks(of_ranks), cases.gradients_of_one_layer(cases.on_ring(None), 1)):
        assert grads.keys() == expected.keys()
        assert max(cases.largest_error(grads[name], right) for name, right in expected.items()) < 1e-11


def test_eval_before_use_ring() -> None:
    model = cases.make_model(attention_dropout=0.3).eval()
    gigapath.use_ring(model, cases.attention_of(model, dropout_p=0.3))
    slide = cases.make_slide(30)
    assert_near(model(*slide), model(*slide), 0)
    assert not any(module.training for module in model.modules())


def test_every_rank_computes_its_own_rows(two: World) -> None:
    """The class token and 30 tiles on rank 0, and the other 31 tiles on rank 1."""
    assert two.run(cases.rows_here, TWO_OF_TWO, 61) == [(30, 31), (31, 31)]


def test_gradients_without_those_of_the_mixing_weights_differ() -> None:
    """GigaPath treats the weights with which it mixes its branches as constants."""
    exact, own = (cases.embed_by_own_code(61, True, exact=exact) for exact in (True, False))
    assert cases.largest_error(own[0][-1], exact[0][-1]) == 0
    name = "encoder.layers.0.self_attn.q_proj.weight"
    assert cases.largest_error(own[1][name], exact[1][name]) > 1e-2


@pytest.mark.skipif(find_spec("gigapath") is None, reason="gigapath is not installed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_published_class(two: World, dtype: torch.dtype) -> None:
    tolerance = 1e-7 if dtype is torch.float64 else 1e-5  # the published class computes GELU in fp32
    for all_layer_embed, global_pool in ((True, False), (False, True)):
        options = {"real": True, "dtype": dtype, "global_pool": global_pool}
        check_embeddings(two, "contiguous", 129, all_layer_embed, tolerance, **options)


def test_stochastic_depth_and_attention_dropout(two: World) -> None:
    """A ring draws the numbers of one process. Seeds of ranks other than the first do not matter."""
    options = {"drop_path_rate": 0.6, "attention_dropout": 0.2}
    expected = cases.random_here(None, 5, **options)
    cases.assert_same(two.run(cases.random_here, TWO_OF_TWO, 5, **options), expected, 1e-11)
    assert cases.largest_error(cases.random_here(None, 6, **options)[0][-1], expected[0][-1]) > 0.1


def test_dropout_differs_at_every_row(two: World) -> None:
    of_ranks = two.run(cases.dropped_here, TWO_OF_TWO)
    for calls in of_ranks:
        assert len(calls[0]) == 7  # of the embeddings, and after attention and feed-forward network of three layers
        for first, second in zip(*calls, strict=True):
            assert not torch.equal(first, second)
            assert first.double().mean().item() == pytest.approx(0.7, abs=0.03)
    for one, other in zip(of_ranks[0][0], of_ranks[1][0], strict=True):
        equal = (one[:, :50] == other[:, :50]).double().mean().item()
        assert equal == pytest.approx(0.7**2 + 0.3**2, abs=0.03)


def test_all_ranks_return_the_same_with_dropout(two: World) -> None:
    options = {"dropout": 0.25, "drop_path_rate": 0.1, "attention_dropout": 0.1}
    first, second = two.run(cases.random_here, TWO_OF_TWO, 5, **options)
    assert all(map(torch.equal, first[0], second[0]))


@pytest.mark.parametrize("training", [False, True])
def test_the_generator_is_restored(two: World, training: bool) -> None:
    assert two.run(cases.generators_here, TWO_OF_TWO, training) == [True, True]


@pytest.mark.parametrize("checkpointing", ["plain", "keep attention"])
def test_activation_checkpointing(two: World, checkpointing: str) -> None:
    options = {"dropout": 0.25, "drop_path_rate": 0.3, "attention_dropout": 0.1}
    expected = two.run(cases.random_here, TWO_OF_TWO, 5, **options)
    found = two.run(cases.random_here, TWO_OF_TWO, 5, checkpointing, **options)
    prefix = "_checkpoint_wrapped_module."
    for (embeddings, grads), right in zip(found, expected, strict=True):
        renamed = {name.replace(prefix, ""): grad for name, grad in grads.items()}
        cases.assert_same([(embeddings, renamed)], right, 1e-12)


@pytest.mark.parametrize("rings", [TWO_OF_TWO, pytest.param(ONE_OF_TWO, marks=LONG)], ids=str)
@pytest.mark.parametrize("feat_layer", [(1, 3), pytest.param((0, 2), marks=LONG)], ids=str)
def test_training(two: World, rings: Any, feat_layer: Any) -> None:
    """Three steps of a classification head and the slide encoder equal those on one process."""
    losses, parameters = cases.train(cases.ClassificationHead(cases.make_model(), feat_layer), Ring())
    for found, after in two.run(cases.train_here, rings, feat_layer=feat_layer):
        if rings is TWO_OF_TWO:
            assert found == pytest.approx(losses, abs=1e-10)
        assert_near(after, parameters)


@LONG
def test_training_two_by_two(world: World) -> None:
    _, parameters = cases.train(cases.ClassificationHead(cases.make_model()), Ring())
    for _, after in world.run(cases.train_here, TWO):
        assert_near(after, parameters)


def test_state_dict_and_copies() -> None:
    model, plain = cases.on_ring(None), cases.make_model()
    assert model.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(model)
    assert copied.forward.slide_encoder is copied
    assert copied.encoder.layers[0].self_attn.forward.module is copied.encoder.layers[0].self_attn
    copied.load_state_dict(model.state_dict())
    slide = cases.make_slide(30)
    assert_near(copied(*slide), model(*slide), 0)
    model.encoder.eval()
    assert not model.encoder.layers[0].self_attn.ring_attention.training


def test_pickle() -> None:
    model = gigapath_reference.LongNetViT(8, 32, 1, slide_ngrids=4, max_wsi_size=16384, dropout=0.0)
    gigapath.use_ring(model, cases.attention_of(model))
    restored = pickle.loads(pickle.dumps(model))
    x, coords = torch.randn(1, 5, 8), torch.zeros(1, 5, 2)
    assert_near(restored(x, coords), model(x, coords), 0)


def test_one_row_of_coordinates_serves_the_batch() -> None:
    x, coords = cases.make_slide(9)
    model = cases.on_ring(None)
    (expected,) = cases.make_model()(x, coords[:1].expand(2, -1, -1))
    for same in (coords[:1], coords[0]):
        assert_near(model(x, same)[0], expected, 1e-11)


def test_autocast() -> None:
    model, slide = cases.on_ring(None, dtype=torch.float32), cases.make_slide(61, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(*slide)
    assert_near(found, model(*slide), 0.1)


def test_masked_padding_is_another_result() -> None:
    model, own = cases.make_model(), cases.embed_by_own_code(61)
    gigapath.use_ring(model, cases.attention_of(model, padding="masked"))
    assert 1e-6 < cases.largest_error(cases.embed(model, 61)[0][0], own[0][0]) < 1


def test_the_pattern_is_the_published_one() -> None:
    model = gigapath_reference.LongNetViT(8, 32, 1, slide_ngrids=4)
    pattern = gigapath.pattern_of(model)
    assert pattern.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    assert pattern.dilation_rates == (1, 2, 4, 8, 16)
    assert (pattern.offset, pattern.padding, pattern.head_mode) == ("block", "zeros", "all")
    gigapath.use_ring(model, native.RingDilatedAttention(**vars(pattern)))
