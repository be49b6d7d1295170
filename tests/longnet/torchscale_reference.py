"""A reference for ``ring_backends.longnet``, which implements torchscale's algorithm independently."""

from __future__ import annotations

from typing import Any

import torch
import torchscale_cases as cases
from torch import Tensor, nn
from torch.func import functional_call
from torchscale_modules import DilatedAttention

from ring_backends import Ring
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.longnet import LongNetDecoder, LongNetEncoder

EMBED_DIM, FFN_DIM = cases.WIDTH, 40
LAYERS, VOCABULARY, POSITIONS = cases.LAYERS, cases.VOCABULARY, cases.POSITIONS


BRANCHES = ((8, 16, 64), (1, 2, 4))


HEADS = (4, 3)  # 3 is no multiple of the rates: torchscale pads the heads too


MODELS = {"encoder": LongNetEncoder, "decoder": LongNetDecoder}


def reference_model(state, x, heads, branches, is_causal, *, detach=True, eps=1e-5, **changes) -> Any:
    """The embeddings, the output of each layer, and the output of the model. ``changes`` are options of torchscale."""
    pattern = dict(zip(("segment_length", "dilated_ratio"), map(str, branches), strict=True))
    side = "decoder" if is_causal else "encoder"
    options = {f"{side}_attention_heads": heads, "no_scale_embedding": True, **changes}
    module = make_module(is_causal, "embed_tokens.weight" in state, **pattern, **options)
    for name, part in [*module.named_modules()]:
        if isinstance(part, DilatedAttention):
            part.has_exact_gradients = not detach
        elif isinstance(part, nn.LayerNorm):
            part.eps = eps
            if f"{name}.weight" not in state:
                module.set_submodule(name, nn.Identity())
    tokens, embeddings = (None, x) if x.is_floating_point() else (x, None)
    options = {"return_all_hiddens": True, "token_embeddings": embeddings}
    found = functional_call(module, state, (tokens,), options)
    return [*found[1]["inner_states"], found[0]] if is_causal else [*found["encoder_states"], found["encoder_out"]]


def make_module(is_causal: bool, tokens: bool, **options: Any) -> Any:
    """The stand-in for torchscale's encoder or decoder, with or without embeddings of tokens."""
    kind = "decoder" if is_causal else "tokens" if tokens else "embeddings"
    model = cases.make_model(kind, **options)
    return model.decoder if is_causal else model.encoder


def make_state(subln=True, normalize_output=True, tokens=False, tied=False) -> dict[str, Tensor]:
    """Random parameters with torchscale's names. They are large, so that attention is far from uniform."""
    left_out = [*(() if subln else ("inner_attn_ln", "ffn_layernorm")), *(() if normalize_output else ("layer_norm",))]
    state = {
        name: 2 * value if value.dim() == 2 else value
        for name, value in make_module(False, tokens).state_dict().items()
        if name.split(".")[-2] not in left_out
    }
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
