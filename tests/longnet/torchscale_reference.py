"""A reference for ``ring_backends.longnet``, which implements torchscale's algorithm independently."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_backends import Ring
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.longnet import LongNetDecoder, LongNetEncoder

EMBED_DIM, FFN_DIM, LAYERS, VOCABULARY, POSITIONS = 24, 40, 2, 19, 80


BRANCHES = ((8, 16, 64), (1, 2, 4))


HEADS = (4, 3)  # 3 is no multiple of the rates: torchscale pads the heads too


MODELS = {"encoder": LongNetEncoder, "decoder": LongNetDecoder}


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


def reference_model(state, x, heads, branches, is_causal, detach=True, scale=1.0, eps=1e-5, activation=F.gelu) -> Any:
    """The embeddings, the output of each layer, and the output of the model."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        weight = state.get(f"{name}.weight")
        return x if weight is None else F.layer_norm(x, weight.shape, weight, state[f"{name}.bias"], eps)

    if not x.is_floating_point():
        x = state["embed_tokens.weight"][x]
    x = scale * x
    if "embed_positions.weight" in state:
        x = x + state["embed_positions.weight"][2 : 2 + x.shape[1]]
    states = [x]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        normed = norm(x, f"{name}.self_attn_layer_norm")
        q, k, v = (linear(normed, f"{name}.self_attn.{part}_proj").unflatten(-1, (heads, -1)) for part in "qkv")
        out = reference_attention(q, k, v, branches, is_causal, detach).flatten(2)
        x = x + linear(norm(out, f"{name}.self_attn.inner_attn_ln"), f"{name}.self_attn.out_proj")
        hidden = activation(linear(norm(x, f"{name}.final_layer_norm"), f"{name}.ffn.fc1"))
        x = x + linear(norm(hidden, f"{name}.ffn.ffn_layernorm"), f"{name}.ffn.fc2")
        states.append(x)
    x = norm(x, "layer_norm")
    return [*states, linear(x, "output_projection") if "output_projection.weight" in state else x]


def make_state(subln=True, normalize_output=True, tokens=False, tied=False) -> dict[str, Tensor]:
    """Random parameters with torchscale's names. They are large, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(5)
    state = {}

    def add(name: str, *shape: int, norm: bool = False) -> None:
        fan_in = 4.0 if len(shape) == 1 else shape[-1]
        random = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)
        state[name] = 1 + random if norm else 2 * random

    def add_linear(name: str, in_dim: int, out_dim: int) -> None:
        add(f"{name}.weight", out_dim, in_dim)
        add(f"{name}.bias", out_dim)

    def add_norm(name: str, size: int) -> None:
        add(f"{name}.weight", size, norm=True)
        add(f"{name}.bias", size)

    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            add_linear(f"layers.{layer}.self_attn.{name}", EMBED_DIM, EMBED_DIM)
        add_linear(f"layers.{layer}.ffn.fc1", EMBED_DIM, FFN_DIM)
        add_linear(f"layers.{layer}.ffn.fc2", FFN_DIM, EMBED_DIM)
        add_norm(f"layers.{layer}.self_attn_layer_norm", EMBED_DIM)
        add_norm(f"layers.{layer}.final_layer_norm", EMBED_DIM)
        if subln:
            add_norm(f"layers.{layer}.self_attn.inner_attn_ln", EMBED_DIM)
            add_norm(f"layers.{layer}.ffn.ffn_layernorm", FFN_DIM)
    if normalize_output:
        add_norm("layer_norm", EMBED_DIM)
    if tokens:
        add("embed_tokens.weight", VOCABULARY, EMBED_DIM)
        add("embed_positions.weight", POSITIONS, EMBED_DIM)
        add("output_projection.weight", VOCABULARY, EMBED_DIM)
        if tied:
            state["output_projection.weight"] = state["embed_tokens.weight"]
    return state


def inputs(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    if kind == "decoder":
        return torch.randint(VOCABULARY, (2, n), generator=generator)
    return torch.randn(2, n, EMBED_DIM, generator=generator, dtype=torch.float64)


def attention(ring: Ring | None = None, branches: Any = BRANCHES) -> NativeRingDilatedAttention:
    return NativeRingDilatedAttention(*branches, offset="block", padding="zeros", ring=ring)


def make(kind: str, heads: int = 4, ring: Ring | None = None, **options: Any) -> Any:
    state = make_state(tokens=kind == "decoder")
    return MODELS[kind].from_state_dict(state, num_heads=heads, attention=attention(ring), **options)


def reference(kind: str, heads: int, n: int, **options: Any) -> Tensor:
    state = make_state(tokens=kind == "decoder")
    return reference_model(state, inputs(kind, n), heads, BRANCHES, kind == "decoder", **options)[-1]


def with_name(name: str, *shape: int) -> dict[str, Tensor]:
    return {**make_state(), name: torch.zeros(shape or (2,))}
