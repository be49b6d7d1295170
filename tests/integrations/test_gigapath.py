"""GigaPath's slide encoder on rings returns what its own code returns on one process, with the same gradients."""

from __future__ import annotations

import copy
import pickle
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gigapath_cases as cases
import gigapath_reference
import pytest
import torch
from native_ranks import assert_near, world_of

from ring_backends import Ring
from ring_backends.adapters import native
from ring_backends.integrations import gigapath
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.rings import FOUR, ONE_OF_TWO, THREE_OF_THREE, TWO, TWO_OF_TWO
from ring_backends.testing.world import World

LONG = pytest.mark.matrix(reason="runs many models")


PRELOAD = ("gigapath_cases",)
two, three = world_of(2), world_of(3)


def check(ranks: World, function: Any, layout: str, *args: Any, tolerance: float, **options: Any) -> None:
    """Compare the results of a function of a model on two ranks and on one with those of GigaPath's own code."""
    expected = cases.by_own_code(function, *args, **options)
    cases.assert_same(ranks.run(cases.here, function, TWO_OF_TWO, layout, *args, **options), expected, tolerance)
    cases.assert_same([cases.here(function, None, layout, *args, **options)], expected, tolerance)


FP64, FP32 = torch.float64, torch.float32
CALLS = ((FP64, True, 61), (FP64, True, 1), (FP64, False, 2), (FP64, False, 129), (FP32, True, 129))


@pytest.mark.parametrize("call", matrix_but(CALLS[0], of=CALLS), ids=str)
def test_two_ranks(two: World, call: tuple[torch.dtype, bool, int]) -> None:
    dtype, global_pool, num_tiles = call
    options = {"dtype": dtype, "global_pool": global_pool}
    tolerance = 1e-11 if dtype is torch.float64 else 1e-5
    for all_layer_embed, layout in ((False, "zigzag"), (True, "contiguous")):
        check(two, cases.embed, layout, num_tiles, all_layer_embed, tolerance=tolerance, **options)


@THOROUGH
def test_four_ranks(world: World) -> None:
    """On a ring that is longer than a slide of two tiles and its class token."""
    found = world.run(cases.here, cases.embed, FOUR, "contiguous", 2, True)
    cases.assert_same(found, cases.by_own_code(cases.embed, 2, True), 1e-11)


@pytest.mark.parametrize(
    ("global_pool", "layout", "numbers"),
    [(False, "contiguous", (34, 1, 9)), pytest.param(True, "zigzag", (2, 40), marks=MORE_CASES)],
    ids=str,
)
def test_batches_of_slides(two: World, global_pool: bool, layout: str, numbers: Any) -> None:
    """With a padding mask, slides and tiles have the embeddings and gradients of each slide alone."""
    check(two, cases.embed_batch, layout, numbers, not global_pool, tolerance=1e-10, global_pool=global_pool)


@LONG
@pytest.mark.parametrize(("numbers", "dtype"), [((1,), FP64), ((700, 3000, 2), FP32)], ids=str)
def test_batches_of_long_slides_on_three_ranks(three: World, numbers: Any, dtype: torch.dtype) -> None:
    """In fp32 an error above 1e-5 is at most twice that of the model's own code.

    The fp32 error of a gradient is the root of its mean square, above 1e-6: the gradient of a key's bias is a sum of
    numbers that nearly cancel, so the largest error of its elements is a matter of chance.
    """
    wanted, wanted_grads = cases.by_own_code(cases.embed_batch, numbers)
    own, own_grads = cases.by_own_code(cases.embed_batch, numbers, dtype=dtype)
    found = three.run(cases.here, cases.embed_batch, THREE_OF_THREE, "zigzag", numbers, dtype=dtype)
    grads = cases.mean_of_ranks([grads for _, grads in found])
    is_exact = dtype is torch.float64
    for index, right in enumerate(wanted):
        allowed = max(1e-10 if is_exact else 1e-5, 2 * cases.largest_error(own[index], right))
        for embeddings, _ in found:
            assert cases.largest_error(embeddings[index], right) <= allowed, index
    assert grads.keys() == wanted_grads.keys()
    error = cases.largest_error if is_exact else cases.mean_error
    for name, right in wanted_grads.items():
        assert error(grads[name], right) <= max(1e-10 if is_exact else 1e-6, 2 * error(own_grads[name], right)), name


@THOROUGH
def test_padding_does_not_change_random_numbers(two: World) -> None:
    options = {"drop_path_rate": 0.6, "numbers": (61, 1, 34)}
    expected = cases.random_here(None, 5, **options)
    cases.assert_same(two.run(cases.random_here, TWO_OF_TWO, 5, **options), expected, 1e-10)


def test_a_batch_without_a_mask_is_that_of_the_published_class() -> None:
    """Its tiles attend to zeros that fill up a shorter slide. With a mask they do not."""
    (x, coords), padding_mask = cases.make_slide(9), torch.zeros(2, 9, dtype=torch.bool)
    x[1, 6:], coords[1, 6:], padding_mask[1, 6:] = 0, 0, True
    model = cases.on_ring(None)
    (own,) = cases.make_model()(x, coords)
    assert_near(model(x, coords)[0], own, 1e-11)
    error = (model(x, coords, padding_mask=padding_mask)[0] - own).abs().amax(1)
    assert error[0] < 1e-11
    assert error[1] > 1e-3


@pytest.mark.parametrize(("layer", "of_a_tile"), [pytest.param(-1, False, marks=MORE_CASES), (1, True)])
def test_maps(two: World, layer: int, of_a_tile: bool) -> None:
    numbers = (61, 40)
    is_tile = ~cases.make_batch(numbers)[2]
    tile = int(is_tile.all(0).nonzero()[-1]) if of_a_tile else None
    expected, call = cases.map_by_own_code(numbers, layer, tile), ("zigzag", numbers, layer, tile)
    of_ranks = two.run(cases.here, cases.attention_map, TWO_OF_TWO, *call)
    for found in (*of_ranks, cases.here(cases.attention_map, None, *call)):
        assert_near(found, expected, 1e-11)


def test_maps_that_cannot_be() -> None:
    model, (x, coords, padding_mask) = cases.on_ring(None), cases.make_batch((3, 4))
    with pytest.raises(ValueError, match=r"is in training mode, .*; call its eval\(\)"):
        gigapath.attention_map(model, x, coords, padding_mask=padding_mask)
    model.eval()
    with pytest.raises(ValueError, match="layer = 3: the slide encoder has layers 0 … 2"):
        gigapath.attention_map(model, x, coords, padding_mask=padding_mask, layer=3)
    tile = int(padding_mask[0].nonzero()[0])
    with pytest.raises(ValueError, match=r"tile = \d: slide 0 has no such tile, or padding there"):
        gigapath.attention_map(model, x, coords, padding_mask=padding_mask, tile=tile)
    gigapath.remove_ring(model)
    with pytest.raises(ValueError, match="= LongNetViT: not a slide encoder on a ring; call use_ring"):
        gigapath.attention_map(model, x, coords)


@THOROUGH
def test_pictures_of_maps(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    weights, coords = torch.tensor([0.2, 0.4, 0.3, 0.1]), torch.tensor([[0, 0], [512, 256], [256.0, 511], [300, 300]])
    gigapath.draw_map(tmp_path / "map.png", weights, coords, slide_size=(900, 1000))
    picture = torch.from_numpy(image.imread(tmp_path / "map.png"))
    assert picture.shape == (4, 4, 4)
    assert [*map(tuple, picture[..., 3].nonzero().tolist())] == [(0, 0), (1, 1), (1, 2)]
    assert torch.equal(picture[1, 1], picture[1, 2])  # 0.3 + 0.1, and 0.4
    assert not torch.equal(picture[0, 0], picture[1, 2])
    gigapath.draw_map(tmp_path / "map.png", weights, coords)
    assert image.imread(tmp_path / "map.png").shape == (2, 3, 4)
    with pytest.raises(ValueError, match=r"slide_size = \(512, 512\): tiles reach to \(768, 512\)"):
        gigapath.draw_map(tmp_path / "map.png", weights, coords, slide_size=(512, 512))
    with pytest.raises(ValueError, match=r"weights is \[2, 2\] and coords \[4, 2\]: expected \[tiles\]"):
        gigapath.draw_map(tmp_path / "map.png", weights.view(2, 2), coords)


def test_layers_that_the_loss_does_not_use_have_no_gradients(two: World) -> None:
    """GigaPath's recipes take the embeddings of chosen layers, ``feat_layer``. Optimizers skip the layers above."""
    of_layer = cases.gradients_of_one_layer
    expected = cases.by_own_code(of_layer, 1)
    assert "encoder.layers.0.ffn.fc1.weight" in expected
    assert not any(name.startswith(("encoder.layers.1", "encoder.layers.2")) for name in expected)
    of_ranks = two.run(cases.here, of_layer, TWO_OF_TWO, "contiguous", 1)
    for grads in (cases.mean_of_ranks(of_ranks), of_layer(cases.on_ring(None), 1)):
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


@LONG
def test_constant_mixing(two: World) -> None:
    """Then the gradients are GigaPath's own, also of batches with a padding mask."""
    for function, layout, slides in ((cases.embed, "zigzag", 61), (cases.embed_batch, "contiguous", (34, 1, 9))):
        expected = cases.by_own_code(function, slides, True, exact=False)
        found = two.run(cases.here, function, TWO_OF_TWO, layout, slides, True, constant_mixing=True)
        cases.assert_same(found, expected, 1e-11 if function is cases.embed else 1e-10)


@pytest.mark.skipif(find_spec("gigapath") is None, reason="gigapath is not installed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_published_class(two: World, dtype: torch.dtype) -> None:
    tolerance = 1e-7 if dtype is torch.float64 else 1e-5  # the published class computes GELU in fp32
    for all_layer_embed, global_pool in ((True, False), (False, True)):
        options = {"real": True, "dtype": dtype, "global_pool": global_pool}
        check(two, cases.embed, "contiguous", 129, all_layer_embed, tolerance=tolerance, **options)


@THOROUGH
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


@pytest.mark.parametrize(("training", "rate"), [(False, 0.3), (True, 0.3), (True, 0.0)])
def test_the_generator_is_restored(two: World, training: bool, rate: float) -> None:
    assert two.run(cases.generators_here, TWO_OF_TWO, training, rate) == [True, True]


@THOROUGH
@pytest.mark.parametrize("checkpointing", matrix_but("keep attention", of=("plain", "keep attention")))
def test_activation_checkpointing(two: World, checkpointing: str) -> None:
    options = {"dropout": 0.25, "drop_path_rate": 0.3, "attention_dropout": 0.1}
    expected = two.run(cases.random_here, TWO_OF_TWO, 5, **options)
    found = two.run(cases.random_here, TWO_OF_TWO, 5, checkpointing, **options)
    for (embeddings, grads), right in zip(found, expected, strict=True):
        renamed = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in grads.items()}
        cases.assert_same([(embeddings, renamed)], right, 1e-12)


@THOROUGH
@pytest.mark.parametrize("rings", matrix_but(TWO_OF_TWO, of=(TWO_OF_TWO, ONE_OF_TWO)), ids=str)
@pytest.mark.parametrize("feat_layer", matrix_but((1, 3), of=((1, 3), (0, 2))), ids=str)
def test_training(two: World, rings: Any, feat_layer: Any) -> None:
    """Three steps of a classification head and the slide encoder equal those on one process."""
    losses, parameters = cases.train(cases.ClassificationHead(cases.make_model(), feat_layer), Ring())
    for found, after in two.run(cases.train_here, rings, feat_layer=feat_layer):
        if rings is TWO_OF_TWO:
            assert found == pytest.approx(losses, abs=1e-10)
        assert_near(after, parameters)


@pytest.mark.matrix(reason="20 steps with one process and with two ranks")
@pytest.mark.parametrize("precision", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=pytest.mark.skipif(find_spec("gigapath") is None, reason="no gigapath"))],
    ids=["stand-in", "gigapath"],
)
def test_the_published_recipe(two: World, tmp_path: Path, real: bool, precision: torch.dtype) -> None:
    """Losses of 20 steps, evaluation, and a saved checkpoint in the published class equal those of one process."""
    (losses, logits, _), _ = two.run(cases.finetune, None, tmp_path, precision, real)  # twice, each on one process
    assert losses[0] > 1.2 * losses[-1]  # it learns
    tolerance = 1e-5 if precision is torch.float32 else 2e-2
    for found, found_logits, loaded_logits in two.run(cases.finetune_here, tmp_path / "checkpoint.pt", precision, real):
        assert found == pytest.approx(losses, abs=tolerance)
        assert_near(found_logits, logits, 10 * tolerance)
        assert_near(loaded_logits, found_logits, tolerance)


@LONG
def test_training_two_by_two(world: World) -> None:
    _, parameters = cases.train(cases.ClassificationHead(cases.make_model()), Ring())
    for _, after in world.run(cases.train_here, TWO):
        assert_near(after, parameters)


def test_state_dict_and_copies() -> None:
    model, plain = cases.on_ring(None), cases.make_model()
    assert model.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(model)
    assert copied.forward.__self__.slide_encoder is copied
    assert copied.encoder.layers[0].self_attn.forward.module is copied.encoder.layers[0].self_attn
    copied.load_state_dict(model.state_dict())
    slide = cases.make_slide(30)
    expected = model(*slide)
    torch.nn.init.zeros_(model.norm.weight)  # the copy has weights of its own
    assert_near(copied(*slide), expected, 0)
    model.encoder.eval()
    assert not model.encoder.layers[0].self_attn.ring_attention.training


def test_save_and_load_of_a_whole_model() -> None:
    model = gigapath_reference.LongNetViT(8, 32, 1, slide_ngrids=4, max_wsi_size=16384, dropout=0.0).double()
    gigapath.use_ring(model, cases.attention_of(model))
    restored = pickle.loads(pickle.dumps(model))
    x, coords = torch.randn(1, 2, 8).double(), torch.zeros(1, 2, 2)
    expected = model(x, coords)
    assert_near(restored(x, coords), expected, 0)
    before = restored.encoder.layers[0].self_attn.ring_attention
    gigapath.use_ring(restored, cases.attention_of(restored))  # as in a process with another ring
    assert restored.encoder.layers[0].self_attn.ring_attention is not before
    assert_near(restored(x, coords), expected, 0)
    gigapath.remove_ring(restored)
    assert not any("forward" in vars(module) for module in restored.modules())
    assert_near(restored(x, coords), expected, 1e-12)
    restored.load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.float32], ids=str)
def test_dtypes_of_coordinates(dtype: torch.dtype) -> None:
    model, (x, coords) = cases.on_ring(None), cases.make_slide(9)
    assert_near(model(x, coords.to(dtype)), model(x, coords), 0)


def test_many_tiles_on_few_places() -> None:
    model, (x, coords) = cases.on_ring(None), cases.make_slide(30)
    message = r"coords puts the 30 tiles of slide 1 on 1 places of 256 × 256 pixels: GigaPath"
    with pytest.warns(UserWarning, match=message):
        model(x, torch.stack([coords[0], coords[1] // 256]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, coords)


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
    model, own = cases.make_model(), cases.by_own_code(cases.embed, 61)
    gigapath.use_ring(model, cases.attention_of(model, padding="masked"))
    assert 1e-6 < cases.largest_error(cases.embed(model, 61)[0][0], own[0][0]) < 1


def test_the_pattern_is_the_published_one() -> None:
    model = gigapath_reference.LongNetViT(8, 32, 1, slide_ngrids=4)
    pattern = gigapath.pattern_of(model)
    assert pattern.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    assert pattern.dilation_rates == (1, 2, 4, 8, 16)
    assert (pattern.offset, pattern.padding, pattern.head_mode) == ("block", "zeros", "all")
    gigapath.use_ring(model, native.RingDilatedAttention(**vars(pattern)))
