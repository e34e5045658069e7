"""What is asked of torch's own allocator. Queries look torch up only if someone else has imported it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from . import torch_snapshot

__all__ = [
    "allocated_bytes",
    "capture_stream",
    "current_device",
    "empty_cache",
    "idle_cache_bytes",
    "is_capturing",
    "snapshot",
    "storage_addresses",
]


def _cuda() -> ModuleType | None:
    """torch.cuda, once it is in use."""
    torch = sys.modules.get("torch")
    cuda: ModuleType | None = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    return cuda


def empty_cache() -> None:
    """Makes torch give back what it caches without using it. Does nothing without torch.cuda."""
    cuda = _cuda()
    if cuda is not None:
        cuda.empty_cache()


def idle_cache_bytes(device: int) -> int:
    """Bytes that torch caches on a device without using them."""
    cuda = _cuda()
    return 0 if cuda is None else int(cuda.memory_reserved(device) - cuda.memory_allocated(device))


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph.

    False where torch cannot tell, because the context is contaminated: the wait for the device then says so.
    """
    cuda = _cuda()
    try:
        return cuda is not None and bool(cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


def capture_stream() -> int | None:
    """The native handle of the stream that `torch.cuda.graph` captures on by default; None before its first use."""
    cuda = _cuda()
    stream = None if cuda is None else cuda.graph.default_capture_stream
    return None if stream is None else int(stream.cuda_stream)


def current_device(default: int) -> int:
    """torch's current device; `default` where torch.cuda is not in use."""
    cuda = _cuda()
    return default if cuda is None else int(cuda.current_device())


def allocated_bytes(exclude: Iterable[int]) -> dict[int, int]:
    """What torch has allocated on each device but these."""
    cuda = _cuda()
    if cuda is None:
        return {}
    skipped = set(exclude)
    return {
        device: int(cuda.memory_allocated(device)) for device in range(cuda.device_count()) if device not in skipped
    }


def snapshot() -> list[dict[str, Any]]:
    """torch's segments with their blocks, all pools, without traces."""
    cuda = _cuda()
    if cuda is None:
        return []
    return torch_snapshot.segments()


def storage_addresses() -> set[int]:
    """Where the storages of all CUDA tensors begin that Python knows."""
    import torch

    found = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda and thing.layout is torch.strided:
            found.add(thing.untyped_storage().data_ptr())
    return found
