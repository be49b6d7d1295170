"""The options that several commands share, and what turns a dataclass of options into a command.

The class of a command declares each option once: its type, its default and its help. This module imports no torch.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from ring_backends.cli.parsing import BranchesCommand, parse_branches
from ring_backends.cli.report import reported_errors
from ring_backends.cost.default_branches import default_branches
from ring_backends.schedule import pattern

if TYPE_CHECKING:
    from rich.console import Console

attention_option, ranks_option, files_option = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Attention", "Ranks", "Files")
)
"""``typer.Option`` for the groups of options in ``--help``."""

_WIDTH = 120  # columns of output that does not go to a terminal

SegmentLengths = Annotated[
    tuple[int, ...],
    attention_option(
        metavar="N,N,…",
        help="Segment length of each branch, in tokens. Default: three branches whose cost is nearly linear in the "
        "sequence length. For 131,072 tokens they are 256,4096,131072 with the rates 1,8,64.",
    ),
]
DilationRates = Annotated[tuple[int, ...], attention_option(metavar="N,N,…", help="Dilation rate of each branch.")]
HeadMode = Annotated[
    pattern.HeadMode,
    attention_option(
        metavar="all|grouped",
        help="all: every head runs every branch. grouped: each branch has its own group of heads.",
    ),
]
Offset = Annotated[
    pattern.Offset | None,
    attention_option(
        metavar="mod|block|branch",
        help="Offset of head j in branch i: j % r, j // ceil(H / r), or i % r. Default: mod, or branch when grouped.",
    ),
]
Padding = Annotated[
    pattern.Padding,
    attention_option(
        metavar="masked|zeros",
        help="masked: no query sees the padding of the last segment. zeros: queries see it as zero keys, as in "
        "torchscale.",
    ),
]
SeqLen = Annotated[int, attention_option(min=1, help="Length of the whole sequence, in tokens.")]
NumHeads = Annotated[int, attention_option(min=1, help="Query heads.")]
NumKvHeads = Annotated[
    int | None, attention_option(min=1, help="Key and value heads. Default: as many as query heads.")
]
HeadDim = Annotated[int, attention_option(min=1, help="Width of a head.")]
Causal = Annotated[
    bool, attention_option("--causal/--no-causal", help="Whether a query sees only keys up to its own position.")
]
Dtype = Annotated[
    Literal["auto", "fp32", "bf16", "fp16", "fp64"],
    attention_option(
        metavar="auto|fp32|bf16|fp16|fp64",
        help="Dtype of the tensors. auto: the dtype that `ring-backends info` recommends for the device.",
    ),
]
Layout = Annotated[
    Literal["contiguous", "zigzag"],
    ranks_option(metavar="contiguous|zigzag", help="How the sequence is sharded over the ring."),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    ranks_option(metavar="auto|cpu|cuda", help="auto: a GPU per rank if there are enough, else the CPU."),
]
StartedRanks = Annotated[int, ranks_option(min=1, help="Ranks to start on this machine. Ignored under torchrun.")]
Json = Annotated[Path | None, files_option(metavar="FILE", help="Write all results to this file.")]


@dataclass(frozen=True)
class Options:
    """The base of a command's options: plain values that can be sent to the ranks.

    A subclass is a dataclass. The type of a field is an ``Annotated`` with a ``typer.Option`` or ``typer.Argument``.
    Its docstring is the help of the command.
    """

    @classmethod
    def of(cls: type[_Options], given: dict[str, Any]) -> _Options:
        """Make the options from the values that Typer has parsed.

        Raises:
            ValueError: an option cannot be parsed. The message names it.
        """
        if "segment_lengths" in given:
            parsed = parse_branches(given["segment_lengths"], given["dilation_rates"])
            lengths, rates = parsed or default_branches(given["seq_len"])
            given = {**given, "segment_lengths": lengths, "dilation_rates": rates}
        return cls(**given)

    def check(self) -> None:
        """Check the options, as far as that needs neither torch nor other ranks.

        Raises:
            ValueError: an option is invalid. The message names it.
        """
        for name, (declared, _) in _declarations(type(self)).items():
            if get_origin(declared) is Literal:
                check_choice(name, getattr(self, name), get_args(declared))


_Options = TypeVar("_Options", bound=Options)


def add_command(app: typer.Typer, name: str, options: type[_Options], run: Callable[[_Options], None]) -> None:
    """Add a command to a program.

    Args:
        options: the class of the command's options.
        run: called with the checked options. Its errors are reported too.
    """
    declarations = _declarations(options)
    # Messages show the name of an argument as it is.
    names = [name for name, (_, declared) in declarations.items() if isinstance(declared, OptionInfo)]

    def call(**given: Any) -> None:
        with reported_errors(name, names):
            made = options.of(given)
            made.check()
            run(made)

    parameters = []
    for field in fields(options):
        kind, declared = declarations[field.name]
        default = {MISSING: inspect.Parameter.empty, (): None}.get(field.default, field.default)
        parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default)
        parameters.append(parameter.replace(annotation=Annotated[_parsed_type(kind), declared]))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, cls=BranchesCommand, help=inspect.getdoc(options))(call)


def _declarations(options: type[Options]) -> dict[str, tuple[Any, Any]]:
    """Map the name of each field to its type and its ``typer.Option`` or ``typer.Argument``."""
    hints = get_type_hints(options, include_extras=True)
    return {field.name: get_args(hints[field.name]) for field in fields(options)}


def _parsed_type(kind: Any) -> Any:
    """Return the type as which Typer parses an option: lists and names are parsed and checked later."""
    if get_origin(kind) is tuple:
        return list[str] | None
    if get_origin(kind) is Literal:
        return str
    return str | None if any(get_origin(part) is Literal for part in get_args(kind)) else kind


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check that an option has one of its values.

    Raises:
        ValueError: the value is unknown. The message names the option.
    """
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: unknown; choose one of {', '.join(choices)}.")


def check_positive(name: str, value: float | None) -> None:
    """Check that a number is above 0 and finite, unless the option is not given.

    Raises:
        ValueError: it is not. The message names the option.
    """
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} = {value}: must be above 0 and finite; give a positive number.")


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
