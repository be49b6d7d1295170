"""The style that puts the attention modules of a plan on a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ring_backends.attention import RingDilatedAttention
from ring_backends.integrations.device_mesh.axis import join_axis
from ring_backends.integrations.device_mesh.modules import (
    CallForm,
    InnerAttentionOnRing,
    MultiheadAttentionOnRing,
    OnRing,
    attention_of,
    is_inner_attention,
    is_multihead_attention,
    is_on_ring,
    put_on_ring,
    put_own_on_ring,
)
from ring_backends.joining import check_options
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.registry import create_attention
from ring_backends.schedule.layout import LayoutKind


class RingDilated(ParallelStyle):
    """Puts an attention module on the ring of a mesh axis. It is a value of the plan of ``parallelize_module``.

    The module is one of these:

    - an *inner attention*: a module without parameters whose forward begins with query, key and value, such as a module
      around ``scaled_dot_product_attention``. Its arguments ``is_causal``, ``scale`` and ``enable_gqa`` keep their
      meaning. A call may also pass ``key_padding_mask``, ``document_ids`` and ``dropout_seed`` of
      :class:`~ring_backends.RingDilatedAttention`.
    - ``torch.nn.MultiheadAttention``, for self-attention with ``need_weights=False``.
    - a :class:`~ring_backends.RingDilatedAttention` or a
      :class:`~ring_backends.multihead.RingDilatedMultiheadAttention` that was made without a ring. It has a pattern and
      options of its own, so its style is ``RingDilated()``.

    The module then computes the attention of this pattern over the whole sequence. Its inputs and its output are this
    rank's rows. One branch over the whole sequence, ``RingDilated([n], [1])``, is full attention.

    All ranks of the axis apply the same plan, before ``torch.compile`` and ``fully_shard``. The first style on an axis
    makes its ring. The other styles of the axis need the same ``layout``, ``backend`` and ``timeout``.

    Args:
        segment_lengths, dilation_rates: as in :class:`~ring_backends.DilatedPattern`; None for an attention of this
            package.
        layout: how the sequence is distributed over the axis, ``"contiguous"`` or ``"zigzag"``. PyTorch's
            ``context_parallel`` uses the zigzag layout.
        backend: name of the adapter that makes the ring.
        timeout: the longest time from a call's first wait for a peer until it returns or raises.
        seq_dim: the sequence dimension of an inner attention's query, key and value: 2 for [batch, heads, local seq,
            head_dim], 1 for [batch, local seq, heads, head_dim].
        is_causal: whether a query sees only keys at or before its own position, in every call. None takes it from the
            call, or from the default of the module's own forward.
        options: of the attention, such as ``head_mode``, ``scale``, ``kernel`` and ``dropout_p``
            (:class:`~ring_backends.RingDilatedAttention`). ``nn.MultiheadAttention`` has its own dropout.

    Raises:
        ValueError, TypeError: an argument is invalid. ``parallelize_module`` raises them if the module is not such an
            attention, ``device_mesh`` has several axes, or the ring of the axis has other options.
        AdapterUnavailableError: the framework of the adapter is missing or does not work here.
        RingPeerError: from ``parallelize_module``: a rank of the axis did not apply the plan in time.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        layout: LayoutKind = "contiguous",
        backend: str = "native",
        timeout: timedelta = timedelta(seconds=300),
        seq_dim: int = 2,
        is_causal: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(None, layout, timeout, None, "rank", {})
        if seq_dim not in (1, 2):
            raise ValueError(
                f"seq_dim = {seq_dim!r}: expected 2 for [batch, heads, local seq, head_dim], or 1 for [batch, local "
                "seq, heads, head_dim]."
            )
        if is_causal is not None and not isinstance(is_causal, bool):
            raise TypeError(f"is_causal = {is_causal!r}: expected True, False, or None to take it from the call.")
        if (segment_lengths is None) != (dilation_rates is None):
            raise ValueError(
                f"segment_lengths = {segment_lengths!r} and dilation_rates = {dilation_rates!r}: give both, or neither "
                "for an attention of ring_backends."
            )
        # Raises if an argument is invalid.
        pattern = ([1], [1]) if segment_lengths is None else (segment_lengths, dilation_rates)
        create_attention(backend, *pattern, ring=None, **options)  # type: ignore[arg-type]
        self._pattern: Any = segment_lengths, dilation_rates
        self._options = options
        self._backend, self._layout, self._timeout = backend, layout, timeout
        self._seq_dim, self._is_causal = seq_dim, is_causal

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, options = type(module).__name__, self._options
        if isinstance(module, (RingDilatedAttention, RingDilatedMultiheadAttention)):
            self._check_own(module)
            put_own_on_ring(module, join_axis(device_mesh, self._backend, self._layout, self._timeout))
            return module
        if is_on_ring(module):
            raise ValueError(f"module = {name}: is on a ring already; name every attention once.")
        if "forward" in vars(module):
            raise ValueError(f"module = {name}: its forward was replaced on the instance; apply the style before that.")
        on_ring: OnRing
        if is_multihead_attention(module):
            self._check_multihead(module)
            on_ring, options = MultiheadAttentionOnRing, {**options, "dropout_p": module.dropout}
        elif is_inner_attention(module):
            self._check_inner(module)
            on_ring = InnerAttentionOnRing
        else:
            raise TypeError(
                f"module = {name}: not an attention that RingDilated can put on a ring; name a module whose forward "
                "begins with query, key and value, a torch.nn.MultiheadAttention, or an attention of ring_backends."
            )
        if self._pattern[0] is None:
            raise ValueError(f"segment_lengths is not given: {name} has no pattern of its own; give one.")
        axis = join_axis(device_mesh, self._backend, self._layout, self._timeout)
        attention = create_attention(self._backend, *self._pattern, ring=axis.ring, **options)
        put_on_ring(module, on_ring, attention, CallForm.of(module, axis, self._is_causal, self._seq_dim))
        return module

    def _check_own(self, module: nn.Module) -> None:
        name, attention = type(module).__name__, attention_of(module)
        adapter = type(create_attention(self._backend, [1], [1]))
        if not isinstance(attention, adapter):
            raise TypeError(
                f"backend = {self._backend!r}: its attention is {adapter.__name__}, and {name} computes with "
                f"{type(attention).__name__}; give the backend of that class."
            )
        if attention.ring.size > 1:
            raise ValueError(f"module = {name}: is on a ring already; name every attention once, made without a ring.")
        given = {"segment_lengths": self._pattern[0], "is_causal": self._is_causal, **self._options}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise ValueError(f"{', '.join(unused)}: {name} has its own; leave this out of its style.")

    def _check_inner(self, module: nn.Module) -> None:
        name = type(module).__name__
        own = [key for key, _ in (*module.named_parameters(), *module.named_buffers())]
        if own:
            raise ValueError(
                f"module = {name}: has the parameters or buffers {', '.join(own)}, which a ring would not use; name "
                "the module inside it that computes attention alone."
            )
        dropout = [part.p for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        if dropout:
            raise ValueError(
                f"module = {name}: has an nn.Dropout with p = {dropout[0]}, which a ring would not use; set its p to "
                "0, and give RingDilated(dropout_p=…)."
            )
        if self._is_causal is None and "is_causal" not in signature(module.forward).parameters:
            raise ValueError(
                f"is_causal is not given, and the forward of {name} has no such argument; set RingDilated(is_causal=…)."
            )

    def _check_multihead(self, module: Any) -> None:
        name = type(module).__name__
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                f"module = {name}: add_bias_kv and add_zero_attn add a key that belongs to no rank; make it without."
            )
        if "dropout_p" in self._options:
            raise ValueError(f"dropout_p is given: {name} has dropout = {module.dropout}; set that instead.")
