"""The backward of ring dilated attention on one rank: K and V travel again, and dK and dV go home.

Every tile uses the out and LSE of the softmax over all keys, so the gradients of all tiles add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_backends.engine.around import GradsAround, KeysAround
from ring_backends.engine.call import AttentionCall
from ring_backends.engine.hops import Hops, report_failure
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.local_rows import local_rows
from ring_backends.engine.spreading import SpreadGrads, SpreadKeys
from ring_backends.engine.sums import BlockGrads, Result
from ring_backends.engine.tiles import SavedRows, TileRunner
from ring_backends.kernels.base import split_scale
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.steps import Grads


def backward(
    call: AttentionCall, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value. Every tile uses the global ``out`` and ``lse``."""
    with report_failure(hops):
        plan = call.plan(inputs, backward=True)
        grads = Result(inputs.query), Result(inputs.key), Result(inputs.value)
        rows = local_rows(call, inputs)
        tiles = TileRunner(call.kernel, call.scale, call.in_place)
        saved = SavedRows(out, lse, grad_out)
        sum_dtype = wire_dtype = statistics_dtype(inputs.key.dtype)
        if inputs.key.dtype == torch.bfloat16 and call.grad_wire_dtype is not None:
            wire_dtype = call.grad_wire_dtype
        dtypes = {"sum_dtype": sum_dtype, "wire_dtype": wire_dtype}
        keys = key_grads = passed_on = spread = spread_grads = None
        if hops is not None:
            keys, key_grads = KeysAround(plan, rows, hops), GradsAround(rows, hops, **dtypes)
        if hops is not None and plan.spread:
            spread, spread_grads = SpreadKeys(plan, rows, hops), SpreadGrads(plan, rows, hops, **dtypes)
        for index, (block, step) in enumerate(plan.steps):
            if spread is not None:
                spread.advance(index)
            arrived = None if keys is None else keys.advance(index)
            if step is block.steps[0]:
                here, its_saved, block_grads = rows.block(block), saved.of(block), BlockGrads(*grads, block)
            if key_grads is not None:
                passed_on = key_grads.of_step(step)
            tiles.backward_into(step.tiles, here, arrived, its_saved, block_grads, passed_on)
            del arrived  # frees the received buffer, as in forward()
            if spread_grads is not None:
                if step.spread_tiles and spread is not None:
                    given = here, spread.buffer, its_saved, block_grads, spread_grads.buffer
                    tiles.backward_into(step.spread_tiles, *given)
                if index == plan.last_spread_step:
                    spread = None  # frees the received keys
                spread_grads.advance(index, block_grads)
            ends_block = step is block.steps[-1]
            if key_grads is not None:
                key_grads.advance(index, step, passed_on, block_grads, ends_block=ends_block)
            elif ends_block:
                block_grads.finish()
        if spread_grads is not None and len(plan.blocks) == 1:
            spread_grads.finish(block_grads.sums)
        if key_grads is not None:
            key_grads.settle()
        if spread_grads is not None and len(plan.blocks) > 1:  # the blocks are finished
            spread_grads.finish(Grads(*(result.tensor for result in grads)))
        sign, _ = split_scale(call.scale)
        if sign != 1:  # the query of the rows is the input times the sign
            grads[0].tensor.mul_(sign)
        return grads[0].tensor, grads[1].tensor, grads[2].tensor
