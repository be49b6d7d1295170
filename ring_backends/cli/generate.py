"""``generate``: continues a text with the model of a checkpoint that ``train`` saved.

This module imports torch only when the ranks start. What a rank does is in :mod:`ring_backends.cli.generator`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ring_backends.cli.generate_options import GenerateOptions
from ring_backends.cli.options import RANKS, Device, Json, Layout
from ring_backends.cli.report import reported_errors
from ring_backends.ring.launch import launch, under_launcher

_TEXT = "Text"


def generate_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="What `train --save` wrote.")],
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text to continue.", rich_help_panel=_TEXT)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file to continue instead.", rich_help_panel=_TEXT)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Bytes to add.", rich_help_panel=_TEXT)] = 256,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits. 0 takes the likeliest byte.", rich_help_panel=_TEXT)
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(help="Draw from the likeliest bytes with this probability in total.", rich_help_panel=_TEXT),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed of the draws.", rich_help_panel=_TEXT)
    ] = 0,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Adapter that carries the hops.", rich_help_panel=RANKS)
    ] = "native",
    nproc_per_node: Annotated[
        int,
        typer.Option(min=1, help="Ranks to start on this machine. Ignored under torchrun.", rich_help_panel=RANKS),
    ] = 1,
    layout: Layout = "contiguous",
    device: Device = "auto",
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest time that a rank waits for another.", rich_help_panel=RANKS),
    ] = 300.0,
    json: Json = None,
) -> None:
    """Continue a text with a model that train has saved.

    The keys and values of the text lie on all ranks. The text is printed as it
    comes. The same seed gives the same text on any number of ranks, unless
    rounding changes a draw.
    """
    given = dict(locals())
    names = [field.name for field in fields(GenerateOptions) if field.name != "checkpoint"]  # it is no option
    with reported_errors("generate", names):
        options = GenerateOptions(**given)
        options.check()
        if under_launcher():
            _run(options)
        else:
            launch(_run, (options,), nproc_per_node)


def _run(options: GenerateOptions) -> None:
    from ring_backends.cli.generator import run

    run(options)
