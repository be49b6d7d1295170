"""Arguments of a model of transformers that do not reach the parts of it which need them.

Some layers withhold the arguments of the model from their attention, and some decoders, such as BART's, number their
rows from 0. Hooks give these parts what the module around them gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ring_backends.integrations.transformers.layers import RingMask

_WITHHOLDING = frozenset(("StableLmDecoderLayer", "NemotronDecoderLayer"))
"""Classes of layers that pass none of these arguments on to their ``self_attn``."""

_ARGUMENTS = frozenset(("seq_len", "ring_layout", "row_numbers", "document_ids", "has_padding", "leading_padding"))


def pass_down(model: nn.Module) -> list[RemovableHandle]:
    """Give every part of a model the arguments that it needs on a ring, until the handles are removed."""
    hooks: list[RemovableHandle] = []
    for part in model.modules():
        if _takes_positions(getattr(part, "embed_positions", None)) and not _takes_positions(part):
            hooks += _Positions(part.get_submodule("embed_positions")).hooks_on(part)
        if _WITHHOLDING & {base.__name__ for base in type(part).__mro__}:
            hooks.append(part.register_forward_pre_hook(_put_into_mask, with_kwargs=True))
            attention = part.get_submodule("self_attn")
            hooks.append(attention.register_forward_pre_hook(_take_from_mask, with_kwargs=True))
    return hooks


def _takes_positions(module: Any) -> bool:
    return isinstance(module, nn.Module) and "position_ids" in inspect.signature(module.forward).parameters


def _put_into_mask(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layer passes its mask on, also when activation checkpointing computes it again, without its hooks."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, RingMask):
        return None
    arguments = {name: kwargs[name] for name in _ARGUMENTS & kwargs.keys()}
    return args, {**kwargs, "attention_mask": replace(mask, arguments=arguments)}


def _take_from_mask(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    return (args, {**kwargs, **mask.arguments}) if isinstance(mask, RingMask) else None


class _Positions:
    """Hooks by which an embedding of positions takes the number of each row in its document, as the ring knows it.

    Some embeddings take one list of positions for all entries of the batch. So they get one list for all rows, and
    their results get the shape of the rows back.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self.embedding = embedding
        self.row_numbers: Tensor | None = None

    def hooks_on(self, decoder: nn.Module) -> list[RemovableHandle]:
        return [
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            self.embedding.register_forward_pre_hook(self.give, with_kwargs=True),
            self.embedding.register_forward_hook(self.unflatten),
            decoder.register_forward_hook(self.end, always_call=True),
        ]

    def begin(self, decoder: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.row_numbers = kwargs.get("row_numbers")
        if self.row_numbers is not None and decoder.embed_positions is not self.embedding:
            raise ValueError(
                f"embed_positions of {type(decoder).__name__} was replaced after the model was put on a ring, and the "
                "new one would number each rank's rows from 0; replace it before, or call remove_ring(model) and put "
                "the model on the ring again."
            )

    def give(self, embedding: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.row_numbers is None else (args, {**kwargs, "position_ids": self.row_numbers.flatten()})

    def unflatten(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output if self.row_numbers is None else output.reshape(*self.row_numbers.shape, output.shape[-1])

    def end(self, decoder: nn.Module, args: Any, output: Any) -> None:
        self.row_numbers = None
