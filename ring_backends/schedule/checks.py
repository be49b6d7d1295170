"""Checks of arguments that all parts of the package share."""

from __future__ import annotations


def check_integer(
    name: str, value: object, minimum: int | None = None, *, advice: str = "give a positive number"
) -> int:
    """Return ``value`` if it is an int of at least ``minimum``. A bool does not count as an int.

    Args:
        name: name of the argument, for the error message.
        advice: the end of the error message about a value that is too small: what to do.

    Raises:
        TypeError: ``value`` is not an int.
        ValueError: ``value`` is below ``minimum``.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: expected an int; convert it with int().")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} = {value}: must be at least {minimum}; {advice}.")
    return value


def check_group_size(group_size: int, ring_size: int) -> None:
    """Refuse a group size that does not divide the ring size."""
    if ring_size % group_size:
        raise ValueError(
            f"ulysses_size = {group_size}: must divide the {ring_size} ranks of the ring, which are cut into groups of "
            "that size; choose a divisor."
        )


def check_group_heads(group_size: int, num_heads: int) -> None:
    """Refuse a group size that does not divide the query heads."""
    if num_heads % group_size:
        raise ValueError(
            f"ulysses_size = {group_size}: must divide the {num_heads} query heads, of which each rank of a group "
            "computes an equal share; choose a divisor."
        )
