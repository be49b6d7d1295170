"""Dilated attention in Triton: reads dilated rows in place, and computes a step of one branch in one launch.

Nothing is gathered, scattered or merged outside of these launches, and tiles are not cut. Key masks, documents,
dropout and a score_mod (``triton_score_mod.py``) are computed inside. A NaN in an ignored key reaches nothing. A NaN or
inf in another key or value may reach rows of the same block that do not see it. Results are the same in every run.

On GPUs of AMD (ROCm), where nobody has run it, it has to be switched on: :data:`triton_launch.ON_ROCM
<ring_backends.kernels.triton_launch.ON_ROCM>`.

Triton is imported when a call needs it. With ``TRITON_INTERPRET=1`` in the environment, Triton's interpreter runs the
kernels on CPU tensors, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_backends.kernels import triton_launch
from ring_backends.kernels.base import RAN_ON_ONE_GPU, TILE_SPAN, Kernel, KernelInputs
from ring_backends.kernels.rows import RowMemory
from ring_backends.kernels.score_mod import ScoreMod, TranslatedScoreMod
from ring_backends.kernels.steps import Grads, PackedParcels, SavedRows, StepGrads, StepOut, StepRows
from ring_backends.kernels.tile import TileInputs
from ring_backends.kernels.triton_launch import Launch
from ring_backends.kernels.triton_score_mod import UntranslatableError, translate
from ring_backends.schedule.bands import CAUSAL, Band
from ring_backends.schedule.rank_plan import Tile
from ring_backends.schedule.rows import DilatedRows, HeadRun
from ring_backends.torch_internals import has_values, span

MAX_HEAD_DIM = 256


class TritonDilatedKernel(Kernel):
    """The kernels in ``triton/forward.py``, ``triton/grad_query.py`` and ``triton/grad_key_value.py``."""

    name = "triton_dilated"
    device_types = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    unverified = RAN_ON_ONE_GPU
    reads_in_place = True
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

    def forward_step(
        self, tiles: Sequence[Tile], rows: StepRows, arrived: PackedParcels | None, out: StepOut, memory: RowMemory
    ) -> None:
        with span(TILE_SPAN):
            _forward(tiles, rows, arrived, out.of)

    def backward_step(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        saved: SavedRows,
        grads: StepGrads,
        passed_on: PackedParcels | None,
        memory: RowMemory,
    ) -> None:
        with span(TILE_SPAN):
            _backward(tiles, rows, arrived, saved, grads.of, passed_on)

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        query = tile.query
        out = query.new_empty(*query.shape[:3], tile.value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        into = out.transpose(1, 2), lse.transpose(1, 2)
        _forward(_tiles(tile), _rows(tile), None, lambda _: into)
        return out, lse

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_query, grad_key, grad_value = (x.new_empty(x.shape, dtype=torch.float32) for x in tile.tensors)
        sums = Grads(*(x.transpose(1, 2) for x in (grad_query, grad_key, grad_value)))
        saved = SavedRows(*(x.transpose(1, 2) for x in (out, lse, grad_out.to(tile.query.dtype))))
        _backward(_tiles(tile), _rows(tile), None, saved, lambda _: sums, None)
        return grad_query, grad_key, grad_value


def _forward(
    tiles: Sequence[Tile],
    rows: StepRows,
    arrived: PackedParcels | None,
    result_of: Callable[[Tile], tuple[Tensor, Tensor]],
) -> None:
    if not has_values(rows.query):
        return
    for launch in Launch.of_step(tiles, rows, arrived, None):
        launch.run("forward", result_of(launch.tile))


def _backward(
    tiles: Sequence[Tile],
    rows: StepRows,
    arrived: PackedParcels | None,
    saved: SavedRows,
    grads_of: Callable[[Tile], Grads],
    passed_on: PackedParcels | None,
) -> None:
    if not has_values(rows.query):
        return
    for launch in Launch.of_step(tiles, rows, arrived, passed_on):
        grads, lse = grads_of(launch.tile), saved.lse
        statistics = lse.new_empty(lse.shape[0], 2, launch.table.num_numbers)
        launch.run("grad_query", (saved.grad_out, saved.out, lse, statistics, grads.query))
        launch.run("grad_key_value", (saved.grad_out, statistics, *launch.key_grads(grads)))


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
    return StepRows(query, key, value, tile.scale, mask)


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
