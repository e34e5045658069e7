"""wake_up as a transaction.

Room is checked before anything is mapped. Each segment then wakes by itself: one that fails stays asleep with its
backup while the others go on, and `WakeUpPartialFailure` lists it. Backups are released only after the whole
transition has committed, and only what this call mapped is ever unmapped.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from . import torch_glue
from ._core import SegmentInfo
from .backends.base import Restored
from .claims import claimed
from .errors import CumemError, FailedSegment, OutOfDeviceMemory, WakeUpPartialFailure
from .hooks import Hooks, Transition
from .memory import Memory, Parked, Tag
from .reports import TagWake, WakeReport
from .shield import Shield
from .transition import HookRun, Phases, add_notes, failed_segment

__all__ = ["Wake"]


@dataclass
class _Part:
    """One tag's share of the transition."""

    tag: Tag
    segments: list[SegmentInfo]
    woken: set[int] = field(default_factory=set)
    copied_bytes: int = 0
    zeroed_bytes: int = 0
    undefined: bool = False

    def add(self, restored: Restored) -> None:
        self.copied_bytes += restored.copied_bytes
        self.zeroed_bytes += restored.zeroed_bytes
        self.undefined = self.undefined or not restored.defined


class Wake:
    """One call of `wake_up`."""

    def __init__(self, memory: Memory, hooks: Hooks, tags: list[Tag], *, restore: bool, rollback: bool) -> None:
        self._memory = memory
        self._core = memory.core
        self._hooks = hooks
        self._tags = tags
        self._restore = restore
        self._rollback = rollback
        self._phases = Phases()
        self._parts: list[_Part] = []
        self._failed: dict[int, tuple[str, Exception]] = {}  # segment -> (phase, error)

    def __call__(self, shield: Shield[WakeReport]) -> WakeReport:
        with ExitStack() as claims:
            with self._phases("check"):
                held = claims.enter_context(claimed(self._memory, self._tags, but="resident"))
                self._parts = [_Part(tag, infos) for tag, infos in held]
            return self._claimed_wake(shield) if self._parts else self._report()

    @property
    def _claimed(self) -> list[int]:
        return [info.id for part in self._parts for info in part.segments]

    # --- the transaction ---

    def _claimed_wake(self, shield: Shield[WakeReport]) -> WakeReport:
        hooks = HookRun(shield, self._hooks, Transition("wake_up", tuple(part.tag.name for part in self._parts), 0))
        devices = sorted({info.device for part in self._parts for info in part.segments})
        try:
            with self._phases("preflight"):
                self._preflight()
            shield.checkpoint()
            with self._phases("hooks"):
                hooks.before()
            shield.checkpoint()
            with self._phases("quiesce"):
                self._memory.wait_devices(devices)
            shield.decide()
        except BaseException as error:
            add_notes(error, hooks.undo(), "undoing a hook failed")
            raise
        with self._phases("map"):
            self._map()
        if not (self._failed and self._rollback):
            with self._phases("restore"):
                self._restore_all()
        if self._failed and self._rollback:
            self._unmap_woken()
        self._commit()
        if not any(part.woken for part in self._parts):
            with self._phases("hooks"):
                undo_errors = hooks.undo()
            raise self._failure(undo_errors)
        with self._phases("hooks"):
            hook_errors = hooks.after()
        if self._failed or hook_errors:
            raise self._failure(hook_errors)
        return self._report()

    def _preflight(self) -> None:
        """Raises `OutOfDeviceMemory` before anything changes if a device has less free than this call maps."""
        # What a map that failed could not take back holds pages that this call needs. A failure shows in the map.
        self._core.unmap([info.id for part in self._parts for info in part.segments if info.state == "lost"])
        if self._short_of() is not None:
            torch_glue.empty_cache()
        short = self._short_of()
        if short is None:
            return
        device, needed, free = short
        idle = torch_glue.idle_cache_bytes(device)
        tags = sorted({part.tag.name for part in self._parts for info in part.segments if info.device == device})
        raise OutOfDeviceMemory(
            f"waking {tags} needs {needed >> 20} MiB on device {device}, {free >> 20} MiB are free (torch caches "
            f"{idle >> 20} MiB idly); nothing was woken: free device memory, or wake fewer tags",
            needed_bytes=needed,
            free_bytes=free,
            device=device,
            tag=tags[0],
            idle_cache_bytes=idle,
        )

    def _short_of(self) -> tuple[int, int, int] | None:
        """(device, needed, free) of the first device that has too little."""
        needed: dict[int, int] = {}
        for part in self._parts:
            for info in part.segments:
                if info.state != "moving":  # mapped by a wake that did not end
                    needed[info.device] = needed.get(info.device, 0) + info.backing_bytes
        for device, need in sorted(needed.items()):
            free, _ = self._core.memory_info(device)
            if need > free:
                return device, need, free
        return None

    def _map(self) -> None:
        errors = {outcome.segment: outcome.error for outcome in self._core.map(self._claimed)}
        for part in self._parts:
            for info in part.segments:
                error = errors.get(info.id)
                if error is not None:
                    self._failed[info.id] = ("map", error)
                else:
                    part.woken.add(info.id)

    # --- contents ---

    def _restore_all(self) -> None:
        for part in self._parts:
            if not self._restore:
                part.undefined = part.undefined or bool(part.woken)
                continue
            batch = {segment: self._memory.parked.get(segment, []) for segment in part.woken}
            try:
                part.add(self._restore_batch([parked for parts in batch.values() for parked in parts]))
            except Exception:
                self._restore_one_by_one(part, batch)
        self._unmap_failed()

    @staticmethod
    def _restore_batch(parked: list[Parked]) -> Restored:
        """One call a backend; what drops contents fills first, since what was kept may lie inside."""
        copied = zeroed = 0
        defined = True
        grouped: dict[int, list[Parked]] = {}
        for part in parked:
            grouped.setdefault(id(part.backend), []).append(part)
        for parts in sorted(grouped.values(), key=lambda parts: parts[0].backend.keeps_contents):
            restored = parts[0].backend.restore([extent for part in parts for extent in part.extents])
            copied += restored.copied_bytes
            zeroed += restored.zeroed_bytes
            defined = defined and restored.defined
        return Restored(copied, zeroed, defined)

    def _restore_one_by_one(self, part: _Part, batch: dict[int, list[Parked]]) -> None:
        """After a batch failed: finds the segments that can be restored."""
        for segment, parked in batch.items():
            try:
                part.add(self._restore_batch(parked))
            except Exception as error:
                self._failed[segment] = ("restore", error)
                part.woken.discard(segment)

    def _unmap_failed(self) -> None:
        failed = [segment for segment, (phase, _) in self._failed.items() if phase == "restore"]
        if failed:
            self._put_back(failed)

    def _unmap_woken(self) -> None:
        """Rollback: takes back what this call mapped; the backups are untouched."""
        self._put_back([segment for part in self._parts for segment in part.woken])
        for part in self._parts:
            part.woken.clear()

    def _put_back(self, segments: list[int]) -> None:
        try:
            self._memory.wait_devices(sorted({info.device for part in self._parts for info in part.segments}))
        except CumemError as error:
            # Pages under work that does not end are not pulled away: they stay mapped, "moving", and wake at the
            # next call.
            for segment in segments:
                self._failed.setdefault(segment, ("restore", error))
            return
        for outcome in self._core.unmap(segments):
            if outcome.error is not None:
                self._failed.setdefault(outcome.segment, ("unmap", outcome.error))

    def _commit(self) -> None:
        """Woken segments become resident; then their backups go."""
        memory = self._memory
        for part in self._parts:
            self._core.settle(sorted(part.woken))
            for segment in part.woken:
                for parked in memory.parked.pop(segment, []):
                    parked.backend.release(parked.extents)
            if part.undefined and part.woken:
                memory.undefined.add(part.tag.name)

    # --- reporting ---

    def _failure(self, hook_errors: list[Exception]) -> WakeUpPartialFailure:
        failed = self._failed_segments()
        woken = [p.tag.name for p in self._parts if p.woken and len(p.woken) == len(p.segments)]
        causes = [*(f"segment {f.segment} of tag {f.tag!r} ({f.phase}): {f.error}" for f in failed)]
        causes += [f"hook: {error}" for error in hook_errors]
        first = failed[0].error if failed else hook_errors[0]
        error = WakeUpPartialFailure(
            f"{len(failed)} of {len(self._claimed)} segments could not be woken and are asleep with their backups"
            f"{'; this call was rolled back' if self._rollback else ''}; awake: {woken}. Make room and call retry(). "
            f"Causes: {'; '.join(causes)}",
            failed=failed,
            woken=woken,
            first_exception=first,
            rolled_back=self._rollback and bool(failed),
        )
        error.__cause__ = first
        return error

    def _failed_segments(self) -> list[FailedSegment]:
        after = {info.id: info for part in self._parts for info in self._core.segments(part.tag.slot)}
        return [
            failed_segment(part.tag, after.get(before.id, before), *self._failed[before.id])
            for part in self._parts
            for before in part.segments
            if before.id in self._failed
        ]

    def _report(self) -> WakeReport:
        by_tag = {
            part.tag.name: TagWake(
                segments=len(part.segments),
                mapped_bytes=sum(info.backing_bytes for info in part.segments),
                copied_bytes=part.copied_bytes,
                zeroed_bytes=part.zeroed_bytes,
            )
            for part in self._parts
        }
        return WakeReport(
            mapped_bytes=sum(tag.mapped_bytes for tag in by_tag.values()),
            copied_bytes=sum(tag.copied_bytes for tag in by_tag.values()),
            zeroed_bytes=sum(tag.zeroed_bytes for tag in by_tag.values()),
            undefined_tags=[part.tag.name for part in self._parts if part.tag.name in self._memory.undefined],
            seconds=self._phases.total(),
            phases=self._phases.seconds,
            by_tag=by_tag,
        )
