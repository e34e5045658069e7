"""Settings that come from the environment, and the choice of driver.

CUMEM_DRIVER              what `driver="auto"` means: "cuda", "host", or "auto": cuda where a usable GPU is, else host
CUMEM_DEVICE_TIMEOUT      seconds that a wait for a device may last (default 60)
CUMEM_HOST_DEVICES        number of devices that the host driver emulates (default 2)
CUMEM_HOST_DEVICE_BYTES   bytes of each (default 8 GiB)
"""

from __future__ import annotations

import os

from . import _core
from .errors import InvalidArgument, Unsupported

__all__ = ["DRIVERS", "choose_driver", "device_timeout_s"]

DRIVERS = ("auto", "cuda", "host")


def _positive(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InvalidArgument(f"{name}={text!r} is not a positive number")
    return value


def device_timeout_s() -> float:
    """Seconds that a wait for a device may last. Raises `InvalidArgument` if the variable is not a positive number."""
    return _positive("CUMEM_DEVICE_TIMEOUT", 60.0)


def _host_driver() -> _core.Driver:
    return _core.host_driver(
        device_count=int(_positive("CUMEM_HOST_DEVICES", 2)),
        device_bytes=int(_positive("CUMEM_HOST_DEVICE_BYTES", 8 << 30)),
    )


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
