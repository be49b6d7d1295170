"""Prov-GigaPath's slide encoder on a ring: every rank of the ring calls it with the same whole slide::

    from ring_backends.integrations import gigapath

    attention = backend.RingDilatedAttention(**vars(gigapath.pattern_of(slide_encoder)), ring=ring)
    gigapath.use_ring(slide_encoder, attention)
    (embedding,) = slide_encoder(tiles, coords)  # the same on every rank

The tiles, and all activations, are sharded over the ranks. Layers that work row by row, such as projections and norms,
are those of the published class. This module does not import ``gigapath``.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import AdapterUnavailableError, RingMismatchError
from ring_backends.integrations.describe import describe
from ring_backends.plotting import check_plot
from ring_backends.ring.collectives import agree
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
    for change in _changes_of_release(slide_encoder):
        raise _other_release(change)
    args: Any = slide_encoder.encoder.args  # type: ignore[union-attr]
    return DilatedPattern.torchscale([int(w) for w in args.segment_length], [int(r) for r in args.dilated_ratio])


def use_ring(slide_encoder: nn.Module, attention: RingDilatedAttention) -> None:
    """Put GigaPath's slide encoder on the ring of ``attention``.

    After this call every rank of a ring calls ``slide_encoder(x, coords, all_layer_embed=False, padding_mask=None,
    tile_embeddings=False)`` with the same whole slides: x [batch, tiles, in_chans], and coords [batch, tiles, 2] or
    [tiles, 2] in pixels, as integers or in fp32 or fp64. Every rank gets the embeddings of the published class, a list
    of [batch, embed_dim]. flash-attn is not needed. x may be in fp64, fp32, bf16 or fp16, also under autocast.

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
            copy. With ``padding="masked"``, queries of a last segment that is not full do not see the zero keys that
            GigaPath pads it with. Then slides of every length work, but embeddings differ from GigaPath's.

    Raises:
        TypeError: ``slide_encoder`` is not a LongNetViT, or ``attention`` is not a RingDilatedAttention.
        ValueError: the slide encoder has a part that is not supported by a ring, or another forward than its class; or
            the pattern, scale or dropout_p of ``attention`` is not that of the slide encoder. A call raises ValueError
            or TypeError for invalid arguments, RingMismatchError if the ranks' slides differ, and RuntimeError if it is
            traced or exported.
        RingMismatchError: the ranks' parameters differ. The message names some of them.
        AdapterUnavailableError: this release of gigapath has changed a part that a ring needs. The message names it.
    """
    if not isinstance(attention, RingDilatedAttention):
        raise TypeError(f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter.")
    with attention.ring.report_refusals():
        pattern = pattern_of(slide_encoder)
        if "forward" in vars(slide_encoder) and not _is_on_ring(slide_encoder):
            raise ValueError(
                f"slide_encoder.forward is a {type(slide_encoder.forward).__name__}: its forward was replaced; call "
                "use_ring before any other function that does so."
            )
        _check_options(slide_encoder)
        _check_attention(attention, pattern, slide_encoder)
        _check_same_forward(slide_encoder)
    parameters = {name: describe(parameter) for name, parameter in slide_encoder.named_parameters()}
    try:
        agree(attention.ring, "use_ring of a slide encoder", parameters)
    except RingMismatchError as error:
        raise RingMismatchError(
            "slide_encoder: before use_ring, load the same checkpoint on every rank, or build the model after the same "
            f"torch.manual_seed. {error}"
        ) from None
    if _is_on_ring(slide_encoder):
        remove_ring(slide_encoder)
    encoder: Any = slide_encoder.encoder
    for index, layer in enumerate(encoder.layers):
        self_attn = layer.self_attn
        self_attn.ring_attention = attention._copy_for(f"layer {index}").train(self_attn.training)
        self_attn.forward = _SelfAttention(self_attn)
    if attention.ring.size > 1:
        for module in encoder.modules():
            if isinstance(module, nn.Dropout):
                module.forward = _Dropout(module, self_attn.ring_attention)  # type: ignore[method-assign]
    slide_encoder.forward = _SlideEncoder(slide_encoder).forward
    slide_encoder._replicate_for_data_parallel = _refuse_data_parallel  # type: ignore[method-assign]


def remove_ring(slide_encoder: nn.Module) -> None:
    """Undo :func:`use_ring`: every process computes the published class again.

    Call it before the model is exported, traced or compared with the published class, on models that are not wrapped.

    Raises:
        ValueError: ``slide_encoder`` is not on a ring.
    """
    if not _is_on_ring(slide_encoder):
        raise ValueError(
            f"slide_encoder = {type(slide_encoder).__name__}: not a slide encoder on a ring; give one that "
            "use_ring was called with."
        )
    for module in slide_encoder.modules():
        if isinstance(vars(module).get("forward"), (_SelfAttention, _Dropout)):
            del module.forward
    for layer in slide_encoder.encoder.layers:  # type: ignore[union-attr]
        del layer.self_attn.ring_attention
    del slide_encoder.forward
    del slide_encoder._replicate_for_data_parallel


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
    if not _is_on_ring(slide_encoder):
        raise ValueError(
            f"slide_encoder = {type(slide_encoder).__name__}: not a slide encoder on a ring; call use_ring."
        )
    on_ring: _SlideEncoder = slide_encoder.forward.__self__  # type: ignore[attr-defined]
    layers: Any = slide_encoder.encoder.layers  # type: ignore[union-attr]
    ring = on_ring.ring
    with ring.report_refusals():
        if slide_encoder.training:
            raise ValueError("slide_encoder is in training mode, and dropout would change the map; call its eval().")
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"layer = {layer}: the slide encoder has layers 0 … {len(layers) - 1}.")
        slides = on_ring._check(x, coords, padding_mask)
        for index, numbers in enumerate(slides.numbers(x.device)):
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
    for index, (numbers, length) in enumerate(zip(slides.numbers(query.device), slides.lengths, strict=True)):
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

    The picture begins at the slide's pixel (0, 0). Scaled to the size of a thumbnail of the slide, it lies over it.
    Colours go from 0 to the largest number. Places without a tile are transparent in formats that support it, such as
    PNG. Numbers of tiles on one place add up.

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


def _refuse_data_parallel() -> NoReturn:
    """Replaces the method that ``nn.DataParallel`` calls to copy a module."""
    raise RuntimeError(
        "slide_encoder is on a ring, and nn.DataParallel would call it from several threads of one process: start one "
        "process per GPU with torchrun, and leave nn.DataParallel out."
    )


def _is_on_ring(slide_encoder: nn.Module) -> bool:
    return isinstance(getattr(vars(slide_encoder).get("forward"), "__self__", None), _SlideEncoder)


_NO_EXPORT = (
    "slide_encoder is on a ring: torch.jit.trace, torch.export and torch.onnx.export do not support its communication; "
    "call gigapath.remove_ring(slide_encoder) first, and export on one process."
)


class _SlideEncoder:
    """Replaces the forward of a LongNetViT.

    It replaces ``forward`` and is no hook, because GigaPath's classification head calls ``forward`` directly.
    """

    def __init__(self, slide_encoder: Any, ring: Ring | None = None) -> None:
        self.slide_encoder, self._ring = slide_encoder, ring

    @property
    def ring(self) -> Ring:
        # The ring of the attention, so that a ring assigned to it after unpickling is used here too.
        return self._ring or self.slide_encoder.encoder.layers[0].self_attn.ring_attention.ring

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        padding_mask: Tensor | None = None,
        tile_embeddings: bool = False,
    ) -> Any:
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._refuse_export()
        return self._embed_slides(x, coords, all_layer_embed, padding_mask, tile_embeddings)

    @torch.compiler.disable(reason=_NO_EXPORT)  # type: ignore[untyped-decorator]
    def _refuse_export(self) -> NoReturn:
        with self.ring.report_refusals():
            raise RuntimeError(_NO_EXPORT)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _embed_slides(
        self, x: Tensor, coords: Tensor, all_layer_embed: bool, padding_mask: Tensor | None, tile_embeddings: bool
    ) -> Any:
        ring = self.ring
        ring.check_connected()
        with ring.report_refusals():
            slides = self._check(x, coords, padding_mask)
        if ring.size == 1:
            return self._embed(ring, x, slides, all_layer_embed, tile_embeddings)
        in_training = any(module.training for module in self.slide_encoder.encoder.modules())
        before = torch.get_rng_state()
        own_seed = int(torch.randint(2**53, ())) if in_training else 0
        fields = {
            "x": describe(x),
            "coords": describe(coords),
            "all_layer_embed": bool(all_layer_embed),
            "padding_mask": describe(padding_mask),
            "tile_embeddings": bool(tile_embeddings),
            "training mode": in_training,
        }
        seeds = agree(ring, "the slides of a slide encoder", fields, [own_seed])
        with _seeded(int(seeds[0][0]) + ring.data_rank, x.device, before) if in_training else contextlib.nullcontext():
            return self._embed(ring, x, slides, all_layer_embed, tile_embeddings)

    def _embed(self, ring: Ring, x: Tensor, slides: _Slides, all_layer_embed: bool, tile_embeddings: bool) -> Any:
        model: Any = self.slide_encoder
        num_cls = int(ring.rank == 0)  # the class token comes first
        tiles = slides.own_tiles(ring, x)
        rows = model.patch_embed(tiles) + model.pos_embed[0, slides.own_tiles(ring, slides.places)]
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
        return embeddings, [slides.unshard_tiles(ring, model.norm(state)) for state in states]

    def _pool(self, ring: Ring, rows: Tensor, slides: _Slides, num_cls: int) -> Tensor:
        """The class token or the mean of the tiles, [batch, width], from each rank's rows [batch, rows, width]."""
        if not self.slide_encoder.global_pool:
            return sum_of_ranks(ring, rows[:, :num_cls].sum(1))
        own = torch.tensor([ring.layout(length).local_len(ring.rank) for length in slides.lengths], device=rows.device)
        is_row = torch.arange(rows.shape[1], device=rows.device) < own[:, None]
        tiles = torch.where(is_row[..., None], rows, 0)[:, num_cls:]
        sums = sum_of_ranks(ring, tiles.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)))
        numbers = torch.tensor([length - 1 for length in slides.lengths], device=rows.device)
        return (sums / numbers[:, None]).to(rows.dtype)

    def _check(self, x: Tensor, coords: Tensor, padding_mask: Tensor | None) -> _Slides:
        """Check the arguments of a call, and return its slides."""
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
        numbers = [x.shape[1]] * len(x) if kept is None else [len(tiles) for tiles in kept]
        is_plain = type(weight) is nn.Parameter  # a wrapper that shards parameters may convert x
        if is_plain and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x is {x.dtype} and patch_embed is {weight.dtype}: convert x, or call the model under autocast."
            )
        attention: Any = getattr(model.encoder.layers[0].self_attn, "ring_attention", None)
        for number in {*numbers} if attention is not None else ():
            try:
                attention.pattern.check(seq_len=number + 1, num_heads=model.encoder.layers[0].self_attn.num_heads)
            except ValueError as error:
                raise ValueError(f"x has {number} tiles, with the class token {number + 1} tokens: {error}") from None
        if not of_batch.is_floating_point():
            of_batch = of_batch.long()  # torch computes little with uint16 and uint32
        places = model.coords_to_pos(of_batch, model.tile_size).expand(len(x), -1)
        for index, (pixels, own) in enumerate(zip(of_batch.expand(len(x), -1, -1), places, strict=True)):
            tiles = slice(None) if kept is None else kept[index].to(pixels.device)
            self._check_places(index, pixels[tiles], own[tiles])
        return _Slides(places, tuple(number + 1 for number in numbers), kept)

    def _check_padding_mask(self, padding_mask: Tensor, x: Tensor) -> list[Tensor]:
        """The numbers of the tiles of each slide that are not padding: int64 [tiles of the slide]."""
        if not isinstance(padding_mask, Tensor) or padding_mask.dtype != torch.bool:
            what = padding_mask.dtype if isinstance(padding_mask, Tensor) else type(padding_mask).__name__
            raise TypeError(f"padding_mask is {what}: expected bool [batch, tiles], True = padding; convert it.")
        if padding_mask.shape != x.shape[:2]:
            raise ValueError(
                f"padding_mask is {[*padding_mask.shape]} and x is {[*x.shape]}: expected one element per tile of x."
            )
        kept = [row.nonzero()[:, 0] for row in ~padding_mask.to(x.device)]
        for index, tiles in enumerate(kept):
            if len(tiles) == 0:
                raise ValueError(
                    f"padding_mask is True at all tiles of slide {index}: a slide needs at least one tile. True marks "
                    "padding; of the pad_mask of GigaPath's loader, which marks tiles, give ~pad_mask."
                )
        return kept

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


@dataclass(frozen=True)
class _Slides:
    """The slides of a call.

    Attributes:
        places: the place of every tile in ``pos_embed``, int64 [batch, tiles]. Those of padding have any value.
        lengths: the number of tokens of each slide, with the class token.
        kept: the numbers of the tiles of each slide that are not padding; None if there is no padding mask.
    """

    places: Tensor
    lengths: tuple[int, ...]
    kept: list[Tensor] | None

    def numbers(self, device: torch.device) -> list[Tensor]:
        """The columns of x with the tiles of each slide: int64 [tiles of the slide]."""
        kept = [torch.arange(self.places.shape[1])] * len(self.places) if self.kept is None else self.kept
        return [tiles.to(device) for tiles in kept]

    def own_tiles(self, ring: Ring, tiles: Tensor) -> Tensor:
        """This rank's tiles [batch, own tiles, …] of ``tiles`` [batch, tiles, …], without padding.

        Each slide is distributed over the ring by itself. Slides with fewer own tiles than others end with zeros.
        """
        if self.kept is None:
            return tiles if ring.size == 1 else tiles.index_select(1, _own_tiles(ring, self.lengths[0], tiles.device))
        own = [
            slide.index_select(0, numbers[_own_tiles(ring, length, numbers.device)].to(slide.device))
            for slide, numbers, length in zip(tiles, self.kept, self.lengths, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(own, batch_first=True)

    def unshard_tiles(self, ring: Ring, rows: Tensor) -> Tensor:
        """All tiles [batch, tiles, …], from each rank's rows [batch, rows, …] with the class token. Padding is 0."""
        if self.kept is None:
            whole: Tensor = ring.unshard(rows, seq_len=self.lengths[0])
            return whole[:, 1:]
        slides = []
        for slide, numbers, length in zip(rows, self.kept, self.lengths, strict=True):
            whole = ring.unshard(slide[: ring.layout(length).local_len(ring.rank)], 0, seq_len=length)
            slides.append(whole.new_zeros(self.places.shape[1], *whole.shape[1:]).index_copy(0, numbers, whole[1:]))
        return torch.stack(slides)


def _own_tiles(ring: Ring, length: int, device: torch.device) -> Tensor:
    """The numbers of this rank's tiles of a slide of ``length`` tokens. Position 0, the class token, is no tile."""
    positions = ring.positions(length)
    return (positions[positions > 0] - 1).to(device)


class _SelfAttention:
    """Replaces the forward of a layer's dilated attention: the same projections around the ring's attention."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, incremental_state: Any = None, **unused: Any
    ) -> tuple[Tensor, None]:
        module, lengths = self.module, incremental_state
        if not isinstance(lengths, tuple):
            with module.ring_attention.ring.report_refusals():
                raise ValueError(
                    "slide_encoder.encoder was called directly: on a ring it computes only this rank's rows; call "
                    "slide_encoder(x, coords)."
                )
        assert all(value is None or value is False for value in unused.values()), unused
        heads = (module.num_heads, module.head_dim)
        q, k, v = module.q_proj(query), module.k_proj(key), module.v_proj(value)
        q, k, v = (rows.unflatten(-1, heads) for rows in (q, k, v))
        out = self._attend(q, k, v, lengths).flatten(2)
        if module.inner_attn_ln is not None:
            out = module.inner_attn_ln(out)
        return module.out_proj(out), None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend within each slide of the batch, whose numbers of tokens are ``lengths``."""
        attention = self.module.ring_attention
        if len({*lengths}) == 1:
            out: Tensor = attention(q, k, v, seq_len=lengths[0])
            return out
        outs, ring = [], attention.ring
        for index, seq_len in enumerate(lengths):
            rows = slice(index, index + 1), slice(ring.layout(seq_len).local_len(ring.rank))
            outs.append(attention(q[rows], k[rows], v[rows], seq_len=seq_len)[0])
        return nn.utils.rnn.pad_sequence(outs, batch_first=True)


class _Dropout:
    """Replaces the forward of an ``nn.Dropout``, so that the ranks draw different numbers.

    Within a call of the slide encoder, torch's generators have the same state on all ranks of the ring. This class
    takes one number from them, whatever the number of rows. So they stay alike, for stochastic depth and attention
    dropout, and activation checkpointing repeats the same numbers.
    """

    def __init__(self, module: nn.Dropout, attention: RingDilatedAttention) -> None:
        self.module, self.attention = module, attention

    def __call__(self, input: Tensor) -> Tensor:
        p = self.module.p
        if not self.module.training or p == 0:
            return input
        generator = torch.Generator(input.device)
        generator.manual_seed(int(torch.randint(2**62, ())) + self.attention.ring.rank)
        is_kept = torch.empty(input.shape, dtype=torch.bool, device=input.device)
        return input * is_kept.bernoulli_(1 - p, generator=generator) * (1 / (1 - p) if p < 1 else 0)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device, before: Tensor) -> Iterator[None]:
    """Seed torch's generators of the CPU and of ``device``, and restore their states at the end.

    If nothing has drawn from them, the generator of the CPU returns to its state ``before`` the seed was drawn.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        states = _generator_states(devices)
        yield
        is_unused = all(map(torch.equal, states, _generator_states(devices)))
    if is_unused:
        torch.set_rng_state(before)


def _generator_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _check_attention(attention: RingDilatedAttention, pattern: DilatedPattern, slide_encoder: Any) -> None:
    """Check that an attention computes what the slide encoder's own attention does."""
    self_attn = slide_encoder.encoder.layers[0].self_attn
    own_p = float(self_attn.dropout)
    w, r = [*pattern.segment_lengths], [*pattern.dilation_rates]
    given = f", dropout_p={own_p}" if own_p else ""
    use = f"use RingDilatedAttention({w}, {r}, offset='block', padding='zeros'{given}, ring=ring)"
    offered = {pattern, replace(pattern, padding="masked")}
    if attention.pattern not in offered:
        raise ValueError(f"attention has {attention.pattern}: not the pattern of the slide encoder; {use}.")
    if attention.scale is not None and abs(attention.scale * self_attn.head_dim**0.5 - 1) > 1e-6:
        raise ValueError(f"attention has scale = {attention.scale}: expected 1 / sqrt(head_dim); {use}.")
    if attention.dropout_p != own_p:
        raise ValueError(f"attention has dropout_p = {attention.dropout_p}: the slide encoder has {own_p}; {use}.")


# --- Checks that a release of gigapath has the parts that a ring needs, and that a slide encoder has no others.

_ATTRIBUTES = {
    "slide_encoder": "patch_embed cls_token pos_embed norm encoder coords_to_pos tile_size slide_ngrids global_pool",
    "slide_encoder.patch_embed": "proj",
    "slide_encoder.patch_embed.proj": "in_features weight",
    "slide_encoder.encoder": "args layers embed_positions relative_position",
    "slide_encoder.encoder.args": "segment_length dilated_ratio",
    "slide_encoder.encoder.layers[0]": "self_attn",
    "slide_encoder.encoder.layers[0].self_attn": (
        "q_proj k_proj v_proj out_proj inner_attn_ln xpos num_heads head_dim dropout"
    ),
}
"""The attributes that a ring reads."""

_PARAMETERS = {
    "slide_encoder.forward": ("x coords all_layer_embed", True),
    "slide_encoder.coords_to_pos": ("coords tile_size", True),
    "slide_encoder.encoder.forward": ("src_tokens token_embeddings return_all_hiddens incremental_state", False),
    "slide_encoder.encoder.layers[0].self_attn.forward": (
        "query key value incremental_state key_padding_mask attn_mask rel_pos is_first_step is_causal",
        True,
    ),
}
"""The parameters of the methods that a ring calls or replaces, and whether these are all parameters."""

_OPTIONS = {
    "xpos_rel_pos": "xPos counts positions within a shard",
    "multiway": "the two sets of weights split the sequence at a position",
    "moe_freq": "a mixture of experts routes the rows of a shard",
    "rel_pos_buckets": "biases of scores are not supported",
    "seq_parallel": "GigaPath's own sequence parallelism would cut the rows again",
}
"""Options of the encoder that must be off, and why."""

_CHILDREN = {"q_proj", "k_proj", "v_proj", "out_proj", "inner_attn_ln", "dropout_module", "xpos", "ring_attention"}
"""The modules of a layer's attention."""


def _other_release(change: str) -> AdapterUnavailableError:
    return AdapterUnavailableError(f"{change}; use a release that docs/gigapath.md lists.")


def _changes_of_release(slide_encoder: Any) -> Iterator[str]:
    """The attributes and parameters that a ring needs and that are missing, and those that a ring does not know."""
    for path, names in _ATTRIBUTES.items():
        owner = _find(slide_encoder, path)
        for name in names.split():
            if not hasattr(owner, name):
                yield f"{path}.{name}: this release of gigapath has no such attribute"
    for path, (names, is_all) in _PARAMETERS.items():
        owner, _, name = path.rpartition(".")
        method = getattr(type(_find(slide_encoder, owner)), name)
        expected, found = {*names.split()}, {*inspect.signature(method).parameters} - {"self"}
        missing, unknown = expected - found, found - expected if is_all else set()
        if missing or unknown:
            what = f"has no parameter {min(missing)!r}" if missing else f"has a new parameter {min(unknown)!r}"
            yield f"{path} {what} in this release of gigapath"
    for index, layer in enumerate(slide_encoder.encoder.layers):
        for name, _ in layer.self_attn.named_children():
            if name not in _CHILDREN:
                yield f"slide_encoder.encoder.layers[{index}].self_attn.{name}: a module that a ring does not know"


def _find(slide_encoder: nn.Module, path: str) -> Any:
    """The object at a path such as ``slide_encoder.encoder.layers[0]``."""
    found: Any = slide_encoder
    for name in path.split(".")[1:]:
        found = found.layers[0] if name == "layers[0]" else getattr(found, name)
    return found


def _check_options(slide_encoder: Any) -> None:
    """Check that all parts of the encoder outside of attention work row by row.

    Raises:
        ValueError: an option of the encoder is not supported.
    """
    encoder = slide_encoder.encoder
    for name, why in _OPTIONS.items():
        value = getattr(encoder.args, name, False)
        if value:
            raise ValueError(
                f"slide_encoder.encoder.args.{name} = {value}: not supported by a ring, since {why}; use a slide "
                "encoder without it."
            )
    for name in ("embed_positions", "relative_position"):
        if getattr(encoder, name) is not None:
            raise ValueError(
                f"slide_encoder.encoder.{name} = {type(getattr(encoder, name)).__name__}: not supported by a ring; "
                "use a slide encoder without it."
            )


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
                raise _other_release(
                    f"{type(slide_encoder).__name__}.forward(all_layer_embed={all_layer_embed}) of this release of "
                    "gigapath does not return the embeddings that a ring returns"
                )
    finally:
        del encoder.forward
