"""Keeps torch's memory fraction true while memory sleeps.

`torch.cuda.set_per_process_memory_fraction` limits what torch's allocator has asked for, and what sleeps stays asked
for: on a card that sleep has emptied, allocations fail. This hook raises the limit by the sleeping bytes and takes them
off again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from . import torch_settings

if TYPE_CHECKING:
    from .hooks import Transition

__all__ = ["FractionHook", "HookRegistry", "MemoryLimits", "TorchMemoryLimits"]

_STEPS = 4  # units in the last place that a fraction may need to become the same number of bytes again


class MemoryLimits(Protocol):
    """Where fractions are read and written."""

    def read(self, device: int) -> float | None:
        """The fraction in force, 1 if none is; None where there is none to read yet."""

    def write(self, device: int, fraction: float) -> None:
        """Sets a fraction from 0 to 1."""

    def total_bytes(self, device: int) -> int:
        """What a fraction of 1 stands for."""


class TorchMemoryLimits:
    """Those of torch."""

    def read(self, device: int) -> float | None:
        """See `MemoryLimits`. None before torch has initialised CUDA: nothing makes it do so here."""
        import torch

        cuda: ModuleType = torch.cuda
        if torch_settings.allocator_backend() != "native" or not cuda.is_initialized():
            return None
        return float(cuda.get_per_process_memory_fraction(device))

    def write(self, device: int, fraction: float) -> None:
        """See `MemoryLimits`."""
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def total_bytes(self, device: int) -> int:
        """See `MemoryLimits`."""
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)


class HookRegistry(Protocol):
    """The `hooks` of an allocator, or `cumem.hooks`."""

    def register(
        self,
        name: str,
        *,
        after_sleep: Callable[[Transition], object] | None = None,
        after_wake: Callable[[Transition], object] | None = None,
    ) -> None:
        """See `Hooks.register`."""


class FractionHook:
    """Raises the fraction of each limited device while memory sleeps, and restores it to the byte.

    With `base` what the user last set: fraction = min(1, base + asleep bytes / total bytes), and exactly `base` when
    nothing sleeps. A fraction that someone sets meanwhile becomes the new base. Devices without a limit are left alone;
    at 1, torch has no limit at all. Where tensors die in their sleep, the limit is too high until the next transition
    or `update()`.

    Args:
        asleep_bytes: the bytes by device that torch counts as used though they sleep: segments of regions, not those of
            `empty` and `adopt`.
        limits: where fractions are read and written.
    """

    def __init__(self, asleep_bytes: Callable[[], Mapping[int, int]], *, limits: MemoryLimits | None = None) -> None:
        self._asleep_bytes = asleep_bytes
        self._limits: MemoryLimits = limits or TorchMemoryLimits()
        self._lock = threading.Lock()
        self._base: dict[int, float] = {}  # of raised devices
        self._raised: dict[int, float] = {}  # as read back

    def register(self, hooks: HookRegistry, name: str = "memory fraction") -> None:
        """Has `update` called after each transition of an allocator. Raises as `Hooks.register` does."""
        hooks.register(name, after_sleep=self.update, after_wake=self.update)

    def update(self, transition: Transition | None = None) -> None:
        """Makes each limit what it should be now. Any thread; takes torch's allocator mutex."""
        asleep = self._asleep_bytes()
        with self._lock:
            for device in sorted({*asleep, *self._base}):
                self._update(device, asleep.get(device, 0))

    def _update(self, device: int, asleep_bytes: int) -> None:
        current = self._limits.read(device)
        if current is None:
            return
        ours = current == self._raised.get(device)
        base = self._base[device] if ours else current
        if asleep_bytes and base < 1.0:
            more = asleep_bytes / self._limits.total_bytes(device)
            self._limits.write(device, min(1.0, math.nextafter(base + more, 2.0)))
            raised = self._limits.read(device)
            if raised is not None:
                self._base[device], self._raised[device] = base, raised
            return
        if ours:
            self._restore(device, base)
        self._base.pop(device, None)
        self._raised.pop(device, None)

    def _restore(self, device: int, base: float) -> None:
        """torch keeps whole bytes, cut off: writing what was read can give one byte less."""
        fraction = base
        for _ in range(_STEPS):
            self._limits.write(device, fraction)
            if self._limits.read(device) == base:
                return
            fraction = min(1.0, math.nextafter(fraction, 2.0))
