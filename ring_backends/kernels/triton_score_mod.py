"""Translates a score_mod into Triton, so that the Triton kernels can call it for a block of pairs.

The function is called once, with tensors that have no values, and a dispatch mode writes down which operators of torch
it applies to them. Each operator becomes a line of Triton, and a line for the derivative with respect to the score
(forward-mode differentiation). What the function computes from captured tensors alone, torch computes. What it reads
from them at an index in the batch, a head or a position becomes a load. In the translation, floating-point numbers are
fp32, and integers int64. A function that applies another operator, or that branches on a value, is not translated.

This module itself does not import Triton.
"""

from __future__ import annotations

import importlib
import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ring_backends.kernels.score_mod import (
    IndexByTensors,
    ScoreMod,
    identity,
    kinds_of,
    read_values,
    reads_values_alone,
)
from ring_backends.torch_internals import without_dispatch_modes


class UntranslatableError(Exception):
    """Why a score_mod has no translation."""


@dataclass(frozen=True)
class Translation:
    """A score_mod in Triton.

    Attributes:
        source: a function of a block of scores, the index in the batch, the head, positions that broadcast to the
            scores, which rows, keys and pairs exist, and what is captured: tensors and numbers. It returns the modified
            scores and their derivatives.
        tensors: the tensors that it loads from.
        numbers: their sizes and strides where they are indexed, and captured numbers. The source holds none of them, so
            that a longer sequence has the same source.
    """

    source: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]

    @property
    def function(self) -> Any:
        """The function for kernels."""
        return _compiled(self.source)


@lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    triton = importlib.import_module("triton")
    name = f"<score_mod {crc32(source.encode()):08x}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads the source there
    namespace = {"__name__": __name__, "tl": importlib.import_module("triton.language")}
    exec(compile(source, name, "exec"), namespace)
    return triton.jit(namespace["score_mod"])


_MAX_KEPT = 256

_kept: dict[object, tuple[str, tuple[str, ...], tuple[float, ...]]] = {}
"""The source of translations, the names of the tensors that they load from, and their numbers."""


def translate(function: ScoreMod) -> Translation:
    """Translate a score_mod.

    The translation of a plain function is kept, and used again for functions with the same code that capture equal
    numbers and other tensors of the same kinds, if it only loads from the tensors that the function captures.

    Raises:
        UntranslatableError: it applies an operator that has no translation, or branches on a value.
    """
    reads, key = read_values(function), None
    if reads_values_alone(function):
        key = identity(function), kinds_of(reads), torch.get_default_dtype(), torch.get_default_device()
        if key in _kept:
            source, loaded, numbers = _kept[key]
            return Translation(source, tuple(_tensor(reads[name]) for name in loaded), numbers)
    with torch.inference_mode(False):  # in which operators would not be decomposed
        found = _translated(function)
    tensors = {name: x for name, (x, _) in reads.items() if isinstance(x, Tensor)}
    names = tuple(name for tensor in found.tensors for name, x in tensors.items() if x is tensor)
    if key is not None and len(names) == len(found.tensors) == len(tensors):
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = found.source, names, found.numbers
    return found


def _tensor(read: tuple[object, int]) -> Tensor:
    tensor, _ = read
    assert isinstance(tensor, Tensor)
    return tensor


def _translated(function: ScoreMod) -> Translation:
    score = torch.empty((), dtype=torch.float32, device="meta")
    places = [torch.empty((), dtype=torch.int64, device="meta") for _ in range(4)]
    tracer = _Tracer()
    tracer.values[id(score)] = score, _Value("score", float, _PAIR, "1.0")
    for tensor, name in zip(places, ("batch", "head", "query", "key"), strict=True):
        tracer.values[id(tensor)] = tensor, _Value(name, int, _PAIR & {name})
    try:
        with without_dispatch_modes(), torch.enable_grad(), tracer, IndexByTensors():
            found = function(score, *places)
        result = tracer.value(found)
    except UntranslatableError:
        raise
    except Exception as error:  # for example of `if score > 0`, since the score has no value
        raise UntranslatableError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    # A sum with zeros has the shape of the scores.
    texts = f"{result.to(float)} + zeros, {result.slope or 0.0} + zeros"
    arguments = "score, batch, head, query, key, is_row, is_key, seen, captured"
    lines = [f"def score_mod({arguments}):", "zeros = tl.zeros(score.shape, tl.float32)", *tracer.lines]
    source = "\n    ".join([*lines, f"return {texts}"]) + "\n"
    return Translation(source, tuple(tracer.tensors), tuple(tracer.numbers))


_PAIR = frozenset({"query", "key"})
_MASKS = {_PAIR: "seen", frozenset({"query"}): "is_row", frozenset({"key"}): "is_key"}
_TYPES = {float: "tl.float32", int: "tl.int64"}


@dataclass(frozen=True)
class _Value:
    """A value in Triton.

    Attributes:
        text: its name, or a number.
        kind: float, int or bool.
        dims: what it depends on, of ``"query"`` and ``"key"``.
        slope: its derivative with respect to the score, a name or a number; None for 0.
    """

    text: str
    kind: type
    dims: frozenset[str] = frozenset()
    slope: str | None = None

    def to(self, kind: type) -> str:
        """The value as another kind."""
        if self.kind is kind:
            return self.text
        if self.text.lstrip("-").isdigit():
            return repr(kind(int(self.text)))
        return f"({self.text} != 0)" if kind is bool else f"{self.text}.to({_TYPES[kind]})"


class _Tracer(TorchDispatchMode):
    """Writes down what is computed from tensors that have values in Triton.

    Attributes:
        values: these tensors and their values, by the identity of the tensor.
        lines: of Triton.
        tensors, numbers: what the lines load from, and read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[int, tuple[Tensor, _Value]] = {}
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self._aliased: set[int] = set()  # the identities of tensors that share memory with others

    def value(self, x: Any) -> _Value:
        """The value of an argument: of a tensor with a value, a number, or a captured tensor of one element."""
        if not isinstance(x, Tensor):
            return _number(x)
        if id(x) in self.values:
            return self.values[id(x)][1]
        if x.device.type == "meta":
            raise UntranslatableError("it makes or copies a tensor on the device of the score")
        if x.numel() != 1:
            raise UntranslatableError(f"it computes with a captured tensor of shape {[*x.shape]}")
        if x.device.type != "cpu":
            return self._loaded(x, "0", frozenset())
        kind = float if x.is_floating_point() else int
        return _Value(self._line(f"tl.zeros([1, 1], {_TYPES[kind]}) + {self._read(kind(x.item()))}"), kind)

    def _read(self, number: float) -> str:
        """The text of a number that may change from call to call."""
        self.numbers.append(number)
        return f"captured[1][{len(self.numbers) - 1}]"

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if not any(id(x) in self.values for x in tree_leaves((args, kwargs))):
            result = func(*args, **kwargs)
            if name == "scalar_tensor":  # a number beside the score, without a value of its own
                self.values[id(result)] = result, _number(args[0])
            return result
        result = func(*tree_map(_on_meta, tuple(args)), **kwargs)  # nothing but shape and dtype
        if not isinstance(result, Tensor) or result.numel() != 1 or "out" in kwargs:
            raise UntranslatableError(f"torch.ops.aten.{name} does not return one number")
        if func._schema.is_mutable:
            name, result = name.rstrip("_"), args[0]
            if id(result) in self._aliased:
                raise UntranslatableError("it changes a tensor in place that shares memory with another one")
        elif name in _VIEWS:
            self._aliased |= {id(args[0]), id(result)}
        kind = _kind(result.dtype)
        if kind is int and result.dtype != torch.int64 and name not in ("index", "clone", *_VIEWS):
            raise UntranslatableError(f"it computes in {result.dtype}, and not in int64")
        if kind is bool and name not in _OF_BOOL:
            raise UntranslatableError(f"torch.ops.aten.{name} returns a bool")
        value = self._applied(name, kind, args, kwargs)
        if value.slope is not None and (name == "detach" or not torch.is_grad_enabled()):
            value = replace(value, slope=None)
        self.values[id(result)] = result, value
        return result

    def _applied(self, name: str, kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Value:
        """The value of an operator, of a given kind."""
        if name == "index":
            return self._index(*args)
        if name in _CONSTANTS:
            # A block, since Triton takes the exponential of no number, for example.
            number = _number((int if kind is bool else kind)(args[1] if name == "full_like" else _CONSTANTS[name]))
            value = _Value(self._line(f"tl.full([1, 1], {number.text}, {_TYPES[number.kind]})"), number.kind)
            return self._converted(value, kind)
        if name in _SAME:
            return self._converted(self.value(args[0]), kind)
        rule, values = _rule(name, kind, args, kwargs), [self.value(x) for x in args if x is not None]
        wanted = kind if rule.of is None else rule.of
        if wanted is _NUMBER:
            wanted = float if any(x.kind is float for x in values) else int
        texts = [x.to(bool if number == rule.condition else wanted) for number, x in enumerate(values)]
        names = dict(zip("abc", texts, strict=False))
        y = self._line(rule.text.format(**names))
        terms = []
        for x, partial in zip(values, (*rule.partials, *[""] * len(values)), strict=False):
            if kind is float and x.slope is not None and partial != "0":
                if not partial:
                    raise UntranslatableError(f"the derivative of torch.ops.aten.{name} has no translation")
                factor = partial.format(y=y, **names)
                terms.append(x.slope if factor == "1.0" else factor if x.slope == "1.0" else f"{x.slope} * ({factor})")
        slope = None if not terms else terms[0] if terms == ["1.0"] else self._line(" + ".join(terms))
        return _Value(y, kind, frozenset[str]().union(*(x.dims for x in values)), slope)

    def _converted(self, x: _Value, kind: type) -> _Value:
        """The same value as another kind."""
        if x.kind is kind:
            return x
        return _Value(self._line(x.to(kind)), kind, x.dims, x.slope if kind is float else None)

    def _index(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> _Value:
        """An element of a captured tensor."""
        if id(tensor) in self.values or len(indices) != tensor.dim() or any(index is None for index in indices):
            raise UntranslatableError("it indexes something else than one element of a captured tensor")
        if tensor.device.type == "meta":
            raise UntranslatableError("it makes or copies a tensor on the device of the score")
        parts, dims = ["0"], frozenset[str]()
        for index, size, stride in zip(map(self.value, indices), tensor.shape, tensor.stride(), strict=True):
            if index.kind is not int:
                raise UntranslatableError("it indexes by a mask")
            place = self._line(f"{index.text} + tl.zeros([1, 1], tl.int64)")
            parts.append(f"tl.where({place} < 0, {place} + {self._read(size)}, {place}) * {self._read(stride)}")
            dims |= index.dims
        return self._loaded(tensor, " + ".join(parts), dims)

    def _loaded(self, tensor: Tensor, offset: str, dims: frozenset[str]) -> _Value:
        number = next((i for i, x in enumerate(self.tensors) if x is tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        kind = _kind(tensor.dtype)
        mask = f", mask={_MASKS[dims]}, other=0" if dims else ""
        converted = " != 0" if kind is bool else f".to({_TYPES[kind]})"
        return _Value(self._line(f"tl.load(captured[0][{number}] + ({offset}){mask}){converted}"), kind, dims)

    def _line(self, text: str) -> str:
        """Write a line for an expression, and return the name of its value."""
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


def _on_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and x.device.type != "meta" else x


def _kind(dtype: torch.dtype) -> type:
    if dtype.is_complex:
        raise UntranslatableError("it computes with complex numbers")
    return bool if dtype == torch.bool else float if dtype.is_floating_point else int


def _number(x: Any) -> _Value:
    if isinstance(x, (bool, int)):
        return _Value(repr(int(x)), int)
    if isinstance(x, float):
        return _Value(repr(x) if math.isfinite(x) else f'float("{x}")', float)
    raise UntranslatableError(f"it applies an operator to {x!r}")


_NUMBER = object
"""Stands for float if an argument is a float, else int."""


@dataclass(frozen=True)
class _Rule:
    """How an operator is written.

    Attributes:
        text: its value, with a, b and c for the arguments.
        partials: the derivatives with respect to the arguments, also with y for the value; ``"0"`` for 0. A missing one
            is not known.
        of: the kind of the arguments; None for that of the value.
        condition: the number of the argument that is a bool in any case.
    """

    text: str
    partials: tuple[str, ...] = ()
    of: type | None = None
    condition: int | None = None


def _rule(name: str, kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Rule:
    if kwargs.get("alpha", 1) != 1 or (name in ("add", "sub", "rsub") and len(args) > 2):
        raise UntranslatableError(f"torch.ops.aten.{name} has an alpha")
    if name == "pow" and args[1] in _POWERS:
        return _POWERS[args[1]]
    if name == "pow" and isinstance(args[0], (int, float)) and args[0] > 0 and kind is float:
        return _Rule(f"tl.exp2({{b}} * {math.log2(args[0])!r})", ("0", f"{{y}} * {math.log(args[0])!r}"))
    if name == "clamp":
        return _clamp(*args, **kwargs)
    if name == "bitwise_not":
        return _Rule("{a} == 0" if kind is bool else "~{a}")
    if kind is int:  # Triton's division of floats is not exact enough for the floor of a quotient
        if name == "remainder":
            return _Rule("(({a} % {b}) + {b}) % {b}")
        if name == "floor_divide" or kwargs.get("rounding_mode") == "floor":
            return _Rule("({a} - (({a} % {b}) + {b}) % {b}) // {b}")
        if name in ("floor", "ceil"):
            return _Rule("{a}")
    found = _RULES.get(name)
    if found is None or kwargs.get("rounding_mode") is not None:
        raise UntranslatableError(f"torch.ops.aten.{name} has no translation")
    return found


def _clamp(x: Any, low: Any = None, high: Any = None, **limits: Any) -> _Rule:
    low, high = limits.get("min", low), limits.get("max", high)
    if any(isinstance(limit, Tensor) for limit in (low, high)):
        raise UntranslatableError("torch.ops.aten.clamp has tensors as limits")
    text, inside = "{a}", "({a} == {a})"
    for limit, is_outside, is_inside in ((low, "<", ">="), (high, ">", "<=")):
        if limit is not None:
            number = _number(limit).text
            text = f"tl.where({text} {is_outside} {number}, {number}, {text})"
            inside += f" & ({{a}} {is_inside} {number})"
    return _Rule(text, (f"tl.where({inside}, 1.0, 0.0)",))


_VIEWS = {"alias", "detach", "expand", "squeeze", "unsqueeze", "view", "_unsafe_view"}
_SAME = {"_to_copy", "clone", *_VIEWS}
_OF_BOOL = {"eq", "ge", "gt", "index", "isinf", "isnan", "le", "lt", "masked_fill", "ne", "where", "full_like"}
_OF_BOOL |= {"bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ones_like", "zeros_like", *_SAME}
_OF_BOOL |= {"logical_and", "logical_not", "logical_or", "logical_xor"}
_CONSTANTS = {"zeros_like": 0, "ones_like": 1, "full_like": None}
_POWERS = {
    2: _Rule("{a} * {a}", ("2 * {a}",)),
    3: _Rule("{a} * {a} * {a}", ("3 * {a} * {a}",)),
    4: _Rule("({a} * {a}) * ({a} * {a})", ("4 * {a} * {a} * {a}",)),
    0.5: _Rule("tl.sqrt({a})", ("0.5 / {y}",)),
    -0.5: _Rule("1 / tl.sqrt({a})", ("-0.5 * {y} / {a}",)),
    -1: _Rule("1 / {a}", ("-{y} * {y}",)),
    -2: _Rule("1 / ({a} * {a})", ("-2 * {y} / {a}",)),
}
_SHARE = "tl.where({{a}} {0} {{b}}, 1.0, tl.where({{a}} == {{b}}, 0.5, 0.0))"
_SIGN = "tl.where({a} > 0, 1.0, tl.where({a} < 0, -1.0, 0.0))"
_RULES = {
    "__lshift__": _Rule("{a} << {b}"),
    "__rshift__": _Rule("{a} >> {b}"),
    "abs": _Rule("tl.abs({a})", (_SIGN,)),
    "add": _Rule("{a} + {b}", ("1.0", "1.0")),
    "bitwise_and": _Rule("{a} & {b}"),
    "bitwise_left_shift": _Rule("{a} << {b}"),
    "bitwise_or": _Rule("{a} | {b}"),
    "bitwise_right_shift": _Rule("{a} >> {b}"),
    "bitwise_xor": _Rule("{a} ^ {b}"),
    "ceil": _Rule("tl.ceil({a})", ("0",)),
    "cos": _Rule("tl.cos({a})", ("-tl.sin({a})",)),
    "div": _Rule("{a} / {b}", ("1 / {b}", "-{y} / {b}")),
    "eq": _Rule("{a} == {b}", of=_NUMBER),
    "erf": _Rule("tl.erf({a})", (f"{2 / math.sqrt(math.pi)!r} * tl.exp(-{{a}} * {{a}})",)),
    "exp": _Rule("tl.exp({a})", ("{y}",)),
    "exp2": _Rule("tl.exp2({a})", (f"{{y}} * {math.log(2)!r}",)),
    "floor": _Rule("tl.floor({a})", ("0",)),
    "ge": _Rule("{a} >= {b}", of=_NUMBER),
    "gt": _Rule("{a} > {b}", of=_NUMBER),
    "hypot": _Rule("tl.sqrt({a} * {a} + {b} * {b})", ("{a} / {y}", "{b} / {y}")),
    "isinf": _Rule('tl.abs({a}) == float("inf")', of=float),
    "isnan": _Rule("{a} != {a}", of=float),
    "le": _Rule("{a} <= {b}", of=_NUMBER),
    "log": _Rule("tl.log({a})", ("1 / {a}",)),
    "log1p": _Rule("tl.log(1 + {a})", ("1 / (1 + {a})",)),
    "log2": _Rule("tl.log2({a})", (f"{1 / math.log(2)!r} / {{a}}",)),
    "logical_and": _Rule("{a} & {b}", of=bool),
    "logical_not": _Rule("{a} == 0", of=bool),
    "logical_or": _Rule("{a} | {b}", of=bool),
    "logical_xor": _Rule("{a} ^ {b}", of=bool),
    "lt": _Rule("{a} < {b}", of=_NUMBER),
    "masked_fill": _Rule(
        "tl.where({b}, {c}, {a})", ("tl.where({b}, 0.0, 1.0)", "0", "tl.where({b}, 1.0, 0.0)"), condition=1
    ),
    "maximum": _Rule("tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})", (_SHARE.format(">"), _SHARE.format("<"))),
    "minimum": _Rule("tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})", (_SHARE.format("<"), _SHARE.format(">"))),
    "mul": _Rule("{a} * {b}", ("{b}", "{a}")),
    "ne": _Rule("{a} != {b}", of=_NUMBER),
    "neg": _Rule("-{a}", ("-1.0",)),
    "reciprocal": _Rule("1 / {a}", ("-{y} * {y}",)),
    "relu": _Rule("tl.where({a} <= 0, 0.0, {a})", ("tl.where({a} > 0, 1.0, 0.0)",)),
    "rsqrt": _Rule("1 / tl.sqrt({a})", ("-0.5 * {y} / {a}",)),
    "rsub": _Rule("{b} - {a}", ("-1.0", "1.0")),
    "sigmoid": _Rule("1 / (1 + tl.exp(-{a}))", ("{y} * (1 - {y})",)),
    "sin": _Rule("tl.sin({a})", ("tl.cos({a})",)),
    "sqrt": _Rule("tl.sqrt({a})", ("0.5 / {y}",)),
    "sub": _Rule("{a} - {b}", ("1.0", "-1.0")),
    # exp(2 a) may be infinite or 0. Both give the right limit.
    "tanh": _Rule("1 - 2 / (tl.exp(2 * {a}) + 1)", ("1 - {y} * {y}",)),
    "where": _Rule("tl.where({a}, {b}, {c})", ("0", "tl.where({a}, 1.0, 0.0)", "tl.where({a}, 0.0, 1.0)"), condition=0),
}
