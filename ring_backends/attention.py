"""Ring dilated attention: the module that adapters complete with a ring pass, and the same on a single device.

Each rank holds a part of the sequence and gets the attention output of that part, exactly as if one device had
attended over the whole (LongNet, arXiv 2307.02486; the ring: arXiv 2310.01889).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.agreement import Configuration
from ring_backends.kernels import KernelInputs, select_kernel
from ring_backends.layout import SequenceLayout
from ring_backends.pattern import DilatedPattern, HeadMode, Offset, Padding
from ring_backends.planner import rank_plan
from ring_backends.ring import Ring, Transfer
from ring_backends.schedule import RingSchedule
from ring_backends.validation import check_dropout, check_flag, check_layout, check_scale, check_tensors
from ring_backends.walk import Hops, Inputs, Walk


class RingDilatedAttention(nn.Module, ABC):
    """Exact dilated attention over a sequence that lies sharded over a ring of ranks.

    An adapter subclasses this and supplies :meth:`ring_pass`; everything else stands here.

    Args:
        segment_lengths, dilation_rates, head_mode, offset, padding: as in :class:`DilatedPattern`.
        ring: the ring, from the adapter's ``initialize``; None is a ring of one.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        kernel: the block-attention kernel by name, or ``"auto"``.
        dropout_p: must be 0.

    Raises:
        ValueError, TypeError: an argument breaks its rule.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        ring: Ring | None = None,
        head_mode: HeadMode = "all",
        offset: Offset | None = None,
        padding: Padding = "masked",
        scale: float | None = None,
        kernel: str = "auto",
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.pattern = DilatedPattern(segment_lengths, dilation_rates, head_mode, offset, padding)  # type: ignore[arg-type]
        if ring is not None and not isinstance(ring, Ring):
            raise TypeError(
                f"ring = {ring!r}: expected what the adapter's initialize() returned, or None for one rank."
            )
        check_dropout(dropout_p)
        self.ring = Ring() if ring is None else ring
        self.scale = check_scale(scale)
        self.kernel = kernel
        self.module_number = 0 if self.ring.agreement is None else self.ring.agreement.number_module()

    @abstractmethod
    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        """Post one hop and return at once.

        Args:
            outgoing: per ring rank, a flat uint8 buffer to send to it. It stays unchanged until the transfer is over.
            incoming: per ring rank, a flat uint8 buffer to fill from it.
            tag: 31 bits that both ends of the hop share, and in which hops, calls and configurations differ.

        Returns:
            The transfer, which is waited for exactly once.
        """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend from the local queries to the keys of the whole sequence.

        Every rank of the ring makes the same call, each with its own rows (``ring.shard``).

        Args:
            query: [batch, local seq, heads, head_dim]; fp64, fp32, bf16 or fp16; any strides.
            key, value: [batch, local seq, key/value heads, head_dim]; their number of heads divides query's.
            is_causal: whether a query sees only keys at or before its own global position.
            seq_len: length of the global sequence, in tokens; None means local length × ring size.
            key_padding_mask: bool [batch, local seq], True where a key is to be ignored.
            return_lse: whether to return the LSE too.

        Returns:
            out like query, or with ``return_lse`` (out, LSE): [batch, heads, local seq], fp32 (fp64 for fp64),
            detached.
            A query that sees no key has out 0 and LSE −inf.

        Raises:
            ValueError, TypeError: an argument breaks its rule; before any communication.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        ring = self.ring
        ring.check_connected()
        try:
            request = _Request.check(
                query, key, value, key_padding_mask, self.pattern, ring, is_causal, seq_len, self.scale, self.kernel
            )
        except (TypeError, ValueError) as error:
            if ring.agreement is not None:
                ring.agreement.refuse(error)
            raise
        if ring.agreement is None:
            return request.run(_no_hops, return_lse)
        return request.run(partial(self._hops, request.configuration(self.module_number)), return_lse)

    def _hops(self, configuration: Configuration, direction: str) -> Hops:
        """Make sure that the ranks agree on a walk, and return what posts its hops."""
        agreement = self.ring.agreement
        assert agreement is not None
        call = agreement.begin(configuration, direction=direction)
        return Hops(self.ring.rank, self.ring_pass, call, agreement, self.ring.traffic)

    def extra_repr(self) -> str:
        options = asdict(self.pattern) | {"scale": self.scale, "kernel": self.kernel}
        options |= {"ring_size": self.ring.size, "layout": self.ring.layout_kind}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    head_mode: HeadMode = "all",
    offset: Offset | None = None,
    padding: Padding = "masked",
    scale: float | None = None,
    kernel: str = "auto",
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Dilated attention on a single device: what :class:`RingDilatedAttention` computes, on a ring of one.

    Args:
        query: [batch, seq, heads, head_dim]; fp64, fp32, bf16 or fp16; any strides.
        key, value: [batch, seq, key/value heads, head_dim]; their number of heads divides query's.
        segment_lengths, dilation_rates, head_mode, offset, padding: as in :class:`DilatedPattern`.
        is_causal, scale, kernel, key_padding_mask, return_lse: as in :class:`RingDilatedAttention`.

    Returns:
        out like query, or with ``return_lse`` (out, LSE): [batch, heads, seq], fp32 (fp64 for fp64), detached.

    Raises:
        ValueError, TypeError: an argument breaks its rule.
    """
    pattern = DilatedPattern(segment_lengths, dilation_rates, head_mode, offset, padding)  # type: ignore[arg-type]
    request = _Request.check(
        query, key, value, key_padding_mask, pattern, Ring(), is_causal, None, check_scale(scale), kernel
    )
    return request.run(_no_hops, return_lse)


Start = Callable[[str], "Hops | None"]
"""direction -> what posts the hops of one walk, once the ranks agree on it; None in a ring of one."""


def _no_hops(direction: str) -> None:
    return None


@dataclass(frozen=True)
class _Request:
    """One call of attention, checked: what to attend over, and how."""

    inputs: Inputs
    schedule: RingSchedule
    walk: Walk

    @classmethod
    def check(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        pattern: DilatedPattern,
        ring: Ring,
        is_causal: bool,
        seq_len: int | None,
        scale: float | None,
        kernel: str,
    ) -> _Request:
        check_flag("is_causal", is_causal)
        query, key, value = _autocast(query, key, value)
        inputs = Inputs(query, key, value, key_padding_mask)
        check_tensors(query, key, value, key_padding_mask)
        batch, local_len, num_heads, head_dim = query.shape
        layout = check_layout(local_len, seq_len, ring)
        schedule = _schedule(pattern, layout, num_heads, key.shape[2], is_causal)
        needs = KernelInputs(query.device, query.dtype, head_dim, has_key_mask=key_padding_mask is not None)
        plan = rank_plan(schedule, ring.rank, batch=batch, head_dim=head_dim, itemsize=query.dtype.itemsize)
        walk = Walk(plan, select_kernel(kernel, needs), head_dim**-0.5 if scale is None else scale)
        return cls(inputs, schedule, walk)

    def configuration(self, module_number: int) -> Configuration:
        """What the other ranks have to have in common with this call."""
        query, mask = self.inputs.query, self.inputs.key_padding_mask
        gradients = torch.is_grad_enabled() and any(
            x.requires_grad for x in (query, self.inputs.key, self.inputs.value)
        )
        return _configuration(
            module_number,
            self.schedule,
            query.shape[0],
            query.shape[3],
            query.dtype,
            query.device.type,
            self.walk.scale,
            mask is not None,
            gradients,
        )

    def run(self, start: Start, return_lse: bool) -> Any:
        inputs = self.inputs
        out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
            inputs.query, inputs.key, inputs.value, inputs.key_padding_mask, self.walk, start
        )
        return (out, lse.transpose(1, 2)) if return_lse else out


class _Attend(torch.autograd.Function):
    """Saves query, key, value, out and LSE; backward walks the ring again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, walk: Walk, start: Start
    ) -> tuple[Tensor, Tensor]:
        hops = start("forward")
        ctx.walk, ctx.start = walk, start
        # Two calls may be alike in all but their numbers; their backwards have to be told apart by these.
        ctx.direction = "backward" if hops is None else f"backward of call {hops.call.number}"
        with torch.autocast(query.device.type, enabled=False):
            out, lse = walk.forward(Inputs(query, key, value, mask), hops)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            grads = ctx.walk.backward(Inputs(query, key, value, mask), out, lse, grad_out, ctx.start(ctx.direction))
        if torch.is_grad_enabled():
            grads = tuple(
                _OnlyOnce.apply(grad, query, key, value, grad_out)  # type: ignore[no-untyped-call]
                for grad in grads
            )
        needed = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return *needed, None, None, None


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


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
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
    module_number: int,
    schedule: RingSchedule,
    batch: int,
    head_dim: int,
    dtype: torch.dtype,
    device_type: str,
    scale: float,
    masked: bool,
    gradients: bool,
) -> Configuration:
    return Configuration(
        {
            "order of the modules' calls": f"attention {module_number}",
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
            "gradients": "needed" if gradients else "not needed",
        }
    )
