"""Time and memory of GigaPath's slide encoder on one CPU: the published class, and the same class with `use_ring`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer
from clock import CPU, calls_in_turns
from report import Dtype, Integers, Repeats, Row, compared, integers
from torch import Tensor

from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.cost.machine import peak_memory_bytes, reset_peak_memory
from ring_backends.integrations import gigapath
from ring_backends.testing.world import World

TIMEOUT = 3 * 3600.0  # seconds
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
IN_CHANS = {"gigapath_slide_enc12l384d": 384, "gigapath_slide_enc12l768d": 1536}
"""The width of the tile embeddings, by the architecture of the slide encoder."""


def slides(
    tiles: Integers = "1000,10000,100000",
    arch: Annotated[
        str, typer.Option(metavar="|".join(IN_CHANS), help="Which slide encoder.")
    ] = "gigapath_slide_enc12l384d",
    dtype: Dtype = "fp32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 2,
    repeats: Repeats = 3,
) -> Iterator[Row]:
    """Measure the forward of GigaPath's slide encoder with `use_ring`, relative to the published class, on one CPU.

    The published class computes attention with torch's fused kernel in place of flash-attn. `call_bytes` is what a call
    needs at its peak, beyond the model and the slide. `error` is the largest difference of the embeddings. Needs
    gigapath (docs/slide-encoder.md).
    """
    if find_spec("gigapath") is None:
        raise typer.BadParameter("gigapath is not installed; docs/slide-encoder.md says how to get it.")
    if arch not in IN_CHANS:
        raise typer.BadParameter(f"--arch {arch}: choose from {', '.join(IN_CHANS)}.")
    for number in integers(tiles):
        case = (arch, number, dtype, threads)
        row: Row = {"tiles": number, "dtype": dtype}
        with World(1, call_timeout=TIMEOUT) as world:
            (found,) = world.run(timed, case, repeats)
        row |= {"class": found["class"], "error": found["error"], **compared(**found["times"])}
        for name, on_ring in (("call_bytes", True), ("published_call_bytes", False)):
            with World(1, call_timeout=TIMEOUT) as world:  # a new process, whose peak is that of this call
                (row[name],) = world.run(peak_of_call, case, on_ring)
        yield row


def timed(case: tuple[str, int, str, int], repeats: int) -> dict[str, Any]:
    ours, published = make(case, True), make(case, False)
    with torch.inference_mode():
        found, expected = ours(), published()
        seconds, of_published = calls_in_turns([ours, published], repeats, warm_up=0)
    error = float((found.double() - expected.double()).abs().max())
    times = {"seconds": seconds, "published_seconds": of_published}
    return {"class": import_module("gigapath.slide_encoder").LongNetViT.__module__, "error": error, "times": times}


def peak_of_call(case: tuple[str, int, str, int], on_ring: bool) -> int:
    make((case[0], 64, *case[2:]), on_ring)()  # what a first call loads does not count
    call = make(case, on_ring)
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    with torch.inference_mode():
        call()
    return peak_memory_bytes(CPU) - before


def make(case: tuple[str, int, str, int], on_ring: bool) -> Any:
    """A call that embeds one slide. Its tiles cover a square. Returns [1, width]."""
    arch, number, dtype, threads = case
    torch.set_num_threads(threads)
    module = import_module("gigapath.slide_encoder")
    side = math.isqrt(number - 1) + 1
    torch.manual_seed(0)
    model = module.create_model("", arch, IN_CHANS[arch], global_pool=True, slide_ngrids=side).to(DTYPES[dtype]).eval()
    for base in type(model.encoder.layers[0].self_attn).__mro__:
        if hasattr(sys.modules[base.__module__], "flash_attn_func"):
            sys.modules[base.__module__].flash_attn_func = flash_attention  # type: ignore[attr-defined]
    if on_ring:
        gigapath.use_ring(model, RingDilatedAttention(**vars(gigapath.pattern_of(model))))
    x = torch.randn(1, number, IN_CHANS[arch]).to(DTYPES[dtype])
    coords = 256 * torch.stack([torch.arange(number) // side, torch.arange(number) % side], 1)[None]
    return lambda: model(x, coords)[0]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: None, scale: None, is_causal: bool) -> Any:
    """torch's fused attention with the arguments and results of flash-attn, as the published class calls it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return out.transpose(1, 2), lse
