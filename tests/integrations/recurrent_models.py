"""Small models of transformers with convolutions and recurrent layers, their batches, and what they compute.

A test that imports this is skipped with releases of transformers whose layers a ring does not know. One process
computes packed documents one by one: most layers of transformers cannot keep them apart without kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_models import HAS_RECURRENT_LAYERS, VOCABULARY, build
from torch import Tensor
from transformers_checks import Computed, compare, compute

from ring_backends import Ring
from ring_backends.integrations.transformers import use_ring

if not HAS_RECURRENT_LAYERS:
    pytest.skip("a ring refuses the recurrent layers of this release of transformers", allow_module_level=True)

TOLERANCE = 1e-4

_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 2}
_BOTH = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_BOTH, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**_BOTH, **_DELTA, "head_dim": 8},
    "olmo_hybrid": {**_BOTH, **_DELTA},
    "kimi_linear": {
        **{**_BOTH, **_LATENT, "mlp_layer_types": ["dense", "dense"], "num_key_value_heads": 4},
        **{"linear_num_heads": 4, "linear_head_dim": 8, "head_dim": 8},
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "num_key_value_heads": 2},
    "granitemoehybrid": {**_MAMBA, **_BOTH, "num_local_experts": 4, "shared_intermediate_size": 16},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "num_key_value_heads": 2},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2},
        **{"ssm_state_size": 8, "chunk_size": 16, "head_dim": 8, "num_key_value_heads": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": {
        **{**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_key_value_heads": 2},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 16, "head_dim": 8},
    "minimax": {
        **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "block_size": 16},
        **{"num_local_experts": 4, "num_key_value_heads": 2},
    },
}
"""The fields of the configurations, by model type."""


def make_model(kind: str, seed: int = 0, **fields: Any) -> Any:
    """A model in evaluation mode, with random numbers in all parameters."""
    model = build(kind, attention="eager", seed=seed, **{**KINDS[kind], "use_cache": False, **fields}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@dataclass(frozen=True)
class Batch:
    """Sequences of a random batch.

    Attributes:
        length: the number of tokens of each sequence.
        left: the number of tokens of padding before the second sequence.
        right: the number of tokens of padding after it.
        documents: the lengths of the packed documents of each sequence; none for one document per sequence.
    """

    length: int
    left: int = 0
    right: int = 0
    documents: tuple[tuple[int, ...], ...] = ()

    @property
    def rows(self) -> Tensor:
        """Where a token is not padding: bool [batch, length]."""
        rows = torch.ones(len(self.documents) or 2, self.length, dtype=torch.bool)
        rows[1:, : self.left] = rows[1:, self.length - self.right :] = False
        return rows

    @property
    def inputs(self) -> dict[str, Tensor]:
        rows = self.rows
        tokens = torch.randint(1, VOCABULARY, rows.shape, generator=torch.Generator().manual_seed(self.length))
        if self.documents:
            positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in self.documents]
            return {"input_ids": tokens, "position_ids": torch.stack(positions)}
        if rows.all():
            return {"input_ids": tokens}
        return {"input_ids": tokens.where(rows, 0), "attention_mask": rows.long()}


def logits_of(model: Any, batch: Batch) -> Tensor:
    """The logits of one process."""
    if not batch.documents:
        found: Tensor = model(**batch.inputs).logits
        return found
    tokens = batch.inputs["input_ids"]
    sequences = [
        torch.cat([model(input_ids=part).logits for part in entry[None].split(lengths, 1)], 1)
        for entry, lengths in zip(tokens, batch.documents, strict=True)
    ]
    return torch.cat(sequences)


def alone(kind: str, batches: Sequence[Batch], **fields: Any) -> list[Computed]:
    """The logits and the gradients of one process for each batch."""
    model = make_model(kind, **fields)
    return [computed(model, logits_of(model, batch), batch) for batch in batches]


def on_ranks(ring: Ring, kind: str, batches: Sequence[Batch], **fields: Any) -> list[Computed]:
    """The logits of each whole batch, and this rank's gradients."""
    model = make_model(kind, **fields)
    use_ring(model, ring)
    return [computed(model, model(**batch.inputs).logits, batch, ring) for batch in batches]


def computed(model: Any, logits: Tensor, batch: Batch, ring: Ring | None = None) -> Computed:
    found = compute(model, {"logits": logits}, batch.rows, ring)
    model.zero_grad()
    return found


def assert_equal(by_rank: Sequence[Sequence[Computed]], wanted: Sequence[Computed], batches: Sequence[Batch]) -> None:
    """Compare the ranks with one process: logits, and sums of gradients, relative to the largest."""
    for batch, right, *found in zip(batches, wanted, *by_rank, strict=True):
        verdict = compare(found, right, batch.rows, TOLERANCE)
        assert verdict.status == "EQUAL", (batch, verdict.why)
