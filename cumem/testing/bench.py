"""Bench: one backend over device memory whose contents are known, outside of any allocator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._core import Core, Extent
from ..backends.base import BackendContext, BackendFactory, Restored, Saved, SleepModeBackend
from .faults import faulty
from .layouts import GRANULE_BYTES, Layout
from .patterns import pattern

__all__ = ["Bench", "Subject", "demand"]

T = TypeVar("T")

_ROOM_BYTES = 256 << 20
_FORBIDDEN = {"reserve", "address_free", "create", "release", "map", "set_access", "unmap"}


def demand(condition: bool, sentence: str) -> None:
    """Raises `AssertionError(sentence)` unless the condition holds; also under `python -O`."""
    if not condition:
        raise AssertionError(sentence)


class Bench:
    """Segments of a layout, mapped and claimed as in a transition, on an emulated device of their own."""

    def __init__(self, layout: Layout, *, host_budget_bytes: int | None = None) -> None:
        self.layout = layout
        self.driver = faulty(device_count=1, device_bytes=_ROOM_BYTES, granularity_bytes=GRANULE_BYTES)
        self.core = Core(self.driver, host_budget_bytes=host_budget_bytes)
        self.context = BackendContext(self.core)
        slot = self.core.create_slot()
        self._addresses = [self.core.malloc(slot, size, 0) for size in layout.segment_bytes]
        infos = [self.core.find(address) for address in self._addresses]
        self._segments = [info.id for info in infos if info is not None]
        self.core.claim(self._segments)
        self.extents = [Extent(self._segments[number], offset, length) for number, offset, length in layout.extents]

    # --- contents ---

    def write(self, seed: object) -> None:
        """Gives every extent contents of its own."""
        self.context.copy_to_device(self.extents, [self.contents(seed, extent) for extent in self.extents])

    def contents(self, seed: object, extent: Extent) -> bytes:
        """What `write(seed)` puts into an extent."""
        return pattern(extent.length, (seed, self._segments.index(extent.segment), extent.offset))

    def read(self, extent: Extent) -> bytes:
        """What an extent holds now."""
        buffer = bytearray(extent.length)
        self.context.copy_to_host([extent], [buffer])
        return bytes(buffer)

    def wrong(self, seed: object, extents: Sequence[Extent] | None = None) -> list[Extent]:
        """Those extents that do not hold what `write(seed)` put there."""
        chosen = self.extents if extents is None else extents
        return [extent for extent in chosen if self.read(extent) != self.contents(seed, extent)]

    def lose(self) -> None:
        """Takes the pages away and gives others, as a sleep and a wake do; whatever the extents held is gone."""
        for outcome in [*self.core.unmap(self._segments), *self.core.map(self._segments)]:
            if outcome.error is not None:
                raise outcome.error
        whole = [Extent(s, 0, size) for s, size in zip(self._segments, self.layout.segment_bytes, strict=True)]
        self.core.fill(whole, 0xA5)

    def spilled(self) -> bool:
        """Whether bytes outside of the extents are not what `lose` left there."""
        for segment, size in zip(self._segments, self.layout.segment_bytes, strict=True):
            buffer = bytearray(size)
            self.context.copy_to_host([Extent(segment, 0, size)], [buffer])
            for extent in self.extents:
                if extent.segment == segment:
                    buffer[extent.offset : extent.offset + extent.length] = b"\xa5" * extent.length
            if buffer != b"\xa5" * size:
                return True
        return False

    def end(self) -> None:
        """Frees the segments. Raises `AssertionError` if host memory of the core is still in use."""
        self.core.unclaim(self._segments)
        self.core.reap()  # lets go of what a failed copy may have used
        used = self.core.host_used_bytes
        for address in self._addresses:
            self.core.free(address)
        self.core.check_valid()
        demand(used == 0, f"{used} bytes of host memory are still in use after all extents were released")


class Subject:
    """A backend under test. Each call runs on a thread of its own, as transitions do, and may not raise."""

    def __init__(self, bench: Bench, factory: BackendFactory, options: dict[str, Any]) -> None:
        self._driver = bench.driver
        self.backend: SleepModeBackend = factory(bench.context, **options)

    def reserve(self, extents: Sequence[Extent]) -> None:
        """`reserve`; an error of it is an `AssertionError`, as in all that follow."""
        self._run("reserve", lambda: self.backend.reserve(extents))

    def save(self, extents: Sequence[Extent]) -> Saved:
        saved = self._run("save", lambda: self.backend.save(extents))
        demand(isinstance(saved, Saved), f"save returned {saved!r}; it must return a Saved")
        return saved

    def restore(self, extents: Sequence[Extent]) -> Restored:
        restored = self._run("restore", lambda: self.backend.restore(extents))
        demand(isinstance(restored, Restored), f"restore returned {restored!r}; it must return a Restored")
        return restored

    def release(self, extents: Sequence[Extent]) -> None:
        self._run("release", lambda: self.backend.release(extents))

    def error_of(self, method: str, extents: Sequence[Extent]) -> BaseException | None:
        """What a call that may fail raises; None if it succeeds."""
        return self._attempt(method, lambda: getattr(self.backend, method)(extents))[1]

    def _run(self, method: str, call: Callable[[], T]) -> T:
        result, error = self._attempt(method, call)
        if error is not None:
            raise AssertionError(f"{method} raised {type(error).__name__}: {error}") from error
        return result[0]

    def _attempt(self, method: str, call: Callable[[], T]) -> tuple[list[T], BaseException | None]:
        result: list[T] = []
        error: list[BaseException] = []

        def work() -> None:
            try:
                result.append(call())
            except BaseException as raised:
                error.append(raised)

        before = len(self._driver.calls)
        thread = threading.Thread(target=work, name=f"check_backend-{method}")
        thread.start()
        thread.join()
        moved = _FORBIDDEN & set(self._driver.calls[before:])
        demand(not moved, f"{method} made the driver calls {sorted(moved)}: a backend never maps or unmaps")
        return result, error[0] if error else None
