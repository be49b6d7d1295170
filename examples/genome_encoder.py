"""Train a bidirectional encoder to predict masked bases of long DNA sequences that are sharded over a ring of ranks.

    torchrun --nproc-per-node 2 examples/genome_encoder.py --steps 100 --seq-len 512

The sequences are satellite DNA: a unit of 16 random bases per sequence, repeated with some mutations. The model can
find a masked base only in the other copies of the unit. Guessing gives a loss of ln 4 = 1.386 per base. The loss stays
at this value for about 20 steps, and then falls. The sequences have different lengths and are padded at the end.

Plain ``python`` instead of ``torchrun`` trains on one rank. For another framework, change the import of ``backend``.
"""

from collections.abc import Callable

import torch
import typer
from torch import Tensor, nn

from ring_backends.adapters import native as backend
from ring_backends.multihead import RingDilatedMultiheadAttention

BASES, MASK, PADDING = 4, 4, 5
UNIT, BATCH = 16, 4


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RingDilatedMultiheadAttention(width, 4, attention, rotary=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, padding: Tensor, seq_len: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seq_len=seq_len, key_padding_mask=padding)
        return x + self.mlp(self.mlp_norm(x))


class Encoder(nn.Module):
    """Maps tokens (bases, masks and padding) [batch, local seq] to logits of the bases [batch, local seq, 4]."""

    def __init__(self, make_attention: Callable[[], nn.Module], width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BASES + 2, width)
        self.blocks = nn.ModuleList(Block(width, make_attention()) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BASES)

    def forward(self, tokens: Tensor, seq_len: int) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, tokens == PADDING, seq_len)
        return self.head(self.norm(x))


def draw_batch(seq_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tokens, some of which are masked or padding, and the true bases: [batch, seq] each.

    Ranks with the same seed draw the same batch.
    """
    shape = (BATCH, seq_len)
    bases = torch.randint(BASES, (BATCH, UNIT), generator=generator).repeat(1, -(-seq_len // UNIT))[:, :seq_len]
    mutated = torch.rand(shape, generator=generator) < 0.05
    bases = torch.where(mutated, torch.randint(BASES, shape, generator=generator), bases)
    lengths = torch.randint(seq_len // 2, seq_len + 1, (BATCH, 1), generator=generator)
    tokens = bases.masked_fill(torch.rand(shape, generator=generator) < 0.15, MASK)
    return tokens.masked_fill(torch.arange(seq_len) >= lengths, PADDING), bases


def main(steps: int = 100, seq_len: int = 512, learning_rate: float = 3e-3, seed: int = 0) -> None:
    torch.manual_seed(seed)  # the same initial parameters on every rank
    ring = backend.initialize()
    model = Encoder(lambda: backend.RingDilatedAttention([2 * UNIT, seq_len], [1, 4], ring=ring))
    state = backend.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), ring)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        whole_tokens, whole_bases = draw_batch(seq_len, generator)
        tokens, bases = ring.shard(whole_tokens), ring.shard(whole_bases)
        logits = state.model(tokens, seq_len)
        base_losses = nn.functional.cross_entropy(logits.transpose(1, 2), bases, reduction="none") * (tokens == MASK)
        state.backward(state.loss(base_losses.sum(), (tokens == MASK).sum()))
        state.step()
        loss_sum = ring.unshard(base_losses.detach(), seq_len=seq_len).sum()
        losses.append(loss_sum.item() / int((whole_tokens == MASK).sum()))
        if ring.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if ring.rank == 0:
        print(f"{losses[0]:.4f} -> {losses[-1]:.4f} on {ring.size} ranks; rank 0 sent {ring.traffic.bytes:,} bytes")


if __name__ == "__main__":
    typer.run(main)
