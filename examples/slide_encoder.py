"""Train an encoder on the tiles of a slide that are sharded over a ring of ranks, with a bias by their distance.

    torchrun --nproc-per-node 2 examples/slide_encoder.py --steps 30 --seq-len 4096

Each tile has a noisy embedding and a place on the slide. Its class is that of the region around it, so a model that
looks at near tiles knows more than one that sees a single tile. Attention subtracts a multiple of the distance of two
tiles from their score. This bias of all pairs never exists as a whole. The last line is the time and the largest memory
of rank 0.

Plain ``python`` instead of ``torchrun`` trains on one rank. For another framework, change the import of ``backend``.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable

import torch
import typer
from torch import Tensor, nn

from ring_backends.adapters import native as backend
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.score_mods import distance

FEATURES, WIDTH, HEADS = 16, 64, 4


class Encoder(nn.Module):
    """Maps tiles [1, local tiles, features] and the places of all tiles [1, tiles, 2] to a logit for each tile."""

    def __init__(self, make_attention: Callable[[], nn.Module], num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Linear(FEATURES, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_layers))
        self.layers = nn.ModuleList(
            RingDilatedMultiheadAttention(WIDTH, HEADS, make_attention()) for _ in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, tiles: Tensor, places: Tensor) -> Tensor:
        x, bias = self.embedding(tiles), distance(places, torch.tensor([1.0, 0.5, 0.25, 0.125]))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), seq_len=places.shape[1], score_mod=bias)
        return self.head(x)[..., 0]


def draw_slide(tiles: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw embeddings [1, tiles, features], places [1, tiles, 2] and classes [1, tiles], the same on every rank."""
    side = math.isqrt(tiles - 1) + 1
    index = torch.arange(tiles)
    places = torch.stack([index // side, index % side], 1)[None].float()
    phase = 6.3 * torch.rand(2, generator=generator)
    classes = (torch.sin(places / 4 + phase).prod(2) > 0).float()
    noise = torch.randn(1, tiles, FEATURES, generator=generator)
    return (classes[..., None] - 0.5) * 0.3 + noise, places, classes


def main(steps: int = 30, seq_len: int = 4096, learning_rate: float = 3e-3, seed: int = 0) -> None:
    torch.manual_seed(seed)  # the same initial parameters on every rank
    ring = backend.initialize()
    model = Encoder(lambda: backend.RingDilatedAttention([2048, None], [1, 32], offset="every", ring=ring))
    state = backend.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), ring)
    generator, losses, seconds = torch.Generator().manual_seed(seed), [], []
    for step in range(1, steps + 1):
        begin = time.perf_counter(), time.process_time()
        whole_tiles, places, whole_classes = draw_slide(seq_len, generator)
        tiles, classes = ring.shard(whole_tiles), ring.shard(whole_classes)
        tile_losses = nn.functional.binary_cross_entropy_with_logits(
            state.model(tiles, places), classes, reduction="none"
        )
        state.backward(state.loss(tile_losses.sum(), tile_losses.numel()))
        state.step()
        seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        losses.append(ring.unshard(tile_losses.detach(), seq_len=seq_len).mean().item())
        if ring.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if ring.rank == 0:
        print(f"{losses[0]:.4f} -> {losses[-1]:.4f} on {ring.size} ranks; rank 0 sent {ring.traffic.bytes:,} bytes")
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        of_step, of_cpu = map(statistics.median, zip(*seconds, strict=True))
        print(
            f"rank 0: {of_step:.2f} s per step, {of_cpu:.2f} s of CPU time; {gigabytes:.2f} GiB with the program itself"
        )


if __name__ == "__main__":
    typer.run(main)
