"""Ring dilated attention: the abstract module that adapters complete with a ring pass, and a function for one device.

Each rank holds a part of the sequence and computes the output of that part, exactly as one device would over the whole
sequence (LongNet, arXiv 2307.02486; ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.engine import compiled
from ring_backends.engine.autograd import RingExecutor, attend
from ring_backends.engine.call import AttentionCall, check_call
from ring_backends.engine.hops import Hops, Start, no_hops
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.validation import check_dropout, check_scale, draw_seed
from ring_backends.ring.agreement import Configuration
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.pattern import DilatedPattern, HeadMode, Offset, Padding


class RingDilatedAttention(nn.Module, ABC):
    """Exact dilated attention over a sequence that lies sharded over a ring of ranks.

    An adapter subclasses this and supplies :meth:`ring_pass`. Under ``torch.compile`` a call is part of the graph
    around it, and each hop is an operator (:mod:`ring_backends.engine.compiled`).

    Args:
        segment_lengths, dilation_rates, head_mode, offset, padding: as in :class:`DilatedPattern`.
        ring: the ring, from the adapter's ``initialize``; None is a ring of one.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        kernel: the block-attention kernel by name, or ``"auto"``.
        dropout_p: probability that an attention weight is dropped while training; below 1. With dropout only the math
            kernel can run.

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
        self.dropout_p = check_dropout(dropout_p)
        self.ring = Ring() if ring is None else ring
        self.scale = check_scale(scale)
        self.kernel = kernel
        self._handle = compiled.enlist(self)

    @property
    def ring(self) -> Ring:
        """The ring that the sequence lies over. Assign one to a module after unpickling it in another process."""
        return self._ring

    @ring.setter
    def ring(self, ring: Ring) -> None:
        before = getattr(self, "_ring", None)
        self._ring = ring
        if before is None or before.agreement is not ring.agreement:
            self._module_number = "0" if ring.agreement is None else str(ring.agreement.number_module())
            self._num_copies = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = compiled.enlist(self)

    def copy_for(self, what: str) -> RingDilatedAttention:
        """A copy whose calls the ranks tell apart from those of this module, and of other copies, by ``what``."""
        return self._copy(self.__getstate__(), what)

    def __copy__(self) -> RingDilatedAttention:
        self._num_copies += 1
        return self._copy(self.__getstate__(), f"copy {self._num_copies}")

    def __deepcopy__(self, memo: dict[int, Any]) -> RingDilatedAttention:
        self._num_copies += 1
        return self._copy(copy.deepcopy(self.__getstate__(), memo), f"copy {self._num_copies}")

    def _copy(self, state: dict[str, Any], what: str) -> RingDilatedAttention:
        copied = type(self).__new__(type(self))
        copied.__setstate__(state)
        copied._module_number, copied._num_copies = f"{self._module_number}, {what}", 0
        return copied

    @abstractmethod
    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        """Post one hop and return at once.

        Args:
            outgoing: per ring rank, a flat uint8 buffer to send to it. Nobody changes it until the transfer is over.
            incoming: per ring rank, a flat uint8 buffer to fill from it.
            tag: 31-bit message tag, the same at both ends of a hop, distinct per hop, call and configuration.

        Returns:
            The transfer. Its ``wait`` is called exactly once.
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
        document_ids: Tensor | None = None,
        dropout_seed: int | None = None,
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
            document_ids: int32 or int64 [batch, local seq], the document of each row where several documents are packed
                into one sequence. A query sees only keys of its own document, among those that the pattern shows it. A
                row with a negative number belongs to no document: it sees nothing, and nothing sees it.
            dropout_seed: seed of this call's dropout, 0 … 2⁶³ − 1; None draws one from torch's CPU generator. Ranks
                with equal seeds, as after ``torch.manual_seed``, drop the same weights as one device.
            return_lse: whether to return the LSE too.

        Returns:
            out like query, or with ``return_lse`` (out, LSE): [batch, heads, local seq], fp32 (fp64 for fp64),
            detached. A query that sees no key has out 0 and LSE −inf.

        Raises:
            ValueError, TypeError: an argument breaks its rule; before any communication.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        self.ring.check_connected()
        dropout_p = self.dropout_p if self.training else 0.0
        seed = self._draw_seed(dropout_seed, dropout_p)
        tensors = (query, key, value, key_padding_mask, document_ids, seed)
        return self.attend(AttentionInputs(*tensors, is_causal, seq_len, return_lse, dropout_p))

    def attend(self, inputs: AttentionInputs) -> Any:
        """Carry out one call. An adapter overrides this if its calls do more than hops.

        Returns:
            out, or with ``return_lse`` (out, LSE), as :meth:`forward`.
        """
        if torch.compiler.is_compiling():
            constants = compiled.constants(self.pattern, self.ring, self.scale, self.kernel)
            return compiled.attend(self._handle, inputs.tensors, inputs.options, constants)
        inputs, call = self.check_call(inputs)
        return attend(inputs, RingExecutor(call, self.start(call, inputs, needs_gradients=inputs.needs_gradients)))

    def _draw_seed(self, dropout_seed: int | None, dropout_p: float) -> Tensor | None:
        if torch.compiler.is_compiling():
            return draw_seed(dropout_seed, dropout_p)
        with self.ring.report_refusals():
            return draw_seed(dropout_seed, dropout_p)

    def check_call(self, inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionCall]:
        """Check a call and return its inputs as autocast casts them. A refusal is reported to the other ranks."""
        with self.ring.report_refusals():
            return check_call(inputs, self.pattern, self.ring, self.scale, self.kernel)

    def start(self, call: AttentionCall, inputs: AttentionInputs, *, needs_gradients: bool) -> Start:
        """A function that begins the forward or the backward of a checked call, once all ranks agree on it."""
        if self.ring.agreement is None:
            return no_hops
        configuration = call.configuration(inputs, self._module_number, needs_gradients=needs_gradients)
        return partial(self._hops, configuration)

    def _hops(self, configuration: Configuration, direction: str) -> Hops:
        agreement = self.ring.agreement
        assert agreement is not None
        call = agreement.begin(configuration, direction=direction)
        return Hops(self.ring.rank, self.ring_pass, call, agreement, self.ring.traffic)

    def extra_repr(self) -> str:
        options = asdict(self.pattern) | {"scale": self.scale, "kernel": self.kernel, "dropout_p": self.dropout_p}
        options |= {"ring_size": self.ring.size, "layout": self.ring.layout_kind}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout_seed: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Dilated attention on a single device: the same result as :class:`RingDilatedAttention` on a ring of one.

    Under ``torch.compile`` this function breaks the graph; a module on a ring of one does not.

    Args:
        query: [batch, seq, heads, head_dim]; fp64, fp32, bf16 or fp16; any strides.
        key, value: [batch, seq, key/value heads, head_dim]; their number of heads divides query's.
        segment_lengths, dilation_rates, head_mode, offset, padding: as in :class:`DilatedPattern`.
        is_causal, scale, kernel, key_padding_mask, document_ids, dropout_seed, return_lse: as in
            :class:`RingDilatedAttention`.
        dropout_p: probability that an attention weight is dropped in this call; below 1.

    Returns:
        out like query, or with ``return_lse`` (out, LSE): [batch, heads, seq], fp32 (fp64 for fp64), detached.

    Raises:
        ValueError, TypeError: an argument breaks its rule.
    """
    pattern = DilatedPattern(segment_lengths, dilation_rates, head_mode, offset, padding)  # type: ignore[arg-type]
    dropout_p = check_dropout(dropout_p)
    tensors = (query, key, value, key_padding_mask, document_ids, draw_seed(dropout_seed, dropout_p))
    inputs = AttentionInputs(*tensors, is_causal, None, return_lse, dropout_p)
    inputs, call = check_call(inputs, pattern, Ring(), check_scale(scale), kernel)
    return attend(inputs, RingExecutor(call, no_hops))
