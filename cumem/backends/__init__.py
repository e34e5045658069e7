"""Sleep-mode backends by name.

`cpu` and `discard` are built in; others come by `register` or by an entry point in the group `cumem.backends` whose
name is the backend's and whose value is its factory.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from ..errors import InvalidArgument, Unsupported
from .base import BackendContext, BackendFactory, Extent, Restored, Saved, SleepModeBackend
from .cpu import CpuBackend
from .discard import POISON_BYTE, DiscardBackend

__all__ = [
    "POISON_BYTE",
    "BackendContext",
    "CpuBackend",
    "DiscardBackend",
    "Extent",
    "Restored",
    "Saved",
    "SleepModeBackend",
    "create",
    "names",
    "register",
]

_ENTRY_POINTS = "cumem.backends"
_factories: dict[str, BackendFactory] = {"cpu": CpuBackend, "discard": DiscardBackend}


def register(name: str, factory: BackendFactory) -> None:
    """Makes `factory(context, **options)` the backend of that name.

    Raises:
        InvalidArgument: the name is taken by another factory, or empty; nothing changed.
    """
    if not name or not isinstance(name, str):
        raise InvalidArgument(f"{name!r} is no name for a backend")
    if _factories.get(name, factory) is not factory:
        raise InvalidArgument(f"a backend named {name!r} is registered already")
    _factories[name] = factory


def names() -> list[str]:
    """Names of all backends, installed entry points included."""
    return sorted({*_factories, *(point.name for point in entry_points(group=_ENTRY_POINTS))})


def _factory(name: str) -> BackendFactory:
    if name in _factories:
        return _factories[name]
    for point in entry_points(group=_ENTRY_POINTS):
        if point.name == name:
            try:
                factory: BackendFactory = point.load()
            except Exception as error:
                raise Unsupported(f"backend {name!r} cannot be loaded from {point.value!r}: {error}") from error
            register(name, factory)
            return factory
    raise InvalidArgument(f"no backend is named {name!r}; there are {names()}")


def create(name: str, context: BackendContext, options: dict[str, object]) -> SleepModeBackend:
    """A backend for one tag.

    Raises:
        InvalidArgument: no such backend, or options that it does not take.
        Unsupported: the backend's entry point cannot be loaded.
    """
    try:
        return _factory(name)(context, **options)
    except TypeError as error:
        raise InvalidArgument(f"backend {name!r} does not take {options!r}: {error}") from error
