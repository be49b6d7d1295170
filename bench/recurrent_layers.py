"""The time of convolutions and recurrent layers of transformers' models on two ranks, relative to one rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from clock import calls_in_turns
from report import Repeats, Row, Shrink, compared

from ring_backends.adapters import native
from ring_backends.testing.world import World

_DIMS = ("linear_key_head_dim", "linear_value_head_dim")
_COMMON = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
_DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, **dict.fromkeys(_DIMS, 64)}
_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "convolution": ("lfm2", 16384, {**_COMMON, **_ATTENTION, "layer_types": ["conv"]}),
    "gated delta rule": ("qwen3_next", 8192, {**_COMMON, **_ATTENTION, **_DELTA, "layer_types": ["linear_attention"]}),
    "Mamba 2": ("mamba2", 8192, {**_COMMON, "num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 2}),
    "Mamba 1": ("mamba", 1024, {**_COMMON, "state_size": 16}),
}
"""For each kind of layer: a type of models that has it, tokens, and the sizes of a model."""


def recurrent_layers(repeats: Repeats = 7, shrink: Shrink = 1) -> Iterator[Row]:
    """Measure forward and backward of one layer on two ranks, relative to one rank, with one thread each.

    The functions are the references of transformers, which compute on CPUs. `sent_bytes` is what a rank sends in both
    directions, the larger of the two, and `error` the largest difference of the results, relative to their largest.
    """
    with World(2, call_timeout=3600.0) as world:
        for kind, (_, tokens, _) in LAYERS.items():
            found = world.run(measure, kind, tokens // shrink, repeats)
            by_rank = [of_rank["seconds"] for of_rank in found]
            two, one = ([max(call) for call in zip(*(of[who] for of in by_rank), strict=True)] for who in (0, 1))
            yield {
                "layer": kind,
                "tokens": tokens // shrink,
                **compared(two_ranks_seconds=two, one_rank_seconds=one),
                "sent_bytes": max(of_rank["bytes"] for of_rank in found),
                "error": max(of_rank["error"] for of_rank in found),
            }


def measure(kind: str, tokens: int, repeats: int) -> dict[str, Any]:
    """The seconds of the calls of this rank: on the ring, and of rank 0 alone, which take turns."""
    import transformers

    from ring_backends.integrations.transformers import register
    from ring_backends.integrations.transformers.recurrent import recurrent_layers_of

    model_type, _, sizes = LAYERS[kind]
    ring = native.initialize()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    alone = copy.deepcopy(model)
    register(ring, f"ring_of_{model_type}", model=model)
    (of_ring,), (of_one,) = recurrent_layers_of(model), recurrent_layers_of(alone)
    rows, weights = torch.randn(2, 1, tokens, sizes["hidden_size"])
    local_rows, local_weights = ring.shard(rows), ring.shard(weights)

    def call(layer: Any, rows: Any, weights: Any, **arguments: Any) -> Any:
        rows = rows.detach().requires_grad_()
        out = layer(hidden_states=rows, **arguments)
        (out * weights).sum().backward()
        return out.detach(), rows.grad

    def on_ring() -> Any:
        return call(of_ring, local_rows, local_weights, seq_len=tokens)

    def on_one() -> Any:
        return call(of_one, rows, weights) if dist.get_rank() == 0 else None

    ring.traffic.reset()
    got = [ring.unshard(x, seq_len=tokens) for x in on_ring()]
    sent_bytes = ring.traffic.bytes
    expected = call(of_one, rows, weights)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)]
    seconds = calls_in_turns([on_ring, on_one], repeats)
    return {"seconds": seconds, "bytes": sent_bytes, "error": max(errors)}
