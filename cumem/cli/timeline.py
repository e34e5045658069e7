"""Bytes over time: samples of an allocator's ledger, and the phases they fall into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cumem.reports import MemoryStats

__all__ = ["Phase", "Sample", "Timeline"]


@dataclass(frozen=True)
class Sample:
    """The ledger at one moment."""

    seconds: float  # since the timeline began
    mapped_bytes: dict[str, int]  # on the device, by tag
    host_bytes: int


@dataclass(frozen=True)
class Phase:
    """One named step."""

    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class Timeline:
    """Samples at each phase's begin and end, and every `interval_s` inside a phase that is watched.

    One thread opens and ends phases; a watched phase has a sampling thread of its own.
    """

    def __init__(self, stats: Callable[[], MemoryStats], *, interval_s: float = 0.005) -> None:
        self._stats = stats
        self._interval_s = interval_s
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self.phases: list[Phase] = []

    @property
    def samples(self) -> list[Sample]:
        """All samples so far, in order of time."""
        with self._lock:
            return list(self._samples)

    def now(self) -> float:
        """Seconds since the timeline began."""
        return time.perf_counter() - self._begin

    def sample(self) -> None:
        """Takes one sample."""
        with self._lock:  # held over both, so that samples stay in order
            stats = self._stats()
            mapped = {tag: part.mapped_bytes for tag, part in stats.by_tag.items()}
            self._samples.append(Sample(self.now(), mapped, stats.host_bytes))

    @contextmanager
    def phase(self, name: str, *, watch: bool = False) -> Iterator[None]:
        """Records the body as a phase; `watch` samples while it runs. A body that raises leaves no phase."""
        self.sample()
        begin = self.now()
        if watch:
            with self._watching():
                yield
        else:
            yield
        self.sample()
        self.phases.append(Phase(name, begin, self.now()))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        done = threading.Event()
        failures: list[BaseException] = []

        def watch() -> None:
            try:
                while not done.wait(self._interval_s):
                    self.sample()
            except BaseException as error:  # handed to the thread that waits below
                failures.append(error)

        thread = threading.Thread(target=watch, name="cumem-timeline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if failures:
            raise failures[0]
