"""The gradient reducers of frameworks: their divisor, the order of gradients, unused parameters, autocast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils import _pytree

from ring_backends.ring.collectives import agree
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import in_backward, internal


def measure_divisor(world: Ring, reduced: Callable[[float], float]) -> float:
    """Measure the number by which a framework's reducer divides, by sending known gradients through it.

    Args:
        world: the ring of all ranks.
        reduced: sends this rank's gradient of one parameter through the framework's reducer, and returns the result.

    Raises:
        RuntimeError: the ranks get different gradients, so that replicas would drift apart.
    """
    values = [value for (value,) in agree(world, "measure_divisor", None, [reduced(float(world.rank + 1))])]
    if not max(values) - min(values) <= 1e-6 * abs(values[0]):
        raise RuntimeError(
            f"the ranks get different gradients from the reducer ({values} for one parameter), so replicas would drift "
            "apart: the reducer must cover all ranks of data × ring; do not restrict its process group."
        )
    return world.size * (world.size + 1) / 2 / values[0]


def check_device(device: torch.device) -> None:
    """Refuse a model on a device whose gradients torch.distributed cannot reduce. Without a world, it reduces none.

    Raises:
        ValueError: torch.distributed has no backend for tensors on the device.
    """
    if device.type in ("cpu", "cuda", "meta") or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    config, backend = dist.get_backend_config(), _OTHER_BACKENDS.get(device.type)
    found = dict(part.split(":") for part in config.split(",")).get(device.type, "gloo")
    if found == "gloo":  # torch lists it for MPS, but it takes CPU and CUDA tensors only
        way_out = "train on CPUs or CUDA, or on one rank"
        if backend is not None:
            way_out = (
                f'call torch.distributed.init_process_group("cpu:gloo,{device.type}:{backend}") before initialize()'
            )
        raise ValueError(
            f"model is on {device}, and torch.distributed, initialized with {config}, cannot reduce gradients there: "
            f"{way_out}."
        )


_OTHER_BACKENDS = {"xpu": "xccl", "hpu": "hccl"}


def probe(device: torch.device, gradient: float) -> tuple[nn.Linear, Tensor]:
    """A module with one weight, which is 0, and an input that gives the weight the gradient ``gradient``.

    Always in fp32: a default dtype of lower precision may not represent the number of ranks.
    """
    module = nn.Linear(1, 1, bias=False, device=device, dtype=torch.float32)
    nn.init.zeros_(module.weight)
    return module, torch.full((1, 1), gradient, device=device, dtype=torch.float32)


def fill_missing_gradients(parameters: Iterable[Tensor], sparse: Collection[int] = ()) -> None:
    """Give a gradient of zeros to trained parameters that have none. Another rank may have used them.

    Args:
        sparse: the ``id`` of each parameter whose gradient is sparse.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            is_sparse = id(parameter) in sparse
            parameter.grad = _empty_sparse_gradient(parameter) if is_sparse else torch.zeros_like(parameter)


def sparse_parameters(model: nn.Module) -> set[int]:
    """The ``id`` of each parameter whose gradient is sparse, as DistributedDataParallel finds them."""
    embeddings = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    return {id(part.weight) for part in embeddings if part.sparse}


def nodes_behind(loss: Tensor, outside: Collection[Node | None] = ()) -> list[Node]:
    """The nodes of the graph behind ``loss``, its own first, without those ``outside`` and what lies behind them."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*nodes}
    for node in nodes:  # the list grows
        new = {*_following(node)}.difference(seen, outside)
        seen |= new
        nodes += new
    return nodes


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _sequence_number(node: Node) -> int:
    """The engine runs nodes in descending order of these numbers, which is the reverse order of the forward.

    Before a node run only nodes with higher numbers, and of the nodes that are ready, the one with the highest number
    runs first.
    """
    return cast(int, internal(node, "_sequence_nr", "the order of a backward")())


def parameters_in_backward(loss: Tensor, names: Mapping[int, str]) -> list[str]:
    """The names of the parameters behind ``loss``, in the order in which its backward gives them gradients.

    The engine accumulates a gradient once the last node that contributes to it has run. Operations that a backward
    recomputes, as in reentrant activation checkpointing, are not part of the graph.

    Args:
        names: names of parameters, by ``id``. Others are left out.
    """
    last: dict[str, int] = {}
    for node in nodes_behind(loss):
        for following in _following(node):
            name = names.get(id(getattr(following, "variable", None)))
            if name is not None:
                last[name] = min(_sequence_number(node), last.get(name, _sequence_number(node)))
    # Parameters of one node keep the order of ``names``, since the search for nodes has no fixed order.
    return sorted((name for name in names.values() if name in last), key=lambda name: -last[name])


def is_eager_forward() -> bool:
    """Whether this is an eager forward: neither a compiled graph nor a recomputation within a backward."""
    return not torch.compiler.is_compiling() and not in_backward()


_PART = "ring_backends: part of the model"


def mark_outputs(name: str, part: nn.Module, inputs: object, outputs: object) -> None:
    """A forward hook that records a part's name in the graph nodes of its outputs."""
    if not torch.is_grad_enabled() or not is_eager_forward():
        return
    is_tensor = isinstance(outputs, Tensor)
    leaves = internal(_pytree, "tree_leaves", "a search for tensors in a module's outputs")
    for output in (outputs,) if is_tensor else leaves(outputs):
        if isinstance(output, Tensor) and output.grad_fn is not None:
            cast(dict[Any, Any], output.grad_fn.metadata).setdefault(_PART, []).append(name)


def modules_in_backward(loss: Tensor) -> list[str]:
    """The names of the marked parts of a model, in the order in which the backward of ``loss`` reaches them."""
    marked = ((node, cast(dict[Any, Any], node.metadata).get(_PART, ())) for node in nodes_behind(loss))
    by_number = sorted((-_sequence_number(node), names) for node, names in marked if names)
    found = (name for _, names in by_number for name in names)
    return [name or "the whole model" for name in dict.fromkeys(found)]


class UnusedParameters:
    """Tells a reducer that waits for every parameter which parameters a backward has not used.

    DistributedDataParallel reduces in hooks of the backward. If a rank does not use a parameter, the reduction would
    never end. This happens, for example, if none of a rank's tokens went to an expert.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sparse = sparse_parameters(model)
        self._reached: set[int] = set()
        # Hooks of the nodes, not of the tensors. Like the reducer's hooks they also run for an undefined gradient.
        self._nodes: list[Node] = [get_gradient_edge(parameter).node for parameter in self._parameters]
        for index, node in enumerate(self._nodes):
            node.register_hook(partial(self._reach, index))

    def _reach(self, index: int, *_: object) -> None:
        self._reached.add(index)

    def begin(self) -> None:
        """Call this before a backward."""
        self._reached.clear()

    def end(self) -> None:
        """Call this after the backward. It runs the reducer's hooks of unused parameters without a gradient."""
        unused = [parameter for index, parameter in enumerate(self._parameters) if index not in self._reached]
        if not unused:
            return
        is_sparse = [id(parameter) in self._sparse for parameter in unused]
        # Without the hooks that users registered on these tensors by ``register_hook``.
        purpose = "a step that disables hooks of parameters"
        hooks = [internal(parameter, "_backward_hooks", purpose) or {} for parameter in unused]
        kept = [dict(own) for own in hooks]
        for own in hooks:
            own.clear()
        try:
            _NoGradient.apply(is_sparse, *unused).backward()  # type: ignore[no-untyped-call]
        finally:
            for own, of_users in zip(hooks, kept, strict=True):
                own.update(of_users)


class _NoGradient(torch.autograd.Function):
    """A function of some parameters that gives them no gradient, or an empty sparse one."""

    @staticmethod
    def forward(ctx: Any, is_sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.is_sparse, ctx.parameters = is_sparse, parameters
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.is_sparse, ctx.parameters, strict=True)
        return None, *(_empty_sparse_gradient(parameter) if is_sparse else None for is_sparse, parameter in pairs)


def _empty_sparse_gradient(parameter: Tensor) -> Tensor:
    """A sparse gradient without entries, of the parameter's shape."""
    places = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(places, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)


class Autocast(nn.Module):
    """Runs a module under autocast. Parameters and gradients keep their dtype.

    It is a wrapper instead of a replaced ``forward``, so that it can be copied and pickled.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_of(self.module).type, self.dtype):
            return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def under_autocast(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module, under autocast unless ``dtype`` is None."""
    return module if dtype is None else Autocast(module, dtype)


def check_mixed_precision(dtype: object, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a dtype for mixed precision that is not allowed; None is.

    Raises:
        TypeError, ValueError: ``dtype`` is something else.
    """
    names = " or ".join(map(str, allowed))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"mixed_precision = {dtype!r}: expected {names}, or None for the model's own dtype.")
    if dtype is not None and dtype not in allowed:
        raise ValueError(f"mixed_precision = {dtype}: must be {names} with this adapter, or None.")


def new_scaler(device: torch.device, world: Ring) -> torch.amp.GradScaler:
    """Torch's scaler of the loss. Over several ranks, a gradient that is not finite on one of them counts for all."""
    if world.size == 1:
        return torch.amp.GradScaler(device.type)
    return ShardedGradScaler(device.type, process_group=dist.group.WORLD)


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradient by the scale of the loss, and adapt the scale. Returns whether the gradient is finite.

    If it is not finite on some rank, all ranks clear it.
    """
    scale = scaler.get_scale()
    scaler.unscale_(optimizer)
    scaler.update()
    is_finite = scaler.get_scale() >= scale
    if not is_finite:
        optimizer.zero_grad(set_to_none=True)
    return is_finite


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
