"""The few things asked of torch's own allocator. torch is never imported here: only looked up, if someone else has."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["empty_cache", "idle_cache_bytes", "is_capturing"]


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
