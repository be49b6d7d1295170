"""Options, parameters and fixtures of the benchmark modules. `pytest bench --help` lists the options under "ring"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rank
import torch
from case import BARE_KERNELS, STANDARD, Branches, Case
from clock import CLOCK
from contestants import unusable
from pytest_benchmark.fixture import BenchmarkFixture
from worlds import Worlds

pytest_plugins = ["ring_backends.testing.plugin"]  # defines the markers

LENGTHS = [2048 << doubling for doubling in range(6)]
SMOKE_BRANCHES: Branches = ((64, 1), (128, 2), (256, 4))

Measure = Callable[[Case, rank.Direction], None]


def _integers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def pytest_addoption(parser: pytest.Parser) -> None:
    option = parser.getgroup("ring", "benchmarks of ring attention").addoption
    option("--seq-lens", type=_integers, help="sequence lengths; default: the powers of two from 2,048 to 65,536")
    option("--ring-sizes", type=_integers, help="ring sizes, for example 2,4; default: 1,2,4")
    option("--dtypes", type=_words, help="dtypes from fp32, bf16, fp16 and fp64; default: fp32,bf16")
    option("--contestants", type=_words, help="contestants to run, for example 'native,dense ring'; default: all")
    option("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    option("--device", choices=["cpu", "cuda"], default="cpu")
    option("--rounds", type=int, default=7, help="timed calls per case, after a warm-up call")
    budget = "seconds per case; if one call takes longer, the case has only this call, without warm-up"
    option("--budget", type=float, default=60.0, help=budget)
    option("--no-memory", action="store_true", help="do not measure memory; measuring it starts new ranks")
    smoke = "check with tiny sizes that the benchmarks run; takes seconds, and the times mean nothing"
    option("--smoke", action="store_true", help=smoke)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device=cuda: torch finds no GPU on this machine; use --device=cpu.")
    if config.option.smoke:
        config.option.seq_lens = config.option.seq_lens or [512]
        config.option.ring_sizes = config.option.ring_sizes or [2]
        config.option.dtypes = config.option.dtypes or ["fp32"]
        config.option.rounds, config.option.no_memory = 1, True
        config.option.benchmark_autosave = None  # do not save meaningless times
    config.option.seq_lens = config.option.seq_lens or LENGTHS
    config.option.ring_sizes = config.option.ring_sizes or [1, 2, 4]
    config.option.dtypes = config.option.dtypes or ["fp32", "bf16"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a benchmark. The last parameter changes fastest, so both directions share a case's inputs."""
    option = metafunc.config.option
    contestants = getattr(metafunc.module, "CONTESTANTS", ())
    values: dict[str, list[Any]] = {
        "contestant": [name for name in contestants if option.contestants is None or name in option.contestants],
        "ring_size": option.ring_sizes,
        "dtype": option.dtypes,
        "seq_len": option.seq_lens,
        "direction": ["forward", "backward"],
    }
    for name, parameters in values.items():
        if contestants and name in metafunc.fixturenames:
            metafunc.parametrize(name, parameters)


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    with Worlds(fresh_for_memory=not request.config.option.smoke) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def branches(request: pytest.FixtureRequest) -> Branches:
    return SMOKE_BRANCHES if request.config.option.smoke else STANDARD


@pytest.fixture(scope="session")
def memory(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[[Case], dict[str, Any]]:
    """A function that measures the peak memory of a case, once for both directions."""
    known: dict[Case, dict[str, Any]] = {}

    def measure(case: Case) -> dict[str, Any]:
        # The bare kernels keep the rows of all branches in memory. Their peak says nothing about attention.
        if request.config.option.no_memory or case.contestant == BARE_KERNELS:
            return {}
        if case not in known:
            known[case] = worlds.peak_memory(case)
        return known[case]

    return measure


@pytest.fixture
def measure(
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    worlds: Worlds,
    memory: Callable[[Case], dict[str, Any]],
) -> Measure:
    """A function that times one direction of a case with pytest-benchmark. It skips a case that cannot run here."""
    option = request.config.option

    def run(case: Case, direction: rank.Direction) -> None:
        case = dataclasses.replace(case, layout=option.layout, device=option.device)
        reason = unusable(case)
        if reason is not None:
            pytest.skip(reason)
        first = worlds.time(case, direction)  # warms up, and shows how many calls the budget allows
        rounds = min(option.rounds, int(option.budget // first["seconds"]))
        calls = [] if rounds else [first]

        def one_call() -> None:
            if rounds:
                calls.append(worlds.time(case, direction))
            CLOCK.advance(calls[-1]["seconds"])

        benchmark.group = f"{direction}, {case.seq_len:,} tokens, {case.dtype}, {_ranks(case.ring_size)}"
        benchmark.pedantic(one_call, rounds=max(1, rounds))
        benchmark.extra_info.update(
            {"direction": direction, **dataclasses.asdict(case), **_median_call(calls), **memory(case)},
            **worlds.of(case).run(rank.environment, case)[0],
        )

    return run


def _ranks(ring_size: int) -> str:
    return f"{ring_size} rank{'s' if ring_size > 1 else ''}"


def _median_call(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the messages, bytes and waiting share of each rank, in the call of median duration."""
    median = sorted(calls, key=lambda call: call["seconds"])[len(calls) // 2]
    return {name: value for name, value in median.items() if name != "seconds"}
