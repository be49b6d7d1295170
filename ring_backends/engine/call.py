"""One call of attention, checked and carried out under autograd: what a module and a function have in common.

The rule of this file: everything that the ranks have to agree on is in :meth:`Request.configuration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ring_backends.engine.recomputation import attend_as_operator
from ring_backends.engine.validation import check_documents, check_flag, check_layout, check_tensors
from ring_backends.engine.walk import ByHops, Hops, Inputs, Walk, finish
from ring_backends.kernels import KernelInputs, select_kernel
from ring_backends.kernels.dropout import Dropout
from ring_backends.ring.agreement import Configuration, backward_of
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import max_tile_bytes

Start = Callable[[str], "Hops | None"]
"""direction -> what posts the hops of one walk, once the ranks agree on it; None in a ring of one."""


def no_hops(direction: str) -> None:
    return None


@dataclass(frozen=True)
class Request:
    """One call of attention, checked: what to attend over, and how."""

    inputs: Inputs
    schedule: RingSchedule
    walk: Walk

    @classmethod
    def check(
        cls,
        inputs: Inputs,
        pattern: DilatedPattern,
        ring: Ring,
        is_causal: bool,
        seq_len: int | None,
        scale: float | None,
        kernel: str,
        return_lse: bool = False,
        dropout_p: float = 0.0,
    ) -> Request:
        """Check a call with ``inputs`` as they were given. ``dropout_p`` counts where they have a seed."""
        check_flag("is_causal", is_causal)
        check_flag("return_lse", return_lse)
        query, key, value = autocast(inputs.query, inputs.key, inputs.value)
        inputs = replace(inputs, query=query, key=key, value=value)
        check_tensors(query, key, value, inputs.key_padding_mask, inputs.document_ids)
        check_documents(inputs.document_ids, pattern)
        batch, local_len, num_heads, head_dim = query.shape
        layout = check_layout(local_len, seq_len, ring)
        schedule = _schedule(pattern, layout, num_heads, key.shape[2], is_causal)
        dropout = None
        if dropout_p and inputs.dropout_seed is not None:
            dropout = Dropout(dropout_p, layout.positions(ring.rank).to("cpu"), ring.data_rank)
        needs = KernelInputs(
            query.device,
            query.dtype,
            head_dim,
            has_key_mask=inputs.key_padding_mask is not None,
            has_dropout=dropout is not None,
        )
        forward_plan, backward_plan = (
            rank_plan(
                schedule,
                ring.rank,
                batch=batch,
                head_dim=head_dim,
                itemsize=query.dtype.itemsize,
                backward=backward,
                tile_bytes=max_tile_bytes(query.device, query.nbytes, backward=backward),
            )
            for backward in (False, True)
        )
        scale = head_dim**-0.5 if scale is None else scale
        walk = Walk(forward_plan, backward_plan, select_kernel(kernel, needs), scale, dropout)
        return cls(inputs, schedule, walk)

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may follow."""
        inputs = (self.inputs.query, self.inputs.key, self.inputs.value)
        return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)

    def configuration(self, module_number: str, *, needs_gradients: bool) -> Configuration:
        """What the other ranks have to have in common with this call."""
        query, mask, documents = self.inputs.query, self.inputs.key_padding_mask, self.inputs.document_ids
        return _configuration(
            module_number,
            self.schedule,
            query.shape[0],
            query.shape[3],
            query.dtype,
            query.device.type,
            self.walk.scale,
            mask is not None,
            None if documents is None else documents.dtype,
            0.0 if self.walk.dropout is None else self.walk.dropout.p,
            needs_gradients,
        )

    def run(self, start: Start, return_lse: bool) -> Any:
        return attend(self.inputs, self.walk, start, return_lse)


class AnyWalk(Protocol):
    """A :class:`Walk`, or what puts one into a compiled graph."""

    def forward(self, inputs: Inputs, hops: Hops | None) -> ByHops[tuple[Tensor, Tensor]]: ...

    def backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
    ) -> ByHops[tuple[Tensor, Tensor, Tensor]]: ...


def attend(inputs: Inputs, walk: AnyWalk, start: Start, return_lse: bool) -> Any:
    """out, or with ``return_lse`` (out, LSE [batch, heads, local seq]), under autograd."""
    out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
        *(getattr(inputs, field.name) for field in fields(inputs)), walk, start
    )
    return (out, lse.transpose(1, 2)) if return_lse else out


class _Attend(torch.autograd.Function):
    """Saves query, key, value, out and LSE; backward walks the ring again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
        seed: Tensor | None,
        walk: AnyWalk,
        start: Start,
    ) -> tuple[Tensor, Tensor]:
        def walk_forward(inputs: Inputs) -> tuple[Tensor, Tensor, int]:
            hops = start("forward")
            return *finish(walk.forward(inputs, hops)), 0 if hops is None else hops.call.number

        inputs = Inputs(query, key, value, mask, documents, seed)
        ctx.walk, ctx.start = walk, start
        with torch.autocast(query.device.type, enabled=False):
            # A walk that torch.compile traces is made of operators already.
            if isinstance(walk, Walk):
                out, lse, ctx.call_number, seed = attend_as_operator(walk_forward, inputs)
            else:
                out, lse, ctx.call_number = walk_forward(inputs)
        ctx.save_for_backward(query, key, value, mask, documents, seed, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *others, out, lse = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            hops = ctx.start(backward_of(ctx.call_number))
            grads = finish(ctx.walk.backward(Inputs(query, key, value, *others), out, lse, grad_out, hops))
        if torch.is_grad_enabled():
            grads = tuple(
                _OnlyOnce.apply(grad, query, key, value, grad_out)  # type: ignore[no-untyped-call]
                for grad in grads
            )
        needed = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return *needed, None, None, None, None, None


class _OnlyOnce(torch.autograd.Function):
    """Ties a gradient to all that it depends on, so that differentiating it raises, where a constant would be wrong."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *depends_on: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "dilated attention has no second derivative: its backward walks the ring outside of autograd; leave "
            "create_graph=True to models without it."
        )


def autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Cast as autocast casts the arguments of ``scaled_dot_product_attention``: every float but fp64."""
    for tensor in tensors:
        dtype = _autocast_dtype(tensor)
        yield tensor if dtype is None else tensor.to(dtype)


def _autocast_dtype(tensor: object) -> torch.dtype | None:
    """What autocast makes of a tensor; None where it leaves it alone, as it does whatever is no tensor it knows."""
    if not isinstance(tensor, Tensor) or not torch.amp.is_autocast_available(tensor.device.type):
        return None
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if not eligible or not torch.is_autocast_enabled(tensor.device.type):
        return None
    return torch.get_autocast_dtype(tensor.device.type)


@lru_cache(maxsize=256)
def _schedule(
    pattern: DilatedPattern, layout: SequenceLayout, num_heads: int, num_kv_heads: int, is_causal: bool
) -> RingSchedule:
    return RingSchedule(pattern, layout, num_heads, num_kv_heads, is_causal)


@lru_cache(maxsize=256)
def _configuration(
    module_number: str,
    schedule: RingSchedule,
    batch: int,
    head_dim: int,
    dtype: torch.dtype,
    device_type: str,
    scale: float,
    masked: bool,
    documents: torch.dtype | None,
    dropout_p: float,
    gradients: bool,
) -> Configuration:
    return Configuration(
        {
            "order of calls": f"attention {module_number}",
            "batch": batch,
            "heads": schedule.num_heads,
            "key/value heads": schedule.kv_heads,
            "head_dim": head_dim,
            "dtype": str(dtype),
            "device": device_type,
            **asdict(schedule.pattern),
            "seq_len": schedule.layout.seq_len,
            "layout": schedule.layout.kind,
            "is_causal": schedule.is_causal,
            "scale": scale,
            "key_padding_mask": "given" if masked else "none",
            "document_ids": "none" if documents is None else f"given, {documents}",
            "dropout_p": dropout_p,
            "gradients": "needed" if gradients else "not needed",
        }
    )
