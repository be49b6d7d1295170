"""Converts a torchscale LongNet checkpoint, for example GigaPath's slide encoder, into one of this package.

The parameters keep their names. The converted checkpoint also holds what names and shapes do not show: the number of
heads, the branches, and whether the model is an encoder or a decoder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_backends.longnet.model import LongNetDecoder, LongNetEncoder
from ring_backends.longnet.torchscale import OPTIONS, load_parameters, load_tensors, sizes_of
from ring_backends.registry import create_attention
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.training.checkpoint_files import replace_file

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_LAYER = re.compile(r"(.*?)layers\.\d+\.(?:self_attn|self_attn_layer_norm|ffn|final_layer_norm|moe_layer)\.")
_KINDS = {"encoder": LongNetEncoder, "decoder": LongNetDecoder}


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """The result of :func:`convert_checkpoint`.

    Attributes:
        settings: ``kind``, the options and sizes of the model, and the branches (None if they were not given).
        state_dict: the parameters, with names as in :class:`~ring_backends.longnet.LongNet`, such as ``layers.0.…``.
        prefix: the prefix that was removed from the names in the source.
        left_out: names of the entries of the source that are not in ``state_dict``.
    """

    settings: dict[str, Any]
    state_dict: dict[str, Tensor]
    prefix: str
    left_out: list[str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file for ``LongNetEncoder.from_checkpoint`` or ``LongNetDecoder.from_checkpoint``."""
        found = {"longnet": self.settings, "model": self.state_dict}
        replace_file(path, lambda file: torch.save(found, file))


def convert_checkpoint(
    source: str | os.PathLike[str],
    num_heads: int,
    *,
    prefix: str | None = None,
    kind: str | None = None,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
    seq_len: int | None = None,
    activation: str = "gelu",
    layer_norm_eps: float = 1e-5,
    scale_embedding: bool = False,
) -> ConvertedCheckpoint:
    """Read a torchscale checkpoint, and check that a LongNet of this package can load its parameters.

    Args:
        source: a file with a state_dict, either at the top level or under ``"model"``, ``"state_dict"``,
            ``"model_state_dict"`` or ``"module"``.
        num_heads: number of heads. A checkpoint does not contain it.
        prefix: prefix of the parameters' names, such as ``"encoder."``. None finds it from the names.
        kind: ``"encoder"`` or ``"decoder"``. None finds it from the prefix.
        segment_lengths, dilation_rates: the branches with which the model was trained, or None for both.
        seq_len: length of the longest sequence for the model, to check the branches. None means any length.
        activation, layer_norm_eps, scale_embedding: as in :class:`~ring_backends.longnet.LongNet`.

    Raises:
        ValueError: the file holds no LongNet, or a LongNet that is not supported; or an argument does not fit the file.
        OSError: the file cannot be read.
    """
    if segment_lengths is not None and dilation_rates is not None:
        _check_branches(DilatedPattern.torchscale(segment_lengths, dilation_rates), num_heads, seq_len)
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"kind = {kind!r}: unknown; choose one of {', '.join(_KINDS)}.")
    content = load_tensors(source)
    tensors, left_out = _find_state_dict(source, content)
    found_prefix = _find_prefix(tensors, prefix)
    state_dict = {
        # Cloned, since torch.save would write the whole storage of a view.
        name.removeprefix(found_prefix): value.detach().clone()
        for name, value in tensors.items()
        if name.startswith(found_prefix)
    }
    left_out += [name for name in tensors if not name.startswith(found_prefix)]
    earlier = content.get("longnet") if isinstance(content, Mapping) else None
    earlier = earlier if isinstance(earlier, Mapping) else {}
    settings: dict[str, Any] = {
        "kind": kind or earlier.get("kind") or _find_kind(found_prefix, state_dict),
        "segment_lengths": None if segment_lengths is None else tuple(segment_lengths),
        "dilation_rates": None if dilation_rates is None else tuple(dilation_rates),
        "num_heads": num_heads,
        "scale_embedding": scale_embedding,
        "activation": activation,
        "layer_norm_eps": layer_norm_eps,
    }
    for name in (*OPTIONS, "kind"):
        if name in earlier and earlier[name] != settings[name]:
            raise ValueError(
                f"{name} = {settings[name]!r}: {os.fspath(source)} was written by `convert` with {earlier[name]!r}; "
                "give the same value, or convert torchscale's own checkpoint."
            )
    sizes = sizes_of(state_dict)
    options = {name: settings[name] for name in OPTIONS}
    attention = create_attention("native", [1], [1])
    model = _KINDS[settings["kind"]](attention=attention, device="meta", **sizes, **options)
    load_parameters(model, state_dict, assign=True)
    return ConvertedCheckpoint({**settings, **sizes}, state_dict, found_prefix, left_out)


def _check_branches(pattern: DilatedPattern, num_heads: int, seq_len: int | None) -> None:
    """Refuse branches with which torchscale misplaces outputs at length ``seq_len``; None checks every length."""
    if seq_len is not None:
        pattern.check(seq_len=seq_len, num_heads=num_heads)
        return
    try:
        pattern.check(seq_len=max(w or 0 for w in pattern.segment_lengths) + 1, num_heads=num_heads)
    except ValueError as error:
        raise ValueError(
            f"segment_lengths: {error} If all sequences are shorter, give their length with --seq-len."
        ) from None


def _find_state_dict(source: str | os.PathLike[str], content: Any) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return the state_dict at the top level of a checkpoint or in a container, and the names of all other entries."""
    others: list[str] = []
    while isinstance(content, Mapping):
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        container = next((name for name in _CONTAINERS if isinstance(content.get(name), Mapping)), None)
        others += [str(name) for name in content if name not in tensors and name != container]
        if container is None and tensors:
            return tensors, others
        others += map(str, tensors)
        content = None if container is None else content[container]
    raise ValueError(
        f"source = {os.fspath(source)!r}: holds no state_dict, neither at the top level nor under "
        f"{', '.join(_CONTAINERS)}; save one: torch.save(model.state_dict(), path)."
    )


def _find_prefix(tensors: Mapping[str, Tensor], prefix: str | None) -> str:
    """Return the prefix of the only LongNet, or ``prefix`` if a LongNet has it."""
    prefixes = sorted({found[1] for name in tensors if (found := _LAYER.match(name))})
    listed = ", ".join(map(repr, prefixes)) or "none"
    if prefix is not None:
        prefix = f"{prefix.rstrip('.')}." if prefix else ""
        if prefix not in prefixes:
            raise ValueError(f"prefix = {prefix!r}: no layer has this prefix; the source's prefixes: {listed}.")
        return prefix
    if not prefixes:
        raise ValueError(
            "source has no names such as layers.0.self_attn.q_proj.weight, so it is not a LongNet of torchscale; its "
            f"first name is {next(iter(tensors))!r}."
        )
    if len(prefixes) > 1:
        raise ValueError(f"prefix: there are several LongNets, {listed}; choose one with --prefix.")
    return prefixes[0]


def _find_kind(prefix: str, state_dict: Mapping[str, Tensor]) -> str:
    """Return ``"encoder"`` or ``"decoder"``, by the prefix. The parameters of both have the same names."""
    for part in reversed(prefix.split(".")):
        if part in _KINDS:
            return part
    if "embed_tokens.weight" not in state_dict:
        return "encoder"
    raise ValueError("kind: the names do not show whether this is an encoder or a decoder; choose one with --kind.")
