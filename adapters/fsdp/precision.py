"""Mixed precision by FSDP that does not round a model's inputs.

FSDP casts all floating-point inputs of a model to the dtype of its parameters. That suits activations, but in bf16 only
integers up to 256 are all exact: larger positions, coordinates, counts and ids would silently become others. So FSDP
is told to cast nothing, and fp32 tensors meet bf16 parameters:

- Inputs of the model stay as they are. If one of them is a floating-point tensor of another dtype than bf16, the call
  runs under autocast, which casts features where a layer multiplies them. Models of token ids have no such input, and
  compute in bf16 throughout: autocast would compute norms in fp32, and store their results.
- The first argument of a block is its activation, and is cast, because the model may have added an fp32 buffer to it,
  such as a table of sines. The other arguments stay as they are, since they may be positions.
- The input of a norm is cast too. On CPUs, torch refuses fp32 rows with bf16 weights, also under autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ring_backends.torch_internals import internal
from ring_backends.training.reducer import device_of


def keep_inputs(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Let a model and its blocks compute in ``dtype`` without a cast of the model's inputs. Call this before sharding.

    Args:
        dtype: the dtype of the parameters in the forward. FSDP must not cast inputs.
    """
    model.forward = _AutocastOfOtherDtypes(model, dtype)
    norms = [part for part in model.modules() if isinstance(part, _NORMS)]
    for part in (*blocks, *norms):
        part.register_forward_pre_hook(functools.partial(_cast_first_argument, dtype), with_kwargs=True)


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _AutocastOfOtherDtypes:
    """Replaces a model's forward. A call with floating-point inputs of another dtype than ``dtype`` is autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        functools.update_wrapper(self, model.forward)
        self._forward, self._model, self._dtype = model.forward, model, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = internal(_pytree, "tree_leaves", "a search for tensors in a model's inputs")((args, kwargs))
        if any(_is_other(leaf, self._dtype) for leaf in leaves):
            with torch.autocast(device_of(self._model).type, self._dtype):
                return self._forward(*args, **kwargs)
        return self._forward(*args, **kwargs)


def _cast_first_argument(dtype: torch.dtype, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook that casts the floating-point tensors of a call's first argument."""
    cast = functools.partial(
        internal(_pytree, "tree_map", "a cast of a block's input"),
        lambda leaf: leaf.to(dtype) if _is_other(leaf, dtype) else leaf,
    )
    if args:
        return (cast(args[0]), *args[1:]), kwargs
    return args, {name: cast(value) if index == 0 else value for index, (name, value) in enumerate(kwargs.items())}


def _is_other(leaf: object, dtype: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
