"""A stand-in for GigaPath's slide encoder, for machines without ``gigapath``: the same names, arguments and results.

It is written for these tests. Its encoder is the tests' stand-in for torchscale's. Only what
``ring_backends.integrations.gigapath`` touches is here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchscale_modules import LongNetEncoder

DEFAULTS = {
    **{"slide_ngrids": 1000, "tile_size": 256, "max_wsi_size": 262144, "norm_layer": nn.LayerNorm},
    **{"global_pool": False, "dropout": 0.25, "drop_path_rate": 0.1, "mlp_ratio": 4.0},
}


class LongNetViT(nn.Module):
    def __init__(self, in_chans: int = 1536, embed_dim: int = 256, depth: int = 12, **options: Any) -> None:
        super().__init__()
        given = SimpleNamespace(**{**DEFAULTS, **options})
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Linear(in_chans, embed_dim), norm=nn.Identity()))
        self.tile_size, self.slide_ngrids, self.global_pool = given.tile_size, given.slide_ngrids, given.global_pool
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, embed_dim))
        self.register_buffer("pos_embed", sine_embedding(embed_dim, given.slide_ngrids), persistent=False)
        sizes = {"embed_dim": embed_dim, "layers": depth, "attention_heads": 16}
        sizes |= {"ffn_embed_dim": int(embed_dim * given.mlp_ratio)}
        lengths = eval(self.get_optimal_segment_length(given.max_wsi_size, given.tile_size))
        pattern = {"segment_length": lengths, "dilated_ratio": [1, 2, 4, 8, 16], "no_scale_embedding": True}
        rates = {"dropout": given.dropout, "drop_path_rate": given.drop_path_rate}
        off = "xpos_rel_pos multiway moe_freq rel_pos_buckets seq_parallel attention_dropout activation_dropout"
        args = {**{f"encoder_{name}": size for name, size in sizes.items()}, **pattern, **rates}
        self.encoder = LongNetEncoder(SimpleNamespace(**args, activation_fn="gelu", **dict.fromkeys(off.split(), 0)))
        self.norm = given.norm_layer(embed_dim)

    def get_optimal_segment_length(self, max_wsi_size: int = 262144, tile_size: int = 256) -> str:
        """Five lengths between 1024 and the largest number of tiles, evenly spaced on a logarithmic scale."""
        first, last = 10, int(math.log2((max_wsi_size // tile_size) ** 2))
        return str([int(2 ** (first + (last - first) * step / 4)) for step in range(5)])

    def coords_to_pos(self, coords: Tensor, tile_size: int = 256) -> Tensor:
        row, column = torch.floor(coords / tile_size).unbind(-1)
        return (row * self.slide_ngrids + column).long() + 1

    def forward(self, x: Tensor, coords: Tensor, all_layer_embed: bool = False) -> list[Tensor]:
        places = self.coords_to_pos(coords, self.tile_size)
        tiles = self.patch_embed(x) + self.pos_embed[0][places]
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), 1, -1)
        found = self.encoder(None, token_embeddings=torch.cat([first, tiles], 1), return_all_hiddens=all_layer_embed)
        states = found["encoder_states"] if all_layer_embed else [found["encoder_out"]]
        return [self.norm(state[:, 1:].mean(1)) if self.global_pool else self.norm(state)[:, 0] for state in states]


def sine_embedding(embed_dim: int, slide_ngrids: int) -> Tensor:
    """Sines and cosines of the two coordinates, [1, 1 + slide_ngrids², embed_dim]. The class token has zeros."""
    quarter = embed_dim // 4
    waves = torch.arange(slide_ngrids)[:, None] / 10000 ** (torch.arange(quarter) / quarter)
    of_one = torch.cat([waves.sin(), waves.cos()], 1)
    grid = (slide_ngrids, slide_ngrids, -1)
    of_both = torch.cat([of_one[None].expand(grid), of_one[:, None].expand(grid)], 2).flatten(0, 1)
    return torch.cat([torch.zeros(1, embed_dim), of_both])[None]


ARCHITECTURES = {"gigapath_slide_enc12l768d": (768, 12), "gigapath_slide_enc12l384d": (384, 12)}
"""Width and number of layers."""


def create_model(pretrained: str, model_arch: str, in_chans: int, local_dir: str = "", **options: Any) -> LongNetViT:
    """A model with random weights. GigaPath's function loads the published ones."""
    width, depth = ARCHITECTURES[model_arch]
    return LongNetViT(in_chans, width, depth, norm_layer=partial(nn.LayerNorm, eps=1e-6), **options)
