"""One rank of ``generate``: loads the model, fills the caches with the prompt, and draws one byte after another."""

from __future__ import annotations

import codecs
import dataclasses
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.cli.generate import GenerateOptions
from ring_backends.cli.language_model import LongNetLM, make_optimizer
from ring_backends.cli.output import write_json
from ring_backends.cli.train import TrainOptions, options_path
from ring_backends.cli.training_run import read_saved
from ring_backends.cost.machine import device_name, select_device
from ring_backends.kernels import resolve_dtype
from ring_backends.longnet.model import new_caches
from ring_backends.registry import load_adapter
from ring_backends.releases import versions
from ring_backends.ring.collectives import agree
from ring_backends.ring.ring import Ring


def run(options: GenerateOptions) -> None:
    """Generate on one rank. The environment variable RANK says which one.

    Raises:
        ValueError, AdapterUnavailableError: an option cannot work.
        RingMismatchError: the ranks made different calls.
        RingPeerError: another rank failed or did not answer in time.
    """
    device = select_device(options.device)
    backend = load_adapter(options.backend)
    trained = read_options(options.checkpoint)
    ring = backend.initialize(layout=options.layout, timeout=timedelta(seconds=options.timeout))
    model = load_model(options.checkpoint, trained, backend, ring, device)
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def write(text: str) -> None:
        if is_first:
            print(text, end="", flush=True)

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    started, seconds, new = time.perf_counter(), 0.0, bytearray()
    for token in generate(model, ring, options.prompt_bytes(), options, device):
        new.append(token)
        write(decoder.decode(bytes([token])))
        if len(new) == 1:
            started = time.perf_counter()  # the first byte also waits for the prompt
        seconds = time.perf_counter() - started
    write(decoder.decode(b"", final=True) + "\n")
    if is_first:
        speed = (len(new) - 1) / seconds if seconds else None
        rate = f", {speed:,.0f} per second" if speed else ""
        print(f"{len(new)} bytes{rate}, on {device_name(device)}.", file=sys.stderr)
        if options.json is not None:
            result = {
                "text": bytes(new).decode("utf-8", "replace"),
                "bytes": [*new],
                "bytes_per_second": speed,
                "ring_size": ring.size,
                "device": device_name(device),
                "versions": versions(),
                "options": dataclasses.asdict(options),
            }
            write_json(options.json, result)
    if dist.is_initialized():
        dist.destroy_process_group()


def generate(
    model: LongNetLM, ring: Ring, prompt: bytes, options: GenerateOptions, device: torch.device
) -> Iterator[int]:
    """Continue a prompt, byte by byte. Every rank yields the same bytes."""
    caches = new_caches(model.layers, len(prompt) + options.max_new_tokens)
    tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).to(device, torch.int64).unsqueeze(0)
    random = torch.Generator().manual_seed(options.seed)
    # The last byte is the first step, so that every rank has its logits.
    tokens, last = tokens[:, :-1], tokens[:, -1:]
    with torch.no_grad():
        if tokens.shape[1]:
            model(ring.shard(tokens), tokens.shape[1], caches)
        for _ in range(options.max_new_tokens):
            logits = model(last, None, caches)[0, -1]
            drawn = draw(logits, options.temperature, options.top_p, random)
            token = int(agree(ring, "generate", None, [drawn])[0][0])
            yield token
            last = torch.full_like(last, token)


def draw(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """Draw the number of a logit, from the likeliest ones whose probabilities add up to ``top_p``."""
    if not temperature:
        return int(logits.argmax())
    probabilities, numbers = (logits.double().cpu() / temperature).softmax(0).sort(descending=True)
    is_needed = probabilities.cumsum(0) - probabilities < top_p
    return int(numbers[torch.multinomial(probabilities * is_needed, 1, generator=random)])


def read_options(checkpoint: Path) -> TrainOptions:
    """The options of the run that saved a checkpoint.

    Raises:
        ValueError: ``train`` did not write the checkpoint.
    """
    saved = read_saved(checkpoint, "checkpoint", "give the PATH of train --save")
    names = [field.name for field in dataclasses.fields(TrainOptions)]
    missing = [name for name in names if name not in saved]
    if missing:
        path = options_path(checkpoint)
        raise ValueError(f"checkpoint = {str(checkpoint)!r}: {path} lacks {', '.join(missing)}; train the model again.")
    values: dict[str, Any] = {n: tuple(saved[n]) if isinstance(saved[n], list) else saved[n] for n in names}
    return TrainOptions(**values)


def load_model(checkpoint: Path, trained: TrainOptions, backend: Any, ring: Ring, device: torch.device) -> LongNetLM:
    """The trained model with the attention of ``backend``. The adapter that wrote the checkpoint reads it.

    Raises:
        AdapterUnavailableError: that adapter is not available.
        ValueError: the checkpoint cannot be read on this number of ranks.
    """
    dtype = resolve_dtype(trained.dtype, device)
    reader = load_adapter(trained.backend)
    own_ring = reader.initialize(layout=ring.layout_kind, timeout=ring.timeout)
    loaded = LongNetLM(trained, reader, own_ring).to(device, dtype)
    state = reader.parallelize(loaded, make_optimizer(trained, dtype), own_ring)
    state.load(checkpoint)
    parameters = state.full_state_dict()
    model = LongNetLM(trained, backend, ring).to(device, dtype)
    model.load_state_dict(parameters)
    return model.eval()
