"""The command line: ``ring-backends``, and ``python -m ring_backends``, which is the same.

This package imports no torch; a command imports it when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from ring_backends import __version__
from ring_backends.cli.branches import BranchesCommand
from ring_backends.cli.compare import compare_command
from ring_backends.cli.convert import convert_command
from ring_backends.cli.info import info_command
from ring_backends.cli.plan import plan_command
from ring_backends.cli.report import TRACEBACK_VARIABLE
from ring_backends.cli.train import train_command

# torch says this at import where numpy is missing; nothing here uses numpy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

app = typer.Typer(
    name="ring-backends",
    help="Ring dilated attention (LongNet, arXiv 2307.02486) for PyTorch, on the framework of your choice.",
    epilog=f"{TRACEBACK_VARIABLE}=1 in the environment shows the traceback of every error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=BranchesCommand)(train_command)
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
    """Ring dilated attention (LongNet, arXiv 2307.02486) for PyTorch, on the framework of your choice."""


def main() -> None:
    """The console script. Leaves with the exit status of the command."""
    app()
