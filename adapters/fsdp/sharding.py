"""How each FSDP strategy shards a model over data × ring, and shards a probe module in the same way.

FSDP reduces a gradient over the ranks that shard its parameter. These must be all ranks of data × ring, since each has
the gradient of its own part of a sequence only. Otherwise the replicas drift apart without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from ring_backends.adapters.fsdp.precision import keep_inputs
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal
from ring_backends.training.reducer import device_of

Strategy = Literal["fsdp2", "hsdp", "fsdp1"]


class Sharding(NamedTuple):
    """How a model is sharded.

    Attributes:
        shard: (model, blocks of it) -> the sharded model.
        probes: functions that shard a module of one parameter in the way that ``shard`` shards a part of the model.
            They keep the parameter's dtype: a dtype of lower precision may not represent the number of ranks.
    """

    shard: Callable[[nn.Module, Sequence[nn.Module]], nn.Module]
    probes: Sequence[Callable[[nn.Module], nn.Module]]


def fully_shard_sharding(
    model: nn.Module,
    ring: Ring,
    strategy: Strategy,
    mixed_precision: torch.dtype | None,
    options: Mapping[str, Any],
) -> Sharding:
    """Sharding with ``fully_shard`` over a mesh of the whole world: one axis, or replicas × shards."""
    world_size = dist.get_world_size()
    mesh = options.get("mesh")
    if mesh is None:
        mesh = _mesh(device_of(model).type, ring, strategy)
    if mesh.size() != world_size:
        raise ValueError(
            f"mesh = {mesh}: has {mesh.size()} of the {world_size} ranks of data × ring. Gradients would be reduced "
            "over those ranks only, and the replicas would drift apart; leave mesh out, or pass a mesh of all ranks "
            "(one axis, or two: replicas × shards)."
        )
    if "mp_policy" in options and mixed_precision is not None:
        raise ValueError(f"mp_policy and mixed_precision = {mixed_precision} are both given: leave one of them out.")
    reduce_dtype = mixed_precision and torch.float32
    policy = options.get("mp_policy") or MixedPrecisionPolicy(mixed_precision, reduce_dtype, cast_forward_inputs=False)
    _refuse_ignored(options.get("ignored_params") or (), "ignored_params")

    def shard(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        broadcast_from_rank0(module)
        if mixed_precision is not None:
            keep_inputs(module, blocks, mixed_precision)
        inside_out = reversed(list(module.modules()))
        for part in (part for part in inside_out if part is module or part in blocks):
            fully_shard(part, **{**options, "mesh": mesh, "mp_policy": policy})
        return module

    def probe(module: nn.Module) -> nn.Module:
        own_dtype = replace(policy, param_dtype=None, reduce_dtype=None)
        fully_shard(module, **{**options, "mesh": mesh, "mp_policy": own_dtype, "ignored_params": None})
        return module

    return Sharding(shard, [probe])


def _mesh(device_type: str, ring: Ring, strategy: Strategy) -> DeviceMesh:
    """For ``"fsdp2"`` a mesh of one axis; for ``"hsdp"`` a mesh of replicas × shards, with one replica per ring."""
    ranks = torch.arange(dist.get_world_size(), device="cpu")
    if strategy == "fsdp2":
        return DeviceMesh(device_type, ranks, mesh_dim_names=("data_and_ring",))
    if ring.order:
        ranks = torch.tensor(ring.order, device="cpu")
    # Sorted, as the mesh's process groups are: a rank's index on the axis must be its rank in the axis's group.
    replicas = ranks.view(ring.data_size, ring.size).sort().values
    return DeviceMesh(device_type, replicas, mesh_dim_names=("replicas", "shards"))


def fsdp1_sharding(model: nn.Module, mixed_precision: torch.dtype | None, options: Mapping[str, Any]) -> Sharding:
    """Sharding with FullyShardedDataParallel."""
    policy = None
    if mixed_precision is not None:
        policy = MixedPrecision(mixed_precision, torch.float32, cast_root_forward_inputs=False)
    ignored = [
        parameter
        for name in ("ignored_modules", "ignored_states")
        for entry in options.get(name) or ()
        for parameter in (entry.parameters() if isinstance(entry, nn.Module) else (entry,))
    ]
    _refuse_ignored(ignored, "ignored_modules or ignored_states")
    for name, parameter in model.named_parameters():
        span = 1 + sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if span != parameter.numel():
            raise ValueError(
                f"parameter {name} of model has strides {parameter.stride()}: FSDP1 reads its memory as a whole, with "
                "the gaps; assign parameter.data.contiguous(), or use another adapter."
            )
    # Without device_id FSDP queries CUDA. use_orig_params allows parameter groups and frozen parameters.
    options = {"device_id": device_of(model), "use_orig_params": True, **options, "mixed_precision": policy}

    def shard(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        broadcast_from_rank0(module)
        if mixed_precision is not None:
            keep_inputs(module, blocks, mixed_precision)
        by_block = CustomPolicy(lambda part: any(part is block for block in blocks))
        return FullyShardedDataParallel(module, **{"auto_wrap_policy": by_block, **options})

    def probe(module: nn.Module) -> nn.Module:
        of_model = ("auto_wrap_policy", "param_init_fn", "ignored_modules", "ignored_states")
        own_dtype = {} if policy is None else {"mixed_precision": replace(policy, param_dtype=None, reduce_dtype=None)}
        kept = {name: option for name, option in options.items() if name not in of_model}
        return FullyShardedDataParallel(module, **{**kept, **own_dtype})

    return Sharding(shard, [probe])


def existing_sharding(model: FullyShardedDataParallel) -> Sharding:
    """The sharding of a model that FullyShardedDataParallel already wraps. ``shard`` wraps nothing again.

    There is one probe for each pair of process group and sharding strategy in the model. Ignored parameters and the
    process group of the replicas are private attributes of FSDP.
    """
    parts = FullyShardedDataParallel.fsdp_modules(model)
    for part in parts:
        _refuse_ignored(
            internal(part, "_ignored_params", "a FullyShardedDataParallel"),
            "a FullyShardedDataParallel's ignored_modules or ignored_states",
        )

    def probe_like(part: FullyShardedDataParallel) -> Callable[[nn.Module], nn.Module]:
        group = part.process_group
        return lambda module: FullyShardedDataParallel(
            module,
            process_group=cast(Any, (group, _replicas(part)) if _is_hybrid(part) else group),
            sharding_strategy=part.sharding_strategy,
            mixed_precision=replace(part.mixed_precision, param_dtype=None, reduce_dtype=None),
            device_id=device_of(model),
            use_orig_params=True,
        )

    def broadcast_within_replicas(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        for part in parts:
            replicas = _replicas(part) if _is_hybrid(part) else part.process_group
            if _is_hybrid(part) or part.sharding_strategy == ShardingStrategy.NO_SHARD:
                inner = [other for other in FullyShardedDataParallel.fsdp_modules(part) if other is not part]
                inner_parameters = {id(parameter) for other in inner for parameter in other.parameters()}
                own = [parameter for parameter in part.parameters() if id(parameter) not in inner_parameters]
                broadcast_storages(own, replicas)
        return module

    kinds = {(part.process_group, part.sharding_strategy): part for part in parts}
    return Sharding(broadcast_within_replicas, [probe_like(part) for part in kinds.values()])


def _is_hybrid(part: FullyShardedDataParallel) -> bool:
    return part.sharding_strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _replicas(part: FullyShardedDataParallel) -> dist.ProcessGroup:
    """The process group over which a hybrid FullyShardedDataParallel replicates."""
    return cast(dist.ProcessGroup, internal(part, "_inter_node_pg", "a hybrid FullyShardedDataParallel"))


def _refuse_ignored(parameters: Iterable[nn.Parameter], name: str) -> None:
    if any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"{name} contains trainable parameters: FSDP would not reduce their gradients, and the replicas would "
            "drift apart; leave them out, or freeze them with requires_grad_(False)."
        )


def refuse_sharded_parts(model: nn.Module) -> None:
    """Refuse a model that ``fully_shard`` has sharded, or that FullyShardedDataParallel wraps only in part."""
    for name, part in model.named_modules():
        place = f"model.{name}" if name else "model"
        if isinstance(part, FSDPModule):
            raise ValueError(
                f"{place} is already sharded by fully_shard: parallelize() calls fully_shard itself; "
                "pass the plain model, and the arguments of fully_shard as framework options (mesh=, mp_policy=)."
            )
        if isinstance(part, FullyShardedDataParallel) and not isinstance(model, FullyShardedDataParallel):
            raise ValueError(
                f"{place} is a FullyShardedDataParallel, but the whole model is not: the gradients of the other "
                "parameters would not be reduced; wrap the model too, or pass it without any wrapping."
            )


def check_blocks(blocks: Sequence[nn.Module] | None, model: nn.Module) -> Sequence[nn.Module]:
    """The user's blocks after a check, or the blocks that :func:`find_blocks` finds."""
    if blocks is None:
        return find_blocks(model)
    inside = {id(module) for module in model.modules()} - {id(model)}
    uses = _uses(model)
    for block in blocks:
        if id(block) not in inside:
            raise ValueError(
                f"blocks has a {type(block).__name__} that is not a submodule of the model: pass submodules of "
                "the model, or leave blocks out."
            )
        if not _has_its_own_parameters(block, uses):
            raise ValueError(
                f"blocks has a {type(block).__name__} with a parameter that other modules use too: it would be sharded "
                "twice; leave that block out."
            )
    return blocks


def broadcast_from_rank0(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. FSDP would otherwise shard a mixture of the ranks' models."""
    broadcast_storages([*model.parameters(), *model.buffers()], dist.group.WORLD)


def broadcast_storages(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors by their storages, since tensors may be strided and may overlap."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for storage in storages.values():
        if storage.nbytes():
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            dist.broadcast(memory, group_src=0, group=group)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """A model's repeated modules: the outermost modules of one class in an nn.ModuleList or nn.Sequential.

    Each of them occurs once and shares no parameters with other modules, so that it can be sharded by itself.
    """
    uses = _uses(model)
    blocks = {id(block): block for block in _repeated(model)}.values()  # a list with two names is found twice
    return [block for block in blocks if uses[id(block)] == 1 and _has_its_own_parameters(block, uses)]


def _has_its_own_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    """Whether no module outside of a block uses its parameters, or holds a module of it."""
    return all(uses[part] == count for part, count in _uses(block).items())


def _uses(model: nn.Module) -> Counter[int]:
    """How often the modules of a model use each parameter, and hold each module inside it, by id."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module.parameters(recurse=False)))
        # Unlike children(), a list also yields a module that it holds twice.
        uses.update(map(id, module if isinstance(module, _SEQUENCES) else module.children()))
    return uses


_SEQUENCES = (nn.ModuleList, nn.Sequential)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    is_sequence = isinstance(module, _SEQUENCES)
    classes = Counter(map(type, children))
    for child in children:
        # A layer without children is not a block: the model may use its parameters without calling it.
        has_parts = any(True for _ in child.children())
        if is_sequence and has_parts and classes[type(child)] > 1 and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _repeated(child)
