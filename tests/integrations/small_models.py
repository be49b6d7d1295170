"""transformers without its hub, and small models of its classes. A test that imports this is skipped without it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 23
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0},
}

HAS_RECURRENT_LAYERS = hasattr(transformers.cache_utils, "LinearAttentionLayer")
"""Whether a ring knows the recurrent layers of this release: from 5.15 on."""


def build(kind: str, task: str = "ForCausalLM", attention: str | None = None, seed: int = 0, **fields: Any) -> Any:
    """A random model of ``AutoModel{task}``, with these fields of its configuration."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **fields})
    return getattr(transformers, f"AutoModel{task}").from_config(config, attn_implementation=attention)
