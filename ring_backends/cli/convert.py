"""``convert``: a torchscale LongNet checkpoint, GigaPath's slide encoder among them, becomes one of ours.

The parameters keep their names; what is new is what a checkpoint does not say by names and shapes alone: the heads,
the branches, and whether it is an encoder or a decoder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ring_backends.cli.options import check_files
from ring_backends.cli.parsing import describe_branches, parse_branches
from ring_backends.cli.report import reported_errors
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from torch import Tensor

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_LAYER = re.compile(r"(.*?)layers\.\d+\.(?:self_attn|self_attn_layer_norm|ffn|final_layer_norm|moe_layer)\.")
_KINDS = ("encoder", "decoder")
_MOST_ROWS = 20


def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint: a state_dict, or one under 'model'.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write.")],
    num_heads: Annotated[
        int,
        typer.Option(min=1, help="Heads, which no checkpoint tells; GigaPath's slide encoders have 16."),
    ],
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME.", help="What the names begin with, as encoder. does; if not given, it is found."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="encoder|decoder", help="If not given, what the prefix says.")
    ] = None,
    segment_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N,…",
            help="Segment lengths it was trained with; kept in TARGET, and compared when it is loaded.",
        ),
    ] = None,
    dilation_rates: Annotated[
        list[str] | None, typer.Option(metavar="N,N,…", help="Dilation rates it was trained with.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence it is to run on, for the check of the branches; any if not given."),
    ] = None,
    activation: Annotated[
        str, typer.Option(metavar="gelu|relu", help="Of the feed-forward networks (activation_fn).")
    ] = "gelu",
    layer_norm_eps: Annotated[float, typer.Option(help="Of every LayerNorm (layernorm_eps).")] = 1e-5,
    scale_embedding: Annotated[
        bool, typer.Option("--scale-embedding", help="It was trained with no_scale_embedding=False.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if there is one.")] = False,
) -> None:
    """Rewrite a torchscale LongNet checkpoint for LongNetEncoder.from_checkpoint, or LongNetDecoder's."""
    names = ("source", "target", "num_heads", "prefix", "kind", "segment_lengths", "dilation_rates", "seq_len")
    with reported_errors("convert", (*names, "activation", "layer_norm_eps")):
        branches = parse_branches(segment_lengths, dilation_rates)
        if branches is not None:
            _check_branches(DilatedPattern.torchscale(*branches), num_heads, seq_len)
        if kind is not None and kind not in _KINDS:
            raise ValueError(f"kind = {kind!r}: unknown; choose one of {', '.join(_KINDS)}.")
        _check_paths(source, target, force)
        tensors, left = _tensors_in(source)
        found_prefix = _find_prefix(tensors, prefix)
        state_dict = {
            # A clone, since torch.save would write the whole storage of which a tensor may be a part.
            name.removeprefix(found_prefix): value.detach().clone()
            for name, value in tensors.items()
            if name.startswith(found_prefix)
        }
        left += [name for name in tensors if not name.startswith(found_prefix)]
        before = _converted_before(source)
        said = {
            "kind": kind or before.get("kind") or _kind_of(found_prefix, state_dict),
            "segment_lengths": None if branches is None else branches[0],
            "dilation_rates": None if branches is None else branches[1],
            "num_heads": num_heads,
            "scale_embedding": scale_embedding,
            "activation": activation,
            "layer_norm_eps": layer_norm_eps,
        }
        _check_as_before(source, said, before)
        said |= _checked_sizes(said, state_dict)
        _write(target, {"longnet": said, "model": state_dict})
        _show(target, found_prefix, said, state_dict, left)


def _check_branches(pattern: DilatedPattern, num_heads: int, seq_len: int | None) -> None:
    """Refuse branches whose outputs torchscale misplaces on sequences of that length, or of any."""
    if seq_len is not None:
        pattern.check(seq_len=seq_len, num_heads=num_heads)
        return
    try:
        pattern.check(seq_len=max(pattern.segment_lengths) + 1, num_heads=num_heads)
    except ValueError as error:
        raise ValueError(
            f"segment_lengths: {error} If no sequence will be that long, say how long with --seq-len."
        ) from None


def _check_paths(source: Path, target: Path, force: bool) -> None:
    if not source.is_file():
        raise ValueError(f"source = {str(source)!r}: not a file; give a checkpoint that torch.save wrote.")
    check_files(target=target)
    if target.exists() and (target.is_dir() or source.samefile(target)):
        raise ValueError(f"target = {str(target)!r}: is a directory, or SOURCE itself; give another file.")
    if target.exists() and not force:
        raise ValueError(f"target = {str(target)!r}: is there already; give another file, or --force.")


def _converted_before(source: Path) -> Mapping[str, Any]:
    """What `convert` has said of the model in a file that it has written; nothing of others."""
    from ring_backends.longnet.torchscale import load_tensors

    found = load_tensors(source)
    before = found.get("longnet") if isinstance(found, Mapping) else None
    return before if isinstance(before, Mapping) else {}


def _check_as_before(source: Path, said: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Refuse what contradicts the source, where `convert` has written that too."""
    for name in ("num_heads", "kind", "activation", "layer_norm_eps", "scale_embedding"):
        if name in before and before[name] != said[name]:
            raise ValueError(
                f"{name} = {said[name]!r}: {source} is what `convert` has written, with {before[name]!r}; give the "
                "same, or convert torchscale's own checkpoint."
            )


def _tensors_in(source: Path) -> tuple[Mapping[str, Tensor], list[str]]:
    """The state_dict in a checkpoint, at the top or under one of the names that programs use; and what lies beside."""
    import torch

    from ring_backends.longnet.torchscale import load_tensors

    found, beside = load_tensors(source), []
    while isinstance(found, Mapping):
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        container = next((name for name in _CONTAINERS if isinstance(found.get(name), Mapping)), None)
        beside += [str(name) for name in found if name not in tensors and name != container]
        if container is None and tensors:
            return tensors, beside
        beside += map(str, tensors)
        found = None if container is None else found[container]
    raise ValueError(
        f"source = {str(source)!r}: holds no state_dict, neither at the top nor under {', '.join(_CONTAINERS)}; save "
        "one: torch.save(model.state_dict(), path)."
    )


def _find_prefix(tensors: Mapping[str, Tensor], prefix: str | None) -> str:
    """What the names of the one LongNet begin with."""
    prefixes = sorted({found[1] for name in tensors if (found := _LAYER.match(name))})
    told = ", ".join(map(repr, prefixes)) or "none"
    if prefix is not None:
        prefix = f"{prefix.rstrip('.')}." if prefix else ""
        if prefix not in prefixes:
            raise ValueError(f"prefix = {prefix!r}: no layers have such names; those that begin LongNets are: {told}.")
        return prefix
    if not prefixes:
        raise ValueError(
            "source has no names such as layers.0.self_attn.q_proj.weight: not a LongNet of torchscale's; its first is "
            f"{next(iter(tensors))!r}."
        )
    if len(prefixes) > 1:
        raise ValueError(f"prefix: there are several LongNets, {told}; say which with --prefix.")
    return prefixes[0]


def _kind_of(prefix: str, state_dict: Mapping[str, Tensor]) -> str:
    """Encoder or decoder: their parameters have the same names, so what stands before them has to tell."""
    for part in reversed(prefix.split(".")):
        if part in _KINDS:
            return part
    if "embed_tokens.weight" not in state_dict:
        return "encoder"
    raise ValueError("kind: the names do not tell whether this is an encoder or a decoder; say it with --kind.")


def _checked_sizes(said: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes, once a model of them has taken the parameters."""
    from ring_backends.adapters.native import NativeRingDilatedAttention
    from ring_backends.longnet.model import LongNetDecoder, LongNetEncoder
    from ring_backends.longnet.torchscale import OPTIONS, load_parameters, sizes_of

    sizes = sizes_of(state_dict)
    options = {name: said[name] for name in OPTIONS}
    kind = LongNetEncoder if said["kind"] == "encoder" else LongNetDecoder
    model = kind(attention=NativeRingDilatedAttention([1], [1]), device="meta", **sizes, **options)
    load_parameters(model, state_dict, assign=True)
    return sizes


def _write(target: Path, found: dict[str, Any]) -> None:
    import torch

    from ring_backends.training.checkpoint_files import replace_file

    replace_file(target, lambda file: torch.save(found, file))


def _show(
    target: Path, prefix: str, said: Mapping[str, Any], state_dict: Mapping[str, Tensor], left: list[str]
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    branches = "not said; torchscale's have to be given to the attention"
    if said["segment_lengths"] is not None:
        branches = describe_branches(said["segment_lengths"], said["dilation_rates"])
    rows = {
        "names that began with": repr(prefix),
        "layers, width, heads, feed-forward": "{num_layers}, {embed_dim}, {num_heads}, {ffn_dim}".format(**said),
        "sub-layer norm, output norm": f"{_yes(said['sub_layer_norm'])}, {_yes(said['normalize_output'])}",
        "tokens, positions, outputs": ", ".join(
            str(said.get(name, "none")) for name in ("vocab_size", "num_positions", "output_size")
        ),
        "parameters": f"{sum(value.numel() for value in state_dict.values()):,} in {len(state_dict)} tensors, "
        + ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in state_dict.values()})),
        "branches": branches,
        "class": "LongNetEncoder" if said["kind"] == "encoder" else "LongNetDecoder",
    }
    console = Console(highlight=False)
    table = Table("what", "converted", title=f"In {escape(str(target))}", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
    if left:
        groups = Counter(name.split(".")[0] for name in left)
        table = Table("name", "entries", title="Left out", title_justify="left")
        for name, count in groups.most_common(_MOST_ROWS):
            table.add_row(escape(name), f"{count:,}")
        console.print(table)
        if len(groups) > _MOST_ROWS:
            console.print(f"and {len(groups) - _MOST_ROWS:,} more")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
