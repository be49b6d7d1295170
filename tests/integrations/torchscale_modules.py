"""Stand-ins for torchscale's LongNet encoder and decoder, for machines without ``torchscale``.

They are written for these tests: the same names, arguments and results. Their attention is the reference of
torchscale's algorithm, without flash-attn. Only what ``ring_backends.integrations.torchscale`` touches is here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def reference_attention(query, key, value, branches, is_causal, detach=True, zero_is_absent=True) -> Tensor:
    """torchscale's dilated attention. Inputs and output are [batch, n, heads, head_dim].

    torchscale detaches the mixing weights, and takes an LSE of 0 for that of an absent row.
    """
    n, heads = query.shape[1:3]
    outs, lses = [], []
    for w, r in zip(*branches, strict=True):
        w = min(w, n)
        rows = -(-w // r)
        of_head = []
        for head in range(heads):
            group = head // -(-heads // r)
            q, k, v = (_sparse(x[:, :, head], w, r, group) for x in (query, key, value))
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if is_causal:
                scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
            out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
            if zero_is_absent:
                lse = lse.masked_fill(lse == 0, -1e8)
            dense_out = out.new_zeros(*out.shape[:2], rows * r, out.shape[-1])
            dense_lse = lse.new_full((*lse.shape[:2], rows * r), -1e8)
            dense_out[:, :, group::r], dense_lse[:, :, group::r] = out, lse
            # torchscale joins the padded segments without removing their padding.
            of_head.append((dense_out.flatten(1, 2)[:, :n], dense_lse.flatten(1, 2)[:, :n]))
        outs.append(torch.stack([out for out, _ in of_head], 2))
        lses.append(torch.stack([lse for _, lse in of_head], 2))
    weights = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * (weights.detach() if detach else weights)[..., None]).sum(0)


def _sparse(x: Tensor, w: int, r: int, group: int) -> Tensor:
    """Select the covered rows: [batch, n, head_dim] to [batch, segments, rows, head_dim]."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % w)).unflatten(1, (-1, w))
    return F.pad(x, (0, 0, 0, -w % r))[:, :, group::r]


class EncoderConfig:
    kind = "encoder"

    def __init__(self, **options: Any) -> None:
        sizes = {"embed_dim": 768, "attention_heads": 12, "ffn_embed_dim": 3072, "layers": 12}
        rates = dict.fromkeys(("dropout", "drop_path_rate", "attention_dropout", "activation_dropout"), 0.0)
        own = {f"{self.kind}_{name}": size for name, size in sizes.items()} | rates
        own |= {"no_scale_embedding": True, "activation_fn": "gelu"}
        patterns = {name: eval(options[name]) for name in ("segment_length", "dilated_ratio")}
        vars(self).update({**own, **options, **patterns})


class DecoderConfig(EncoderConfig):
    kind = "decoder"


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0 or not self.training:
            return x
        is_kept = x.new_empty(len(x), 1, 1).bernoulli_(1 - self.drop_prob)
        return x * is_kept / (1 - self.drop_prob)


class PositionalEmbedding(nn.Embedding):
    def forward(self, x: Tensor, positions: Tensor | None = None, **unused: Any) -> Tensor:
        if positions is None:
            positions = torch.arange(2, x.shape[1] + 2)[None]
        return super().forward(positions)


class DilatedAttention(nn.Module):
    has_exact_gradients = True
    """Whether the mixing weights of the branches have a gradient. torchscale's have none."""

    def __init__(self, args: Any, width: int, num_heads: int) -> None:
        super().__init__()
        self.args, self.num_heads, self.head_dim = args, num_heads, width // num_heads
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
            out = reference_attention(q, k, v, branches, is_causal, detach)
        return self.out_proj(self.inner_attn_ln(out.to(projected[0].dtype).flatten(2))), None


class FeedForwardNetwork(nn.Module):
    def __init__(self, args: Any, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.ffn_layernorm, self.activation = nn.LayerNorm(hidden), args.activation_fn
        self.activation_dropout_module = nn.Dropout(args.activation_dropout)
        self.dropout_module = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation_dropout_module(getattr(F, self.activation)(self.fc1(x)))
        return self.dropout_module(self.fc2(self.ffn_layernorm(x)))


class Layer(nn.Module):
    def __init__(self, args: Any, depth: int, kind: str) -> None:
        super().__init__()
        width, num_layers = getattr(args, f"{kind}_embed_dim"), getattr(args, f"{kind}_layers")
        self.self_attn = DilatedAttention(args, width, getattr(args, f"{kind}_attention_heads"))
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.dropout_module = nn.Dropout(args.dropout)
        rate = args.drop_path_rate * depth / max(num_layers - 1, 1)
        self.drop_path = DropPath(rate) if args.drop_path_rate > 0 else None
        self.ffn = FeedForwardNetwork(args, width, getattr(args, f"{kind}_ffn_embed_dim"))
        self.final_layer_norm = nn.LayerNorm(width)

    def compute(self, x: Tensor, **options: Any) -> Tensor:
        drop, normed = self.drop_path or nn.Identity(), self.self_attn_layer_norm(x)
        found, _ = self.self_attn(query=normed, key=normed, value=normed, **options)
        x = x + drop(self.dropout_module(found))
        return x + drop(self.ffn(self.final_layer_norm(x)))


class LongNetEncoderLayer(Layer):
    def forward(self, x: Tensor, encoder_padding_mask: Any, incremental_state: Any = None) -> tuple[Tensor, None]:
        return self.compute(x, key_padding_mask=encoder_padding_mask, incremental_state=incremental_state), None


class LongNetDecoderLayer(Layer):
    def forward(self, x, incremental_state=None, self_attn_padding_mask=None, is_first_step=False) -> Any:
        options = {"key_padding_mask": self_attn_padding_mask, "incremental_state": incremental_state}
        return self.compute(x, **options, is_first_step=is_first_step, is_causal=True), None


class Module(nn.Module):
    kind: str
    layer: type[Layer]

    def __init__(self, args, embed_tokens=None, embed_positions=None, output_projection=None) -> None:
        super().__init__()
        self.args, self.dropout_module = args, nn.Dropout(args.dropout)
        width, num_layers = getattr(args, f"{self.kind}_embed_dim"), getattr(args, f"{self.kind}_layers")
        self.embed_scale = 1.0 if args.no_scale_embedding else math.sqrt(width)
        self.embed_tokens, self.embed_positions = embed_tokens, embed_positions
        self.output_projection = output_projection
        self.layers = nn.ModuleList(self.layer(args, depth, self.kind) for depth in range(num_layers))
        self.layer_norm = nn.LayerNorm(width)
        self.relative_position = self.self_attn_relative_position = None

    def embed(self, tokens: Any, embeddings: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The scaled embeddings, without and with positions. ``options`` are those of ``embed_positions``."""
        x = self.embed_scale * (self.embed_tokens(tokens) if embeddings is None else embeddings)
        if self.embed_positions is None:
            return x, self.dropout_module(x)
        return x, self.dropout_module(x + self.embed_positions(x if tokens is None else tokens, **options))

    def run_layers(self, x: Tensor, states: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
        """The normalized output, and the input and output of each layer. ``states`` are those of the layers."""
        rows = [x]
        for index, layer in enumerate(self.layers):
            state = None if states is None else states[index]
            rows.append(layer(rows[-1], incremental_state=state, **options)[0])
        return self.layer_norm(rows[-1]), rows


class LongNetEncoder(Module):
    kind, layer = "encoder", LongNetEncoderLayer

    def forward(
        self,
        src_tokens: Tensor | None,
        encoder_padding_mask: Any = None,
        attn_mask: Any = None,
        return_all_hiddens: bool = False,
        token_embeddings: Any = None,
        multiway_split_position: Any = None,
        features_only: bool = False,
        incremental_state: Any = None,
        positions: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        embedding, x = self.embed(src_tokens, token_embeddings, positions=positions)
        if encoder_padding_mask is None:
            encoder_padding_mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        x = x * (1 - encoder_padding_mask[..., None].type_as(x))
        mask = encoder_padding_mask if incremental_state is None else None
        x, states = self.run_layers(x, incremental_state, encoder_padding_mask=mask)
        if self.output_projection is not None and not features_only:
            x = self.output_projection(x)
        return {
            "encoder_out": x,
            "encoder_embedding": embedding,
            "encoder_padding_mask": encoder_padding_mask,
            "encoder_states": states if return_all_hiddens else [],
            "l_aux": [None] * len(self.layers),
        }


class LongNetDecoder(Module):
    kind, layer = "decoder", LongNetDecoderLayer

    def forward(
        self,
        prev_output_tokens: Tensor,
        self_attn_padding_mask: Any = None,
        encoder_out: Any = None,
        incremental_state: Any = None,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        token_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        is_first_step = incremental_state is not None and incremental_state.get("is_first_step", False)
        assert incremental_state is None or is_first_step, "the stand-in does not generate"
        _, x = self.embed(prev_output_tokens, token_embeddings, incremental_state=incremental_state)
        options = {"self_attn_padding_mask": self_attn_padding_mask, "is_first_step": is_first_step}
        x, states = self.run_layers(x, incremental_state, **options)
        out = x if features_only else self.output_projection(x)
        return out, {"inner_states": states, "l_aux": [None] * len(self.layers), "attn": None}
