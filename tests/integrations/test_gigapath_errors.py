"""What GigaPath's slide encoder cannot do on a ring is an error by name, on every rank, before the first hop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import gigapath_cases as cases
import gigapath_reference
import pytest
import torch
import torchscale_modules
from native_ranks import native_ring, world_of
from torch import nn

from ring_backends import AdapterUnavailableError, DilatedPattern, Ring, RingMismatchError
from ring_backends.integrations import gigapath
from ring_backends.testing.failing_calls import AT_ONCE, ending
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.rings import TWO_OF_TWO, new_ring
from ring_backends.testing.world import World, on_every_rank

PRELOAD = ("gigapath_cases",)
world = world_of(2)


def use(model: Any, **options: Any) -> None:
    gigapath.use_ring(model, cases.attention_of(cases.make_model(), **options))


ADVICE = r"use RingDilatedAttention\(\[8, 16, 32, 64, 128\], \[1, 2, 4, 8, 16\], offset='block', padding='zeros', "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_lengths": [8, 16], "dilation_rates": [1, 2]}, ADVICE),
        ({"offset": "mod"}, "not the pattern of the slide encoder; use RingDilated"),
        ({"head_mode": "grouped", "offset": None}, "not the pattern of the slide encoder; use RingDilated"),
        ({"window_lengths": [8] * 5, "padding": "masked"}, r"window_lengths=\(8, .*: not the pattern of the slide enc"),
        ({"scale": 1.0}, r"attention has scale = 1.0: expected 1 / sqrt\(head_dim\)"),
        ({"dropout_p": 0.1}, "attention has dropout_p = 0.1: the slide encoder has 0.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attentions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(cases.make_model(), **options)


def test_dropout_of_the_own_attention() -> None:
    with pytest.raises(ValueError, match=r"the slide encoder has 0.2; use .*, dropout_p=0.2, ring=ring\)"):
        use(cases.make_model(attention_dropout=0.2))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.Sequential, r"slide_encoder = Sequential: expected a LongNetViT.* before it is wrapped"),
        (cases.ClassificationHead, r"= ClassificationHead: expected .*; give model.slide_encoder"),
        (nn.DataParallel, r"slide_encoder = DataParallel: .*; start one process per GPU with torchrun"),
    ],
)
def test_wrapped_slide_encoders(wrap: Callable[[Any], nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        use(wrap(cases.make_model()))


def test_what_is_no_slide_encoder() -> None:
    model = cases.make_model()
    with pytest.raises(TypeError, match="attention = Linear: expected a RingDilatedAttention"):
        gigapath.use_ring(model, nn.Linear(1, 1))  # type: ignore[arg-type]
    model.forward = model.encoder.forward
    with pytest.raises(ValueError, match=r"slide_encoder.forward is a method: its forward was replaced; call use_ring"):
        use(model)
    with pytest.raises(ValueError, match="slide_encoder = LongNetViT: not a slide encoder on a ring"):
        gigapath.remove_ring(model)
    del model.forward
    for name in ("relative_position", "embed_positions"):
        setattr(model.encoder, name, torchscale_modules.PositionalEmbedding(2, 2))
        with pytest.raises(ValueError, match=rf"encoder\.{name} = PositionalEmbedding: not supported by a ring"):
            use(model)
        setattr(model.encoder, name, None)


def without(owner: str, name: str) -> Callable[[Any], None]:
    return lambda model: delattr(attrgetter(owner)(model), name)


class NewForward(gigapath_reference.LongNetViT):
    def forward(self, x: Any, coords: Any, padding_mask: Any = None, all_layer_embed: bool = False) -> Any:
        return super().forward(x, coords, all_layer_embed)


class NewPooling(gigapath_reference.LongNetViT):
    def forward(self, x: Any, coords: Any, all_layer_embed: bool = False) -> Any:
        return [2 * embedding for embedding in super().forward(x, coords, all_layer_embed)]


class NewSelfAttention(torchscale_modules.DilatedAttention):
    def forward(self, query: Any, key: Any, value: Any, *, rotary: Any = None) -> Any:  # type: ignore[override]
        return None


def has_new_attention(model: Any) -> None:
    model.encoder.layers[0].self_attn.__class__ = NewSelfAttention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "tile_size"), "slide_encoder.tile_size: this release of gigapath has no such"),
        (without("encoder", "layers"), "slide_encoder.encoder.layers: this release"),
        (without("encoder.args", "dilated_ratio"), "encoder.args.dilated_ratio: this release"),
        (without("encoder.layers.0.self_attn", "out_proj"), r"encoder.layers\[0\].self_attn.out_proj: this release"),
        (has_new_attention, r"layers\[0\].self_attn.forward has no parameter 'attn_mask' in this release of gigapath"),
    ],
)
def test_other_releases(change: Callable[[Any], None], message: str) -> None:
    model = cases.make_model()
    change(model)
    with pytest.raises(AdapterUnavailableError, match=message):
        use(model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (NewForward, "slide_encoder.forward has a new parameter 'padding_mask'"),
        (NewPooling, r"NewPooling.forward\(all_layer_embed=False\) of this release .* does not return the embeddings"),
    ],
)
def test_other_forwards(changed: Any, message: str) -> None:
    model = changed(8, 32, 1, slide_ngrids=4)
    with pytest.raises(AdapterUnavailableError, match=message):
        use(model, **vars(DilatedPattern.torchscale((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))))


SLIDE, PADDING = cases.make_slide(6), torch.ones(2, 6, dtype=torch.bool)
CALLS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((SLIDE[0].numpy, SLIDE[1]), TypeError, "x = builtin_function_or_method: expected a tensor [batch, tiles, 24]"),
    ((SLIDE[0][0], SLIDE[1]), ValueError, "x is [6, 24]: expected [batch, tiles, 24]; add the batch with x[None]"),
    ((SLIDE[0][..., :23], SLIDE[1]), ValueError, "x is [2, 6, 23]: expected [batch, tiles, 24]"),
    ((SLIDE[0], SLIDE[1][0, 0]), ValueError, "coords is [2]: expected [batch, tiles, 2]"),
    ((SLIDE[0], SLIDE[1][:, :5]), ValueError, "coords is [2, 5, 2] and x is [2, 6, 24]: give one pair"),
    ((SLIDE[0][:, :0], SLIDE[1][:, :0]), ValueError, "x is [2, 0, 24]: give at least one slide, each with at"),
    ((SLIDE[0][:0], SLIDE[1][:0]), ValueError, "x is [0, 6, 24]: give at least one slide"),
    ((SLIDE[0], SLIDE[1].half()), TypeError, "coords is torch.float16, which rounds pixels, so tiles would"),
    ((SLIDE[0], SLIDE[1].bfloat16()), TypeError, "pass coords in float32 or as integers. If FSDP has cast them, use "),
    ((SLIDE[0].half(), SLIDE[1]), TypeError, "x is torch.float16 and patch_embed is torch.float64: convert x"),
    ((SLIDE[0], SLIDE[1] + 20 * 256), ValueError, "expected pixels from 0 to below 5120, tile_size × slide_ngrids"),
    ((SLIDE[0], -SLIDE[1] - 256), ValueError, "coords has values from -"),
    # The place of (0, 5120) would be that of (256, 0).
    ((SLIDE[0], torch.tensor([0, 5120]).expand(2, 6, 2)), ValueError, "coords has values from 0 to 5120: expected"),
    ((SLIDE[0], torch.full((2, 6, 2), torch.nan)), ValueError, "coords has values from nan to nan"),
    ((*SLIDE, False, SLIDE[0]), TypeError, "padding_mask is torch.float64: expected bool [batch, tiles]"),
    ((*SLIDE, False, PADDING[:, :5]), ValueError, "padding_mask is [2, 5] and x is [2, 6, 24]"),
    ((*SLIDE, False, PADDING), ValueError, "tiles of slide 0: a slide needs at least one tile"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_arguments_of_a_call(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cases.on_ring(None)(*arguments)


def test_the_encoder_alone() -> None:
    with pytest.raises(ValueError, match=r"slide_encoder.encoder was called directly: .* call slide_encoder\(x, coor"):
        cases.on_ring(None).encoder(None, token_embeddings=torch.zeros(1, 4, 64, dtype=torch.float64))


def check_long_slide(rings: Any) -> None:
    """100 tiles with a branch (60, 8), as GigaPath's (185363, 8)."""
    model = cases.make_model()
    for layer in model.encoder.layers:
        layer.self_attn.args.segment_length = [8, 16, 32, 60, 128]
    ring = native_ring(rings=rings) if rings else Ring()
    gigapath.use_ring(model, cases.attention_of(model, ring))
    model(*cases.make_slide(59))
    start = "x has 100 tiles, with the class token 101 tokens: padding='zeros' with segment leng"
    with pytest.raises(ValueError, match=f"(?s){start}.*or padding='masked'"):
        model(*cases.make_slide(100))
    gigapath.use_ring(model, cases.attention_of(model, ring, padding="masked"))
    model(*cases.make_slide(100))


def test_slides_whose_outputs_gigapath_misplaces(world: World) -> None:
    check_long_slide(None)
    world.run(check_long_slide, TWO_OF_TWO)


@on_every_rank
def test_every_rank_raises() -> None:
    ended = ending(use, cases.make_model(), ring=native_ring(rings=TWO_OF_TWO), scale=1.0)
    assert ended.error == "ValueError", ended
    for arguments, error, _ in (CALLS[1], CALLS[7]):
        ending(cases.on_ring(TWO_OF_TWO), *arguments).check(error, within=AT_ONCE)


@on_every_rank
def test_ranks_with_different_weights() -> None:
    model, ring = cases.make_model(), new_ring(cases.ADAPTER, TWO_OF_TWO)
    if ring.rank == 1:
        nn.init.zeros_(model.encoder.layers[1].ffn.fc1.bias)
    field = r"the ranks differ in encoder\.layers\.1\.ffn\.fc1\.bias \(rank 0: torch\.float64 \[1, 256\] checksum"
    with pytest.raises(RingMismatchError, match=f"(?s)load the same checkpoint on every rank.*{field}"):
        gigapath.use_ring(model, cases.attention_of(model, ring))


EXPORTS: dict[str, Callable[..., Any]] = {
    "trace": torch.jit.trace,
    "export": torch.export.export,
    "strict": partial(torch.export.export, strict=True),
}


@THOROUGH
@pytest.mark.parametrize("how", EXPORTS)
@on_every_rank
def test_tracing_and_export(how: str) -> None:
    ended = ending(EXPORTS[how], cases.on_ring(TWO_OF_TWO).eval(), cases.make_slide(6))
    message = "torch.export and torch.onnx.export do not support its communication; call gigapath"
    ended.check(Exception, message, within=AT_ONCE)


@pytest.mark.parametrize("change", ["x", "coords", "tiles", "training mode", "slide_encoder.tile_size"])
@on_every_rank
def test_ranks_with_different_slides(change: str) -> None:
    model, (x, coords) = cases.make_model(), cases.make_slide(30)
    use(model, ring=new_ring(cases.ADAPTER, TWO_OF_TWO))  # a mismatch closes the ring
    if torch.distributed.get_rank() == 1:
        x = {"x": x.flip(1), "tiles": x[:, :29]}.get(change, x)
        coords = {"coords": coords.flip(1), "tiles": coords[:, :29]}.get(change, coords)
        model.train(change != "training mode")
        model.tile_size *= 2 if change == "slide_encoder.tile_size" else 1
    field = "x" if change == "tiles" else change
    with pytest.raises(RingMismatchError, match=rf"the ranks differ in {field} \(rank 0: "):
        model(x, coords)
