"""Attention modules of other code whose forward calls a ring attention instead.

The style changes the class of a module, as ``fully_shard`` does. The new class inherits from the module's own class
and has another forward. So the module keeps its place in the model, its parameters, and their names.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ring_backends.attention import RingDilatedAttention
from ring_backends.integrations.device_mesh.axis import Axis

_NAMES = [re.compile(rf"(x?{name[0]}|{name})(_\w+)?") for name in ("query", "key", "value")]
"""The names of the first three arguments of an inner attention: q, xq, query, q_BHSD, query_states."""

_ORDERS = {1: "[batch, local seq, heads, head_dim]", 2: "[batch, heads, local seq, head_dim]"}

_PASSED_ON = ("key_padding_mask", "document_ids", "dropout_seed")

_INSTEAD = {
    "attn_mask": "masks of pairs are not supported by a ring; pass is_causal, or a key_padding_mask",
    "block_mask": "block masks are not supported by a ring; pass is_causal, or document_ids for packed documents",
    "score_mod": "a ring cannot modify scores; use a model without it",
    "dropout_p": "set RingDilated(dropout_p=…) instead",
    "need_weights": "a ring has no matrix of weights; pass need_weights=False",
}


@dataclass(frozen=True)
class CallForm:
    """How a module is called.

    Attributes:
        axis: the mesh axis of the module.
        is_causal: whether the attention is causal; None if the call says so.
        seq_dim: the sequence dimension of an inner attention's query, key and value.
        names: the arguments of the module's own forward that may be given by position.
        defaults: the values of the arguments that may be left out.
    """

    axis: Axis
    is_causal: bool | None
    seq_dim: int
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module, axis: Axis, is_causal: bool | None, seq_dim: int) -> CallForm:
        """Read the names and the defaults from the signature of the module's forward."""
        parameters = _parameters(module)
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        return cls(axis, is_causal, seq_dim, _positional(parameters), defaults)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call by its name, with the defaults."""
        if len(args) > len(self.names):
            raise TypeError(f"{len(args)} arguments are given by position: expected at most {len(self.names)}.")
        given = dict(zip(self.names, args, strict=False))
        for name in given:
            if name in kwargs:
                raise TypeError(f"{name} is given twice, by position and by name: give it once.")
        return {**self.defaults, **given, **kwargs}

    def causal(self, of_call: object) -> bool:
        """Whether a call is causal."""
        is_causal = of_call if self.is_causal is None else self.is_causal
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal = {is_causal!r}: expected True or False, or RingDilated(is_causal=…).")
        return is_causal


class InnerAttentionOnRing(nn.Module):
    """Replaces the forward of a module that is called with query, key and value, and has no parameters."""

    ring_attention: RingDilatedAttention
    ring_call: CallForm

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend from this rank's rows to the keys of the whole sequence.

        Args:
            args, kwargs: as in the module's own forward: query, key and value, [batch, heads, local seq, head_dim] with
                ``seq_dim=2`` and [batch, local seq, heads, head_dim] with ``seq_dim=1``; then ``is_causal``, ``scale``
                and ``enable_gqa``. Other arguments must be None, False or 0. ``key_padding_mask``, ``document_ids`` and
                ``dropout_seed`` are those of :class:`~ring_backends.RingDilatedAttention`.

        Returns:
            This rank's rows of the output, in the shape of query.

        Raises:
            ValueError, TypeError: an argument is invalid. The error is raised before any hop.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        attention, call = self.ring_attention, self.ring_call
        with attention.ring.report_refusals():
            call.axis.check_buffers()
            given = call.bind(args, kwargs)
            query, key, value = (given.pop(name, None) for name in call.names[:3])
            order = f"{_ORDERS[call.seq_dim]}, by RingDilated(seq_dim={call.seq_dim})"
            _check_tensors(query, key, value, order, dims=4, seq_dim=call.seq_dim)
            query, key, value = (tensor.transpose(1, call.seq_dim) for tensor in (query, key, value))
            if given.pop("enable_gqa", None) is False and key.shape[2] != query.shape[2]:
                raise ValueError(
                    f"enable_gqa = False with {query.shape[2]} query heads and {key.shape[2]} key heads: pass "
                    "enable_gqa=True for grouped key/value heads."
                )
            _check_scale(given.pop("scale", None), attention.scale, query.shape[3])
            is_causal = call.causal(given.pop("is_causal", None))
            passed_on = {name: given.pop(name, None) for name in _PASSED_ON}
            _refuse(given)
        out = attention(query, key, value, is_causal=is_causal, seq_len=call.axis.seq_len, **passed_on)
        return cast(Tensor, out.transpose(1, call.seq_dim))


class MultiheadAttentionOnRing(nn.MultiheadAttention):
    """Replaces the forward of ``torch.nn.MultiheadAttention``."""

    ring_attention: RingDilatedAttention
    ring_call: CallForm

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from this rank's rows to the keys of the whole sequence.

        Args:
            query, key, value: [batch, local seq, features] with ``batch_first``, else [local seq, batch, features];
                all with the same number of rows.
            key_padding_mask: [batch, local seq]: bool, True where a key is to be ignored; or float, −inf where a key is
                to be ignored, else 0.
            need_weights: must be False.
            attn_mask: must be None.
            average_attn_weights: has no effect.
            is_causal: whether a query sees only keys at or before its own position. It needs no mask.

        Returns:
            The pair of this rank's rows of the output, in the shape of ``query``, and None.

        Raises:
            ValueError, TypeError: an argument is invalid. The error is raised before any hop.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        attention, call = self.ring_attention, self.ring_call
        seq_dim = 1 if self.batch_first else 0
        order = "[batch, local seq, features]" if self.batch_first else "[local seq, batch, features]"
        with attention.ring.report_refusals():
            call.axis.check_buffers()
            _check_tensors(query, key, value, order, dims=3, seq_dim=seq_dim)
            widths = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
            for name, (tensor, width) in widths.items():
                if tensor.shape[2] != width:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {order} with {width} features.")
            _refuse({"need_weights": need_weights, "attn_mask": attn_mask})
            is_causal = call.causal(is_causal)
            ignored = None if key_padding_mask is None else _as_bool(key_padding_mask)
        rows = [tensor.transpose(seq_dim, 1) for tensor in (query, key, value)]
        projected = [F.linear(*each) for each in zip(rows, *self._weights(), strict=True)]
        heads = [tensor.unflatten(2, (self.num_heads, self.head_dim)) for tensor in projected]
        out = attention(*heads, is_causal=is_causal, seq_len=call.axis.seq_len, key_padding_mask=ignored)
        return self.out_proj(out.flatten(2)).transpose(seq_dim, 1), None

    def _weights(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The projections of query, key and value: their weights, and their biases."""
        weights: list[Any] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self.in_proj_weight is not None:
            weights = [*self.in_proj_weight.chunk(3)]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return weights, [*biases]


OnRing: TypeAlias = type[InnerAttentionOnRing] | type[MultiheadAttentionOnRing]


def put_on_ring(module: Any, on_ring: OnRing, attention: RingDilatedAttention, call: CallForm) -> None:
    """Let ``module`` compute its attention with ``attention``, in place."""
    module.__class__ = _class_on_ring(on_ring, type(module))  # type: ignore[arg-type]
    module.ring_attention, module.ring_call = attention.train(module.training), call
    if on_ring is MultiheadAttentionOnRing:
        # Without a hook, the layers of torch.nn do not call their attention in evaluation.
        module.register_forward_pre_hook(_do_nothing)


@cache
def _class_on_ring(on_ring: OnRing, own: type[nn.Module]) -> type[nn.Module]:
    return type(f"{own.__name__}OnRing", (on_ring, own), {"__module__": own.__module__})


def _do_nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook."""


def put_own_on_ring(module: nn.Module, axis: Axis) -> None:
    """Let an attention of this package use the ring of the axis, and know the length of its sequence."""
    attention_of(module).ring = axis.ring
    module.register_forward_pre_hook(partial(_prepare_call, axis), with_kwargs=True)


def _prepare_call(axis: Axis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: checks the buffers, and adds ``seq_len`` unless the call gives it."""
    with axis.ring.report_refusals():
        axis.check_buffers()
    return args, kwargs if kwargs.get("seq_len") is not None else {**kwargs, "seq_len": axis.seq_len}


def attention_of(module: Any) -> Any:
    """The attention without parameters that a module of this package computes with."""
    return module if isinstance(module, RingDilatedAttention) else module.attention


def is_on_ring(module: nn.Module) -> bool:
    """Whether a style has been applied to an attention of other code."""
    return isinstance(module, (InnerAttentionOnRing, MultiheadAttentionOnRing))


def is_multihead_attention(module: nn.Module) -> bool:
    """Whether a module has the forward of ``nn.MultiheadAttention``."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def is_inner_attention(module: nn.Module) -> bool:
    """Whether the first three arguments of a module's forward are query, key and value."""
    names = _positional(_parameters(module))[:3]
    return len(names) == 3 and all(name.fullmatch(given) for name, given in zip(_NAMES, names, strict=True))


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


def _positional(parameters: list[inspect.Parameter]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _check_tensors(query: object, key: object, value: object, order: str, *, dims: int, seq_dim: int) -> None:
    """Check that query, key and value are plain tensors with the same number of rows."""
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise TypeError(f"{name} = {type(tensor).__name__}: expected a plain torch.Tensor {order}.")
        if tensor.is_nested:
            raise ValueError(
                f"{name} is a nested tensor: pad it; nn.TransformerEncoder has enable_nested_tensor=False."
            )
        if tensor.dim() != dims:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {order}; reshape it.")
        if tensor.shape[seq_dim] != tensors["query"].shape[seq_dim]:
            raise ValueError(
                f"{name} has {tensor.shape[seq_dim]} rows and query {tensors['query'].shape[seq_dim]}: cross-attention "
                "and key/value caches are not supported by a ring; call the module on one sequence."
            )


def _check_scale(of_call: Any, of_style: float | None, head_dim: int) -> None:
    scale = head_dim**-0.5 if of_style is None else of_style
    if of_call is not None and not math.isclose(of_call, scale, rel_tol=1e-6):
        raise ValueError(f"scale = {of_call}: this style computes with {scale}; set RingDilated(scale={of_call}).")


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse arguments that a ring does not have, unless they are switched off."""
    for name, value in options.items():
        if isinstance(value, Tensor) or value not in (None, False, 0):
            instead = _INSTEAD.get(name, "a ring does not have this option; leave it out")
            raise ValueError(f"{name} is given: {instead}.")


def _as_bool(mask: Tensor) -> Tensor:
    """A key padding mask as bool, True where a key is to be ignored."""
    if mask.dtype == torch.bool:
        return mask
    ignored = mask == -torch.inf
    if not mask.is_floating_point() or not bool((ignored | (mask == 0)).all()):
        raise ValueError(
            f"key_padding_mask is {mask.dtype} with values other than 0 and −inf: biases of scores are not supported "
            "by a ring; pass a bool mask, True for a key to ignore."
        )
    return ignored
