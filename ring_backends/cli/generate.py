"""The options of ``generate``. This module imports no torch. :mod:`ring_backends.cli.generator` generates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ring_backends.cli import options
from ring_backends.cli.options import Options, check_files, check_positive, ranks_option

_text_option = partial(typer.Option, rich_help_panel="Text")


@dataclass(frozen=True)
class GenerateOptions(Options):
    """Continue a text with a model that train has saved.

    The keys and values of the text lie on all ranks. The text is printed as it
    comes. The same seed gives the same text on any number of ranks, unless
    rounding changes a draw.
    """

    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="What `train --save` wrote.")]
    prompt: Annotated[str | None, _text_option(metavar="TEXT", help="The text to continue.")] = None
    prompt_file: Annotated[Path | None, _text_option(metavar="FILE", help="A file to continue instead.")] = None
    max_new_tokens: Annotated[int, _text_option(min=1, help="Bytes to add.")] = 256
    temperature: Annotated[float, _text_option(help="Divides the logits. 0 takes the likeliest byte.")] = 0.8
    top_p: Annotated[float, _text_option(help="Draw from the likeliest bytes with this probability in total.")] = 1.0
    seed: Annotated[int, _text_option(min=0, max=2**63 - 1, help="Random seed of the draws.")] = 0
    backend: Annotated[str, ranks_option(metavar="NAME", help="Adapter that carries the hops.")] = "native"
    nproc_per_node: options.StartedRanks = 1
    layout: options.Layout = "contiguous"
    device: options.Device = "auto"
    timeout: Annotated[float, ranks_option(metavar="SECONDS", help="Longest time that a rank waits for another.")] = (
        300.0
    )
    json: options.Json = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("prompt: give either --prompt TEXT or --prompt-file FILE.")
        if not self.prompt_bytes():
            name = "prompt" if self.prompt is not None else "prompt_file"
            raise ValueError(f"{name}: is empty; give at least one byte to continue.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be at least 0; 0 takes the likeliest byte.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1.")
        check_positive("timeout", self.timeout)
        if not self.checkpoint.exists():
            raise ValueError(f"checkpoint = {str(self.checkpoint)!r}: does not exist; give the PATH of train --save.")
        check_files(json=self.json)

    def prompt_bytes(self) -> bytes:
        """The bytes of the prompt.

        Raises:
            ValueError: the file cannot be read.
        """
        if self.prompt is not None:
            return self.prompt.encode("utf-8", "surrogateescape")
        assert self.prompt_file is not None
        try:
            return self.prompt_file.read_bytes()
        except OSError as error:
            raise ValueError(f"prompt_file = {str(self.prompt_file)!r}: {error.strerror}; give a file.") from None
