"""The options of ``generate``. This module imports no torch. :mod:`ring_backends.cli.generator` generates."""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ring_backends.cli import options
from ring_backends.cli.options import Options, argument, check_positive, option, ranks

_text = partial(option, panel="Text")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Continue a text with a model that train has saved.

    The keys and values of the text lie on all ranks. The text is printed as it
    comes. The same seed gives the same text on any number of ranks, unless
    rounding changes a draw.
    """

    checkpoint: Path = argument(metavar="CHECKPOINT", help="What `train --save` wrote.")
    prompt: str | None = _text(None, metavar="TEXT", help="The text to continue.")
    prompt_file: Path | None = _text(None, metavar="FILE", help="A file to continue instead.")
    max_new_tokens: int = _text(256, min=1, help="Bytes to add.")
    temperature: float = _text(0.8, help="Divides the logits. 0 takes the likeliest byte.")
    top_p: float = _text(1.0, help="Draw from the likeliest bytes with this probability in total.")
    seed: int = _text(0, min=0, max=2**63 - 1, help="Random seed of the draws.")
    backend: str = ranks("native", metavar="NAME", help="Adapter that carries the hops.")
    nproc_per_node: int = options.started_ranks()
    layout: options.Layout = options.layout()
    device: options.Device = options.device()
    timeout: float = ranks(300.0, metavar="SECONDS", help="Longest time that a rank waits for another.")
    json: Path | None = options.json()

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
