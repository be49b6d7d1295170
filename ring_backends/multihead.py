"""The attention layer around a ring attention: projections, rotary embedding, sub-layer norm.

Everything but the attention is local to a rank. The rotary angle of a row follows from its global position, so the
output does not depend on the layout of the sequence over the ring.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.cache import KeyValueCache
from ring_backends.kernels import resolve_dtype
from ring_backends.kernels.score_mod import ScoreMod
from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.torch_internals import without_base

_MAX_CACHED_TABLES = 4


class RingDilatedMultiheadAttention(nn.Module):
    """Multi-head dilated attention over a ring (LongNet, arXiv 2307.02486), from hidden states to hidden states.

    The layers have torchscale's names (``q_proj``, ``k_proj``, ``v_proj``, ``inner_attn_ln``, ``out_proj``), so that
    the attention weights of a LongNet checkpoint load by name. The attention itself has no parameters.

    Args:
        embed_dim: width of the hidden states; num_heads must divide it.
        num_heads: query heads.
        attention: a RingDilatedAttention of any adapter. Its ``ring`` decides which rows each rank holds.
        num_kv_heads: key and value heads, num_heads if None; it must divide num_heads.
        rotary: rotate queries and keys by their global position (RoFormer, arXiv 2104.09864), in the rotate-half
            convention (GPT-NeoX, LLaMA): component i is paired with component i + head_dim / 2.
        rotary_base: the base of the angles' geometric series.
        sub_layer_norm: LayerNorm over the joined heads before the output projection (Magneto, arXiv 2210.06423,
            as in LongNet).
        bias: biases in the four projections.
        device: device of the parameters.
        dtype: dtype of the parameters. ``"auto"`` takes the dtype that ``ring_backends.kernels.resolve_dtype`` returns
            for the device.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module,
        *,
        num_kv_heads: int | None = None,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        sub_layer_norm: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": kv_heads}
        for name, value in sizes.items():
            check_integer(name, value, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim = {embed_dim}: num_heads = {num_heads} must divide it; change one of the two.")
        if num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads = {kv_heads}: it must divide num_heads = {num_heads}, so that every key head serves "
                f"equally many query heads; change one of the two."
            )
        if not isinstance(attention, nn.Module) or not hasattr(attention, "ring"):
            raise TypeError(
                f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter; make one with "
                f"backend.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring)."
            )
        head_dim = embed_dim // num_heads
        if rotary and head_dim % 2:
            raise ValueError(
                f"rotary = True with head dim {head_dim}: components are rotated in pairs, so the head dim "
                f"embed_dim / num_heads must be even; change embed_dim or num_heads, or leave rotary off."
            )
        if not rotary_base > 0:
            raise ValueError(f"rotary_base = {rotary_base}: must be above 0; 10000.0 is usual.")
        if isinstance(dtype, str):
            dtype = resolve_dtype(dtype, torch.get_default_device() if device is None else torch.device(device))
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, kv_heads, head_dim
        self.rotary, self.rotary_base = rotary, float(rotary_base)
        self.attention = attention
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.inner_attn_ln = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if sub_layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._rotary_tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        x: Tensor,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_seed: int | None = None,
        sinks: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend over the whole sequence; ``x`` is this rank's part.

        Args:
            x: [batch, local seq, embed_dim], in the dtype of the parameters.
            is_causal: a position sees only itself and earlier ones.
            seq_len: length of the global sequence; None is local length × ring size, for equally long parts.
            key_padding_mask: bool [batch, local seq], True = ignore this key.
            document_ids: int32 or int64 [batch, local seq]: a position sees its own document only. Rotary angles are
                those of the position in the whole sequence. This changes nothing, because attention depends only on
                differences of angles.
            dropout_seed, sinks, score_mod: as in a call of the attention.
            cache: what ``attention.new_cache()`` made. With ``seq_len``, ``x`` is this rank's part of a prompt, and the
                cache must be empty. Without ``seq_len``, ``x`` is a few new tokens, the same on every rank. With a
                cache, attention is causal and has no gradient.

        Returns:
            [batch, local seq, embed_dim].

        Raises:
            ValueError: x has the wrong shape.
            TypeError: x has the wrong dtype.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        attention = cast(RingDilatedAttention, self.attention)
        is_step = cache is not None and seq_len is None
        with attention.ring.report_refusals():
            if x.dim() != 3 or x.shape[-1] != self.embed_dim:
                expected = f"[batch, local seq, embed_dim = {self.embed_dim}]"
                raise ValueError(f"x has shape {tuple(x.shape)}: expected {expected}; reshape it.")
            check_dtype(x, self.q_proj.weight)
            _check_cache(cache, document_ids, dropout_seed)
            if not is_step:
                seq_len = whole_length(x, attention.ring, seq_len)
        batch, local_len = x.shape[:2]
        query, key, value = [
            projection(x).unflatten(2, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        if self.rotary:
            if seq_len is None:
                assert cache is not None
                positions = torch.arange(cache.seq_len, cache.seq_len + local_len)
                table = self._new_rotary_table(positions, query)
            else:
                table = self._rotary_table(attention.ring, seq_len, query)
            query, key = _rotate_half(query, *table), _rotate_half(key, *table)
        marks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "sinks": sinks, "score_mod": score_mod}
        if cache is None:
            options = {"is_causal": is_causal, "document_ids": document_ids, "dropout_seed": dropout_seed}
            out = attention(query, key, value, seq_len=seq_len, **options, **marks)
        elif is_step:
            out = attention.decode(query, key, value, cache, **marks)
        else:
            out = attention.prefill(query, key, value, cache, seq_len=seq_len, **marks)
        out = out.reshape(batch, local_len, self.embed_dim)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return without_base(self.out_proj(out))  # with a bias, nn.Linear returns a view

    def extra_repr(self) -> str:
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, rotary={self.rotary}"

    def _rotary_table(self, ring: Ring, seq_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The table of this rank's positions. The last few tables are kept, outside of compiled graphs."""
        if torch.compiler.is_compiling():
            return self._new_rotary_table(ring.positions(seq_len), like)
        key = (ring.layout(seq_len), ring.rank, like.device, like.dtype, self.rotary_base)
        if key not in self._rotary_tables:
            # Autograd cannot save a table made under inference_mode.
            with torch.inference_mode(False), torch.no_grad():
                table = self._new_rotary_table(ring.positions(seq_len), like)
            while len(self._rotary_tables) >= _MAX_CACHED_TABLES:
                del self._rotary_tables[next(iter(self._rotary_tables))]
            self._rotary_tables[key] = table
        return self._rotary_tables[key]

    def _new_rotary_table(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles: [positions, 1, head_dim / 2], in fp32, or fp64 if ``like`` is fp64."""
        # Angles in fp64: in fp32 the angle of position 10⁶ is already off by a twentieth of a radian.
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        angle = positions.to("cpu", torch.float64)[:, None, None] * self.rotary_base**-exponent
        dtype = torch.promote_types(like.dtype, torch.float32)
        return angle.cos().to(like.device, dtype), angle.sin().to(like.device, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rotary_tables": {}}


def check_dtype(x: Tensor, weight: Tensor) -> None:
    """Check that ``x`` has the dtype of the parameters, unless autocast converts it."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x is {x.dtype}: the parameters are {weight.dtype}; convert x, or the module with .to().")


def whole_length(x: Tensor, ring: Ring, seq_len: int | None) -> int:
    """Check that ``x`` is this rank's part of ``seq_len`` tokens, and return the length of the whole sequence."""
    seq_len = x.shape[1] * ring.size if seq_len is None else seq_len
    ring.layout(seq_len)  # check_rows() also accepts no tokens at all
    ring.check_rows("x", x, seq_len)
    return seq_len


def _check_cache(cache: object, document_ids: object, dropout_seed: object) -> None:
    if cache is None:
        return
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"cache = {type(cache).__name__}: expected a cache of attention.new_cache().")
    for name, value in {"document_ids": document_ids, "dropout_seed": dropout_seed}.items():
        if value is not None:
            raise ValueError(f"{name} is given: decoding has no packed documents and no dropout; leave it out.")


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [batch, local seq, heads, head_dim], in the dtype of ``cos``."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
