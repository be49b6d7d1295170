"""Train a byte-level language model on one long sequence that is sharded over a ring of ranks.

    torchrun --nproc-per-node 2 examples/language_model.py --backend fsdp --steps 20 --seq-len 4096

``--backend`` chooses the framework: native, fsdp, deepspeed or fairscale. A program that uses only one framework can
import its adapter instead: ``from ring_backends.adapters import fsdp as backend``. Plain ``python`` instead of
``torchrun`` trains the same model on one rank.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import typer
from torch import Tensor, nn

from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.registry import load_adapter


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RingDilatedMultiheadAttention(width, 4, attention, rotary=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), is_causal=True, seq_len=seq_len)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Maps bytes [batch, local seq] to logits [batch, local seq, 256]. Only the attention uses rows of other ranks."""

    def __init__(self, make_attention: Callable[[], nn.Module], width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, make_attention()) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, seq_len: int) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, seq_len)
        return self.head(self.norm(x))


def read_document() -> Tensor:
    """Read some of torch's source files. Each byte is a token."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def main(
    backend: str = "native", steps: int = 20, seq_len: int = 4096, learning_rate: float = 3e-3, seed: int = 0
) -> None:
    torch.manual_seed(seed)  # the same initial parameters on every rank
    adapter = load_adapter(backend)
    ring = adapter.initialize()
    segment_lengths, dilation_rates = [seq_len // 16, seq_len // 4, seq_len], [1, 4, 16]
    model = LanguageModel(lambda: adapter.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring))
    state = adapter.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), ring)
    document, losses = read_document(), []
    for step in range(1, steps + 1):
        start = (step - 1) * seq_len % (len(document) - seq_len)
        window = document[start : start + seq_len + 1].unsqueeze(0)
        tokens, labels = ring.shard(window[:, :-1]), ring.shard(window[:, 1:])
        logits = state.model(tokens, seq_len)
        token_losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        state.backward(state.loss(token_losses.sum(), labels.numel()))
        state.step()
        losses.append(ring.unshard(token_losses.detach(), seq_len=seq_len).mean().item())
        if ring.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if ring.rank == 0:
        print(f"{losses[0]:.4f} -> {losses[-1]:.4f} on {ring.size} ranks; rank 0 sent {ring.traffic.bytes:,} bytes")


if __name__ == "__main__":
    typer.run(main)
