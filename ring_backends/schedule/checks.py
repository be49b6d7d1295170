"""Checks of arguments that every room of the package uses."""

from __future__ import annotations


def check_integer(
    name: str, value: object, minimum: int | None = None, *, advice: str = "give a positive number"
) -> int:
    """Return ``value`` if it is an int of at least ``minimum``. A bool does not count as an int.

    Args:
        name: of the argument, for the error.
        advice: what the error tells the caller to do about a value that is too small.

    Raises:
        TypeError: ``value`` is not an int.
        ValueError: ``value`` is below ``minimum``.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: expected an int; convert it with int().")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} = {value}: must be at least {minimum}; {advice}.")
    return value
