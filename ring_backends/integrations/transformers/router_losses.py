"""The load-balancing loss of a mixture of experts, over the rows of all ranks.

The loss is a product of two means over all tokens (Switch Transformers, arXiv 2101.03961, equation 4), so the mean over
the ranks of their own losses is another number. Models of transformers compute it by a function of their module. While
a model on a ring runs, this function gets the router's logits of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from ring_backends.ring.ring import Ring

_NAME = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]

current_rows: ContextVar[tuple[Ring, int, int] | None] = ContextVar("current_rows", default=None)
"""(ring, batch size, seq_len) of the model that runs on a ring; None at other times."""


def has_router_loss(model: Any) -> bool:
    """Whether the loss of a model is the usual one, with the usual coefficient."""
    function = getattr(_module_of(model), _NAME, None)
    has_coefficient = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    return function is not None and has_coefficient and [*inspect.signature(function).parameters] == _ARGUMENTS


def router_coefficient(model: Any) -> float:
    """The weight of the router loss. Most models keep that of their configuration when they are made."""
    own = getattr(model, "router_aux_loss_coef", None)
    return float(model.config.get_text_config().router_aux_loss_coef if own is None else own)


def compute_over_all_rows(model: Any) -> None:
    """Let the functions by which a model, and TRL's head, compute the loss see the rows of all ranks."""
    for module in (_module_of(model), import_module("transformers.models.mixtral.modeling_mixtral")):
        function = getattr(module, _NAME)
        if not hasattr(function, "__wrapped__"):
            setattr(module, _NAME, _of_all_rows(function))


def _module_of(model: Any) -> Any:
    """The module that defines the model's class, which FSDP2 replaces by a subclass."""
    modules = (sys.modules[base.__module__] for base in type(model).__mro__)
    return next((module for module in modules if hasattr(module, _NAME)), None)


def _of_all_rows(function: Any) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def of_all_rows(*args: Any, **kwargs: Any) -> Any:
        rows, arguments = current_rows.get(), signature.bind(*args, **kwargs).arguments
        gate_logits, mask = arguments["gate_logits"], arguments.get("attention_mask")
        if rows is None or not isinstance(gate_logits, tuple):
            return function(*args, **kwargs)
        ring, batch, seq_len = rows
        by_layer = (logits.reshape(batch, -1, logits.shape[-1]) for logits in gate_logits)
        arguments["gate_logits"] = tuple(ring.unshard(logits, seq_len=seq_len).flatten(0, 1) for logits in by_layer)
        if mask is not None:
            arguments["attention_mask"] = ring.unshard(mask, seq_len=seq_len)
        return function(**arguments)

    return of_all_rows
