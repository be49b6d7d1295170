"""The slide encoder of GigaPath and GigaPath-Flash, on one device without flash-attn, or on a ring.

Every rank of a ring calls it with the same whole slide::

    from ring_backends.integrations import gigapath

    attention = backend.RingDilatedAttention(**vars(gigapath.pattern_of(slide_encoder)), ring=ring)
    gigapath.use_ring(slide_encoder, attention)
    (embedding,) = slide_encoder(tiles, coords)  # the same on every rank

On one device leave ``ring`` out. No process group is needed then.

The tiles, and all activations, are sharded over the ranks. Layers that work row by row, such as projections and norms,
are those of the published class. This module does not import ``gigapath``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.integrations import torchscale
from ring_backends.integrations.parameters import agree_on_parameters
from ring_backends.integrations.torchscale import Sequences, is_on_ring, kept_columns, other_release
from ring_backends.plotting import check_plot
from ring_backends.ring.pooling import sum_of_ranks
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.weights import attention_weights

__all__ = ["attention_map", "draw_map", "pattern_of", "remove_ring", "use_ring"]


def pattern_of(slide_encoder: nn.Module) -> DilatedPattern:
    """The pattern of a slide encoder's attention, as its constructor computed it from ``max_wsi_size``.

    ``RingDilatedAttention(**vars(pattern_of(slide_encoder)), ring=ring)`` makes the attention for :func:`use_ring`.

    Args:
        slide_encoder: a ``LongNetViT`` of GigaPath.

    Returns:
        ``DilatedPattern.torchscale`` with the segment lengths and dilated ratios of ``slide_encoder.encoder.args``.

    Raises:
        TypeError: ``slide_encoder`` is not a LongNetViT.
        AdapterUnavailableError: this release of gigapath has changed a part that a ring needs. The message names it.
    """
    if not any(base.__name__ == "LongNetViT" for base in type(slide_encoder).__mro__):
        what = "pass it before it is wrapped or compiled"
        if isinstance(slide_encoder, nn.DataParallel):
            what = "start one process per GPU with torchrun instead, and give model.module"
        elif hasattr(slide_encoder, "slide_encoder"):
            what = "give model.slide_encoder"
        raise TypeError(
            f"slide_encoder = {type(slide_encoder).__name__}: expected a LongNetViT of gigapath.slide_encoder; {what}."
        )
    torchscale.check_release(slide_encoder, "slide_encoder", "gigapath", _ATTRIBUTES, _PARAMETERS)
    return torchscale.pattern_of_part(slide_encoder.encoder, "slide_encoder.encoder", "gigapath")


def use_ring(slide_encoder: nn.Module, attention: RingDilatedAttention, *, constant_mixing: bool = False) -> None:
    """Put GigaPath's slide encoder on the ring of ``attention``.

    After this call every rank of a ring calls ``slide_encoder(x, coords, all_layer_embed=False, padding_mask=None,
    tile_embeddings=False)`` with the same whole slides: x [batch, tiles, in_chans], and coords [batch, tiles, 2] or
    [tiles, 2] in pixels, as integers or in fp32 or fp64. Every rank gets the embeddings of the published class, a list
    of [batch, embed_dim]. flash-attn is not needed. x may be in fp64, fp32, bf16 or fp16, also under autocast.
    ``slide_encoder.tile_size``, in pixels, may change between calls, for slides whose tiles have different sizes.

    ``padding_mask`` is bool [batch, tiles], True = padding, at any place. With it, the embedding of each slide is that
    of the published class for this slide alone without padding. x and coords of padding may hold any values.

    With ``tile_embeddings=True`` a call returns a pair: the list of embeddings, and a list of [batch, tiles,
    embed_dim], the contextual embeddings of all tiles in the same layers after the slide encoder's ``norm``; 0 for
    padding.

    If every rank computes the same loss from the embeddings, the gradients of the parameters and of x, averaged over
    all ranks, are those of one device. DistributedDataParallel, FSDP2 and DeepSpeed average, and so does
    ``parallelize`` of every adapter.

    Ring rank 0 draws one seed from torch's CPU generator per call that uses random numbers. Stochastic depth drops the
    same samples on all ranks of the ring. Dropout drops different units in every row of the slide. On a ring of one,
    random numbers are those of the published class.

    A slide encoder that is on a ring already moves to the ring of ``attention``, for example after ``torch.load`` in
    another process. :func:`remove_ring` restores the published class.

    Args:
        slide_encoder: a ``LongNetViT``. Call this function before the model is wrapped or compiled. Its parameters are
            the same on all ranks of the ring.
        attention: a RingDilatedAttention of any adapter, with the pattern of :func:`pattern_of`. Every layer gets a
            copy. With ``padding="masked"``, slides of every length work, but embeddings differ from GigaPath's, because
            queries of a last segment that is not full do not see the zero keys with which GigaPath pads it.
        constant_mixing: whether the backward treats the weights with which a token mixes its branches as constants, as
            GigaPath does. True reproduces a training with GigaPath, and takes one call of the attention per branch.
            False gives the exact gradient.

    Raises:
        TypeError: ``slide_encoder`` is not a LongNetViT, or ``attention`` is not a RingDilatedAttention.
        ValueError: the slide encoder has a part that is not supported by a ring, or another forward than its class; or
            the pattern, scale or dropout_p of ``attention`` is not that of the slide encoder. A call raises ValueError
            or TypeError for invalid arguments, RingMismatchError if the ranks' slides differ, and RuntimeError if it is
            traced or exported.
        RingMismatchError: the ranks' parameters differ. The message names some of them.
        AdapterUnavailableError: this release of gigapath has changed a part that a ring needs. The message names it.
    """
    torchscale.check_type(attention)
    with attention.ring.report_refusals():
        pattern = pattern_of(slide_encoder)
        if "forward" in vars(slide_encoder) and not is_on_ring(slide_encoder, _SlideEncoder):
            raise ValueError(
                f"slide_encoder.forward is a {type(slide_encoder.forward).__name__}: its forward was replaced; call "
                "use_ring before any other function that does so."
            )
        encoder: Any = slide_encoder.encoder
        if "forward" in vars(encoder):
            raise ValueError(
                "slide_encoder.encoder.forward was replaced, for example by torchscale.use_ring; call "
                "torchscale.remove_ring first."
            )
        torchscale.check_options(encoder, "slide_encoder.encoder")
        torchscale.refuse_part(encoder.embed_positions, "slide_encoder.encoder.embed_positions")
        torchscale.check_attention(attention, pattern, encoder, "the slide encoder")
        _check_same_forward(slide_encoder)
    agree_on_parameters(attention.ring, slide_encoder, "slide_encoder")
    if is_on_ring(slide_encoder, _SlideEncoder):
        remove_ring(slide_encoder)
    torchscale.put_layers_on_ring(encoder, attention, _ENCODER_ALONE, constant_mixing=constant_mixing)
    slide_encoder.forward = _SlideEncoder(slide_encoder).forward


def remove_ring(slide_encoder: nn.Module) -> None:
    """Undo :func:`use_ring`: every process computes the published class again.

    Call it before the model is exported, traced or compared with the published class, on models that are not wrapped.

    Raises:
        ValueError: ``slide_encoder`` is not on a ring.
    """
    _on_ring(slide_encoder)
    torchscale.remove_layers_from_ring(slide_encoder.encoder)
    del slide_encoder.forward


@torch.no_grad()
def attention_map(
    slide_encoder: nn.Module,
    x: Tensor,
    coords: Tensor,
    *,
    layer: int = -1,
    tile: int | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Return the attention that the class token, or a tile, pays to every tile in one layer.

    Every rank of the ring makes the same call. It runs the slide encoder once, and scores one query per slide and head,
    so memory grows linearly with the number of tiles.

    Args:
        slide_encoder: a slide encoder on a ring, in ``eval()`` mode.
        x, coords, padding_mask: as in a call of the slide encoder.
        layer: the number of the layer, from 0. Negative numbers count from the last layer.
        tile: the column of x with the tile whose attention to return; None means the class token.

    Returns:
        [batch, heads, tiles] in fp32 (fp64 for fp64), the same on every rank; 0 for padding. The weights of a head sum
        to 1 minus the weights of the class token and of the zero keys that GigaPath pads segments with.
        :func:`draw_map` draws them.

    Raises:
        ValueError: the slide encoder is not on a ring, or in training mode; or there is no such layer or tile. Invalid
            slides raise an error as in a call.
    """
    on_ring = _on_ring(slide_encoder)
    layers: Any = slide_encoder.encoder.layers  # type: ignore[union-attr]
    ring = on_ring.ring
    with ring.report_refusals():
        if slide_encoder.training:
            raise ValueError("slide_encoder is in training mode, and dropout would change the map; call its eval().")
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"layer = {layer}: the slide encoder has layers 0 … {len(layers) - 1}.")
        _, slides = on_ring._check(x, coords, padding_mask)
        for index, numbers in enumerate(slides.columns(x.device)):
            if tile is not None and tile not in numbers:
                raise ValueError(
                    f"tile = {tile}: slide {index} has no such tile, or padding there; give one of its tiles."
                )
    self_attn, rows = layers[layer].self_attn, {}
    hooks = [
        projection.register_forward_hook(lambda module, args, out, name=name: rows.update({name: out}))
        for name, projection in (("query", self_attn.q_proj), ("key", self_attn.k_proj))
    ]
    try:
        slide_encoder(x, coords, padding_mask=padding_mask)
    finally:
        for hook in hooks:
            hook.remove()
    query, key = (rows[name].unflatten(-1, (self_attn.num_heads, self_attn.head_dim)) for name in ("query", "key"))
    maps = []
    for index, (numbers, length) in enumerate(zip(slides.columns(query.device), slides.lengths, strict=True)):
        own = slice(index, index + 1), slice(ring.layout(length).local_len(ring.rank))
        position = 0 if tile is None else int((numbers <= tile).sum())  # the class token comes first
        weights = attention_weights(self_attn.ring_attention, query[own], key[own], [position], seq_len=length)
        whole = ring.unshard(weights, 3, seq_len=length)[0, :, 0, 1:]
        maps.append(whole.new_zeros(len(whole), x.shape[1]).index_copy(1, numbers, whole))
    return torch.stack(maps)


def draw_map(
    path: Path,
    weights: Tensor,
    coords: Tensor,
    *,
    tile_size: int = 256,
    slide_size: tuple[int, int] | None = None,
) -> None:
    """Draw one number per tile over the slide, one pixel per place of a tile. Requires matplotlib.

    The picture begins at the slide's pixel (0, 0), so that it can lie over a thumbnail of the slide, scaled to the
    thumbnail's size. Colours go from 0 to the largest number. Places without a tile are transparent in formats that
    support it, such as PNG. Numbers of tiles on one place add up.

    Args:
        path: the file to write. Its suffix sets the format.
        weights: [tiles], not negative: of one slide without padding, for example a mean of :func:`attention_map` over
            the heads.
        coords: [tiles, 2], x and y of each tile in pixels.
        tile_size: width and height of a tile in pixels.
        slide_size: width and height of the slide in pixels, at the level of coords. None ends the picture at the last
            tile.

    Raises:
        ValueError: matplotlib is missing or does not write this format; the shapes do not fit; or a tile lies outside
            of the slide.
    """
    check_plot(path, "path")
    if weights.dim() != 1 or coords.shape != (len(weights), 2) or not len(weights):
        raise ValueError(
            f"weights is {[*weights.shape]} and coords {[*coords.shape]}: expected [tiles] and [tiles, 2] of one "
            "slide, with at least one tile; take one slide of the batch, and reduce the heads."
        )
    columns, rows = (coords.detach().cpu().double() // tile_size).long().unbind(1)
    width, height = int(columns.max()) + 1, int(rows.max()) + 1
    if slide_size is not None:
        wanted_width, wanted_height = (-(-size // tile_size) for size in slide_size)
        if width > wanted_width or height > wanted_height:
            raise ValueError(
                f"slide_size = {slide_size}: tiles reach to {(width * tile_size, height * tile_size)}; give the size "
                "of the slide at the level of coords."
            )
        width, height = wanted_width, wanted_height
    values, is_tile = torch.zeros(height, width, dtype=torch.float64), torch.zeros(height, width, dtype=torch.bool)
    values.index_put_((rows, columns), weights.detach().cpu().double(), accumulate=True)
    is_tile[rows, columns] = True
    colours = import_module("matplotlib").colormaps["viridis"]((values / values.max().clamp(min=1e-300)).numpy())
    colours[..., 3] = is_tile.numpy()
    import_module("matplotlib.image").imsave(path, colours)


_ENCODER_ALONE = (
    "slide_encoder.encoder was called directly: on a ring it computes only this rank's rows; call "
    "slide_encoder(x, coords)."
)


def _on_ring(slide_encoder: nn.Module) -> _SlideEncoder:
    """What replaces the forward of a slide encoder on a ring."""
    if not is_on_ring(slide_encoder, _SlideEncoder):
        raise ValueError(
            f"slide_encoder = {type(slide_encoder).__name__}: not a slide encoder on a ring; call use_ring, or give "
            "one that it was called with."
        )
    return cast(_SlideEncoder, slide_encoder.forward.__self__)  # type: ignore[attr-defined]


class _SlideEncoder:
    """Replaces the forward of a LongNetViT.

    It is not a hook, because GigaPath's classification head calls ``forward`` directly.
    """

    def __init__(self, slide_encoder: Any, ring: Ring | None = None) -> None:
        self.slide_encoder, self._ring = slide_encoder, ring

    @property
    def ring(self) -> Ring:
        return self._ring or torchscale.ring_of(self.slide_encoder.encoder)

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        padding_mask: Tensor | None = None,
        tile_embeddings: bool = False,
    ) -> Any:
        torchscale.refuse_export(self.slide_encoder.encoder)
        tensors = {"x": x, "coords": coords, "padding_mask": padding_mask}
        return self._embed_slides(tensors, bool(all_layer_embed), bool(tile_embeddings))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _embed_slides(self, tensors: dict[str, Any], all_layer_embed: bool, tile_embeddings: bool) -> Any:
        ring = self.ring
        ring.check_connected()
        with ring.report_refusals():
            places, slides = self._check(**tensors)
        x, encoder = tensors["x"], self.slide_encoder.encoder
        arguments = {**tensors, "all_layer_embed": all_layer_embed, "tile_embeddings": tile_embeddings}
        arguments["slide_encoder.tile_size"] = float(self.slide_encoder.tile_size)
        with torchscale.same_call(ring, "the slides of a slide encoder", arguments, encoder, x.device):
            return self._embed(ring, x, places, slides, all_layer_embed, tile_embeddings)

    def _embed(
        self, ring: Ring, x: Tensor, places: Tensor, slides: Sequences, all_layer_embed: bool, tile_embeddings: bool
    ) -> Any:
        model: Any = self.slide_encoder
        num_cls = int(ring.rank == 0)  # the class token comes first
        rows = model.patch_embed(slides.own(ring, x)) + model.pos_embed[0, slides.own(ring, places)]
        # A rank without the class token adds none of its rows, so that the parameter has a gradient on every rank.
        cls_token = (model.cls_token + model.pos_embed[:, :1])[:, :num_cls]
        rows = torch.cat((cls_token.expand(len(x), -1, -1), rows), 1)
        # The encoder passes one element of incremental_state to each layer. Activation checkpointing keeps it.
        lengths = [slides.lengths] * len(model.encoder.layers)
        options = {"return_all_hiddens": all_layer_embed, "incremental_state": lengths}
        encoded = model.encoder(src_tokens=None, token_embeddings=rows, **options)
        states = encoded["encoder_states"] if all_layer_embed else [encoded["encoder_out"]]
        # One collective per state: layers above those whose embeddings the loss uses then have no backward and no
        # gradients, as in GigaPath's code.
        embeddings = [model.norm(self._pool(ring, state, slides, num_cls)) for state in states]
        if not tile_embeddings:
            return embeddings
        return embeddings, [slides.unshard(ring, model.norm(state)) for state in states]

    def _pool(self, ring: Ring, rows: Tensor, slides: Sequences, num_cls: int) -> Tensor:
        """The class token or the mean of the tiles, [batch, width], from each rank's rows [batch, rows, width]."""
        if not self.slide_encoder.global_pool:
            return sum_of_ranks(ring, rows[:, :num_cls].sum(1))
        own = torch.tensor([ring.layout(length).local_len(ring.rank) for length in slides.lengths], device=rows.device)
        is_row = torch.arange(rows.shape[1], device=rows.device) < own[:, None]
        tiles = torch.where(is_row[..., None], rows, 0)[:, num_cls:]
        sums = sum_of_ranks(ring, tiles.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)))
        numbers = torch.tensor([length - 1 for length in slides.lengths], device=rows.device)
        return (sums / numbers[:, None]).to(rows.dtype)

    def _check(self, x: Tensor, coords: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Sequences]:
        """Check the arguments of a call. Return the places of its tiles in ``pos_embed``, and its slides.

        The places are int64 [batch, tiles]. Those of padding have any value.
        """
        model: Any = self.slide_encoder
        in_chans, weight = model.patch_embed.proj.in_features, model.patch_embed.proj.weight
        for name, value, width, dims in (("x", x, in_chans, (3,)), ("coords", coords, 2, (2, 3))):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} = {type(value).__name__}: expected a tensor [batch, tiles, {width}].")
            if value.dim() not in dims or value.shape[-1] != width:
                raise ValueError(
                    f"{name} is {[*value.shape]}: expected [batch, tiles, {width}]; add the batch with {name}[None]."
                )
        if coords.is_floating_point() and coords.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"coords is {coords.dtype}, which rounds pixels, so tiles would get wrong places: pass coords in "
                "float32 or as integers. If FSDP has cast them, use parallelize(mixed_precision=torch.bfloat16) of the "
                "fsdp adapter, which casts no inputs; or set cast_forward_inputs=False in MixedPrecisionPolicy, and "
                "cast_root_forward_inputs=False in MixedPrecision of FSDP1."
            )
        of_batch = coords if coords.dim() == 3 else coords[None]
        if of_batch.shape[1] != x.shape[1] or of_batch.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"coords is {[*coords.shape]} and x is {[*x.shape]}: give one pair of coordinates for every tile of x."
            )
        if 0 in x.shape[:2]:
            raise ValueError(f"x is {[*x.shape]}: give at least one slide, each with at least one tile.")
        kept = None if padding_mask is None else self._check_padding_mask(padding_mask, x)
        slides = Sequences(x.shape, kept, num_leading=1)
        is_plain = type(weight) is nn.Parameter  # a wrapper that shards parameters may convert x
        if is_plain and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x is {x.dtype} and patch_embed is {weight.dtype}: convert x, or call the model under autocast."
            )
        attention: Any = getattr(model.encoder.layers[0].self_attn, "ring_attention", None)
        for length in {*slides.lengths} if attention is not None else ():
            try:
                attention.pattern.check(seq_len=length, num_heads=model.encoder.layers[0].self_attn.num_heads)
            except ValueError as error:
                raise ValueError(f"x has {length - 1} tiles, with the class token {length} tokens: {error}") from None
        if not of_batch.is_floating_point():
            of_batch = of_batch.long()  # torch computes little with uint16 and uint32
        places = model.coords_to_pos(of_batch, model.tile_size).expand(len(x), -1)
        for index, (pixels, own) in enumerate(zip(of_batch.expand(len(x), -1, -1), places, strict=True)):
            tiles = slice(None) if kept is None else kept[index].to(pixels.device)
            self._check_places(index, pixels[tiles], own[tiles])
        return places, slides

    def _check_padding_mask(self, padding_mask: Tensor, x: Tensor) -> list[Tensor]:
        """The numbers of the tiles of each slide that are not padding: int64 [tiles of the slide]."""
        if not isinstance(padding_mask, Tensor) or padding_mask.dtype != torch.bool:
            what = padding_mask.dtype if isinstance(padding_mask, Tensor) else type(padding_mask).__name__
            raise TypeError(f"padding_mask is {what}: expected bool [batch, tiles], True = padding; convert it.")
        if padding_mask.shape != x.shape[:2]:
            raise ValueError(
                f"padding_mask is {[*padding_mask.shape]} and x is {[*x.shape]}: expected one element per tile of x."
            )
        return kept_columns(
            padding_mask.to(x.device),
            "padding_mask is True at all tiles of slide %d: a slide needs at least one tile. True marks padding; of "
            "the pad_mask of GigaPath's loader, which marks tiles, give ~pad_mask.",
        )

    def _check_places(self, index: int, coords: Tensor, places: Tensor) -> None:
        """Check the coordinates [tiles, 2] of slide number ``index``, and their places in ``pos_embed``, [tiles]."""
        model: Any = self.slide_encoder
        low, high = (float(bound) for bound in coords.aminmax())
        limit = model.tile_size * model.slide_ngrids
        if not (low >= 0 and high < limit):  # NaN is refused too
            raise ValueError(
                f"coords has values from {low:g} to {high:g}: expected pixels from 0 to below {limit}, tile_size × "
                "slide_ngrids; use the level of the tiles, or a slide encoder with a larger slide_ngrids."
            )
        if self.ring.rank == 0 and 2 * (num_places := len(places.unique())) < len(places):
            warnings.warn(
                f"coords puts the {len(places)} tiles of slide {index} on {num_places} places of {model.tile_size} × "
                f"{model.tile_size} pixels: GigaPath gives tiles on one place the same positional embedding. coords "
                "counts pixels at the level of the tiles, not tiles and not micrometres.",
                stacklevel=2,
            )


# --- Checks that a release of gigapath has the parts that a ring needs.

_ATTRIBUTES = {
    "": "patch_embed cls_token pos_embed norm encoder coords_to_pos tile_size slide_ngrids global_pool",
    "patch_embed": "proj",
    "patch_embed.proj": "in_features weight",
}
"""The attributes that a ring reads."""

_PARAMETERS = {"forward": ("x coords all_layer_embed", True), "coords_to_pos": ("coords tile_size", True)}
"""The parameters of the methods that a ring calls or replaces, and whether these are all parameters."""


@torch.no_grad()
def _check_same_forward(slide_encoder: Any) -> None:
    """Compare the class's own forward with the ring's on three tiles, with the same function in place of the encoder.

    Raises:
        AdapterUnavailableError: the results differ, so this release computes something else around its encoder.
    """
    weight, encoder = slide_encoder.patch_embed.proj.weight, slide_encoder.encoder
    width = slide_encoder.patch_embed.proj.in_features
    tiles = torch.linspace(-1, 1, 3 * width).view(1, 3, width).to(weight)
    coords = torch.tensor([[[0, 0], [0, 1], [1, 0]]]).to(weight.device) % slide_encoder.slide_ngrids
    coords = coords * slide_encoder.tile_size

    def row_by_row(src_tokens: None, token_embeddings: Tensor, **options: Any) -> dict[str, Any]:
        x = token_embeddings
        return {"encoder_out": x.sin(), "encoder_states": [x, x.cos()]}

    def are_close(own: Tensor, on_ring: Tensor) -> bool:
        tolerance = 100 * torch.finfo(own.dtype).eps
        return own.shape == on_ring.shape and torch.allclose(own, on_ring, rtol=tolerance, atol=tolerance)

    encoder.forward = row_by_row
    try:
        for all_layer_embed in (False, True):
            own = type(slide_encoder).forward(slide_encoder, tiles, coords, all_layer_embed)
            on_ring = _SlideEncoder(slide_encoder, Ring()).forward(tiles, coords, all_layer_embed)
            if len(own) != len(on_ring) or not all(map(are_close, own, on_ring)):
                raise other_release(
                    f"{type(slide_encoder).__name__}.forward(all_layer_embed={all_layer_embed}) of this release of "
                    "gigapath does not return the embeddings that a ring returns",
                    "gigapath",
                )
    finally:
        del encoder.forward
