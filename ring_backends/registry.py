"""Adapters by name: this package's own, and those that other distributions announce.

An adapter is a module, announced by an entry point in group ``ring_backends.adapters``. It is imported, and with it its
framework, only when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from ring_backends.errors import AdapterUnavailableError

ENTRY_POINT_GROUP = "ring_backends.adapters"

_BUILT_IN = {"native": "ring_backends.adapters.native"}


def adapter_modules() -> dict[str, str]:
    """Name -> module of every adapter known here, usable or not."""
    announced = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return _BUILT_IN | announced


def load_adapter(name: str) -> ModuleType:
    """Import an adapter.

    Raises:
        ValueError: no adapter has this name.
        AdapterUnavailableError: it is known, but its framework is missing or does not work here.
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


def available_adapters() -> dict[str, str | None]:
    """Every adapter known here: None if it can be used, else the reason why not. Imports the frameworks to find out."""
    reasons: dict[str, str | None] = {}
    for name in adapter_modules():
        try:
            load_adapter(name)
            reasons[name] = None
        except AdapterUnavailableError as error:
            reasons[name] = str(error)
    return reasons
