"""One call of attention on this rank: its tensors and options, their checks, its kernels and its plan.

What depends only on the configuration of a call is worked out once: checks, kernels, plans and the fields that the
ranks compare. :func:`look_up` finds it again for a later call. Rule: its key holds everything that these depend on, and
:meth:`AttentionCall.configuration` holds everything that the ranks have to agree on. An error of a check names the
argument, its value, the rule, and what to do.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ring_backends.kernels import Kernel, KernelInputs, select_kernel
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.operators import replaced_flash
from ring_backends.kernels.score_mod import (
    ScoreMod,
    TranslatedScoreMod,
    captured_values,
    check_score_mod,
    identity,
)
from ring_backends.kernels.steps import StepRows, split_scale
from ring_backends.kernels.triton_dilated import TritonDilatedKernel
from ring_backends.kernels.triton_launch import ON_ROCM
from ring_backends.kernels.triton_score_mod import UntranslatableError, translate
from ring_backends.ring.calls import Configuration
from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.exchange import HeadExchange
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import RankPlan
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import max_tile_bytes
from ring_backends.torch_internals import has_values, mode_of, untraced


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors and options of one call of attention on this rank.

    The fields with tensors come first. The other fields are plain values, which a compiled graph holds as constants. A
    new per-call option needs a field here, an argument of ``RingDilatedAttention.forward``, and the code that uses it.

    Attributes:
        query: [batch, local seq, heads, head_dim].
        key: [batch, local seq, key/value heads, head_dim].
        value: [batch, local seq, key/value heads, value_dim].
        key_padding_mask: bool [batch, local seq], True for a key to ignore.
        document_ids: int32 or int64 [batch, local seq], document number of each row; negative for no document.
        dropout_seed: int64 [1], on the CPU; None without dropout.
        sinks: float [heads], the score of each head's sink; None without sinks.
        is_causal: whether a query sees only keys at or before its own global position.
        seq_len: length of the global sequence; None means local length × ring size.
        return_lse: whether the caller wants the LSE too.
        dropout_p: probability that an attention weight is dropped in this call; 0 without dropout.
        score_mod: changes the score of each pair; None for no change. Compiled graphs have none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_seed: Tensor | None = None
    sinks: Tensor | None = None
    is_causal: bool = False
    seq_len: int | None = None
    return_lse: bool = False
    dropout_p: float = 0.0
    score_mod: ScoreMod | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields with tensors, in order: the tensor arguments of the autograd function and of operators."""
        marks = self.key_padding_mask, self.document_ids
        return self.query, self.key, self.value, *marks, self.dropout_seed, self.sinks

    @property
    def options(self) -> dict[str, Any]:
        """The other fields, as plain values."""
        return {name: getattr(self, name) for name in OPTIONS}

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> AttentionInputs:
        """Make the inputs from their :attr:`tensors` and :attr:`options`."""
        return cls(*tensors, **options)  # type: ignore[arg-type]

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may follow."""
        if not torch.is_grad_enabled():
            return False
        is_of_sinks = self.sinks is not None and self.sinks.requires_grad
        return self.query.requires_grad or self.key.requires_grad or self.value.requires_grad or is_of_sinks


TENSORS = ("query", "key", "value", "key_padding_mask", "document_ids", "dropout_seed", "sinks")
OPTIONS = tuple(field.name for field in fields(AttentionInputs) if field.name not in TENSORS)


# --- the checked call -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """How this rank computes one checked call. It holds no tensors of the call, so autograd may keep it.

    Attributes:
        schedule: the schedule of the ring; or with an exchange, that of the groups, for the heads of this rank.
        rank: the ring rank; or with an exchange, the number of this rank's group.
        exchange: what this rank exchanges with its group; None without groups.
        kernel: the kernel that computes the tiles.
        in_place: the kernels that compute some dilated branches instead, by the branch's index.
        few_hops: whether rows may travel along trees other than chains.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors; None for the default of the device.
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
    buffer_bytes: int | None = None
    exchange: HeadExchange | None = None
    _plans: dict[bool, RankPlan] = field(default_factory=dict, init=False, compare=False, repr=False)
    _pairs: dict[bool, frozenset[tuple[int, int]]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _configurations: dict[object, Configuration] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def layout(self) -> SequenceLayout:
        return self.schedule.layout

    @property
    def ring_ranks(self) -> range:
        """The ring rank of each rank of the schedule."""
        return range(self.layout.ring_size) if self.exchange is None else self.exchange.hop_ranks

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
                of_plan, ring_ranks = self.plan(inputs, backward=backward).pairs, self.ring_ranks
                pairs = frozenset((ring_ranks[source], ring_ranks[destination]) for source, destination in of_plan)
                self._pairs[backward] = pairs if self.exchange is None else pairs | self.exchange.pairs
            yield from self._pairs[backward]

    def _plan(self, inputs: AttentionInputs, *, backward: bool) -> RankPlan:
        query = inputs.query
        tile_bytes = None  # a kernel that reads rows in place needs no memory for tiles
        if not self.kernel.reads_in_place:
            rows = self.layout.local_len(self.rank) * len(self.schedule.heads)
            query_bytes = query.shape[0] * rows * query.shape[3] * query.dtype.itemsize
            tile_bytes = max_tile_bytes(query.device, query_bytes, backward=backward)
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
            buffer_bytes=self.buffer_bytes,
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
                "buffer_bytes": self.buffer_bytes,
                "ulysses_size": 1 if self.exchange is None else self.exchange.group_size,
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
    first_head = call.schedule.heads.start
    rows = replace(rows, score_mod=inputs.score_mod, positions=positions, first_head=first_head)
    return rows if call.dropout is None else _with_dropout(rows, inputs, call.dropout, positions, call.schedule.heads)


def _with_dropout(
    rows: StepRows, inputs: AttentionInputs, dropout: Dropout, positions: Tensor, heads: range
) -> StepRows:
    query, key, seed = rows.query, rows.key, 0
    assert inputs.dropout_seed is not None
    if has_values(inputs.dropout_seed):
        seed = int(inputs.dropout_seed)  # it is on the CPU
    with mode_of(query):
        query_words = dropout.query_words(seed, positions, query.shape[0], heads)
        key_words = dropout.key_words(seed, positions)[:, None].expand(*key.shape[:3])
    return replace(rows, dropout=dropout, dropout_seed=seed, query_words=query_words, key_words=key_words)


# --- kept calls -------------------------------------------------------------------------------------------------------


ENVIRONMENT = ("TRITON_INTERPRET", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE", ON_ROCM)
"""The environment variables that the choice of kernels reads."""

_PLAIN = {Tensor, Parameter}
"""The types of tensors whose calls are looked up. A FakeTensor, for example, may have symbols as sizes."""

_OPTIONS = {(bool, bool, int), (bool, bool, NoneType)}
"""The types of is_causal, return_lse and seq_len of such calls."""

MAX_IMBALANCE = 1.5
"""How many times the mean work of a group's ranks one may have without a warning."""

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
    of_ring = (
        ring.size,
        ring.rank,
        ring.layout_kind,
        ring.data_rank,
        ring.buffer_bytes,
        ring.ulysses_size,
        ring.fits_heads,
    )
    settings = pattern, *of_ring, scale, kernel, grad_wire_dtype
    key = _key(inputs, kernel, settings) if isinstance(kernel, str) else None
    call = None if key is None else _calls.get(key)
    if call is not None:
        if inputs.score_mod is not None:
            _check_score_mod(inputs, call.layout)  # what it captures may have changed
        return (inputs if _autocast_dtype(inputs.query.device.type) is None else cast_inputs(inputs)), call
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
        () if device.type == "cpu" and kernel == "auto" else (replaced_flash(), *map(os.environ.get, ENVIRONMENT)),
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
    check_tensors(inputs)
    check_documents(inputs.document_ids, pattern)
    layout = check_layout(query.shape[1], inputs.seq_len, ring)
    if inputs.score_mod is not None:
        _check_score_mod(inputs, layout)
    sizes = query.shape[2], key.shape[2], inputs.is_causal, ring.group_size(query.shape[2])
    whole = _schedule(pattern, layout, *sizes)
    schedule, rank = whole.of_rank(ring.rank)
    exchange = None if schedule is whole else whole.exchange(ring.rank)
    if exchange is not None and ring.rank == 0 and pattern.head_mode == "grouped":
        _warn_of_idle_ranks(_work_of_members(whole))
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
    chosen, in_place = kernels_of_call(kernel, needs, pattern, schedule.layout)
    of_ring: dict[str, Any] = {"buffer_bytes": ring.buffer_bytes, "exchange": exchange}
    return inputs, AttentionCall(schedule, rank, chosen, scale, dropout, in_place=in_place, **of_ring)


@untraced
def _work_of_members(schedule: RingSchedule) -> list[float]:
    """The share of a group's work that each of its ranks has."""
    pairs = [float(of_member.pairs.sum()) for of_member in schedule.of_members]
    return [of_member / sum(pairs) for of_member in pairs]


def _warn_of_idle_ranks(work: list[float]) -> None:
    """Warn if a rank of a group has much more work than others, because its heads run other branches."""
    ratio = max(work) * len(work)
    if ratio > MAX_IMBALANCE:
        shares = ", ".join(f"{share:.0%}" for share in work)
        warnings.warn(
            f"ulysses_size = {len(work)} with head_mode='grouped': the ranks of a group have {shares} of its work, "
            f"since their heads run different branches, so the busiest takes {ratio:.1f} times as long as with equal "
            "shares; use a smaller ulysses_size, or branches with equal work.",
            stacklevel=3,
        )


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
    if name == "auto" and chosen.name == "math" and needs.device.type == "cuda" and torch.version.hip is not None:
        _warn_of_math_on_rocm(needs)
    if name == "auto" and needs.device.type == "cuda" and not chosen.reads_in_place:
        for index in dilated:
            kernel = select_kernel(name, replace(needs, rows=rows[index], is_dilated=True))
            if kernel.reads_in_place:
                in_place[index] = kernel
    return chosen, in_place


def _warn_of_math_on_rocm(needs: KernelInputs) -> None:
    """Warn that no fused kernel runs a call on a GPU of AMD. Python shows each text once."""
    reasons = "; ".join(TritonDilatedKernel().not_supported_reasons(needs))
    warnings.warn(
        f"kernel = 'auto' takes 'math' on {needs.device}, a GPU of AMD: it computes scores in fp32, and stores them in "
        "memory block by block, so it is estimated to take several times as long as a fused kernel in half precision. "
        f"'triton_dilated', the only other kernel for this GPU, cannot run the call: {reasons}.",
        stacklevel=4,
    )


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
    pattern: DilatedPattern,
    layout: SequenceLayout,
    num_heads: int,
    num_kv_heads: int,
    is_causal: bool,
    ulysses_size: int,
) -> RingSchedule:
    return RingSchedule(pattern, layout, num_heads, num_kv_heads, is_causal, ulysses_size)


# --- checks of arguments ----------------------------------------------------------------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_SHAPES = dict.fromkeys(("query", "key"), "[batch, seq, heads, head_dim]")
_SHAPES["value"] = "[batch, seq, heads, value_dim]"


def check_tensors(inputs: AttentionInputs) -> None:
    """Check that the tensors of a call have the right shapes, and fit each other in shape, dtype and device."""
    query, key, value = inputs.query, inputs.key, inputs.value
    given: dict[str, object] = {"query": query, "key": key, "value": value}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} = {tensor!r}: expected a torch.Tensor of shape {_SHAPES[name]}.")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected {_SHAPES[name]}; split or add dimensions first."
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}: expected fp64, fp32, bf16 or fp16; convert it with .to()."
            )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and query {query.dtype}: they must be the same; convert one, or "
                "run under autocast."
            )
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}: move them to one device.")
        if tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and query {list(query.shape)}: batch and seq must be the same; "
                "pass query, key and value of the same rows of one sequence."
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key has shape {list(key.shape)} and query {list(query.shape)}: head_dim must be the same; only value may "
            "have another one."
        )
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key has {key.shape[2]} heads and value {value.shape[2]}: the numbers must be the same.")
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}: the number of key/value heads must be at least 1 and "
            "divide the number of query heads; change one of the two."
        )
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[3] < 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: the last dim must be at least 1.")
    mask, documents = inputs.key_padding_mask, inputs.document_ids
    if mask is not None:
        _check_marks("key_padding_mask", mask, query, (torch.bool,), "bool, True for a key to ignore")
    if documents is not None:
        _check_marks("document_ids", documents, query, (torch.int32, torch.int64), "int32 or int64")
    if inputs.sinks is not None:
        _check_sinks(inputs.sinks, query)


def _check_sinks(sinks: object, query: Tensor) -> None:
    """Refuse anything but a floating-point tensor [heads] on the device of ``query`` [batch, seq, heads, …]."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks = {sinks!r}: expected a tensor [heads], the score of each head's sink, or None.")
    if sinks.dtype not in DTYPES:
        raise ValueError(f"sinks has dtype {sinks.dtype}: expected fp64, fp32, bf16 or fp16; convert it with .to().")
    if sinks.shape != query.shape[2:3]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [heads] = [{query.shape[2]}].")
    if sinks.device != query.device:
        raise ValueError(f"sinks is on {sinks.device} and query on {query.device}: move it to one device.")


def _check_marks(name: str, marks: object, query: Tensor, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    """Refuse anything but a [batch, seq] tensor that fits ``query``."""
    if not isinstance(marks, Tensor):
        raise TypeError(f"{name} = {marks!r}: expected a tensor [batch, seq] of dtype {expected}, or None.")
    if marks.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {marks.dtype}: expected {expected}; convert it with .to({dtypes[-1]}).")
    if marks.shape != query.shape[:2]:
        raise ValueError(f"{name} has shape {list(marks.shape)}: expected [batch, seq] = {list(query.shape[:2])}.")
    if marks.device != query.device:
        raise ValueError(f"{name} is on {marks.device} and query on {query.device}: move it to one device.")


def check_documents(document_ids: Tensor | None, pattern: DilatedPattern) -> None:
    """Refuse documents together with zero padding, since its zero keys belong to no document."""
    if document_ids is not None and pattern.padding == "zeros":
        raise ValueError(
            "document_ids with padding = 'zeros': the zero keys beyond the sequence belong to no document; use "
            "padding='masked'."
        )


def check_layout(local_len: int, seq_len: int | None, ring: Ring) -> SequenceLayout:
    """Return the layout of the sequence. Check that this rank holds ``local_len`` of its rows."""
    if seq_len is None:
        seq_len = local_len * ring.size
        if seq_len < 1:
            raise ValueError(
                "query has no rows and seq_len is not given: the length of the global sequence is unknown; pass "
                "seq_len."
            )
    layout = ring.layout(seq_len)
    if layout.local_len(ring.rank) != local_len:
        raise ValueError(
            f"query has {local_len} rows, but with seq_len = {seq_len} rank {ring.rank} of a {layout.kind} ring of "
            f"{ring.size} holds {layout.local_len(ring.rank)}; cut the sequence with ring.shard, and pass its length "
            "as seq_len."
        )
    return layout


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: expected True or False.")


def check_scale(scale: object) -> float | None:
    """Check that ``scale`` is a finite number, or None for 1 / sqrt(head_dim)."""
    if scale is None:
        return None
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale = {scale!r}: expected a float, or None for 1 / sqrt(head_dim).")
    if not math.isfinite(scale):
        raise ValueError(f"scale = {scale}: must be finite; None gives 1 / sqrt(head_dim).")
    return float(scale)


def check_grad_wire_dtype(dtype: object) -> torch.dtype | None:
    """Check that ``dtype`` is ``torch.bfloat16``, or None for the dtype of the sums."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"grad_wire_dtype = {dtype!r}: expected torch.bfloat16, or None for fp32.")
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"grad_wire_dtype = {dtype}: must be torch.bfloat16, or None for fp32.")
    return dtype


def check_dropout(dropout_p: object) -> float:
    """Check that ``dropout_p`` is at least 0 and below 1."""
    if not isinstance(dropout_p, (int, float)) or isinstance(dropout_p, bool):
        raise TypeError(f"dropout_p = {dropout_p!r}: expected a number, 0 for no dropout; convert it with float().")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {dropout_p}: must be at least 0 and below 1; 0 is no dropout.")
    return float(dropout_p)


def draw_seed(dropout_seed: object, dropout_p: float) -> Tensor | None:
    """Return the seed of one call's dropout, int64 [1]; None without dropout.

    If ``dropout_seed`` is None, the seed is drawn from torch's CPU generator. Activation checkpointing restores that
    generator, so a recomputation draws the same seed.
    """
    if dropout_seed is None:
        if not dropout_p:
            return None
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    seed = check_integer("dropout_seed", dropout_seed, 0, advice="leave it out to draw one")
    if seed >= 2**63:
        raise ValueError(f"dropout_seed = {seed}: must be below 2**63; leave it out to draw one.")
    return torch.tensor([seed], dtype=torch.int64, device="cpu") if dropout_p else None
