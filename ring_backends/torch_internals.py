"""Access to torch's internals: private names, dispatch modes, tensors without values, and gradients of one's own.

A private name is looked up when it is needed. If torch has changed, the error names it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torch.utils import _python_dispatch

_MISSING = object()

P = ParamSpec("P")
Result = TypeVar("Result")


def internal(owner: object, name: str, purpose: str) -> Any:
    """Return a private attribute of torch.

    Args:
        owner: a module, class or object of torch.
        purpose: what needs the attribute, for the error.

    Raises:
        RuntimeError: this release of torch has no such attribute.
    """
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"torch {torch.__version__} has no {where}.{name}, which {purpose} needs; install a release of torch that "
            "docs/installation.md lists under Tested releases."
        )
    return found


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place. Inference tensors do not count it."""
    return 0 if tensor.is_inference() else cast(int, internal(tensor, "_version", "noticing a change of a tensor"))


def backward_id() -> int:
    """A number of the backward that autograd is running in this thread, or −1."""
    # torch's own checkpoint relies on this too.
    task_id: int = internal(torch._C, "_current_graph_task_id", "a recomputation in a backward")()
    return task_id


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return backward_id() != -1


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers. A meta tensor and a FakeTensor have only a shape, a dtype and a device."""
    if type(tensor) is Tensor:
        return not tensor.is_meta
    # If the module is not imported, there is no FakeTensor.
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return not tensor.is_meta and not isinstance(tensor, fake)


def mode_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """The mode in which new tensors are of the same kind as ``tensor``: fake, or with values."""
    return contextlib.nullcontext() if has_values(tensor) else getattr(tensor, "fake_mode", contextlib.nullcontext())


# Without the private function, the answer is always true. Callers then take a slower way to the same result.
in_dispatch_mode: Callable[[], bool] = getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: True)
"""Whether a mode such as FakeTensorMode intercepts the operators that this thread calls."""


without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[object]] = getattr(
    _python_dispatch, "_disable_current_modes", contextlib.nullcontext
)
"""Switches off the modes of this thread. Without the private function, the modes see what is called."""


_NO_SPAN = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Shows what is computed within it to torch.profiler, if that is running."""
    return record_function(name) if _is_profiling()() else _NO_SPAN


@cache
def _is_profiling() -> Callable[[], bool]:
    return cast(Callable[[], bool], internal(torch._C._autograd, "_profiler_enabled", "a span of the profiler"))


def untraced(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a function that computes with real tensors, also while a mode such as FakeTensorMode is active.

    A mode intercepts only the operators of its own thread, so the function then runs on another thread.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not in_dispatch_mode():
            return function(*args, **kwargs)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args, **kwargs).result()

    return run


def with_backward(tensor: Tensor, function: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function. ``backward`` maps the gradient of the result to that of ``tensor``."""
    return cast(Tensor, _WithBackward.apply(tensor, function, backward))  # type: ignore[no-untyped-call]


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Callable[[Tensor], Tensor], backward: Any) -> Tensor:
        ctx.map_gradient = backward
        result = function(tensor)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.map_gradient(grad), None, None


def without_base(tensor: Tensor) -> Tensor:
    """Return the same values as a tensor that autograd does not know as a view, without a copy.

    FSDP2 warns of every module that returns a view. Both tensors count changes in place together, so autograd still
    notices a change of what it has saved.
    """
    is_view = tensor._base is not None and torch.is_grad_enabled()
    return cast(Tensor, _WithoutBase.apply(tensor)) if is_view else tensor  # type: ignore[no-untyped-call]


class _WithoutBase(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
