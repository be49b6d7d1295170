"""The options that several commands share, and their checks. This module imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

ATTENTION, RANKS, FILES = "Attention", "Ranks", "Files"
"""Headings of the groups of options in ``--help``."""

_WIDTH = 120  # columns of output that does not go to a terminal

SegmentLengths = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N,N,…",
        help="Segment length of each branch, in tokens. Default: three branches whose cost is nearly linear in the "
        "sequence length. For 131,072 tokens they are 256,4096,131072 with the rates 1,8,64.",
        rich_help_panel=ATTENTION,
    ),
]
DilationRates = Annotated[
    list[str] | None, typer.Option(metavar="N,N,…", help="Dilation rate of each branch.", rich_help_panel=ATTENTION)
]
HeadMode = Annotated[
    str,
    typer.Option(
        metavar="all|grouped",
        help="all: every head runs every branch. grouped: each branch has its own group of heads.",
        rich_help_panel=ATTENTION,
    ),
]
Offset = Annotated[
    str | None,
    typer.Option(
        metavar="mod|block|branch",
        help="Offset of head j in branch i: j % r, j // ceil(H / r), or i % r. Default: mod, or branch when grouped.",
        rich_help_panel=ATTENTION,
    ),
]
Padding = Annotated[
    str,
    typer.Option(
        metavar="masked|zeros",
        help="masked: no query sees the padding of the last segment. zeros: queries see it as zero keys, as in "
        "torchscale.",
        rich_help_panel=ATTENTION,
    ),
]
SeqLen = Annotated[int, typer.Option(min=1, help="Length of the whole sequence, in tokens.", rich_help_panel=ATTENTION)]
NumHeads = Annotated[int, typer.Option(min=1, help="Query heads.", rich_help_panel=ATTENTION)]
NumKvHeads = Annotated[
    int | None,
    typer.Option(min=1, help="Key and value heads. Default: as many as query heads.", rich_help_panel=ATTENTION),
]
HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head.", rich_help_panel=ATTENTION)]
Causal = Annotated[
    bool,
    typer.Option(
        "--causal/--no-causal", help="Whether a query sees only keys up to its own position.", rich_help_panel=ATTENTION
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|fp32|bf16|fp16|fp64",
        help="Dtype of the tensors. auto: the dtype that `ring-backends info` recommends for the device.",
        rich_help_panel=ATTENTION,
    ),
]
Layout = Annotated[
    str,
    typer.Option(metavar="contiguous|zigzag", help="How the sequence is sharded over the ring.", rich_help_panel=RANKS),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda", help="auto: a GPU per rank if there are enough, else the CPU.", rich_help_panel=RANKS
    ),
]
Json = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all results to this file.", rich_help_panel=FILES)
]

_CHOICES = {
    "layout": ("contiguous", "zigzag"),
    "dtype": ("auto", "fp32", "bf16", "fp16", "fp64"),
    "device": ("auto", "cpu", "cuda"),
}


def check_choices(options: Any) -> None:
    """Check the options ``layout``, ``dtype`` and ``device``.

    Raises:
        ValueError: an option has an unknown value. The message names the option.
    """
    for name in _CHOICES:
        check_choice(name, getattr(options, name))


def check_choice(name: str, value: str) -> None:
    """Check the value of one of the options ``layout``, ``dtype`` and ``device``.

    Raises:
        ValueError: the value is unknown. The message names the option.
    """
    if value not in _CHOICES[name]:
        raise ValueError(f"{name} = {value!r}: unknown; choose one of {', '.join(_CHOICES[name])}.")


def check_kv_heads(name: str, num_kv_heads: int | None, num_heads: int) -> None:
    """Check that the number of key/value heads divides the number of query heads.

    Raises:
        ValueError: it does not. The message names the option.
    """
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"{name} = {num_kv_heads}: must divide the {num_heads} query heads; use a divisor.")


def check_files(**paths: Path | None) -> None:
    """Check that the directory of each output file exists.

    Args:
        paths: the file of each option, by the name of the option. None: the option is not given.

    Raises:
        ValueError: a directory does not exist. The message names the option.
    """
    for name, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(
                f"{name} = {str(path)!r}: {path.absolute().parent} is no directory; create it, or give another path."
            )


def wide_console() -> Console:
    """Make a console. Without a terminal, its tables are 120 columns wide instead of 80."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console
