"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _has_a_place(path: Path | None) -> Path | None:
    """Check before the measurement that the directory of the file exists."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.absolute().parent} is no directory; create it first.")
    return path


Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each contestant, after a warm-up call.")]
Shrink = Annotated[int, typer.Option(min=1, help="Divide all lengths by this, for a quick run.")]
RingSize = Annotated[int, typer.Option(min=1, help="Ranks of one thread each.")]
Dtype = Annotated[str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Of the inputs.")]
Json = Annotated[
    Path | None, typer.Option(metavar="FILE", callback=_has_a_place, help="Write all results to this file.")
]
JsonRequired = Annotated[
    Path,
    typer.Option("--json", metavar="FILE", callback=_has_a_place, help="File for the result, which plot.py draws."),
]
