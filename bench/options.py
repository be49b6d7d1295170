"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _has_a_place(path: Path | None) -> Path | None:
    """Refuse a file without a directory now, and not when everything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.absolute().parent} is no directory; make it first.")
    return path


Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each contestant, after one that warms up.")]
Shrink = Annotated[int, typer.Option(min=1, help="Divide all lengths by this, for a look in seconds.")]
RingSize = Annotated[int, typer.Option(min=1, help="Ranks, of one thread each.")]
Dtype = Annotated[str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Of the inputs.")]
Json = Annotated[
    Path | None, typer.Option(metavar="FILE", callback=_has_a_place, help="Write everything there as well.")
]
JsonRequired = Annotated[
    Path, typer.Option("--json", metavar="FILE", callback=_has_a_place, help="Where the result goes, for plot.py.")
]
