"""The forward and the backward of ring dilated attention on one rank: one loop over the steps of a plan each.

In each step, a rank posts the next hop, computes the tiles of the keys that are here, and merges their results. In the
backward, K and V travel again, and dK and dV go home. Every tile of the backward uses the out and LSE of the softmax
over all keys, so the gradients of all tiles add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ring_backends.engine.call import AttentionCall, AttentionInputs, local_rows
from ring_backends.engine.exchange import Exchange, Exchanged, GroupInputs
from ring_backends.engine.results import BlockGrads, BlockOut, Result, results_for
from ring_backends.engine.wire import ArrivingKeys, Hops, ReturningGrads, key_format, running
from ring_backends.engine.wire_buffers import RowFormat
from ring_backends.kernels.base import by_kernel
from ring_backends.kernels.merge import merge_zero_value_, statistics_dtype
from ring_backends.kernels.rows import RowMemory
from ring_backends.kernels.steps import Grads, SavedRows, split_scale


def forward(call: AttentionCall, inputs: AttentionInputs, hops: Hops | None) -> tuple[Tensor, Tensor]:
    """Attend from this rank's queries to all keys that they see.

    Returns:
        out [batch, local seq, heads, value_dim], and LSE [batch, local seq, heads] in the statistics dtype. A query
        that sees no key has out 0 and LSE −inf.
    """
    with running(hops):
        if call.exchange is None:
            return _forward(call, inputs, hops)
        exchange, group = _group(call, inputs, hops)
        results = _forward(call, group.inputs, hops, group.queries.wait)
        group.queries.wait()  # a call without rows has no tile
        del group  # so that the exchange of the results can use its memory
        out, lse = exchange.to_rows([(x, "queries") for x in results]).wait()
        return out, lse


def backward(
    call: AttentionCall, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value. Every tile uses the global ``out`` and ``lse``."""
    with running(hops):
        if call.exchange is None:
            grads = _backward(call, inputs, SavedRows(out, lse, grad_out), hops)
        else:
            grads = _backward_in_group(call, inputs, out, lse, grad_out, hops)
        sign, _ = split_scale(call.scale)
        if sign != 1:  # tiles computed with the query times the sign
            grads.query.mul_(sign)
        return grads


def _backward_in_group(
    call: AttentionCall, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
) -> Grads:
    exchange, group = _group(call, inputs, hops, out, lse, grad_out)
    saved, dtype = SavedRows(*group.of_queries), inputs.key.dtype
    if exchange.plan.shares_kv_heads:  # the sums of members are rounded once
        dtype = statistics_dtype(dtype)
    returned: list[Exchanged] = []
    key, value = _backward(
        call,
        group.inputs,
        saved,
        hops,
        before_first_tile=group.queries.wait,
        take_query_grad=lambda query: returned.append(exchange.to_rows([(query, "queries")])),
        key_grad_dtype=dtype,
    )[1:]
    group.queries.wait()
    del group, saved
    returned.append(exchange.to_rows([(key, "keys"), (value, "keys")]))
    (query,), (key, value) = (exchanged.wait() for exchanged in returned)
    return Grads(query, key.to(inputs.key.dtype), value.to(inputs.value.dtype))


def _group(
    call: AttentionCall, inputs: AttentionInputs, hops: Hops | None, *of_queries: Tensor
) -> tuple[Exchange, GroupInputs]:
    """Post the exchanges that begin a forward or backward, and wait for the keys."""
    assert call.exchange is not None
    assert hops is not None
    exchange = Exchange(call.exchange, hops)
    group = exchange.begin(inputs, *of_queries)
    group.keys.wait()
    if split_scale(call.scale)[0] != 1:  # the sign goes into the query before the first hop
        group.queries.wait()
    return exchange, group


def _forward(
    call: AttentionCall,
    inputs: AttentionInputs,
    hops: Hops | None,
    before_first_tile: Callable[[], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out and LSE.

    Args:
        before_first_tile: called when the first hop is posted. It may fill the query.
    """
    query, plan = inputs.query, call.plan(inputs, backward=False)
    out, lse = results_for(query, inputs.value)
    rows = local_rows(call, inputs)
    row_format, memory = key_format(rows), RowMemory()
    arriving = [ArrivingKeys(plan, delivery, rows, row_format, hops) for delivery in plan.deliveries]
    for index, (block, step) in enumerate(plan.steps):
        arrived = [keys.advance(index) for keys in arriving]
        if index == 0 and before_first_tile is not None:
            before_first_tile()
        if step is block.steps[0]:
            here, block_out = rows.block(block), BlockOut(out, lse, block)
        for of_delivery, parcels in zip(step.tiles, arrived, strict=True):
            for kernel, tiles in by_kernel(of_delivery, call.kernel, call.in_place):
                kernel.forward_step(tiles, here, parcels, block_out, memory)
        for phantom in step.phantoms:
            block_out.merge_phantom(phantom)
        del arrived, parcels  # so that at most two received buffers exist when the next hop is posted
        for keys in arriving:
            keys.release()
        if step is block.steps[-1]:
            block_out.finish()
    if inputs.sinks is not None:
        merge_zero_value_(out.tensor, lse.tensor, inputs.sinks)
    return out.tensor, lse.tensor


def _backward(
    call: AttentionCall,
    inputs: AttentionInputs,
    saved: SavedRows,
    hops: Hops | None,
    *,
    before_first_tile: Callable[[], object] | None = None,
    take_query_grad: Callable[[Tensor], object] | None = None,
    key_grad_dtype: torch.dtype | None = None,
) -> Grads:
    """Compute the gradients of query, key and value. That of the query still lacks the sign of the scale.

    Args:
        before_first_tile: as in :func:`_forward`. It may fill what is saved, too.
        take_query_grad: called with the gradient of the query, when those of keys are still on their way home.
        key_grad_dtype: dtype of the gradients of key and value; None for that of the inputs.
    """
    plan = call.plan(inputs, backward=True)
    of_keys = Result(inputs.key, dtype=key_grad_dtype), Result(inputs.value, dtype=key_grad_dtype)
    grads = Result(inputs.query), *of_keys
    rows = local_rows(call, inputs)
    memory = RowMemory()
    sum_dtype = wire_dtype = statistics_dtype(inputs.key.dtype)
    if inputs.key.dtype == torch.bfloat16 and call.grad_wire_dtype is not None:
        wire_dtype = call.grad_wire_dtype
    keys_format = key_format(rows)
    sizes = keys_format.batch, keys_format.head_dim, keys_format.value_dim
    formats = {"sums": RowFormat(*sizes, sum_dtype), "on_wire": RowFormat(*sizes, wire_dtype)}
    arriving = [ArrivingKeys(plan, delivery, rows, keys_format, hops) for delivery in plan.deliveries]
    returning = [ReturningGrads(plan, delivery, hops, **formats) for delivery in plan.deliveries]
    computed: BlockGrads | None = None  # the block before, if some of its dK and dV are still on their way
    for index, (block, step) in enumerate(plan.steps):
        arrived = [keys.advance(index) for keys in arriving]
        if index == 0 and before_first_tile is not None:
            before_first_tile()
        if step is block.steps[0]:
            here, its_saved, block_grads = rows.block(block), saved.block(block), BlockGrads(*grads, block)
        for of_delivery, parcels, key_grads in zip(step.tiles, arrived, returning, strict=True):
            passed_on = key_grads.of_step(index)
            for kernel, tiles in by_kernel(of_delivery, call.kernel, call.in_place):
                kernel.backward_step(tiles, here, parcels, its_saved, block_grads, passed_on, memory)
        del arrived, parcels  # frees the received buffers, as in forward()
        for keys in arriving:
            keys.release()
        for key_grads in returning:
            key_grads.advance(index, block_grads)
        if computed is not None:
            computed.finish()
        computed = block_grads if step is block.steps[-1] else None
        if computed is not None and not any(key_grads.going_home for key_grads in returning):
            computed.finish()
            computed = None
    if take_query_grad is not None:
        if computed is not None:
            computed.finish_query()
        take_query_grad(grads[0].tensor)
    for index in range(len(plan.steps), max(len(delivery.grads) for delivery in plan.deliveries)):
        for key_grads in returning:
            key_grads.advance(index, block_grads)
    for key_grads in returning:
        key_grads.settle()
    if computed is not None:
        computed.finish()
    results = Grads(*[result.tensor for result in grads])
    for key_grads in returning:
        key_grads.finish(results)
    return results
