"""sleep and discard as transactions.

Everything that can fail is reserved and copied before the first unmap; until then an error leaves all as it was. After
it nothing is undone: the transition goes on to its end and `SleepFailure` lists what could not follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ._core import Extent, SegmentInfo
from .backends import CpuBackend, DiscardBackend
from .backends.base import SleepModeBackend
from .claims import claimed
from .errors import FailedSegment, OutOfHostMemory, SleepFailure
from .hooks import Hooks, Transition
from .keeping import AddressRun
from .memory import Memory, Parked, Tag
from .reports import SleepReport, TagSleep
from .shield import Shield
from .transition import HookRun, Phases, add_notes, failed_segment

__all__ = ["Sleep", "discard"]


@dataclass
class _Part:
    """One tag's share of the transition."""

    tag: Tag
    dropped: bool
    segments: list[SegmentInfo]
    parked: dict[int, list[Parked]] = field(default_factory=dict)  # by segment
    copied_bytes: int = 0
    clean_bytes: int = 0

    def extents_of(self, *, kept: bool) -> list[Extent]:
        return [
            extent
            for parts in self.parked.values()
            for part in parts
            if part.backend.keeps_contents is kept
            for extent in part.extents
        ]


class Sleep:
    """One call of `sleep` or `discard`."""

    def __init__(
        self,
        memory: Memory,
        hooks: Hooks,
        tags: list[Tag],
        *,
        level: int,
        keep: list[AddressRun],
        drop_all: bool = False,
    ) -> None:
        self._memory = memory
        self._core = memory.core
        self._hooks = hooks
        self._tags = tags
        self._level = level
        self._keep = keep
        self._drop_all = drop_all
        self._phases = Phases()
        self._parts: list[_Part] = []
        # Drops what a level 2 sleep or discard() drops; saves what `keep` names in a dropped tag.
        self._dropper = DiscardBackend(memory.context)
        self._keeper = CpuBackend(memory.context)

    def __call__(self, shield: Shield[SleepReport]) -> SleepReport:
        with ExitStack() as claims:
            with self._phases("check"):
                self._memory.seal_pools(self._tags)
                # A lost one may hold pages that a failed map left behind; its contents are parked, as those of a
                # moving one.
                held = claims.enter_context(claimed(self._memory, self._tags, but="asleep"))
                self._parts = [self._plan(_Part(tag, self._is_dropped(tag), infos)) for tag, infos in held]
            return self._claimed_sleep(shield) if self._parts else self._report()

    @property
    def _claimed(self) -> list[int]:
        return sorted(info.id for part in self._parts for info in part.segments)

    def _is_dropped(self, tag: Tag) -> bool:
        reloaded = self._level == 2 and tag.policy.reloadable
        return self._drop_all or reloaded or not tag.backend.keeps_contents

    # --- planning ---

    def _plan(self, part: _Part) -> _Part:
        # A segment that an unfinished wake left "moving" or "lost" still has its contents parked: nothing of it is
        # saved again.
        whole = [info for info in part.segments if info.id not in self._memory.parked]
        live = self._memory.live_runs(whole)
        for info in whole:
            part.parked[info.id] = self._plan_segment(part, info, live[info.id])
        return part

    def _plan_segment(self, part: _Part, info: SegmentInfo, live: list[Extent]) -> list[Parked]:
        backend = part.tag.backend
        if not part.dropped:
            return [Parked(backend, live)]
        dropper: SleepModeBackend = self._dropper if backend.keeps_contents else backend
        kept = [] if self._drop_all else _overlaps(self._keep, info, live)
        return [Parked(dropper, live), *([Parked(self._keeper, kept)] if kept else [])]

    def _by_backend(self) -> list[tuple[_Part, SleepModeBackend, list[Extent]]]:
        """One batch for each tag and backend."""
        batches: list[tuple[_Part, SleepModeBackend, list[Extent]]] = []
        for part in self._parts:
            grouped: dict[int, tuple[SleepModeBackend, list[Extent]]] = {}
            for parked in (p for parts in part.parked.values() for p in parts):
                grouped.setdefault(id(parked.backend), (parked.backend, []))[1].extend(parked.extents)
            batches.extend((part, backend, extents) for backend, extents in grouped.values())
        return batches

    # --- the transaction ---

    def _claimed_sleep(self, shield: Shield[SleepReport]) -> SleepReport:
        hooks = HookRun(
            shield, self._hooks, Transition("sleep", tuple(part.tag.name for part in self._parts), self._level)
        )
        devices = sorted({info.device for part in self._parts for info in part.segments})
        try:
            with self._phases("reserve"):
                self._reserve()
            shield.checkpoint()
            with self._phases("hooks"):
                hooks.before()
            shield.checkpoint()
            with self._phases("quiesce"):
                self._memory.wait_devices(devices)
            shield.checkpoint()
            with self._phases("save"):
                self._save()
            with self._phases("wait"):
                self._memory.wait_devices(devices)  # work may have been queued while the copies ran
            shield.decide()
        except BaseException as error:
            self._release_all()
            add_notes(error, hooks.undo(), "undoing a hook failed")
            raise
        with self._phases("unmap"):
            failed = self._unmap()
        with self._phases("hooks"):
            hook_errors = hooks.after()
        if failed or hook_errors:
            raise self._failure(failed, hook_errors)
        return self._report()

    def _reserve(self) -> None:
        try:
            self._reserve_all()
        except OutOfHostMemory:
            self._release_all()
            if self._core.trim_host() == 0:
                raise
            # Kept slabs whose shape did not fit were in the way, perhaps only since part of this sleep was in them.
            self._reserve_all()

    def _reserve_all(self) -> None:
        for part, backend, extents in self._by_backend():
            try:
                backend.reserve(extents)
            except OutOfHostMemory as error:
                raise OutOfHostMemory(
                    f"tag {part.tag.name!r}: {error}; nothing was put to sleep",
                    needed_bytes=error.needed_bytes,
                    free_bytes=error.free_bytes,
                    tag=part.tag.name,
                ) from error

    def _save(self) -> None:
        for part, backend, extents in self._by_backend():
            saved = backend.save(extents)
            part.copied_bytes += saved.copied_bytes
            part.clean_bytes += saved.clean_bytes

    def _release_all(self) -> None:
        for _, backend, extents in self._by_backend():
            backend.release(extents)

    def _unmap(self) -> list[FailedSegment]:
        outcomes = {outcome.segment: outcome.error for outcome in self._core.unmap(self._claimed)}
        after = {info.id: info for part in self._parts for info in self._core.segments(part.tag.slot)}
        failed: list[FailedSegment] = []
        for part in self._parts:
            for before in part.segments:
                info = after.get(before.id, before)  # a segment that died meanwhile is no longer listed
                error = outcomes.get(before.id)
                if error is not None:
                    failed.append(failed_segment(part.tag, info, "unmap", error))
                parked = part.parked.get(before.id, [])
                if before.id in after and info.state != "resident":
                    self._memory.parked.setdefault(before.id, parked)
                    self._leave_holes(info, parked)
                else:
                    for each in parked:
                        each.backend.release(each.extents)
        return failed

    def _leave_holes(self, info: SegmentInfo, parked: list[Parked]) -> None:
        """The next wake gives pages only to what lives, if the segment's layout may change."""
        if info.state == "asleep" and parked and not info.shareable and not info.captured:
            # Everything live of a segment is in its first part.
            self._core.set_backing(info.id, [(extent.offset, extent.length) for extent in parked[0].extents])

    def _failure(self, failed: list[FailedSegment], hook_errors: list[Exception]) -> SleepFailure:
        states = {info.id: info.state for part in self._parts for info in self._core.segments(part.tag.slot)}
        by_state = {s: [i for i in self._claimed if states.get(i) == s] for s in ("asleep", "resident", "lost")}
        causes = [
            *(f"segment {f.segment} of tag {f.tag!r}: {f.error}" for f in failed),
            *(f"hook: {e}" for e in hook_errors),
        ]
        failure = SleepFailure(
            f"{len(by_state['asleep'])} segments are asleep, {len(by_state['resident'])} stayed resident, "
            f"{len(by_state['lost'])} are lost; no contents are gone; call sleep() again. Causes: {'; '.join(causes)}",
            **by_state,
            failed=failed,
        )
        failure.__cause__ = failed[0].error if failed else hook_errors[0]
        return failure

    # --- reporting ---

    def _report(self) -> SleepReport:
        by_tag = {part.tag.name: self._tag_report(part) for part in self._parts}
        return SleepReport(
            freed_bytes=sum(tag.freed_bytes for tag in by_tag.values()),
            saved_bytes=sum(tag.saved_bytes for tag in by_tag.values()),
            copied_bytes=sum(part.copied_bytes for part in self._parts),
            clean_bytes=sum(part.clean_bytes for part in self._parts),
            discarded_bytes=sum(tag.discarded_bytes for tag in by_tag.values()),
            host_bytes=self._core.host_bytes,
            seconds=self._phases.total(),
            phases=self._phases.seconds,
            by_tag=by_tag,
        )

    @staticmethod
    def _tag_report(part: _Part) -> TagSleep:
        saved = sum(extent.length for extent in part.extents_of(kept=True))
        dropped = sum(extent.length for extent in part.extents_of(kept=False))
        return TagSleep(
            backend=part.tag.policy.backend,
            dropped=part.dropped,
            segments=len(part.segments),
            freed_bytes=sum(info.mapped_bytes for info in part.segments),
            saved_bytes=saved,
            discarded_bytes=max(0, dropped - saved) if part.dropped else 0,
        )


def _overlaps(keep: Iterable[AddressRun], info: SegmentInfo, live: list[Extent]) -> list[Extent]:
    """The parts of a segment's live extents that `keep` covers: ascending, disjoint, merged."""
    runs: list[tuple[int, int]] = []
    for run in keep:
        begin, end = run.address - info.address, run.address - info.address + run.length
        for extent in live:
            low, high = max(begin, extent.offset), min(end, extent.offset + extent.length)
            if low < high:
                runs.append((low, high))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(runs):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return [Extent(info.id, low, high - low) for low, high in merged]


def forget_parked(memory: Memory, tags: Iterable[Tag]) -> dict[str, int]:
    """Drops the saved contents of the asleep segments of these tags; they wake undefined. Bytes dropped, by tag.

    pre: runs alone, as a transition.
    """
    dropper = DiscardBackend(memory.context)
    dropped: dict[str, int] = {}
    for tag in tags:
        for info in memory.core.segments(tag.slot):
            parts = memory.parked.get(info.id, [])
            # Everything live of a segment is in its first part; a second one holds what `keep` saved of it.
            keeping = [part for part in parts if part.backend.keeps_contents]
            for part in keeping:
                part.backend.release(part.extents)
                dropped[tag.name] = dropped.get(tag.name, 0) + sum(extent.length for extent in part.extents)
            if keeping:
                filler = dropper if parts[0].backend.keeps_contents else parts[0].backend
                memory.parked[info.id] = [Parked(filler, parts[0].extents)]
    return dropped


def discard(memory: Memory, hooks: Hooks, tags: list[Tag]) -> Callable[[Shield[SleepReport]], SleepReport]:
    """One call of `discard`: awake segments fall asleep without a backup, asleep ones lose theirs."""
    sleep = Sleep(memory, hooks, tags, level=1, keep=[], drop_all=True)

    def body(shield: Shield[SleepReport]) -> SleepReport:
        report = sleep(shield)  # first: it may fail, and then nothing is to be gone
        if not report.by_tag:  # nothing was awake, so nothing has decided yet
            shield.decide()
        forgotten = forget_parked(memory, tags)
        by_tag = dict(report.by_tag)
        for tag in tags:
            if tag.name in forgotten:
                old = by_tag.get(tag.name) or TagSleep(tag.policy.backend, True, 0, 0, 0, 0)
                by_tag[tag.name] = replace(old, discarded_bytes=old.discarded_bytes + forgotten[tag.name])
        total = report.discarded_bytes + sum(forgotten.values())
        return replace(report, discarded_bytes=total, host_bytes=memory.core.host_bytes, by_tag=by_tag)

    return body
