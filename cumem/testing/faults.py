"""Drivers that fail on order, and what an error must say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import _core, config
from ..errors import (
    CumemError,
    DeviceBusy,
    DriverError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    SleepFailure,
    Unsupported,
    WakeUpPartialFailure,
)

__all__ = ["CODES", "FOR_EVER", "Fault", "cause_of", "faulty", "says"]

FOR_EVER = -1

# What a driver call may fail with and the process go on; after "context_broken" nothing but backups can be read.
CODES = ("driver", "out_of_device_memory", "out_of_host_memory", "busy", "unsupported")

_ERRORS: dict[str, type[CumemError]] = {
    "driver": DriverError,
    "context_broken": DriverError,
    "out_of_device_memory": OutOfDeviceMemory,
    "out_of_host_memory": OutOfHostMemory,
    "busy": DeviceBusy,
    "unsupported": Unsupported,
}


def faulty(driver: str | _core.Driver = "host", **host_options: Any) -> _core.FaultyDriver:
    """A driver whose calls are logged, can be made to fail and can be held: give it to `Allocator(driver=...)`.

    Args:
        driver: "host", "cuda", "auto", or a driver object.
        host_options: those of the host driver: `device_count`, `device_bytes`, `granularity_bytes`, `refuse_pinning`.

    Raises:
        InvalidArgument: as `Allocator`, or a host option that is refused.
        TypeError: options for another driver than "host", or an unknown one.
    """
    if not host_options:
        return _core.FaultyDriver(config.choose_driver(driver))
    if driver != "host":
        raise TypeError(f"{sorted(host_options)} are options of the host driver, not of {driver!r}")
    return _core.FaultyDriver(_core.host_driver(**host_options))


@dataclass(frozen=True)
class Fault:
    """The `call`-th driver call from now fails (0 is the next; only those named `only` count, if given)."""

    call: int
    code: str = "driver"
    times: int = 1  # this call and the times - 1 after it; FOR_EVER: all after it
    only: str | None = None

    def arm(self, driver: _core.FaultyDriver) -> None:
        """Orders the fault; replaces the one before."""
        driver.fail_at(self.call, code=self.code, times=self.times, only=self.only)

    def __str__(self) -> str:
        often = "for ever" if self.times == FOR_EVER else f"{self.times} times" if self.times > 1 else "once"
        return f"{self.code} at {self.only or 'driver'} call {self.call}, {often}"


def cause_of(error: BaseException) -> BaseException:
    """The error below: that of the first segment, for a transition which failed after it had begun to change memory."""
    if isinstance(error, SleepFailure) and error.failed:
        return error.failed[0].error
    if isinstance(error, WakeUpPartialFailure):
        return error.first_exception
    return error


def says(error: BaseException, code: str) -> bool:
    """Whether `error` tells that a driver call failed with `code`: the right class, a broken context called broken."""
    cause = cause_of(error)
    if not isinstance(error, CumemError) or not isinstance(cause, _ERRORS[code]):
        return False
    return not isinstance(cause, DriverError) or cause.context_broken == (code == "context_broken")
