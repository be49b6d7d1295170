"""Two small models, and a training loop that runs on one process and on a data × ring mesh."""

from __future__ import annotations

import contextlib
from functools import cache
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from ring_backends.integrations import device_mesh
from ring_backends.integrations.device_mesh import RingDilated, context_parallel
from ring_backends.ring.topology import UlyssesSize
from ring_backends.testing.training_runs import IGNORED

N, VOCABULARY, WIDTH, HEADS, BATCH, STEPS = 45, 23, 32, 4, 4, 10

Kind = Literal["decoder", "encoder"]


class InnerAttention(nn.Module):
    """Causal attention, [batch, heads, seq, head_dim]."""

    def forward(self, q, k, v, *, attn_mask=None, scale=None, enable_gqa=False, is_causal=True) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.feed_forward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner_attention = InnerAttention()

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (2 * HEADS, -1))
        query, key, value = heads.split((HEADS, HEADS // 2, HEADS // 2), 2)
        rows = (rotate(query, freqs), rotate(key, freqs), value)
        out = self.inner_attention(*(tensor.transpose(1, 2) for tensor in rows), enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x).relu()


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate [batch, seq, heads, head_dim] by [seq, head_dim / 2, 2]."""
    pairs = torch.view_as_complex(x.unflatten(3, (-1, 2))) * torch.view_as_complex(freqs)[None, :, None]
    return torch.view_as_real(pairs).flatten(3)


class Decoder(nn.Module):
    """Grouped key/value heads, and rotary embeddings from a buffer."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleDict({str(layer): DecoderLayer() for layer in range(2)})
        half = WIDTH // HEADS // 2
        angles = torch.arange(N)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("freqs", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, self.freqs)
        return self.head(x)


class Encoder(nn.Module):
    """Layers of torch.nn with a padding mask, and learned positions, which a buffer indexes."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Embedding(N, WIDTH)
        self.register_buffer("freqs", torch.arange(N))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(self.freqs)
        return self.head(self.encoder(x, src_key_padding_mask=padding))


PLANS = {"decoder": "layers.*.inner_attention", "encoder": "encoder.layers.*.self_attn"}


def make_model(kind: Kind) -> Any:
    torch.manual_seed(0)
    return Decoder() if kind == "decoder" else Encoder()


def make_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and padding of all rings. Most labels of the first rows are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, N), generator=generator)
    padding = torch.arange(N) >= torch.randint(N // 3, N + 1, (BATCH, 1), generator=generator)
    is_ignored = torch.rand(BATCH, N, generator=generator) < torch.linspace(0.9, 0, N)
    return tokens, tokens.roll(-1, 1).masked_fill(padding | is_ignored, IGNORED), padding


@cache
def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "ring"))


def without_sync(model: nn.Module) -> nn.Module:
    """DistributedDataParallel that does not copy buffers in each forward. torch 2.13 renamed the option."""
    options = signature(nn.parallel.DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    return nn.parallel.DistributedDataParallel(model, **{name: False})


def run(
    kind: Kind,
    shape: Any = None,
    strategy: str = "ddp",
    layout: Any = "contiguous",
    compiled: Any = False,
    ulysses_size: UlyssesSize = 1,
) -> Any:
    """Train for ten steps.

    Args:
        shape: data size and ring size of the mesh; None trains on one process, without this package.
        strategy: "ddp", "fsdp2-world" or "fsdp2-mesh".

    Returns:
        The loss of each step and then the evaluation loss, and the parameters.
    """
    model = wrapped = make_model(kind)
    if shape is None:
        data_size, data_rank, world = 1, 0, 1
    else:
        mesh = mesh_of(shape)
        device_mesh._axes.clear()  # for a ring with this layout
        data_size, data_rank, world = shape[0], mesh.get_local_rank("data"), dist.get_world_size()
        style = RingDilated([N], [1], layout=layout, ulysses_size=ulysses_size)
        parallelize_module(model, mesh["ring"], {PLANS[kind]: style})
        if strategy == "ddp":
            wrapped = without_sync(model)
        else:
            sharding = init_device_mesh("cpu", (world,)) if strategy == "fsdp2-world" else mesh
            for layer in model.layers.values() if kind == "decoder" else model.encoder.layers:
                fully_shard(layer, mesh=sharding)
            fully_shard(model, mesh=sharding)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=kind == "decoder")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(step: int, *, backward: bool) -> float:
        rows = slice(data_rank * BATCH // data_size, (data_rank + 1) * BATCH // data_size)
        count = (make_batch(step)[1] != IGNORED).sum()
        tokens, labels, padding = (tensor[rows] for tensor in make_batch(step))
        sharded: Any = contextlib.nullcontext()
        if shape is not None:
            buffers, dims = [tokens, labels, padding, model.freqs], [1, 1, 1, 0]
            sharded = context_parallel(mesh["ring"], buffers=buffers, buffer_seq_dims=dims)
        with sharded:
            logits = wrapped(tokens, padding).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
            if backward:
                (loss * world).backward()
        assert tokens.shape[1] == N
        loss = loss.detach()
        if shape is not None:
            dist.all_reduce(loss)
        return float(loss)

    losses = []
    for step in range(STEPS):
        losses.append(loss_of(step, backward=True))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(STEPS, backward=False))
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def put(module: Any, style: RingDilated, name: str | None = None) -> Any:
    """The module, or its parts of this name, on a ring of the whole world."""
    device_mesh._axes.clear()
    shape = 1, dist.get_world_size()
    return parallelize_module(module, mesh_of(shape)["ring"], style if name is None else {name: style})
