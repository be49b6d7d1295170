"""Checks that a release of gigapath has the parts that a ring needs, and that a slide encoder has no others.

Nothing here imports gigapath.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.errors import AdapterUnavailableError

_ATTRIBUTES = {
    "slide_encoder": (
        *("patch_embed", "cls_token", "pos_embed", "norm", "encoder", "coords_to_pos"),
        *("tile_size", "slide_ngrids", "global_pool"),
    ),
    "slide_encoder.patch_embed": ("proj",),
    "slide_encoder.patch_embed.proj": ("in_features", "weight"),
    "slide_encoder.encoder": ("args", "layers", "embed_positions", "relative_position"),
    "slide_encoder.encoder.args": ("segment_length", "dilated_ratio"),
    "slide_encoder.encoder.layers[0]": ("self_attn",),
    "slide_encoder.encoder.layers[0].self_attn": (
        *("q_proj", "k_proj", "v_proj", "out_proj", "inner_attn_ln", "xpos"),
        *("num_heads", "head_dim", "dropout"),
    ),
}
"""The attributes that a ring reads."""

_PARAMETERS = {
    "slide_encoder.forward": ({"x", "coords", "all_layer_embed"}, True),
    "slide_encoder.coords_to_pos": ({"coords", "tile_size"}, True),
    "slide_encoder.encoder.forward": (
        {"src_tokens", "token_embeddings", "return_all_hiddens", "incremental_state"},
        False,
    ),
    "slide_encoder.encoder.layers[0].self_attn.forward": (
        {
            *("query", "key", "value", "incremental_state", "key_padding_mask", "attn_mask", "rel_pos"),
            *("is_first_step", "is_causal"),
        },
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

_SEE = "use a release that docs/gigapath.md lists"


def check_release(slide_encoder: Any) -> None:
    """Check the names of the attributes and parameters that a ring needs.

    Raises:
        AdapterUnavailableError: one of them is missing, or there is one that a ring does not know.
    """
    for path, names in _ATTRIBUTES.items():
        owner = _find(slide_encoder, path)
        for name in names:
            if not hasattr(owner, name):
                raise AdapterUnavailableError(f"{path}.{name}: this release of gigapath has no such attribute; {_SEE}.")
    for path, (expected, is_all) in _PARAMETERS.items():
        owner, name = _find(slide_encoder, path.rpartition(".")[0]), path.rpartition(".")[2]
        found = {*inspect.signature(getattr(type(owner), name)).parameters} - {"self"}
        missing, unknown = expected - found, found - expected if is_all else set()
        if missing or unknown:
            what = f"has no parameter {min(missing)!r}" if missing else f"has a new parameter {min(unknown)!r}"
            raise AdapterUnavailableError(f"{path} {what} in this release of gigapath; {_SEE}.")
    for index, layer in enumerate(slide_encoder.encoder.layers):
        for name, _ in layer.self_attn.named_children():
            if name not in _CHILDREN:
                raise AdapterUnavailableError(
                    f"slide_encoder.encoder.layers[{index}].self_attn.{name}: a module that a ring does not know; "
                    f"{_SEE}."
                )


def check_options(slide_encoder: Any) -> None:
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
def check_same_forward(slide_encoder: Any, ring_forward: Callable[..., list[Tensor]]) -> None:
    """Compare the class's own forward with the ring's on three tiles, with the same function in place of the encoder.

    Raises:
        AdapterUnavailableError: the results differ, so this release computes something else around its encoder.
    """
    weight, encoder = slide_encoder.patch_embed.proj.weight, slide_encoder.encoder
    width = slide_encoder.patch_embed.proj.in_features
    tiles = torch.linspace(-1, 1, 3 * width).view(1, 3, width).to(weight)
    coords = torch.tensor([[[0, 0], [0, 1], [1, 0]]]).to(weight.device) % slide_encoder.slide_ngrids
    coords = coords * slide_encoder.tile_size
    encoder.forward = _row_by_row
    try:
        for all_layer_embed in (False, True):
            own = type(slide_encoder).forward(slide_encoder, tiles, coords, all_layer_embed)
            on_ring = ring_forward(tiles, coords, all_layer_embed)
            if len(own) != len(on_ring) or not all(map(_are_close, own, on_ring)):
                raise AdapterUnavailableError(
                    f"{type(slide_encoder).__name__}.forward(all_layer_embed={all_layer_embed}) of this release of "
                    f"gigapath does not return the embeddings that a ring returns; {_SEE}."
                )
    finally:
        del encoder.forward


def _row_by_row(src_tokens: None, token_embeddings: Tensor, **options: Any) -> dict[str, Any]:
    x = token_embeddings
    return {"encoder_out": x.sin(), "encoder_states": [x, x.cos()]}


def _are_close(own: Tensor, on_ring: Tensor) -> bool:
    tolerance = 100 * torch.finfo(own.dtype).eps
    return own.shape == on_ring.shape and torch.allclose(own, on_ring, rtol=tolerance, atol=tolerance)


def _find(slide_encoder: nn.Module, path: str) -> Any:
    """The object at a path such as ``slide_encoder.encoder.layers[0]``."""
    found: Any = slide_encoder
    for name in path.split(".")[1:]:
        found = found.layers[0] if name == "layers[0]" else getattr(found, name)
    return found
