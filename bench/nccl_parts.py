"""The parts of nccl_on_one_gpu.py. Every rank runs a part in a new process, and returns what it saw as a text.

A part reaches its GPU through :class:`Cuda`, or through :class:`StandIn`, which takes the place of NCCL and the GPU on
a machine without one. No part asks which of them it has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError
from ring_backends.registry import adapter_modules, load_adapter
from ring_backends.ring.calls import Configuration
from ring_backends.ring.ring import Ring
from ring_backends.schedule import travel
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import FP64_TOLERANCE, LocalCall, Results, difference, local_call, new_attention
from ring_backends.testing.failing_calls import ODD_RANK, SMALL_CASE, ending
from ring_backends.testing.faults import inject
from ring_backends.testing.fine_cuts import every_branch_on_trees
from ring_backends.testing.models import DenseAttention, make_model
from ring_backends.testing.rings import LAYOUTS, TWO_OF_TWO
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.training_runs import (
    CASE,
    IGNORED,
    Recipe,
    batches,
    check_moves,
    loss_sum,
    train_alone,
)

A_MOMENT = 15.0
"""Seconds after the timeout of its ring within which a rank has to raise."""

ADAPTERS = ("native", "fsdp", "fairscale", "deepspeed")  # DeepSpeed changes torch when it is imported
WATCHDOG = "ring_backends watch"


class NotRunError(Exception):
    """The part cannot run on this machine. The message says why."""


class Cuda:
    """The GPU of this rank, and NCCL.

    Attributes:
        kernel: the kernel of calls that need no fp64.
        dtype, tokens: of the calls in ``host-ahead``.
        timeout: of every ring, in seconds.
        patience: seconds that a survivor waits before it shows that it is alive.
    """

    kernel, dtype, tokens, timeout, patience = "auto", torch.bfloat16, 16_384, 20.0, 90.0

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.synchronize, self.reset_peak = torch.cuda.synchronize, torch.cuda.reset_peak_memory_stats
        self.allocated_bytes, self.peak_bytes = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the GPU."""
        return tensor.to(self.device)

    def delay(self) -> None:
        """Keep the stream busy for about half a second."""
        torch.cuda._sleep(1_000_000_000)

    def check(self, ring: Ring) -> None:
        """Check that hops of this GPU's tensors go over NCCL."""
        backend = dist.get_backend_config(ring.group)
        assert "cuda:nccl" in backend, f"initialize() chose {backend}, not NCCL"


class StandIn:
    """NCCL and a GPU, simulated over gloo on the CPU (:mod:`ring_backends.testing.nccl_stand_in`)."""

    kernel, dtype, tokens, timeout, patience = "math", torch.float32, 512, 8.0, 5.0
    device = torch.device("cpu")

    def __init__(self) -> None:
        from ring_backends.testing import nccl_stand_in

        nccl_stand_in.install()
        self.put, self.synchronize = nccl_stand_in.to_device, nccl_stand_in.synchronize
        self.reset_peak, self.peak_bytes = nccl_stand_in.reset_peak, nccl_stand_in.peak_bytes
        self.allocated_bytes = nccl_stand_in.allocated_bytes

    def delay(self) -> None:
        """Nothing: the simulated GPU is far slower than the host."""

    def check(self, ring: Ring) -> None:
        """Nothing: the ring's group is gloo's."""


Gpu = Cuda | StandIn


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        run: what every rank does.
        ranks: the numbers of ranks to run it with.
        seconds: the hard limit of one run.
        about: one line for ``--list``.
        lost: the rank that the part loses, which reports nothing.
        package: an optional package that it needs.
        needs_gpu: whether the stand-in cannot run it. FSDP frees the memory of tensors that it keeps, and the simulated
            GPU knows only that of tensors that end.
    """

    run: Callable[[Gpu], str]
    ranks: tuple[int, ...]
    seconds: float
    about: str
    lost: int | None = None
    package: str | None = None
    needs_gpu: bool = False


def join(gpu: Gpu, adapter: str = "native", **options: Any) -> Ring:
    """Join a ring of all ranks.

    Raises:
        NotRunError: the adapter's framework is missing or does not work here.
    """
    try:
        module = load_adapter(adapter)
    except AdapterUnavailableError as error:
        raise NotRunError(str(error)) from error
    ring: Ring = module.initialize(timeout=gpu.timeout, **options)
    gpu.check(ring)
    return ring


def call_on(gpu: Gpu, ring: Ring, case: AttentionCase, adapter: str = "native", **options: Any) -> LocalCall:
    """This rank's call of a case, with its tensors on the GPU."""
    name = adapter_modules()[adapter]
    attention = new_attention(name, ring, case, **options)
    call = local_call(name, ring, case, device=str(gpu.device), attention=attention)
    query, key, value = (gpu.put(x.detach()).requires_grad_() for x in call.inputs)
    placed = {name: gpu.put(x) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    return replace(call, query=query, key=key, value=value, grad_out=gpu.put(call.grad_out), options=placed)


def check_alive(gpu: Gpu) -> None:
    """Check that the streams go on."""
    gpu.synchronize()
    assert gpu.put(torch.ones(1000)).sum().item() == 1000


def communicator(gpu: Gpu) -> str:
    """50 hops each way around the ring, without a wait of the host between them."""
    ring = join(gpu)
    assert ring.peers == [rank for rank in range(ring.size) if rank != ring.rank]
    numbers = gpu.put(torch.arange(1 << 18, dtype=torch.int32))
    wrong = gpu.put(torch.zeros((), dtype=torch.int64))
    assert ring.agreement is not None
    for way in (1, -1):
        call = ring.agreement.begin(Configuration({"order of calls": f"hops by {way}"}))
        source, target = (ring.rank - way) % ring.size, (ring.rank + way) % ring.size
        for hop in range(50):
            part = numbers[: (1, 1000, 1 << 18)[hop % 3]]
            sent, arrived = part + (1000 * ring.rank + hop), torch.zeros_like(part)
            ring.exchange(call, {target: sent}, {source: arrived}, hop)
            wrong += (arrived != part + (1000 * source + hop)).sum()
    ring.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} numbers are wrong"
    return "50 hops each way, every number right"


MARKED = (
    AttentionCase(96, (32, 96), (1, 4), 2, 4, 2, 8, is_causal=True, window_lengths=(None, 40), dtype=torch.float64),
    AttentionCase(97, (24, None), (1, 3), 2, 2, 2, 8, is_causal=True, documents="some", dtype=torch.float64),
    AttentionCase(64, (16, 64), (2, 8), 1, 4, 4, 8, head_mode="grouped", masked="random", dtype=torch.float64),
)


def drawn_cases(number: int) -> list[AttentionCase]:
    """The same random cases on every rank."""
    cases: list[AttentionCase] = []

    @seed(1)
    @settings(
        max_examples=number, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(
        attention_cases(
            max_n=100, head_dims=[8, 4], sinks=[False], score_mods=[None], dropout_ps=[0.0], dtypes=[torch.float64]
        )
    )
    def draw(case: AttentionCase) -> None:
        cases.append(case)

    draw()
    return cases


def routes(name: str) -> contextlib.AbstractContextManager[Any]:
    """Let the rows of all branches travel along chains, or along trees."""
    return every_branch_on_trees() if name == "trees" else mock.patch.object(travel, "TREE_SHARE", 0.0)


def random_calls(gpu: Gpu) -> str:
    """Calls in both layouts, along chains and along trees, against the dense reference in fp64."""
    errors = dict.fromkeys(("out", "lse", "grad_query", "grad_key", "grad_value"), 0.0)
    counts, missing = {}, []
    for adapter in ADAPTERS:
        try:
            ring = join(gpu, adapter)
        except NotRunError:
            missing.append(adapter)
            continue
        ways = [(layout, route) for route in ("chains", "trees") for layout in LAYOUTS]
        calls = [(case, *way) for case in MARKED for way in ways]
        calls += [(case, *ways[index % 4]) for index, case in enumerate(drawn_cases(8))]
        for case, layout, route in calls:
            with routes(route):
                check_call(gpu, ring.with_layout(layout), case, adapter, f"{layout}, {route}", errors)
        counts[adapter] = len(calls)
    largest = torch.tensor([*errors.values()], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shown = ", ".join(f"{name} {error:.0e}" for name, error in zip(errors, largest.tolist(), strict=True))
    calls = ", ".join(f"{count} calls of {adapter}" for adapter, count in counts.items())
    return f"{calls}; not importable: {', '.join(missing) or 'none'}; largest errors {shown}"


def check_call(gpu: Gpu, ring: Ring, case: AttentionCase, adapter: str, how: str, errors: dict[str, float]) -> None:
    """Check a call and its backward, and note the largest errors."""
    call = call_on(gpu, ring, case, adapter, kernel="math")
    got = Results(*(None if x is None else x.cpu() for x in call.results()))
    ring.synchronize()
    wanted = call.expected().computed()
    for name in errors:
        error = difference(getattr(got, name), wanted[name])
        assert error <= FP64_TOLERANCE, f"{adapter}, {how}: {name} of {case} is off by {error}"
        errors[name] = max(errors[name], error)


def disagree(gpu: Gpu, changes: dict[str, Any]) -> str:
    """Both ranks have agreed on two calls. Then each makes another one of them."""
    ring = join(gpu)
    calls = [call_on(gpu, ring, case) for case in (SMALL_CASE, replace(SMALL_CASE, **changes))]
    for call in calls:
        call()
        ring.synchronize()
    ended = ending(call_and_wait, ring, calls[ring.rank])
    ended.check(RingMismatchError, within=gpu.timeout + A_MOMENT)
    check_alive(gpu)
    return f"RingMismatchError after {ended.seconds:.1f} s"


def call_and_wait(ring: Ring, call: Callable[[], object], times: int = 1) -> None:
    for _ in range(times):
        call()
    ring.synchronize()


def killed(gpu: Gpu) -> str:
    """A rank is killed at a hop of one of 20 calls."""
    ring = join(gpu)
    call = call_on(gpu, ring, SMALL_CASE)
    call_and_wait(ring, call.results)
    if ring.rank == ODD_RANK:
        inject("killed", 20, call.attention)
    ended = ending(call_and_wait, ring, call.results, 20)
    ended.check(RingPeerError, within=gpu.timeout + A_MOMENT)
    time.sleep(gpu.patience)
    check_alive(gpu)
    return f"RingPeerError after {ended.seconds:.1f} s; alive {gpu.patience:.0f} s later"


def stopped(gpu: Gpu) -> str:
    """A rank stops at a hop. The hosts of the others only look whether their ring has failed."""
    ring = join(gpu)
    call = call_on(gpu, ring, SMALL_CASE)
    call_and_wait(ring, call)
    agreement, threads = ring.agreement, []
    assert agreement is not None
    abort = agreement.connections.abort

    def noted_abort() -> None:
        threads.append(threading.current_thread().name)
        abort()

    def wait_in_vain() -> None:
        call()
        end = time.monotonic() + gpu.timeout + A_MOMENT
        while time.monotonic() < end and not agreement.has_failed:
            time.sleep(0.1)
        ring.check()

    agreement.connections.abort = noted_abort
    if ring.rank == ODD_RANK:
        inject("stopped", 0, call.attention)
    ended = ending(wait_in_vain)
    ended.check(RingPeerError, within=gpu.timeout + A_MOMENT)
    assert threads[:1] == [WATCHDOG], f"the ring was aborted by {threads}"
    check_alive(gpu)
    others = [rank for rank in range(ring.size) if rank != ODD_RANK]
    new = join(gpu, group=dist.new_group(others))
    check_call(gpu, new, SMALL_CASE, "native", "on the new ring", {"out": 0.0, "grad_key": 0.0})
    return f"RingPeerError after {ended.seconds:.1f} s, aborted by the watchdog's thread; a new ring of {others} works"


def stopped_at_first_contact(gpu: Gpu) -> str:
    """A rank stops after the ranks have compared their first call, before they connect to ranks two places away."""
    ring = join(gpu)
    call = call_on(gpu, ring, SMALL_CASE)
    assert ring.agreement is not None
    begin = ring.agreement.begin

    def begin_and_stop(*args: Any, **options: Any) -> Any:
        begin(*args, **options)
        os.kill(os.getpid(), signal.SIGSTOP)

    if ring.rank == ODD_RANK:
        mock.patch.object(ring.agreement, "begin", begin_and_stop).start()
    with every_branch_on_trees(0.0):
        ended = ending(call_and_wait, ring, call)
    ended.check(RingPeerError, within=gpu.timeout + A_MOMENT)
    check_alive(gpu)
    return f"RingPeerError after {ended.seconds:.1f} s; alive"


def train(gpu: Gpu, adapter: str, **options: Any) -> str:
    """Two steps on a ring of two, against one process with dense attention."""
    layout: LayoutKind = "zigzag"
    ring, recipe = join(gpu, adapter, layout=layout), Recipe(dtype=torch.float32, rate=0.02, steps=2)
    name = adapter_modules()[adapter]
    model = make_model("blocks", lambda: new_attention(name, ring, CASE, kernel=gpu.kernel), recipe.dtype, recipe.seed)
    state = load_adapter(adapter).parallelize(model._apply(gpu.put), recipe.make_optimizer, ring, **options)
    states, losses, positions = [state.full_state_dict()], [], gpu.put(ring.positions(CASE.seq_len))
    for step in range(recipe.steps):
        tokens, labels = (gpu.put(ring.shard(x)) for x in batch(layout, step))
        logits = state.model(tokens, positions, CASE.seq_len)
        loss = state.loss(loss_sum(logits, labels), (labels != IGNORED).sum())
        state.backward(loss)
        state.step()
        total = torch.tensor(loss.item() / state.divisor, dtype=torch.float64)
        dist.all_reduce(total)
        losses.append(float(total))
        states.append(state.full_state_dict())
    wanted = train_alone(TWO_OF_TWO, layout, recipe)
    check_moves(states, wanted, 1e-4, adapter)
    alone = make_model("blocks", lambda: DenseAttention(CASE), recipe.dtype, recipe.seed)
    for step in range(recipe.steps):
        alone.load_state_dict(wanted[step])
        tokens, labels = batch(layout, step)
        total = loss_sum(alone(tokens, torch.arange(CASE.seq_len), CASE.seq_len), labels)
        torch.testing.assert_close(losses[step], float(total / (labels != IGNORED).sum()), rtol=1e-5, atol=0)
    return f"losses {', '.join(f'{loss:.4f}' for loss in losses)}, as on one rank"


def batch(layout: LayoutKind, step: int) -> tuple[Tensor, Tensor]:
    """The tokens and labels of a step, [batch, seq]."""
    ((tokens, labels),) = batches(TWO_OF_TWO, layout, step, 1)
    return tokens[0], labels[0]


def cuda_graph(gpu: Gpu) -> str:
    """A batch of send and receive on a communicator of torch, captured and replayed."""
    ring = join(gpu)
    group = dist.new_group(backend="nccl")
    sent, received = (gpu.put(torch.zeros(1 << 20)) for _ in range(2))

    def exchange() -> None:
        operations = [(dist.isend, sent), (dist.irecv, received)]
        works = dist.batch_isend_irecv(
            [dist.P2POp(op, x, group=group, group_peer=1 - ring.rank) for op, x in operations]
        )
        for work in works:
            work.wait()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        exchange()  # connects
    gpu.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        exchange()
    for replay in range(5):
        sent.fill_(10 * replay + ring.rank)
        graph.replay()
        assert bool((received == 10 * replay + 1 - ring.rank).all()), f"replay {replay} received other numbers"
    return "5 replays, every number right"


def host_ahead(gpu: Gpu) -> str:
    """The memory of eight calls that the host launches ahead of the GPU, and of the same with a wait after each."""
    ring = join(gpu)
    case = AttentionCase(gpu.tokens, (gpu.tokens,), (1,), 1, 8, 8, 64, dtype=gpu.dtype)
    call = call_on(gpu, ring, case, kernel=gpu.kernel)
    for _ in range(2):  # the second call makes the memory that the ring keeps
        call_and_wait(ring, call)

    def peak(wait: Callable[[], None]) -> int:
        gpu.synchronize()
        gpu.reset_peak()
        before = gpu.allocated_bytes()
        gpu.delay()
        with torch.no_grad():
            query = call.query
            for _ in range(8):
                query = call.attention(query, call.key, call.value, **call.options)
                wait()
        ring.synchronize()
        gpu.synchronize()
        return gpu.peak_bytes() - before

    waiting, ahead = peak(gpu.synchronize), peak(lambda: None)
    return f"peak {ahead / 2**20:.1f} MiB ahead, {waiting / 2**20:.1f} MiB with waits: {ahead / waiting:.2f} times"


def training(
    adapter: str, about: str, seconds: float = 60, package: str | None = None, needs_gpu: bool = False, **options: Any
) -> Part:
    run, about = partial(train, adapter=adapter, **options), f"two steps of {about}, against one rank"
    return Part(run, (2,), seconds, about, package=package, needs_gpu=needs_gpu)


PARTS: dict[str, Part] = {
    "communicator": Part(communicator, (2, 4), 90, "50 hops of checked numbers each way around the ring"),
    "random-calls": Part(
        random_calls, (4,), 120, "calls with every importable adapter, forward and backward, against fp64"
    ),
    "other-call": Part(
        partial(disagree, changes={"scale": 0.5}), (2,), 60, "ranks make different calls whose hops have equal sizes"
    ),
    "other-size": Part(
        partial(disagree, changes={"batch": 2048}), (2,), 90, "ranks make calls whose hops have different sizes"
    ),
    "killed": Part(killed, (3,), 180, "a rank is killed; the others raise, and are alive 90 s later", lost=ODD_RANK),
    "stopped": Part(
        stopped, (3,), 90, "a rank stops at a hop; the watchdog aborts, and a new ring works", lost=ODD_RANK
    ),
    "stopped-at-first-contact": Part(
        stopped_at_first_contact, (4,), 90, "a rank stops before ranks that are not neighbours connect", lost=ODD_RANK
    ),
    "ddp": training("native", "DDP"),
    "fsdp2": training("fsdp", "fully_shard", package="numpy", needs_gpu=True),
    "fsdp1": training("fsdp", "FullyShardedDataParallel", package="numpy", needs_gpu=True, strategy="fsdp1"),
    **{
        f"zero{stage}": training("deepspeed", f"DeepSpeed's ZeRO {stage}", 90, "deepspeed", zero_stage=stage)
        for stage in (1, 2, 3)
    },
    "fairscale-fsdp": training("fairscale", "FairScale's FSDP", package="fairscale", needs_gpu=True, strategy="fsdp"),
    "cuda-graph": Part(cuda_graph, (2,), 60, "send and receive, captured in a CUDA graph and replayed", needs_gpu=True),
    "host-ahead": Part(host_ahead, (4,), 60, "memory while the host runs ahead of the GPU (reports, never fails)"),
}
