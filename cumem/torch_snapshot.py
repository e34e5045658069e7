"""What torch's allocator holds, read without harm.

`torch.cuda.memory_snapshot(include_traces=False)` and `MemPool.snapshot()` must not be used: up to 2.14 at least they
drop a reference to each of their arguments that they do not own (pytorch #196366). Before Python 3.12 the interpreter
dies after some 17,000 calls, when no reference to `False` is left; on any Python a pool id above 256 is freed under its
owner.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["segments", "settings"]

_ALL_POOLS_WITHOUT_TRACES = (0, 0, False)
_take_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def segments() -> list[dict[str, Any]]:
    """The segments of all pools on all devices, as `torch.cuda.memory_snapshot` describes them.

    Takes torch's allocator mutex of each device in turn: hold no lock of cumem. Any thread.

    Raises:
        RuntimeError: the allocator in force is not torch's own; see `torch_settings.allocator_backend`.
    """
    found: list[dict[str, Any]] = _snapshot()["segments"]
    return found


def settings() -> dict[str, Any]:
    """The allocator's settings in force, by the names that this torch gives them. Raises as `segments` does."""
    found: dict[str, Any] = _snapshot()["allocator_settings"]
    return found


def _snapshot() -> dict[str, Any]:
    import torch

    for argument in _ALL_POOLS_WITHOUT_TRACES:
        _take_reference(argument)  # the one that torch drops; where it does not, these three can spare it
    found: dict[str, Any] = torch._C._cuda_memorySnapshot(_ALL_POOLS_WITHOUT_TRACES)
    return found
