"""This rank's rows of query, key and value in one call, with their masks, documents, dropout and score_mod."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ring_backends.engine.call import AttentionCall
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.steps import StepRows, split_scale
from ring_backends.torch_internals import has_values, mode_of


def local_rows(call: AttentionCall, inputs: AttentionInputs) -> StepRows:
    """Query, key and value of one call, with the marks that kernels read."""
    query, key, value, marks, documents = inputs.query, inputs.key, inputs.value, inputs.key_padding_mask, None
    sign, scale = split_scale(call.scale)
    if sign != 1:
        query = query * sign
    if marks is not None and call.kernel.reads_ignored_keys:
        key, value = (x.masked_fill(marks[:, :, None, None], 0.0) for x in (key, value))
    if inputs.document_ids is not None:
        ids = inputs.document_ids
        ignored = ids < 0 if marks is None else marks | (ids < 0)
        marks = ids.masked_fill(ignored, -1)
        documents = ids.masked_fill(ids < 0, -2).unsqueeze(2).expand(-1, -1, query.shape[2])
    if marks is not None:
        marks = marks.unsqueeze(2).expand(-1, -1, key.shape[2])
    rows = StepRows(query, key, value, scale, marks, documents)
    if call.dropout is None and inputs.score_mod is None:
        return rows
    with mode_of(query):
        positions = call.layout.positions(call.rank, query.device)
    rows = replace(rows, score_mod=inputs.score_mod, positions=positions)
    return rows if call.dropout is None else _with_dropout(rows, inputs, call.dropout, positions)


def _with_dropout(rows: StepRows, inputs: AttentionInputs, dropout: Dropout, positions: Tensor) -> StepRows:
    query, key, seed = rows.query, rows.key, 0
    assert inputs.dropout_seed is not None
    if has_values(inputs.dropout_seed):
        seed = int(inputs.dropout_seed)  # it is on the CPU
    with mode_of(query):
        query_words = dropout.query_words(seed, positions, query.shape[0], query.shape[2])
        key_words = dropout.key_words(seed, positions)[:, None].expand(*key.shape[:3])
    return replace(rows, dropout=dropout, dropout_seed=seed, query_words=query_words, key_words=key_words)
