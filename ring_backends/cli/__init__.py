"""The command-line program ``ring-backends``. ``python -m ring_backends`` runs it too.

Each command parses and checks options, calls a function of the library, and prints. Importing this package does not
import torch, so ``--help`` is fast. Nothing imports this package.
"""

from __future__ import annotations

import io
import sys
import warnings
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer

from ring_backends import __version__
from ring_backends.cli import compare, convert, info, plan
from ring_backends.cli.generate import GenerateOptions
from ring_backends.cli.options import add_command
from ring_backends.cli.train import TrainOptions
from ring_backends.ring.launch import TRACEBACK_VARIABLE, launch
from ring_backends.ring.launcher import complete_environment, under_launcher

# torch warns when it is imported without NumPy. The commands do not use NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

app = typer.Typer(
    name="ring-backends",
    help="Ring dilated attention (LongNet, arXiv 2307.02486) for PyTorch, with the framework of your choice.",
    epilog=f"Set {TRACEBACK_VARIABLE}=1 to see the traceback of every error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run(module: str, options: Any) -> None:
    """Run a command on this rank."""
    _print_every_text()
    import_module(f"ring_backends.cli.{module}").run(options)


def _start(module: str, options: Any) -> None:
    """Run a command on this rank if a launcher started it, else on new ranks."""
    if under_launcher():
        complete_environment()
        _run(module, options)
    else:
        launch(_run, (module, options), options.nproc_per_node)


# The options at the end are those that most users need.
_train, _generate = partial(_start, "training_run"), partial(_start, "generator")
_PROMPT = ("prompt", "max_new_tokens", "temperature", "nproc_per_node", "backend")
add_command(app, "train", TrainOptions, _train, ("seq_len", "nproc_per_node", "backend", "steps", "save"))
add_command(app, "generate", GenerateOptions, _generate, _PROMPT)
_BRANCHES = ("segment_lengths", "dilation_rates")
add_command(app, "compare", compare.CompareOptions, compare.run, ("seq_len", "nproc_per_node", *_BRANCHES, "plot"))
add_command(app, "plan", plan.PlanOptions, plan.run, ("seq_len", "ring_size", "heads", *_BRANCHES))
add_command(app, "info", info.InfoOptions, info.run, ("verbose", "probe", "nproc_per_node", "dtype", "device", "json"))
add_command(app, "convert", convert.ConvertOptions, convert.run, ("num_heads", "kind", *_BRANCHES, "seq_len"))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ring-backends {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Ring dilated attention (LongNet, arXiv 2307.02486) for PyTorch, with the framework of your choice."""


def main() -> None:
    """Run the command line, and exit with the status of the command."""
    _print_every_text()
    app()


def _print_every_text() -> None:
    """Print ? for letters that a locale without UTF-8 does not have. Python would raise an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
