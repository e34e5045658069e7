"""Every error that cumem raises.

    CumemError(RuntimeError)
     +-- DriverError                 a driver call failed; its name and code
     +-- OutOfDeviceMemory           also MemoryError
     +-- OutOfHostMemory             also MemoryError
     +-- StateError                  legal in another state
     |    +-- AsleepError            needs memory that is asleep
     +-- UnknownTag                  also KeyError; before anything changes
     +-- DeviceBusy                  a wait for the device reached its deadline
     +-- SleepFailure                a sleep that had begun to unmap could not end
     +-- WakeUpPartialFailure        some segments woke, some did not
     +-- InvalidArgument             also ValueError; before anything changes
     +-- Unsupported                 this machine, driver or object cannot

    CumemWarning(UserWarning)        what works, but not as well as it could; each once a process

All pickle. A message shows the value, the numbers and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AsleepError",
    "CumemError",
    "CumemWarning",
    "DeviceBusy",
    "DriverError",
    "FailedSegment",
    "InvalidArgument",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "SleepFailure",
    "StateError",
    "UnknownTag",
    "Unsupported",
    "WakeUpPartialFailure",
]


def _rebuild(cls: type[CumemError], message: str, fields: dict[str, Any]) -> CumemError:
    return cls(message, **fields)


class CumemError(RuntimeError):
    """Root of all errors of cumem.

    Subclasses list in `_fields` the keyword arguments that make them; these are attributes, and travel through pickle.
    """

    _fields: tuple[str, ...] = ()

    def __init__(self, message: str, **fields: Any) -> None:
        unknown = set(fields) - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}; it has {list(self._fields)}")
        super().__init__(message)
        self.message = message
        for name in self._fields:
            setattr(self, name, fields.get(name))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in self._fields})

    def __str__(self) -> str:
        return self.message


class CumemWarning(UserWarning):
    """Something that works, but not as well as it could; the message says what it costs and what to do."""


class DriverError(CumemError):
    """A driver call failed. `call` is its name, `code` the driver's own number.

    `context_broken` is true after an illegal access or an uncorrectable memory error: the process's context is lost,
    every later call raises this error at once, and only backups in host memory can still be read.
    """

    _fields = ("call", "code", "context_broken")
    call: str
    code: int
    context_broken: bool


class OutOfDeviceMemory(CumemError, MemoryError):
    """The device has less free memory than is needed. Nothing changed, or what changed was undone."""

    _fields = ("needed_bytes", "free_bytes", "device", "tag", "idle_cache_bytes")
    needed_bytes: int
    free_bytes: int
    device: int | None
    tag: str | None
    idle_cache_bytes: int | None  # what torch caches without using it; empty_cache() gives it back


class OutOfHostMemory(CumemError, MemoryError):
    """The host may not or cannot hold the backup. Raised before anything is unmapped."""

    _fields = ("needed_bytes", "free_bytes", "tag")
    needed_bytes: int
    free_bytes: int
    tag: str | None


class StateError(CumemError):
    """The call is legal in another state; nothing changed."""


class AsleepError(StateError):
    """The memory is asleep. `tag` names what to wake."""

    _fields = ("tag",)
    tag: str


class UnknownTag(CumemError, KeyError):
    """No such tag; raised before anything changes. `known` lists those that exist."""

    _fields = ("tag", "known")
    tag: str
    known: list[str]


class DeviceBusy(CumemError):
    """Work on the device did not end before the deadline. Nothing changed; call again."""

    _fields = ("timeout_s",)
    timeout_s: float | None


class InvalidArgument(CumemError, ValueError):
    """An argument that is refused; nothing changed."""


class Unsupported(CumemError):
    """This machine, driver, library or object cannot do that; nothing changed."""


@dataclass(frozen=True)
class FailedSegment:
    """One segment that a transition could not move."""

    tag: str
    segment: int
    address: int
    size_bytes: int
    device: int
    phase: str  # "map", "restore" or "unmap"
    state: str  # the segment's state now
    error: Exception


class SleepFailure(CumemError):
    """A sleep passed its decision but some segments could not be unmapped; the others are asleep.

    `asleep`, `resident` and `lost` are segment ids by what they are now, `failed` says why. No contents are gone:
    resident segments keep theirs, asleep ones have their backups. Calling `sleep` again tries the resident ones again.
    """

    _fields = ("asleep", "resident", "lost", "failed")
    asleep: list[int]
    resident: list[int]
    lost: list[int]
    failed: list[FailedSegment]


class WakeUpPartialFailure(CumemError):
    """Some segments could not be woken. Each of them is asleep with its backup; nothing is gone.

    `failed` lists them, `woken` the tags that are fully awake, `rolled_back` says whether this call's work was undone
    (`on_failure="rollback"`), `first_exception` is the first cause. `retry()` does the rest of the same call again.
    """

    _fields = ("failed", "woken", "first_exception", "rolled_back")
    failed: list[FailedSegment]
    woken: list[str]
    first_exception: Exception
    rolled_back: bool
    _retry: Callable[[], Any] | None = None

    def retry(self) -> Any:
        """Wakes what this call did not, with the same options; returns its `WakeReport`.

        Raises `StateError` on an error that came from another process, or `WakeUpPartialFailure` if it fails again.
        """
        if self._retry is None:
            raise StateError("this error was unpickled in another process: call wake_up() where it was raised")
        return self._retry()
