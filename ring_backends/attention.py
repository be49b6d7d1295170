"""Ring dilated attention: the abstract module that adapters complete with a ring pass, and a function for one device.

Each rank holds a part of the sequence and computes the output of that part, exactly as one device would over the whole
sequence (LongNet, arXiv 2307.02486; ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ring_backends.engine import operators
from ring_backends.engine.binding import Binding, register
from ring_backends.engine.cache import KeyValueCache
from ring_backends.engine.call import (
    AttentionInputs,
    autocast,
    check_dropout,
    check_grad_wire_dtype,
    check_scale,
    draw_seed,
)
from ring_backends.engine.decoding import check_prefill, decode
from ring_backends.kernels.score_mod import ScoreMod
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.pattern import DilatedPattern, HeadMode, Offset, Padding

if TYPE_CHECKING:
    from typing_extensions import Self


class RingDilatedAttention(nn.Module, ABC):
    """Exact dilated attention over a sequence that is sharded over a ring of ranks.

    An adapter subclasses this class and implements :meth:`ring_pass`. Under ``torch.compile`` a call does not break the
    graph, unless it has a ``score_mod``. It becomes one operator in the forward and one in the backward
    (:mod:`ring_backends.engine.operators`).

    Args:
        segment_lengths, dilation_rates, head_mode, offset, padding, window_lengths: as in :class:`DilatedPattern`.
        ring: the ring that the adapter's ``initialize`` returned. None means a ring of one rank.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        kernel: ``"auto"`` chooses a kernel that supports the call; or the name of one (``kernel_names()`` of
            ``ring_backends.kernels``). A ``score_mod`` is supported by ``math``, and by ``triton_dilated`` if it can
            translate the function.
        dropout_p: probability that an attention weight is dropped during training, below 1. The kernels ``math`` and
            ``triton_dilated`` support dropout.
        grad_wire_dtype: dtype in which dK and dV of bf16 inputs travel. None means fp32. ``torch.bfloat16`` halves
            their bytes: every rank still adds in fp32, but each hop rounds the sum so far to bf16. To first order, this
            adds to an element of dK or dV an error of at most 2⁻⁸ × (number of hops) × (the sum of the absolute values
            of the ranks' contributions). Inputs of other dtypes are not affected.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__abstractmethods__:
            raise TypeError(
                f"{cls.__name__} is abstract, without {', '.join(sorted(cls.__abstractmethods__))}: use the class of "
                "an adapter, as in `from ring_backends.adapters import native as backend` and "
                "`backend.RingDilatedAttention(…)`; for one device there is ring_backends.dilated_attention()."
            )
        return super().__new__(cls)

    def __init__(
        self,
        segment_lengths: Sequence[int | None],
        dilation_rates: Sequence[int],
        *,
        ring: Ring | None = None,
        head_mode: HeadMode = "all",
        offset: Offset | None = None,
        padding: Padding = "masked",
        window_lengths: Sequence[int | None] | None = None,
        scale: float | None = None,
        kernel: str = "auto",
        dropout_p: float = 0.0,
        grad_wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        branches = segment_lengths, dilation_rates, head_mode, offset, padding, window_lengths
        self.pattern = DilatedPattern(*branches)  # type: ignore[arg-type]
        if ring is not None and not isinstance(ring, Ring):
            raise TypeError(
                f"ring = {ring!r}: expected the ring that the adapter's initialize() returned, or None for one rank."
            )
        self.dropout_p = check_dropout(dropout_p)
        self.ring = Ring() if ring is None else ring
        self.scale = check_scale(scale)
        self.grad_wire_dtype = check_grad_wire_dtype(grad_wire_dtype)
        self.kernel = kernel
        self._handle = register(self)

    @property
    def ring(self) -> Ring:
        """The ring that holds the sequence. After unpickling in another process, assign the ring of that process."""
        return self._ring

    @ring.setter
    def ring(self, ring: Ring) -> None:
        before = getattr(self, "_ring", None)
        self._ring = ring
        if before is None or before.agreement is not ring.agreement:
            self._name = "0" if ring.agreement is None else str(ring.agreement.number_module())
            self._num_copies = 0

    @property
    def binding(self) -> Binding:
        """What all calls with the present settings have in common."""
        settings = self.pattern, self._ring, self.scale, self.kernel, self.grad_wire_dtype
        return Binding(*settings, self.ring_pass, self._name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = register(self)

    def _copy_for(self, what: str) -> RingDilatedAttention:
        """Return a copy with the name ``what``, such as "layer 3".

        The name is part of every call's configuration, so that the ranks can tell the calls of different copies apart.
        """
        return self._copy(self.__getstate__(), what)

    def __copy__(self) -> RingDilatedAttention:
        return self._copy(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> RingDilatedAttention:
        return self._copy(copy.deepcopy(self.__getstate__(), memo))

    def _copy(self, state: dict[str, Any], what: str | None = None) -> RingDilatedAttention:
        if what is None:
            self._num_copies += 1
            what = f"copy {self._num_copies}"
        copied = type(self).__new__(type(self))
        copied.__setstate__(state)
        copied._name, copied._num_copies = f"{self._name}, {what}", 0
        return copied

    @abstractmethod
    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        """Post one hop and return at once.

        Args:
            outgoing: maps a ring rank to the flat uint8 buffer to send to it. The buffer does not change until the
                transfer is over.
            incoming: maps a ring rank to the flat uint8 buffer to receive from it.
            tag: 31-bit message tag. Both ends of a hop use the same tag. It depends on the hop, the call and the call's
                configuration.

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
        sinks: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend from the local queries to the keys of the whole sequence.

        Every rank of the ring makes the same call, each with its own rows (``ring.shard``).

        Args:
            query: [batch, local seq, heads, head_dim]; fp64, fp32, bf16 or fp16; any strides.
            key: [batch, local seq, key/value heads, head_dim]. The number of heads divides the number of query heads.
            value: [batch, local seq, key/value heads, value_dim], where ``value_dim`` may differ from ``head_dim``, as
                in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
            is_causal: whether a query sees only keys at or before its own global position.
            seq_len: length of the global sequence, in tokens; None means local length × ring size. That assumes that
                the rows are this rank's part, and that every rank has equally many. Nothing notices if they are whole
                rows, or were sharded twice. With ``seq_len``, such rows are refused.
            key_padding_mask: bool [batch, local seq], True where a key is to be ignored.
            document_ids: int32 or int64 [batch, local seq], the document number of each row, if several documents are
                packed into one sequence. A query sees only keys of its own document, and of these only the keys that
                the pattern selects. A row with a negative number belongs to no document: it sees no key, and no query
                sees it.
            dropout_seed: seed of this call's dropout, 0 … 2⁶³ − 1; None draws one from torch's CPU generator. If all
                ranks use the same seed, for example after the same ``torch.manual_seed``, they drop the same weights as
                one device.
            sinks: floating point [heads], the score of one more key of each head (the learned sinks of gpt-oss). Every
                query sees this key. Its value is 0, its score counts in the LSE, and dropout never drops it. As for any
                parameter, the gradient of ``sinks`` on a rank comes from this rank's rows. ``parallelize`` sums it over
                the ranks; a loop without it must do so itself. None means no sinks.
            score_mod: a function (score, batch, head, q_idx, kv_idx) -> score, with the interface of torch's
                ``flex_attention``. It replaces the scaled score of each pair of a query and a key that it sees, and
                gradients go through it. The arguments are tensors without dimensions: the index in the batch, the query
                head, and global positions. A result of −inf hides the pair. Sinks and the zero keys of
                ``padding="zeros"`` keep their scores. Tensors that the function captures are whole on every rank, and
                do not require a gradient. :mod:`ring_backends.score_mods` has ready-made functions from papers. Under
                ``torch.compile``, such a call breaks the graph, and ``fullgraph=True`` raises an error.
            return_lse: whether to return the LSE too.

        Returns:
            out [batch, local seq, heads, value_dim], in query's dtype (under autocast: in autocast's dtype). With
            ``return_lse``, the pair (out, LSE). LSE is [batch, heads, local seq] in fp32 (fp64 for fp64 inputs), and
            has no gradient. A query that sees no key has out 0, and LSE −inf or that of its sink.

        Raises:
            ValueError, TypeError: an argument is invalid. The error is raised before any hop.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
            RuntimeError: the ring has several ranks, and the current stream captures a CUDA graph.
        """
        dropout_p, seed = self.dropout_p if self.training else 0.0, None
        if dropout_p or dropout_seed is not None:
            seed = self._draw_seed(dropout_seed, dropout_p)
        tensors = (query, key, value, key_padding_mask, document_ids, seed, sinks)
        inputs = AttentionInputs(*tensors, is_causal, seq_len, return_lse, dropout_p, score_mod)
        return self._attend(inputs) if score_mod is None else self._attend_outside_graphs(inputs)

    def _draw_seed(self, dropout_seed: int | None, dropout_p: float) -> Tensor | None:
        if torch.compiler.is_compiling():
            return draw_seed(dropout_seed, dropout_p)
        with self.ring.report_refusals():
            return draw_seed(dropout_seed, dropout_p)

    @torch.compiler.disable(reason="a score_mod is a function, and a graph takes tensors")  # type: ignore[untyped-decorator]
    def _attend_outside_graphs(self, inputs: AttentionInputs) -> Any:
        return self._attend(inputs)

    def _attend(self, inputs: AttentionInputs) -> Any:
        """Compute one call, as :mod:`ring_backends.engine.operators` says.

        Returns:
            As :meth:`forward`.
        """
        if not torch.compiler.is_compiling():
            return operators.attend(self.binding, inputs)
        options = inputs.options | operators.settings_of(self.pattern, self.ring, self.scale, self.kernel)
        works_on_host = self.ring.size > 1 or inputs.dropout_seed is not None
        return operators.attend_in_graph(self._handle if works_on_host else None, inputs.tensors, options)

    def new_cache(self, max_len: int | None = None) -> KeyValueCache:
        """Make an empty cache of keys and values for :meth:`prefill` and :meth:`decode`.

        Args:
            max_len: the largest length of the sequence, in tokens. The first call reserves the memory for it, or for
                the rows that the pattern lets later queries see, if these are fewer. None lets the cache grow.
        """
        return KeyValueCache(self.ring, self.pattern, max_len)

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KeyValueCache,
        *,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend causally over a prompt, and keep its keys and values. Every rank passes its rows of the prompt.

        Args:
            cache: an empty cache of this module.
            query, key, value, seq_len, key_padding_mask, sinks, score_mod, return_lse: as in :meth:`forward`.

        Returns:
            As :meth:`forward`. There is no gradient.

        Raises:
            ValueError: as :meth:`forward`; or the cache was made for another ring, or is not empty.
        """
        dropout_p = self.dropout_p if self.training else 0.0
        inputs = AttentionInputs(query, key, value, key_padding_mask, seq_len=seq_len, dropout_p=dropout_p)
        seq_len = check_prefill(self.binding, cache, inputs)
        options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "sinks": sinks, "score_mod": score_mod}
        results = self(query, key, value, is_causal=True, seq_len=seq_len, return_lse=return_lse, **options)
        cache.fill(autocast(key), autocast(value), key_padding_mask, seq_len)
        return results

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KeyValueCache,
        *,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend from new tokens to the cache and to each other, causally, and add them to the cache.

        Every rank of the ring passes the same tokens, which follow those in the cache. Each rank attends to its own
        rows, and one exchange merges the results. The output is that of the last rows of a causal call over the whole
        sequence, the same on every rank.

        Args:
            query: [batch, new tokens, heads, head_dim].
            key: [batch, new tokens, key/value heads, head_dim].
            value: [batch, new tokens, key/value heads, value_dim].
            cache: a cache of this module. If it is empty, the sequence begins with these tokens.
            key_padding_mask: bool [batch, new tokens], True where a key is to be ignored.
            sinks, score_mod: as in :meth:`forward`, the same in every step.
            return_lse: whether to return the LSE too.

        Returns:
            out [batch, new tokens, heads, value_dim], in query's dtype. With ``return_lse``, the pair (out, LSE), where
            LSE is [batch, heads, new tokens]. There is no gradient.

        Raises:
            ValueError, TypeError: an argument is invalid, or does not fit the cache.
            RingMismatchError: the ranks' calls, caches or tokens differ.
            RingPeerError: a rank died, stalled or left.
        """
        options: dict[str, Any] = {"sinks": sinks, "score_mod": score_mod}
        options["dropout_p"] = self.dropout_p if self.training else 0.0
        inputs = AttentionInputs(query, key, value, key_padding_mask, **options)
        out, lse = decode(self.binding, cache, inputs)
        return (out, lse) if return_lse else out

    def extra_repr(self) -> str:
        options = asdict(self.pattern) | {"scale": self.scale, "kernel": self.kernel, "dropout_p": self.dropout_p}
        options |= {"grad_wire_dtype": self.grad_wire_dtype}
        options |= {"ring_size": self.ring.size, "layout": self.ring.layout_kind}
        options |= {"ulysses_size": self.ring.ulysses_size}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


_ALONE = Ring()
"""The ring of every call on a single device."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int | None],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    head_mode: HeadMode = "all",
    offset: Offset | None = None,
    padding: Padding = "masked",
    window_lengths: Sequence[int | None] | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout_seed: int | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    """Dilated attention on a single device: the same result as :class:`RingDilatedAttention` on a ring of one.

    Under ``torch.compile`` this function breaks the graph; a module on a ring of one does not.

    Args:
        query: [batch, seq, heads, head_dim]; fp64, fp32, bf16 or fp16; any strides.
        key: [batch, seq, key/value heads, head_dim]. The number of heads divides the number of query heads.
        value: [batch, seq, key/value heads, value_dim]; see :class:`RingDilatedAttention`.
        segment_lengths, dilation_rates, head_mode, offset, padding, window_lengths: as in :class:`DilatedPattern`.
        is_causal, scale, kernel, key_padding_mask, document_ids, dropout_seed, sinks, score_mod, return_lse: as in
            :class:`RingDilatedAttention`.
        dropout_p: probability that an attention weight is dropped in this call; below 1.

    Returns:
        out [batch, seq, heads, value_dim], in query's dtype (under autocast: in autocast's dtype). With ``return_lse``,
        the pair (out, LSE). LSE is [batch, heads, seq] in fp32 (fp64 for fp64 inputs), and has no gradient. A query
        that sees no key has out 0, and LSE −inf or the score of its sink.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    branches = segment_lengths, dilation_rates, head_mode, offset, padding, window_lengths
    pattern = DilatedPattern(*branches)  # type: ignore[arg-type]
    dropout_p = check_dropout(dropout_p)
    seed = draw_seed(dropout_seed, dropout_p)
    tensors = (query, key, value, key_padding_mask, document_ids, seed, sinks)
    inputs = AttentionInputs(*tensors, is_causal, None, return_lse, dropout_p, score_mod)
    return operators.attend(Binding(pattern, _ALONE, check_scale(scale), kernel), inputs)
