"""The options that several commands share, and the function that makes a command of a dataclass of options.

The class of a command declares each option once: its type, its default and its help. If a command fails, its error is
one message on stderr and an exit status: 2 if an argument or the installation cannot work, 1 if the command failed
while it ran, and 130 after Ctrl-C. This module imports no torch.
"""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from ring_backends.cost.branches import default_branches
from ring_backends.plotting import check_plot
from ring_backends.ring.launch import RankFailedError, describe
from ring_backends.ring.topology import UlyssesSize
from ring_backends.schedule.checks import check_group_heads, check_group_size
from ring_backends.schedule.pattern import DilatedPattern, HeadMode, Offset, Padding

Dtype = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
Layout = Literal["contiguous", "zigzag"]
Device = Literal["auto", "cpu", "cuda"]
Branches = tuple[tuple[int | None, ...], tuple[int, ...]]
"""The segment lengths and the dilation rates of the branches."""

INTERRUPTED = 130

_LISTS = ("--segment-lengths", "--dilation-rates", "--window-lengths")
_NUMBER = r"[+-]?\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,2})?"
_ENTRY = rf"(?:{_NUMBER}|none)"


def option(default: Any = MISSING, *, panel: str | None = None, flag: str | None = None, **details: Any) -> Any:
    """Declare an option: the default of a field of a subclass of :class:`Options`.

    A bool whose default is False has no ``--no-…`` option. The values of a ``Literal`` are shown in ``--help``.

    Args:
        panel: heading of the option's group in ``--help``.
        flag: what the user writes. Default: the name of the field with dashes.
        details: as in ``typer.Option``.
    """
    metadata = {"typer": typer.Option(rich_help_panel=panel, **details), "flag": flag}
    return field(default=default, metadata=metadata)


def argument(*, is_named: bool = False, **details: Any) -> Any:
    """Declare an argument: the default of a field of a subclass of :class:`Options`.

    Args:
        is_named: whether messages name it like an option.
        details: as in ``typer.Argument``.
    """
    return field(metadata={"typer": typer.Argument(**details), "is_named": is_named})


attention, ranks, files = (partial(option, panel=panel) for panel in ("Attention", "Ranks", "Files"))

seq_len = partial(attention, min=1, help="Length of the whole sequence, in tokens: 1000000, 1_000_000 or 1e6.")
num_heads = partial(attention, flag="--heads", min=1, help="Query heads.")
num_kv_heads = partial(
    attention, None, flag="--kv-heads", min=1, help="Key and value heads. Default: as many as query heads."
)
head_dim = partial(attention, 64, min=1, help="Width of a head.")
causal = partial(attention, True, help="Whether a query sees only keys up to its own position.")
dtype = partial(
    attention, "auto", help="Dtype of the tensors. auto: the dtype that `ring-backends info` recommends for the device."
)
layout = partial(ranks, "contiguous", help="How the sequence is sharded over the ring.")
device = partial(ranks, "auto", help="auto: a GPU per rank if there are enough, else the CPU.")
buffer_bytes = partial(
    ranks,
    None,
    min=0,
    metavar="BYTES",
    help="As in `initialize`: communication buffers may take this many bytes, even if that is more than their share of "
    "the tensors. Default: 512 MiB on GPUs, 8 MiB on CPUs.",
)
ulysses_size = partial(
    ranks,
    "1",
    metavar="INTEGER|auto",
    help="As in `initialize`: how many neighbouring ranks exchange rows for heads within a call. auto: those of one "
    "host, as far as the heads can be shared.",
)
started_ranks = partial(ranks, 1, min=1, help="Ranks to start on this machine. Ignored under torchrun, srun or mpirun.")
json = partial(files, None, metavar="FILE", help="Write all results to this file.")


@dataclass(frozen=True, kw_only=True)
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
            if name in ("json", "plot") and value is not None:
                self._check_result(name, value)
            if name == "plot" and value is not None:
                check_plot(value)

    def after_interrupt(self, started: float) -> str:
        """Say what to do after Ctrl-C in a command that began at ``started``, in seconds since the epoch."""
        return ""

    def _check_result(self, name: str, path: Path) -> None:
        """Check that a file of results can be written, and replaces no other file of the command."""
        if path.is_dir():
            raise ValueError(f"{name} = {str(path)!r}: is a directory; give the path of a file.")
        for other, value in vars(self).items():
            paths = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Path)]
            if other != name and path.resolve() in [x.resolve() for x in paths]:
                raise ValueError(f"{name} = {str(path)!r}: is {other}, too, and would replace it; give another path.")


_Options = TypeVar("_Options", bound=Options)


@dataclass(frozen=True, kw_only=True)
class BranchOptions(Options):
    """The options that every command with an attention has."""

    seq_len: int = seq_len()
    segment_lengths: tuple[int | None, ...] = attention(
        (),
        metavar="N,N,…",
        help="Segment length of each branch, in tokens, or none for the whole sequence. Default: three branches whose "
        "cost is nearly linear in the sequence length. For 131,072 tokens they are 256,4096,131072 with the rates "
        "1,8,64.",
    )
    dilation_rates: tuple[int, ...] = attention((), metavar="N,N,…", help="Dilation rate of each branch.")
    window_lengths: tuple[int | None, ...] | None = attention(
        None,
        metavar="N,N,…",
        help="Window of each branch, in tokens, or none. In a branch with a window, a query sees only keys at a "
        "distance below N. Default: no windows.",
    )
    layout: Layout = layout()
    device: Device = device()
    json: Path | None = json()

    @classmethod
    def of(cls: type[_Options], given: dict[str, Any]) -> _Options:
        parsed = parse_branches(given["segment_lengths"], given["dilation_rates"])
        lengths, rates = parsed or default_branches(given["seq_len"])
        windows = parse_lengths("window_lengths", given["window_lengths"])
        return cls(**{**given, "segment_lengths": lengths, "dilation_rates": rates, "window_lengths": windows})

    def pattern(self) -> DilatedPattern:
        names = {declared.name for declared in fields(self)}
        return DilatedPattern(**{x.name: getattr(self, x.name) for x in fields(DilatedPattern) if x.name in names})


@dataclass(frozen=True, kw_only=True)
class PatternOptions(BranchOptions):
    """The options of a command that takes any pattern."""

    head_mode: HeadMode = attention(
        "all", help="all: every head runs every branch. grouped: each branch has its own group of heads."
    )
    offset: Offset | None = attention(
        None,
        help="Offset of head j in branch i: j % r, j // ceil(H / r), i % r, or every offset. Default: mod, or branch "
        "when grouped.",
    )
    padding: Padding = attention(
        "masked",
        help="masked: no query sees the padding of the last segment. zeros: queries see it as zero keys, as in "
        "torchscale.",
    )


class NumbersCommand(TyperCommand):
    """A command that takes integers as 1000000, 1_000_000, 1,000,000 and 1e6, and lists of integers.

    ``--segment-lengths 2048,8192``, ``--segment-lengths 2048 8192`` and ``--segment-lengths 2048 --segment-lengths
    8192`` are equivalent. An entry may be ``none``. A list has no commas within its numbers.

    Attributes:
        integers: the options that take one integer.
    """

    integers: frozenset[str] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        rest = list(args)
        while rest:
            flag, equals, value = rest.pop(0).partition("=")
            if flag in self.integers and (equals or rest):
                joined += [flag, _as_integer(flag, value if equals else rest.pop(0))]
                continue
            joined.append(flag + equals + value)
            if joined[-1] in _LISTS:
                numbers = list(itertools.takewhile(re.compile(rf"{_ENTRY}(?:[,\s]+{_ENTRY})*[,\s]*").fullmatch, rest))
                del rest[: len(numbers)]
                joined += [",".join(numbers)] if numbers else []
        return super().parse_args(ctx, joined)


def _as_integer(flag: str, text: str) -> str:
    number = parse_integer(re.sub(r",(\d{3})(?=,|\b)", r"\1", text))
    if number is None:
        raise typer.BadParameter(
            f"{text!r} is not an integer; write for example 1000000, 1_000_000, 1,000,000 or 1e6.", param_hint=flag
        )
    return str(number)


def parse_integer(text: str) -> int | None:
    """Parse ``"1000000"``, ``"1_000_000"`` or ``"1e6"``. Returns None if the text is not an integer."""
    number = Fraction(text.replace("_", "")) if re.fullmatch(_NUMBER, text) else None
    return int(number) if number is not None and number.denominator == 1 else None


def parse_branches(segment_lengths: list[str] | None, dilation_rates: list[str] | None) -> Branches | None:
    """Parse ``--segment-lengths`` and ``--dilation-rates``. Returns None if neither is given.

    Raises:
        ValueError: only one of them is given, or a value is neither an integer nor ``none``.
    """
    lengths = parse_lengths("segment_lengths", segment_lengths)
    rates = parse_lengths("dilation_rates", dilation_rates, may_be_none=False)
    if lengths is None and rates is None:
        return None
    if lengths is None or rates is None:
        name, other = ("dilation_rates", "segment_lengths")[:: 1 if rates is None else -1]
        raise ValueError(f"{name} is missing beside {other}: each branch needs both; give both options, or neither.")
    return lengths, rates


def parse_lengths(name: str, values: list[str] | None, *, may_be_none: bool = True) -> tuple[Any, ...] | None:
    """Parse ``["2048,8192", "none"]`` into ``(2048, 8192, None)``. Returns None if the option is not given.

    Args:
        may_be_none: whether an entry may be ``none``.

    Raises:
        ValueError: an entry is neither an integer nor ``none``. The message names the option.
    """
    if values is None:
        return None
    parts = re.split(r"[,\s]+", ",".join(values).strip(", "))
    for part in parts:
        if parse_integer(part) is None and not (may_be_none and part == "none"):
            expected, example = ("an integer or none", "2048,none") if may_be_none else ("an integer", "2048,8192")
            raise ValueError(f"{name} = {','.join(values)!r}: {part!r} is not {expected}; write for example {example}.")
    return tuple(map(parse_integer, parts))


def add_command(
    app: typer.Typer, name: str, options: type[_Options], run: Callable[[_Options], None], first: Sequence[str] = ()
) -> None:
    """Add a command to a program.

    Args:
        options: the class of the command's options.
        run: called with the checked options. Its errors are reported too.
        first: the options that most users need. ``--help`` shows them first, in this order.
    """
    kinds, parameters, flags = get_type_hints(options), [], {}
    declared_by_name = {declared.name: declared for declared in fields(options)}
    for declared in [*map(declared_by_name.pop, first), *declared_by_name.values()]:
        kind, default, info = kinds[declared.name], declared.default, copy(declared.metadata["typer"])
        if declared.name in first:
            info.rich_help_panel = None  # Typer shows the panel without a heading of its own first
        elif isinstance(info, OptionInfo):
            info.rich_help_panel = info.rich_help_panel or "More options"
        flag = declared.metadata.get("flag")
        if declared.metadata.get("is_named", True):
            flags[declared.name] = flag or f"--{declared.name.replace('_', '-')}"
        if default is False or flag:
            info.param_decls = (flags[declared.name],)
        if _choices(kind):
            kind, info.metavar = str | None, "|".join(_choices(kind))
        if any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
            kind, default = list[str] | None, None
        parameter = inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY)
        if default is not MISSING:
            parameter = parameter.replace(default=default)
        parameters.append(parameter.replace(annotation=Annotated[kind, info]))

    def call(**given: Any) -> None:
        started, made = time.time(), None
        with reported_errors(name, flags, lambda: "" if made is None else made.after_interrupt(started)):
            made = options.of(given)
            made.check()
            run(made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    integers = {flag for part, flag in flags.items() if kinds[part] in (int, int | None)}
    command = type("Command", (NumbersCommand,), {"integers": frozenset(integers)})
    app.command(name, cls=command, help=inspect.getdoc(options))(call)


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


def parse_ulysses_size(text: str, ring_size: int | None, num_heads: int) -> UlyssesSize:
    """Return the number of ranks of a group, or "auto".

    Raises:
        ValueError: the text is neither, or the number does not divide the ring size (None: unknown) or the heads.
    """
    if text == "auto":
        return "auto"
    if not re.fullmatch(r"\+?0*[1-9]\d*", text):
        raise ValueError(f"ulysses_size = {text!r}: expected a number of at least 1, or auto; 1 exchanges no heads.")
    size = int(text)
    if ring_size is not None:
        check_group_size(size, ring_size)
    check_group_heads(size, num_heads)
    return size


def check_directory(name: str, path: Path) -> None:
    """Check that the directory of an output file exists.

    Raises:
        ValueError: it does not. The message names the option.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{name} = {str(path)!r}: {path.absolute().parent} is not a directory; create it, or give another path."
        )


@contextlib.contextmanager
def reported_errors(
    command: str, flags: Mapping[str, str], after_interrupt: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Turn an exception in the ``with`` block into a message on stderr and a ``typer.Exit``.

    Args:
        command: name of the command, for the message.
        flags: the command's options, by the Python names of its parameters. If the message of the exception begins with
            such a name, the report begins with the option: ``--seq-len`` for ``seq_len``.
        after_interrupt: called after Ctrl-C. Returns a sentence for the user, or "".
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _print_error(" ".join(filter(None, ("ring-backends: interrupted.", after_interrupt()))))
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, RankFailedError):
            failure, is_named, rank = error.failure, error.failure.status != 2, str(error.rank)
        else:
            failure, rank = describe(error), os.environ.get("RANK", "0")
            is_named = rank != "0"
        prefix = f"rank {rank}: " if is_named else ""
        _print_error(f"ring-backends {command}: error: {prefix}{_with_flag(failure.text, flags)}")
        raise typer.Exit(failure.status) from None


def _print_error(text: str) -> None:
    sys.stdout.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r\x1b[K")  # an interrupted progress bar leaves the cursor hidden
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _with_flag(text: str, flags: Mapping[str, str]) -> str:
    name = re.split(r"\W", text, maxsplit=1)[0]
    return f"{flags[name]}: {text.removeprefix(name + ': ')}" if name in flags else text
