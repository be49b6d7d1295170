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

pytest_plugins = ["ring_backends.testing.plugin"]  # its markers

LENGTHS = [2048 << doubling for doubling in range(6)]
SMOKE_BRANCHES: Branches = ((64, 1), (128, 2), (256, 4))

Measure = Callable[[Case, rank.Direction], None]


def _integers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ring", "ring attention's benchmarks")
    group.addoption("--seq-lens", type=_integers, help="tokens, as 2048,4096; if not given, 2,048 to 65,536")
    group.addoption("--ring-sizes", type=_integers, help="ranks, as 2,4; if not given, 1,2,4")
    group.addoption("--dtypes", type=_words, help="of fp32, bf16, fp16, fp64; if not given, fp32,bf16")
    group.addoption("--contestants", type=_words, help="only these, as 'native,dense ring'")
    group.addoption("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    group.addoption("--device", choices=["cpu", "cuda"], default="cpu")
    group.addoption("--rounds", type=int, default=7, help="timed calls of a case, after a warm-up call")
    group.addoption(
        "--budget",
        type=float,
        default=60.0,
        help="seconds per case; a call that takes longer is made once, without warm-up",
    )
    group.addoption("--no-memory", action="store_true", help="do not measure memory, which needs new ranks")
    group.addoption("--smoke", action="store_true", help="tiny sizes, in seconds; the times mean nothing")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device=cuda: torch sees no GPU here; use --device=cpu.")
    if config.option.smoke:
        config.option.seq_lens = config.option.seq_lens or [512]
        config.option.ring_sizes = config.option.ring_sizes or [2]
        config.option.dtypes = config.option.dtypes or ["fp32"]
        config.option.rounds, config.option.no_memory = 1, True
        config.option.benchmark_autosave = None  # meaningless times are not kept
    config.option.seq_lens = config.option.seq_lens or LENGTHS
    config.option.ring_sizes = config.option.ring_sizes or [1, 2, 4]
    config.option.dtypes = config.option.dtypes or ["fp32", "bf16"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a benchmark. The last parameter changes fastest, so both directions share a case's inputs."""
    option = metafunc.config.option
    contestants = getattr(metafunc.module, "CONTESTANTS", None)
    if contestants is None:  # no benchmarks
        return
    values: dict[str, list[Any]] = {
        "contestant": [name for name in contestants if option.contestants is None or name in option.contestants],
        "ring_size": option.ring_sizes,
        "dtype": option.dtypes,
        "seq_len": option.seq_lens,
        "direction": ["forward", "backward"],
    }
    for name, parameters in values.items():
        if name in metafunc.fixturenames:
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
    """Peak memory of a case, measured once for both its directions."""
    known: dict[Case, dict[str, Any]] = {}

    def measure(case: Case) -> dict[str, Any]:
        # The bare kernels hold the rows of all branches at once, which attention does not need.
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
    """Time one direction of a case with pytest-benchmark. Skip it with the reason if its adapter cannot run."""
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
            {"direction": direction, **dataclasses.asdict(case), **_of_one_call(calls), **memory(case)},
            **worlds.of(case).run(rank.environment, case)[0],
        )

    return run


def _ranks(ring_size: int) -> str:
    return f"{ring_size} rank{'s' if ring_size > 1 else ''}"


def _of_one_call(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Messages, bytes and share of waiting by rank, in the median call."""
    median = sorted(calls, key=lambda call: call["seconds"])[len(calls) // 2]
    return {name: value for name, value in median.items() if name != "seconds"}
