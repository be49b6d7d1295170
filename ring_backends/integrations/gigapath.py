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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import AdapterUnavailableError
from ring_backends.integrations.describe import describe
from ring_backends.ring.collectives import agree
from ring_backends.ring.pooling import sum_of_ranks
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern

__all__ = ["pattern_of", "use_ring"]


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
        inner = getattr(slide_encoder, "slide_encoder", None)
        what = "give model.slide_encoder" if inner is not None else "pass it before it is wrapped or compiled"
        raise TypeError(
            f"slide_encoder = {type(slide_encoder).__name__}: expected a LongNetViT of gigapath.slide_encoder; {what}."
        )
    for change in _changes_of_release(slide_encoder):
        raise _other_release(change)
    args: Any = slide_encoder.encoder.args  # type: ignore[union-attr]
    return DilatedPattern.torchscale([int(w) for w in args.segment_length], [int(r) for r in args.dilated_ratio])


def use_ring(slide_encoder: nn.Module, attention: RingDilatedAttention) -> None:
    """Put GigaPath's slide encoder on the ring of ``attention``.

    After this call every rank of a ring calls ``slide_encoder(x, coords, all_layer_embed=False)`` with the same whole
    slide: x [batch, tiles, in_chans], and coords [batch, tiles, 2] or [tiles, 2] in pixels, as integers or in fp32 or
    fp64. Every rank gets the embeddings of the published class, a list of [batch, embed_dim]. flash-attn is not needed.
    x may be in fp64, fp32, bf16 or fp16, also under autocast.

    If every rank computes the same loss from the embeddings, the gradients of the parameters and of x, averaged over
    all ranks, are those of one device. DistributedDataParallel, FSDP2 and DeepSpeed average, and so does
    ``parallelize`` of every adapter.

    In training mode, ring rank 0 draws one seed per call from torch's CPU generator. Stochastic depth drops the same
    samples on all ranks of the ring. Dropout drops different units in every row of the slide. On a ring of one, random
    numbers are those of the published class.

    Args:
        slide_encoder: a ``LongNetViT``. Call this function before the model is wrapped or compiled.
        attention: a RingDilatedAttention of any adapter, with the pattern of :func:`pattern_of`. Every layer gets a
            copy. With ``padding="masked"``, queries of a last segment that is not full do not see the zero keys that
            GigaPath pads it with. Then slides of every length work, but embeddings differ from GigaPath's.

    Raises:
        TypeError: ``slide_encoder`` is not a LongNetViT, or ``attention`` is not a RingDilatedAttention.
        ValueError: the slide encoder has a part that is not supported by a ring, or is on a ring already; or the
            pattern, scale or dropout_p of ``attention`` is not that of the slide encoder. A call raises ValueError or
            TypeError for invalid arguments, and RingMismatchError if the ranks' slides differ.
        AdapterUnavailableError: this release of gigapath has changed a part that a ring needs. The message names it.
    """
    if not isinstance(attention, RingDilatedAttention):
        raise TypeError(f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter.")
    with attention.ring.report_refusals():
        pattern = pattern_of(slide_encoder)
        if "forward" in vars(slide_encoder):
            raise ValueError("slide_encoder is on a ring already, or its forward was replaced; call use_ring once.")
        _check_options(slide_encoder)
        _check_attention(attention, pattern, slide_encoder)
        _check_same_forward(slide_encoder)
    encoder: Any = slide_encoder.encoder
    for index, layer in enumerate(encoder.layers):
        self_attn = layer.self_attn
        self_attn.ring_attention = attention.copy_for(f"layer {index}").train(self_attn.training)
        self_attn.forward = _SelfAttention(self_attn)
    if attention.ring.size > 1:
        for module in encoder.modules():
            if isinstance(module, nn.Dropout):
                module.forward = _Dropout(module, self_attn.ring_attention)  # type: ignore[method-assign]
    slide_encoder.forward = _SlideEncoder(slide_encoder)


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, coords: Tensor, all_layer_embed: bool = False) -> list[Tensor]:
        ring = self.ring
        ring.check_connected()
        with ring.report_refusals():
            places = self._check(x, coords)
        if ring.size == 1:
            return self._embed(ring, x, places, all_layer_embed)
        is_random = any(module.training for module in self.slide_encoder.encoder.modules())
        own_seed = int(torch.randint(2**53, ())) if is_random else 0
        fields = {"x": describe(x), "coords": describe(coords), "all_layer_embed": bool(all_layer_embed)}
        seeds = agree(ring, "the slide of a slide encoder", fields | {"training mode": is_random}, [own_seed])
        with _seeded(int(seeds[0][0]) + ring.data_rank, x.device) if is_random else contextlib.nullcontext():
            return self._embed(ring, x, places, all_layer_embed)

    def _embed(self, ring: Ring, x: Tensor, places: Tensor, all_layer_embed: bool) -> list[Tensor]:
        model: Any = self.slide_encoder
        batch, num_tiles = x.shape[:2]
        seq_len = num_tiles + 1  # the class token comes first
        pieces = ring.layout(seq_len).pieces(ring.rank)
        num_cls = sum(0 in piece for piece in pieces)
        rows = model.patch_embed(_tiles_of(pieces, x) if ring.size > 1 else x)
        rows = rows + model.pos_embed[0, _tiles_of(pieces, places)]
        # A rank without the class token adds none of its rows, so that the parameter has a gradient on every rank.
        cls_token = (model.cls_token + model.pos_embed[:, :1])[:, :num_cls]
        rows = torch.cat((cls_token.expand(batch, -1, -1), rows), 1)
        # The encoder passes one element of incremental_state to each layer. Activation checkpointing keeps it.
        options = {"return_all_hiddens": all_layer_embed, "incremental_state": [seq_len] * len(model.encoder.layers)}
        encoded = model.encoder(src_tokens=None, token_embeddings=rows, **options)
        states = encoded["encoder_states"] if all_layer_embed else [encoded["encoder_out"]]
        # One collective per state: layers above those whose embeddings the loss uses then have no backward and no
        # gradients, as in GigaPath's code.
        if model.global_pool:
            pooled = [self._pool(ring, state[:, num_cls:], num_tiles) for state in states]
        else:
            pooled = [self._pool(ring, state[:, :num_cls], 1) for state in states]
        return [model.norm(row) for row in pooled]

    @staticmethod
    def _pool(ring: Ring, rows: Tensor, number: int) -> Tensor:
        """The mean [batch, embed_dim] of all ranks' rows [batch, rows, embed_dim], of which there are ``number``."""
        own = rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
        return (sum_of_ranks(ring, own) / number).to(rows.dtype)

    def _check(self, x: Tensor, coords: Tensor) -> Tensor:
        """Check the arguments of a call, and return the place of every tile in ``pos_embed``, [batch, tiles]."""
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
        if x.shape[1] == 0:
            raise ValueError(f"x is {[*x.shape]}: a slide needs at least one tile.")
        is_plain = type(weight) is nn.Parameter  # a wrapper that shards parameters may convert x
        if is_plain and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x is {x.dtype} and patch_embed is {weight.dtype}: convert x, or call the model under autocast."
            )
        seq_len, attention = x.shape[1] + 1, getattr(model.encoder.layers[0].self_attn, "ring_attention", None)
        if attention is not None:
            num_heads = model.encoder.layers[0].self_attn.num_heads
            try:
                attention.pattern.check(seq_len=seq_len, num_heads=num_heads)
            except ValueError as error:
                raise ValueError(f"x has {x.shape[1]} tiles, with the class token {seq_len} tokens: {error}") from None
        places: Tensor = model.coords_to_pos(of_batch, model.tile_size)
        first, last = (int(bound) for bound in places.aminmax())
        if first < 1 or last >= model.pos_embed.shape[1]:
            raise ValueError(
                f"coords has values from {coords.min():g} to {coords.max():g}: expected pixels from 0 to below "
                f"{model.tile_size * model.slide_ngrids}, tile_size × slide_ngrids; use the level of the tiles, or a "
                "slide encoder with a larger slide_ngrids."
            )
        return places


def _tiles_of(pieces: tuple[range, ...], tiles: Tensor) -> Tensor:
    """The tiles [batch, tiles, …] at these positions of the sequence. Position 0, the class token, is no tile."""
    return torch.cat([tiles[:, max(piece.start - 1, 0) : max(piece.stop - 1, 0)] for piece in pieces], 1)


class _SelfAttention:
    """Replaces the forward of a layer's dilated attention: the same projections around the ring's attention."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, incremental_state: Any = None, **unused: Any
    ) -> tuple[Tensor, None]:
        module, seq_len = self.module, incremental_state
        if not isinstance(seq_len, int):
            with module.ring_attention.ring.report_refusals():
                raise ValueError(
                    "slide_encoder.encoder was called directly: on a ring it computes only this rank's rows; call "
                    "slide_encoder(x, coords)."
                )
        assert all(value is None or value is False for value in unused.values()), unused
        heads = (module.num_heads, module.head_dim)
        q, k, v = module.q_proj(query), module.k_proj(key), module.v_proj(value)
        q, k, v = (rows.unflatten(-1, heads) for rows in (q, k, v))
        out = module.ring_attention(q, k, v, seq_len=seq_len).flatten(2)
        if module.inner_attn_ln is not None:
            out = module.inner_attn_ln(out)
        return module.out_proj(out), None


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
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of ``device``, and restore their states at the end."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        yield


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
            on_ring = _SlideEncoder(slide_encoder, Ring())(tiles, coords, all_layer_embed)
            if len(own) != len(on_ring) or not all(map(are_close, own, on_ring)):
                raise _other_release(
                    f"{type(slide_encoder).__name__}.forward(all_layer_embed={all_layer_embed}) of this release of "
                    "gigapath does not return the embeddings that a ring returns"
                )
    finally:
        del encoder.forward
