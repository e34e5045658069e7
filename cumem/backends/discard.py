"""Backend `discard`: contents are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument
from .base import BackendContext, Extent, Restored, Saved

__all__ = ["POISON_BYTE", "DiscardBackend"]

# All bits set: NaN in fp32, fp16, bf16, fp8 e4m3 and e5m2, -1 in signed integers. What reads it shows.
POISON_BYTE = 0xFF
_FILLS = {"undefined": None, "zero": 0x00, "poison": POISON_BYTE}


class DiscardBackend:
    """Keeps nothing.

    Args:
        context: where the extents are.
        wake: what the memory holds after a wake: "undefined" (whatever the pages held), "zero", or "poison" (NaN in
            every float format), which makes a read of stale memory visible.
    """

    name = "discard"
    keeps_contents = False
    survives_process = False
    preserves_graphs = False

    def __init__(self, context: BackendContext, *, wake: str = "undefined") -> None:
        if wake not in _FILLS:
            raise InvalidArgument(f"wake={wake!r} is none of {list(_FILLS)}")
        self._context = context
        self._wake = wake

    def reserve(self, extents: Sequence[Extent]) -> None:
        """Needs nothing."""

    def save(self, extents: Sequence[Extent]) -> Saved:
        return Saved()

    def restore(self, extents: Sequence[Extent]) -> Restored:
        byte = _FILLS[self._wake]
        if byte is None:
            return Restored(defined=False)
        self._context.fill(extents, byte)
        return Restored(zeroed_bytes=sum(extent.length for extent in extents), defined=self._wake == "zero")

    def release(self, extents: Sequence[Extent]) -> None:
        """Holds nothing."""
