"""Claims: the segments that one transition works on, held against destruction until it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ._core import SegmentInfo
from .errors import CumemError
from .memory import Memory, Tag

__all__ = ["claimed", "forget_dead"]


@contextmanager
def claimed(memory: Memory, tags: list[Tag], *, but: str) -> Iterator[list[tuple[Tag, list[SegmentInfo]]]]:
    """Holds the segments of these tags whose state is not `but`, by tag; tags without any are left out.

    Frees what has died before, and after. pre: runs alone, as a transition.

    Raises:
        DeviceBusy: before anything was claimed: what died meanwhile cannot go yet.
    """
    memory.reap()
    forget_dead(memory)
    found = [(tag, [info for info in memory.core.segments(tag.slot) if info.state != but]) for tag in tags]
    held = memory.core.claim([info.id for _, infos in found for info in infos])
    try:
        ours = set(held)
        kept = [(tag, [info for info in infos if info.id in ours]) for tag, infos in found]
        yield [(tag, infos) for tag, infos in kept if infos]
    finally:
        memory.core.unclaim(held)
        with suppress(CumemError):  # what died meanwhile and cannot go yet stays counted, for the next call
            memory.reap()


def forget_dead(memory: Memory) -> None:
    """Forgets what was parked for segments that died; the core has dropped their backups.

    Raises nothing. pre: runs alone, as a transition.
    """
    alive = {info.id for info in memory.core.segments()}
    for segment in [segment for segment in memory.parked if segment not in alive]:
        for part in memory.parked.pop(segment):
            part.backend.release(part.extents)
