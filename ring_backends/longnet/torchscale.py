"""Checkpoints of LongNet: reads files, and derives a model's sizes from the names and shapes of its parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.training.checkpoint_files import is_not_caused_by_content

_NOT_SUPPORTED = (
    (r"flat_param", "parameters that FSDP flattened"),
    (
        r"\.(in_proj(_weight|_bias)?|qkv(_proj)?|Wqkv|c_attn|query_key_value)\b",
        "fused query, key and value projections",
    ),
    (r"\.moe_layer\.", "mixture of experts (moe_freq)"),
    (r"\.encoder_attn", "cross attention (an encoder-decoder)"),
    (r"\.[AB]\.", "two sets of weights per layer (multiway)"),
    (r"\.xpos\.", "xPos (xpos_rel_pos)"),
    (r"relative_position", "a relative position bias (rel_pos_buckets)"),
    (r"layernorm_embedding", "LayerNorm of the embedding (layernorm_embedding)"),
    (r"embed_positions\.(?!weight$)", "positions that are not learned"),
)

OPTIONS = ("num_heads", "scale_embedding", "activation", "layer_norm_eps")  # names and shapes do not show these
_BRANCHES = ("segment_lengths", "dilation_rates")


def load_parameters(model: nn.Module, state_dict: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Strict ``load_state_dict`` that raises ValueError if the parameters do not fit."""
    try:
        model.load_state_dict(state_dict, assign=assign)
    except RuntimeError as error:
        raise ValueError(
            f"state_dict: not the parameters of a {type(model).__name__} with these layers; give all parameters of "
            f"torchscale's model and no others. {' '.join(str(error).split())}"
        ) from None


def sizes_of(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes of the model: the arguments of its constructor that follow from names and shapes.

    Raises:
        ValueError: the parameters are not those of a LongNet, or the LongNet is not supported.
    """
    for name in state_dict:
        for pattern, what in _NOT_SUPPORTED:
            if re.search(pattern, f".{name}"):
                raise ValueError(
                    f"state_dict has {name}: {what}, which is not supported; give a model that was trained without it."
                )
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() not in (1, 2):
            what = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"state_dict has {name}, which is {what}: expected floating vectors and matrices; give the parameters "
                "of the encoder or decoder alone."
            )
    numbers = {int(found[1]) for name in state_dict if (found := re.match(r"layers\.(\d+)\.", name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise ValueError(
            f"state_dict has layers {sorted(numbers)}: expected consecutive names that begin with 'layers.0.'; give "
            "the whole state_dict of the encoder or decoder alone."
        )
    first = "layers.0."
    for name in (f"{first}self_attn.q_proj.weight", f"{first}ffn.fc1.weight"):
        if name not in state_dict or state_dict[name].dim() != 2:
            raise ValueError(
                f"state_dict has no matrix {name}: not a LongNet of torchscale; give one of its checkpoints."
            )
    sub_layer_norm = f"{first}self_attn.inner_attn_ln.weight" in state_dict
    normalize_output = "layer_norm.weight" in state_dict
    if not sub_layer_norm and not normalize_output:
        raise ValueError(
            "state_dict has neither inner_attn_ln nor layer_norm: it may be post-norm or DeepNorm (deepnorm), "
            "which are not supported; give a model that was trained with subln."
        )
    tables = {"vocab_size": "embed_tokens", "num_positions": "embed_positions", "output_size": "output_projection"}
    rows = {size: len(state_dict[f"{name}.weight"]) for size, name in tables.items() if f"{name}.weight" in state_dict}
    tied = rows.get("output_size", -1) == rows.get("vocab_size") and torch.equal(
        state_dict["output_projection.weight"], state_dict["embed_tokens.weight"]
    )
    return {
        "embed_dim": state_dict[f"{first}self_attn.q_proj.weight"].shape[1],
        "ffn_dim": len(state_dict[f"{first}ffn.fc1.weight"]),
        "num_layers": len(numbers),
        "sub_layer_norm": sub_layer_norm,
        "normalize_output": normalize_output,
        "tied": tied,
        **rows,
    }


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read kind, options, sizes, branches (None if not given) and state_dict from a file of ``ring-backends convert``.

    Raises:
        ValueError: the file has another format.
        OSError: the file cannot be read.
    """
    found = load_tensors(path)
    settings = found.get("longnet") if isinstance(found, dict) else None
    if not isinstance(settings, dict) or not {"kind", *_BRANCHES, *OPTIONS} <= set(settings) or "model" not in found:
        raise ValueError(f"path = {os.fspath(path)!r}: not a file of `ring-backends convert`; convert it first.")
    return {**settings, "state_dict": found["model"]}


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """Load a file of ``torch.save`` on the CPU, without executing code from it.

    Raises:
        ValueError: the file has another format, is cut off, or holds more than tensors and plain values.
        OSError: the file cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, depending on the file
        if is_not_caused_by_content(error):
            raise
        raise ValueError(
            f"path = {os.fspath(path)!r}: not a whole file of tensors and plain values from torch.save; save "
            f"the state_dict alone: torch.save(model.state_dict(), path). {type(error).__name__}: {error}"
        ) from error
