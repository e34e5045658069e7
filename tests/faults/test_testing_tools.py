"""The tools themselves: a matrix finds what is wrong with an operation, and errors are told apart."""

import gc

import pytest

from cumem import _core
from cumem.errors import (
    CumemError,
    DeviceBusy,
    DriverError,
    FailedSegment,
    OutOfDeviceMemory,
    SleepFailure,
    WakeUpPartialFailure,
)
from cumem.testing import CODES, FOR_EVER, Fault, FaultMatrix, cause_of, faulty, pattern, says

GRANULE = 2 << 20


class Pages:
    """A world without an allocator: handles of a driver, which its operations make and give back."""

    def __init__(self, driver):
        self.driver = driver
        self.core = _core.Core(driver)
        self.slot = self.core.create_slot()
        self.addresses = []

    def make(self):
        self.addresses.append(self.core.malloc(self.slot, GRANULE, 0))

    def end(self):
        for address in self.addresses:
            self.core.free(address)
        self.core.reap()
        assert self.driver.counts().handles == 0, "handles are left"


def nothing_more(world, operation, hit):
    """A check that finds nothing."""


def test_a_matrix_runs_each_call_in_a_world_of_its_own():
    worlds, hits = [], []

    def begin(driver):
        worlds.append(Pages(driver))
        return worlds[-1]

    matrix = FaultMatrix(begin, lambda world, operation, hit: hits.append(hit), Pages.end)
    matrix.operation("make")(Pages.make)
    assert matrix.names == ["make"]
    calls = matrix.calls("make")
    assert {"reserve", "create", "map", "set_access"} <= set(calls)
    assert matrix.run("make") == len(calls)
    assert len(worlds) == 1 + 1 + len(calls)  # two to count
    assert [hit.call for hit in hits] == calls
    assert [hit.fault.call for hit in hits] == list(range(len(calls)))
    assert all(says(hit.error, "driver") for hit in hits)


def test_prepare_and_done_are_not_disturbed():
    seen = []

    def done(world):
        seen.append(world.driver.calls)

    matrix = FaultMatrix(Pages, nothing_more, Pages.end)
    matrix.operation("make", prepare=Pages.make, done=done)(Pages.make)
    calls = matrix.calls("make")
    seen.clear()
    assert matrix.run_all("make", codes=CODES) == len(calls) * len(CODES) * 2
    assert seen == [calls] * len(CODES) * 2


def test_a_matrix_tells_of_a_leak_with_the_call_that_failed():
    def leaking(world):
        first = world.core.malloc(world.slot, GRANULE, 0)
        second = world.core.malloc(world.slot, GRANULE, 0)
        world.addresses += [first, second]

    matrix = FaultMatrix(Pages, nothing_more, Pages.end)
    matrix.operation("leaking")(leaking)
    with pytest.raises(AssertionError, match=r"leaking with driver at driver call \d+, once .*handles are left"):
        matrix.run("leaking")


def test_a_matrix_tells_of_a_check_that_fails_and_of_what_the_operation_did():
    def check(world, operation, hit):
        assert hit.call != "map", "the map was not undone"

    matrix = FaultMatrix(Pages, check, Pages.end)
    matrix.operation("make")(Pages.make)
    with pytest.raises(AssertionError, match=r"make with .*, once \(map\): it raised DriverError.*was not undone"):
        matrix.run("make")


def test_a_matrix_refuses_an_operation_whose_calls_differ_between_runs():
    runs = []

    def once(world):
        runs.append(world)
        if len(runs) == 1:
            world.make()

    matrix = FaultMatrix(Pages, nothing_more, Pages.end)
    matrix.operation("once")(once)
    with pytest.raises(AssertionError, match="the operation's calls differ between two runs"):
        matrix.run("once")


def test_an_operation_that_fails_by_itself_is_told_before_any_fault():
    matrix = FaultMatrix(Pages, nothing_more, Pages.end)

    @matrix.operation("wrong")
    def wrong(world):
        raise RuntimeError("wrong by itself")

    with pytest.raises(RuntimeError, match="wrong by itself"):
        matrix.run("wrong")


def test_a_name_is_registered_once_and_another_check_sees_the_same_operations():
    matrix = FaultMatrix(Pages, nothing_more, Pages.end)
    other = matrix.with_check(nothing_more)
    matrix.operation("make")(Pages.make)
    assert other.names == ["make"]
    with pytest.raises(ValueError, match="'make' is registered already"):
        other.operation("make")(Pages.make)


def test_what_an_error_held_is_gone_before_the_end_looks_for_leaks():
    class Held:
        alive = 0

        def __init__(self):
            Held.alive += 1

        def __del__(self):
            Held.alive -= 1

    def holding(world):
        held = Held()
        world.make()
        del held

    def end(world):
        gc.collect()
        assert Held.alive == 0, "the error's frames hold it"
        world.end()

    matrix = FaultMatrix(Pages, nothing_more, end)
    matrix.operation("holding")(holding)
    assert matrix.run("holding") > 0


# --- faults and errors ---


def test_faulty_takes_a_name_with_host_options_or_a_driver():
    driver = faulty(device_count=3, device_bytes=8 << 20, granularity_bytes=1 << 20)
    assert driver.device_count() == 3
    assert driver.memory_info(0) == (8 << 20, 8 << 20)
    assert faulty("host").name == "host"
    assert faulty(_core.host_driver(device_count=1)).device_count() == 1
    with pytest.raises(TypeError, match="device_count"):
        faulty(_core.host_driver(), device_count=1)


@pytest.mark.parametrize("code", [*CODES, "context_broken"])
def test_says_knows_the_error_of_each_code_and_of_no_other(code):
    driver = faulty()
    Fault(0, code).arm(driver)
    with pytest.raises(CumemError) as error:
        _core.Core(driver).malloc(1, GRANULE, 0)
    assert [other for other in (*CODES, "context_broken") if says(error.value, other)] == [code]


def test_says_looks_below_failures_of_transitions():
    cause = OutOfDeviceMemory("full", needed_bytes=1, free_bytes=0)
    failed = FailedSegment("t", 1, 0, 1, 0, "map", "asleep", cause)
    wake = WakeUpPartialFailure("some failed", failed=[failed], woken=[], first_exception=cause, rolled_back=False)
    sleep = SleepFailure("some failed", asleep=[], resident=[1], lost=[], failed=[failed])
    assert cause_of(wake) is cause
    assert cause_of(sleep) is cause
    assert says(wake, "out_of_device_memory")
    assert not says(wake, "driver")
    assert not says(ValueError("not ours"), "driver")
    assert cause_of(DeviceBusy("busy")).args == ("busy",)
    assert not says(DriverError("lost", call="map", code=1, context_broken=True), "driver")


def test_a_fault_says_what_it_does():
    assert str(Fault(3)) == "driver at driver call 3, once"
    assert str(Fault(0, "busy", 2, "map")) == "busy at map call 0, 2 times"
    assert str(Fault(1, times=FOR_EVER)) == "driver at driver call 1, for ever"


def test_patterns_are_exact_and_differ_by_seed():
    assert pattern(3 << 20, "a") == pattern(3 << 20, "a")
    assert len(pattern(3 << 20, "a")) == 3 << 20
    assert pattern(0, "a") == b""
    assert pattern(100, "a") == pattern(1000, "a")[:100]
    assert pattern(100, "a") != pattern(100, "b")
    assert pattern(100, 1) != pattern(100, "1")
