"""The options of ``generate``. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ring_backends.cli.options import check_files


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command, as plain values that can be sent to the ranks."""

    checkpoint: Path
    prompt: str | None
    prompt_file: Path | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    backend: str
    nproc_per_node: int
    layout: str
    device: str
    timeout: float
    json: Path | None

    def check(self) -> None:
        """Check the options, as far as that needs neither torch nor the other ranks.

        Raises:
            ValueError: an option is invalid. The message names it.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("prompt: give either --prompt TEXT or --prompt-file FILE.")
        if not self.prompt_bytes():
            name = "prompt" if self.prompt is not None else "prompt_file"
            raise ValueError(f"{name}: is empty; give at least one byte to continue.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be at least 0; 0 takes the likeliest byte.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1.")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout = {self.timeout}: must be above 0 and finite; give a positive number.")
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
