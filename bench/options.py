"""Options that several commands of claims.py share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _check_directory(path: Path | None) -> Path | None:
    """Check that the directory of the file exists, before the measurement starts."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.absolute().parent} is not a directory; create it, or give another path.")
    return path


Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each contestant, after a warm-up call.")]
Shrink = Annotated[int, typer.Option(min=1, help="Divide all lengths by this, for a quick run.")]
RingSize = Annotated[int, typer.Option(min=1, help="Number of ranks. Each has one thread.")]
Dtype = Annotated[str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Dtype of the inputs.")]
Table = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="File that pytest wrote with --benchmark-json.")
]
DtypeShown = Annotated[str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Show calls of this dtype.")]
Json = Annotated[
    Path | None, typer.Option(metavar="FILE", callback=_check_directory, help="Write all results to this file.")
]
