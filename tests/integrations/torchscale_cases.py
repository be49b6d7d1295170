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
import pytest
import torch
import torch.distributed as dist
import torchscale_modules
from native_ranks import ADAPTER, native_ring
from torch import Tensor, nn

from ring_backends import Ring, RingMismatchError
from ring_backends.integrations import torchscale
from ring_backends.testing.rings import RingSpec, new_ring

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


def check_other_inputs(rings: RingSpec, change: str) -> None:
    kind = "tokens" if change in ("src_tokens", "encoder_padding_mask") else "embeddings"
    model, (x, mask) = make_model(kind), make_batch(kind, (30, 20))
    use(model, new_ring(ADAPTER, rings))  # a mismatch closes the ring
    if dist.get_rank() == 1:
        x = x * (1 + 1e-9) if change == "rounding" else x.flip(0) if change in ("src_tokens", "token_embeddings") else x
        mask = mask.flip(0) if change == "encoder_padding_mask" else mask
        model.train(change != "training mode")
    is_refused = pytest.raises(RingMismatchError, match=change) if change != "rounding" else contextlib.nullcontext()
    with is_refused:
        model(x, mask)


def check_bad_call(rings: RingSpec) -> None:
    model = on_ring("tokens", rings)
    x, _ = make_batch("tokens", (30, 20))
    x[0, 29] = VOCABULARY  # only the last rank would look it up
    message = r"src_tokens of model\.encoder reaches 19: model\.encoder\.embed_tokens has rows 0 … 18"
    with pytest.raises(ValueError, match=message):
        model(x)


def rows_here(rings: RingSpec, num_tokens: int) -> int:
    """How many rows this rank's feed-forward networks compute."""
    model, found = on_ring("embeddings", rings), []
    model.encoder.layers[0].ffn.register_forward_hook(lambda module, args, out: found.append(out.shape[1]))
    model(torch.zeros(1, num_tokens, IN_CHANNELS, dtype=torch.float64))
    return found[0]
