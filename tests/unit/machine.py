"""A small emulated machine, tensors that know their bytes, and calls on other threads: what these tests share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

import cumem
from cumem import _core

GRANULE = 64 << 10  # the devices' granularity: every segment is a multiple of it
PATIENCE_S = 60.0  # for what must come; nothing waits so long unless it is broken


def small_driver(devices: int = 2, granules: int = 1024, **options: Any) -> _core.Driver:
    """Emulated devices of so many granules each."""
    return _core.host_driver(
        device_count=devices, device_bytes=granules * GRANULE, granularity_bytes=GRANULE, **options
    )


def faulty_driver(devices: int = 2, granules: int = 1024, **options: Any) -> _core.FaultyDriver:
    """The same, with a log, faults and gates."""
    return _core.FaultyDriver(small_driver(devices, granules, **options))


def small_allocator(driver: _core.Driver | None = None, **options: Any) -> cumem.Allocator:
    """An allocator over a driver, by default one of its own."""
    return cumem.Allocator(driver=small_driver() if driver is None else driver, **options)


class Sample:
    """A tensor of so many granules, with bytes that no other seed gives."""

    def __init__(
        self, allocator: cumem.Allocator, tag: str, granules: float = 1, *, seed: int = 0, **options: Any
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.expected = torch.randint(0, 256, (int(granules * GRANULE),), dtype=torch.uint8, generator=random)
        self.tensor = allocator.empty(self.expected.numel(), dtype=torch.uint8, tag=tag, **options)
        self.tensor.copy_(self.expected)

    def check(self) -> None:
        """Its bytes are what they were."""
        assert torch.equal(self.tensor, self.expected)


def counts(driver: _core.Driver) -> dict[str, int]:
    """What the driver has made and not taken back."""
    now = driver.counts()
    names = ("handles", "ranges", "mappings", "registrations", "streams", "events", "physical_bytes")
    return {name: getattr(now, name) for name in names}


def used_bytes(allocator: cumem.Allocator, device: int = 0) -> int:
    """Pages of a device that anybody holds."""
    free, total = allocator.driver_memory(device)
    return total - free


def in_background(function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """The call's future; it runs on a thread of its own."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@contextmanager
def held_at(driver: _core.FaultyDriver, gate: str, function: Callable[..., Any], *args: Any) -> Iterator[Future[Any]]:
    """The body runs while the call of `function`, on another thread, stands at the driver's gate; then it goes on."""
    driver.hold(gate)
    try:
        future = in_background(function, *args)
        assert driver.wait_held(gate, PATIENCE_S), f"nothing came to the gate {gate!r}"
        yield future
    finally:
        driver.release(gate)


def until(condition: Callable[[], object]) -> None:
    """Waits for what must become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)
