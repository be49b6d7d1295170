"""The cross entropy of a language model in chunks of rows, so that the logits of all rows never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def cross_entropy_sum(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The sum of the cross entropies of rows, in fp32 (fp64 if the logits are).

    Args:
        logits: […, vocabulary].
        labels: int64 […].
        options: of :func:`torch.nn.functional.cross_entropy`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, labels.to(logits.device).flatten(), reduction="sum", **options)


@torch.compiler.disable(reason="it needs hooks of graph nodes")  # type: ignore[untyped-decorator]
def chunked_cross_entropy(
    rows: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    chunk_rows: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum of the cross entropies of ``head(rows)``, with the logits of at most ``chunk_rows`` rows at a time.

    The backward computes the logits of each chunk again. It costs one more product with the weight of the head. It adds
    the gradients of the head's parameters over the chunks in fp32, and rounds the sums to bf16 or fp16 at the end, if
    the head computes in that dtype. These sums take the memory of the head's parameters in fp32.
    :func:`torch.compile` breaks the graph at this function.

    Args:
        rows: [batch, local seq, features], the rows that enter the model's head.
        head: maps rows [n, features] to logits [n, vocabulary], such as ``model.lm_head``.
        labels: int64 [batch, local seq].
        chunk_rows: number of rows whose logits exist at a time.
        ignore_index: label of the rows without a loss.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar in fp32 (fp64 if the logits are). Pass it to ``TrainingState.loss``, with the number of labels
        that are not ``ignore_index``.

    Raises:
        ValueError: ``labels`` and ``rows`` have different shapes, or ``chunk_rows`` is below 1.
    """
    if labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"labels is {[*labels.shape]} and rows is {[*rows.shape]}: expected one label per row, "
            f"{[*rows.shape[:-1]]}."
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows = {chunk_rows}: must be at least 1.")

    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def loss_of(some_rows: Tensor, some_labels: Tensor) -> Tensor:
        return cross_entropy_sum(head(some_rows), some_labels, **options)

    losses, sums = [], _SumsOverChunks()
    for part in zip(rows.flatten(0, -2).split(chunk_rows), labels.flatten().split(chunk_rows), strict=True):
        losses.append(checkpoint(loss_of, *part, use_reentrant=False))
        sums.add_chunk(losses[-1], part[0])
    return torch.stack(losses).sum()


class _SumsOverChunks:
    """Adds the gradients of what the head captures, such as its weight, over the chunks in fp32.

    Autograd would add them in the dtype of each gradient. Hooks of the graph's nodes hold the gradients of all chunks
    back, and pass on their sum instead of the last one.
    """

    def __init__(self) -> None:
        self._nodes: set[Node] = set()
        self._sums: dict[tuple[object, int], _Sum] = {}

    def add_chunk(self, loss: Tensor, rows: Tensor) -> None:
        """Hold back the gradients that the backward of ``loss`` sends out of its chunk, but not those of ``rows``."""
        chunk = [] if loss.grad_fn is None else [loss.grad_fn]
        seen = {*chunk}
        for node in chunk:  # the list grows
            for index, (target, output) in enumerate(node.next_functions):
                if target is None or target is rows.grad_fn:
                    continue
                parameter = getattr(target, "variable", None)  # FSDP1 may give it a new node in each chunk
                if parameter is not None or target in self._nodes:
                    place = target if parameter is None else id(parameter), output
                    total = self._sums.setdefault(place, _Sum())
                    total.expected += 1
                    node.register_hook(partial(total.hold_back, index))
                elif target not in seen:
                    seen.add(target)
                    chunk.append(target)
        self._nodes |= seen


class _Sum:
    """The sum of the gradients of one tensor. It holds no node of the graph, whose hooks hold it."""

    def __init__(self) -> None:
        self.expected = self._arrived = 0
        self._total: Tensor | None = None

    def hold_back(self, index: int, grads: Sequence[Tensor | None], of_outputs: object) -> tuple[Tensor | None, ...]:
        """A hook of a node: the node's gradients, of which that at ``index`` is held back or becomes the sum."""
        grad, total = grads[index], self._total
        if grad is not None:
            if total is None:
                total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total = total + grad if torch.is_grad_enabled() else total.add_(grad)
        self._total, self._arrived = total, self._arrived + 1
        passed_on = None
        if self._arrived == self.expected:
            passed_on = total if grad is None or total is None else total.to(grad.dtype)
            self._total, self._arrived = None, 0
        return *grads[:index], passed_on, *grads[index + 1 :]
