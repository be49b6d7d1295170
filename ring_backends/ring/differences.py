"""The text of a mismatch: the fields in which ranks differ, and every rank's value."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import cast

_MAX_DIFFERENCES, _MAX_LIST_CHARACTERS = 8, 400


def all_equal(fields_of_ranks: Iterable[Mapping[str, object]]) -> bool:
    """Whether all ranks have equal fields in the same order. A comparison of dicts would ignore the order."""
    return len({json.dumps(fields) for fields in fields_of_ranks}) <= 1


def describe_differences(fields_of: Mapping[int, Mapping[str, object]]) -> str:
    """The text of an error: each field that differs, with every rank's value."""
    differing = []
    for name in dict.fromkeys(name for fields in fields_of.values() for name in fields):
        values = {rank: fields.get(name, "absent") for rank, fields in fields_of.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            if all(isinstance(value, list) for value in values.values()) and len(str(values)) > _MAX_LIST_CHARACTERS:
                values = _differing_items(cast(dict[int, list[object]], values))
            differing.append(f"{name} (" + ", ".join(f"rank {rank}: {value}" for rank, value in values.items()) + ")")
    if not differing:  # only the order differs
        orders = zip(*fields_of.values(), strict=True)
        place, names = next((place, names) for place, names in enumerate(orders) if len(set(names)) > 1)
        by_rank = ", ".join(f"rank {rank}: {name}" for rank, name in zip(fields_of, names, strict=True))
        differing.append(f"the order of their fields, at place {place} ({by_rank})")
    shown = "; ".join(differing[:_MAX_DIFFERENCES])
    more = f"; and {len(differing) - _MAX_DIFFERENCES} more" if len(differing) > _MAX_DIFFERENCES else ""
    return (
        f"the ranks differ in {shown}{more}. Every rank must make the same calls in the same order with the same "
        "arguments, each on its own shard."
    )


def _differing_items(lists: Mapping[int, list[object]]) -> dict[int, object]:
    """The items that not all lists have; if there are none, the first place at which the lists differ."""
    texts = {rank: [json.dumps(item) for item in items] for rank, items in lists.items()}
    common = set.intersection(*map(set, texts.values()))
    own = {
        rank: [item for item, text in zip(lists[rank], texts[rank], strict=True) if text not in common]
        for rank in lists
    }
    if any(own.values()):
        return {rank: items[:_MAX_DIFFERENCES] for rank, items in own.items()}
    for place, items in enumerate(itertools.zip_longest(*lists.values(), fillvalue="nothing")):
        if any(item != items[0] for item in items):
            return {rank: f"{item} at place {place}" for rank, item in zip(lists, items, strict=True)}
    raise AssertionError("the lists are equal")
