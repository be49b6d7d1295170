"""Checkpoints in the format of torch.distributed.checkpoint: the states of model and optimizer, by names.

They do not depend on how a framework distributes the states, so frameworks read the checkpoints of each other. If every
rank holds whole tensors, rank 0 writes, and every rank reads by itself. Otherwise all ranks write and read together.

A load runs no code from a checkpoint. torch's own reader unpickles the metadata and all values that are not tensors,
and so runs any code in them.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
    CheckpointException,
    FileSystemReader,
    _nested_dict,
    load,
    save,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ring_backends.errors import RingPeerError
from ring_backends.torch_internals import internal
from ring_backends.training.checkpoint_files import is_not_caused_by_content

FORMAT = "torch.distributed.checkpoint"


def write_state(folder: Path, state: dict[str, Any], *, is_sharded: bool) -> None:
    """Write ``state`` into a folder.

    Args:
        state: nested dicts and lists.
        is_sharded: whether all ranks make this call, each with its shards. Otherwise one rank makes it.
    """
    with _errors_of_torch(is_sharded):
        save(state, checkpoint_id=folder, no_dist=not is_sharded)


def read_state(folder: Path, model: Mapping[str, Any], device: torch.device, *, is_sharded: bool) -> dict[str, Any]:
    """Read what :func:`write_state` wrote, with any number of ranks. Every rank makes this call.

    Args:
        model: the state of the model. Its tensors are overwritten. The optimizer's states of a sharded tensor are
            sharded like the tensor; others are whole, on the CPU.
        device: the device of other tensors, such as a learning rate.
        is_sharded: whether the ranks read together.
    """
    reader = CheckpointReader(folder)
    metadata = reader.read_metadata()
    read: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        read[key] = None
        if isinstance(stored, TensorStorageMetadata):
            read[key] = _new_tensor(metadata.planner_data[key], stored, model, device)
    with _errors_of_torch(is_sharded):
        load(read, storage_reader=reader, planner=CheckpointPlanner(), no_dist=not is_sharded)
    unflatten = internal(_nested_dict, "unflatten_state_dict", "loading a checkpoint")
    nested: dict[str, Any] = unflatten(read, metadata.planner_data)
    return nested


def _new_tensor(
    path: tuple[Any, ...], stored: TensorStorageMetadata, model: Mapping[str, Any], device: torch.device
) -> Tensor:
    """The tensor into which a stored one is read.

    Args:
        path: the keys of the stored tensor in the nested state.
    """
    dtype = stored.properties.dtype
    if path[0] == "model" and isinstance(tensor := model.get(path[-1]), Tensor):
        return tensor
    if path[:2] == ("optimizer", "state"):
        like = model.get(path[2])
        if isinstance(like, Tensor) and type(like) is not Tensor and like.shape == stored.size:
            return torch.empty_like(like, dtype=dtype)
        device = torch.device("cpu")
    return torch.empty(stored.size, dtype=dtype, device=device)


@contextlib.contextmanager
def _errors_of_torch(is_sharded: bool) -> Iterator[None]:
    """Convert torch's CheckpointException, which is a BaseException but not an Exception.

    Raises:
        BaseException: the error of this rank, if the content of the checkpoint did not cause it, such as
            KeyboardInterrupt or an OSError.
        RingPeerError: another rank raised such an error.
        RuntimeError: otherwise.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a rank that writes or reads alone
            yield
    except CheckpointException as failure:
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        own = errors.get(dist.get_rank() if is_sharded else 0)
        if own is not None and is_not_caused_by_content(own):
            raise own from failure
        by_rank = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
        message = f"torch.distributed.checkpoint failed ({by_rank})"
        if any(is_not_caused_by_content(error) for error in errors.values()):
            raise RingPeerError(
                f"{message}; the checkpoint is not the cause. Look at the logs of these ranks."
            ) from failure
        raise RuntimeError(message) from failure


_PLAIN = {
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # the module of paths in Python 3.13
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")


class CheckpointReader(FileSystemReader):
    """A reader that accepts only descriptions of tensors as metadata.

    Raises:
        ValueError: the metadata holds other objects, or is truncated.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with Path(self.path, ".metadata").open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"path = {str(self.path)!r}: .metadata is not checkpoint metadata, or is truncated: {error}."
            ) from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"path = {str(self.path)!r}: .metadata is not checkpoint metadata.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckpointPlanner(DefaultLoadPlanner):
    """A planner that accepts only values that ``torch.load(weights_only=True)`` accepts."""

    def create_local_plan(self) -> LoadPlan:
        # torch's planner mistakes a checkpoint for one of torch 2.3 if this rank has no shard of some parameter.
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        super().load_bytes(read_item, value)
