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
