"""Shapes of extents that a backend meets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHUNK_BYTES", "GRANULE_BYTES", "LARGE", "LAYOUTS", "SMALL", "Layout"]

GRANULE_BYTES = 64 << 10  # of the emulated devices: small, so that many segments are cheap
CHUNK_BYTES = 64 << 20  # the largest copy that the core queues as one


@dataclass(frozen=True)
class Layout:
    """Segments by their sizes, and extents as (number of the segment, offset, length), in the order they are given."""

    name: str
    segment_bytes: tuple[int, ...]
    extents: tuple[tuple[int, int, int], ...]


def _whole(sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((number, 0, size) for number, size in enumerate(sizes))


_MANY = (GRANULE_BYTES,) * 40
_PARTS = ((0, 0, 512), (0, 1024, 512), (0, 65536, 4096), (1, 512, 512), (1, 130560, 512))

SMALL = Layout("two segments with three extents", (GRANULE_BYTES,) * 2, ((0, 0, 1000), (0, 2048, 512), (1, 0, 65536)))

LAYOUTS = (
    SMALL,
    Layout("no extents at all", (GRANULE_BYTES,), ()),
    Layout("one byte", (GRANULE_BYTES,), ((0, 0, 1),)),
    Layout("the last byte of a segment", (GRANULE_BYTES,), ((0, GRANULE_BYTES - 1, 1),)),
    Layout("one whole segment", (3 * GRANULE_BYTES,), _whole((3 * GRANULE_BYTES,))),
    Layout("many segments", _MANY, _whole(_MANY)),
    Layout("many segments, last first", _MANY, _whole(_MANY)[::-1]),
    Layout("several extents a segment", (2 * GRANULE_BYTES,) * 2, _PARTS),
    Layout("odd lengths at odd offsets", (GRANULE_BYTES,), ((0, 1, 3), (0, 5, 777), (0, 1001, 13), (0, 40001, 25535))),
    Layout("adjacent extents", (GRANULE_BYTES,), ((0, 0, 100), (0, 100, 100), (0, 200, 65336))),
    Layout("a thousand small extents", (GRANULE_BYTES,) * 2, tuple((i % 2, i // 2 * 64, 17) for i in range(1000))),
)

LARGE = Layout("an extent larger than a chunk", (CHUNK_BYTES + GRANULE_BYTES,), ((0, 3, CHUNK_BYTES + 4097),))
