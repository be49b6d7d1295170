"""Measures what the documentation claims: `python bench/claims.py --help`.

The contestants of a claim take turns, so background load affects all of them equally.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import rank
import typer
from attach import attach
from blocks import blocks
from calls import latency, tiny_calls
from case import BARE_KERNELS, FLEX, MASKED_SDPA, ONE_DEVICE, STANDARD, Branches, Case
from options import Dtype, Json, Repeats, RingSize, Shrink
from report import Row, compared, report
from setups import DILATED_RING, ONE_DEVICE_BRANCHES, PLAIN, as_segments, ring_setups, setup, shortened, window_setup
from slow_link import NoNamespacesError, hidden_hops
from worlds import Worlds

LONGEST_KERNELS = 16384
"""The largest number of tokens of the bare kernel calls that `scaling` compares with."""

SEGMENTS = "two calls with segments"

SCORE_MODS = ("softcap", "alibi", "distance")

TILES: Branches = ((2048, 1), (20480, 8), (102400, 64))
"""The branches of `score-memory`."""

DIRECTIONS: tuple[rank.Direction, ...] = ("forward", "backward")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


def claim(function: Callable[..., list[Row]]) -> Callable[..., list[Row]]:
    """Add a command that reports the rows of a function. It has the function's name, docstring and options.

    A function with a parameter ``worlds`` gets ranks, which end with the command.
    """
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    needs_ranks = parameters.pop("worlds", None) is not None
    name = function.__name__.replace("_", "-")

    @functools.wraps(function)
    def command(json: Any, **options: Any) -> None:
        try:
            with Worlds() as worlds:
                rows = function(worlds, **options) if needs_ranks else function(**options)
        except NoNamespacesError as error:
            print(f"{name}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        report(name.replace("-", " "), options, rows, json)

    file = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Json)
    command.__signature__ = inspect.Signature([*parameters.values(), file])  # type: ignore[attr-defined]
    app.command(name)(command)
    return function


for measurement in (hidden_hops, attach, blocks, tiny_calls, latency):
    claim(measurement)


@claim
def overhead(worlds: Worlds, repeats: Repeats = 11, shrink: Shrink = 1) -> list[Row]:
    """Measure the time of dilated attention relative to its bare kernel calls, on one device and one thread.

    The sequence has 32,768 tokens.
    """
    rows = []
    for dtype in ("fp32", "bf16"):
        case = setup(shrink, 32768, ONE_DEVICE_BRANCHES, dtype=dtype)
        contestants = [dataclasses.replace(case, contestant=name) for name in (ONE_DEVICE, BARE_KERNELS)]
        for direction in DIRECTIONS:
            ours, bare = in_turns(worlds, contestants, direction, repeats)
            rows.append({"dtype": dtype, "direction": direction, **compared(seconds=ours, bare_kernels=bare)})
        worlds.forget()
    return rows


@claim
def scaling(worlds: Worlds, repeats: Repeats = 7, shrink: Shrink = 1, dtype: Dtype = "fp32") -> list[Row]:
    """Measure the speed-up of two ranks over one rank, with one thread each.

    A call is forward and backward at 65,536 tokens. For comparison, the command also measures the speed-up of two
    independent processes that run the bare kernel calls, on at most 16,384 tokens. The machine allows no larger
    speed-up.
    """
    setups = {name: case for name, case in ring_setups(shrink, dtype).items() if name != PLAIN}
    return speed_ups(worlds, repeats, setups)


@claim
def plain_scaling(
    worlds: Worlds,
    repeats: Repeats = 3,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence.")] = 65536,
) -> list[Row]:
    """Measure the same as `scaling` for plain ring attention. A call of 65,536 tokens takes minutes."""
    return speed_ups(worlds, repeats, {PLAIN: ring_setups(shrink, dtype, tokens)[PLAIN]})


@claim
def short_scaling(worlds: Worlds, repeats: Repeats = 11, shrink: Shrink = 1, dtype: Dtype = "fp32") -> list[Row]:
    """Measure the same as `scaling` for a short sequence of 8,192 tokens, with three branches and without a mask."""
    return speed_ups(worlds, repeats, {"short": setup(shrink, 8192, STANDARD, dtype=dtype, causal=False)})


@claim
def window_scaling(worlds: Worlds, repeats: Repeats = 7, shrink: Shrink = 1, dtype: Dtype = "fp32") -> list[Row]:
    """Measure the same as `scaling` for a causal window of 1,024 tokens over 65,536 tokens."""
    return speed_ups(worlds, repeats, {"window": window_setup(shrink, 65536, dtype=dtype)})


def speed_ups(worlds: Worlds, repeats: int, setups: Mapping[str, Case]) -> list[Row]:
    rows = []
    for name, case in setups.items():
        segments = as_segments(case)
        kernels = shortened(segments, max(1, segments.seq_len // LONGEST_KERNELS) if case is segments else 1)
        kernels = dataclasses.replace(kernels, contestant=BARE_KERNELS, layout="contiguous")
        contestants = {
            "one rank": dataclasses.replace(case, contestant=ONE_DEVICE, layout="contiguous"),
            "two ranks": dataclasses.replace(case, contestant="native", ring_size=2),
            "bare kernels": kernels,
            "bare kernels by each of two": dataclasses.replace(kernels, ring_size=2),
        }
        calls = in_turns(worlds, [*contestants.values()], "both", repeats, shorter=8)
        alone, together, kernels_alone, kernels_twice = map(statistics.median, calls)
        of_machine = 2 * kernels_alone / kernels_twice
        rows.append(
            {
                "setup": name,
                "tokens": case.seq_len,
                "one_rank_seconds": alone,
                "two_ranks_seconds": together,
                "speed_up": alone / together,
                "median_of_ratios": statistics.median(a / b for a, b in zip(*calls[:2], strict=True)),
                "bare_kernels_speed_up": of_machine,
                "share_of_machine": alone / together / of_machine,
                "calls": dict(zip(contestants, calls, strict=True)),
            }
        )
        worlds.forget()
    return rows


@claim
def windows(worlds: Worlds, repeats: Repeats = 5, shrink: Shrink = 1) -> list[Row]:
    """Measure causal windows of 1,024 tokens on one device with one thread, relative to other ways.

    At 32,768 tokens, the other way is two calls with segments of 1,024 tokens, which see as many keys. At 8,192 tokens
    in fp32, it is `scaled_dot_product_attention` with a mask, and the forward of compiled `flex_attention` if there is
    a C++ compiler. On CPUs, torch has no backward of it.
    """
    others = [("fp32", 32768, SEGMENTS, 2), ("bf16", 32768, SEGMENTS, 2), ("fp32", 8192, MASKED_SDPA, 1)]
    if shutil.which("g++"):
        others.append(("fp32", 8192, FLEX, 1))
    rows = []
    for dtype, tokens, other, count in others:
        case = window_setup(shrink, tokens, dtype=dtype, contestant=ONE_DEVICE)
        its_case = as_segments(case) if other == SEGMENTS else dataclasses.replace(case, contestant=other)
        for direction in DIRECTIONS[: 1 if other == FLEX else 2]:
            ours, its = in_turns(worlds, [case, its_case], direction, repeats)
            times = compared(seconds=ours, its_seconds=[seconds * count for seconds in its])
            rows.append({"dtype": dtype, "tokens": case.seq_len, "direction": direction, "relative_to": other, **times})
        worlds.forget()
    return rows


@claim
def scores(worlds: Worlds, repeats: Repeats = 5, shrink: Shrink = 1) -> list[Row]:
    """Measure a soft cap, ALiBi and distances of tiles, relative to the same call without a score_mod.

    The calls have 8,192 tokens without dilation, on one device with one thread, in fp32.
    """
    plain = setup(shrink, 8192, ((8192, 1),), contestant=ONE_DEVICE, causal=False)
    cases = [plain, *(dataclasses.replace(plain, score_mod=name) for name in SCORE_MODS)]
    rows = []
    for direction in DIRECTIONS:
        without, *others = in_turns(worlds, cases, direction, repeats)
        for name, ours in zip(SCORE_MODS, others, strict=True):
            rows.append({"score_mod": name, "direction": direction, **compared(seconds=ours, without=without)})
    return rows


@claim
def score_memory(worlds: Worlds, shrink: Shrink = 1) -> list[Row]:
    """Measure the peak memory of each rank with a bias by the distance of tiles, relative to the same call without.

    A call is forward and backward at 102,400 tiles in fp32, on one rank and on two. The peak includes the inputs.
    """
    rows: list[Row] = []
    for ring_size in (1, 2):
        plain = setup(shrink, 102400, TILES, contestant="native", causal=False, ring_size=ring_size)
        without, peak = (
            max(worlds.peak_memory(dataclasses.replace(plain, score_mod=name))["peak_bytes"])
            for name in (None, "distance")
        )
        row = {"tiles": plain.seq_len, "ranks": ring_size, "peak_bytes": peak, "without_bytes": without}
        first = rows[0]["peak_bytes"] if rows else peak
        rows.append(row | {"over_without": peak / without, "over_1_rank": peak / first})
    return rows


@claim
def memory(
    worlds: Worlds,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    ring_sizes: Annotated[
        str, typer.Option(help="Ring sizes, for example 1,2,4. The first is the base of comparison.")
    ] = "1,2,4",
) -> list[Row]:
    """Measure the peak memory and the wire buffers of each rank.

    A call is forward and backward at 65,536 tokens. The peak includes the inputs. Both values are relative to a rank's
    part of q, k, v, out and their gradients. A call of plain ring attention takes minutes.
    """
    rows: list[Row] = []
    sizes = [int(size) for size in ring_sizes.split(",")]
    setups = ring_setups(shrink, dtype)
    for name in (DILATED_RING, PLAIN):
        first: int | None = None
        for ring_size in sizes:
            case = dataclasses.replace(setups[name], contestant="native", ring_size=ring_size)
            found = worlds.peak_memory(case)
            peak, tensors = max(found["peak_bytes"]), case.tensor_bytes / ring_size
            first = first or peak
            rows.append(
                {
                    "setup": name,
                    "tokens": case.seq_len,
                    "ranks": ring_size,
                    "peak_bytes": peak,
                    "over_its_tensors": peak / tensors,
                    f"over_{sizes[0]}_rank": peak / first,
                    "buffers_share": max(found["buffers_bytes"]) / tensors,
                    "by_rank": found,
                }
            )
    return rows


@claim
def million(worlds: Worlds, repeats: Repeats = 2, shrink: Shrink = 1, ring_size: RingSize = 4) -> list[Row]:
    """Measure forward and backward at 1,048,576 tokens in bf16, and compare the time per token with 65,536 tokens."""
    rows: list[Row] = []
    for seq_len, rate in ((65536, 32), (1048576, 512)):
        branches = ((2048, 1), (16384, 8), (seq_len, rate))
        options = {"contestant": "native", "dtype": "bf16", "layout": "zigzag", "ring_size": ring_size}
        case = setup(shrink, seq_len, branches, **options)
        calls = [worlds.time(case, "both") for _ in range(1 + repeats)][1:]
        worlds.forget()
        memory = worlds.peak_memory(case)
        seconds = statistics.median(call["seconds"] for call in calls)
        per_token = seconds / case.seq_len * 1e6
        rows.append(
            {
                "tokens": case.seq_len,
                "ranks": ring_size,
                "seconds": seconds,
                "microseconds_per_token": per_token,
                "per_token_over_first": per_token / rows[0]["microseconds_per_token"] if rows else 1.0,
                "sent_per_rank_bytes": max(calls[0]["bytes"]),
                "peak_per_rank_bytes": max(memory["peak_bytes"]),
                "peak_over_its_tensors": max(memory["peak_bytes"]) / (case.tensor_bytes / ring_size),
                "by_rank": memory | {"calls": calls},
            }
        )
    return rows


def in_turns(
    worlds: Worlds, cases: Sequence[Case], direction: rank.Direction, repeats: int, *, shorter: int = 1
) -> list[list[float]]:
    """Measure the seconds of each case's calls. The cases take turns.

    Args:
        shorter: divides the lengths of the warm-up call of each case.
    """
    for case in cases:
        worlds.time(shortened(case, shorter), direction)
    rounds = [[worlds.time(case, direction)["seconds"] for case in cases] for _ in range(repeats)]
    return [list(calls) for calls in zip(*rounds, strict=True)]


if __name__ == "__main__":
    app()
