"""What a training checkpoint holds, by name: its tensors, and the order of the parameters in the optimizer.

Optimizers identify their states by the index of a parameter, and some frameworks by its offset in a flat part. A model
that defines the same parameters in another order would silently get the states of other parameters. So every checkpoint
contains this description, and a load compares it with the model before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

VERSION = 3
"""The version of the format of checkpoints."""

Groups = list[list[str]]
"""The names of the parameters in each of an optimizer's parameter groups, in the optimizer's order."""

_SHOWN = 8


def describe_contents(
    state: Mapping[str, object], optimizer_class: type, groups: Groups, frozen: Sequence[str]
) -> dict[str, Any]:
    """The description of a checkpoint, as JSON-serializable values.

    Args:
        state: the model's state_dict, in which tensors have their whole shapes.
        optimizer_class: the class of the optimizer that ``make_optimizer`` returned.
        frozen: the names of the frozen parameters.
    """
    return {
        "version": VERSION,
        "optimizer_class": optimizer_class.__name__,
        "tensors": {
            name: f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            for name, value in state.items()
        },
        "groups": groups,
        "frozen": [*frozen],
    }


def check_contents(saved: Mapping[str, Any], here: Mapping[str, Any], flat: str | None) -> None:
    """Refuse a checkpoint of another model or optimizer.

    Args:
        saved, here: the descriptions of the checkpoint, and of the model and optimizer that are to load it.
        flat: if the framework stores flat parts of the parameters, what an error says about it, with the way out. The
            order of the trained parameters must then be that of the checkpoint.

    Raises:
        ValueError: the checkpoint has another version; or the tensors, the optimizer or its parameter groups differ.
    """
    if saved["version"] != VERSION:
        raise ValueError(
            f"it has version {saved['version']} of the format, but this version of ring_backends reads version "
            f"{VERSION}: load it with the version that wrote it, and move the parameters with full_state_dict()"
        )
    if saved["optimizer_class"] != here["optimizer_class"]:
        raise ValueError(
            f"it holds the state of optimizer {saved['optimizer_class']}, but make_optimizer returned "
            f"{here['optimizer_class']}"
        )
    _check_tensors(saved["tensors"], here["tensors"])
    if flat is not None:
        if _trained(saved) != _trained(here):
            _refuse_groups(_trained(saved), _trained(here), f" in the same order: {flat}")
    elif match_groups(saved["groups"], here["groups"]) is None:
        _refuse_groups(saved["groups"], here["groups"], "; the order of their parameters may differ")


def _check_tensors(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    others = [name for name in saved if name not in here]
    missing = [name for name in here if name not in saved]
    changed = [f"{name}: {text}, and {here[name]}" for name, text in saved.items() if here.get(name, text) != text]
    differences = {
        "it has {}, and this model does not": others,
        "it lacks {}, which this model has": missing,
        "dtype or shape differ (in the checkpoint, and here) of {}": changed,
    }
    found = [text.format(_list(names)) for text, names in differences.items() if names]
    if found:
        raise ValueError(
            f"it holds another model: {'; '.join(found)}. Build the model as it was saved; to use only some of the "
            "tensors, load it there, and copy them from full_state_dict() before parallelize()"
        )


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _trained(contents: Mapping[str, Any]) -> Groups:
    frozen = {*contents["frozen"]}
    return [[name for name in group if name not in frozen] for group in contents["groups"]]


def match_groups(saved: Groups, here: Groups) -> list[int] | None:
    """The index of the saved group with the same parameters, in any order, for each group here; None if there is none.

    Equal sets of names, such as those of groups without parameters, are matched in their order.
    """
    left, found = [frozenset(group) for group in saved], []
    for group in map(frozenset, here):
        if group not in left:
            return None
        found.append(left.index(group))
        left[found[-1]] = frozenset({""})  # no parameter has this name
    return found if len(found) == len(saved) else None


def _refuse_groups(saved: Groups, here: Groups, advice: str) -> None:
    names = dict.fromkeys(name for groups in (saved, here) for group in groups for name in group)
    places = {name: (_place(saved, name), _place(here, name)) for name in names}
    one_sided = [name for name, place in places.items() if None in place]
    different = one_sided or [name for name, (there, now) in places.items() if there != now]
    shown = [f"{name} ({places[name][0] or 'not there'}, and {places[name][1] or 'not there'})" for name in different]
    raise ValueError(
        "its optimizer has other parameters, or has them in other groups or in another order. In the checkpoint, and "
        f"here: {_list(shown) or f'{len(saved)} parameter groups, and {len(here)}'}. Let make_optimizer make the same "
        f"groups{advice}"
    )


def _place(groups: Groups, name: str) -> str | None:
    for index, group in enumerate(groups):
        if name in group:
            return f"number {group.index(name)} of parameter group {index}"
    return None


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with other names or numbers of the parameters."""
    return {
        **state,
        "state": {names[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def with_names(state: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """An optimizer's state_dict with the parameters' names in place of their numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return renamed(state, dict(zip(numbers, (name for group in groups for name in group), strict=True)))


def with_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of :func:`with_names` as a state_dict: each parameter has its place in the groups as its number."""
    names = (name for group in state["param_groups"] for name in group["params"])
    return renamed(state, {name: number for number, name in enumerate(names)})


def in_groups(state: Mapping[str, Any], here: Groups) -> dict[str, Any]:
    """A state of :func:`with_names` whose parameters are in the order and in the groups of another optimizer.

    Args:
        here: the groups of the other optimizer: the same sets of names (:func:`match_groups`).
    """
    order = match_groups([group["params"] for group in state["param_groups"]], here)
    assert order is not None
    groups = [{**state["param_groups"][index], "params": names} for index, names in zip(order, here, strict=True)]
    for group in groups:
        group.pop("param_names", None)  # in the order of the checkpoint
    return {**state, "param_groups": groups}
