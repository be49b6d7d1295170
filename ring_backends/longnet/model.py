"""The models of LongNet. The docstring of :mod:`ring_backends.longnet` lists the differences from torchscale."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.cache import KeyValueCache
from ring_backends.longnet.torchscale import OPTIONS, load_parameters, read_checkpoint, sizes_of
from ring_backends.multihead import RingDilatedMultiheadAttention, check_dtype, whole_length
from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.pattern import DilatedPattern

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
_FIRST_POSITION = 2  # row of embed_positions for position 0; fairseq reserves the rows before it

_Model = TypeVar("_Model", bound="LongNet")


class _FeedForward(nn.Module):
    def __init__(
        self, embed_dim: int, ffn_dim: int, activation: str, sub_layer_norm: bool, eps: float, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(embed_dim, ffn_dim, **factory)
        self.ffn_layernorm = nn.LayerNorm(ffn_dim, eps, **factory) if sub_layer_norm else None
        self.fc2 = nn.Linear(ffn_dim, embed_dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = _ACTIVATIONS[self.activation](x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        if self.ffn_layernorm is not None:
            x = self.ffn_layernorm(x)
        return cast(Tensor, self.fc2(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + FFN(norm(x))."""

    def __init__(
        self, self_attn: RingDilatedMultiheadAttention, ffn: nn.Module, eps: float = 1e-5, **factory: Any
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        if self_attn.inner_attn_ln is not None:
            self_attn.inner_attn_ln.eps = eps
        self.self_attn_layer_norm = nn.LayerNorm(self_attn.embed_dim, eps, **factory)
        self.ffn = ffn
        self.final_layer_norm = nn.LayerNorm(self_attn.embed_dim, eps, **factory)

    def forward(
        self,
        x: Tensor,
        is_causal: bool,
        seq_len: int | None,
        key_padding_mask: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        # The dtype is checked here and not in LongNet.forward, since a wrapper that shards the layer may convert its
        # inputs.
        with cast(Ring, self.self_attn.attention.ring).report_refusals():
            check_dtype(x, self.self_attn_layer_norm.weight)
        x = x + self.self_attn(
            self.self_attn_layer_norm(x),
            is_causal=is_causal,
            seq_len=seq_len,
            key_padding_mask=key_padding_mask,
            cache=cache,
        )
        return cast(Tensor, x + self.ffn(self.final_layer_norm(x)))


class LongNet(nn.Module):
    """The common base of :class:`LongNetEncoder` and :class:`LongNetDecoder`.

    Args:
        embed_dim: width of the hidden states, a multiple of num_heads.
        num_heads: number of heads of every layer. A checkpoint does not contain it. GigaPath's slide encoders have 16.
        ffn_dim: hidden width of the feed-forward networks.
        num_layers: number of layers.
        attention: a RingDilatedAttention of any adapter. Every layer gets a copy, so that ranks which call layers in
            different orders raise an error. For weights that torchscale trained, use
            ``backend.RingDilatedAttention(w, r, offset="block", padding="zeros", ring=ring)``.
        sub_layer_norm: LayerNorm before the attention's output projection and before ``ffn.fc2`` (``subln``).
        normalize_output: LayerNorm after the last layer.
        vocab_size: rows of ``embed_tokens``. With None there is no such layer, and the input is embeddings.
        num_positions: rows of ``embed_positions``. The first two rows are not used, as in fairseq. With None there is
            no such layer.
        output_size: rows of ``output_projection``. With None there is no such layer, and the output is hidden states.
        tied: whether ``output_projection`` shares the matrix of ``embed_tokens``.
        scale_embedding: whether to multiply embeddings by sqrt(embed_dim).
        activation: activation of the feed-forward networks, ``"gelu"`` or ``"relu"``.
        layer_norm_eps: epsilon of every LayerNorm.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    _is_causal: ClassVar[bool]
    _kind: ClassVar[str]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        num_layers: int,
        attention: nn.Module,
        *,
        sub_layer_norm: bool = True,
        normalize_output: bool = True,
        vocab_size: int | None = None,
        num_positions: int | None = None,
        output_size: int | None = None,
        tied: bool = False,
        scale_embedding: bool = False,
        activation: str = "gelu",
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"ffn_dim": ffn_dim, "num_layers": num_layers}
        tables = {"vocab_size": vocab_size, "num_positions": num_positions, "output_size": output_size}
        for name, value in (sizes | {name: rows for name, rows in tables.items() if rows is not None}).items():
            check_integer(name, value, 1)
        if not isinstance(layer_norm_eps, (int, float)) or isinstance(layer_norm_eps, bool):
            raise TypeError(f"layer_norm_eps = {layer_norm_eps!r}: expected a float; convert it with float().")
        if not layer_norm_eps > 0:
            raise ValueError(f"layer_norm_eps = {layer_norm_eps}: must be above 0; 1e-5 is usual.")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation = {activation!r}: unknown option; choose 'gelu' or 'relu'.")
        if tied and (vocab_size is None or output_size != vocab_size):
            raise ValueError(
                f"tied = True with vocab_size = {vocab_size} and output_size = {output_size}: they share "
                "one matrix, so give both the same size, or leave tied off."
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.scale = math.sqrt(embed_dim) if scale_embedding else 1.0
        self.layers = nn.ModuleList(
            Layer(
                RingDilatedMultiheadAttention(
                    embed_dim, num_heads, copy.deepcopy(attention), sub_layer_norm=sub_layer_norm, **factory
                ),
                _FeedForward(embed_dim, ffn_dim, activation, sub_layer_norm, layer_norm_eps, factory),
                layer_norm_eps,
                **factory,
            )
            for _ in range(num_layers)
        )
        self.layer_norm = nn.LayerNorm(embed_dim, layer_norm_eps, **factory) if normalize_output else None
        self.embed_tokens = None if vocab_size is None else nn.Embedding(vocab_size, embed_dim, **factory)
        self.embed_positions = None if num_positions is None else nn.Embedding(num_positions, embed_dim, **factory)
        self.output_projection = None if output_size is None else nn.Linear(embed_dim, output_size, False, **factory)
        self._scale_initial_weights(sub_layer_norm)
        if tied:
            cast(nn.Linear, self.output_projection).weight = cast(nn.Embedding, self.embed_tokens).weight

    def _scale_initial_weights(self, sub_layer_norm: bool) -> None:
        """Initialize weights as torchscale does.

        Embeddings and output projection get the standard deviation embed_dim^-0.5. With sub-layer norm, the projections
        v and out, fc1 and fc2 are scaled by Magneto's gain sqrt(ln(2 num_layers)).
        """
        for table in (self.embed_tokens, self.embed_positions, self.output_projection):
            if table is not None:
                nn.init.normal_(table.weight, std=table.weight.shape[1] ** -0.5)
        if sub_layer_norm:
            gain = math.sqrt(math.log(2 * len(self.layers)))
            for name, parameter in self.named_parameters():
                if {"v_proj", "out_proj", "fc1", "fc2"} & set(name.split(".")):
                    parameter.data.mul_(gain)

    def forward(
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        features_only: bool = False,
        return_hidden_states: bool = False,
    ) -> Any:
        """Compute this rank's rows of the output.

        Args:
            x: [batch, local seq, embed_dim], embeddings in the dtype of the parameters; or [batch, local seq], token
                ids, int64 or int32. These are this rank's rows, as ``ring.shard`` cuts them.
            seq_len: length of the global sequence. None: local length × ring size, for equally long parts.
            key_padding_mask: bool [batch, local seq], True = ignore this key. To treat padding as
                torchscale does, set the embeddings of padding to zero and pass no mask.
            caches: what :meth:`LongNetDecoder.new_caches` made. With ``seq_len``, ``x`` is this rank's part of a
                prompt, and the caches must be empty. Without ``seq_len``, ``x`` is a few new tokens, the same on every
                rank.
            features_only: whether to skip ``output_projection``.
            return_hidden_states: whether to return also the embeddings and each layer's output, before ``layer_norm``.

        Returns:
            [batch, local seq, output_size], or [batch, local seq, embed_dim] without projection. With
            ``return_hidden_states`` a pair: this, and a list of num_layers + 1 tensors [batch, local seq, embed_dim].

        Raises:
            ValueError, TypeError: x has the wrong shape or dtype, or the sequence is too long for embed_positions.
            RingMismatchError, RingPeerError: as in a call of the attention.
        """
        ring = cast(Ring, cast(Layer, self.layers[0]).self_attn.attention.ring)
        with ring.report_refusals():
            if caches is not None and not self._is_causal:
                raise ValueError(f"caches is given: {type(self).__name__} is not causal; use a LongNetDecoder.")
            if caches is not None and len(caches) != len(self.layers):
                raise ValueError(
                    f"caches has {len(caches)} caches and the model {len(self.layers)} layers; make them with "
                    "new_caches()."
                )
            num_cached = None if caches is None or seq_len is not None else caches[0].seq_len
            x, whole_len = self._embed(x, ring, seq_len, num_cached)
        states, seq_len = [x], whole_len if num_cached is None else None
        for index, layer in enumerate(self.layers):
            x = layer(x, self._is_causal, seq_len, key_padding_mask, None if caches is None else caches[index])
            if return_hidden_states:
                states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.output_projection is not None and not features_only:
            x = self.output_projection(x)
        return (x, states) if return_hidden_states else x

    def _embed(self, x: Tensor, ring: Ring, seq_len: int | None, num_cached: int | None) -> tuple[Tensor, int]:
        """Return the scaled embeddings with positions added, and the length of the sequence.

        Args:
            num_cached: the position of the first row of ``x``, if it is new tokens; None if it is this rank's part.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x = {x!r}: expected a tensor of embeddings or token ids; make it one.")
        is_tokens = x.dtype in (torch.int64, torch.int32)
        if is_tokens and self.embed_tokens is None:
            raise TypeError(
                f"x is {x.dtype}: the model has no embed_tokens; give embeddings, or make the model with vocab_size."
            )
        if not is_tokens and not x.is_floating_point():
            raise TypeError(f"x is {x.dtype}: expected floating embeddings, or token ids as int64; convert it.")
        embed_dim = cast(Layer, self.layers[0]).self_attn.embed_dim
        if x.dim() != 2 if is_tokens else x.dim() != 3 or x.shape[2] != embed_dim:
            expected = f"[batch, local seq] of token ids, or [batch, local seq, embed_dim = {embed_dim}]"
            raise ValueError(f"x has shape {tuple(x.shape)} and is {x.dtype}: expected {expected}; reshape it.")
        if num_cached is not None:
            seq_len = num_cached + x.shape[1]
            positions = torch.arange(num_cached, seq_len)
        else:
            seq_len = whole_length(x, ring, seq_len)
            positions = ring.positions(seq_len)
        if is_tokens:
            x = cast(nn.Embedding, self.embed_tokens)(x)
        x = x * self.scale
        if self.embed_positions is not None:
            longest = self.embed_positions.num_embeddings - _FIRST_POSITION
            if seq_len > longest:
                raise ValueError(
                    f"seq_len = {seq_len}: embed_positions has rows for {longest} tokens; cut the sequence."
                )
            x = x + self.embed_positions((positions + _FIRST_POSITION).to(x.device))
        return x, seq_len

    @classmethod
    def from_state_dict(
        cls: type[_Model],
        state_dict: Mapping[str, Tensor],
        *,
        num_heads: int,
        attention: nn.Module,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> _Model:
        """Make a model from a state_dict, whose names and shapes determine the sizes of the model.

        Args:
            state_dict: state_dict of torchscale's encoder or decoder alone, with names such as ``layers.0.…``.
            num_heads, attention: as in :class:`LongNet`.
            dtype: dtype of the parameters. None means that of the state_dict.
            options: ``scale_embedding``, ``activation``, ``layer_norm_eps`` and ``device``, as in :class:`LongNet`.

        Raises:
            ValueError: the state_dict is not that of a LongNet, or the LongNet is not supported.
        """
        sizes = sizes_of(state_dict)
        dtype = dtype or state_dict["layers.0.self_attn.q_proj.weight"].dtype
        model = cls(num_heads=num_heads, attention=attention, dtype=dtype, **sizes, **options)
        load_parameters(model, state_dict)
        return model

    @classmethod
    def from_torchscale(
        cls: type[_Model],
        module: nn.Module,
        attention: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> _Model:
        """Make a model from torchscale's, with a copy of its parameters and with what a state_dict does not show.

        These are the number of heads, the activation, the scale of embeddings and the epsilon of LayerNorm.

        Args:
            module: torchscale's class of the same name.
            attention: as in :class:`LongNet`.
            device: device of the parameters.
            dtype: dtype of the parameters. None means that of ``module``.

        Raises:
            TypeError: ``module`` is of another class.
            ValueError: it has a part or an activation that is not supported.
        """
        if isinstance(module, LongNet) or not any(base.__name__ == cls.__name__ for base in type(module).__mro__):
            raise TypeError(
                f"module = {type(module).__name__}: expected a {cls.__name__} of torchscale; give it alone."
            )
        published = cast(Any, module)
        layer = published.layers[0]
        return cls.from_state_dict(
            module.state_dict(),
            num_heads=layer.self_attn.num_heads,
            attention=attention,
            scale_embedding=published.embed_scale != 1,
            activation=published.args.activation_fn,
            layer_norm_eps=layer.final_layer_norm.eps,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_checkpoint(
        cls: type[_Model],
        path: str | os.PathLike[str],
        attention: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> _Model:
        """Load the model from a file that ``ring-backends convert`` wrote.

        Raises:
            ValueError: the file has another format, holds another class, or was converted for another pattern.
            OSError: the file cannot be read.
        """
        found = read_checkpoint(path)
        if found["kind"] != cls._kind:
            raise ValueError(
                f"path = {os.fspath(path)!r}: holds a LongNet {found['kind']}, and this is {cls.__name__}; use the "
                "other class, or convert it again with --kind."
            )
        if found["segment_lengths"] is not None:
            pattern = DilatedPattern.torchscale(found["segment_lengths"], found["dilation_rates"])
            if getattr(attention, "pattern", None) != pattern:
                raise ValueError(
                    f"attention has {getattr(attention, 'pattern', None)}: {os.fspath(path)!r} was converted for "
                    f"{pattern}; make the attention with those arguments, or convert it again."
                )
        options = {name: found[name] for name in OPTIONS}
        return cls.from_state_dict(found["state_dict"], attention=attention, device=device, dtype=dtype, **options)


class LongNetEncoder(LongNet):
    """LongNet's encoder: a position sees earlier and later positions. Arguments as in :class:`LongNet`."""

    _kind = "encoder"
    _is_causal = False


class LongNetDecoder(LongNet):
    """LongNet's decoder: a position sees itself and earlier positions. Arguments as in :class:`LongNet`."""

    _kind = "decoder"
    _is_causal = True

    def new_caches(self, max_len: int | None = None) -> list[KeyValueCache]:
        """Make an empty cache of keys and values for each layer.

        Args:
            max_len: as in :meth:`ring_backends.RingDilatedAttention.new_cache`.
        """
        return new_caches(self.layers, max_len)


def new_caches(layers: Iterable[nn.Module], max_len: int | None) -> list[KeyValueCache]:
    """Make an empty cache of keys and values for each layer."""
    attentions = (cast(Layer, layer).self_attn.attention for layer in layers)
    return [cast(RingDilatedAttention, attention).new_cache(max_len) for attention in attentions]
