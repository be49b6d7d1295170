"""The load-balancing loss of a mixture of experts, over the rows of all ranks.

The loss is a product of two means over all tokens (Switch Transformers, arXiv 2101.03961, equation 4), so the mean over
the ranks of their own losses is another number. Models of transformers compute it by a function of their module. A ring
calls it once more, with the router's logits of the whole sequence, and its result replaces that of the model.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor

from ring_backends.ring.ring import Ring

_NAME = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def has_router_loss(model: Any) -> bool:
    """Whether the loss of a model is the usual one, with the usual coefficient."""
    function = getattr(_module_of(model), _NAME, None)
    has_coefficient = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    return function is not None and has_coefficient and [*inspect.signature(function).parameters] == _ARGUMENTS


def router_coefficient(model: Any) -> float:
    """The weight of the router loss. Most models keep that of their configuration when they are made."""
    own = getattr(model, "router_aux_loss_coef", None)
    return float(model.config.get_text_config().router_aux_loss_coef if own is None else own)


def loss_over_all_rows(
    model: Any, ring: Ring, gate_logits: tuple[Tensor, ...], mask: Tensor | None, batch_size: int, seq_len: int
) -> Tensor:
    """The loss of a model over the rows of all ranks, without its coefficient.

    Args:
        gate_logits: this rank's router logits of each layer, [batch × local seq, experts].
        mask: this rank's attention mask, [batch, local seq]; None without one.
    """
    config = model.config.get_text_config()
    top_k = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    by_layer = (logits.reshape(batch_size, -1, logits.shape[-1]) for logits in gate_logits)
    whole = tuple(ring.unshard(logits, seq_len=seq_len).flatten(0, 1) for logits in by_layer)
    whole_mask = None if mask is None else ring.unshard(mask, seq_len=seq_len)
    loss: Tensor = getattr(_module_of(model), _NAME)(whole, whole[0].shape[-1], top_k, whole_mask)
    return loss


def _module_of(model: Any) -> Any:
    """The module that defines the model's class, which FSDP2 replaces by a subclass."""
    modules = (sys.modules[base.__module__] for base in type(model).__mro__)
    return next((module for module in modules if hasattr(module, _NAME)), None)
