"""The timeline holds what the ledger said, in order, and hides no failure."""

from __future__ import annotations

import threading

import pytest

from cumem.cli.timeline import Timeline
from cumem.reports import MemoryStats, TagStats


class Ledger:
    """Counts how often it is asked; the count is what it reports as mapped."""

    def __init__(self) -> None:
        self.asked = 0
        self.asked_often = threading.Event()
        self.fail_off_thread = False

    def stats(self) -> MemoryStats:
        if self.fail_off_thread and threading.current_thread() is not threading.main_thread():
            self.asked_often.set()
            raise RuntimeError("no ledger")
        self.asked += 1
        if self.asked > 5:
            self.asked_often.set()
        part = TagStats("resident", "cpu", 1, self.asked, self.asked, self.asked, 0)
        return MemoryStats(self.asked, self.asked, self.asked, 7, {"weights": part})


def test_a_phase_is_sampled_at_its_begin_and_its_end() -> None:
    ledger = Ledger()
    timeline = Timeline(ledger.stats)
    with timeline.phase("one"):
        assert ledger.asked == 1
    assert ledger.asked == 2
    assert [phase.name for phase in timeline.phases] == ["one"]
    first, last = timeline.samples
    assert first.mapped_bytes == {"weights": 1}
    assert last.host_bytes == 7
    phase = timeline.phases[0]
    assert first.seconds <= phase.begin_s <= last.seconds <= phase.end_s
    assert phase.seconds == phase.end_s - phase.begin_s


def test_a_watched_phase_is_sampled_while_it_runs_and_in_order() -> None:
    ledger = Ledger()
    timeline = Timeline(ledger.stats, interval_s=0.0001)
    with timeline.phase("long", watch=True):
        assert ledger.asked_often.wait(30)
    counts = [sample.mapped_bytes["weights"] for sample in timeline.samples]
    assert counts == list(range(1, len(counts) + 1))
    times = [sample.seconds for sample in timeline.samples]
    assert times == sorted(times)


def test_a_failure_of_the_sampling_thread_is_raised_where_the_phase_ends() -> None:
    ledger = Ledger()
    ledger.fail_off_thread = True
    timeline = Timeline(ledger.stats, interval_s=0.0001)
    with pytest.raises(RuntimeError, match="no ledger"), timeline.phase("long", watch=True):
        assert ledger.asked_often.wait(30)
    assert timeline.phases == []


def test_a_phase_that_raises_is_not_recorded_and_leaves_no_thread() -> None:
    timeline = Timeline(Ledger().stats)
    with pytest.raises(KeyError), timeline.phase("bad", watch=True):
        raise KeyError("x")
    assert timeline.phases == []
    assert "cumem-timeline" not in {thread.name for thread in threading.enumerate()}
