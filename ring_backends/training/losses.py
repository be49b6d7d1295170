"""The cross entropy of a language model in chunks of rows, so that the logits of all rows never exist at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ring_backends.schedule.checks import check_integer
from ring_backends.torch_internals import backward_id
from ring_backends.training.reducer import nodes_behind


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

    If the head is sharded as a unit of its own, as with ZeRO-3 or among the ``blocks`` of FSDP, every chunk gathers its
    weight. Then all ranks need the same number of chunks, so pad the sequences, with labels that are ignored, until the
    ranks have equally many rows.

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
        ValueError: ``labels`` and ``rows`` have different shapes, ``labels`` is not int64, or ``chunk_rows`` is below
            1.
        TypeError: ``chunk_rows`` is not an int.
    """
    if labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"labels is {[*labels.shape]} and rows is {[*rows.shape]}: expected one label per row, "
            f"{[*rows.shape[:-1]]}."
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels is {labels.dtype}: expected int64; convert it with .long().")
    check_integer("chunk_rows", chunk_rows, 1)

    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def loss_of(some_rows: Tensor, some_labels: Tensor) -> Tensor:
        return cross_entropy_sum(head(some_rows), some_labels, **options)

    parts = [*zip(rows.flatten(0, -2).split(chunk_rows), labels.flatten().split(chunk_rows), strict=True)]
    losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
    _add_in_fp32(losses, parts[0][0].grad_fn)
    return torch.stack(losses).sum()


def _add_in_fp32(losses: Sequence[Tensor], rows: Node | None) -> None:
    """Add the gradients of what the head captures, such as its weight, over the chunks in fp32.

    Autograd would add them in the dtype of each gradient. Hooks of the graph's nodes hold the gradients of all chunks
    back, and pass on their sum instead of the last one.

    Args:
        losses: of the chunks.
        rows: the node of the rows, whose gradients differ between chunks.
    """
    outside: set[Node | None] = {rows}
    if len(losses) > 1:  # what two chunks share is outside of them, such as a weight that is computed before
        first = {*nodes_behind(losses[0], outside)}
        second = nodes_behind(losses[1], outside | first)
        outside |= first & {target for node in second for target, _ in node.next_functions}
    sums: defaultdict[tuple[object, int], _Sum] = defaultdict(_Sum)
    for loss in losses:
        for node in nodes_behind(loss, outside):
            for index, (target, output) in enumerate(node.next_functions):
                parameter = getattr(target, "variable", None)  # FSDP1 may give it a new node in each chunk
                if target is not rows and (parameter is not None or target in outside):
                    total = sums[target if parameter is None else id(parameter), output]
                    total.expected += 1
                    node.register_hook(partial(total.hold_back, index))


class _Sum:
    """The sum of the gradients of one tensor. It holds no node of the graph, whose hooks hold it."""

    def __init__(self) -> None:
        self.expected = 0
        self._start(-1)

    def _start(self, backward: int) -> None:
        self._backward, self._arrived = backward, 0
        self._total: Tensor | None = None

    def hold_back(self, index: int, grads: Sequence[Tensor | None], of_outputs: object) -> tuple[Tensor | None, ...]:
        """A hook of a node: the node's gradients, of which that at ``index`` is held back or becomes the sum."""
        if self._backward != backward_id():  # an earlier backward may have failed
            self._start(backward_id())
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
            self._start(self._backward)
        return *grads[:index], passed_on, *grads[index + 1 :]
