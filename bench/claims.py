"""Measures what the documentation claims: `python bench/claims.py --help`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from case import ADAPTERS, ALL_GATHER, BARE_KERNELS, CALLS, DENSE_RING, DILATED, ONE_DEVICE, PLAIN, SDPA, Case
from decoding import decoding
from groups import groups
from ranks import DIRECTIONS, Worlds
from recurrent_layers import recurrent_layers
from report import Dtype, Integers, Repeats, Row, Shrink, add_command, compared, integers, new_app, read_rows, table
from rich.console import Console
from slides import slides
from slow_link import NoNamespacesError, hidden_hops
from tiny_calls import tiny_calls
from training_steps import attach, blocks

from ring_backends import available_adapters
from ring_backends.testing.hosts import NoHostsError

LONGEST_KERNELS = 16384
"""The largest number of tokens of the bare kernel calls that `scaling` compares with."""

METHODS = (*ADAPTERS, DENSE_RING, ALL_GATHER, ONE_DEVICE, SDPA, BARE_KERNELS)
ON_ONE_RANK = (ONE_DEVICE, SDPA, BARE_KERNELS)

app = new_app(__doc__)


def methods(
    worlds: Worlds,
    seq_lens: Integers = "2048,4096,8192,16384,32768,65536",
    ring_sizes: Integers = "2,4",
    dtype: Dtype = "fp32",
    contestants: Annotated[str, typer.Option(help="For example 'native,dense ring'.")] = ",".join(METHODS),
    repeats: Repeats = 3,
    memory: Annotated[bool, typer.Option(help="Measure memory too, which starts new ranks.")] = True,
) -> Iterator[Row]:
    """Measure forward, backward, memory and bytes of every method, with branches (2048, 1), (4096, 2), (8192, 4)."""
    chosen = [name for name in contestants.split(",") if available_adapters().get(name) is None]
    for tokens in integers(seq_lens):
        cases = [Case(name, tokens, dtype=dtype) for name in chosen if name in ON_ONE_RANK]
        rings = [name for name in chosen if name not in ON_ONE_RANK]
        cases += [Case(name, tokens, size, dtype=dtype) for size in integers(ring_sizes) for name in rings]
        for case in cases:
            row: Row = {"tokens": tokens, "ranks": case.ring_size, "dtype": dtype, "contestant": case.contestant}
            of_ranks: dict[str, Any] = {}
            for direction in DIRECTIONS:
                warm_up = worlds.time(case, direction)
                is_long = warm_up["seconds"] > 5
                calls = [warm_up] if is_long else [worlds.time(case, direction) for _ in range(repeats)]
                row[f"{direction}_seconds"] = statistics.median(call["seconds"] for call in calls)
                of_ranks[direction] = calls
            worlds.forget()
            if memory and case.contestant != BARE_KERNELS:  # they keep the rows of all branches
                of_ranks |= worlds.peak_memory(case)
                row["peak_bytes"] = max(of_ranks["peak_bytes"])
            if case.contestant != ALL_GATHER:  # a ring counts no collectives
                row["sent_bytes"] = max(
                    map(sum, zip(*(of_ranks[name][0]["bytes"] for name in DIRECTIONS), strict=True))
                )
            yield row | {"by_rank": of_ranks}


def overhead(worlds: Worlds, repeats: Repeats = 11, shrink: Shrink = 1) -> Iterator[Row]:
    """Measure the time of dilated attention relative to its bare kernel calls, on one device and one thread.

    The sequence has 32,768 tokens.
    """
    for dtype in ("fp32", "bf16"):
        case = Case(ONE_DEVICE, 32768, branches=((2048, 1), (8192, 4), (32768, 16)), dtype=dtype).shortened(shrink)
        for direction in DIRECTIONS:
            bare = case.but(contestant=BARE_KERNELS)
            ours, kernels = worlds.in_turns(case, bare, direction=direction, repeats=repeats)
            yield {"dtype": dtype, "direction": direction, **compared(seconds=ours, bare_kernels=kernels)}


def scaling(
    worlds: Worlds,
    calls: Annotated[str, typer.Option(metavar="dilated|plain|short|window", help="Which calls.")] = "dilated",
    repeats: Repeats = 7,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
) -> Iterator[Row]:
    """Measure the speed-up of two ranks over one rank, with one thread each.

    A call is forward and backward. For comparison, the command also measures the speed-up of two independent processes
    that run the bare kernel calls, on at most 16,384 tokens. The machine allows no larger speed-up.
    """
    if calls not in CALLS:
        raise typer.BadParameter(f"--calls {calls}: choose from {', '.join(CALLS)}.")
    for name, given in CALLS[calls].items():
        case = given.but(dtype=dtype).shortened(shrink)
        kernels = case.but(contestant=BARE_KERNELS, layout="contiguous").shortened(
            max(1, case.seq_len // LONGEST_KERNELS)
        )
        if case.window is not None:  # segments of the same length, on the whole sequence
            kernels = case.but(contestant=BARE_KERNELS, branches=((case.window, 1),), window=None)
        contestants = {
            "one rank": case.but(contestant=ONE_DEVICE, layout="contiguous"),
            "two ranks": case.but(contestant="native", ring_size=2),
            "bare kernels": kernels,
            "bare kernels by each of two": kernels.but(ring_size=2),
        }
        found = worlds.in_turns(*contestants.values(), direction="both", repeats=repeats, shorter=8)
        alone, together, kernels_alone, kernels_twice = map(statistics.median, found)
        of_machine = 2 * kernels_alone / kernels_twice
        yield {
            "setup": name,
            "tokens": case.seq_len,
            "one_rank_seconds": alone,
            "two_ranks_seconds": together,
            "speed_up": alone / together,
            "median_of_ratios": statistics.median(a / b for a, b in zip(*found[:2], strict=True)),
            "bare_kernels_speed_up": of_machine,
            "share_of_machine": alone / together / of_machine,
            "calls": dict(zip(contestants, found, strict=True)),
        }


def memory(
    worlds: Worlds,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    ring_sizes: Integers = "1,2,4",
    ulysses_size: Annotated[int, typer.Option(min=1, help="At most so many ranks exchange rows for heads.")] = 1,
) -> Iterator[Row]:
    """Measure the peak memory of each rank, and that of the buffers of its hops.

    A call is forward and backward at 65,536 tokens. The peak includes the inputs. Both values are relative to a rank's
    part of q, k, v, out and their gradients. A call of plain ring attention takes minutes.
    """
    sizes = integers(ring_sizes)
    for name, given in {"dilated": DILATED.but(layout="zigzag"), "plain": PLAIN}.items():
        first: int | None = None
        for size in sizes:
            group_size = math.gcd(ulysses_size, size)
            case = given.but(contestant="native", ring_size=size, dtype=dtype, ulysses_size=group_size).shortened(
                shrink
            )
            found = worlds.peak_memory(case)
            peak, tensors = max(found["peak_bytes"]), case.tensor_bytes / size
            first = first or peak
            yield {
                "setup": f"{name}, causal, zigzag",
                "tokens": case.seq_len,
                "ranks": size,
                "ulysses_size": group_size,
                "peak_bytes": peak,
                "over_its_tensors": peak / tensors,
                f"over_{sizes[0]}_rank": peak / first,
                "buffers_share": max(found["buffers_bytes"]) / tensors,
                "by_rank": found,
            }


def million(
    worlds: Worlds,
    repeats: Repeats = 2,
    shrink: Shrink = 1,
    ring_size: Annotated[int, typer.Option(min=1, help="Number of ranks. Each has one thread.")] = 4,
) -> Iterator[Row]:
    """Measure forward and backward at 1,048,576 tokens in bf16, and compare the time per token with 65,536 tokens."""
    first: float | None = None
    for seq_len, rate in ((65536, 32), (1048576, 512)):
        branches = ((2048, 1), (16384, 8), (seq_len, rate))
        case = Case("native", seq_len, ring_size, branches, "bf16", "zigzag").shortened(shrink)
        calls = [worlds.time(case, "both") for _ in range(1 + repeats)][1:]
        worlds.forget()
        memory = worlds.peak_memory(case)
        seconds = statistics.median(call["seconds"] for call in calls)
        first = first or seconds / case.seq_len
        yield {
            "tokens": case.seq_len,
            "ranks": ring_size,
            "seconds": seconds,
            "microseconds_per_token": seconds / case.seq_len * 1e6,
            "per_token_over_first": seconds / case.seq_len / first,
            "sent_per_rank_bytes": max(calls[0]["bytes"]),
            "peak_per_rank_bytes": max(memory["peak_bytes"]),
            "peak_over_its_tensors": max(memory["peak_bytes"]) / (case.tensor_bytes / ring_size),
            "by_rank": memory | {"calls": calls},
        }


def options(worlds: Worlds, repeats: Repeats = 5, shrink: Shrink = 1) -> Iterator[Row]:
    """Measure packed documents, dropout and a score_mod, relative to the same call without, on one device.

    The calls have 8,192 tokens in fp32, with one thread. Those with documents or dropout are causal and have branches
    (2048, 1), (4096, 2), (8192, 4). Those with a score_mod are not causal and have no dilation.
    """
    marked = Case(ONE_DEVICE, 8192).shortened(shrink)
    plain = Case(ONE_DEVICE, 8192, branches=((8192, 1),), causal=False).shortened(shrink)
    others = {
        "8 documents": marked.but(documents=8),
        "64 documents": marked.but(documents=64),
        "math kernel": marked.but(kernel="math"),
        "dropout": marked.but(dropout_p=0.1),
        **{name: plain.but(score_mod=name) for name in ("softcap", "alibi", "distance")},
    }
    for name, case in others.items():
        for direction in DIRECTIONS:
            without = plain if case.score_mod else marked
            ours, its = worlds.in_turns(case, without, direction=direction, repeats=repeats)
            yield {"option": name, "direction": direction, **compared(seconds=ours, without=its)}


def score_memory(worlds: Worlds, shrink: Shrink = 1) -> Iterator[Row]:
    """Measure the peak memory of each rank with a bias by the distance of tiles, relative to the same call without.

    A call is forward and backward at 102,400 tiles in fp32, on one rank and on two. The peak includes the inputs.
    """
    first: int | None = None
    for size in (1, 2):
        plain = Case("native", 102400, size, ((2048, 1), (20480, 8), (102400, 64)), causal=False).shortened(shrink)
        without, peak = (max(worlds.peak_memory(plain.but(score_mod=x))["peak_bytes"]) for x in (None, "distance"))
        first = first or peak
        row = {"tiles": plain.seq_len, "ranks": size, "peak_bytes": peak, "without_bytes": without}
        yield row | {"over_without": peak / without, "over_1_rank": peak / first}


def show(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of a command's --json.")],
    tokens: Annotated[int | None, typer.Option(help="Show calls of this length. Default: all lengths.")] = None,
) -> None:
    """Print the rows of a file as a Markdown table."""
    rows = [row for row in read_rows(file) if tokens in (None, row.get("tokens"))]
    if not rows:
        raise typer.BadParameter(f"{file} has no calls with {tokens} tokens; leave --tokens out.")
    Console(width=160, highlight=False).print(table(rows, markup=True))


for measure in (
    overhead,
    scaling,
    memory,
    million,
    options,
    score_memory,
    methods,
    tiny_calls,
    decoding,
    blocks,
    attach,
    recurrent_layers,
    slides,
    hidden_hops,
    groups,
):
    add_command(app, measure, worlds=Worlds)
app.command()(show)


if __name__ == "__main__":
    try:
        app()
    except (NoNamespacesError, NoHostsError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
