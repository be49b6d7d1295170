"""The model that ``train`` trains: a byte-level LongNet language model (arXiv 2307.02486).

It has LongNet's pre-norm layers and rotary positions. Each rank computes the logits of its own rows. The attention is
an argument, so the model works with every adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_backends.cli.train import TrainOptions
from ring_backends.engine.cache import KeyValueCache
from ring_backends.longnet.model import Layer
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.ring.ring import Ring

VOCABULARY = 256


def make_optimizer(options: TrainOptions, dtype: torch.dtype) -> Callable[[Iterable[nn.Parameter]], torch.optim.AdamW]:
    """Return ``make_optimizer`` of a training run."""
    eps = max(1e-8, torch.finfo(dtype).tiny)  # 1e-8 is 0 in fp16
    return lambda parameters: torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95), eps=eps)


class LongNetLM(nn.Module):
    """A causal language model over bytes.

    Args:
        options: of the training run.
        backend: the adapter whose attention the layers have.
        ring: the ring of the attention.

    The initial weights depend only on torch's random state. They do not depend on the rank or the layout.
    """

    def __init__(self, options: TrainOptions, backend: Any, ring: Ring) -> None:
        super().__init__()
        embed_dim, pattern = options.embed_dim, asdict(options.pattern())
        self.activation_checkpointing = options.activation_checkpointing
        self.embedding = nn.Embedding(VOCABULARY, embed_dim)
        self.layers = nn.ModuleList()
        for _ in range(options.num_layers):
            own = backend.RingDilatedAttention(**pattern, ring=ring, kernel=options.kernel)
            attention = RingDilatedMultiheadAttention(
                embed_dim, options.num_heads, own, num_kv_heads=options.num_kv_heads, rotary=True
            )
            mlp = nn.Sequential(
                nn.Linear(embed_dim, 2 * embed_dim), nn.GELU("tanh"), nn.Linear(2 * embed_dim, embed_dim)
            )
            self.layers.append(Layer(attention, mlp))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, VOCABULARY, bias=False)
        self._initialize_parameters()
        if options.tied:
            self.head.weight = self.embedding.weight

    def _initialize_parameters(self) -> None:
        """Draw weights from a normal distribution with mean 0 and standard deviation 0.02, and set biases to 0.

        Layers that write to the residual stream have the standard deviation 0.02 / sqrt(2 num_layers).
        """
        residual = 0.02 / math.sqrt(2 * max(1, len(self.layers)))
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith(("out_proj", "ffn.2"))
                nn.init.normal_(module.weight, std=residual if writes_residual else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, seq_len: int | None, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Compute the logits of this rank's rows.

        Args:
            tokens: int64 [batch, local seq], byte values of this rank's positions.
            seq_len: length of the global sequence.
            caches: as :func:`ring_backends.longnet.model.new_caches` makes them. With ``seq_len``, ``tokens`` are this
                rank's part of a prompt. Without it, they are the next tokens, the same on every rank.

        Returns:
            [batch, local seq, 256], in the dtype of the parameters.
        """
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, True, seq_len, None, use_reentrant=False)
            else:
                x = layer(x, True, seq_len, None, None if caches is None else caches[index])
        return cast(Tensor, self.head(self.norm(x)))
