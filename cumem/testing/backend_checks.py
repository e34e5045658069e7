"""What every `SleepModeBackend` must do, one function a law. Each raises `AssertionError` with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..backends.base import BackendFactory, Restored, Saved, SleepModeBackend
from ..errors import InvalidArgument
from .bench import Bench, Subject, demand
from .faults import FOR_EVER, Fault
from .layouts import LARGE, LAYOUTS, SMALL, Layout

__all__ = ["CHECKS", "Candidate"]


@dataclass(frozen=True)
class Candidate:
    """The factory under test and its options."""

    factory: BackendFactory
    options: dict[str, Any]

    @contextmanager
    def on(self, layout: Layout, *, host_budget_bytes: int | None = None) -> Iterator[tuple[Bench, Subject]]:
        """A backend over a fresh bench. Afterwards, unless something failed, no host memory may be in use."""
        bench = Bench(layout, host_budget_bytes=host_budget_bytes)
        try:
            yield bench, Subject(bench, self.factory, self.options)
        except AssertionError as error:
            raise AssertionError(f"{error} (with {layout.name})") from error
        bench.end()


def it_has_what_the_protocol_asks_for(candidate: Candidate) -> None:
    with candidate.on(SMALL) as (_, subject):
        backend = subject.backend
        demand(isinstance(backend, SleepModeBackend), f"{backend!r} lacks something that SleepModeBackend has")
        demand(isinstance(backend.name, str) and backend.name != "", f"name is {backend.name!r}, no name")
        for flag in ("keeps_contents", "survives_process", "preserves_graphs"):
            value = getattr(backend, flag)
            demand(isinstance(value, bool), f"{flag} is {value!r}; it must be True or False")
        kept_for_graphs = backend.keeps_contents or not backend.preserves_graphs
        demand(kept_for_graphs, "preserves_graphs is True, but contents are not kept: graphs would replay on garbage")


def unknown_options_are_refused(candidate: Candidate) -> None:
    bench = Bench(SMALL)
    try:
        candidate.factory(bench.context, **candidate.options, no_such_option=1)
    except (InvalidArgument, TypeError):
        bench.end()
        return
    raise AssertionError("the factory took the option no_such_option=1; unknown options must raise InvalidArgument")


def contents_come_back_in_every_shape(candidate: Candidate) -> None:
    for layout in LAYOUTS:
        with candidate.on(layout) as (bench, subject):
            _cycle(bench, subject, "first")
            _cycle(bench, subject, "second")  # reserves again what was released


def what_is_larger_than_a_copy_chunk_comes_back(candidate: Candidate) -> None:
    with candidate.on(LARGE) as (bench, subject):
        _cycle(bench, subject, "first")


def _cycle(bench: Bench, subject: Subject, seed: object) -> None:
    bench.write(seed)
    subject.reserve(bench.extents)
    _check_saved(bench, subject.save(bench.extents))
    changed = bench.wrong(seed)
    demand(not changed, f"save changed {changed[:1]} on the device")
    bench.lose()
    restored = subject.restore(bench.extents)
    demand(not bench.spilled(), "restore wrote outside of its extents")
    _check_restored(bench, subject, restored, seed=seed)
    subject.release(bench.extents)


def _check_saved(bench: Bench, saved: Saved) -> None:
    total = sum(extent.length for extent in bench.extents)
    moved = saved.copied_bytes + saved.clean_bytes
    possible = saved.copied_bytes >= 0 and saved.clean_bytes >= 0 and moved <= total
    demand(possible, f"{saved} of {total} bytes: more than there are, or less than none")


def _check_restored(bench: Bench, subject: Subject, restored: Restored, *, seed: object) -> None:
    total = sum(extent.length for extent in bench.extents)
    possible = restored.copied_bytes >= 0 and restored.zeroed_bytes >= 0 and restored.copied_bytes <= total
    demand(possible, f"{restored} of {total} bytes: more than there are, or less than none")
    if subject.backend.keeps_contents:
        demand(restored.defined, "keeps_contents is True, but restore says that contents are not defined")
        wrong = bench.wrong(seed)
        demand(not wrong, f"contents of {wrong[:1]} did not come back ({len(wrong)} of {len(bench.extents)} extents)")
    elif restored.zeroed_bytes == total > 0:
        values = {byte for extent in bench.extents for byte in set(bench.read(extent))}
        demand(len(values) == 1, f"restore says that it filled all {total} bytes, but they hold {len(values)} values")


def restore_can_be_called_again(candidate: Candidate) -> None:
    with candidate.on(SMALL) as (bench, subject):
        _fall_asleep(bench, subject, "saved")
        for _ in range(3):
            bench.lose()
            restored = subject.restore(bench.extents)
            _check_restored(bench, subject, restored, seed="saved")
        subject.release(bench.extents)


def a_part_can_be_restored_and_released_alone(candidate: Candidate) -> None:
    for layout in (SMALL, next(layout for layout in LAYOUTS if layout.name == "many segments")):
        with candidate.on(layout) as (bench, subject):
            _fall_asleep(bench, subject, "saved")
            bench.lose()
            first, rest = bench.extents[:1], bench.extents[1:]
            for extent in reversed(bench.extents):
                subject.restore([extent])
            _demand_kept(bench, subject, "saved", "after each was restored alone, last first")
            subject.release(first)
            bench.lose()
            subject.restore(rest)
            wrong = bench.wrong("saved", rest) if subject.backend.keeps_contents else []
            demand(not wrong, f"releasing {first} took {wrong[:1]} with it")
            subject.release(rest)


def what_is_saved_again_is_new(candidate: Candidate) -> None:
    with candidate.on(SMALL) as (bench, subject):
        _fall_asleep(bench, subject, "old")
        subject.release(bench.extents)  # the sleep was aborted
        bench.write("new")
        subject.reserve(bench.extents)
        subject.save(bench.extents)
        bench.write("newest")
        subject.save(bench.extents)
        bench.lose()
        subject.restore(bench.extents)
        _demand_kept(bench, subject, "newest", "after they had been saved twice and changed between")
        subject.release(bench.extents)


def release_takes_anything(candidate: Candidate) -> None:
    with candidate.on(SMALL) as (bench, subject):
        subject.release([])
        subject.release(bench.extents)  # never reserved
        subject.reserve(bench.extents)
        subject.release(bench.extents)  # reserved, never saved
        _fall_asleep(bench, subject, "saved")
        subject.release(bench.extents[:1])
        subject.release(bench.extents)  # some of them released before
        subject.release(bench.extents)
        _fall_asleep(bench, subject, "again")
        bench.lose()
        subject.restore(bench.extents)
        _demand_kept(bench, subject, "again", "after a release of what had been released")
        subject.release(bench.extents)


def two_tags_do_not_mix(candidate: Candidate) -> None:
    with candidate.on(SMALL) as (bench, subject):
        other = Subject(bench, candidate.factory, candidate.options)
        mine, others = bench.extents[:1], bench.extents[1:]
        bench.write("saved")
        for each, extents in ((subject, mine), (other, others)):
            each.reserve(extents)
            each.save(extents)
        bench.lose()
        other.restore(others)
        other.release(others)
        subject.restore(mine)
        _demand_kept(bench, subject, "saved", "of two backends in turn")
        subject.release(mine)


def a_reserve_that_fails_leaves_nothing(candidate: Candidate) -> None:
    whole = Layout("8 MiB, of which 1 may be held", (1 << 20,) * 8, tuple((i, 0, 1 << 20) for i in range(8)))
    with candidate.on(whole, host_budget_bytes=1 << 20) as (bench, subject):
        error = subject.error_of("reserve", bench.extents)
        if error is None:
            bench.write("saved")
            subject.save(bench.extents)
            bench.lose()
            subject.restore(bench.extents)
            _demand_kept(bench, subject, "saved", "without host memory in the core's arena")
            subject.release(bench.extents)
        else:
            used = bench.core.host_used_bytes
            demand(used == 0, f"reserve raised {type(error).__name__} but holds {used} bytes: it is all or nothing")
            subject.release(bench.extents)


def a_failed_copy_is_told_and_leaves_it_usable(candidate: Candidate) -> None:
    for method in ("save", "restore"):
        for times in (1, FOR_EVER):
            number = 0
            while _survives(candidate, method, Fault(number, times=times)):
                number += 1


def _survives(candidate: Candidate, method: str, fault: Fault) -> bool:
    """Whether the fault met the method: then it was told of, or made no difference."""
    with candidate.on(SMALL) as (bench, subject):
        bench.write("saved")
        subject.reserve(bench.extents)
        if method == "restore":
            subject.save(bench.extents)
            bench.lose()
        bench.driver.clear()
        fault.arm(bench.driver)
        error = subject.error_of(method, bench.extents)
        met = bench.driver.failed > 0
        bench.driver.clear()
        demand(error is None or isinstance(error, Exception), f"{method} raised {error!r}, which is no Exception")
        demand(met or error is None, f"{method} raised {error!r} by itself")
        if method == "save":
            if error is not None:
                subject.release(bench.extents)
                subject.reserve(bench.extents)
                subject.save(bench.extents)
            bench.lose()
        if method == "save" or error is not None:
            subject.restore(bench.extents)
        silent = "which it did not raise" if error is None else f"which it raised as {type(error).__name__}"
        _demand_kept(bench, subject, "saved", f"after a driver call failed in {method} ({fault}), {silent}")
        subject.release(bench.extents)
    return met


def _fall_asleep(bench: Bench, subject: Subject, seed: object) -> None:
    bench.write(seed)
    subject.reserve(bench.extents)
    subject.save(bench.extents)


def _demand_kept(bench: Bench, subject: Subject, seed: object, when: str) -> None:
    wrong = bench.wrong(seed) if subject.backend.keeps_contents else []
    demand(not wrong, f"contents of {wrong[:1]} are wrong {when}")


CHECKS: tuple[Callable[[Candidate], None], ...] = (
    it_has_what_the_protocol_asks_for,
    unknown_options_are_refused,
    contents_come_back_in_every_shape,
    restore_can_be_called_again,
    a_part_can_be_restored_and_released_alone,
    what_is_saved_again_is_new,
    release_takes_anything,
    two_tags_do_not_mix,
    a_reserve_that_fails_leaves_nothing,
    a_failed_copy_is_told_and_leaves_it_usable,
    what_is_larger_than_a_copy_chunk_comes_back,
)
