"""The cross entropy of a language model in chunks of rows, so that the logits of all rows never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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

    The backward computes the logits of each chunk again. It costs one more product with the weight of the head.

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

    parts = zip(rows.flatten(0, -2).split(chunk_rows), labels.flatten().split(chunk_rows), strict=True)
    losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum()
