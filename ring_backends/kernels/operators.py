"""The private attention operators of torch that the kernels call, and a check that torch still has them unchanged.

A torch release may remove or change a private operator. A kernel whose operator is gone or changed does not run, and
the next kernel takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.attention

SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
    "is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor "
    "value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? "
    "scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "_scaled_dot_product_flash_attention": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
    "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor "
    "debug_attn_mask)",
    "_scaled_dot_product_flash_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor "
    "out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool "
    "is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor "
    "grad_key, Tensor grad_value)",
    "_scaled_dot_product_efficient_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool "
    "compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor "
    "log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "_scaled_dot_product_efficient_attention_backward": "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
    "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "_scaled_dot_product_cudnn_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool "
    "compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? "
    "scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt "
    "max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
    "_scaled_dot_product_cudnn_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor "
    "out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor "
    "cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, "
    "Tensor, Tensor)",
}
"""The schemas of the operators as the kernels call them: those of torch 2.11 to 2.15."""


def operator_reasons(names: Sequence[str]) -> list[str]:
    """Return the reasons why these operators cannot be called, one for each that is absent or has changed."""
    return [reason for name in names if (reason := _reason(name)) is not None]


replaced_flash: Callable[[], str | None] = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
"""The name of what the program put in place of FlashAttention 2, such as ``"FA4"``; None for nothing.

``torch.nn.attention.activate_flash_attention_impl`` replaces the flash operators for CUDA tensors, and no others.
"""


@cache
def _reason(name: str) -> str | None:
    operator = f"aten::{name}"
    found = getattr(torch.ops.aten, name, None)
    if found is None:
        return f"torch {torch.__version__} has no {operator}"
    try:
        schema, expected = found.default._schema, torch._C.parse_schema(operator + SCHEMAS[name])
        is_unchanged = schema.is_backward_compatible_with(expected)  # new arguments with defaults are compatible
    except AttributeError as error:
        return f"torch {torch.__version__} does not show the schema of {operator}: {error}"
    return None if is_unchanged else f"torch {torch.__version__} has changed {operator}; its schema is now {schema}"
