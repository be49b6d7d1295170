"""``convert``: converts a torchscale checkpoint with :mod:`ring_backends.longnet.convert`, and prints a summary."""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_backends.cli.options import Options, argument, check_directory, option, parse_branches
from ring_backends.cli.output import describe_branches, dtype_name, print_table
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.longnet.convert import ConvertedCheckpoint

_MOST_ROWS = 20


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """Rewrite a torchscale LongNet checkpoint for LongNetEncoder.from_checkpoint or LongNetDecoder.from_checkpoint."""

    source: Path = argument(
        metavar="SOURCE", help="Checkpoint: a state_dict, or a dict that holds one under 'model'.", is_named=True
    )
    target: Path = argument(metavar="TARGET", help="File to write.", is_named=True)
    num_heads: int = option(
        min=1,
        flag="--heads",
        help="Number of heads. A checkpoint does not contain it. GigaPath's slide encoders have 16 heads.",
    )
    prefix: str | None = option(
        None,
        metavar="NAME.",
        help="Prefix of the parameter names, for example 'encoder.'. Default: inferred from the names.",
    )
    kind: str | None = option(
        None, metavar="encoder|decoder", help="Kind of the model. Default: inferred from the prefix."
    )
    segment_lengths: tuple[int | None, ...] | None = option(
        None,
        metavar="N,N,…",
        help="Segment lengths that the model was trained with, or none for the whole sequence. They are stored in "
        "TARGET. The class that loads TARGET compares them with its attention.",
    )
    dilation_rates: tuple[int, ...] | None = option(
        None, metavar="N,N,…", help="Dilation rates that the model was trained with."
    )
    seq_len: int | None = option(
        None,
        min=1,
        help="Longest sequence that the model will run on. It is used to check the branches. Default: any.",
    )
    activation: str = option(
        "gelu", metavar="gelu|relu", help="Activation of the feed-forward networks (activation_fn)."
    )
    layer_norm_eps: float = option(1e-5, help="Epsilon of every LayerNorm (layernorm_eps).")
    scale_embedding: bool = option(False, help="The model was trained with no_scale_embedding=False.")
    force: bool = option(False, help="Replace TARGET if it exists.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> ConvertOptions:
        lengths, rates = parse_branches(given["segment_lengths"], given["dilation_rates"]) or (None, None)
        return cls(**{**given, "segment_lengths": lengths, "dilation_rates": rates})

    def check(self) -> None:
        if not self.source.is_file():
            raise ValueError(f"source = {str(self.source)!r}: not a file; give a checkpoint that torch.save wrote.")
        name = f"target = {str(self.target)!r}"
        check_directory("target", self.target)
        if self.target.exists() and (self.target.is_dir() or self.source.samefile(self.target)):
            raise ValueError(f"{name}: is a directory or SOURCE itself; give another file.")
        if self.target.exists() and not self.force:
            raise ValueError(f"{name}: exists already; give another file, or --force.")


def run(chosen: ConvertOptions) -> None:
    """Convert the checkpoint, and print a summary."""
    from ring_backends.longnet.convert import convert_checkpoint

    given = {name: value for name, value in vars(chosen).items() if name not in ("target", "force")}
    converted = convert_checkpoint(**given)
    converted.save(chosen.target)
    _show(chosen.target, converted)


def _show(target: Path, converted: ConvertedCheckpoint) -> None:
    settings, tensors = converted.settings, converted.state_dict.values()
    branches = "not given; pass the attention the branches of the training run"
    if settings["segment_lengths"] is not None:
        branches = describe_branches(DilatedPattern.torchscale(settings["segment_lengths"], settings["dilation_rates"]))
    norms = ("yes" if settings[name] else "no" for name in ("sub_layer_norm", "normalize_output"))
    dtypes = sorted({dtype_name(value.dtype) for value in tensors})
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
