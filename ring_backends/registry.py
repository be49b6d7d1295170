"""Finds adapters by name: those of this package, and those of other installed distributions.

An adapter is a module that an entry point in group ``ring_backends.adapters`` names. It is imported, together with its
framework, only when it is requested.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ring_backends.errors import AdapterUnavailableError

if TYPE_CHECKING:
    from ring_backends.attention import RingDilatedAttention
    from ring_backends.ring.ring import Ring

ENTRY_POINT_GROUP = "ring_backends.adapters"

_BUILT_IN = {name: f"ring_backends.adapters.{name}" for name in ("native", "fsdp", "deepspeed", "fairscale")}


def adapter_modules() -> dict[str, str]:
    """Map the name of every known adapter, usable or not, to its module."""
    announced = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return _BUILT_IN | announced


def load_adapter(name: str) -> ModuleType:
    """Import an adapter.

    Raises:
        ValueError: no adapter has this name.
        AdapterUnavailableError: the framework of the adapter is missing or does not work here.
    """
    modules = adapter_modules()
    if name not in modules:
        raise ValueError(f"backend = {name!r}: no such adapter; choose one of {', '.join(sorted(modules))}.")
    try:
        return import_module(modules[name])
    except AdapterUnavailableError:
        raise
    except ImportError as error:
        raise AdapterUnavailableError(f"adapter {name!r} cannot be imported from {modules[name]}: {error}") from error


def create_attention(
    backend: str = "auto",
    segment_lengths: Sequence[int | None] = (),
    dilation_rates: Sequence[int] = (),
    *,
    ring: Ring | None = None,
    **options: Any,
) -> RingDilatedAttention:
    """Make an attention module with an adapter that a configuration names.

    Args:
        backend: name of an adapter. ``"auto"``: the adapter that made ``ring``, or native without a ring.
        segment_lengths, dilation_rates: w and r of each branch, as in :class:`DilatedPattern`.
        ring: the ring that the adapter's ``initialize`` returned. None means a ring of one rank.
        options: further arguments of the adapter's ``RingDilatedAttention``, such as ``window_lengths``.

    Raises:
        ValueError, TypeError: no adapter has this name, or another argument is invalid.
        AdapterUnavailableError: the framework of the adapter is missing or does not work here.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend = {backend!r}: expected the name of an adapter, or 'auto'.")
    if backend == "auto":
        backend = "native" if ring is None else ring.adapter
    attention: RingDilatedAttention = load_adapter(backend).RingDilatedAttention(
        segment_lengths, dilation_rates, ring=ring, **options
    )
    return attention


def available_adapters() -> dict[str, str | None]:
    """Map each adapter's name to None if it is usable, else to the reason why it is not.

    This imports the framework of every adapter, without the warnings that frameworks give when they are imported.
    """
    reasons: dict[str, str | None] = {}
    with without_warnings():
        for name in adapter_modules():
            try:
                load_adapter(name)
                reasons[name] = None
            except AdapterUnavailableError as error:
                reasons[name] = str(error)
    return reasons


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings of ``warnings`` and of all loggers. Output is not redirected: loggers would keep the target."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
