"""Train a LongNet decoder on a text, and let it continue the text, with keys and values on all ranks of a ring.

    torchrun --nproc-per-node 2 examples/generate.py --steps 150

Plain ``python`` instead of ``torchrun`` trains and generates on one rank, with the same text. For another framework,
change the import of ``backend``.
"""

import codecs
import contextlib
import io

import torch
import typer
from torch import Tensor, nn

from ring_backends.adapters import native as backend
from ring_backends.longnet import LongNetDecoder

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the text

TEXT = torch.frombuffer(bytearray(codecs.decode(this.s, "rot13").encode()), dtype=torch.uint8).long()
"""The Zen of Python. Each byte is a token."""


def continue_text(model: LongNetDecoder, ring: backend.Ring, prompt: Tensor, num_tokens: int) -> Tensor:
    """The likeliest continuation of a prompt [1, tokens], which every rank holds whole."""
    caches, new = model.new_caches(), prompt[:, -1:]
    with torch.no_grad():
        # All ranks compute the prompt together. The last token is the first step, so that every rank has its logits.
        model(ring.shard(prompt[:, :-1]), seq_len=prompt.shape[1] - 1, caches=caches)
        for _ in range(num_tokens):
            new = model(new, caches=caches)[:, -1:].argmax(-1)
            prompt = torch.cat([prompt, new], 1)
    return prompt


def main(steps: int = 150, seq_len: int = 800, learning_rate: float = 3e-3, seed: int = 0) -> None:
    torch.manual_seed(seed)  # the same initial parameters on every rank
    ring = backend.initialize()
    attention = backend.RingDilatedAttention([seq_len // 8, seq_len], [1, 4], ring=ring)
    sizes = {"vocab_size": 256, "output_size": 256, "num_positions": seq_len + 2}
    model, trained = (LongNetDecoder(64, 4, 128, 2, attention, **sizes) for _ in range(2))
    state = backend.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), ring)
    window, losses = TEXT[: seq_len + 1].unsqueeze(0), []
    length = window.shape[1] - 1
    tokens, labels = ring.shard(window[:, :-1]), ring.shard(window[:, 1:])
    for step in range(1, steps + 1):
        logits = state.model(tokens, seq_len=length)
        token_losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        state.backward(state.loss(token_losses.sum(), labels.numel()))
        state.step()
        losses.append(ring.unshard(token_losses.detach(), seq_len=length).mean().item())
        if ring.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    trained.load_state_dict(state.full_state_dict())
    text = continue_text(trained.eval(), ring, window[:, : length // 4], length // 4)
    if ring.rank == 0:
        print(bytes(text[0].tolist()).decode(errors="replace"))
        print(f"{losses[0]:.4f} -> {losses[-1]:.4f} on {ring.size} ranks; rank 0 sent {ring.traffic.bytes:,} bytes")


if __name__ == "__main__":
    typer.run(main)
