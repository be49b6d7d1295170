"""One checked call of attention: its plan and kernel on this rank, and the configuration that all ranks share.

Rule: :meth:`AttentionCall.configuration` holds everything that the ranks have to agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.validation import check_documents, check_flag, check_layout, check_tensors
from ring_backends.kernels import Kernel, KernelInputs, select_kernel
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.steps import StepKernel
from ring_backends.ring.calls import Configuration
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import RankPlan
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import max_tile_bytes
from ring_backends.torch_internals import untraced


@dataclass(frozen=True)
class AttentionCall:
    """How this rank computes one checked call. It holds no tensors of the call, so autograd may keep it.

    Attributes:
        schedule: the schedule of the ring.
        rank: the ring rank.
        kernel: the kernel that computes the tiles.
        in_place: the kernels that compute some dilated branches instead, by the branch's index.
        scale: factor on the scores.
        dropout: the dropout of the call; None without dropout.
        grad_wire_dtype: dtype in which dK and dV of bf16 inputs travel; None for fp32.
    """

    schedule: RingSchedule
    rank: int
    kernel: Kernel
    scale: float
    dropout: Dropout | None = None
    grad_wire_dtype: torch.dtype | None = None
    in_place: Mapping[int, StepKernel] = field(default_factory=dict)

    @property
    def layout(self) -> SequenceLayout:
        return self.schedule.layout

    def plan(self, inputs: AttentionInputs, *, backward: bool) -> RankPlan:
        """This rank's part of the schedule, in a forward or in a backward."""
        query = inputs.query
        tile_bytes = None  # a kernel that reads rows in place needs no memory for tiles
        if not isinstance(self.kernel, StepKernel):
            tile_bytes = max_tile_bytes(query.device, query.nbytes, backward=backward)
        return rank_plan(
            self.schedule,
            self.rank,
            batch=query.shape[0],
            head_dim=query.shape[3],
            itemsize=query.dtype.itemsize,
            backward=backward,
            device_type=query.device.type,
            tile_bytes=tile_bytes,
            threads=torch.get_num_threads() if query.device.type == "cpu" else 1,
            uncut=frozenset(self.in_place),
        )

    def configuration(self, inputs: AttentionInputs, module_number: str, *, needs_gradients: bool) -> Configuration:
        """The fields of this call that must be the same on all ranks."""
        query, mask, documents = inputs.query, inputs.key_padding_mask, inputs.document_ids
        return _configuration(
            self.schedule,
            (
                ("order of calls", f"attention {module_number}"),
                ("batch", query.shape[0]),
                ("heads", self.schedule.num_heads),
                ("key/value heads", self.schedule.kv_heads),
                ("head_dim", query.shape[3]),
                ("dtype", query.dtype),
                ("device", query.device.type),
            ),
            (
                ("scale", self.scale),
                ("key_padding_mask", "none" if mask is None else "given"),
                ("document_ids", "none" if documents is None else f"given, {documents.dtype}"),
                ("dropout_p", 0.0 if self.dropout is None else self.dropout.p),
                ("grad_wire_dtype", "none" if self.grad_wire_dtype is None else str(self.grad_wire_dtype)),
                ("gradients", "needed" if needs_gradients else "not needed"),
            ),
        )


def check_call(
    inputs: AttentionInputs, pattern: DilatedPattern, ring: Ring, scale: float | None, kernel: str
) -> tuple[AttentionInputs, AttentionCall]:
    """Check a call. Return its inputs, cast by autocast, and the checked call.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    check_flag("is_causal", inputs.is_causal)
    check_flag("return_lse", inputs.return_lse)
    query, key, value = map(autocast, (inputs.query, inputs.key, inputs.value))
    inputs = replace(inputs, query=query, key=key, value=value)
    check_tensors(query, key, value, inputs.key_padding_mask, inputs.document_ids)
    check_documents(inputs.document_ids, pattern)
    layout = check_layout(query.shape[1], inputs.seq_len, ring)
    schedule = _schedule(pattern, layout, query.shape[2], key.shape[2], inputs.is_causal)
    dropout = None
    if inputs.dropout_p and inputs.dropout_seed is not None:
        dropout = Dropout(inputs.dropout_p, ring.data_rank)
    needs = KernelInputs(
        query.device,
        query.dtype,
        query.shape[3],
        has_key_mask=inputs.key_padding_mask is not None,
        has_dropout=dropout is not None,
        has_documents=inputs.document_ids is not None,
    )
    scale = query.shape[3] ** -0.5 if scale is None else scale
    chosen, in_place = kernels_of_call(kernel, needs, pattern, layout)
    return inputs, AttentionCall(schedule, ring.rank, chosen, scale, dropout, in_place=in_place)


def kernels_of_call(
    name: str, needs: KernelInputs, pattern: DilatedPattern, layout: SequenceLayout
) -> tuple[Kernel, dict[int, StepKernel]]:
    """The kernel of a call. With ``"auto"``, possibly other ones for some dilated branches, by the branch's index."""
    chunk = -(-layout.seq_len // layout.num_chunks)
    rows = [
        -(-min(pattern.segment_length(index, layout.seq_len), chunk) // rate)
        for index, rate in enumerate(pattern.dilation_rates)
    ]
    dilated = [index for index, rate in enumerate(pattern.dilation_rates) if rate > 1]
    is_dilated = len(dilated) == len(rows)
    longest = max(x for index, x in enumerate(rows) if is_dilated or index not in dilated)
    chosen = select_kernel(name, replace(needs, rows=longest, is_dilated=is_dilated))
    in_place: dict[int, StepKernel] = {}
    if name == "auto" and needs.device.type == "cuda" and not isinstance(chosen, StepKernel):
        for index in dilated:
            kernel = select_kernel(name, replace(needs, rows=rows[index], is_dilated=True))
            if isinstance(kernel, StepKernel):
                in_place[index] = kernel
    return chosen, in_place


def autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the arguments of ``scaled_dot_product_attention``: all floats except fp64."""
    # The arguments are not checked yet. Anything that is not a tensor on a device with autocast is returned unchanged.
    if not isinstance(tensor, Tensor) or not torch.amp.is_autocast_available(tensor.device.type):
        return tensor
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if not eligible or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


@lru_cache(maxsize=256)
@untraced
def _schedule(
    pattern: DilatedPattern, layout: SequenceLayout, num_heads: int, num_kv_heads: int, is_causal: bool
) -> RingSchedule:
    return RingSchedule(pattern, layout, num_heads, num_kv_heads, is_causal)


@lru_cache(maxsize=256)
def _configuration(
    schedule: RingSchedule, shape: tuple[tuple[str, object], ...], options: tuple[tuple[str, object], ...]
) -> Configuration:
    plain = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in shape}
    sequence = {
        "seq_len": schedule.layout.seq_len,
        "layout": schedule.layout.kind,
        "is_causal": schedule.is_causal,
    }
    return Configuration({**plain, **asdict(schedule.pattern), **sequence, **dict(options)})
