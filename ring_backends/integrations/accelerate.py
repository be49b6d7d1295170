"""Training loops of Hugging Face Accelerate, with the batches of each ring on all of its ranks::

    accelerator = Accelerator()
    ring = attach(accelerator, model)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

The rest of the loop stays as it is. Accelerate replicates or shards the model: DistributedDataParallel, FSDP2 and
DeepSpeed average gradients over all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from ring_backends.adapters import native
from ring_backends.errors import AdapterUnavailableError, importing
from ring_backends.integrations.transformers.whole_batches import put_on_ring, share_parameters
from ring_backends.ring.collectives import agree
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import UlyssesSize
from ring_backends.schedule.layout import LayoutKind

with importing("accelerate cannot be imported", "hf"):
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import recursively_apply

__all__ = ["attach"]


def attach(
    accelerator: Any,
    model: nn.Module,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    ring_size: int | None = None,
    layout: LayoutKind = "contiguous",
    timeout: timedelta | float = timedelta(seconds=300),
    buffer_bytes: int | None = None,
    ulysses_size: UlyssesSize = 1,
    probe: bool = True,
    **options: Any,
) -> Ring:
    """Put a Hugging Face model on rings of an Accelerator's processes. Every process makes this call.

    Call it before ``accelerator.prepare``. After it, the model takes whole batches
    (:func:`~ring_backends.integrations.transformers.use_ring`), and the accelerator treats the ranks of a ring as one
    process of data parallelism: they read the same batches; ``gather``, ``gather_for_metrics`` and ``reduce`` take one
    value per ring, and a prepared scheduler takes one step per ring. ``accelerator.num_processes`` still counts all
    processes; ``ring.data_size`` is the number of rings.

    Args:
        accelerator: an ``accelerate.Accelerator``. If its ParallelismConfig has a cp axis, that axis becomes the ring,
            and Accelerate's own context parallelism is off.
        model: a causal or masked language model of transformers, a token or sequence classifier, or a model without a
            head; also within a ``PeftModel``.
        segment_lengths, dilation_rates: the pattern that takes the place of full attention, as in
            :class:`~ring_backends.DilatedPattern`. Without one, every layer computes the attention that the model's
            configuration says, on all ranks.
        ring_size: number of processes per ring. None is the size of the cp axis, or all processes without one.
        layout: ``"contiguous"`` or ``"zigzag"``.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer, in seconds or as
            a timedelta.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors; None for the default of the device, as in ``initialize``.
        ulysses_size: how many neighbouring ranks exchange rows for heads within a call, as in ``initialize``.
        probe: as in :func:`~ring_backends.integrations.transformers.use_ring`.
        options: of the attention, such as ``window_lengths`` and ``kernel``
            (:class:`~ring_backends.RingDilatedAttention`).

    Returns:
        The ring.

    Raises:
        TypeError, ValueError: an argument is invalid, or the model or the accelerator has a part that is not supported.
        AdapterUnavailableError: this release of accelerate lacks, or has changed, a part that the ring needs. The
            message names it.
    """
    ring = join(accelerator, ring_size, layout, timeout, buffer_bytes, ulysses_size)
    attention = make_attention(segment_lengths, dilation_rates, ring, options)
    share_parameters(ring, model)
    put_on_ring(model, attention, 0.0, probe)
    return ring


def make_attention(
    segment_lengths: Any, dilation_rates: Any, ring: Ring, options: dict[str, Any]
) -> native.RingDilatedAttention:
    """The attention of these arguments of :func:`attach`; full attention without a pattern."""
    if segment_lengths is None and dilation_rates is None:
        segment_lengths, dilation_rates = [None], [1]
    return native.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring, **options)


def join(
    accelerator: Any,
    ring_size: int | None,
    layout: LayoutKind,
    timeout: timedelta | float,
    buffer_bytes: int | None,
    ulysses_size: UlyssesSize,
) -> Ring:
    """Make the rings of an Accelerator's processes, without a model. For the arguments and errors, see :func:`attach`.

    ``use_ring`` then puts a model on the ring. Every process makes this call.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator = {type(accelerator).__name__}: expected an accelerate.Accelerator.")
    if "gather" in vars(accelerator):
        raise ValueError("accelerator: is attached to a ring already; attach every accelerator once.")
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise ValueError(
            "split_batches or dispatch_batches = True: not supported by a ring, whose ranks read whole batches; leave "
            "both out of the DataLoaderConfiguration."
        )
    parallelism: Any = getattr(accelerator, "parallelism_config", None)
    for axis in ("tp", "sp"):
        if getattr(parallelism, f"{axis}_size", 1) > 1:
            raise ValueError(f"{axis}_size = {getattr(parallelism, f'{axis}_size')}: not supported with a ring; use 1.")
    group = None
    if getattr(parallelism, "cp_size", 1) > 1:
        if ring_size not in (None, parallelism.cp_size):
            raise ValueError(
                f"ring_size = {ring_size}: the cp axis of the ParallelismConfig has {parallelism.cp_size} processes, "
                "and becomes the ring; leave ring_size out, or make them equal."
            )
        group, ring_size = accelerator.torch_device_mesh["cp"], None
        # Accelerate's own context parallelism would replace the attention, and drop its masks. FSDP2 reads the mesh.
        accelerator.state.parallelism_config = copy.copy(parallelism)
        accelerator.state.parallelism_config.cp_size = 1
    sizes: dict[str, Any] = {"buffer_bytes": buffer_bytes, "ulysses_size": ulysses_size}
    ring = native.initialize(ring_size, layout, group, timeout, **sizes)
    if accelerator.num_processes != ring.size * ring.data_size:
        raise ValueError(
            f"accelerator.num_processes = {accelerator.num_processes}: {ring.size * ring.data_size} processes were "
            "started, but Accelerate uses others; without GPUs, pass Accelerator(cpu=True), or use_cpu=True to "
            "TrainingArguments."
        )
    if ring.size > 1:
        _read_the_same_batches(accelerator, ring)
        _gather_once_per_ring(accelerator, ring)
        _check(accelerator, ring)
    return ring


def replace_methods(owner: Any, **functions: Any) -> None:
    """Replace methods of one object, by their names.

    Raises:
        AdapterUnavailableError: the object has no such method.
    """
    for name, function in functions.items():
        if not callable(getattr(owner, name, None)):
            raise AdapterUnavailableError(
                f"{type(owner).__name__}.{name}: this release of its library has no such method, which a ring "
                "replaces; use a release that docs/trainer.md lists."
            )
        setattr(owner, name, function)


def _read_the_same_batches(accelerator: Any, ring: Ring) -> None:
    """Distribute batches over the rings instead of the processes."""

    class ByRing(type(accelerator)):  # type: ignore[misc]
        """What the accelerator's own ``prepare_data_loader`` sees instead of the accelerator."""

        num_processes = ring.data_size
        process_index = ring.data_rank
        # Otherwise process 0 would give every process another batch of an iterable data set.
        dispatch_batches = False

        def _prepare_device_mesh(self) -> None:
            """Without a mesh, ``num_processes`` and ``process_index`` decide."""

    by_ring = ByRing.__new__(ByRing)
    by_ring.__dict__ = accelerator.__dict__  # both have the same lists of prepared objects, now and later
    prepare = by_ring.prepare_data_loader

    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        sampler = getattr(data_loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            # Accelerate gives all processes one order, but not if there is one ring.
            seeds = agree(world_ring(ring), "prepare_data_loader", None, [int(torch.randint(2**53, ()))])
            sampler.generator = torch.Generator().manual_seed(int(seeds[0][0]))
        return prepare(data_loader, *args, **kwargs)

    prepare_scheduler = accelerator.prepare_scheduler

    def prepare_by_ring(scheduler: Any) -> Any:
        prepared = prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__, prepared.split_batches, prepared.num_steps = _SchedulerOfRings, True, ring.data_size
        return prepared

    replace_methods(accelerator, prepare_data_loader=prepare_data_loader, prepare_scheduler=prepare_by_ring)


class _SchedulerOfRings(AcceleratedScheduler):  # type: ignore[misc]
    """Takes one step per ring, as Accelerate's own scheduler takes one per process."""

    num_steps: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_linked = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.num_steps if is_linked else 1):
            if not is_linked or self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                super().step(*args, **kwargs)


def _gather_once_per_ring(accelerator: Any, ring: Ring) -> None:
    gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def one_per_ring(gathered: Tensor) -> Tensor:
        parts: Tensor = gathered.unflatten(0, (ring.data_size * ring.size, -1))[:: ring.size]
        return parts.flatten(0, 1)

    def gather_once(tensor: Any) -> Any:
        return recursively_apply(one_per_ring, gather(tensor))

    def gather_tensors(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise ValueError("use_gather_object = True: not supported by a ring; gather tensors.")
        recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)  # TypeError names the type
        return gather_for_metrics(input_data)

    def reduce_once(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(own: Tensor) -> Tensor:
            total = one_per_ring(gather(own.unsqueeze(0))).sum(0, dtype=own.dtype)
            return (total / ring.data_size if reduction == "mean" else total) * scale

        return recursively_apply(reduced, tensor)

    replace_methods(accelerator, gather=gather_once, gather_for_metrics=gather_tensors, reduce=reduce_once)


def _check(accelerator: Any, ring: Ring) -> None:
    """Try what was replaced: the batches of a data loader, and a gathered tensor."""
    loader = accelerator.prepare_data_loader(DataLoader(range(2 * ring.data_size)))  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):  # the iterator of a data loader draws a seed
        batches = [int(batch) for batch in loader]
    accelerator._dataloaders.remove(loader)
    expected = [ring.data_rank, ring.data_rank + ring.data_size]
    expect(f"batches of accelerator.prepare_data_loader on ring {ring.data_rank}", batches, expected)
    gathered = accelerator.gather(torch.tensor([ring.data_rank], device=accelerator.device)).tolist()
    expect("ring numbers from accelerator.gather", gathered, [*range(ring.data_size)])


def expect(what: str, found: object, expected: object) -> None:
    """Check what a library computes.

    Raises:
        AdapterUnavailableError: this release of the library computes something else than a ring expects.
    """
    if found != expected:
        raise AdapterUnavailableError(
            f"{what}: {found} instead of {expected}, so this release of its library counts processes in another way; "
            "use a release that docs/trainer.md lists."
        )
