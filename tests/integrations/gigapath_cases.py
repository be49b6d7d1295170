"""Runs of GigaPath's slide encoder, on one process by its own code and on rings. The ranks of a test call these."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchscale_modules
from native_ranks import ADAPTER, native_ring
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ring_backends import Ring
from ring_backends.activation_checkpointing import keep_attention
from ring_backends.integrations import gigapath
from ring_backends.testing.rings import TWO_OF_TWO, RingSpec

IN_CHANS, BATCH, GRID = 24, 2, 20


def make_model(*, real: bool = False, dtype: Any = torch.float64, attention_dropout: float = 0, **options: Any) -> Any:
    """A slide encoder with short segments. All its parameters are random, and attention is far from uniform."""
    base = import_module("gigapath.slide_encoder" if real else "gigapath_reference").LongNetViT

    class LongNetViT(base):  # type: ignore[misc,valid-type]
        def get_optimal_segment_length(self, max_wsi_size: int = 0, tile_size: int = 0) -> str:
            return "[8, 16, 32, 64, 128]"

    torch.manual_seed(0)
    sizes = {"embed_dim": 384 if real else 64, "depth": 3}  # GigaPath's configurations have no smaller one
    given = {"in_chans": IN_CHANS, "slide_ngrids": GRID, "dropout": 0.0, "drop_path_rate": 0.0, **sizes, **options}
    model = LongNetViT(**given)
    add_noise(model, 0.1)
    for layer in model.encoder.layers:
        layer.self_attn.dropout = attention_dropout
    return model.to(dtype)


def add_noise(model: nn.Module, size: float) -> None:
    """Change all parameters, many of which are 0 or 1 in a new model, and make scores of attention differ more."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = 2 if "q_proj.weight" in name or "k_proj.weight" in name else 1
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.mul_(factor).add_(noise if parameter.dim() != 2 else noise / parameter.shape[1] ** 0.5)


def make_slide(num_tiles: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tiles)
    x = torch.randn(BATCH, num_tiles, IN_CHANS, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(GRID * 256, (BATCH, num_tiles, 2), generator=generator)


def attention_of(model: Any, ring: Ring | None = None, adapter: str = ADAPTER, **options: Any) -> Any:
    options = {**asdict(gigapath.pattern_of(model)), "ring": ring, **options}
    return import_module(adapter).RingDilatedAttention(**options)


def on_ring(rings: RingSpec | None, layout: Any = "contiguous", constant_mixing: bool = False, **options: Any) -> Any:
    """A slide encoder on a ring; on a ring of one if ``rings`` is None."""
    model, ring = make_model(**options), None if rings is None else native_ring(layout, rings)
    attention = attention_of(model, ring, dropout_p=options.get("attention_dropout", 0.0))
    gigapath.use_ring(model, attention, constant_mixing=constant_mixing)
    return model


@contextlib.contextmanager
def own_code(model: Any, exact: bool = True) -> Iterator[None]:
    """Lets GigaPath's or torchscale's own attention run on a CPU; with ``exact``, its mixing weights have gradients.

    It calls flash-attn, and it computes the mixing weights under ``torch.no_grad``.
    """
    self_attn = next(module for module in model.modules() if hasattr(module, "inner_attn_ln"))
    modules = [sys.modules[base.__module__] for base in type(self_attn).__mro__]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "flash_attn_func"):
                stack.enter_context(mock.patch.object(module, "flash_attn_func", plain_attention))
        if hasattr(self_attn, "has_exact_gradients"):
            stack.enter_context(mock.patch.object(torchscale_modules.DilatedAttention, "has_exact_gradients", exact))
        elif exact:
            stack.enter_context(mock.patch.object(torch, "no_grad", contextlib.nullcontext))
        yield


def plain_attention(q, k, v, dropout, bias, scale, is_causal) -> tuple[Tensor, Tensor]:
    """As flash_attn_func, with its LSE: [batch, seq, heads, head_dim] and [batch, heads, seq]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def embed(model: Any, num_tiles: int, all_layer_embed: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The embeddings, and the gradients of x and of all parameters for random gradients of the embeddings."""
    x, coords = make_slide(num_tiles, model.cls_token.dtype)
    x.requires_grad_()
    embeddings = model(x, coords, all_layer_embed=all_layer_embed)
    return differentiated(model, x, embeddings)


def differentiated(model: nn.Module, x: Tensor, outs: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs, and the gradients of x and of all parameters for random gradients of the outputs."""
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True)).backward()
    of_x = {} if x.grad is None else {"x": x.grad}
    return [out.detach() for out in outs], {**of_x, **gradients(model)}


def make_batch(numbers: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of slides with these numbers of tiles, at random columns: x, coords and padding mask. Padding is NaN."""
    generator = torch.Generator().manual_seed(sum(numbers))
    columns = max(numbers) + 2
    x = torch.full((len(numbers), columns, IN_CHANS), torch.nan, dtype=dtype)
    coords = torch.full((len(numbers), columns, 2), torch.nan, dtype=torch.float64)
    padding_mask = torch.ones(len(numbers), columns, dtype=torch.bool)
    for index, number in enumerate(numbers):
        kept = torch.randperm(columns, generator=generator)[:number].sort().values
        padding_mask[index, kept] = False
        x[index, kept] = torch.randn(number, IN_CHANS, generator=generator, dtype=torch.float64).to(dtype)
        coords[index, kept] = torch.randint(GRID * 256, (number, 2), generator=generator).double()
    return x, coords, padding_mask


def embed_batch(model: Any, numbers: Sequence[int], all_layer_embed: bool = True, alone: bool = False) -> Any:
    """Embeddings of slides and of tiles, and gradients as :func:`embed`, of a batch of :func:`make_batch`.

    With ``alone``, a model without a ring computes each slide by itself, without padding.
    """
    x, coords, padding_mask = make_batch(numbers, model.cls_token.dtype)
    x.requires_grad_()
    if alone:
        of_slides = [
            own_tiles(model, x[[i]][:, k], coords[[i]][:, k], all_layer_embed) for i, k in enumerate(~padding_mask)
        ]
        layers = range(len(of_slides[0][0]))
        embeddings = [torch.cat([slides[layer] for slides, _ in of_slides]) for layer in layers]
        whole = [torch.cat([tiles[layer][0] for _, tiles in of_slides]) for layer in layers]
    else:
        embeddings, tiles = model(x, coords, all_layer_embed, padding_mask, tile_embeddings=True)
        assert all(not layer[padding_mask].any() for layer in tiles)
        whole = [layer[~padding_mask] for layer in tiles]
    return differentiated(model, x, [*embeddings, *whole])


def own_tiles(model: Any, x: Tensor, coords: Tensor, all_layer_embed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Embeddings of the slides and of the tiles of each layer, by the model's own code."""
    encoded: list[dict[str, Any]] = []
    hook = model.encoder.register_forward_hook(lambda module, args, out: encoded.append(out))
    embeddings = model(x, coords, all_layer_embed=all_layer_embed)
    hook.remove()
    states = encoded[0]["encoder_states"] if all_layer_embed else [encoded[0]["encoder_out"]]
    return embeddings, [model.norm(state)[:, 1:] for state in states]


def by_own_code(function: Callable[..., Any], *args: Any, exact: bool = True, **options: Any) -> Any:
    """``function(model, *args)`` by GigaPath's own code on one process. ``options`` are those of the model."""
    model = make_model(**options)
    alone = {"alone": True} if function is embed_batch else {}
    with own_code(model, exact):
        return function(model, *args, **alone)


def here(function: Callable[..., Any], rings: RingSpec | None, layout: str, *args: Any, **options: Any) -> Any:
    """``function(model, *args)`` of a model of :func:`on_ring`."""
    return function(on_ring(rings, layout, **options), *args)


def attention_map(model: Any, numbers: Any, layer: int, tile: int | None) -> Tensor:
    x, coords, padding_mask = make_batch(numbers)
    return gigapath.attention_map(model.eval(), x, coords, padding_mask=padding_mask, layer=layer, tile=tile)


def map_by_own_code(numbers: Sequence[int], layer: int, tile: int | None) -> Tensor:
    """The rows of the dense matrices of attention weights, from the own code's queries and keys of each slide alone."""
    (x, coords, padding_mask), model = make_batch(numbers), make_model().eval()
    self_attn, rows = model.encoder.layers[layer].self_attn, {}
    self_attn.q_proj.register_forward_hook(lambda module, args, out: rows.update(q=out))
    self_attn.k_proj.register_forward_hook(lambda module, args, out: rows.update(k=out))
    maps = torch.zeros(len(numbers), self_attn.num_heads, x.shape[1], dtype=x.dtype)
    for index, kept in enumerate(~padding_mask):
        model(x[[index]][:, kept], coords[[index]][:, kept])
        q, k = (rows[name].unflatten(-1, (self_attn.num_heads, -1)) for name in "qk")
        each_key = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand(-1, -1, self_attn.num_heads, -1)
        branches = (self_attn.args.segment_length, self_attn.args.dilated_ratio)
        found = torchscale_modules.reference_attention(q, k, each_key, branches, False)[0]
        maps[index][:, kept] = found[0 if tile is None else int(kept[: tile + 1].sum())][:, 1:].detach()
    return maps


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients_of_one_layer(model: Any, layer: int) -> dict[str, Tensor]:
    """The gradients of a loss on the embeddings of one layer. Parameters without a gradient are left out."""
    model(*make_slide(30), all_layer_embed=True)[layer].square().sum().backward()
    return gradients(model)


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


def mean_error(found: Tensor, right: Tensor) -> float:
    """The root of the mean square error, relative to the largest element if that is above 1."""
    return float((found - right).square().mean().sqrt() / right.abs().max().clamp(min=1))


def random_here(rings: Any, seed: int, checkpointing: str = "none", numbers: Any = None, **options: Any) -> Any:
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
    return embed(model, 61, all_layer_embed=True) if numbers is None else embed_batch(model, numbers)


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


def generators_here(rings: RingSpec, training: bool, rate: float = 0.3) -> bool:
    """Whether a call leaves torch's generator as it was, but for the one number that a call with dropout takes."""
    model = on_ring(rings, dropout=rate, drop_path_rate=rate).train(training)
    torch.manual_seed(11)
    if training and rate > 0:
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


def finetune(ring: Ring | None, path: Path, precision: torch.dtype, real: bool = False) -> tuple[list[float], Any, Any]:
    """GigaPath's fine-tuning recipe: layer-wise learning rates, accumulated gradients, autocast and a GradScaler.

    Args:
        ring: None means the model's own code on one process.
        path: where rank 0 saves the state dict.
        precision: torch.float32, or torch.float16 for autocast in fp16.

    Returns:
        The loss of each of 20 micro-batches of one slide, the logits of a slide in evaluation after them, and the
        logits of the saved state dict in the published class.
    """
    options: dict[str, Any] = {"real": real, "dtype": torch.float32}
    head = ClassificationHead(make_model(**options))
    if ring is not None:
        gigapath.use_ring(head.slide_encoder, attention_of(head.slide_encoder, ring))
    groups = [{"params": [p], "lr": 1e-3 * 0.75 ** depth_from_top(name)} for name, p in head.named_parameters()]
    optimizer, scaler = torch.optim.AdamW(groups, weight_decay=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = head if ring is None else nn.parallel.DistributedDataParallel(head, find_unused_parameters=True)
    losses, accumulation_steps = [], 2

    def logits_of(model: nn.Module, number: int) -> Tensor:
        x, coords = make_slide(number, torch.float32)
        with torch.autocast("cpu", torch.float16, enabled=precision is torch.float16):
            return model(x[:1], coords[:1]).float()

    with own_code(head.slide_encoder) if ring is None else contextlib.nullcontext():
        model.train()
        for step in range(20):
            loss = nn.functional.cross_entropy(logits_of(model, 30 + step % 4), torch.tensor([step % 2]))
            scaler.scale(loss / accumulation_steps).backward()
            if (step + 1) % accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            logits = logits_of(model, 50)
    if ring is None:
        return losses, logits, logits
    if ring.rank == 0:
        torch.save(head.state_dict(), path)
    dist.barrier()
    published = ClassificationHead(make_model(**options)).eval()
    published.load_state_dict(torch.load(path))
    with own_code(published.slide_encoder), torch.no_grad():
        return losses, logits, logits_of(published, 50)


def depth_from_top(name: str) -> int:
    """How many layers lie above a parameter of a ClassificationHead, for its learning rate."""
    if "cls_token" in name:
        return 4
    return 3 - int(name.split(".")[3]) if name.startswith("slide_encoder.encoder.layers") else 0


def finetune_here(path: Path, precision: torch.dtype, real: bool) -> Any:
    return finetune(native_ring(rings=TWO_OF_TWO), path, precision, real)
