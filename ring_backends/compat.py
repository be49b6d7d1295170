"""The names of earlier ring dilated attentions (``RingDilatedAttentionV2`` and others), for programs that use them.

As with the earlier classes, every rank passes the *whole* query, key and value, and gets the whole output. So every
rank needs O(n) memory for them; only the attention itself needs O(n/p). Each name warns once, and the warning names the
replacement.

The result follows the definition of the earlier classes' common base class, from which some of them differed: the heads
are cut into one group per branch, larger groups first, the offset of branch i is i % r, and the output is divided by
the number of branches. The gradients are exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ring_backends.attention import RingDilatedAttention
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.registry import create_attention, load_adapter
from ring_backends.ring.collectives import all_reduce
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import with_backward

__all__ = [
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2DeepSpeed",
    "RingDilatedAttentionV2FSDP",
    "RingDilatedAttentionV2FairScale",
    "RingDilatedAttentionV2Flash",
    "RingDilatedAttentionV2Robust",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "create_production_ring_attention",
    "create_ring_dilated_attention_v2_collective",
]

_NO_EFFECT = {
    *("device", "dtype", "enable_memory_pool", "enable_profiling", "lightweight_pool", "use_pattern_cache"),
    *("memory_pool_threshold_mb", "flash_chunk_size", "min_seq_length_for_ring"),
}
"""Arguments that are accepted and ignored. Device and dtype are those of the inputs, and there are no pools."""

_warned: set[str] = set()
_rings: dict[tuple[str, int | None, object], Ring] = {}


class RingDilatedAttentionV2(nn.Module):
    """Dilated attention in head groups over a ring, for whole tensors.

    Args:
        segment_lengths, dilation_rates: w and r of each branch.
        dropout: probability of dropping an attention weight during training.
        ring_size: ranks per ring. None: the whole world.
        ring: a ring that an adapter's ``initialize`` returned. It replaces ``ring_size``.
        use_flash_attention: False selects the math kernel.
        ignored: arguments of the earlier classes that have no effect.

    Raises:
        ValueError, TypeError: an argument is invalid or unknown.
    """

    adapter: ClassVar[str] = "native"
    ring: Ring

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        ring_size: int | None = None,
        *,
        ring: Ring | None = None,
        use_flash_attention: bool = True,
        **ignored: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        unknown = sorted(set(ignored) - _NO_EFFECT)
        if unknown:
            raise TypeError(
                f"{name} has no argument {', '.join(unknown)}; leave it out. It accepts those of the earlier classes."
            )
        if name not in _warned:
            _warned.add(name)
            without = f" Arguments without effect: {', '.join(sorted(ignored))}." if ignored else ""
            warnings.warn(
                f"{name} is an earlier name that takes whole tensors; use from ring_backends.adapters import "
                f"{self.adapter}; {self.adapter}.RingDilatedAttention(segment_lengths, dilation_rates, "
                f"ring={self.adapter}.initialize(ring_size), head_mode='grouped', offset='branch') on "
                f"ring.shard(x), and its output divided by the number of branches.{without}",
                FutureWarning,
                stacklevel=3,
            )
        self.ring = _ring(self.adapter, ring_size) if ring is None else ring
        self.attention = create_attention(
            self.adapter,
            segment_lengths,
            dilation_rates,
            ring=self.ring,
            head_mode="grouped",
            offset="branch",
            dropout_p=dropout,
            kernel="auto" if use_flash_attention else "math",
        )
        self.attention.register_forward_hook(_divide)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            query: [batch, seq, heads, head_dim], whole and the same on every rank.
            key: [batch, seq, key/value heads, head_dim], whole and the same on every rank.
            value: [batch, seq, key/value heads, value_dim], whole and the same on every rank.
            is_causal: whether a query sees only keys at or before its own position.

        Returns:
            The whole output, [batch, seq, heads, value_dim], on every rank. Every rank must compute the same loss from
            it, because the gradients are those of this loss, not of the sum over the ranks.
        """
        seq_len = query.shape[1]
        local = (_part(self.ring, x) for x in (query, key, value))
        return _whole(self.ring, self.attention(*local, is_causal=is_causal, seq_len=seq_len), seq_len)


class RingDilatedAttentionV2Collective(RingDilatedAttentionV2):
    """An earlier name of :class:`RingDilatedAttentionV2`. Only the output is gathered, not keys and values."""


class RingDilatedAttentionV2Flash(RingDilatedAttentionV2):
    """An earlier name of :class:`RingDilatedAttentionV2`. By default every class takes the first usable kernel."""


class RingDilatedAttentionV2Robust(RingDilatedAttentionV2):
    """An earlier name of :class:`RingDilatedAttentionV2`."""


class RingDilatedAttentionV2FSDP(RingDilatedAttentionV2):
    """:class:`RingDilatedAttentionV2` with the FSDP adapter."""

    adapter = "fsdp"


class RingDilatedAttentionV2DeepSpeed(RingDilatedAttentionV2):
    """:class:`RingDilatedAttentionV2` with the DeepSpeed adapter."""

    adapter = "deepspeed"


class RingDilatedAttentionV2FairScale(RingDilatedAttentionV2):
    """:class:`RingDilatedAttentionV2` with the FairScale adapter."""

    adapter = "fairscale"


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """:class:`RingDilatedAttentionV2`, with its arguments in a configuration.

    Args:
        config: a mapping or an object with the arguments of :class:`RingDilatedAttentionV2`. Other entries are ignored.
    """

    def __init__(self, config: Any) -> None:
        known = ("segment_lengths", "dilation_rates", "dropout", "ring_size", "ring", "use_flash_attention")
        given = config if isinstance(config, Mapping) else {n: getattr(config, n) for n in known if hasattr(config, n)}
        values = {name: given[name] for name in known if name in given}
        missing = [name for name in known[:2] if name not in values]
        if missing:
            raise ValueError(f"config = {config!r}: has no {' and no '.join(missing)}; add what is missing.")
        super().__init__(**values)


def create_dilated_attention(
    attention_type: str = "auto",
    segment_lengths: Sequence[int] = (),
    dilation_rates: Sequence[int] = (),
    **options: Any,
) -> RingDilatedAttentionV2:
    """Make the attention that an ``attention_type`` of the earlier classes selects.

    Args:
        attention_type: with ``"auto"`` or a type whose name contains ``ring``, the ranks of the world form a ring. All
            other types, such as ``"standard"`` and ``"improved"``, compute on this device alone.
        segment_lengths, dilation_rates: w and r of each branch.
        options: further arguments of :class:`RingDilatedAttentionV2`.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> import torch
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", FutureWarning)
    ...     attention = create_dilated_attention("standard", [16, 64], [1, 2])
    >>> query, key, value = (torch.randn(1, 64, 4, 8) for _ in range(3))
    >>> attention(query, key, value).shape
    torch.Size([1, 64, 4, 8])
    """
    if not isinstance(attention_type, str):
        raise TypeError(f"attention_type = {attention_type!r}: expected a str, such as 'auto', 'ring' or 'standard'.")
    if attention_type != "auto" and "ring" not in attention_type and "ring" not in options:
        options["ring"] = Ring()
    return RingDilatedAttentionV2(segment_lengths, dilation_rates, **options)


create_ring_dilated_attention_v2_collective = RingDilatedAttentionV2Collective
"""Makes a :class:`RingDilatedAttentionV2Collective`."""


def create_production_ring_attention(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], **options: Any
) -> RingDilatedAttentionProduction:
    """Make a :class:`RingDilatedAttentionProduction`."""
    return RingDilatedAttentionProduction(
        {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, **options}
    )


def create_multihead_dilated_attention(
    attention_type: str = "auto",
    embed_dim: int = 0,
    num_heads: int = 0,
    segment_lengths: Sequence[int] = (),
    dilation_rates: Sequence[int] = (),
    *,
    bias: bool = True,
    layer_norm: bool = True,
    **options: Any,
) -> nn.Module:
    """Make self-attention on whole hidden states [batch, seq, embed_dim], from an ``attention_type``.

    Args:
        attention_type, segment_lengths, dilation_rates, options: as in :func:`create_dilated_attention`.
        embed_dim: width of the hidden states.
        num_heads: number of heads. It must divide ``embed_dim``.
        bias: whether the projections have biases.
        layer_norm: whether there is a LayerNorm before the output projection.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    attention = create_dilated_attention(attention_type, segment_lengths, dilation_rates, **options)
    layer = RingDilatedMultiheadAttention(
        embed_dim, num_heads, attention.attention, sub_layer_norm=layer_norm, bias=bias
    )
    return _WholeSelfAttention(layer, attention.ring)


class _WholeSelfAttention(nn.Module):
    def __init__(self, layer: RingDilatedMultiheadAttention, ring: Ring) -> None:
        super().__init__()
        self.layer, self.ring = layer, ring

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        for name, tensor in (("key", key), ("value", value)):
            if tensor is not None and tensor is not query:
                raise ValueError(
                    f"{name} is another tensor than query, but only self-attention is supported; leave key and value "
                    "out."
                )
        seq_len = query.shape[1]
        parameters = {name: _shared(self.ring, parameter) for name, parameter in self.layer.named_parameters()}
        options = {"is_causal": is_causal, "seq_len": seq_len}
        return _whole(self.ring, functional_call(self.layer, parameters, (_part(self.ring, query),), options), seq_len)


def _divide(attention: nn.Module, args: object, out: Tensor) -> Tensor:
    """Divide the output of an attention by its number of branches."""
    return out / cast(RingDilatedAttention, attention).pattern.num_branches


# The functions below convert between whole tensors, which are equal on all ranks, and each rank's part. All ranks
# compute the same loss from whole tensors. So gradients of whole tensors are not summed over the ranks, unlike in
# ring.unshard.


def _part(ring: Ring, whole: Tensor) -> Tensor:
    return with_backward(whole, ring.shard, partial(ring.unshard, seq_len=whole.shape[1]))


def _whole(ring: Ring, part: Tensor, seq_len: int) -> Tensor:
    return with_backward(part, partial(ring.unshard, seq_len=seq_len), ring.shard)


def _shared(ring: Ring, parameter: Tensor) -> Tensor:
    """A parameter that every rank applies to its part. Its gradient is the sum over the ranks."""
    return with_backward(parameter, lambda tensor: tensor, partial(all_reduce, ring, "gradient of a parameter"))


def _ring(adapter: str, ring_size: int | None) -> Ring:
    """The ring that all modules with this adapter and ring size share.

    Like the earlier classes, a module makes no connections of its own.
    """
    ring = _rings.get((adapter, ring_size, dist.group.WORLD))
    if ring is None or (ring.agreement is not None and ring.agreement.has_failed):
        for key in [key for key in _rings if key[2] is not dist.group.WORLD]:
            del _rings[key]  # its process group was destroyed
        ring = load_adapter(adapter).initialize(ring_size)
        _rings[adapter, ring_size, dist.group.WORLD] = ring  # initialize() may have started the world
    return ring
