"""Heads that pool rows: sequence classifiers, reward models, and models without a head that have a pooler.

Such a head computes one result for a sequence, from its first row, its last row or the mean of its rows. On a ring the
body of the model, which comes before the head, gets this rank's rows. The head gets a sequence of one row:
:meth:`ring_backends.Ring.pool` of the rows of all ranks. Its result is the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ring_backends.ring.pooling import How
from ring_backends.ring.ring import Ring

Counted = Literal["all", "mask", "tokens"]
"""Which rows count: all; those in the attention mask; or those whose token is not the padding token."""

WAYS: tuple[tuple[How, Counted], ...] = (
    *(("first", "all"), ("last", "tokens"), ("last", "all"), ("last", "mask"), ("mean", "mask"), ("mean", "all")),
    *(("first", "mask"), ("mean", "tokens"), ("max", "mask"), ("max", "all")),
)
"""The ways to pool that a probe tries, the usual ones first."""


class PooledHead:
    """The hooks of a model whose head pools rows.

    Attributes:
        model: the model.
        body: the part of it that computes rows; the model itself if it has no head but a pooler.
        way: how the head pools rows; None while it gets all rows, for a probe.
        call: of a call of the model that has begun, the ring, the arguments of the body, and which of its rows count
            (None: all).
    """

    def __init__(self, model: Any) -> None:
        self.model, self.body = model, model.base_model
        self.way: tuple[How, Counted] | None = None
        self.names = [*inspect.signature(self.body.forward).parameters]
        self.call: tuple[Ring, Mapping[str, Any], Tensor | None] | None = None
        self.pooler: nn.Module | None = getattr(self.body, "pooler", None)
        self.hooks: list[RemovableHandle] = []
        if self.pooler is not None:
            self.hooks.append(self.pooler.register_forward_pre_hook(self._before_pooler))
        if self.is_classifier:
            self.hooks.append(self.body.register_forward_pre_hook(self._before_body, with_kwargs=True))
            self.hooks.append(self.body.register_forward_hook(self._after_body))

    @property
    def is_classifier(self) -> bool:
        """Whether the head makes logits of the pooled row, instead of being a pooler beside the rows."""
        return self.body is not self.model

    def begin(self, ring: Ring, batch: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a call of the model.

        Args:
            batch: the arguments of the model for whole sequences, with ``labels`` of the head.
            local: those for this rank's rows, with ``seq_len``, and options.

        Returns:
            The arguments with which to call the model.
        """
        input_ids, mask, counts = batch["input_ids"], batch.get("attention_mask"), self._counts(batch)
        padding = self.model.config.get_text_config().pad_token_id
        self.call = ring, local, None if counts is None else ring.shard(counts)
        if not self.is_classifier:
            return dict(local)
        labels = {"labels": batch["labels"]} if "labels" in batch else {}
        if self.way is None:
            return {"input_ids": input_ids, "attention_mask": mask, **labels}
        token = torch.full_like(input_ids[:, :1], int(padding == 0))  # any but the padding token
        options = {name: value for name, value in local.items() if name in ("return_dict", "use_cache")}
        return {"input_ids": token, "attention_mask": torch.ones_like(token), **options, **labels}

    def _counts(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Which rows of whole sequences the head pools, bool [batch, seq]; None for all."""
        mask, padding = batch.get("attention_mask"), self.model.config.get_text_config().pad_token_id
        counted = "all" if self.way is None else self.way[1]
        if counted == "mask" and mask is not None:
            return cast(Tensor, mask != 0)
        if counted == "tokens" and padding is not None:
            return cast(Tensor, batch["input_ids"] != padding)
        return None

    def check_padding(self, batch: Mapping[str, Any]) -> None:
        """Check the padding of a batch.

        Raises:
            ValueError: the head would read a row of padding, whose value depends on the ring; or a sequence has no row
                that it counts.
        """
        counts, mask = self._counts(batch), batch.get("attention_mask")
        if counts is not None and not bool(counts.any(1).all()):
            index = int(counts.any(1).long().argmin())
            raise ValueError(
                f"input_ids has only padding in sequence {index}: the head of {type(self.model).__name__} has no row "
                "to pool there; leave the sequence out."
            )
        how, counted = self.way or ("mean", "mask")
        if mask is None or counted != "all":
            return
        is_real = mask != 0
        read = {"first": is_real[:, 0], "last": is_real[:, -1]}.get(how, is_real)
        if not bool(read.all()):
            raise ValueError(
                f"attention_mask has padding that the head of {type(self.model).__name__} reads: it pools the rows by "
                f"{how!r}, whatever the mask; pad on the {'right' if how == 'first' else 'left'}, or give sequences of "
                "one length."
            )

    def _pooled(self, rows: Tensor) -> Tensor:
        """[batch, 1, …] from [batch, rows, …]."""
        if self.call is None or self.way is None:
            return rows
        ring, arguments, counts = self.call
        if rows.dim() != 3:
            raise ValueError(
                f"model = {type(self.model).__name__}: its pooler gets one row, and not the rows to pool; use the "
                "model without a head, and pool its rows with ring.pool()."
            )
        return ring.pool(rows, counts, self.way[0], seq_len=arguments["seq_len"]).unsqueeze(1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_body(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.call is None:
            return None
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        options = {name: value for name, value in given.items() if not (value is None or isinstance(value, Tensor))}
        return (), {**options, **self.call[1]}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_body(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        if self.pooler is None:
            rows = self._pooled(outputs[0])
        else:  # not a number, so that the probe finds a head that reads these rows beside the pooler's result
            rows = outputs[0] if self.way is None else torch.full_like(outputs[0][:, :1], torch.nan)
        if isinstance(outputs, tuple):
            return rows, *outputs[1:]
        return type(outputs)(**{**outputs, next(iter(outputs)): rows})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_pooler(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (self._pooled(args[0]), *args[1:]) if args else None
