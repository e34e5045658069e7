"""What transitions and statistics report: frozen, in bytes and seconds, never tuples or dicts of unnamed numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AdoptReport", "MemoryStats", "SleepReport", "TagSleep", "TagStats", "TagWake", "WakeReport"]


@dataclass(frozen=True)
class TagSleep:
    """One tag's part in a sleep."""

    backend: str  # the policy's backend
    dropped: bool  # contents were not kept: a discard policy, or level 2 on a reloadable tag
    segments: int
    freed_bytes: int  # pages given back to the device
    saved_bytes: int  # live bytes that have a backup now
    discarded_bytes: int  # live bytes that have none


@dataclass(frozen=True)
class SleepReport:
    """What a sleep did. An empty `by_tag` means that all was asleep before."""

    freed_bytes: int
    saved_bytes: int
    copied_bytes: int  # bytes that crossed the link
    clean_bytes: int  # saved bytes whose kept backup was still true, so that they were not copied
    discarded_bytes: int
    host_bytes: int  # host memory held for backups, afterwards
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase; they sum to at most `seconds`
    by_tag: dict[str, TagSleep] = field(default_factory=dict)

    @property
    def dropped_tags(self) -> list[str]:
        """Tags whose contents were not kept."""
        return [tag for tag, part in self.by_tag.items() if part.dropped]

    @property
    def saved_tags(self) -> list[str]:
        """Tags whose contents were kept."""
        return [tag for tag, part in self.by_tag.items() if not part.dropped]


@dataclass(frozen=True)
class TagWake:
    """One tag's part in a wake."""

    segments: int
    mapped_bytes: int
    copied_bytes: int
    zeroed_bytes: int


@dataclass(frozen=True)
class WakeReport:
    """What a wake did. An empty `by_tag` means that all was awake before."""

    mapped_bytes: int
    copied_bytes: int
    zeroed_bytes: int  # bytes filled with zeros or with poison
    undefined_tags: list[str]  # of the tags woken: those whose contents nobody restored
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    by_tag: dict[str, TagWake] = field(default_factory=dict)


@dataclass(frozen=True)
class TagStats:
    """One tag's memory now."""

    state: str  # "resident", "asleep", "moving", "lost", "mixed" or "empty"
    backend: str
    segments: int
    virtual_bytes: int
    mapped_bytes: int
    live_bytes: int
    backup_bytes: int  # of its backups


@dataclass(frozen=True)
class MemoryStats:
    """The allocator's own ledger; other processes and native memory are not in it."""

    virtual_bytes: int  # reserved addresses
    mapped_bytes: int  # pages on the device
    live_bytes: int  # bytes of live tensors, wherever they are
    host_bytes: int  # host memory held for backups, used or not
    by_tag: dict[str, TagStats] = field(default_factory=dict)


@dataclass(frozen=True)
class AdoptReport:
    """What `adopt` moved."""

    tensors: int  # distinct tensors found
    storages: int  # distinct storages moved
    bytes: int  # of those storages
    already: int  # tensors that were in the tag before
    segments: int  # segments made
    peak_extra_bytes: int  # the most that old and new storages held together above the final state
