"""What torch's allocator is set to. Only read: torch's own setter of one setting resets all the others.

Nothing here makes a context on a device. What cannot be known is None, never a guess.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from . import torch_names, torch_snapshot
from .errors import CumemWarning, Unsupported

__all__ = [
    "CONFIGURATION_VARIABLES",
    "UNCACHED_VARIABLES",
    "AllocatorSettings",
    "allocator_backend",
    "caching_enabled",
    "check_routable",
    "configuration_from",
    "is_uncached",
    "memory_fraction",
    "parse",
    "read_settings",
    "warn_about_settings",
]

CONFIGURATION_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads its configuration from, at its first use; the first that is set wins (2.11 to 2.14, tried)."""

UNCACHED_VARIABLES = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
"""Either of them as "1" switches caching off."""

_NOT_IN_LISTS = re.compile(r",(?![^\[]*\])")  # commas between settings

_DIVISIONS = re.compile(r"(\d+)(?=[,\]]|$)")  # "4", or the values of "[256:1,512:2,>:8]"
_HOW_TO_LEAVE = {
    "cudaMallocAsync": "take backend:cudaMallocAsync out of the allocator's configuration",
    "pluggable": "do not call torch.cuda.memory.change_current_allocator",
}
_OTHERWISE = "regions need torch's own caching allocator"

_warned: set[tuple[str, int]] = set()
_warned_lock = threading.Lock()


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings that change what cumem sees, and where they were read."""

    text: str = ""  # the configuration as it was last written
    source: str = "default"  # "torch": in force now; a variable's name: as torch will read it; "default": none is set
    backend: str = "native"
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0  # 0: off
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: bool = False  # sizes are rounded up by more than 512 bytes
    per_process_memory_fraction: float = 1.0  # as configured; see `memory_fraction` for what is in force


def allocator_backend() -> str | None:
    """ "native", "cudaMallocAsync" or "pluggable"; None where torch has no CUDA. Imports torch."""
    import torch

    return torch.cuda.get_allocator_backend() if torch_names.has_cuda() else None


def caching_enabled() -> bool | None:
    """Whether allocations go through pools at all; None where this torch does not say. Imports torch."""
    import torch

    if is_uncached(os.environ):
        return False
    ask = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # 2.12
    return None if ask is None else bool(ask())


def memory_fraction(device: int) -> float | None:
    """The part of the device that torch's allocator may use, below 1; None where nothing limits it. Imports torch."""
    import torch

    cuda: ModuleType = torch.cuda
    if allocator_backend() != "native" or not cuda.is_initialized():
        return None
    fraction = float(cuda.get_per_process_memory_fraction(device))
    return fraction if fraction < 1.0 else None


def read_settings() -> AllocatorSettings:
    """The settings in force in this process. Imports torch."""
    import torch

    if allocator_backend() == "native":
        return _in_force(torch_snapshot.settings())
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # 2.12
    if ask is not None:
        return parse(str(ask()), source="torch")
    variable, text = configuration_from(os.environ)
    return parse(text, source=variable or "default")


def configuration_from(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The variable that torch takes its configuration from, and its text; (None, "") if none is set."""
    for name in CONFIGURATION_VARIABLES:
        if name in environment:
            return name, environment[name]
    return None, ""


def is_uncached(environment: Mapping[str, str]) -> bool:
    """Whether caching is switched off there. Anything but "1" does not do it."""
    return any(environment.get(name) == "1" for name in UNCACHED_VARIABLES)


def parse(text: str, *, source: str) -> AllocatorSettings:
    """The settings that a configuration asks for: `name:value` and `name:[list]`, by commas. Unknown ones are skipped.

    Raises:
        ValueError: a number that is none.
    """
    values = {}
    for part in filter(None, (part.strip() for part in _NOT_IN_LISTS.split(text))):
        name, _, value = part.partition(":")
        values[name.strip()] = value.strip()
    split_mb = int(values.get("max_split_size_mb", -1))
    return AllocatorSettings(
        text=text,
        source=source,
        backend=values.get("backend", "native"),
        expandable_segments=values.get("expandable_segments") == "True",
        garbage_collection_threshold=float(values.get("garbage_collection_threshold", 0.0)),
        max_split_size_bytes=split_mb << 20 if split_mb >= 0 else None,
        roundup_power2_divisions=any(
            int(n) > 1 for n in _DIVISIONS.findall(values.get("roundup_power2_divisions", ""))
        ),
        per_process_memory_fraction=float(values.get("per_process_memory_fraction", 1.0)),
    )


def _in_force(known: Mapping[str, Any]) -> AllocatorSettings:
    """The settings that torch shows, and the one that it does not show from the text that they were made of."""
    split_bytes = int(known.get("max_split_size", -1))
    return replace(
        parse(str(known.get("PYTORCH_CUDA_ALLOC_CONF", "")), source="torch"),
        expandable_segments=bool(known.get("expandable_segments", False)),
        garbage_collection_threshold=float(known.get("garbage_collection_threshold", 0.0)),
        max_split_size_bytes=split_bytes if split_bytes >= 0 else None,
        roundup_power2_divisions=any(int(n) > 1 for n in known.get("roundup_power2_divisions", {}).values()),
    )


def check_routable() -> None:
    """Holds torch to route allocations to pools. Changes nothing.

    Raises:
        Unsupported: another allocator is in force, caching is off, or this torch has no CUDA; says what to change.
    """
    backend = allocator_backend()
    if backend is None:
        raise Unsupported(
            "this torch is built without CUDA, so that it has no allocations to route: install one with it"
        )
    if backend != "native":
        raise Unsupported(
            f"torch's allocator is {backend!r}, without pools for regions: {_HOW_TO_LEAVE.get(backend, _OTHERWISE)}"
        )
    if caching_enabled() is False:
        raise Unsupported(
            "torch's caching is switched off, so that allocations go past every region: unset "
            f"{' and '.join(UNCACHED_VARIABLES)}, and leave torch.cuda.caching_allocator_enable(True) as it is"
        )


def warn_about_settings(devices: Iterable[int], *, stacklevel: int = 2) -> None:
    """What a region does first: refuses what cannot work, and warns, once a process and device, of what works badly.

    Warns with `CumemWarning` where a memory fraction, and with it a garbage collection threshold, counts what sleeps.

    Args:
        devices: the devices that the region covers.
        stacklevel: as `warnings.warn` takes it; 2 is the caller's line.

    Raises:
        Unsupported: as `check_routable`; nothing changed.
    """
    check_routable()
    for device in devices:
        fraction = memory_fraction(device)
        if fraction is None:
            continue
        message = (
            f"torch may use {fraction:.0%} of device {device} and counts sleeping memory as used: allocations can fail "
            "on an empty device. Call follow_memory_fraction(), or drop set_per_process_memory_fraction"
        )
        _warn_once("fraction", device, message, stacklevel)
        threshold = read_settings().garbage_collection_threshold
        if threshold > 0:
            message = (
                f"garbage_collection_threshold:{threshold:g} counts sleeping memory on device {device} as used: past "
                "it torch frees cached blocks at each allocation that misses. Drop it, or call follow_memory_fraction()"
            )
            _warn_once("threshold", device, message, stacklevel)


def _warn_once(kind: str, device: int, message: str, stacklevel: int) -> None:
    with _warned_lock:
        if (kind, device) in _warned:
            return
        _warned.add((kind, device))
    warnings.warn(message, CumemWarning, stacklevel=stacklevel + 1)
