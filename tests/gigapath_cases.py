"""Runs of GigaPath's slide encoder, on one process by its own code and on rings. The ranks of a test call these."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import gigapath_reference
import torch
import torch.distributed as dist
from native_ranks import ADAPTER, native_ring
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ring_backends import Ring
from ring_backends.activation_checkpointing import keep_attention
from ring_backends.integrations import gigapath
from ring_backends.testing.rings import RingSpec

IN_CHANS, BATCH, GRID = 24, 2, 20


def make_model(
    *, real: bool = False, dtype: torch.dtype = torch.float64, attention_dropout: float = 0.0, **options: Any
) -> Any:
    """A slide encoder with short segments. All its parameters are random, and attention is far from uniform."""
    base = import_module("gigapath.slide_encoder" if real else "gigapath_reference").LongNetViT

    class LongNetViT(base):  # type: ignore[misc,valid-type]
        def get_optimal_segment_length(self, max_wsi_size: int = 0, tile_size: int = 0) -> str:
            return "[8, 16, 32, 64, 128]"

    torch.manual_seed(0)
    sizes = {"embed_dim": 384 if real else 64, "depth": 3}  # GigaPath's configurations have no smaller one
    given = {"in_chans": IN_CHANS, "slide_ngrids": GRID, "dropout": 0.0, "drop_path_rate": 0.0, **sizes, **options}
    model = LongNetViT(**given)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = 2 if "q_proj.weight" in name or "k_proj.weight" in name else 1
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.mul_(factor).add_(noise if parameter.dim() != 2 else noise / parameter.shape[1] ** 0.5)
    for layer in model.encoder.layers:
        layer.self_attn.dropout = attention_dropout
    return model.to(dtype)


def make_slide(num_tiles: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tiles)
    x = torch.randn(BATCH, num_tiles, IN_CHANS, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(GRID * 256, (BATCH, num_tiles, 2), generator=generator)


def attention_of(model: Any, ring: Ring | None = None, adapter: str = ADAPTER, **options: Any) -> Any:
    options = {**asdict(gigapath.pattern_of(model)), "ring": ring, **options}
    return import_module(adapter).RingDilatedAttention(**options)


def on_ring(rings: RingSpec | None, layout: Any = "contiguous", **options: Any) -> Any:
    """A slide encoder on a ring; on a ring of one if ``rings`` is None."""
    model, ring = make_model(**options), None if rings is None else native_ring(layout, rings)
    gigapath.use_ring(model, attention_of(model, ring, dropout_p=options.get("attention_dropout", 0.0)))
    return model


@contextlib.contextmanager
def own_code(model: Any, exact: bool = True) -> Iterator[None]:
    """Lets GigaPath's own attention run on a CPU; with ``exact``, with gradients of its mixing weights.

    It calls flash-attn, and it computes the mixing weights under ``torch.no_grad``.
    """
    self_attn = model.encoder.layers[0].self_attn
    modules = [sys.modules[base.__module__] for base in type(self_attn).__mro__]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "flash_attn_func"):
                stack.enter_context(mock.patch.object(module, "flash_attn_func", plain_attention))
        if hasattr(self_attn, "has_exact_gradients"):
            stack.enter_context(mock.patch.object(gigapath_reference.DilatedAttention, "has_exact_gradients", exact))
        elif exact:
            stack.enter_context(mock.patch.object(torch, "no_grad", contextlib.nullcontext))
        yield


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    """As flash_attn_func, with its LSE: [batch, seq, heads, head_dim] and [batch, heads, seq]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def embed(model: Any, num_tiles: int, all_layer_embed: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The embeddings, and the gradients of x and of all parameters for random gradients of the embeddings."""
    x, coords = make_slide(num_tiles, model.cls_token.dtype)
    x.requires_grad_()
    embeddings = model(x, coords, all_layer_embed=all_layer_embed)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(e.shape, generator=generator, dtype=torch.float64).to(e) for e in embeddings]
    sum((e * grad).sum() for e, grad in zip(embeddings, grads, strict=True)).backward()
    return [e.detach() for e in embeddings], {"x": x.grad, **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def embed_by_own_code(num_tiles: int, all_layer_embed: bool = False, exact: bool = True, **options: Any) -> Any:
    model = make_model(**options)
    with own_code(model, exact):
        return embed(model, num_tiles, all_layer_embed)


def gradients_of_one_layer(model: Any, layer: int) -> dict[str, Tensor]:
    """The gradients of a loss on the embeddings of one layer. Parameters without a gradient are left out."""
    model(*make_slide(30), all_layer_embed=True)[layer].square().sum().backward()
    return gradients(model)


def gradients_of_one_layer_here(rings: RingSpec, layer: int) -> dict[str, Tensor]:
    return gradients_of_one_layer(on_ring(rings), layer)


def embed_here(rings: RingSpec, layout: str, num_tiles: int, all_layer_embed: bool = False, **options: Any) -> Any:
    return embed(on_ring(rings, layout, **options), num_tiles, all_layer_embed)


def rows_here(rings: RingSpec, num_tiles: int) -> tuple[int, int]:
    """How many rows of a slide this rank projects, and how many go through its feed-forward networks."""
    model, found = on_ring(rings), {}
    for name, module in (("tiles", model.patch_embed), ("tokens", model.encoder.layers[0].ffn)):
        module.register_forward_hook(lambda module, args, out, name=name: found.update({name: args[0].shape[1]}))
    model(*make_slide(num_tiles))
    return found["tiles"], found["tokens"]


def mean_of_ranks(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients as a framework that averages over the ranks reduces them. All ranks must have the same gradients."""
    assert all(grads.keys() == of_ranks[0].keys() for grads in of_ranks)
    return {name: sum(grads[name] for grads in of_ranks) / len(of_ranks) for name in of_ranks[0]}  # type: ignore[misc]


def assert_same(of_ranks: list[Any], expected: Any, tolerance: float) -> None:
    """Embeddings on every rank, and the mean of the ranks' gradients, each relative to its largest element."""
    for embeddings, _ in of_ranks:
        assert len(embeddings) == len(expected[0])
        for found, right in zip(embeddings, expected[0], strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=tolerance)
    grads = mean_of_ranks([grads for _, grads in of_ranks])
    assert grads.keys() == expected[1].keys()
    for name, right in expected[1].items():
        assert largest_error(grads[name], right) <= tolerance, (name, largest_error(grads[name], right))


def largest_error(found: Tensor, right: Tensor) -> float:
    """The largest error of an element, relative to the largest element if that is above 1."""
    return float((found - right).abs().max() / right.abs().max().clamp(min=1))


def random_here(rings: RingSpec | None, seed: int, checkpointing: str = "none", **options: Any) -> Any:
    """Embeddings and gradients in training mode, after ``torch.manual_seed(seed + rank)``.

    Without rings, the one process draws the numbers that a ring's rank 0 draws for ``seed``.
    """
    model = on_ring(rings, **options).train()
    for index, layer in enumerate(model.encoder.layers):
        if checkpointing != "none":
            context_fn = {"context_fn": keep_attention} if checkpointing == "keep attention" else {}
            model.encoder.layers[index] = checkpoint_wrapper(layer, **context_fn)
    torch.manual_seed(seed + (0 if rings is None else dist.get_rank()))
    if rings is None:
        torch.manual_seed(int(torch.randint(2**53, ())))
    return embed(model, 61, all_layer_embed=True)


def dropped_here(rings: RingSpec) -> tuple[list[Tensor], list[Tensor]]:
    """What each dropout of a slide encoder keeps, in two calls after the same seed: bool [batch, local seq, width]."""
    model, kept = on_ring(rings, dropout=0.3).train(), []

    def remember(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        kept.append((out != 0).view(BATCH, -1, out.shape[-1]))

    for name, module in model.encoder.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.register_forward_hook(remember)
            assert "self_attn" not in name
    torch.manual_seed(3)
    for _ in range(2):
        model(*make_slide(100))
    return kept[: len(kept) // 2], kept[len(kept) // 2 :]


def generators_here(rings: RingSpec, training: bool) -> bool:
    """Whether a call leaves torch's generator as it was, but for the one number that a call in training mode takes."""
    model = on_ring(rings, dropout=0.3, drop_path_rate=0.3).train(training)
    torch.manual_seed(11)
    if training:
        torch.randint(2**53, ())
    expected = torch.rand(3)
    torch.manual_seed(11)
    model(*make_slide(5))
    return bool(torch.equal(torch.rand(3), expected))


class ClassificationHead(nn.Module):
    """As in GigaPath's fine-tuning: a linear layer over embeddings of some layers. It calls ``forward`` directly."""

    def __init__(self, slide_encoder: Any, feat_layer: tuple[int, int] = (1, 3)) -> None:
        super().__init__()
        self.slide_encoder, self.feat_layer = slide_encoder, feat_layer
        torch.manual_seed(2)
        self.classifier = nn.Linear(2 * slide_encoder.cls_token.shape[2], 3).to(slide_encoder.cls_token.dtype)

    def forward(self, images: Tensor, coords: Tensor) -> Tensor:
        layers = self.slide_encoder.forward(images, coords, all_layer_embed=True)
        return self.classifier(torch.cat([layers[index] for index in self.feat_layer], 1))


def train(head: nn.Module, ring: Ring, data_rank: int | None = None, adapter: str = ADAPTER) -> Any:
    """Losses of three steps, and the parameters after them. A ring trains on one of the slides of a step."""
    state = import_module(adapter).parallelize(head, lambda parameters: torch.optim.SGD(parameters, lr=0.1), ring)
    losses = []
    for step in range(3):
        slides = [make_slide(40 + 7 * step + index) for index in range(2)]
        mine = slides if data_rank is None else slides[data_rank : data_rank + 1]
        logits = torch.cat([state.model(*slide) for slide in mine])
        labels = torch.tensor([0, 2] * len(mine))
        loss = state.loss(nn.functional.cross_entropy(logits, labels, reduction="sum"), BATCH * len(mine))
        state.backward(loss)
        state.step()
        losses.append(float(loss.detach()))
    return losses, state.full_state_dict()


def train_here(rings: RingSpec, adapter: str = ADAPTER, feat_layer: tuple[int, int] = (1, 3)) -> Any:
    model, ring = make_model(), native_ring(rings=rings, adapter=adapter)
    gigapath.use_ring(model, attention_of(model, ring, adapter))
    head = ClassificationHead(model, feat_layer)
    return train(head, ring, ring.data_rank if ring.data_size > 1 else None, adapter)


def classify_in_bf16(rings: RingSpec, adapter: str, **options: Any) -> tuple[list[int], Tensor]:
    """The places of a slide's tiles, whose coordinates are in fp32, and the outputs of a model in bf16."""
    model, ring = make_model(dtype=torch.float32), native_ring(rings=rings, adapter=adapter)
    gigapath.use_ring(model, attention_of(model, ring, adapter))
    places, coords_to_pos = [], model.coords_to_pos

    def remember(*args: Any) -> Tensor:
        places.append(coords_to_pos(*args))
        return places[-1]

    model.coords_to_pos = remember
    parallelize = partial(import_module(adapter).parallelize, mixed_precision=torch.bfloat16, **options)
    state = parallelize(ClassificationHead(model), lambda parameters: torch.optim.SGD(parameters, lr=0.1), ring)
    tiles, coords = make_slide(600, torch.float32)
    out = state.model(tiles, coords.float())
    state.backward(state.loss(out.sum(), BATCH))
    state.step()
    return places[0].tolist(), out.detach().float()
