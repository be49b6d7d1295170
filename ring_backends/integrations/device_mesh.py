"""Ring dilated attention on one axis of a DeviceMesh, with PyTorch's ``parallelize_module``::

    mesh = init_device_mesh("cpu", (data_size, ring_size), mesh_dim_names=("data", "ring"))
    parallelize_module(model, mesh["ring"], {"layers.*.inner_attention": RingDilated([2048, 16384], [1, 8])})

    with context_parallel(mesh["ring"], buffers=[tokens, labels, model.freqs], buffer_seq_dims=[1, 1, 0]):
        logits = model(tokens)  # this rank's rows

The first style on an axis makes the ring of the axis. All modules of the axis and ``context_parallel`` use that ring.

For a module of other code, the style changes its class, as ``fully_shard`` does. The new class inherits from the
module's own class, and its forward calls a ring attention. So the module keeps its place in the model, its parameters,
and their names.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ring_backends.attention import RingDilatedAttention
from ring_backends.joining import as_timedelta, check_options
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.registry import create_attention, load_adapter
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import UlyssesSize
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import LayoutKind
from ring_backends.torch_internals import internal

__all__ = ["RingDilated", "context_parallel", "ring_of"]

_NAMES = [re.compile(rf"(x?{name[0]}|{name})(_\w+)?") for name in ("query", "key", "value")]
"""The names of the first three arguments of an inner attention: q, xq, query, q_BHSD, query_states."""

_ORDERS = {1: "[batch, local seq, heads, head_dim]", 2: "[batch, heads, local seq, head_dim]"}

_PASSED_ON = ("key_padding_mask", "document_ids", "dropout_seed", "score_mod")

_INSTEAD = {
    "attn_mask": "masks of pairs are not supported by a ring; pass is_causal, or a key_padding_mask",
    "block_mask": "block masks are not supported by a ring; pass is_causal, or document_ids for packed documents",
    "dropout_p": "set RingDilated(dropout_p=…) instead",
    "need_weights": "a ring has no matrix of weights; pass need_weights=False",
}


@dataclass(eq=False)
class Axis:
    """A mesh axis with a ring.

    Attributes:
        seq_len: length of the sequence that an open ``context_parallel`` has sharded; None outside of one. A plain
            attribute, since autograd recomputes activations on another thread, which has no context variables.
        buffers: the tensors that it has sharded.
    """

    ring: Ring
    seq_len: int | None = None
    buffers: list[Tensor] = field(default_factory=list)

    def length(self, of_call: int | None = None) -> int | None:
        """The length of the whole sequence, for a call that gives this length. None on a ring of one may mean local.

        Raises:
            ValueError: nothing says whether the call's rows are a shard or the whole sequence.
        """
        found = self.seq_len if of_call is None else of_call
        if found is None and self.ring.size > 1:
            raise ValueError(
                "seq_len is not given, and no context_parallel is open, so the rows may be the whole sequence or this "
                "rank's shard of it: call the model inside context_parallel(mesh, buffers=…, buffer_seq_dims=…), which "
                "shards them, or inside context_parallel(mesh, seq_len=…) if they are sharded already."
            )
        return found

    def check_buffers(self) -> None:
        """Check that DistributedDataParallel has not replaced the rows of this rank by those of rank 0.

        Raises:
            RuntimeError: it has.
        """
        if not self.buffers or self.ring.size == 1 or torch.compiler.is_compiling():
            return
        purpose = "the check of sharded buffers"
        model: Any = internal(DistributedDataParallel, "_active_ddp_module", purpose)
        if model is None or not internal(model, "will_sync_module_buffers", purpose)():
            return
        copied = {id(buffer) for buffer in internal(model, "modules_buffers", purpose)}
        if any(id(buffer) in copied for buffer in self.buffers):
            raise RuntimeError(
                "DistributedDataParallel has copied rank 0's rows of a buffer of the model to all ranks, and "
                "context_parallel has sharded the buffer: switch that off by forward_sync_buffers=False, or "
                "broadcast_buffers=False before torch 2.13."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self


_axes: WeakKeyDictionary[dist.ProcessGroup, Axis] = WeakKeyDictionary()


def join_axis(
    mesh: DeviceMesh,
    backend: str,
    layout: LayoutKind,
    timeout: timedelta,
    buffer_bytes: int | None,
    ulysses_size: UlyssesSize,
) -> Axis:
    """Return the axis with its ring. The first call for an axis makes the ring; all ranks of the axis make that call.

    Raises:
        TypeError, ValueError: ``mesh`` is not one axis of a DeviceMesh.
        ValueError: the axis has a ring with another backend, layout, timeout, buffer_bytes or ulysses_size.
    """
    group = _group_of(mesh)
    if group not in _axes:
        initialize = load_adapter(backend).initialize
        sizes: dict[str, Any] = {"buffer_bytes": buffer_bytes, "ulysses_size": ulysses_size}
        _axes[group] = Axis(initialize(layout=layout, group=mesh, timeout=timeout, **sizes))
    ring = _axes[group].ring
    given = (
        ("backend", backend, ring.adapter),
        ("layout", layout, ring.layout_kind),
        ("timeout", timeout, ring.timeout),
        ("buffer_bytes", buffer_bytes, ring.buffer_bytes),
        ("ulysses_size", ulysses_size, "auto" if ring.fits_heads else ring.ulysses_size),
    )
    for name, value, of_ring in given:
        if value != of_ring:
            raise ValueError(
                f"{name} = {value!r}: the ring of this mesh axis has {name} = {of_ring!r}, from the first style; an "
                "axis has one ring, so give all its styles the same value."
            )
    return _axes[group]


def ring_of(mesh: DeviceMesh) -> Ring:
    """The ring of a mesh axis, for ``positions``, ``shard``, ``unshard`` and ``pool``.

    Args:
        mesh: one axis of a DeviceMesh, such as ``mesh["ring"]``, on which a :class:`RingDilated` has been applied.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: ``mesh`` has several axes, or no :class:`RingDilated` has been applied on it.
    """
    return _axis_of(mesh).ring


def _axis_of(mesh: DeviceMesh) -> Axis:
    group = _group_of(mesh)
    if group not in _axes:
        names = mesh.mesh_dim_names or ("without a name",)
        raise ValueError(
            f"mesh: no RingDilated has been applied on its axis {names[0]}; call parallelize_module(model, mesh, "
            "{…: RingDilated(…)}) first, with a plan that matches a module."
        )
    return _axes[group]


def _group_of(mesh: object) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh = {type(mesh).__name__}: expected one axis of a DeviceMesh, such as mesh['ring'].")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} axes, {mesh.mesh_dim_names}: expected one; pass the ring's axis alone, such as "
            "mesh['ring']."
        )
    return mesh.get_group()


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    seq_len: int | None = None,
) -> Iterator[None]:
    """Shard tensors in place over a mesh axis, and restore them at the end.

    The arguments are those of ``torch.distributed.tensor.experimental.context_parallel``, and ``seq_len``. Inside the
    context each buffer holds this rank's rows, as ``ring_of(mesh).shard`` cuts them, and the modules on the axis know
    the length of the whole sequence. The sequence may have any length. Every rank of the axis enters with the same
    whole tensors. Outside of a context, a module on a ring of several ranks raises an error.

    Call ``backward`` inside the context. Outside of it, autograd raises an error, since the buffers are whole again.

    Inside the context a buffer has other memory than outside. So two views of one tensor, such as ``batch[:, :-1]`` and
    ``batch[:, 1:]``, may both be buffers, but what is written to a buffer inside the context is lost at its end.

    DistributedDataParallel copies rank 0's buffers to all ranks in each forward. If a buffer of the model is sharded,
    switch that off: ``forward_sync_buffers=False``, or ``broadcast_buffers=False`` before torch 2.13.

    Args:
        mesh: one axis of a DeviceMesh, on which a :class:`RingDilated` has been applied.
        buffers: tensors that hold the whole sequence, such as tokens, labels, masks and rotary tables, of any shapes
            and dtypes. With None and without ``seq_len``, the context does nothing.
        buffer_seq_dims: the sequence dimension of each buffer.
        no_restore_buffers: buffers that keep this rank's rows at the end.
        seq_len: length of the whole sequence, for rows that are sharded already and not buffers. None means the length
            of the buffers.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh, or an argument is not a list of plain tensors or dimensions.
        ValueError: no style has been applied on the axis; a buffer is a Parameter, requires a gradient, or is given
            twice; the buffers differ in length, from ``seq_len``, or in number from ``buffer_seq_dims``;
            ``no_restore_buffers`` has a tensor that is not in ``buffers``; or a context of this axis is open.
        RuntimeError: from a call of attention: DistributedDataParallel has overwritten a buffer.
    """
    axis = _axis_of(mesh)
    with axis.ring.report_refusals():
        buffers, dims = _check_buffers(buffers, buffer_seq_dims)
        kept = {id(buffer) for buffer in no_restore_buffers or ()}
        if not kept <= {id(buffer) for buffer in buffers}:
            raise ValueError("no_restore_buffers has a tensor that is not in buffers: give only buffers.")
        if seq_len is not None:
            check_integer("seq_len", seq_len, 1)
        if buffers:
            length = buffers[0].shape[dims[0]]
            if seq_len not in (None, length):
                raise ValueError(f"seq_len = {seq_len}: the buffers have the length {length}; leave seq_len out.")
            seq_len = length
        if seq_len is not None and axis.seq_len is not None:
            raise ValueError(
                "mesh: a context_parallel of this axis is open: one sequence is sharded at a time; give all buffers to "
                "one context."
            )
    if seq_len is None:
        yield
        return
    with torch.no_grad():
        shards = [axis.ring.shard(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
    wholes = [None if id(buffer) in kept else buffer.data for buffer in buffers]
    axis.seq_len, axis.buffers = seq_len, buffers
    try:
        for buffer, shard in zip(buffers, shards, strict=True):
            buffer.data = shard
        increment_version(buffers)
        yield
    finally:
        axis.seq_len, axis.buffers = None, []
        for buffer, whole in zip(buffers, wholes, strict=True):
            if whole is not None:
                buffer.data = whole
                increment_version(buffer)


def _check_buffers(buffers: Any, dims: Any) -> tuple[list[Tensor], list[int]]:
    """The buffers, and their sequence dimensions counted from 0."""
    for name, value in {"buffers": buffers, "buffer_seq_dims": dims}.items():
        if value is not None and (isinstance(value, Tensor) or not isinstance(value, Sequence)):
            raise TypeError(f"{name} = {type(value).__name__}: expected a list.")
    buffers, dims = list(buffers or ()), list(dims or ())
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffers has {len(buffers)} tensors and buffer_seq_dims {len(dims)} numbers: give one number per buffer."
        )
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        _check_buffer(f"buffers[{index}]", buffer)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"buffer_seq_dims[{index}] = {dim!r}: expected a dimension of buffers[{index}], which is "
                f"{list(buffer.shape)}."
            )
        if any(buffer is other for other in buffers[:index]):
            raise ValueError(f"buffers[{index}] is in the list twice, and would be sharded twice; give it once.")
    dims = [dim % buffer.dim() for buffer, dim in zip(buffers, dims, strict=True)]
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1 or 0 in lengths:
        raise ValueError(
            f"buffers have the lengths {lengths} along buffer_seq_dims = {dims}: expected one length, at least 1; "
            "index a longer table with positions, and shard the positions."
        )
    return buffers, dims


def _check_buffer(name: str, buffer: object) -> None:
    if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor):
        raise TypeError(f"{name} = {type(buffer).__name__}: expected a plain torch.Tensor of the whole sequence.")
    if isinstance(buffer, nn.Parameter):
        raise ValueError(
            f"{name} is a Parameter {list(buffer.shape)}: parameters are not sharded along the sequence; index it with "
            "positions, and shard the positions."
        )
    if buffer.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, which would be that of this rank's rows; shard it with "
            "ring_of(mesh).shard, which is differentiable."
        )


class RingDilated(ParallelStyle):
    """Puts an attention module on the ring of a mesh axis. It is a value of the plan of ``parallelize_module``.

    The module is one of these:

    - an *inner attention*: a module without parameters whose forward begins with query, key and value, such as a module
      around ``scaled_dot_product_attention``. Its arguments ``is_causal`` and ``enable_gqa`` keep their meaning;
      ``scale`` must be None or that of the style. A call may also pass ``key_padding_mask``, ``document_ids``,
      ``dropout_seed`` and ``score_mod`` of :class:`~ring_backends.RingDilatedAttention`.
    - ``torch.nn.MultiheadAttention``, for self-attention with ``need_weights=False``.
    - a :class:`~ring_backends.RingDilatedAttention` or a
      :class:`~ring_backends.multihead.RingDilatedMultiheadAttention` that was made without a ring. It has a pattern and
      options of its own, so its style is ``RingDilated()``.

    The module then computes the attention of this pattern over the whole sequence, while its inputs and its output are
    this rank's rows. One branch over the whole sequence, ``RingDilated([None], [1])``, is full attention.

    All ranks of the axis apply the same plan, before ``torch.compile`` and ``fully_shard``. The first style on an axis
    makes its ring, so the other styles of the axis need the same ``layout``, ``backend``, ``timeout``, ``buffer_bytes``
    and ``ulysses_size``.

    Args:
        segment_lengths, dilation_rates: as in :class:`~ring_backends.DilatedPattern`; None for an attention of this
            package.
        layout: how the sequence is distributed over the axis, ``"contiguous"`` or ``"zigzag"``. PyTorch's
            ``context_parallel`` uses the zigzag layout.
        backend: name of the adapter that makes the ring.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors; None for the default of the device, as in ``initialize``.
        ulysses_size: how many neighbouring ranks exchange rows for heads within a call, as in ``initialize``.
        seq_dim: the sequence dimension of an inner attention's query, key and value: 2 for [batch, heads, local seq,
            head_dim], 1 for [batch, local seq, heads, head_dim].
        is_causal: whether a query sees only keys at or before its own position, in every call. None takes it from the
            call, or from the default of the module's own forward.
        options: of the attention, such as ``window_lengths``, ``scale``, ``kernel`` and ``dropout_p``
            (:class:`~ring_backends.RingDilatedAttention`). ``nn.MultiheadAttention`` has its own dropout.

    Raises:
        ValueError, TypeError: an argument is invalid. ``parallelize_module`` raises them if the module is not such an
            attention, ``device_mesh`` has several axes, or the ring of the axis has other options.
        AdapterUnavailableError: the framework of the adapter is missing or does not work here.
        RingPeerError: from ``parallelize_module``: a rank of the axis did not apply the plan in time.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int | None] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        layout: LayoutKind = "contiguous",
        backend: str = "native",
        timeout: timedelta | float = timedelta(seconds=300),
        buffer_bytes: int | None = None,
        ulysses_size: UlyssesSize = 1,
        seq_dim: int = 2,
        is_causal: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(None, layout, timeout, None, "rank", buffer_bytes, ulysses_size, {})
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
        self._backend, self._of_ring = backend, (layout, as_timedelta(timeout), buffer_bytes, ulysses_size)
        self._seq_dim, self._is_causal = seq_dim, is_causal

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, options = type(module).__name__, self._options
        parameters = inspect.signature(module.forward).parameters.values()
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(parameter.name for parameter in parameters if parameter.kind in by_place)
        if isinstance(module, (RingDilatedAttention, RingDilatedMultiheadAttention)):
            own: Any = module if isinstance(module, RingDilatedAttention) else module.attention
            self._check_own(name, own)
            axis = join_axis(device_mesh, self._backend, *self._of_ring)
            own.ring = axis.ring
            module.register_forward_pre_hook(partial(_prepare_call, axis), with_kwargs=True)
            return module
        if isinstance(module, _OnRing):
            raise ValueError(f"module = {name}: is on a ring already; name every attention once.")
        if "forward" in vars(module):
            raise ValueError(f"module = {name}: its forward was replaced on the instance; apply the style before that.")
        on_ring: type[_OnRing]
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            self._check_multihead(module)
            on_ring, options = MultiheadAttentionOnRing, {**options, "dropout_p": module.dropout}
        elif len(names) >= 3 and all(name.fullmatch(given) for name, given in zip(_NAMES, names, strict=False)):
            self._check_inner(module)
            on_ring = InnerAttentionOnRing
        else:
            raise TypeError(
                f"module = {name}: not an attention that RingDilated can put on a ring; name a module whose forward "
                "begins with query, key and value, a torch.nn.MultiheadAttention, or an attention of ring_backends."
            )
        if self._pattern[0] is None:
            raise ValueError(f"segment_lengths is not given: {name} has no pattern of its own; give one.")
        axis = join_axis(device_mesh, self._backend, *self._of_ring)
        attention = create_attention(self._backend, *self._pattern, ring=axis.ring, **options)
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        on_it: Any = module
        on_it.__class__ = _class_on_ring(on_ring, type(module))  # type: ignore[arg-type]
        on_it.ring_attention = attention.train(module.training)
        on_it.ring_call = CallForm(axis, self._is_causal, self._seq_dim, names, defaults)
        if on_ring is MultiheadAttentionOnRing:
            # Without a hook, the layers of torch.nn do not call their attention in evaluation.
            module.register_forward_pre_hook(_do_nothing)
        return module

    def _check_own(self, name: str, attention: RingDilatedAttention) -> None:
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
        if self._is_causal is None and "is_causal" not in inspect.signature(module.forward).parameters:
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


@dataclass(frozen=True)
class CallForm:
    """How a module is called.

    Attributes:
        axis: the mesh axis of the module.
        is_causal: whether the attention is causal; None if the call says so.
        seq_dim: the sequence dimension of an inner attention's query, key and value.
        names: the arguments of the module's own forward that may be given by position.
        defaults: the values of the arguments that may be left out.
    """

    axis: Axis
    is_causal: bool | None
    seq_dim: int
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call by its name, with the defaults."""
        if len(args) > len(self.names):
            raise TypeError(f"{len(args)} arguments are given by position: expected at most {len(self.names)}.")
        given = dict(zip(self.names, args, strict=False))
        for name in given:
            if name in kwargs:
                raise TypeError(f"{name} is given twice, by position and by name: give it once.")
        return {**self.defaults, **given, **kwargs}

    def causal(self, of_call: object) -> bool:
        """Whether a call is causal."""
        is_causal = of_call if self.is_causal is None else self.is_causal
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal = {is_causal!r}: expected True or False, or RingDilated(is_causal=…).")
        return is_causal


class _OnRing(nn.Module):
    """Base of the classes whose forward replaces that of a module."""

    ring_attention: RingDilatedAttention
    ring_call: CallForm


class InnerAttentionOnRing(_OnRing):
    """Replaces the forward of a module that is called with query, key and value, and has no parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend from this rank's rows to the keys of the whole sequence.

        Args:
            args, kwargs: as in the module's own forward: query, key and value, [batch, heads, local seq, head_dim] with
                ``seq_dim=2`` and [batch, local seq, heads, head_dim] with ``seq_dim=1``; then ``is_causal``, ``scale``
                and ``enable_gqa``. Other arguments must be None, False or 0. ``key_padding_mask``, ``document_ids``,
                ``dropout_seed`` and ``score_mod`` are those of :class:`~ring_backends.RingDilatedAttention`.

        Returns:
            This rank's rows of the output, in the order of query. They are as wide as value.

        Raises:
            ValueError, TypeError: an argument is invalid. The error is raised before any hop.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        attention, call = self.ring_attention, self.ring_call
        with attention.ring.report_refusals():
            call.axis.check_buffers()
            given = call.bind(args, kwargs)
            query, key, value = (given.pop(name, None) for name in call.names[:3])
            order = f"{_ORDERS[call.seq_dim]}, by RingDilated(seq_dim={call.seq_dim})"
            _check_tensors(query, key, value, order, dims=4, seq_dim=call.seq_dim)
            query, key, value = (tensor.transpose(1, call.seq_dim) for tensor in (query, key, value))
            if given.pop("enable_gqa", None) is False and key.shape[2] != query.shape[2]:
                raise ValueError(
                    f"enable_gqa = False with {query.shape[2]} query heads and {key.shape[2]} key heads: pass "
                    "enable_gqa=True for grouped key/value heads."
                )
            of_style = query.shape[3] ** -0.5 if attention.scale is None else attention.scale
            scale = given.pop("scale", None)
            if scale is not None and not math.isclose(scale, of_style, rel_tol=1e-6):
                raise ValueError(
                    f"scale = {scale}: this style computes with {of_style}; set RingDilated(scale={scale})."
                )
            is_causal = call.causal(given.pop("is_causal", None))
            passed_on = {name: given.pop(name, None) for name in _PASSED_ON}
            _refuse(given)
            seq_len = call.axis.length()
        out = attention(query, key, value, is_causal=is_causal, seq_len=seq_len, **passed_on)
        return cast(Tensor, out.transpose(1, call.seq_dim))


class MultiheadAttentionOnRing(_OnRing, nn.MultiheadAttention):
    """Replaces the forward of ``torch.nn.MultiheadAttention``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from this rank's rows to the keys of the whole sequence.

        Args:
            query, key, value: [batch, local seq, features] with ``batch_first``, else [local seq, batch, features];
                all with the same number of rows.
            key_padding_mask: [batch, local seq]: bool, True where a key is to be ignored; or float, −inf where a key is
                to be ignored, else 0.
            need_weights: must be False.
            attn_mask: must be None.
            average_attn_weights: has no effect.
            is_causal: whether a query sees only keys at or before its own position. It needs no mask.

        Returns:
            The pair of this rank's rows of the output, in the shape of ``query``, and None.

        Raises:
            ValueError, TypeError: an argument is invalid. The error is raised before any hop.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        attention, call = self.ring_attention, self.ring_call
        seq_dim = 1 if self.batch_first else 0
        order = "[batch, local seq, features]" if self.batch_first else "[local seq, batch, features]"
        with attention.ring.report_refusals():
            call.axis.check_buffers()
            _check_tensors(query, key, value, order, dims=3, seq_dim=seq_dim)
            widths = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
            for name, (tensor, width) in widths.items():
                if tensor.shape[2] != width:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {order} with {width} features.")
            _refuse({"need_weights": need_weights, "attn_mask": attn_mask})
            is_causal = call.causal(is_causal)
            ignored = None if key_padding_mask is None else _as_bool(key_padding_mask)
            seq_len = call.axis.length()
        rows = [tensor.transpose(seq_dim, 1) for tensor in (query, key, value)]
        projected = [F.linear(*each) for each in zip(rows, *self._weights(), strict=True)]
        heads = [tensor.unflatten(2, (self.num_heads, self.head_dim)) for tensor in projected]
        out = attention(*heads, is_causal=is_causal, seq_len=seq_len, key_padding_mask=ignored)
        return self.out_proj(out.flatten(2)).transpose(seq_dim, 1), None

    def _weights(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The projections of query, key and value: their weights, and their biases."""
        weights: list[Any] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self.in_proj_weight is not None:
            weights = [*self.in_proj_weight.chunk(3)]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return weights, [*biases]


@cache
def _class_on_ring(on_ring: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(f"{own.__name__}OnRing", (on_ring, own), {"__module__": own.__module__})


def _do_nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook."""


def _prepare_call(axis: Axis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: checks the buffers, and adds ``seq_len`` unless the call gives it."""
    with axis.ring.report_refusals():
        axis.check_buffers()
        if kwargs.get("cache") is not None and axis.seq_len is None:  # a step of decoding has no seq_len
            return args, kwargs
        return args, {**kwargs, "seq_len": axis.length(kwargs.get("seq_len"))}


def _check_tensors(query: object, key: object, value: object, order: str, *, dims: int, seq_dim: int) -> None:
    """Check that query, key and value are plain tensors with the same number of rows."""
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise TypeError(f"{name} = {type(tensor).__name__}: expected a plain torch.Tensor {order}.")
        if tensor.is_nested:
            raise ValueError(
                f"{name} is a nested tensor: pad it; nn.TransformerEncoder has enable_nested_tensor=False."
            )
        if tensor.dim() != dims:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {order}; reshape it.")
        if tensor.shape[seq_dim] != tensors["query"].shape[seq_dim]:
            raise ValueError(
                f"{name} has {tensor.shape[seq_dim]} rows and query {tensors['query'].shape[seq_dim]}: cross-attention "
                "and key/value caches are not supported by a ring; call the module on one sequence."
            )


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse arguments that a ring does not have, unless they are switched off."""
    for name, value in options.items():
        if isinstance(value, Tensor) or value not in (None, False, 0):
            instead = _INSTEAD.get(name, "a ring does not have this option; leave it out")
            raise ValueError(f"{name} is given: {instead}.")


def _as_bool(mask: Tensor) -> Tensor:
    """A key padding mask as bool, True where a key is to be ignored."""
    if mask.dtype == torch.bool:
        return mask
    ignored = mask == -torch.inf
    if not mask.is_floating_point() or not bool((ignored | (mask == 0)).all()):
        raise ValueError(
            f"key_padding_mask is {mask.dtype} with values other than 0 and −inf: biases of scores are not supported "
            "by a ring; pass a bool mask, True for a key to ignore."
        )
    return ignored
