"""Runs of models with torchscale's LongNet, by its own code and on rings. The ranks of a test call these."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import gigapath_cases
import torch
import torch.distributed as dist
import torchscale_modules
from native_ranks import ADAPTER, native_ring
from torch import Tensor, nn

from ring_backends import Ring
from ring_backends.integrations import torchscale
from ring_backends.testing.rings import RingSpec

WIDTH, HEADS, LAYERS, IN_CHANNELS, VOCABULARY, POSITIONS = 24, 4, 2, 5, 19, 130
KINDS = ("embeddings", "tokens", "decoder")


class Volumes(nn.Module):
    """An encoder of the voxels of CT volumes within another model: a projection before it and a head behind it."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.proj, self.encoder, self.head = nn.Linear(IN_CHANNELS, WIDTH), encoder, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        options = {"encoder_padding_mask": mask, "return_all_hiddens": True}
        found = self.encoder(None, token_embeddings=self.proj(x), **options)
        assert torch.equal(found["encoder_padding_mask"] != 0, torch.zeros(x.shape[:2]) != 0 if mask is None else mask)
        return [self.head(found["encoder_out"]), *found["encoder_states"], found["encoder_embedding"]]


class Genomes(nn.Module):
    """An encoder of tokens, with learned positions and an output projection."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        found = self.encoder(x, encoder_padding_mask=mask)
        assert not found["encoder_states"]
        return [found["encoder_out"], found["encoder_embedding"]]


class Texts(nn.Module):
    """A language model: a decoder of tokens, with learned positions and an output projection."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        logits, extra = self.decoder(x, self_attn_padding_mask=mask, return_all_hiddens=True)
        return [logits, *extra["inner_states"]]


def make_model(kind: str, *, real: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A model of one of ``KINDS`` with short segments. All its parameters are random."""
    torch.manual_seed(0)
    side = "decoder" if kind == "decoder" else "encoder"
    modules = _real_modules() if real else (torchscale_modules, torchscale_modules)
    args = _args(side, real, **options)
    given = {}
    if kind != "embeddings":
        given["embed_tokens"] = nn.Embedding(VOCABULARY, WIDTH)
        given["embed_positions"] = modules[0].PositionalEmbedding(POSITIONS, WIDTH)
        given["output_projection"] = nn.Linear(WIDTH, VOCABULARY, bias=False)
    part = getattr(modules[1], "LongNetDecoder" if kind == "decoder" else "LongNetEncoder")(args, **given)
    model = {"embeddings": Volumes, "tokens": Genomes, "decoder": Texts}[kind](part)
    gigapath_cases.add_noise(model, 0.2)
    return model.to(dtype)


def _args(side: str, real: bool, **options: Any) -> Any:
    sizes = {"embed_dim": WIDTH, "attention_heads": HEADS, "ffn_embed_dim": 40, "layers": LAYERS}
    given = {**{f"{side}_{name}": size for name, size in sizes.items()}, "no_scale_embedding": False}
    given |= {"segment_length": "[8, 16, 64]", "dilated_ratio": "[1, 2, 4]", "flash_attention": True, **options}
    module = import_module("torchscale.architecture.config") if real else torchscale_modules
    return (module.EncoderConfig if side == "encoder" else module.DecoderConfig)(**given)


def _real_modules() -> tuple[Any, Any]:
    """torchscale's embeddings and models. Its only import from timm is replaced."""
    for name in ("timm", "timm.models", "timm.models.layers"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["timm.models.layers"].drop_path = _drop_path  # type: ignore[attr-defined]
    return import_module("torchscale.component.embedding"), import_module("torchscale.model.LongNet")


def _drop_path(x: Tensor, drop_prob: float, training: bool) -> Tensor:
    path = torchscale_modules.DropPath(drop_prob).train(training)
    dropped: Tensor = path(x)
    return dropped


def make_batch(kind: str, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sequences of these numbers of tokens at random columns, and the mask of their padding."""
    generator, columns = torch.Generator().manual_seed(sum(numbers)), max(numbers)
    mask = torch.ones(len(numbers), columns, dtype=torch.bool)
    for row, number in zip(mask, numbers, strict=True):
        row[torch.randperm(columns, generator=generator)[:number]] = False
    if kind == "embeddings":
        return torch.randn(*mask.shape, IN_CHANNELS, generator=generator, dtype=torch.float64), mask
    return torch.randint(VOCABULARY, mask.shape, generator=generator), mask


def compute(model: Any, kind: str, numbers: Sequence[int], how: str, seed: int | None = None) -> Any:
    """Outputs of a batch, and the gradients of x and of all parameters for random gradients of the outputs.

    Args:
        how: "whole" without a mask, "masked" with one, "kept" with one for the rows that are not padding, and "alone"
            for the same rows of each sequence by itself.
        seed: seed of random numbers.
    """
    x, mask = make_batch(kind, numbers)
    if x.is_floating_point():
        x.requires_grad_()
    if seed is not None:
        torch.manual_seed(seed)
    if how == "alone":
        of_each = [model(x[[index]][:, kept]) for index, kept in enumerate(~mask)]
        outs = [torch.cat([one.flatten(0, 1) for one in of_layer]) for of_layer in zip(*of_each, strict=True)]
    else:
        outs = model(x, None if how == "whole" else mask)
        if how == "kept":
            outs = [out[~mask] for out in outs]
    return gigapath_cases.differentiated(model, x, outs)


def by_own_code(kind: str, numbers: Any, how: str, seed: Any = None, exact: bool = True, **options: Any) -> Any:
    model = make_model(kind, **options)
    with gigapath_cases.own_code(model, exact), _in_fp64(options.get("real", False)):
        return compute(model, kind, numbers, how, seed)


def on_ring(kind: str, rings: RingSpec | None, layout: Any = "contiguous", **options: Any) -> Any:
    """A model on a ring; on a ring of one if ``rings`` is None. ``options`` are those of use_ring and of the model."""
    how = {name: options.pop(name, False) for name in ("ignore_padding", "constant_mixing")}
    model, ring = make_model(kind, **options), Ring() if rings is None else native_ring(layout, rings)
    use(model, ring, how, dropout_p=options.get("attention_dropout", 0.0))
    return model


def use(model: Any, ring: Ring, how: Any = MappingProxyType({}), **options: Any) -> None:
    attention = {**vars(torchscale.pattern_of(model)), "ring": ring, **options}
    torchscale.use_ring(model, import_module(ADAPTER).RingDilatedAttention(**attention), **how)


def here(kind: str, rings: Any, layout: str, numbers: Any, how: str, seed: Any = None, **options: Any) -> Any:
    model = on_ring(kind, rings, layout, ignore_padding=how == "kept", **options)
    if seed is not None and rings is None:  # the one process draws the numbers that a ring's rank 0 draws
        torch.manual_seed(seed)
        seed = int(torch.randint(2**53, ()))
    elif seed is not None:
        seed += dist.get_rank()
    with _in_fp64(options.get("real", False)):
        return compute(model, kind, numbers, how, seed)


def _in_fp64(real: bool) -> contextlib.AbstractContextManager[Any]:
    """torchscale computes activations in fp32. Within it, in the dtype of the model."""
    return mock.patch.object(Tensor, "float", lambda x: x) if real else contextlib.nullcontext()
