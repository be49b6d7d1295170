"""Dilated attention in Triton: reads dilated rows in place, and computes a step of one branch in one launch.

Forward and backward take all tiles of a step (:class:`~ring_backends.kernels.steps.StepKernel`). Key masks, documents,
dropout and a score_mod (``triton_score_mod.py``) are computed inside. A NaN in an ignored key reaches nothing. A NaN or
inf in another key or value may reach rows of the same block that do not see it. Results are the same in every run.

Triton is imported when a call needs it. With ``TRITON_INTERPRET=1`` in the environment, Triton's interpreter runs the
kernels on CPU tensors, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_backends.kernels import triton_launch
from ring_backends.kernels.base import RAN_ON_ONE_GPU, KernelInputs, TileInputs
from ring_backends.kernels.score_mod import ScoreMod, TranslatedScoreMod
from ring_backends.kernels.steps import Grads, PackedParcels, StepKernel, StepRows
from ring_backends.kernels.triton_launch import Launch
from ring_backends.kernels.triton_score_mod import UntranslatableError, translate
from ring_backends.schedule.bands import CAUSAL, Band
from ring_backends.schedule.rank_plan import Tile
from ring_backends.schedule.rows import DilatedRows, HeadRun
from ring_backends.torch_internals import has_values

MAX_HEAD_DIM = 256


class TritonDilatedKernel(StepKernel):
    """The kernels in ``triton_forward.py``, ``triton_grad_query.py`` and ``triton_grad_key_value.py``."""

    name = "triton_dilated"
    device_types = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    unverified = RAN_ON_ONE_GPU
    has_dropout = True
    has_score_mod = True
    takes_value_dim = True
    takes_bands = True

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        is_interpreted = inputs.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        # Triton's interpreter runs on CPU tensors.
        device = torch.device("meta") if is_interpreted else inputs.device
        reasons = super().not_supported_reasons(replace(inputs, device=device))
        if max(inputs.dims) > MAX_HEAD_DIM:
            reasons.append(f"{inputs.widest} must be at most {MAX_HEAD_DIM}")
        if inputs.score_mod is not None and inputs.has_dropout:
            reasons.append("it calls no score_mod in a call with dropout")
        if device.type == "cuda":
            reasons.extend(triton_launch.device_reasons(device))
        if not reasons and (is_interpreted or device.type == "cuda"):
            failure = triton_launch.import_failure()
            if failure is not None:
                reasons.append(failure)
            elif is_interpreted and not triton_launch.kernels().is_interpreted:
                reasons.append("TRITON_INTERPRET=1 was set too late; set it before the first call")
        if not reasons and inputs.score_mod is not None:
            reasons.extend(_not_translated(inputs.score_mod))
        return reasons

    def auto_order(self, inputs: KernelInputs) -> int | None:
        if inputs.device.type == "cpu":
            return None
        depends_on_pairs = inputs.has_key_mask or inputs.has_documents or inputs.has_dropout or inputs.has_score_mod
        return 0 if inputs.device.type == "cuda" and depends_on_pairs else 1

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        query = tile.query
        out = query.new_empty(*query.shape[:3], tile.value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        into = out.transpose(1, 2), lse.transpose(1, 2)
        self.forward_into(_tiles(tile), _rows(tile), None, *into, scale=tile.scale)
        return out, lse

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_query, grad_key, grad_value = (x.new_empty(x.shape, dtype=torch.float32) for x in tile.tensors)
        sums = Grads(*(x.transpose(1, 2) for x in (grad_query, grad_key, grad_value)))
        grad_out, out, lse = (x.transpose(1, 2) for x in (grad_out.to(tile.query.dtype), out, lse))
        self.backward_into(_tiles(tile), _rows(tile), None, grad_out, out, lse, sums, None, scale=tile.scale)
        return grad_query, grad_key, grad_value

    def forward_into(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        if not has_values(out):
            return
        for launch in Launch.of_step(tiles, rows, arrived, None):
            launch.run("forward", (out, lse), scale)

    def backward_into(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        sums: Grads,
        passed_on: PackedParcels | None,
        *,
        scale: float,
    ) -> None:
        if not has_values(grad_out):
            return
        for launch in Launch.of_step(tiles, rows, arrived, passed_on):
            statistics = lse.new_empty(lse.shape[0], 2, launch.table.num_numbers)
            launch.run("grad_query", (grad_out, out, lse, statistics, sums.query), scale)
            launch.run("grad_key_value", (grad_out, statistics, *launch.key_grads(sums, passed_on)), scale)


def _not_translated(score_mod: ScoreMod) -> list[str]:
    """Why a score_mod cannot be translated, as a list of at most one sentence."""
    if isinstance(score_mod, TranslatedScoreMod):
        return []
    try:
        translate(score_mod)
    except UntranslatableError as error:
        return [f"it cannot translate the score_mod: {error}"]
    return []


def _rows(tile: TileInputs) -> StepRows:
    """The tensors and the mask of a single tile as the rows of a step."""
    mask = None if tile.key_mask is None else tile.key_mask.transpose(1, 2)
    query, key, value = (x.transpose(1, 2) for x in tile.tensors)
    return StepRows(query, key, value, mask)


def _tiles(tile: TileInputs) -> tuple[Tile, ...]:
    band = CAUSAL if tile.is_causal else tile.band
    return (_tile(tile.query.shape[2], tile.query.shape[1], tile.key.shape[2], tile.key.shape[1], band),)


@lru_cache(maxsize=256)
def _tile(seq_q: int, num_heads: int, seq_k: int, num_kv_heads: int, band: Band | None) -> Tile:
    queries, keys = (
        DilatedRows(0, 1, 0, 1, rows, (HeadRun(0, 0, inner=heads, inner_head=1),))
        for rows, heads in ((seq_q, num_heads), (seq_k, num_kv_heads))
    )
    streams = tuple(head // (num_heads // num_kv_heads) for head in range(num_heads))
    return Tile(0, queries, keys, streams, band, opens_queries=True, opens_keys=True)
