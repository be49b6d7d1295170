"""A user's function of scores, evaluated for blocks of pairs: the ``score_mod`` of ``flex_attention`` of torch.

The function gets the score of one pair, the index in the batch, the query head, and the global positions of query and
key, each as a tensor without dimensions. :func:`torch.vmap` evaluates it for a block of pairs at once.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ring_backends.kernels.constants import constant
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.torch_internals import has_values, in_dispatch_mode, version_of, without_dispatch_modes

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, q_idx, kv_idx) -> score."""


@dataclass(frozen=True)
class PairScores:
    """A score_mod, and the pairs of a tile.

    Attributes:
        function: the score_mod.
        batch: int64 [B], the index in the batch of each entry of the tile.
        heads: int64 [Hq], the query heads.
        query_positions: int64 [B or 1, Hq or 1, Sq], global positions.
        key_positions: int64 [B or 1, Hq or 1, Sk].
    """

    function: ScoreMod
    batch: Tensor
    heads: Tensor
    query_positions: Tensor
    key_positions: Tensor

    @classmethod
    def of_rows(cls, function: ScoreMod, queries: Tensor, keys: Tensor, batch: int, num_heads: int) -> PairScores:
        """The pairs of all heads. ``queries`` and ``keys`` are int64 [rows], their global positions."""
        entries, heads = (torch.arange(size, device=queries.device) for size in (batch, num_heads))
        return cls(function, entries, heads, queries[None, None], keys[None, None])

    def part(self, rows: slice, keys: slice) -> PairScores:
        """Some query rows and keys of the tile."""
        positions = self.query_positions[:, :, rows], self.key_positions[:, :, keys]
        return replace(self, query_positions=positions[0], key_positions=positions[1])

    def reversed(self) -> PairScores:
        """The query rows and keys in reverse order."""
        positions = self.query_positions.flip(2), self.key_positions.flip(2)
        return replace(self, query_positions=positions[0], key_positions=positions[1])

    def modified(self, scores: Tensor) -> Tensor:
        """The modified scores, in the shape and dtype of ``scores`` [B, Hq, Sq, Sk].

        The function may change ``scores``, if they need no gradient.
        """
        if not scores.numel():  # torch.vmap needs a pair
            return scores
        # Within another function, the score could be in use elsewhere, so the variant is not the function itself.
        variants = _variants_of(self.function)
        own = self.function if variants is None or torch.is_grad_enabled() else variants.in_place
        (found,) = self._evaluate(lambda *pair: (own(*pair),), scores)
        return found

    def _evaluate(self, function: Callable[..., tuple[Tensor, ...]], scores: Tensor) -> tuple[Tensor, ...]:
        """The results of a function of one pair, for all pairs."""
        # The function gets copies, so that it may change them in place.
        batch, heads = self.batch.clone(), self.heads.clone()
        queries, query_dims = _without_ones(self.query_positions.clone())
        keys, key_dims = _without_ones(self.key_positions.clone())

        def of_pair(*pair: Tensor) -> tuple[Tensor, ...]:
            with IndexByTensors():
                return function(*pair)

        of_keys = torch.vmap(of_pair, (0, None, None, None, 0))
        of_queries = torch.vmap(of_keys, (0, None, None, 0, None))
        of_heads = torch.vmap(of_queries, (0, None, 0, query_dims[1], key_dims[1]))
        if len(batch) == 1:
            found = tuple(x.unsqueeze(0) for x in of_heads(scores.squeeze(0), batch[0], heads, queries, keys))
        else:
            of_batch = torch.vmap(of_heads, (0, 0, None, query_dims[0], key_dims[0]))
            found = of_batch(scores, batch, heads, queries, keys)
        return tuple(x.to(scores.dtype) for x in found)

    def modified_with_gradient(self, scores: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The modified scores, and a function from their gradient to that of ``scores``.

        The function may change ``scores``.
        """
        variants = _variants_of(self.function)
        if variants is not None:
            with torch.no_grad():
                modified, slope = self._evaluate(variants.with_slope, scores)
            return modified, slope.mul_
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            modified = self.modified(scores)
        # The edges of the graph, and not the tensors at them, which would stay in memory.
        edges = [get_gradient_edge(x) for x in (modified, scores) if x.requires_grad]

        def gradient(of_modified: Tensor) -> Tensor:
            if len(edges) < 2:  # the function does not depend on the score
                return torch.zeros_like(of_modified)
            (found,) = torch.autograd.grad(edges[:1], edges[1:], of_modified)
            return found

        return modified.detach(), gradient


def with_variants(function: ScoreMod, in_place: ScoreMod, with_slope: Callable[..., tuple[Tensor, Tensor]]) -> ScoreMod:
    """The function, with faster variants for blocks of scores, which change the score in place.

    Args:
        in_place: the same function.
        with_slope: the result, and its derivative with respect to the score.
    """
    function.variants = _Variants(function, in_place, with_slope)  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class _Variants:
    of: ScoreMod
    in_place: ScoreMod
    with_slope: Callable[..., tuple[Tensor, Tensor]]


def _variants_of(function: ScoreMod) -> _Variants | None:
    found: _Variants | None = getattr(function, "variants", None)
    # functools.wraps copies the attributes of a function to another one.
    return found if found is not None and found.of is function else None


def _without_ones(positions: Tensor) -> tuple[Tensor, Sequence[int | None]]:
    """The positions without dimensions of size 1 for batch and heads, and over which of these two vmap maps."""
    sizes = positions.shape[:2]
    shape = *(size for size in sizes if size != 1), positions.shape[2]
    return positions.reshape(shape), [None if size == 1 else 0 for size in sizes]


class IndexByTensors(TorchFunctionMode):
    """Within it, an index that is a tensor without dimensions stays a tensor. torch would read its number."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(_is_scalar(part) for part in parts) and all(_is_scalar(part) or type(part) is int for part in parts):
                return tensor[tuple(part[None] if _is_scalar(part) else part for part in parts)].squeeze(0)
        return func(*args, **(kwargs or {}))


def _is_scalar(index: object) -> bool:
    return isinstance(index, Tensor) and not index.dim()


class _InvalidResultError(Exception):
    """What is wrong with the result of a score_mod."""


_MAX_PASSED = 256

_passed: set[object] = set()
"""What has been checked: the code of a function, what it reads, and the sizes of the call."""


def check_score_mod(function: object, query: Tensor, seq_len: int, *, needs_gradients: bool) -> None:
    """Check that ``function`` is a score_mod, by calls for the first and last entry, head, query and key.

    Args:
        query: [batch, seq, heads, head_dim], on this rank.
        seq_len: length of the global sequence.
        needs_gradients: whether a backward may follow.

    Raises:
        TypeError: it is not callable.
        ValueError: it fails, does not return a floating-point tensor without dimensions, or reads a tensor that
            requires a gradient.
    """
    if not callable(function):
        raise TypeError(f"score_mod = {function!r}: expected a function (score, batch, head, q_idx, kv_idx), or None.")
    name, sizes = _name(function), (query.shape[0], query.shape[2], query.dtype, query.device)
    checked = identity(function), kinds_of(read_values(function)), sizes, seq_len, needs_gradients
    if checked in _passed:
        return
    # A policy of activation checkpointing sees the operators of the call alone, which a recomputation repeats.
    modes = without_dispatch_modes() if in_dispatch_mode() and has_values(query) else contextlib.nullcontext()
    with modes:
        _check_by_calls(function, name, query, seq_len, needs_gradients)
    if has_values(query):
        if len(_passed) >= _MAX_PASSED:
            _passed.clear()
        _passed.add(checked)


def _check_by_calls(function: ScoreMod, name: str, query: Tensor, seq_len: int, needs_gradients: bool) -> None:
    def call(*pair: Tensor) -> Any:
        found = function(*pair)
        _check_result(found)
        return found

    batch, heads, rows = (
        constant(tuple(sorted({0, size - 1})), query) for size in (query.shape[0], query.shape[2], seq_len)
    )
    pairs = PairScores(call, batch, heads, rows[None, None], rows[None, None])
    scores = query.new_zeros(*map(len, (batch, heads, rows, rows)), dtype=statistics_dtype(query.dtype))
    try:
        # With hooks of its own, a backward here does not unpack what those of activation checkpointing have packed.
        own_hooks = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with without_autocast(query.device), torch.enable_grad(), own_hooks:
            reads_learned = pairs.modified(scores.clone()).requires_grad
            if needs_gradients and not reads_learned:
                _, gradient = pairs.modified_with_gradient(scores)
                gradient(scores)
    except _InvalidResultError as error:
        raise ValueError(f"score_mod = {name}: returned {error}") from None
    except Exception as error:
        raise ValueError(
            f"score_mod = {name}: failed with {type(error).__name__}: {str(error).rstrip('.')}. It is called as "
            f"score_mod(score, batch, head, q_idx, kv_idx), under torch.vmap, with tensors without dimensions on "
            f"{query.device}; what it captures must be on this device and cover the whole sequence of {seq_len}, and "
            "torch.where takes the place of `if`."
        ) from error
    if reads_learned:
        tensors = [key for key, x in _captured(function).items() if isinstance(x, Tensor) and x.requires_grad]
        raise ValueError(
            f"score_mod = {name}: reads {' and '.join(tensors) or 'a tensor'} with requires_grad=True; this "
            "gradient is not computed: pass detach() of it."
        )


def _check_result(found: object) -> None:
    if not isinstance(found, Tensor):
        raise _InvalidResultError(f"{found!r}; it must return the score as a tensor.")
    if found.dim():
        raise _InvalidResultError(
            f"shape {[*found.shape]} for one pair; it gets tensors without dimensions and must return one: index "
            "captured tensors by batch, head, q_idx or kv_idx."
        )
    if not found.is_floating_point():
        raise _InvalidResultError(
            f"{found.dtype}; it must return a floating-point score: for a mask, return "
            'torch.where(mask, score, -float("inf")).'
        )


def _captured(function: Any) -> dict[str, object]:
    """What a function reads besides its arguments, by name."""
    if isinstance(function, partial):
        arguments = {f"argument {index}": x for index, x in enumerate(function.args)}
        return {**_captured(function.func), **arguments, **function.keywords}
    owner, own = _owner_and_code(function)
    found: dict[str, object] = {}
    if owner is not None:
        names = _names_of(type(owner), own)
        found |= {name: x for name, x in getattr(owner, "__dict__", {}).items() if isinstance(x, Tensor)}
        found |= _attributes_of(owner, names)
    if isinstance(owner, nn.Module):
        inside = *owner.named_parameters(), *owner.named_buffers(), *owner.named_children()
        found |= {name: x for name, x in inside if name.partition(".")[0] in names}
    if own is not None:
        known = own.__globals__
        found |= {name: known[name] for name in _globals_of(own.__code__) if name in known}
        found |= _defaults_of(own) | closure_of(own)
    return found


def _owner_and_code(function: Any) -> tuple[Any, FunctionType | None]:
    """The object whose attributes a function may read, None for a plain function, and the function that runs."""
    owner: Any
    own: Any
    if inspect.ismethod(function):
        owner, own = function.__self__, function.__func__
    elif inspect.isfunction(function):
        owner, own = None, function
    else:
        name = "forward" if isinstance(function, nn.Module) else "__call__"
        owner, own = function, getattr(type(function), name, None)
    return owner, own if inspect.isfunction(own) else None


def _names_of(owner: type, function: Any) -> set[str]:
    """The names of attributes in a function's code, and in that of the methods of ``owner`` that it names."""
    names: set[str] = set()
    waiting: list[Any] = [function]
    for own in waiting:  # the list grows
        new = {*_names_in(own.__code__)} - names if inspect.isfunction(own) else set()
        names |= new
        found = (inspect.getattr_static(owner, name, None) for name in sorted(new))
        waiting += [x.fget if isinstance(x, property) else x for x in found]
    return names


def _attributes_of(owner: object, names: Collection[str]) -> dict[str, object]:
    """The attributes of an object and of its class with these names, without a call of a property."""
    found = {}
    for name in sorted(names):
        value = inspect.getattr_static(owner, name, _ABSENT)
        if isinstance(value, MemberDescriptorType):  # a slot
            value = getattr(owner, name, _ABSENT)
        if value is not _ABSENT:
            found[name] = value
    return found


_ABSENT = object()


@lru_cache(maxsize=256)
def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (_names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    return *code.co_names, *itertools.chain.from_iterable(inner)


@lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of the global variables in a function's code."""
    own = [x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"]
    inner = (_globals_of(x) for x in code.co_consts if isinstance(x, CodeType))
    return *own, *itertools.chain.from_iterable(inner)


def _defaults_of(function: FunctionType) -> dict[str, object]:
    """The default values of a function's arguments."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def read_values(function: ScoreMod) -> dict[str, tuple[object, int]]:
    """The tensors, numbers and texts that a score_mod reads besides its arguments, each with the version of a tensor.

    Members of an Enum and None count as numbers. All are found in closures, globals, defaults, arguments of
    functools.partial, attributes, lists, sets and dictionaries, and in the functions that it calls, but not in those of
    torch.
    """
    return dict(_read_by(function, 4))


def kinds_of(reads: Mapping[str, tuple[object, int]]) -> tuple[object, ...]:
    """What :func:`read_values` has found, with the kinds of tensors in place of their values."""
    return tuple(
        (name, x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else (name, type(x), x)
        for name, (x, _) in reads.items()
    )


def reads_values_alone(function: ScoreMod) -> bool:
    """Whether a plain function reads nothing but tensors, numbers, texts, and what Python, torch and math define."""

    def is_known(x: object) -> bool:
        is_defined = isinstance(x, (ModuleType, type)) or inspect.isroutine(x)
        is_value = x is None or isinstance(x, (Tensor, Number, str, Enum))
        return is_value or (is_defined and _package_of(x) in ("builtins", "torch", "math"))

    return inspect.isfunction(function) and all(map(is_known, _captured(function).values()))


def _read_by(function: Any, depth: int) -> Iterator[tuple[str, tuple[object, int]]]:
    for name, value in _captured(function).items():
        yield from _read_in(name, value, function, depth)


def _read_in(name: str, value: Any, reader: Any, depth: int) -> Iterator[tuple[str, tuple[object, int]]]:
    if isinstance(value, Tensor):
        yield name, (value, version_of(value))
    elif value is None or isinstance(value, (Number, str, Enum)):
        yield name, (value, 0)
    elif not depth or (_package_of(value) == "torch" and not isinstance(value, nn.Module)):
        return
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        for key, item in items.items() if isinstance(items, dict) else enumerate(items):
            yield from _read_in(f"{name}[{key!r}]", item, reader, depth - 1)
    else:  # a function, an object or a module, of which the function reads some attributes
        if callable(value) and not isinstance(value, type):
            for inner, read in _read_by(value, depth - 1):
                yield f"{inner} of {name}", read
        own = _owner_and_code(reader)[1]
        for key, attribute in _attributes_of(value, _names_in(own.__code__) if own else ()).items():
            yield from _read_in(f"{name}.{key}", attribute, reader, depth - 1)


def _package_of(value: object) -> str:
    """The package that defines a function, the class of an object, or a module."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]  # functions of C may have None


def captured_values(function: ScoreMod) -> str:
    """What :func:`read_values` finds, without the values of tensors, as a text that is the same on all ranks."""
    if isinstance(function, TranslatedScoreMod):
        function = function.function
    texts = []
    for name, (value, _) in sorted(read_values(function).items()):
        if isinstance(value, Tensor):
            texts.append(f"{name} is {value.dtype} {[*value.shape]}")
        elif not (isinstance(value, str) and _names_device(value)):
            texts.append(f"{name} = {value!r}")
    text = ", ".join(texts)
    return text if len(text) <= 400 else f"{text[:400]}… #{zlib.crc32(text.encode()):08x}"


@lru_cache(maxsize=256)
def _names_device(text: str) -> bool:
    """Whether a text names a device, which may differ between ranks."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def check_unchanged(function: ScoreMod, before: Mapping[str, tuple[object, int]]) -> None:
    """Check in a backward, which calls the function again, that it reads what it read in the forward.

    Raises:
        RuntimeError: it does not.
    """
    now = read_values(function)
    for name in {**before, **now}:
        old, old_version = before.get(name, (None, -1))
        value, version = now.get(name, (None, -2))
        is_same = value is old or (not isinstance(value, Tensor) and type(value) is type(old) and value == old)
        if not (is_same and version == old_version):
            raise RuntimeError(
                f"score_mod = {_name(function)}: {name} has changed since the forward, and the backward calls the "
                "function again. Make a new function with new tensors for each call, such as a functools.partial."
            )


def closure_of(function: Any) -> dict[str, Any]:
    """The variables of a function's closure that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


@dataclass(frozen=True)
class TranslatedScoreMod:
    """A score_mod with its translation for one call.

    Attributes:
        function: the score_mod.
        translation: a :class:`~ring_backends.kernels.triton_score_mod.Translation`.
    """

    function: ScoreMod
    translation: Any

    def __call__(self, *pair: Tensor) -> Tensor:
        return self.function(*pair)


def identity(function: object) -> str:
    """The name of a function, and a hash of its code and of the functions of its closure.

    It is the same on ranks that run the same program.
    """
    if isinstance(function, TranslatedScoreMod):
        function = function.function
    return f"{_name(function)} #{zlib.crc32(''.join(_codes(function)).encode()):08x}"


def _name(function: Any) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _codes(function: Any, depth: int = 4) -> Iterator[str]:
    """The code of a function, and of the functions that it holds, in up to ``depth`` levels."""
    if isinstance(function, partial):
        held = (function.func, *function.args, *function.keywords.values())
    else:
        inner = getattr(function, "__func__", function)
        if not hasattr(inner, "__code__"):
            inner = getattr(type(inner), "forward" if isinstance(inner, nn.Module) else "__call__", None)
        code = getattr(inner, "__code__", None)
        yield _name(function) if code is None else _text(code)
        held = tuple(closure_of(inner).values()) if inspect.isfunction(inner) and depth else ()
    for other in held:
        if callable(other) and depth:
            yield from _codes(other, depth - 1)


@lru_cache(maxsize=256)
def _text(code: CodeType) -> str:
    """What a code object computes, without where its file lies."""
    return repr((code.co_code, code.co_names, [_constant_text(x) for x in code.co_consts]))


def _constant_text(value: object) -> str:
    """The same text in every process. The order of a frozenset differs from process to process."""
    if isinstance(value, CodeType):
        return _text(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant_text(x) for x in value]
        return f"({', '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    return repr(value)
