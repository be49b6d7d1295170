"""Finds optimizers that would compute another step on flat parts of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SHAPE = (4, 6)
_STEPS = 2


def check_elementwise(optimizer: torch.optim.Optimizer, what_to_do: str) -> None:
    """Check that an optimizer changes each element of a parameter by itself, as Adam does and Adafactor does not.

    A new optimizer of its class and defaults makes two steps of a small matrix, and of its two halves as vectors. An
    optimizer that cannot be built this way, or does not change the matrix, is not checked.

    Args:
        what_to_do: what the framework does to parameters, and the way out, for the error.

    Raises:
        ValueError: the steps differ.
    """
    options = {**optimizer.defaults, **({"lr": 0.1} if "lr" in optimizer.defaults else {})}
    start = torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1], device="cpu").sin()

    def after_steps(shapes: list[tuple[int, ...]]) -> Tensor:
        given = zip(start.chunk(len(shapes)), shapes, strict=True)
        parts = [nn.Parameter(part.clone().view(shape)) for part, shape in given]
        made = type(optimizer)(parts, **options)
        for step in range(_STEPS):
            for part, gradient in zip(parts, (start * 7 + step).cos().chunk(len(parts)), strict=True):
                part.grad = gradient.clone().view(part.shape)
            made.step()
        return torch.cat([part.detach().flatten() for part in parts])

    try:
        whole = after_steps([_SHAPE])
    except Exception:  # the class has arguments or needs of its own
        return
    try:
        is_same = torch.allclose(after_steps([(start.numel() // 2,)] * 2), whole, rtol=1e-5, atol=1e-6)
    except Exception:  # such as one that takes matrices only
        is_same = False
    if not is_same:
        name = type(optimizer).__name__
        raise ValueError(
            f"make_optimizer returned {name}: it updates an element of a parameter by looking at other elements, and "
            f"{what_to_do}, or use an optimizer such as AdamW."
        )
