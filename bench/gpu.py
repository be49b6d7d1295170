"""Models and measures attention on a GPU.

Without a command, prints the modelled table on a machine without a GPU, and runs `all` on a machine with one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import gpu_blocks
import gpu_parts
import torch
import typer
from gpu_cases import ONE_GPU, RINGS, WINDOWS
from gpu_clock import Budget, Clock
from gpu_model import CONSTANTS, modelled_rows, show, show_markdown
from options import Json, Shrink
from report import Row, line, report, write

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

TESTS = Path(__file__).resolve().parent.parent / "tests"
Part = Callable[[Clock, Budget, int], Iterable[Row]]
PARTS: dict[str, Part] = {
    "kernels": gpu_parts.kernels_alone,
    "one-device": gpu_parts.one_device,
    "rivals": gpu_parts.rivals,
    "ring": gpu_parts.ring_ranks,
    "syncs": gpu_parts.synchronizations,
    "blocks": gpu_blocks.block_sizes,
}
NEED_A_GPU = ("tests", "blocks")

Device = Annotated[str, typer.Option(metavar="cuda|cpu", help="cpu: only to test the command, with --shrink.")]
Minutes = Annotated[float, typer.Option(min=0, help="Cases that would begin later in a part are left out.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed calls, after two warm-up calls.")]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    model: Annotated[bool, typer.Option("--model", help="Print the modelled table, which needs no GPU.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --model, print the table as Markdown.")] = False,
    json: Json = None,
) -> None:
    """Model and measure attention on a GPU."""
    if context.invoked_subcommand is not None:
        return
    if torch.cuda.is_available() and not model:
        if json is not None:
            raise typer.BadParameter(
                "--json: with a GPU, use `gpu.py all --directory DIR`, which writes a file per part."
            )
        all_command(Path())
        return
    if not model:
        print("No CUDA device; this is the modelled table.")
    rows = modelled_rows((*ONE_GPU, *WINDOWS, *RINGS))
    (show_markdown if markdown else show)(rows)
    if json is not None:
        write("modelled", {"constants": CONSTANTS}, rows, json)


def _require(device: str, name: str = "") -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device. `gpu.py --model` prints the modelled table; --device cpu --shrink 256 tests a command.")
        raise typer.Exit(1)
    if device == "cpu" and name in NEED_A_GPU:
        raise typer.BadParameter(f"--device: {name} needs a GPU; leave --device out.")


def _measure(name: str, device: str, shrink: int, repeats: int, minutes: float, json: Path | None) -> None:
    _require(device, name)
    options = {"device": device, "shrink": shrink, "repeats": repeats, "minutes": minutes}
    budget = Budget(minutes)
    rows: list[Row] = []
    for row in PARTS[name](Clock(torch.device(device), repeats), budget, shrink):
        rows.append(row)
        print(line(row), flush=True)
        if json is not None:  # what was measured remains if the rest does not end in time
            write(f"gpu {name}", options, rows, json)
    if not rows:
        print(f"{name}: no case fits into {minutes} minutes; raise --minutes.")
        raise typer.Exit(1)
    report(f"gpu {name}", options, rows, json)
    if budget.is_spent:
        print(f"The {minutes:g} minutes of this part are over; later cases were left out.")


def _add_part(name: str, repeats: Repeats) -> None:
    @app.command(name, help=PARTS[name].__doc__)
    def command(
        device: Device = "cuda", shrink: Shrink = 1, repeats: Repeats = repeats, minutes: Minutes = 9, json: Json = None
    ) -> None:
        _measure(name, device, shrink, repeats, minutes, json)


for name in PARTS:
    _add_part(name, 7 if name == "kernels" else 5)


@app.command("all")
def all_command(
    directory: Annotated[
        Path | None,
        typer.Option(file_okay=False, exists=True, help="Write gpu-tests.xml and gpu-PART.json into this directory."),
    ] = None,
    device: Device = "cuda",
    shrink: Shrink = 1,
    repeats: Repeats = 5,
    minutes: Minutes = 9,
) -> None:
    """Run the tests that need a GPU, then all parts. If one fails, the others still run.

    Each runs in a process of its own, since no call succeeds in a process after an illegal memory access on the GPU.
    """
    _require(device)
    options = {"device": device, "shrink": shrink, "repeats": repeats, "minutes": minutes}
    commands = {"tests": _tests_command(directory), **{name: _part_command(name, options, directory) for name in PARTS}}
    failed = []
    for name, command in commands.items():
        if name in NEED_A_GPU and device == "cpu":
            print(f"{name}: left out, since they need a GPU")
            continue
        print(f"{name}: at most {minutes + 1:g} minutes", flush=True)
        try:
            code = subprocess.run(command, timeout=60 * (minutes + 1)).returncode
        except subprocess.TimeoutExpired:
            code = None
            print(f"{name}: stopped after {minutes + 1:g} minutes", flush=True)
        if code != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _tests_command(directory: Path | None) -> list[str]:
    """Run the tests that need a GPU. Triton compiles kernels for them on the CPU, so several run at a time."""
    command = [sys.executable, "-m", "pytest", "--gpu", "-n", "8", str(TESTS)]
    return command if directory is None else [*command, f"--junitxml={directory.absolute() / 'gpu-tests.xml'}"]


def _part_command(name: str, options: dict[str, object], directory: Path | None) -> list[str]:
    if directory is not None:
        options = {**options, "json": directory.absolute() / f"gpu-{name}.json"}
    return [sys.executable, __file__, name, *(f"--{option}={value}" for option, value in options.items())]


if __name__ == "__main__":
    app()
