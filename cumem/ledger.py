"""The ledger: one allocator's memory in numbers, by tag."""

from __future__ import annotations

from collections.abc import Iterator

from ._core import SegmentInfo
from .memory import Memory, Tag
from .reports import MemoryStats, TagStats

__all__ = ["memory_stats"]


def memory_stats(memory: Memory) -> MemoryStats:
    """What the allocator has reserved, mapped, and holds live. Waits for nothing."""
    by_tag = {tag.name: _tag_stats(memory, tag) for tag in memory.select(None)}
    return MemoryStats(
        virtual_bytes=sum(tag.virtual_bytes for tag in by_tag.values()),
        mapped_bytes=sum(tag.mapped_bytes for tag in by_tag.values()) + memory.core.dead_bytes,
        live_bytes=sum(tag.live_bytes for tag in by_tag.values()),
        host_bytes=memory.core.host_bytes,
        by_tag=by_tag,
    )


def _tag_stats(memory: Memory, tag: Tag) -> TagStats:
    infos = memory.core.segments(tag.slot)
    return TagStats(
        state=memory.state(tag.name),
        backend=tag.policy.backend,
        segments=len(infos),
        virtual_bytes=sum(info.size for info in infos),
        mapped_bytes=sum(info.mapped_bytes for info in infos),
        live_bytes=sum(_live_bytes(memory, infos)),
        backup_bytes=sum(memory.core.backup_bytes(info.id) for info in infos),
    )


def _live_bytes(memory: Memory, infos: list[SegmentInfo]) -> Iterator[int]:
    known = {} if memory.pools is None else memory.pools.live_runs(infos)  # what torch says lives in its segments
    for info in infos:
        runs = known.get(info.id)
        yield info.live_bytes if runs is None else sum(length for _, length in runs)
