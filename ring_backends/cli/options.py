"""The options that several commands share, and what turns a dataclass of options into a command.

The class of a command declares each option once: its type, its default and its help. This module imports no torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from ring_backends.cli.parsing import BranchesCommand, parse_branches, parse_lengths
from ring_backends.cli.report import reported_errors
from ring_backends.cost.branches import default_branches
from ring_backends.plotting import check_plot

Dtype = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
Layout = Literal["contiguous", "zigzag"]
Device = Literal["auto", "cpu", "cuda"]


def option(default: Any = MISSING, *, panel: str | None = None, **details: Any) -> Any:
    """Declare an option: the default of a field of a subclass of :class:`Options`.

    A bool whose default is False has no ``--no-…`` option. The values of a ``Literal`` are shown in ``--help``.

    Args:
        panel: heading of the option's group in ``--help``.
        details: as in ``typer.Option``.
    """
    return field(default=default, metadata={"typer": typer.Option(rich_help_panel=panel, **details)})


def argument(*, is_named: bool = False, **details: Any) -> Any:
    """Declare an argument: the default of a field of a subclass of :class:`Options`.

    Args:
        is_named: whether messages name it like an option.
        details: as in ``typer.Argument``.
    """
    return field(metadata={"typer": typer.Argument(**details), "is_named": is_named})


attention, ranks, files = (partial(option, panel=panel) for panel in ("Attention", "Ranks", "Files"))

segment_lengths = partial(
    attention,
    (),
    metavar="N,N,…",
    help="Segment length of each branch, in tokens, or none for the whole sequence. Default: three branches whose cost "
    "is nearly linear in the sequence length. For 131,072 tokens they are 256,4096,131072 with the rates 1,8,64.",
)
dilation_rates = partial(attention, (), metavar="N,N,…", help="Dilation rate of each branch.")
window_lengths = partial(
    attention,
    None,
    metavar="N,N,…",
    help="Window of each branch, in tokens, or none. In a branch with a window, a query sees only keys at a distance "
    "below N. Default: no windows.",
)
head_mode = partial(
    attention, "all", help="all: every head runs every branch. grouped: each branch has its own group of heads."
)
offset = partial(
    attention,
    None,
    help="Offset of head j in branch i: j % r, j // ceil(H / r), i % r, or every offset. Default: mod, or branch when "
    "grouped.",
)
padding = partial(
    attention,
    "masked",
    help="masked: no query sees the padding of the last segment. zeros: queries see it as zero keys, as in torchscale.",
)
seq_len = partial(attention, min=1, help="Length of the whole sequence, in tokens.")
num_heads = partial(attention, min=1, help="Query heads.")
num_kv_heads = partial(attention, None, min=1, help="Key and value heads. Default: as many as query heads.")
head_dim = partial(attention, 64, min=1, help="Width of a head.")
causal = partial(attention, True, help="Whether a query sees only keys up to its own position.")
dtype = partial(
    attention, help="Dtype of the tensors. auto: the dtype that `ring-backends info` recommends for the device."
)
layout = partial(ranks, "contiguous", help="How the sequence is sharded over the ring.")
device = partial(ranks, "auto", help="auto: a GPU per rank if there are enough, else the CPU.")
started_ranks = partial(ranks, 1, min=1, help="Ranks to start on this machine. Ignored under torchrun.")
json = partial(files, None, metavar="FILE", help="Write all results to this file.")


@dataclass(frozen=True)
class Options:
    """The base of a command's options: plain values that can be sent to the ranks.

    A subclass is a dataclass whose fields are made by :func:`option`. Its docstring is the help of the command.
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
            windows = parse_lengths("window_lengths", given["window_lengths"])
            given = {**given, "segment_lengths": lengths, "dilation_rates": rates, "window_lengths": windows}
        return cls(**given)

    def check(self) -> None:
        """Check the options, as far as that needs neither torch nor other ranks.

        Raises:
            ValueError: an option is invalid. The message names it.
        """
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), _choices(kind)
            if choices and value not in (None, *choices):
                raise ValueError(f"{name} = {value!r}: unknown; choose one of {', '.join(choices)}.")
            if name in ("json", "plot", "save") and value is not None:
                check_directory(name, value)
            if name == "plot" and value is not None:
                check_plot(value)


_Options = TypeVar("_Options", bound=Options)


def add_command(
    app: typer.Typer, name: str, options: type[_Options], run: Callable[[_Options], None], first: Sequence[str] = ()
) -> None:
    """Add a command to a program.

    Args:
        options: the class of the command's options.
        run: called with the checked options. Its errors are reported too.
        first: the options that most users need. ``--help`` shows them first, in this order.
    """
    kinds, parameters, names = get_type_hints(options), [], []
    declared_by_name = {declared.name: declared for declared in fields(options)}
    for declared in [*map(declared_by_name.pop, first), *declared_by_name.values()]:
        kind, default, info = kinds[declared.name], declared.default, copy(declared.metadata["typer"])
        if declared.name in first:
            info.rich_help_panel = None  # Typer shows the panel without a heading of its own first
        elif isinstance(info, OptionInfo):
            info.rich_help_panel = info.rich_help_panel or "More options"
        if declared.metadata.get("is_named", True):
            names.append(declared.name)
        if default is False:
            info.param_decls = (f"--{declared.name.replace('_', '-')}",)
        if _choices(kind):
            kind, info.metavar = str | None, "|".join(_choices(kind))
        if any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
            kind, default = list[str] | None, None
        parameter = inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY)
        if default is not MISSING:
            parameter = parameter.replace(default=default)
        parameters.append(parameter.replace(annotation=Annotated[kind, info]))

    def call(**given: Any) -> None:
        with reported_errors(name, names):
            made = options.of(given)
            made.check()
            run(made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, cls=BranchesCommand, help=inspect.getdoc(options))(call)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal``, which may be optional; () for other types."""
    return next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())


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


def check_directory(name: str, path: Path) -> None:
    """Check that the directory of an output file exists.

    Raises:
        ValueError: it does not. The message names the option.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{name} = {str(path)!r}: {path.absolute().parent} is no directory; create it, or give another path."
        )
