"""Backend `cpu`: contents wait in pinned host memory, the core's host arena."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument
from .base import BackendContext, Extent, Restored, Saved

__all__ = ["CpuBackend"]


class CpuBackend:
    """Copies to host memory and back.

    Args:
        context: where the extents are.
        host: "keep" leaves the host memory with the allocator after a wake, so that the next sleep need not populate
            and pin it again; "release" gives it back to the system.
    """

    name = "cpu"
    keeps_contents = True
    survives_process = False
    preserves_graphs = True

    def __init__(self, context: BackendContext, *, host: str = "keep") -> None:
        if host not in ("keep", "release"):
            raise InvalidArgument(f"host={host!r} is neither 'keep' nor 'release'")
        self._core = context.core
        self._keep_memory = host == "keep"

    def reserve(self, extents: Sequence[Extent]) -> None:
        self._core.reserve_backup(extents)

    def save(self, extents: Sequence[Extent]) -> Saved:
        self._core.save(extents)
        return Saved(copied_bytes=sum(extent.length for extent in extents))

    def restore(self, extents: Sequence[Extent]) -> Restored:
        self._core.restore(extents)
        return Restored(copied_bytes=sum(extent.length for extent in extents))

    def release(self, extents: Sequence[Extent]) -> None:
        self._core.release_backup(extents, keep_memory=self._keep_memory)
