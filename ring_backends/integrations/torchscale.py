"""torchscale's LongNet encoders and decoders on a ring, within any model and without conversion::

    from ring_backends.integrations import torchscale

    attention = backend.RingDilatedAttention(**vars(torchscale.pattern_of(model)), ring=ring)
    torchscale.use_ring(model, attention)
    out = model(volume)  # the same on every rank

Every rank of the ring calls the model with the same whole input. Within the encoder, rows and activations are sharded
over the ranks. Layers that work row by row, such as projections and norms, are those of the published classes. This
module does not import ``torchscale``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import AdapterUnavailableError, RingMismatchError
from ring_backends.integrations.parameters import agree_on_parameters
from ring_backends.longnet import LongNet
from ring_backends.ring.collectives import agree
from ring_backends.ring.describe import describe
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern

__all__ = ["pattern_of", "remove_ring", "use_ring"]


def pattern_of(model: nn.Module) -> DilatedPattern:
    """The pattern of the attention of a model's LongNet encoders and decoders.

    ``RingDilatedAttention(**vars(pattern_of(model)), ring=ring)`` makes the attention for :func:`use_ring`.

    Args:
        model: a ``LongNetEncoder`` or ``LongNetDecoder`` of torchscale, or a model that contains some.

    Returns:
        ``DilatedPattern.torchscale`` with the segment lengths and dilated ratios of their ``args``.

    Raises:
        TypeError: ``model`` contains no such module.
        ValueError: it contains several with different patterns. Give one of them.
        AdapterUnavailableError: this release of torchscale has changed a part that a ring needs. The message names it.
    """
    patterns = {name: pattern_of_part(part, name, "torchscale") for name, part in _parts_of(model).items()}
    if len({*patterns.values()}) > 1:
        listed = "; ".join(f"{name} has {pattern}" for name, pattern in patterns.items())
        raise ValueError(f"model = {type(model).__name__} has several patterns; give one module at a time: {listed}.")
    return next(iter(patterns.values()))


def use_ring(
    model: nn.Module,
    attention: RingDilatedAttention,
    *,
    ignore_padding: bool = False,
    constant_mixing: bool = False,
) -> None:
    """Put the LongNet encoders and decoders of a model on the ring of ``attention``.

    After this call every rank of a ring calls the model with the same whole input, and gets the results of one device.
    Calls of the encoders and decoders themselves keep their arguments and results: ``src_tokens`` or
    ``prev_output_tokens`` [batch, n] and ``token_embeddings`` [batch, n, embed_dim] are whole, and so are the results.
    flash-attn is not needed.

    Two things differ. ``inner_states`` of a decoder is empty without ``return_all_hiddens=True``, because every rank
    would have to hold the states of all layers as a whole. And on a ring of several ranks, dropout draws other random
    numbers.

    If every rank computes the same loss, the gradients of all parameters of the model, averaged over all ranks, are
    those of one device. DistributedDataParallel, FSDP2 and DeepSpeed average, and so does ``parallelize`` of every
    adapter. Dropout outside of the encoder needs the same seed on every rank of a ring.

    Args:
        model: a ``LongNetEncoder`` or ``LongNetDecoder`` of torchscale, or a model that contains some. Call this
            function before the model is wrapped or compiled. Its parameters are the same on all ranks of the ring.
        attention: a RingDilatedAttention of any adapter, with the pattern of :func:`pattern_of`. Every layer gets a
            copy. With ``padding="masked"``, sequences of every length work, but the results differ from torchscale's
            if the last segment is not full.
        ignore_padding: whether padding has no effect on other tokens. Padding is True in ``encoder_padding_mask`` and
            ``self_attn_padding_mask``, bool [batch, n]. With True, the results of each sequence, and its learned
            positions, are those of this sequence alone without padding, and results are 0 for padding. With False,
            other tokens attend to padding as in torchscale, whose encoder sets the embeddings of padding to zero, and
            whose decoder ignores its mask.
        constant_mixing: whether the backward treats the weights with which a position mixes its branches as constants,
            as torchscale does. True reproduces a training with torchscale, and takes one call of the attention per
            branch. False gives the exact gradient.

    Raises:
        TypeError: ``model`` contains no LongNet of torchscale, or ``attention`` is not a RingDilatedAttention.
        ValueError: a part of the encoder or decoder is not supported by a ring, or another class overrides its forward;
            or the pattern, scale or dropout_p of ``attention`` is not its own. A call raises ValueError or TypeError
            for arguments that are not supported, RingMismatchError if the ranks' inputs differ, and RuntimeError if it
            is traced or exported.
        RingMismatchError: the ranks' parameters differ. The message names some of them.
        AdapterUnavailableError: this release of torchscale has changed a part that a ring needs. The message names it.
    """
    check_type(attention)
    with attention.ring.report_refusals():
        pattern = pattern_of(model)
        parts = _parts_of(model)
        for name, part in parts.items():
            _check_forwards(part, name)
            check_options(part, name)
            check_attention(attention, pattern, part, name)
    agree_on_parameters(attention.ring, model, "model")
    for name, part in parts.items():
        if is_on_ring(part, _OnRing):
            _remove(part)
        call = f"a layer of {name} was called by itself: on a ring it computes only this rank's rows; call {name}"
        put_layers_on_ring(part, attention, f"{call}.", name, constant_mixing=constant_mixing)
        if part.embed_positions is not None:
            part.embed_positions.forward = _Positions(part.embed_positions)
        part.forward = _OnRing(part, name, ignore_padding).forward


def remove_ring(model: nn.Module) -> None:
    """Undo :func:`use_ring`: every process computes the published classes again.

    Call it before the model is exported, traced or compared with torchscale, on models that are not wrapped.

    Raises:
        TypeError, ValueError: no encoder or decoder of ``model`` is on a ring.
    """
    on_ring = [part for part in _parts_of(model).values() if is_on_ring(part, _OnRing)]
    if not on_ring:
        raise ValueError(
            f"model = {type(model).__name__}: is not on a ring; give a model that use_ring was called with."
        )
    for part in on_ring:
        _remove(part)


def _remove(part: Any) -> None:
    remove_layers_from_ring(part)
    if part.embed_positions is not None:
        del part.embed_positions.forward
    del part.forward


def _parts_of(model: nn.Module) -> dict[str, Any]:
    """The LongNet encoders and decoders of torchscale in a model, by name, such as ``model.encoder``."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    parts = {
        f"model.{path}" if path else "model": module
        for path, module in modules
        if not isinstance(module, LongNet) and {base.__name__ for base in type(module).__mro__} & {*_CLASSES}
    }
    if not parts:
        what = f"model = {type(model).__name__}: contains no LongNetEncoder or LongNetDecoder of torchscale"
        if isinstance(model, nn.Module) and any(isinstance(module, LongNet) for module in model.modules()):
            raise TypeError(f"{what}; a LongNet of ring_backends.longnet has its ring from its attention.")
        raise TypeError(f"{what}; for models of other libraries, see docs/migration.md.")
    return parts


class _OnRing:
    """Replaces the forward of a LongNetEncoder or LongNetDecoder, called here a part of a model."""

    def __init__(self, part: Any, name: str, ignore_padding: bool) -> None:
        self.part, self.name, self.ignore_padding = part, name, ignore_padding
        self.is_decoder = _is_decoder(part)
        self.tokens_name, self.mask_name = _PER_TOKEN[self.is_decoder]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_export(self.part)
        return self._forward(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ring = ring_of(self.part)
        ring.check_connected()
        with ring.report_refusals():
            rows, flags = self._arguments(args, kwargs)
            sequences = self._check(rows)
        embeddings = rows["token_embeddings"]
        arguments = rows | flags
        if embeddings is not None:
            arguments["token_embeddings"] = f"{embeddings.dtype} {[*embeddings.shape]}"
        device = next(value.device for value in rows.values() if value is not None)
        numbers = [] if embeddings is None or ring.size == 1 else _fingerprint(embeddings)
        with same_call(ring, f"a call of {self.name}", arguments, self.part, device, numbers) as of_ranks:
            self._check_fingerprints(of_ranks)
            return self._compute(ring, rows, flags, sequences)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments with an element per token, and the other supported ones.

        Raises:
            ValueError: another argument is given.
        """
        signature = inspect.signature(type(self.part).forward)
        bound = signature.bind(self.part, *args, **kwargs)
        bound.apply_defaults()
        found = {name: value for name, value in [*bound.arguments.items()][1:] if name != "kwargs"}
        per_token = (self.tokens_name, self.mask_name, "token_embeddings", "positions")
        rows = {name: found.pop(name, None) for name in per_token}
        flags = {name: bool(found.pop(name)) for name in [*found] if name in ("features_only", "return_all_hiddens")}
        for name, value in (found | bound.arguments.get("kwargs", {})).items():
            if value is not None:
                why = _NOT_SUPPORTED.get(name, "a ring does not know it")
                raise ValueError(f"{name} of {self.name} is given: not supported, since {why}; leave it out.")
        return rows, flags

    def _check(self, rows: dict[str, Any]) -> Sequences:
        """Check the arguments with an element per token, and return the batch's sequences."""
        tokens_name, mask_name = self.tokens_name, self.mask_name
        tokens, mask, embeddings, positions = rows.values()
        for name, value in rows.items():
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name} of {self.name} = {type(value).__name__}: expected a tensor.")
        whole = embeddings if tokens is None else tokens
        if whole is None:
            raise ValueError(f"{tokens_name} and token_embeddings of {self.name} are None: give one of them.")
        shape = whole.shape[:2]
        for name, value, num_dims in ((tokens_name, tokens, 2), ("token_embeddings", embeddings, 3)):
            if value is not None and (value.dim() != num_dims or value.shape[:2] != shape or 0 in shape):
                expected = f"[batch, n{', embed_dim' if num_dims == 3 else ''}]"
                raise ValueError(
                    f"{name} of {self.name} is {[*value.shape]}: expected {expected}, at least one token, and the same "
                    f"batch and n in {tokens_name} and token_embeddings."
                )
        if mask is not None and (mask.is_floating_point() or mask.shape != shape):
            raise ValueError(
                f"{mask_name} of {self.name} is {mask.dtype} {[*mask.shape]}: expected bool {[*shape]}, True = padding."
            )
        if positions is not None and (positions.dim() != 2 or positions.shape not in {(1, shape[1]), shape}):
            raise ValueError(
                f"positions of {self.name} is {[*positions.shape]}: expected [batch, n] = {[*shape]}, or [1, n]."
            )
        kept = None
        if self.ignore_padding and mask is not None:
            all_padding = f"{mask_name} of {self.name} is True at all tokens of sequence %d"
            kept = kept_columns(mask != 0, f"{all_padding}: a sequence needs at least one token. True marks padding.")
        sequences = Sequences(shape, kept)
        for length in {*sequences.lengths}:
            ring_attention = self.part.layers[0].self_attn.ring_attention
            ring_attention.pattern.check(seq_len=length, num_heads=self.part.layers[0].self_attn.num_heads)
        last = max(sequences.lengths) + 1 if positions is None else int(positions.max())
        self._check_table("embed_positions", "positions", last)
        if embeddings is None:
            self._check_table("embed_tokens", tokens_name, int(tokens.max()))
        return sequences

    def _check_table(self, name: str, argument: str, largest: int) -> None:
        """Check on every rank what only the rank with the largest row would raise an error for."""
        rows = getattr(getattr(self.part, name), "num_embeddings", None)
        if rows is not None and largest >= rows:
            raise ValueError(
                f"{argument} of {self.name} reaches {largest}: {self.name}.{name} has rows 0 … {rows - 1}; cut the "
                "sequence, or use a model with more rows."
            )

    def _compute(self, ring: Ring, rows: dict[str, Any], flags: dict[str, Any], sequences: Sequences) -> Any:
        part = self.part
        own = {
            name: None if value is None else sequences.own(ring, value.expand(len(sequences.lengths), *value.shape[1:]))
            for name, value in rows.items()
        }
        if self.is_decoder or self.ignore_padding:
            own[self.mask_name] = None
        # The class passes one element of incremental_state to each layer. Activation checkpointing keeps it.
        state: Any = [sequences.lengths] * len(part.layers)
        if own["positions"] is None:
            del own["positions"]  # a decoder has no such argument
        if self.is_decoder:
            state = {"is_first_step": True, **dict(enumerate(state))}  # all tokens are new ones
        table = None if part.embed_positions is None else part.embed_positions.forward
        try:
            if table is not None and "positions" not in own:
                numbers = [ring.positions(length) + _FIRST_POSITION for length in sequences.lengths]
                table.positions = nn.utils.rnn.pad_sequence(numbers, batch_first=True)
            found = type(part).forward(part, **own, **flags, incremental_state=state)
        finally:
            if table is not None:
                table.positions = None

        whole = partial(sequences.unshard, ring)
        if self.is_decoder:
            out, extra = found
            states = extra["inner_states"] if flags["return_all_hiddens"] else []
            return whole(out), {**extra, "inner_states": [whole(rows) for rows in states]}
        tokens, mask, embeddings, _ = rows.values()
        embedding = part.embed_tokens(tokens) if embeddings is None else embeddings
        if mask is None:
            mask = torch.zeros(embedding.shape[:2], dtype=torch.bool, device=embedding.device)
        return {
            **found,
            "encoder_out": whole(found["encoder_out"]),
            "encoder_embedding": part.embed_scale * embedding,
            "encoder_padding_mask": mask,
            "encoder_states": [whole(rows) for rows in found["encoder_states"]],
        }

    def _check_fingerprints(self, of_ranks: list[list[float]]) -> None:
        """Raise RingMismatchError if the ranks' embeddings differ by more than rounding."""
        for rank, numbers in enumerate(of_ranks):
            if any(abs(number - first) > 0.1 for number, first in zip(numbers, of_ranks[0], strict=True)):
                raise RingMismatchError(
                    f"token_embeddings of {self.name} differ between ring rank 0 and ring rank {rank}: give every rank "
                    "of a ring the same input, the same parameters, and the same seed for dropout before the encoder."
                )


_FIRST_POSITION = 2  # as in fairseq

_NUM_DIRECTIONS = 6  # with a seed, as many numbers as agree() takes


def _fingerprint(embeddings: Tensor) -> list[float]:
    """Six numbers that are about the same for embeddings that differ by rounding, and differ for any others.

    Equal kernels may round differently on two devices, so checksums would differ. These numbers are scalar products of
    the embeddings, divided by their norm, and random vectors of signs. Other embeddings change each by about 1.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        (2 * torch.randint(2, (size, _NUM_DIRECTIONS), generator=generator) - 1).to(embeddings)
        for size in (embeddings.shape[0] * embeddings.shape[1], embeddings.shape[2])
    )
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        flat = embeddings.flatten(0, 1)
        products = ((flat @ columns).to(wide) * rows).sum(0) / torch.linalg.vector_norm(flat, dtype=wide)
        return [*map(float, products.nan_to_num(0, 0, 0))]


class _Positions:
    """Replaces the forward of ``embed_positions``, which would number a rank's rows from 0."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.positions: Tensor | None = None

    def __call__(self, x: Tensor, positions: Tensor | None = None, **unused: Any) -> Any:
        if positions is None:
            assert self.positions is not None
            positions = self.positions.to(x.device)
        return type(self.module).forward(self.module, x, positions=positions)


# --- What slide encoders share: the layers of an encoder on a ring.


def put_layers_on_ring(
    encoder: Any, attention: RingDilatedAttention, when_called_alone: str, name: str = "", *, constant_mixing: bool
) -> None:
    """Replace the attention, and on a ring of several ranks the dropout, of an encoder's or decoder's layers.

    Args:
        when_called_alone: the error of a call that gives the layers no lengths of sequences.
        name: what the error messages of the ring call the layers by.
        constant_mixing: as in :func:`use_ring`.
    """
    for index, layer in enumerate(encoder.layers):
        self_attn = layer.self_attn
        of_layer = f"layer {index} of {name}" if name else f"layer {index}"
        self_attn.ring_attention = attention._copy_for(of_layer).train(self_attn.training)
        if constant_mixing:
            self_attn.ring_branches = _branches_of(self_attn.ring_attention)
        self_attn.forward = _SelfAttention(self_attn, when_called_alone)
    if attention.ring.size > 1:
        for module in encoder.modules():
            if isinstance(module, nn.Dropout):
                module.forward = _Dropout(module, self_attn.ring_attention)  # type: ignore[method-assign]
    encoder._replicate_for_data_parallel = _refuse_data_parallel


def _branches_of(attention: RingDilatedAttention) -> nn.ModuleList:
    """An attention for each branch of ``attention`` alone."""
    whole, branches = attention.pattern, []
    for index, (w, r) in enumerate(zip(whole.segment_lengths, whole.dilation_rates, strict=True)):
        branch = attention._copy_for(f"branch {index}")
        branch.pattern = replace(whole, segment_lengths=(w,), dilation_rates=(r,))
        branches.append(branch)
    return nn.ModuleList(branches)


def remove_layers_from_ring(encoder: Any) -> None:
    """Undo :func:`put_layers_on_ring`."""
    for module in encoder.modules():
        if isinstance(vars(module).get("forward"), (_SelfAttention, _Dropout)):
            del module.forward
    for layer in encoder.layers:
        del layer.self_attn.ring_attention
        if hasattr(layer.self_attn, "ring_branches"):
            del layer.self_attn.ring_branches
    del encoder._replicate_for_data_parallel


def is_on_ring(module: nn.Module, replacement: type) -> bool:
    """Whether the module's forward is that of an instance of ``replacement``."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), replacement)


def ring_of(encoder: Any) -> Ring:
    """The ring of the layers' attention, so that a ring that is assigned to it after unpickling is used everywhere."""
    return cast(Ring, encoder.layers[0].self_attn.ring_attention.ring)


def _refuse_data_parallel() -> NoReturn:
    """Replaces the method that ``nn.DataParallel`` calls to copy a module."""
    raise RuntimeError(
        "the model is on a ring, and nn.DataParallel would call it from several threads of one process: start one "
        "process per GPU with torchrun, and leave nn.DataParallel out."
    )


_NO_EXPORT = (
    "the model is on a ring: torch.jit.trace, torch.export and torch.onnx.export do not support its communication; "
    "call gigapath.remove_ring(slide_encoder) or torchscale.remove_ring(model) first, and export on one process."
)


def refuse_export(encoder: Any) -> None:
    """Raise RuntimeError if the caller is traced or exported."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _raise_export_error(encoder)


@torch.compiler.disable(reason=_NO_EXPORT)  # type: ignore[untyped-decorator]
def _raise_export_error(encoder: Any) -> NoReturn:
    with ring_of(encoder).report_refusals():
        raise RuntimeError(_NO_EXPORT)


class Sequences:
    """A batch of sequences that are distributed over a ring, each by itself.

    Args:
        shape: the shape of the whole tensors, which begins with [batch, n].
        kept: the columns of each sequence's tokens, int64; None if there is no padding.
        num_leading: how many tokens, such as a class token, come before the columns.

    Attributes:
        lengths: the number of tokens of each sequence.
    """

    def __init__(self, shape: Sequence[int], kept: list[Tensor] | None, num_leading: int = 0) -> None:
        self.num_columns, self.kept, self.num_leading = shape[1], kept, num_leading
        numbers = [shape[1]] * shape[0] if kept is None else [len(columns) for columns in kept]
        self.lengths = tuple(number + num_leading for number in numbers)

    def columns(self, device: torch.device) -> list[Tensor]:
        """The columns of each sequence's tokens, without the leading ones: int64."""
        kept = [torch.arange(self.num_columns)] * len(self.lengths) if self.kept is None else self.kept
        return [columns.to(device) for columns in kept]

    def own(self, ring: Ring, whole: Tensor) -> Tensor:
        """This rank's rows [batch, rows, …] of a whole tensor [batch, n, …], without leading tokens and padding.

        Sequences with fewer rows than others end with zeros.
        """
        if self.kept is None:
            return whole if ring.size == 1 else whole.index_select(1, self._own(ring, self.lengths[0], whole.device))
        own = [
            one.index_select(0, columns.to(whole.device)[self._own(ring, length, whole.device)])
            for one, columns, length in zip(whole, self.kept, self.lengths, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(own, batch_first=True)

    def unshard(self, ring: Ring, rows: Tensor) -> Tensor:
        """The whole tensor [batch, n, …], from each rank's rows with the leading tokens. Padding is 0."""
        if self.kept is None:
            whole: Tensor = ring.unshard(rows, seq_len=self.lengths[0])
            return whole[:, self.num_leading :]
        found = []
        for one, columns, length in zip(rows, self.columns(rows.device), self.lengths, strict=True):
            whole = ring.unshard(one[: ring.layout(length).local_len(ring.rank)], 0, seq_len=length)
            empty = whole.new_zeros(self.num_columns, *whole.shape[1:])
            found.append(empty.index_copy(0, columns, whole[self.num_leading :]))
        return torch.stack(found)

    def _own(self, ring: Ring, length: int, device: torch.device) -> Tensor:
        """The numbers of this rank's tokens in a sequence of ``length`` tokens, without the leading ones."""
        positions = ring.positions(length)
        return (positions[positions >= self.num_leading] - self.num_leading).to(device)


def kept_columns(is_padding: Tensor, all_padding: str) -> list[Tensor]:
    """The columns of each sequence that are not padding, int64, from a mask [batch, n].

    Raises:
        ValueError: a sequence has none; ``all_padding`` is the message, with ``%d`` for the sequence's number.
    """
    kept = [row.nonzero()[:, 0] for row in ~is_padding]
    for index, columns in enumerate(kept):
        if len(columns) == 0:
            raise ValueError(all_padding % index)
    return kept


class _SelfAttention:
    """Replaces the forward of a layer's dilated attention: the same projections around the ring's attention."""

    def __init__(self, module: Any, when_called_alone: str) -> None:
        self.module, self.when_called_alone = module, when_called_alone

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        is_causal: bool = False,
        is_first_step: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        module, lengths = self.module, incremental_state
        if not isinstance(lengths, tuple):
            with module.ring_attention.ring.report_refusals():
                raise ValueError(self.when_called_alone)
        assert all(value is None for value in unused.values()), unused
        heads = (module.num_heads, module.head_dim)
        q, k, v = module.q_proj(query), module.k_proj(key), module.v_proj(value)
        q, k, v = (rows.unflatten(-1, heads) for rows in (q, k, v))
        out = self._attend(q, k, v, lengths, is_causal).flatten(2)
        if module.inner_attn_ln is not None:
            out = module.inner_attn_ln(out)
        return module.out_proj(out), None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], is_causal: bool) -> Tensor:
        """Attend within each sequence of the batch, whose numbers of tokens are ``lengths``."""
        if len({*lengths}) == 1:
            return self._attend_alike(q, k, v, lengths[0], is_causal)
        outs, ring = [], self.module.ring_attention.ring
        for index, seq_len in enumerate(lengths):
            rows = slice(index, index + 1), slice(ring.layout(seq_len).local_len(ring.rank))
            outs.append(self._attend_alike(q[rows], k[rows], v[rows], seq_len, is_causal)[0])
        return nn.utils.rnn.pad_sequence(outs, batch_first=True)

    def _attend_alike(self, q: Tensor, k: Tensor, v: Tensor, seq_len: int, is_causal: bool) -> Tensor:
        options = {"seq_len": seq_len, "is_causal": is_causal}
        if not hasattr(self.module, "ring_branches"):
            return cast(Tensor, self.module.ring_attention(q, k, v, **options))
        outs, lses = zip(
            *(branch(q, k, v, return_lse=True, **options) for branch in self.module.ring_branches), strict=True
        )
        # The LSEs have no gradient. All are −∞ where no branch covers a position.
        weights = torch.stack(lses).softmax(0).nan_to_num().transpose(2, 3)[..., None]
        return (torch.stack(outs) * weights.to(q.dtype)).sum(0)


class _Dropout:
    """Replaces the forward of an ``nn.Dropout``, so that the ranks draw different numbers.

    Within a call of the encoder, torch's generators have the same state on all ranks of the ring. This class takes one
    number from them, whatever the number of rows. So they stay alike, for stochastic depth and attention dropout, and
    activation checkpointing repeats the same numbers.
    """

    def __init__(self, module: nn.Dropout, attention: RingDilatedAttention) -> None:
        self.module, self.attention = module, attention

    def __call__(self, input: Tensor) -> Tensor:
        p = self.module.p
        if not self.module.training or p == 0:
            return input
        generator = torch.Generator(input.device)
        generator.manual_seed(int(torch.randint(2**62, ())) + self.attention.ring.rank)
        is_kept = torch.empty(input.shape, dtype=torch.bool, device=input.device)
        return input * is_kept.bernoulli_(1 - p, generator=generator) * (1 / (1 - p) if p < 1 else 0)


@contextlib.contextmanager
def same_call(
    ring: Ring,
    what: str,
    arguments: dict[str, Any],
    encoder: nn.Module,
    device: torch.device,
    numbers: Sequence[float] = (),
) -> Iterator[list[list[float]]]:
    """Check that all ranks make the same call of an encoder. Within it, training draws the same numbers on all ranks.

    Args:
        arguments: what must be equal on all ranks, by name. Of tensors, checksums are compared.
        numbers: at most six.

    Yields:
        The ``numbers`` of every rank, by ring rank.
    """
    if ring.size == 1:
        yield [[*numbers]]
        return
    in_training = any(module.training for module in encoder.modules())
    before = torch.get_rng_state()
    own_seed = int(torch.randint(2**53, ())) if in_training else 0
    fields = {**describe(arguments), "training mode": in_training}
    of_ranks = agree(ring, what, fields, [own_seed, *numbers])
    seed = int(of_ranks[0][0]) + ring.data_rank
    with _seeded(seed, device, before) if in_training else contextlib.nullcontext():
        yield [of_rank[1 : 1 + len(numbers)] for of_rank in of_ranks]


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device, before: Tensor) -> Iterator[None]:
    """Seed torch's generators of the CPU and of ``device``, and restore their states at the end.

    If nothing has drawn from them, the generator of the CPU returns to its state ``before`` the seed was drawn.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        states = _generator_states(devices)
        yield
        is_unused = all(map(torch.equal, states, _generator_states(devices)))
    if is_unused:
        torch.set_rng_state(before)


def _generator_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


# --- Checks of a model and of its release.

_CLASSES = ("LongNetEncoder", "LongNetDecoder")

_FORWARDS = ("Encoder", "Decoder", *_CLASSES, "CheckpointWrapper")
_LAYER_FORWARDS = ("EncoderLayer", "DecoderLayer", *(f"{name}Layer" for name in _CLASSES), "CheckpointWrapper")
"""The classes whose forward works on a rank's rows."""

_ATTRIBUTES = {
    "": "args layers embed_tokens embed_positions embed_scale",
    "args": "segment_length dilated_ratio",
    "layers[0]": "self_attn",
    "layers[0].self_attn": "q_proj k_proj v_proj out_proj inner_attn_ln xpos num_heads head_dim dropout",
}
"""The attributes of an encoder or decoder that a ring reads."""

_ATTENTION = "query key value incremental_state key_padding_mask attn_mask rel_pos is_first_step is_causal"
"""All parameters of the forward of a layer's attention."""

_PARAMETERS = "token_embeddings return_all_hiddens incremental_state"
"""The parameters of an encoder's or decoder's forward that a ring passes, besides those with tokens and mask."""

_OPTIONS = {
    "xpos_rel_pos": "xPos counts positions within a shard",
    "multiway": "the two sets of weights split the sequence at a position",
    "moe_freq": "a mixture of experts routes the rows of a shard",
    "rel_pos_buckets": "biases of scores are not supported",
    "seq_parallel": "torchscale's own sequence parallelism would cut the rows again",
}
"""Options that must be off, and why."""

_NOT_SUPPORTED = {
    "attn_mask": "dilated attention has no masks of pairs",
    "multiway_split_position": "the two sets of weights split the sequence at a position",
    "incremental_state": (
        "a ring computes whole sequences (ring_backends.longnet.LongNetDecoder decodes token by token on a ring)"
    ),
    "encoder_out": "cross attention is not supported",
}
"""Arguments of a call that must be None, and why."""

_CHILDREN = {"q_proj", "k_proj", "v_proj", "out_proj", "inner_attn_ln", "dropout_module", "xpos"}
_CHILDREN |= {"ring_attention", "ring_branches"}
"""The modules of a layer's attention."""


def _is_decoder(part: nn.Module) -> bool:
    return any(base.__name__ == "LongNetDecoder" for base in type(part).__mro__)


_PER_TOKEN = {False: ("src_tokens", "encoder_padding_mask"), True: ("prev_output_tokens", "self_attn_padding_mask")}
"""The arguments with the tokens and the padding mask, of encoders and decoders."""


def check_type(attention: object) -> None:
    """Raise TypeError if ``attention`` is not an adapter's."""
    if not isinstance(attention, RingDilatedAttention):
        raise TypeError(f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter.")


def other_release(change: str, library: str) -> AdapterUnavailableError:
    return AdapterUnavailableError(f"{change}; use a release that docs/{library}.md lists.")


def pattern_of_part(encoder: Any, name: str, library: str) -> DilatedPattern:
    """The pattern of an encoder or decoder, which has what a ring needs, and no other modules in its attention.

    Args:
        name: the encoder's name in error messages.
        library: the package of its class.

    Raises:
        AdapterUnavailableError: the message names the attribute, parameter or module.
    """
    parameters = {
        "forward": (" ".join((*_PER_TOKEN[_is_decoder(encoder)], _PARAMETERS)), False),
        "layers[0].self_attn.forward": (_ATTENTION, True),
    }
    check_release(encoder, name, library, _ATTRIBUTES, parameters)
    for index, layer in enumerate(encoder.layers):
        for child, _ in layer.self_attn.named_children():
            if child not in _CHILDREN:
                what = f"{name}.layers[{index}].self_attn.{child}: a module that a ring does not know"
                raise other_release(what, library)
    args = encoder.args
    return DilatedPattern.torchscale([int(w) for w in args.segment_length], [int(r) for r in args.dilated_ratio])


def check_release(
    module: Any, name: str, library: str, attributes: Mapping[str, str], parameters: Mapping[str, tuple[str, bool]]
) -> None:
    """Check that a module has the attributes and parameters that a ring needs, and no parameter that it does not know.

    Args:
        attributes: names by the path of their owner in ``module``.
        parameters: the names of a method's parameters, and whether these are all, by the path of the method.

    Raises:
        AdapterUnavailableError: the message names the attribute or parameter.
    """
    for path, names in attributes.items():
        owner = _find(module, path)
        for attribute in names.split():
            if not hasattr(owner, attribute):
                place = ".".join(filter(None, (name, path, attribute)))
                raise other_release(f"{place}: this release of {library} has no such attribute", library)
    for path, (names, is_all) in parameters.items():
        owner_path, _, method_name = path.rpartition(".")
        method = getattr(type(_find(module, owner_path)), method_name)
        expected, found = {*names.split()}, {*inspect.signature(method).parameters} - {"self"}
        missing, unknown = expected - found, found - expected if is_all else set()
        if missing or unknown:
            what = f"has no parameter {min(missing)!r}" if missing else f"has a new parameter {min(unknown)!r}"
            raise other_release(f"{name}.{path} {what} in this release of {library}", library)


def _find(module: Any, path: str) -> Any:
    """The object at a path such as ``encoder.layers[0]`` in a module."""
    for name in path.split(".") if path else ():
        module = module.layers[0] if name == "layers[0]" else getattr(module, name)
    return module


def check_options(encoder: Any, name: str) -> None:
    """Check that all parts of an encoder or decoder outside of attention work row by row.

    Raises:
        ValueError: an option is not supported.
    """
    for option, why in _OPTIONS.items():
        value = getattr(encoder.args, option, False)
        if value:
            raise ValueError(
                f"{name}.args.{option} = {value}: not supported by a ring, since {why}; use a model without it."
            )
    if _is_decoder(encoder) and not getattr(encoder.args, "flash_attention", True):
        raise ValueError(
            f"{name}.args.flash_attention = False: the decoder would make a mask [n, n]; set it to True. A ring does "
            "not need flash-attn."
        )
    parts = {attribute: getattr(encoder, attribute, None) for attribute in _RELATIVE_POSITIONS}
    parts |= {f"layers[{i}].encoder_attn": getattr(x, "encoder_attn", None) for i, x in enumerate(encoder.layers)}
    if type(encoder.embed_positions).__name__ != "PositionalEmbedding":
        parts["embed_positions"] = encoder.embed_positions
    for path, part in parts.items():
        refuse_part(part, f"{name}.{path}")


_RELATIVE_POSITIONS = ("relative_position", "self_attn_relative_position", "cross_attn_relative_position")


def refuse_part(part: object, name: str) -> None:
    """Raise ValueError if a model has a part that is not supported."""
    if part is not None:
        raise ValueError(f"{name} = {type(part).__name__}: not supported by a ring; use a model without it.")


def check_attention(attention: RingDilatedAttention, pattern: DilatedPattern, encoder: Any, name: str) -> None:
    """Check that an attention computes what the encoder's or decoder's own attention does.

    Raises:
        ValueError: its pattern, scale or dropout_p is another one.
    """
    self_attn = encoder.layers[0].self_attn
    own_p = float(self_attn.dropout)
    w, r = [*pattern.segment_lengths], [*pattern.dilation_rates]
    given = f", dropout_p={own_p}" if own_p else ""
    use = f"use RingDilatedAttention({w}, {r}, offset='block', padding='zeros'{given}, ring=ring)"
    offered = {pattern, replace(pattern, padding="masked")}
    if attention.pattern not in offered:
        raise ValueError(f"attention has {attention.pattern}: not the pattern of {name}; {use}.")
    if attention.scale is not None and abs(attention.scale * self_attn.head_dim**0.5 - 1) > 1e-6:
        raise ValueError(f"attention has scale = {attention.scale}: expected 1 / sqrt(head_dim); {use}.")
    if attention.dropout_p != own_p:
        raise ValueError(f"attention has dropout_p = {attention.dropout_p}: {name} has {own_p}; {use}.")


def _check_forwards(part: Any, name: str) -> None:
    """Check that the forwards of an encoder or decoder and of its layers are torchscale's.

    Raises:
        ValueError: another class overrides one, or it was replaced.
    """
    if "forward" in vars(part) and not is_on_ring(part, _OnRing):
        raise ValueError(f"{name}.forward was replaced; call use_ring before any other function that does so.")
    if hasattr(part.layers[0].self_attn, "ring_attention") and not is_on_ring(part, _OnRing):
        raise ValueError(f"{name} is on a ring by gigapath.use_ring; call gigapath.remove_ring first.")
    for path, module in {name: part, **{f"{name}.layers[{i}]": x for i, x in enumerate(part.layers)}}.items():
        owner = next(base.__name__ for base in type(module).__mro__ if "forward" in vars(base))
        if owner not in (_FORWARDS if module is part else _LAYER_FORWARDS):
            raise ValueError(
                f"{path} is a {type(module).__name__}, and {owner} overrides the forward of torchscale: a ring cannot "
                "know whether it works row by row; move what it adds to the model that calls it."
            )
