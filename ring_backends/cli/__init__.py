"""The command-line program ``ring-backends``. ``python -m ring_backends`` runs it too.

Each command parses and checks options, calls a function of the library, and prints. Importing this package does not
import torch, so ``--help`` is fast. Nothing imports this package.
"""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from ring_backends import __version__
from ring_backends.cli.compare import compare_command
from ring_backends.cli.convert import convert_command
from ring_backends.cli.generate import generate_command
from ring_backends.cli.info import info_command
from ring_backends.cli.parsing import BranchesCommand
from ring_backends.cli.plan import plan_command
from ring_backends.cli.train import train_command
from ring_backends.ring.launch import TRACEBACK_VARIABLE

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
app.command("train", cls=BranchesCommand)(train_command)
app.command("generate")(generate_command)
app.command("compare", cls=BranchesCommand)(compare_command)
app.command("plan", cls=BranchesCommand)(plan_command)
app.command("info")(info_command)
app.command("convert", cls=BranchesCommand)(convert_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ring-backends {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Ring dilated attention (LongNet, arXiv 2307.02486) for PyTorch, with the framework of your choice."""


def main() -> None:
    """Run the command line, and exit with the status of the command."""
    app()
