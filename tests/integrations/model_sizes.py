"""The sizes of the small models that these tests build by the classes of transformers."""

from __future__ import annotations

from typing import Any

VOCABULARY = 23
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0},
}
