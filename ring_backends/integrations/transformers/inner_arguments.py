"""Arguments of a model of transformers that do not reach the parts of it which need them.

Some layers keep the arguments of the model from their attention. Some decoders, such as BART's, number their rows
themselves, from 0. Hooks give these parts what the module around them gets.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_KEEPING = frozenset(("StableLmDecoderLayer", "NemotronDecoderLayer"))
"""Classes of layers whose ``self_attn`` gets none of the model's arguments."""

_OF_ATTENTION = frozenset(
    (
        *("seq_len", "ring_layout", "row_numbers", "position_ids", "document_ids"),
        *("has_padding", "leading_padding", "num_passing"),
    )
)


def pass_down(model: nn.Module) -> list[RemovableHandle]:
    """Give every part of a model the arguments that it needs on a ring, until the handles are removed."""
    hooks: list[RemovableHandle] = []
    for outer in model.modules():
        if type(outer).__name__ in _KEEPING:
            hooks += PassedDown(_OF_ATTENTION).hooks_on(outer, outer.get_submodule("self_attn"))
        embedding: Any = getattr(outer, "embed_positions", None)
        if not _takes_positions(outer) and _takes_positions(embedding):
            hooks += Positions(frozenset(("position_ids",))).hooks_on(outer, embedding)
    return hooks


def _takes_positions(module: Any) -> bool:
    return isinstance(module, nn.Module) and "position_ids" in inspect.signature(module.forward).parameters


class PassedDown:
    """The hooks that give a module the arguments of these names that the module around it gets."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.arguments: dict[str, Any] = {}

    def hooks_on(self, outer: nn.Module, inner: nn.Module) -> list[RemovableHandle]:
        return [
            outer.register_forward_pre_hook(self.keep, with_kwargs=True),
            inner.register_forward_pre_hook(self.give, with_kwargs=True),
        ]

    def keep(self, outer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.arguments = {name: kwargs[name] for name in self.names & kwargs.keys()}

    def give(self, inner: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arguments, self.arguments = self.arguments, {}
        return args, {**kwargs, **arguments}


class Positions(PassedDown):
    """The same for an embedding of positions, some of which take one list of positions for all entries of the batch."""

    shape: tuple[int, ...] | None = None

    def hooks_on(self, outer: nn.Module, inner: nn.Module) -> list[RemovableHandle]:
        return [*super().hooks_on(outer, inner), inner.register_forward_hook(self.unflatten)]

    def give(self, inner: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        position_ids = self.arguments.get("position_ids")
        self.shape = None if position_ids is None else tuple(position_ids.shape)
        if position_ids is not None:
            self.arguments = {"position_ids": position_ids.flatten()}
        return super().give(inner, args, kwargs)

    def unflatten(self, inner: nn.Module, args: Any, output: Tensor) -> Tensor:
        """[…, batch * rows, width] becomes [batch, rows, width]."""
        return output if self.shape is None else output.reshape(*self.shape, output.shape[-1])
