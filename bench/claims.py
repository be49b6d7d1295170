"""Measures what the documentation claims: `python bench/claims.py --help`.

The contestants of a claim take turns, so background load affects all of them equally.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import shutil
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import rank
import typer
from attach import attach_command
from blocks import blocks_command
from calls import latency_command, tiny_calls_command
from case import BARE_KERNELS, FLEX, MASKED_SDPA, ONE_DEVICE, STANDARD, Branches, Case
from options import Dtype, Json, JsonRequired, Repeats, RingSize, Shrink
from report import Row, ratios, report
from setups import DILATED_RING, ONE_DEVICE_BRANCHES, PLAIN, as_segments, ring_setups, setup, shortened, window_setup
from slow_link import hidden_hops_command
from worlds import Worlds

LONGEST_KERNELS = 16384
"""The largest number of tokens of the bare kernel calls that `scaling` compares with."""

SEGMENTS = "two calls with segments"

SCORE_MODS = ("softcap", "alibi", "distance")

TILES: Branches = ((2048, 1), (20480, 8), (102400, 64))
"""The branches of `score-memory`."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
app.command("hidden-hops")(hidden_hops_command)
app.command("attach")(attach_command)
app.command("blocks")(blocks_command)
app.command("tiny-calls")(tiny_calls_command)
app.command("latency")(latency_command)


@app.command("overhead")
def overhead_command(repeats: Repeats = 11, shrink: Shrink = 1, json: Json = None) -> None:
    """Measure the time of dilated attention relative to its bare kernel calls, on one device and one thread.

    The sequence has 32,768 tokens.
    """
    with Worlds() as worlds:
        report("overhead", {"repeats": repeats, "shrink": shrink}, overhead(worlds, repeats, shrink), json)


def overhead(worlds: Worlds, repeats: int, shrink: int) -> list[Row]:
    rows = []
    for dtype in ("fp32", "bf16"):
        case = setup(shrink, 32768, ONE_DEVICE_BRANCHES, dtype=dtype)
        contestants = [dataclasses.replace(case, contestant=name) for name in (ONE_DEVICE, BARE_KERNELS)]
        directions: tuple[rank.Direction, ...] = ("forward", "backward")
        for direction in directions:
            ours, bare = in_turns(worlds, contestants, direction, repeats)
            rows.append(
                {
                    "dtype": dtype,
                    "direction": direction,
                    "seconds": statistics.median(ours),
                    "bare_kernels": statistics.median(bare),
                    **ratios(ours, bare),
                    "calls": {"ours": ours, "bare kernels": bare},
                }
            )
        worlds.forget()
    return rows


@app.command("scaling")
def scaling_command(repeats: Repeats = 7, shrink: Shrink = 1, dtype: Dtype = "fp32", json: Json = None) -> None:
    """Measure the speed-up of two ranks over one rank, with one thread each.

    A call is forward and backward at 65,536 tokens. For comparison, the command also measures the speed-up of two
    independent processes that run the bare kernel calls, on at most 16,384 tokens. The machine allows no larger
    speed-up.
    """
    options = {"repeats": repeats, "shrink": shrink, "dtype": dtype}
    setups = {name: case for name, case in ring_setups(shrink, dtype).items() if name != PLAIN}
    with Worlds() as worlds:
        report("scaling", options, scaling(worlds, repeats, setups), json)


@app.command("plain-scaling")
def plain_scaling_command(
    repeats: Repeats = 3,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence.")] = 65536,
    json: Json = None,
) -> None:
    """Measure the same as `scaling` for plain ring attention. A call of 65,536 tokens takes minutes."""
    options = {"repeats": repeats, "shrink": shrink, "dtype": dtype, "tokens": tokens}
    setups = {PLAIN: ring_setups(shrink, dtype, tokens)[PLAIN]}
    with Worlds() as worlds:
        report("plain scaling", options, scaling(worlds, repeats, setups), json)


@app.command("short-scaling")
def short_scaling_command(repeats: Repeats = 11, shrink: Shrink = 1, dtype: Dtype = "fp32", json: Json = None) -> None:
    """Measure the same as `scaling` for a short sequence of 8,192 tokens, with three branches and without a mask."""
    options = {"repeats": repeats, "shrink": shrink, "dtype": dtype}
    setups = {"short": setup(shrink, 8192, STANDARD, dtype=dtype, causal=False)}
    with Worlds() as worlds:
        report("short scaling", options, scaling(worlds, repeats, setups), json)


def scaling(worlds: Worlds, repeats: int, setups: Mapping[str, Case]) -> list[Row]:
    rows = []
    for name, case in setups.items():
        segments = as_segments(case)
        kernels = shortened(segments, max(1, segments.seq_len // LONGEST_KERNELS) if case is segments else 1)
        kernels = dataclasses.replace(kernels, contestant=BARE_KERNELS, layout="contiguous")
        contestants = [
            dataclasses.replace(case, contestant=ONE_DEVICE, layout="contiguous"),
            dataclasses.replace(case, contestant="native", ring_size=2),
            kernels,
            dataclasses.replace(kernels, ring_size=2),  # both ranks compute all kernel calls
        ]
        alone, together, kernels_alone, kernels_twice = in_turns(worlds, contestants, "both", repeats, shorter=8)
        speed_up = statistics.median(alone) / statistics.median(together)
        of_machine = 2 * statistics.median(kernels_alone) / statistics.median(kernels_twice)
        rows.append(
            {
                "setup": name,
                "tokens": case.seq_len,
                "one_rank_seconds": statistics.median(alone),
                "two_ranks_seconds": statistics.median(together),
                "speed_up": speed_up,
                "median_of_ratios": statistics.median(a / b for a, b in zip(alone, together, strict=True)),
                "bare_kernels_speed_up": of_machine,
                "share_of_machine": speed_up / of_machine,
                "calls": {
                    "one rank": alone,
                    "two ranks": together,
                    "bare kernels": kernels_alone,
                    "bare kernels by each of two": kernels_twice,
                },
            }
        )
        worlds.forget()
    return rows


@app.command("windows")
def windows_command(repeats: Repeats = 5, shrink: Shrink = 1, json: Json = None) -> None:
    """Measure causal windows of 1,024 tokens on one device with one thread, relative to other ways.

    At 32,768 tokens, the other way is two calls with segments of 1,024 tokens, which see as many keys. At 8,192 tokens
    in fp32, it is `scaled_dot_product_attention` with a mask, and the forward of compiled `flex_attention` if there is
    a C++ compiler. On CPUs, torch has no backward of it.
    """
    with Worlds() as worlds:
        report("windows", {"repeats": repeats, "shrink": shrink}, windows(worlds, repeats, shrink), json)


def windows(worlds: Worlds, repeats: int, shrink: int) -> list[Row]:
    others = [("fp32", 32768, SEGMENTS, 2), ("bf16", 32768, SEGMENTS, 2), ("fp32", 8192, MASKED_SDPA, 1)]
    if shutil.which("g++"):
        others.append(("fp32", 8192, FLEX, 1))
    rows = []
    for dtype, tokens, other, count in others:
        case = window_setup(shrink, tokens, dtype=dtype, contestant=ONE_DEVICE)
        its_case = as_segments(case) if other == SEGMENTS else dataclasses.replace(case, contestant=other)
        directions: tuple[rank.Direction, ...] = ("forward",) if other == FLEX else ("forward", "backward")
        for direction in directions:
            ours, its = in_turns(worlds, [case, its_case], direction, repeats)
            its = [seconds * count for seconds in its]
            rows.append(
                {
                    "dtype": dtype,
                    "tokens": case.seq_len,
                    "direction": direction,
                    "seconds": statistics.median(ours),
                    "relative_to": other,
                    "its_seconds": statistics.median(its),
                    **ratios(ours, its),
                    "calls": {"ours": ours, other: its},
                }
            )
        worlds.forget()
    return rows


@app.command("scores")
def scores_command(repeats: Repeats = 5, shrink: Shrink = 1, json: Json = None) -> None:
    """Measure a soft cap, ALiBi and distances of tiles, relative to the same call without a score_mod.

    The calls have 8,192 tokens without dilation, on one device with one thread, in fp32.
    """
    with Worlds() as worlds:
        report("scores", {"repeats": repeats, "shrink": shrink}, scores(worlds, repeats, shrink), json)


def scores(worlds: Worlds, repeats: int, shrink: int) -> list[Row]:
    plain = setup(shrink, 8192, ((8192, 1),), contestant=ONE_DEVICE, causal=False)
    cases = [plain, *(dataclasses.replace(plain, score_mod=name) for name in SCORE_MODS)]
    rows = []
    directions: tuple[rank.Direction, ...] = ("forward", "backward")
    for direction in directions:
        without, *others = in_turns(worlds, cases, direction, repeats)
        for name, seconds in zip(SCORE_MODS, others, strict=True):
            rows.append(
                {
                    "score_mod": name,
                    "direction": direction,
                    "seconds": statistics.median(seconds),
                    "without": statistics.median(without),
                    **ratios(seconds, without),
                    "calls": {"with": seconds, "without": without},
                }
            )
    return rows


@app.command("score-memory")
def score_memory_command(shrink: Shrink = 1, json: Json = None) -> None:
    """Measure the peak memory of each rank with a bias by the distance of tiles, relative to the same call without.

    A call is forward and backward at 102,400 tiles in fp32, on one rank and on two. The peak includes the inputs.
    """
    with Worlds() as worlds:
        report("score memory", {"shrink": shrink}, score_memory(worlds, shrink), json)


def score_memory(worlds: Worlds, shrink: int) -> list[Row]:
    rows: list[Row] = []
    for ring_size in (1, 2):
        plain = setup(shrink, 102400, TILES, contestant="native", causal=False, ring_size=ring_size)
        without, peak = (
            max(worlds.peak_memory(dataclasses.replace(plain, score_mod=name))["peak_bytes"])
            for name in (None, "distance")
        )
        first = rows[0]["peak_bytes"] if rows else peak
        rows.append(
            {
                "tiles": plain.seq_len,
                "ranks": ring_size,
                "peak_bytes": peak,
                "without_bytes": without,
                "over_without": peak / without,
                "over_1_rank": peak / first,
            }
        )
    return rows


@app.command("window-scaling")
def window_scaling_command(repeats: Repeats = 7, shrink: Shrink = 1, dtype: Dtype = "fp32", json: Json = None) -> None:
    """Measure the same as `scaling` for a causal window of 1,024 tokens over 65,536 tokens."""
    options = {"repeats": repeats, "shrink": shrink, "dtype": dtype}
    setups = {"window": window_setup(shrink, 65536, dtype=dtype)}
    with Worlds() as worlds:
        report("window scaling", options, scaling(worlds, repeats, setups), json)


@app.command("memory")
def memory_command(
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    ring_sizes: Annotated[
        str, typer.Option(help="Ring sizes, for example 1,2,4. The first is the base of comparison.")
    ] = ("1,2,4"),
    json: Json = None,
) -> None:
    """Measure the peak memory and the wire buffers of each rank.

    A call is forward and backward at 65,536 tokens. The peak includes the inputs. Both values are relative to a rank's
    part of q, k, v, out and their gradients. A call of plain ring attention takes minutes.
    """
    sizes = [int(size) for size in ring_sizes.split(",")]
    options = {"shrink": shrink, "dtype": dtype, "ring_sizes": sizes}
    with Worlds() as worlds:
        report("memory", options, memory(worlds, sizes, shrink, dtype), json)


def memory(worlds: Worlds, ring_sizes: Sequence[int], shrink: int, dtype: str) -> list[Row]:
    rows: list[Row] = []
    setups = ring_setups(shrink, dtype)
    for name in (DILATED_RING, PLAIN):
        first: int | None = None
        for ring_size in ring_sizes:
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
                    f"over_{ring_sizes[0]}_rank": peak / first,
                    "buffers_share": max(found["buffers_bytes"]) / tensors,
                    "by_rank": found,
                }
            )
    return rows


@app.command("million")
def million_command(repeats: Repeats = 2, shrink: Shrink = 1, ring_size: RingSize = 4, json: Json = None) -> None:
    """Measure forward and backward at 1,048,576 tokens in bf16, and compare the time per token with 65,536 tokens."""
    options = {"repeats": repeats, "shrink": shrink, "ring_size": ring_size}
    with Worlds() as worlds:
        report("million", options, million(worlds, repeats, shrink, ring_size), json)


def million(worlds: Worlds, repeats: int, shrink: int, ring_size: int) -> list[Row]:
    rows: list[Row] = []
    for seq_len, rate in ((65536, 32), (1048576, 512)):
        branches = ((2048, 1), (16384, 8), (seq_len, rate))
        case = setup(shrink, seq_len, branches, dtype="bf16", layout="zigzag", ring_size=ring_size)
        case = dataclasses.replace(case, contestant="native")
        calls = [worlds.time(case, "both") for _ in range(1 + repeats)][1:]
        worlds.forget()
        memory = worlds.peak_memory(case)
        seconds = statistics.median(call["seconds"] for call in calls)
        per_token = seconds / case.seq_len
        rows.append(
            {
                "tokens": case.seq_len,
                "ranks": ring_size,
                "seconds": seconds,
                "microseconds_per_token": per_token * 1e6,
                "per_token_over_first": per_token / (rows[0]["microseconds_per_token"] / 1e6) if rows else 1.0,
                "sent_per_rank_bytes": max(calls[0]["bytes"]),
                "peak_per_rank_bytes": max(memory["peak_bytes"]),
                "peak_over_its_tensors": max(memory["peak_bytes"]) / (case.tensor_bytes / ring_size),
                "by_rank": memory | {"calls": calls},
            }
        )
    return rows


@app.command("timeline")
def timeline_command(
    json: JsonRequired,
    shrink: Shrink = 1,
    ring_size: RingSize = 2,
    dtype: Dtype = "fp32",
) -> None:
    """Record when each rank computes, posts hops and waits for hops, with dilated and with plain attention."""
    with Worlds() as worlds:
        found = timelines(worlds, shrink, ring_size, dtype)
    json.write_text(json_module.dumps(found) + "\n")


def timelines(worlds: Worlds, shrink: int, ring_size: int, dtype: str) -> list[dict[str, Any]]:
    setups = ring_setups(shrink, dtype)
    found = []
    for name in (DILATED_RING, PLAIN):
        case = dataclasses.replace(setups[name], contestant="native", ring_size=ring_size)
        spans = worlds.of(case).run(rank.spans, case)
        found.append({"name": name, "case": dataclasses.asdict(case), "ranks": spans})
        worlds.forget()
    return found


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
