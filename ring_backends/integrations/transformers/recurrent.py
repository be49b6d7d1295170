"""Convolutions and recurrent layers of transformers' models on a ring.

Such a layer calls functions of its module: a causal convolution, a gated delta rule, a scan of Mamba.
:class:`RecurrentLayers` puts a dispatcher in the place of each such function. It calls the function itself, unless a
layer of a model on a ring is running. Then the rows before this rank's come from the ring
(:mod:`ring_backends.integrations.transformers.recurrences`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer

from ring_backends.integrations.transformers.attention import Registration, is_probing
from ring_backends.integrations.transformers.caches import current_generation, from_last_row
from ring_backends.integrations.transformers.probe import hooks_of
from ring_backends.integrations.transformers.recurrences import (
    FUNCTIONS,
    Called,
    CalledSequence,
    RowFunction,
    check_cut,
)
from ring_backends.torch_internals import in_backward


@dataclass(eq=False)
class _RunningLayer:
    """A layer that is being called on a ring.

    Attributes:
        mask: its attention mask, [batch, rows].
        sequence: the rows that it gets; None in a probe.
        passed: what its functions pass on, in words.
        projections: query, key and value of lightning attention.
    """

    layer: Any
    mask: Tensor | None
    sequence: CalledSequence | None
    passed: list[str] = field(default_factory=list)
    projections: Any = None


_running: ContextVar[_RunningLayer | None] = ContextVar("running_layer", default=None)

_all_running: list[_RunningLayer] = []
"""The layers that are running in all threads. torch.compile can trace this list, and no ContextVar."""


def _dispatcher(function: Callable[..., Any], of_rows: RowFunction) -> Callable[..., Any]:
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return compute(args, kwargs) if _all_running else function(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = _running.get()
        if layer is None:
            return function(*args, **kwargs)
        called = Called(function, names, args, kwargs)
        layer.passed.append(of_rows.describe(called))
        if is_probing.get():
            check_cut(called, of_rows)
            return of_rows.alone(called)
        assert layer.sequence is not None
        return of_rows.on_ring(called, layer.sequence)

    dispatch.is_dispatcher = True  # type: ignore[attr-defined]
    return dispatch


_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
_FIRST_RELEASE = 5, 17
"""Earlier releases compute recurrences within the layers, or do not pass the arguments of the model on to them."""


def recurrent_layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model whose convolutions and recurrences a ring knows; none before transformers 5.17."""
    if _RELEASE < _FIRST_RELEASE:
        return []
    return [part for part in model.modules() if _functions_of(part)[1] or _is_lightning(part)]


def _functions_of(layer: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """The namespace of the module that defines a layer, and which of :data:`FUNCTIONS` the forward calls."""
    layer_class: Any = type(layer)
    return _functions_of_class(layer_class)


@functools.cache
def _functions_of_class(layer_class: Any) -> tuple[dict[str, Any], list[str]]:
    forward = _own_forward(layer_class)
    namespace, found = forward.__globals__, []
    for name in FUNCTIONS.keys() & set(forward.__code__.co_names):
        function = namespace.get(name)
        if callable(function) and FUNCTIONS[name].needs <= inspect.signature(function).parameters.keys():
            found.append(name)
    return namespace, found


def _is_lightning(layer: nn.Module) -> bool:
    """Whether a layer is the lightning attention of MiniMax, whose forward computes the recurrence itself."""
    names = _own_forward(type(layer)).__code__.co_names
    parts = ("slope_rate", "qkv_proj", "norm", "act_fn", "head_dim", "num_attention_heads", "block_size")
    return "set_linear_cache" in names and all(hasattr(layer, name) for name in parts)


def _own_forward(layer_class: Any) -> Any:
    """The forward that a class of layers defines, without decorators, some of which leave no ``__wrapped__``."""
    owner = next(base for base in layer_class.__mro__ if "forward" in vars(base))
    forward = inspect.unwrap(owner.forward)
    while forward.__globals__["__name__"] != owner.__module__:
        wrapped = [cell.cell_contents for cell in forward.__closure__ or () if inspect.isfunction(cell.cell_contents)]
        if not wrapped:
            break
        forward = inspect.unwrap(wrapped[0])
    return forward


_WITHOUT_ARGUMENTS = frozenset(
    (
        *("JambaMambaMixer", "MambaMixer", "Mamba2Mixer", "FalconMambaMixer"),
        *("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"),  # in 5.17 to 5.21
    )
)
"""Classes of layers that some models give no arguments but the attention mask."""

_ARGUMENTS_LOST = (
    "{layer} does not know which rows of a sequence it gets, since the arguments of the model do not reach it; call "
    "the model with shard_inputs(ring, …), or use_ring() or attach() it, and for activation checkpointing call "
    "model.gradient_checkpointing_enable()."
)


class RecurrentLayers:
    """The hooks of those layers of a model that pass positions or states on to later ranks.

    Attributes:
        layers: the layers.
        called: the arguments of the running call of the model, for the layers that get none of them.
        has_packed: whether such a layer has computed packed documents.
    """

    def __init__(self, model: nn.Module, registration: Registration) -> None:
        self.registration, self.ring = registration, registration.ring
        self.layers = recurrent_layers_of(model)
        self.has_packed = False
        for layer in self.layers:
            if hooks_of(layer, RecurrentLayers):
                raise ValueError(
                    f"model = {type(model).__name__}: its {type(layer).__name__} is on a ring already, in another "
                    "model; call remove_ring() on that model first."
                )
        self.called: Mapping[str, Any] = {}
        self.outer: list[_RunningLayer | None] = []
        self.sequences: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.hooks: list[RemovableHandle] = []
        for layer in self.layers:
            namespace, names = _functions_of(layer)
            for name in names:
                if not hasattr(namespace[name], "is_dispatcher"):
                    namespace[name] = _dispatcher(namespace[name], FUNCTIONS[name])
            self.hooks.append(layer.register_forward_pre_hook(self.before, with_kwargs=True))
            self.hooks.append(layer.register_forward_hook(self.after, always_call=True))
            if _is_lightning(layer):
                self.hooks.append(layer.get_submodule("qkv_proj").register_forward_hook(self.keep_projections))
                self.hooks.append(layer.get_submodule("norm").register_forward_pre_hook(self.add_response))
        for block in (part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)):
            if any(type(child).__name__ in _WITHOUT_ARGUMENTS for child in block.children()):
                self.hooks.append(block.register_forward_pre_hook(self.mark_mask, with_kwargs=True))

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Begin a call of the model. What an interrupted call has left is forgotten: torch runs no hooks then."""
        self.called = arguments
        if self.outer:
            _running.set(self.outer[0])
            _all_running[:] = [running for running in _all_running if running.layer not in self.layers]
            self.outer.clear()

    def remove(self) -> None:
        """Take the hooks off the layers."""
        for hook in self.hooks:
            hook.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentLayers:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.registration, copied.ring = self.registration, self.ring
        copied.layers, copied.hooks = copy.deepcopy(self.layers, memo), copy.deepcopy(self.hooks, memo)
        copied.called, copied.outer, copied.sequences = {}, [], WeakTensorKeyDictionary()
        copied.has_packed = self.has_packed
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with recurrent layers is on a ring, and cannot be pickled: save model.state_dict(), or call "
            "remove_ring(model) first."
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a layer."""
        self.outer.append(_running.get())
        _running.set(None)
        running = self._begin(layer, args, kwargs)
        _running.set(running)
        if running is not None:
            _all_running.append(running)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        """End a call of a layer."""
        running = _running.get()
        _running.set(self.outer.pop())
        if running is None:
            return
        _all_running.remove(running)
        if layer not in self.registration.layers:
            self.registration.layers[layer] = "; ".join(dict.fromkeys(filter(None, running.passed)))

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _RunningLayer | None:
        names = _own_forward(type(layer)).__code__.co_varnames[1:]  # without self
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        mask: Tensor | None = named.get("attention_mask")
        running = _RunningLayer(layer, mask, None)
        if is_probing.get():
            return running
        generation = current_generation.get()
        if generation is not None:
            running.sequence = None if generation.seq_len is None else CalledSequence(self.ring, generation.seq_len)
            return None if running.sequence is None else running
        with self.ring.report_refusals():
            namespace, functions = _functions_of(layer)
            for function in functions:
                if not hasattr(namespace[function], "is_dispatcher"):
                    raise ValueError(
                        f"{function} of {namespace['__name__']} was replaced after the model was put on a ring, which "
                        "would not see it; replace it before, or call remove_ring(model) and put it on the ring again."
                    )
            marked = None if mask is None else self.sequences.get(mask)
            running.sequence = CalledSequence.of_arguments(self.ring, named) or marked
            name = type(layer).__name__
            is_lost = self.ring.size > 1 or (self.has_packed and in_backward() and name in _WITHOUT_ARGUMENTS)
            if running.sequence is None and is_lost:
                raise ValueError(_ARGUMENTS_LOST.format(layer=name))
            if running.sequence is None or (self.ring.size == 1 and running.sequence.row_numbers is None):
                return None
            if running.sequence.row_numbers is not None and _is_lightning(layer):
                raise ValueError(
                    f"document_ids are given: {name} does not keep packed documents apart; give one per batch entry."
                )
            self._check_mask(name, named["hidden_states"], mask, named)
        return running

    def _check_mask(self, name: str, rows: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]) -> None:
        if arguments.get("has_padding") and mask is None and rows.shape[1] == 1:
            raise ValueError(
                f"{name} gets one row on this rank, and transformers masks no padding in one row; pad the sequence to "
                f"at least {2 * self.ring.size} tokens."
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mark_mask(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a block a mask by which its layer finds the sequence, also when the block is computed again."""
        arguments = kwargs if "seq_len" in kwargs or in_backward() else self.called
        sequence = CalledSequence.of_arguments(self.ring, arguments)
        if sequence is None or is_probing.get() or current_generation.get() is not None:
            return None
        rows = args[0] if args else kwargs["hidden_states"]
        mask = kwargs.get("attention_mask")
        with self.ring.report_refusals():
            self._check_mask(type(block).__name__, rows, mask, arguments)
        mask = rows.new_ones(rows.shape[:2], dtype=torch.bool) if mask is None else mask.view_as(mask)
        self.sequences[mask] = sequence
        self.has_packed |= sequence.row_numbers is not None
        return args, {**kwargs, "attention_mask": mask}

    # Lightning attention (MiniMax): S -> exp(-slope) S + k v^T.

    def keep_projections(self, module: nn.Module, args: Any, output: Tensor) -> None:
        running = _running.get()
        if running is not None:
            running.projections = output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_response(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Add what the results of lightning attention owe to the state that enters."""
        running = _running.get()
        if running is None:
            return None
        (out,) = args
        return (_lightning(running, out.unflatten(-1, (running.layer.num_attention_heads, -1))).flatten(2),)


def _lightning(running: _RunningLayer, out: Tensor) -> Tensor:
    """The results of lightning attention, from those of this rank's rows alone: [batch, rows, heads, head_dim]."""
    layer: Any = running.layer
    projected = layer.act_fn(running.projections)
    if running.mask is not None:
        projected = projected * running.mask[:, :, None]
    query, key, value = projected.unflatten(-1, (layer.num_attention_heads, -1)).float().chunk(3, -1)
    slopes: Tensor = layer.slope_rate.float().flatten()
    running.passed.append(
        f"lightning attention (passes on {len(slopes)} × {layer.head_dim} × {layer.head_dim} numbers)"
    )

    def decays(numbers: Tensor) -> Tensor:
        """[rows, heads, 1]"""
        found: Tensor = (-numbers[:, None] * slopes).exp().unsqueeze(-1)
        return found

    if running.sequence is None:  # in a probe
        numbers = torch.arange(out.shape[1], device=out.device)
        distances = (numbers[:, None] - numbers).clamp(min=0)
        weights = (-distances[..., None] * slopes).exp() * (numbers[:, None] >= numbers)[..., None]
        expected = torch.einsum("blhd,bmhd,lmh,bmhe->blhe", query, key, weights, value)
        if bool(((expected - out).abs() > 5e-2 * out.abs().max()).any()):
            raise ValueError(
                f"{type(layer).__name__} of this release of transformers computes another recurrence than the "
                "lightning attention that a ring knows; use a model without it."
            )
        alone: Tensor = query * key * value
        return alone.to(out.dtype)
    sequence, ring = running.sequence, running.sequence.ring
    maps = []
    for piece in sequence.pieces:
        rows = slice(piece.start, piece.stop)
        numbers = torch.arange(len(piece), device=out.device)
        state = torch.einsum("blhd,blhe->bhde", key[:, rows] * decays(len(piece) - 1 - numbers), value[:, rows])
        maps.append((decays(numbers.new_full((1,), len(piece))).unsqueeze(-1), state))
    entered = sequence.entering_states(maps)
    known = torch.zeros_like(maps[0][1])  # the state with which the layer itself has begun the piece
    outs = []
    for piece, missing, (decay, state) in zip(sequence.pieces, entered, maps, strict=True):
        rows = slice(piece.start, piece.stop)
        reads = query[:, rows] * decays(torch.arange(1, len(piece) + 1, device=out.device))
        outs.append(out[:, rows] + torch.einsum("blhd,bhde->blhe", reads, missing - known).to(out.dtype))
        known = decay * known + state
    generation = current_generation.get()
    if generation is not None:
        last_decay, last_state = maps[-1]
        last_state = last_decay * entered[-1] + last_state
        generation.linear_states[layer.layer_idx] = from_last_row(ring, sequence.seq_len, last_state)
    return torch.cat(outs, 1)
