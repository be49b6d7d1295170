"""``convert``: converts a torchscale checkpoint with :mod:`ring_backends.longnet.convert`, and prints a summary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ring_backends.cli.options import check_directory
from ring_backends.cli.output import print_table
from ring_backends.cli.parsing import describe_branches, parse_branches
from ring_backends.cli.report import reported_errors

if TYPE_CHECKING:
    from ring_backends.longnet.convert import ConvertedCheckpoint

_MOST_ROWS = 20


def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint: a state_dict, or a dict that holds one under 'model'.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write.")],
    num_heads: Annotated[
        int,
        typer.Option(
            min=1, help="Number of heads. A checkpoint does not contain it. GigaPath's slide encoders have 16 heads."
        ),
    ],
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME.",
            help="Prefix of the parameter names, for example 'encoder.'. Default: inferred from the names.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="encoder|decoder", help="Kind of the model. Default: inferred from the prefix."),
    ] = None,
    segment_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N,…",
            help="Segment lengths that the model was trained with. They are stored in TARGET. The class that loads "
            "TARGET compares them with its attention.",
        ),
    ] = None,
    dilation_rates: Annotated[
        list[str] | None, typer.Option(metavar="N,N,…", help="Dilation rates that the model was trained with.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest sequence that the model will run on. It is used to check the branches. Default: any."
        ),
    ] = None,
    activation: Annotated[
        str, typer.Option(metavar="gelu|relu", help="Activation of the feed-forward networks (activation_fn).")
    ] = "gelu",
    layer_norm_eps: Annotated[float, typer.Option(help="Epsilon of every LayerNorm (layernorm_eps).")] = 1e-5,
    scale_embedding: Annotated[
        bool, typer.Option("--scale-embedding", help="The model was trained with no_scale_embedding=False.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Rewrite a torchscale LongNet checkpoint for LongNetEncoder.from_checkpoint or LongNetDecoder.from_checkpoint."""
    with reported_errors("convert", (*locals(),)):
        lengths, rates = parse_branches(segment_lengths, dilation_rates) or (None, None)
        _check_paths(source, target, force)
        from ring_backends.longnet.convert import convert_checkpoint

        converted = convert_checkpoint(
            source,
            num_heads,
            prefix=prefix,
            kind=kind,
            segment_lengths=lengths,
            dilation_rates=rates,
            seq_len=seq_len,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            scale_embedding=scale_embedding,
        )
        converted.save(target)
        _show(target, converted)


def _check_paths(source: Path, target: Path, force: bool) -> None:
    if not source.is_file():
        raise ValueError(f"source = {str(source)!r}: not a file; give a checkpoint that torch.save wrote.")
    check_directory("target", target)
    if target.exists() and (target.is_dir() or source.samefile(target)):
        raise ValueError(f"target = {str(target)!r}: is a directory or SOURCE itself; give another file.")
    if target.exists() and not force:
        raise ValueError(f"target = {str(target)!r}: exists already; give another file, or --force.")


def _show(target: Path, converted: ConvertedCheckpoint) -> None:
    settings, tensors = converted.settings, converted.state_dict.values()
    branches = "not given; pass the attention the branches of the training run"
    if settings["segment_lengths"] is not None:
        branches = describe_branches(settings["segment_lengths"], settings["dilation_rates"])
    norms = ("yes" if settings[name] else "no" for name in ("sub_layer_norm", "normalize_output"))
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in tensors})
    rows = {
        "prefix of the names": repr(converted.prefix),
        "layers, width, heads, feed-forward": "{num_layers}, {embed_dim}, {num_heads}, {ffn_dim}".format(**settings),
        "sub-layer norm, output norm": ", ".join(norms),
        "tokens, positions, outputs": ", ".join(
            str(settings.get(name, "none")) for name in ("vocab_size", "num_positions", "output_size")
        ),
        "parameters": f"{sum(value.numel() for value in tensors):,} in {len(tensors)} tensors, {', '.join(dtypes)}",
        "branches": branches,
        "class": "LongNetEncoder" if settings["kind"] == "encoder" else "LongNetDecoder",
    }
    print_table(f"In {target}", ("property", "value"), rows.items())
    if converted.left_out:
        groups = Counter(name.split(".")[0] for name in converted.left_out)
        print_table("Left out", ("name", "entries"), ((n, f"{count:,}") for n, count in groups.most_common(_MOST_ROWS)))
        if len(groups) > _MOST_ROWS:
            print(f"and {len(groups) - _MOST_ROWS:,} more")
