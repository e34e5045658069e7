"""The default allocator: what the functions of the module `cumem` use. Made at their first use."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .allocator import Allocator
from .errors import StateError
from .region import Region
from .reports import AdoptReport, MemoryStats, SleepReport, WakeReport

if TYPE_CHECKING:
    import torch

_lock = threading.RLock()  # a signal handler may ask while it is held
_options: dict[str, Any] = {}
_allocator: Allocator | None = None


def configure(**options: Any) -> None:
    """Sets the options of the default allocator, those of `Allocator`.

    Raises:
        StateError: it is in use already.
        TypeError: an option that `Allocator` does not have.
    """
    inspect.signature(Allocator).bind(**options)
    with _lock:
        if _allocator is not None:
            raise StateError("the default allocator is in use already: call configure() before anything else")
        _options.clear()
        _options.update(options)


def default_allocator() -> Allocator:
    """The default allocator, made now if need be. Raises as `Allocator` does; a later call then tries again."""
    global _allocator
    if _allocator is not None:  # without the lock, which a fork may have copied held
        return _allocator
    with _lock:
        if _allocator is None:
            made = Allocator(**_options)
            _allocator = _allocator or made  # a signal handler may have been quicker
        return _allocator


class _DefaultHooks:
    """The hooks of the default allocator; see `cumem.hooks.Hooks`."""

    def register(self, name: str, **options: Any) -> None:
        """Adds a hook; see `Hooks.register`."""
        default_allocator().hooks.register(name, **options)

    def unregister(self, name: str) -> None:
        """Removes a hook; see `Hooks.unregister`."""
        default_allocator().hooks.unregister(name)


hooks = _DefaultHooks()


def empty(*shape: Any, **options: Any) -> torch.Tensor:
    """See `Allocator.empty`."""
    return default_allocator().empty(*shape, **options)


def zeros(*shape: Any, **options: Any) -> torch.Tensor:
    """See `Allocator.zeros`."""
    return default_allocator().zeros(*shape, **options)


def full(*shape: Any, **options: Any) -> torch.Tensor:
    """See `Allocator.full`."""
    return default_allocator().full(*shape, **options)


def adopt(obj: Any, tag: str | None = None, backend: str | None = None) -> AdoptReport:
    """See `Allocator.adopt`."""
    return default_allocator().adopt(obj, tag, backend)


def host_view(t: torch.Tensor) -> torch.Tensor:
    """See `Allocator.host_view`."""
    return default_allocator().host_view(t)


def tag_of(t: torch.Tensor) -> str | None:
    """See `Allocator.tag_of`."""
    return default_allocator().tag_of(t)


def is_resident(t: torch.Tensor) -> bool:
    """See `Allocator.is_resident`."""
    return default_allocator().is_resident(t)


def assert_resident(*objects: Any) -> None:
    """See `Allocator.assert_resident`."""
    default_allocator().assert_resident(*objects)


def region(tag: str, **options: Any) -> Region:
    """See `Allocator.region`."""
    return default_allocator().region(tag, **options)


def set_policy(tag: str, backend: str, **options: Any) -> None:
    """See `Allocator.set_policy`."""
    default_allocator().set_policy(tag, backend, **options)


def tags() -> list[str]:
    """See `Allocator.tags`."""
    return default_allocator().tags()


def state(tag: str | None = None) -> str:
    """See `Allocator.state`."""
    return default_allocator().state(tag)


def is_sleeping(tag: str | None = None) -> bool:
    """See `Allocator.is_sleeping`."""
    return default_allocator().is_sleeping(tag)


def undefined_tags() -> list[str]:
    """See `Allocator.undefined_tags`."""
    return default_allocator().undefined_tags()


def mark_loaded(tag: str) -> None:
    """See `Allocator.mark_loaded`."""
    default_allocator().mark_loaded(tag)


def bytes_needed_to_wake(tags: Iterable[str] | None = None) -> int:
    """See `Allocator.bytes_needed_to_wake`."""
    return default_allocator().bytes_needed_to_wake(tags)


def stats() -> MemoryStats:
    """See `Allocator.stats`."""
    return default_allocator().stats()


def sleep(tags: Iterable[str] | None = None, **options: Any) -> SleepReport:
    """See `Allocator.sleep`."""
    return default_allocator().sleep(tags, **options)


def wake_up(tags: Iterable[str] | None = None, **options: Any) -> WakeReport:
    """See `Allocator.wake_up`."""
    return default_allocator().wake_up(tags, **options)


def discard(tags: Iterable[str], **options: Any) -> SleepReport:
    """See `Allocator.discard`."""
    return default_allocator().discard(tags, **options)


def asleep(tags: Iterable[str] | None = None) -> AbstractContextManager[SleepReport]:
    """See `Allocator.asleep`."""
    return default_allocator().asleep(tags)


def trim(tag: str | None = None) -> int:
    """See `Allocator.trim`."""
    return default_allocator().trim(tag)
