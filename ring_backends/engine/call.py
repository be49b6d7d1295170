"""One checked call of attention: its plan and kernel on this rank, and the configuration that all ranks share.

What depends only on the configuration of a call is worked out once: checks, kernels, plans and the fields that the
ranks compare. :func:`look_up` finds it again for a later call. Rule: its key holds everything that these depend on, and
:meth:`AttentionCall.configuration` holds everything that the ranks have to agree on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import NoneType

import torch
from torch import Tensor
from torch.nn import Parameter

from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.validation import check_documents, check_flag, check_layout, check_sinks, check_tensors
from ring_backends.kernels import Kernel, KernelInputs, select_kernel
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.score_mod import TranslatedScoreMod, captured_values, check_score_mod, identity
from ring_backends.kernels.triton_score_mod import UntranslatableError, translate
from ring_backends.ring.calls import Configuration
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import RankPlan
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import max_tile_bytes
from ring_backends.torch_internals import has_values, untraced

ENVIRONMENT = ("TRITON_INTERPRET", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
"""The environment variables that the choice of kernels reads."""

_PLAIN = {Tensor, Parameter}
"""The types of tensors whose calls are looked up. A FakeTensor, for example, may have symbols as sizes."""

_OPTIONS = {(bool, bool, int), (bool, bool, NoneType)}
"""The types of is_causal, return_lse and seq_len of such calls."""


@dataclass(frozen=True)
class AttentionCall:
    """How this rank computes one checked call. It holds no tensors of the call, so autograd may keep it.

    Attributes:
        schedule: the schedule of the ring.
        rank: the ring rank.
        kernel: the kernel that computes the tiles.
        in_place: the kernels that compute some dilated branches instead, by the branch's index.
        few_hops: whether the rows of sparse branches travel along trees of few hops.
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
    in_place: Mapping[int, Kernel] = field(default_factory=dict)
    few_hops: bool = True
    _plans: dict[bool, RankPlan] = field(default_factory=dict, init=False, compare=False, repr=False)
    _pairs: dict[bool, frozenset[tuple[int, int]]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _configurations: dict[object, Configuration] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def layout(self) -> SequenceLayout:
        return self.schedule.layout

    def plan(self, inputs: AttentionInputs, *, backward: bool) -> RankPlan:
        """This rank's part of the schedule, in a forward or in a backward. All inputs of a call have the same sizes."""
        if backward not in self._plans:
            self._plans[backward] = self._plan(inputs, backward=backward)
        return self._plans[backward]

    def pairs(self, inputs: AttentionInputs, *, needs_gradients: bool) -> Iterator[tuple[int, int]]:
        """(source, destination) of the messages of this rank in a forward, and in its backward if it has one.

        No plan is made before the first pair is read.
        """
        for backward in (False, True)[: 1 + needs_gradients]:
            if backward not in self._pairs:
                self._pairs[backward] = self.plan(inputs, backward=backward).pairs
            yield from self._pairs[backward]

    def _plan(self, inputs: AttentionInputs, *, backward: bool) -> RankPlan:
        query = inputs.query
        tile_bytes = None  # a kernel that reads rows in place needs no memory for tiles
        if not self.kernel.reads_in_place:
            tile_bytes = max_tile_bytes(query.device, query.nbytes, backward=backward)
        return rank_plan(
            self.schedule,
            self.rank,
            batch=query.shape[0],
            head_dim=query.shape[3],
            value_dim=inputs.value.shape[3],
            itemsize=query.dtype.itemsize,
            backward=backward,
            device_type=query.device.type,
            tile_bytes=tile_bytes,
            threads=torch.get_num_threads() if query.device.type == "cpu" else 1,
            takes_bands=self.kernel.takes_bands,
            uncut=frozenset(self.in_place),
            few_hops=self.few_hops,
        )

    def configuration(self, inputs: AttentionInputs, name: str, *, needs_gradients: bool) -> Configuration:
        """The fields of this call that must be the same on all ranks."""
        key = name, needs_gradients
        if key not in self._configurations:
            self._configurations[key] = self._configuration(inputs, name, needs_gradients)
        return self._configurations[key]

    def _configuration(self, inputs: AttentionInputs, name: str, needs_gradients: bool) -> Configuration:
        documents, schedule = inputs.document_ids, self.schedule
        return Configuration(
            {
                "order of calls": f"attention {name}",
                **fields_of(inputs),
                **asdict(schedule.pattern),
                "seq_len": self.layout.seq_len,
                "layout": self.layout.kind,
                "is_causal": schedule.is_causal,
                "scale": self.scale,
                "document_ids": "none" if documents is None else f"given, {documents.dtype}",
                "dropout_p": 0.0 if self.dropout is None else self.dropout.p,
                "grad_wire_dtype": "none" if self.grad_wire_dtype is None else str(self.grad_wire_dtype),
                "gradients": "needed" if needs_gradients else "not needed",
            }
        )


def fields_of(inputs: AttentionInputs) -> dict[str, object]:
    """The fields of a call or of a step of decoding, except its length, that must be the same on all ranks."""
    query, score_mod = inputs.query, inputs.score_mod
    return {
        "batch": query.shape[0],
        "heads": query.shape[2],
        "key/value heads": inputs.key.shape[2],
        "head_dim": query.shape[3],
        "value_dim": inputs.value.shape[3],
        "dtype": str(query.dtype),
        "device": query.device.type,
        "key_padding_mask": "none" if inputs.key_padding_mask is None else "given",
        "sinks": "none" if inputs.sinks is None else "given",
        "score_mod": "none" if score_mod is None else identity(score_mod),
        "captured by score_mod": "" if score_mod is None else captured_values(score_mod),
    }


MAX_CALLS = 512
"""How many configurations of calls are kept."""

_calls: dict[object, AttentionCall] = {}


def look_up(
    inputs: AttentionInputs,
    pattern: DilatedPattern,
    ring: Ring,
    scale: float | None,
    kernel: str,
    grad_wire_dtype: torch.dtype | None = None,
) -> tuple[AttentionInputs, AttentionCall]:
    """Like :func:`check_call`, but a configuration that was checked before is not checked again."""
    if inputs.score_mod is not None:
        inputs = _with_translation(inputs, kernel)
    settings = pattern, ring.size, ring.rank, ring.layout_kind, ring.data_rank, scale, kernel, grad_wire_dtype
    key = _key(inputs, kernel, settings) if isinstance(kernel, str) else None
    call = None if key is None else _calls.get(key)
    if call is not None:
        if inputs.score_mod is not None:
            _check_score_mod(inputs, call.layout)  # what it captures may have changed
        return (cast_inputs(inputs) if torch.is_autocast_enabled(inputs.query.device.type) else inputs), call
    inputs, call = check_call(inputs, pattern, ring, scale, kernel)
    if ring.size > 1 and not has_values(inputs.query):
        raise ValueError(
            f"query is a meta or fake tensor, and the ring has {ring.size} ranks: a hop cannot send it; use a module "
            "with ring=None, or tensors with values."
        )
    if grad_wire_dtype is not None:
        call = replace(call, grad_wire_dtype=grad_wire_dtype)
    if key is not None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return inputs, call


def _with_translation(inputs: AttentionInputs, kernel: str) -> AttentionInputs:
    """The inputs with the translation of their score_mod, if a kernel of the call may need one and it has one.

    The code of a function does not say whether it has one, so each call finds out before its hops.
    """
    if not isinstance(inputs.query, Tensor) or not (inputs.query.is_cuda or kernel == "triton_dilated"):
        return inputs
    assert inputs.score_mod is not None
    try:
        return replace(inputs, score_mod=TranslatedScoreMod(inputs.score_mod, translate(inputs.score_mod)))
    except UntranslatableError:
        return inputs


def forget_calls() -> None:
    """Work everything out again, since something else than a configuration has changed."""
    _calls.clear()
    _schedule.cache_clear()
    rank_plan.cache_clear()


def _key(inputs: AttentionInputs, kernel: str, settings: tuple[object, ...]) -> object:
    """Everything that a checked call depends on; None for arguments that are checked in each call."""
    query, key, value, score_mod = inputs.query, inputs.key, inputs.value, inputs.score_mod
    options = inputs.is_causal, inputs.return_lse, inputs.seq_len
    of_score_mod = None
    if score_mod is not None:
        of_score_mod = identity(score_mod), captured_values(score_mod), isinstance(score_mod, TranslatedScoreMod)
    types = {type(query), type(key), type(value)}
    of_marks: tuple[object, ...] = ()
    for marks in (inputs.key_padding_mask, inputs.document_ids, inputs.sinks):
        if marks is None:
            of_marks += (None,)
        elif isinstance(marks, Tensor):
            types.add(type(marks))
            of_marks += (marks.shape, marks.dtype, marks.device)
        else:
            return None
    if not types <= _PLAIN or (type(options[0]), type(options[1]), type(options[2])) not in _OPTIONS:
        return None
    device = query.device
    if device != key.device or device != value.device:
        return None
    return (
        settings,
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        device,
        _autocast_dtype(device.type),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        () if device.type == "cpu" and kernel == "auto" else tuple(map(os.environ.get, ENVIRONMENT)),
        of_marks,
        options,
        of_score_mod,
        inputs.dropout_p if inputs.dropout_seed is not None else None,
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
    inputs = cast_inputs(inputs)
    query, key, value = inputs.query, inputs.key, inputs.value
    check_tensors(query, key, value, inputs.key_padding_mask, inputs.document_ids)
    check_sinks(inputs.sinks, query)
    check_documents(inputs.document_ids, pattern)
    layout = check_layout(query.shape[1], inputs.seq_len, ring)
    if inputs.score_mod is not None:
        _check_score_mod(inputs, layout)
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
        score_mod=inputs.score_mod,
        value_dim=value.shape[3],
    )
    scale = query.shape[3] ** -0.5 if scale is None else scale
    chosen, in_place = kernels_of_call(kernel, needs, pattern, layout)
    return inputs, AttentionCall(schedule, ring.rank, chosen, scale, dropout, in_place=in_place)


def _check_score_mod(inputs: AttentionInputs, layout: SequenceLayout) -> None:
    given = inputs.score_mod
    function = given.function if isinstance(given, TranslatedScoreMod) else given
    check_score_mod(function, inputs.query, layout.seq_len, needs_gradients=inputs.needs_gradients)


def kernels_of_call(
    name: str, needs: KernelInputs, pattern: DilatedPattern, layout: SequenceLayout
) -> tuple[Kernel, dict[int, Kernel]]:
    """The kernel of a call. With ``"auto"``, possibly other ones for some dilated branches, by the branch's index."""
    chunk = -(-layout.seq_len // layout.num_chunks)
    rows = [
        -(-min(pattern.reach(index, layout.seq_len) + 1, pattern.segment_length(index, layout.seq_len), chunk) // rate)
        for index, rate in enumerate(pattern.dilation_rates)
    ]
    dilated = [index for index, rate in enumerate(pattern.dilation_rates) if rate > 1]
    is_dilated = len(dilated) == len(rows)
    longest = max((index for index in range(len(rows)) if is_dilated or index not in dilated), key=rows.__getitem__)
    has_window = pattern.band(longest, layout.seq_len) is not None
    chosen = select_kernel(name, replace(needs, rows=rows[longest], is_dilated=is_dilated, has_window=has_window))
    in_place: dict[int, Kernel] = {}
    if name == "auto" and needs.device.type == "cuda" and not chosen.reads_in_place:
        for index in dilated:
            kernel = select_kernel(name, replace(needs, rows=rows[index], is_dilated=True))
            if kernel.reads_in_place:
                in_place[index] = kernel
    return chosen, in_place


def autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the arguments of ``scaled_dot_product_attention``: all floats except fp64."""
    # The arguments are not checked yet. Anything that is not a tensor on a device with autocast is returned unchanged.
    if not isinstance(tensor, Tensor):
        return tensor
    dtype = _autocast_dtype(tensor.device.type)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this type of device; None if it is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """Cast query, key and value by autocast."""
    query, key, value = map(autocast, (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value)


@lru_cache(maxsize=256)
@untraced
def _schedule(
    pattern: DilatedPattern, layout: SequenceLayout, num_heads: int, num_kv_heads: int, is_causal: bool
) -> RingSchedule:
    return RingSchedule(pattern, layout, num_heads, num_kv_heads, is_causal)
