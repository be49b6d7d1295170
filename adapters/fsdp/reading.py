"""Read a directory of torch.distributed.checkpoint without running code from it.

torch's own reader unpickles the metadata and all values that are not tensors, and so runs any code in them.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

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
