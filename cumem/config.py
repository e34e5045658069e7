"""Settings that come from the environment, and the choice of driver.

CUMEM_DRIVER              what `driver="auto"` means: "cuda", "host", or "auto": cuda where a usable GPU is, else host
CUMEM_DEVICE_TIMEOUT      seconds that a wait for a device may last (default 60)
CUMEM_HOST_DEVICES        number of devices that the host driver emulates (default 2)
CUMEM_HOST_DEVICE_BYTES   bytes of each (default 8 GiB)
"""

from __future__ import annotations

import math
import os

from . import _core
from .errors import InvalidArgument, Unsupported

__all__ = ["DRIVERS", "choose_driver", "device_timeout_s"]

DRIVERS = ("auto", "cuda", "host")


_MAX_TIMEOUT_S = 1e9  # what a clock in nanoseconds can still add up


def _number(text: str | None, default: float) -> float:
    try:
        return float(default if text is None else text)
    except ValueError:
        return math.nan


def device_timeout_s(given: object = None) -> float:
    """Seconds that a wait for a device may last: `given`, else the environment's, else 60.

    Raises:
        InvalidArgument: it is not above 0, or so much that no clock can count it.
    """
    text = os.environ.get("CUMEM_DEVICE_TIMEOUT")
    value = _number(text, 60.0) if given is None else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_TIMEOUT_S:
        shown = f"CUMEM_DEVICE_TIMEOUT={text!r}" if given is None else f"device_timeout={given!r}"
        raise InvalidArgument(f"{shown} is not a number of seconds above 0 and up to {_MAX_TIMEOUT_S:g}")
    return float(value)


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name)
    value = _number(text, default)
    if not 0 < value < 2**63 or not value.is_integer():
        raise InvalidArgument(f"{name}={text!r} is not a positive whole number")
    return int(value)


def _host_driver() -> _core.Driver:
    count, size = _whole("CUMEM_HOST_DEVICES", 2), _whole("CUMEM_HOST_DEVICE_BYTES", 8 << 30)
    try:
        return _core.host_driver(device_count=count, device_bytes=size)
    except InvalidArgument as error:
        raise InvalidArgument(f"CUMEM_HOST_DEVICES={count}, CUMEM_HOST_DEVICE_BYTES={size}: {error}") from error


def choose_driver(driver: str | _core.Driver) -> _core.Driver:
    """The driver of that name; a driver object is taken as it is.

    Each call with "host" makes emulated devices of its own.

    Raises:
        InvalidArgument: another name.
        Unsupported: "cuda" where no usable GPU is; the message says what is missing.
    """
    if isinstance(driver, _core.Driver):
        return driver
    name = os.environ.get("CUMEM_DRIVER", "auto") if driver == "auto" else driver
    if name not in DRIVERS:
        raise InvalidArgument(f"driver={name!r} is none of {list(DRIVERS)}")
    if name == "host":
        return _host_driver()
    try:
        return _core.cuda_driver()
    except Unsupported:
        if name == "cuda":
            raise
        return _host_driver()
