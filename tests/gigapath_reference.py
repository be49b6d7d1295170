"""A stand-in for GigaPath's slide encoder, for machines without ``gigapath``: the same names, arguments and results.

It is written for these tests. Its attention is the reference of torchscale's algorithm, without flash-attn. Only what
``ring_backends.integrations.gigapath`` touches is here.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchscale_reference import reference_attention

HEADS = 16


class PatchEmbed(nn.Module):
    def __init__(self, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_chans, embed_dim)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x))


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0 or not self.training:
            return x
        is_kept = x.new_empty(len(x), 1, 1).bernoulli_(1 - self.drop_prob)
        return x * is_kept / (1 - self.drop_prob)


class DilatedAttention(nn.Module):
    has_exact_gradients = True
    """Whether the mixing weights of the branches have a gradient. GigaPath's have none."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        width = args.encoder_embed_dim
        self.args, self.num_heads, self.head_dim = args, HEADS, width // HEADS
        self.dropout = args.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(width)
        self.dropout_module = nn.Dropout(self.dropout)
        self.xpos = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        key_padding_mask: Any = None,
        attn_mask: Any = None,
        rel_pos: Any = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        projected = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        wide = torch.promote_types(projected[0].dtype, torch.float32)  # flash-attn returns the LSE in fp32
        q, k, v = (rows.to(wide).unflatten(-1, (self.num_heads, self.head_dim)) for rows in projected)
        branches = (self.args.segment_length, self.args.dilated_ratio)
        detach = not self.has_exact_gradients
        with torch.autocast(q.device.type, enabled=False):
            out = reference_attention(q, k, v, branches, is_causal, detach=detach, zero_is_absent=True)
        return self.out_proj(self.inner_attn_ln(out.to(projected[0].dtype).flatten(2))), None


class FeedForwardNetwork(nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(args.encoder_embed_dim, args.encoder_ffn_embed_dim)
        self.fc2 = nn.Linear(args.encoder_ffn_embed_dim, args.encoder_embed_dim)
        self.ffn_layernorm = nn.LayerNorm(args.encoder_ffn_embed_dim)
        self.activation_dropout_module = nn.Dropout(args.activation_dropout)
        self.dropout_module = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation_dropout_module(F.gelu(self.fc1(x)))
        return self.dropout_module(self.fc2(self.ffn_layernorm(x)))


class LongNetEncoderLayer(nn.Module):
    def __init__(self, args: Any, depth: int) -> None:
        super().__init__()
        self.self_attn = DilatedAttention(args)
        self.self_attn_layer_norm = nn.LayerNorm(args.encoder_embed_dim)
        self.dropout_module = nn.Dropout(args.dropout)
        rate = args.drop_path_rate * depth / max(args.encoder_layers - 1, 1)
        self.drop_path = DropPath(rate) if args.drop_path_rate > 0 else None
        self.ffn = FeedForwardNetwork(args)
        self.final_layer_norm = nn.LayerNorm(args.encoder_embed_dim)

    def forward(self, x: Tensor, encoder_padding_mask: Any, incremental_state: Any = None) -> tuple[Tensor, None]:
        normed = self.self_attn_layer_norm(x)
        options = {"key_padding_mask": encoder_padding_mask, "incremental_state": incremental_state}
        found, _ = self.self_attn(query=normed, key=normed, value=normed, **options)
        x = x + self._drop(self.dropout_module(found))
        return x + self._drop(self.ffn(self.final_layer_norm(x))), None

    def _drop(self, x: Tensor) -> Tensor:
        return x if self.drop_path is None else self.drop_path(x)


class LongNetEncoder(nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.dropout_module = nn.Dropout(args.dropout)
        self.embed_positions = self.relative_position = None
        self.layers = nn.ModuleList(LongNetEncoderLayer(args, depth) for depth in range(args.encoder_layers))
        self.layer_norm = nn.LayerNorm(args.encoder_embed_dim)

    def forward(
        self,
        src_tokens: None,
        encoder_padding_mask: Any = None,
        return_all_hiddens: bool = False,
        token_embeddings: Any = None,
        incremental_state: Any = None,
    ) -> dict[str, Any]:
        x = self.dropout_module(token_embeddings)
        if encoder_padding_mask is None:
            encoder_padding_mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        states = [x]
        for index, layer in enumerate(self.layers):
            state = None if incremental_state is None else incremental_state[index]
            mask = encoder_padding_mask if incremental_state is None else None
            x, _ = layer(x, encoder_padding_mask=mask, incremental_state=state)
            states.append(x)
        return {"encoder_out": self.layer_norm(x), "encoder_states": states if return_all_hiddens else []}


class LongNetViT(nn.Module):
    def __init__(
        self,
        in_chans: int = 1536,
        embed_dim: int = 256,
        depth: int = 12,
        slide_ngrids: int = 1000,
        tile_size: int = 256,
        max_wsi_size: int = 262144,
        norm_layer: Any = nn.LayerNorm,
        global_pool: bool = False,
        dropout: float = 0.25,
        drop_path_rate: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(in_chans, embed_dim)
        self.tile_size, self.slide_ngrids, self.global_pool = tile_size, slide_ngrids, global_pool
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, embed_dim))
        self.register_buffer("pos_embed", sine_embedding(embed_dim, slide_ngrids), persistent=False)
        sizes = {"encoder_embed_dim": embed_dim, "encoder_layers": depth}
        sizes |= {"encoder_ffn_embed_dim": int(embed_dim * kwargs.get("mlp_ratio", 4.0))}
        pattern = {"segment_length": eval(self.get_optimal_segment_length(max_wsi_size, tile_size))}
        rates = {"dropout": dropout, "drop_path_rate": drop_path_rate}
        off = ("xpos_rel_pos", "multiway", "moe_freq", "rel_pos_buckets", "seq_parallel")
        off += ("attention_dropout", "activation_dropout")
        args = SimpleNamespace(**sizes, **pattern, dilated_ratio=[1, 2, 4, 8, 16], **rates, **dict.fromkeys(off, 0))
        self.encoder = LongNetEncoder(args)
        self.norm = norm_layer(embed_dim)

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


def create_model(pretrained: str, model_arch: str, in_chans: int, **options: Any) -> LongNetViT:
    """A model with random weights. GigaPath's function loads the published ones."""
    width, depth = {"gigapath_slide_enc12l768d": (768, 12)}[model_arch]
    return LongNetViT(in_chans, width, depth, norm_layer=partial(nn.LayerNorm, eps=1e-6), **options)
