"""Checks of options that several commands have, by the options' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CHOICES = {
    "layout": ("contiguous", "zigzag"),
    "dtype": ("auto", "fp32", "bf16", "fp16", "fp64"),
    "device": ("auto", "cpu", "cuda"),
}


def check_choices(options: Any) -> None:
    """Refuse a layout, dtype or device that there is not.

    Raises:
        ValueError: naming the option.
    """
    for name in _CHOICES:
        check_choice(name, getattr(options, name))


def check_choice(name: str, value: str) -> None:
    """The same for one of them.

    Raises:
        ValueError: naming the option.
    """
    if value not in _CHOICES[name]:
        raise ValueError(f"{name} = {value!r}: unknown; choose one of {', '.join(_CHOICES[name])}.")


def check_files(**paths: Path | None) -> None:
    """Refuse files to be written, by the option that names them, where there is no directory for them.

    Raises:
        ValueError: naming the option.
    """
    for name, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{name} = {str(path)!r}: {path.absolute().parent} is no directory; make it first.")
