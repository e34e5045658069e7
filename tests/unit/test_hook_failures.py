"""A hook that fails, at every place: which others run or are undone, and what state is left."""

import pytest

import cumem
from unit.hook_log import with_log
from unit.machine import faulty_driver

# --- what fails before memory has moved ---


def test_a_hook_that_fails_before_a_sleep_undoes_those_that_ran_last_first():
    allocator, sample, log = with_log(driver := faulty_driver())
    log.add("one", "before_sleep", "after_wake")
    log.add("two", "before_sleep")
    log.add("three", "before_sleep", "before_wake")
    log.add("bad", "before_sleep", "before_wake", fails="before_sleep")
    log.add("never", "before_sleep", "before_wake")
    log.add("after", "after_sleep", "before_wake")
    with pytest.raises(ValueError, match="bad fails"):
        allocator.sleep()
    assert log.take() == [
        *(f"{name} before_sleep" for name in ("one", "two", "three", "bad")),
        "three before_wake undo",
        "one after_wake undo",
    ]
    assert allocator.state() == "resident"
    assert "unmap" not in driver.calls
    assert allocator.stats().by_tag["weights"].backup_bytes == 0
    sample.check()
    allocator.hooks.unregister("bad")
    allocator.sleep()
    allocator.wake_up()
    sample.check()


def test_a_hook_that_fails_before_a_wake_undoes_those_that_ran_last_first():
    allocator, sample, log = with_log(driver := faulty_driver())
    log.add("never", "before_sleep", "before_wake")
    log.add("bad", "before_sleep", "before_wake", fails="before_wake")
    log.add("up", "before_wake")
    log.add("three", "after_sleep", "before_wake")
    log.add("four", "before_sleep", "before_wake")
    allocator.sleep()
    log.take()
    driver.clear()
    with pytest.raises(ValueError, match="bad fails"):
        allocator.wake_up()
    assert log.take() == [
        *(f"{name} before_wake" for name in ("four", "three", "up", "bad")),
        "three after_sleep undo",
        "four before_sleep undo",
    ]
    assert allocator.state() == "asleep"
    assert "map" not in driver.calls
    allocator.hooks.unregister("bad")
    allocator.wake_up()
    sample.check()


@pytest.mark.parametrize("call", ["synchronize", "copy_to_host"])
def test_hooks_are_undone_when_the_sleep_fails_after_them(call):
    allocator, sample, log = with_log(driver := faulty_driver())
    log.add("one", "before_sleep", "before_wake")
    log.add("two", "before_sleep", "after_wake")
    log.add("after", "after_sleep", "after_wake")
    driver.fail_at(0, only=call)
    with pytest.raises(cumem.DriverError):
        allocator.sleep()
    assert log.take() == ["one before_sleep", "two before_sleep", "two after_wake undo", "one before_wake undo"]
    assert allocator.state() == "resident"
    sample.check()


def test_hooks_are_undone_when_nothing_wakes():
    allocator, sample, log = with_log(driver := faulty_driver())
    log.add("one", "before_sleep", "before_wake")
    log.add("two", "after_sleep", "before_wake")
    log.add("after", "before_sleep", "after_wake")
    allocator.sleep()
    log.take()
    driver.fail_at(0, only="create", times=2)
    with pytest.raises(cumem.WakeUpPartialFailure):
        allocator.wake_up()
    assert log.take() == ["two before_wake", "one before_wake", "one before_sleep undo", "two after_sleep undo"]
    assert allocator.state() == "asleep"
    allocator.wake_up()
    sample.check()


def test_an_undo_that_fails_keeps_the_others_from_nothing_and_is_told():
    allocator, sample, log = with_log()
    log.add("one", "before_sleep", "before_wake")
    log.add("two", "before_sleep", "before_wake", fails="before_wake", error=RuntimeError)
    log.add("three", "before_sleep", "before_wake")
    log.add("bad", "before_sleep", fails="before_sleep")
    with pytest.raises(ValueError, match="bad fails") as caught:
        allocator.sleep()
    assert log.take()[-3:] == ["three before_wake undo", "two before_wake undo", "one before_wake undo"]
    if hasattr(caught.value, "__notes__"):
        assert any("RuntimeError: two fails" in note for note in caught.value.__notes__)
    sample.check()


# --- what fails after memory has moved ---


def test_a_hook_that_fails_after_a_sleep_leaves_all_asleep_and_the_other_hooks_run():
    allocator, sample, log = with_log()
    log.add("one", "after_sleep")
    log.add("bad", "after_sleep", fails="after_sleep")
    log.add("three", "after_sleep")
    with pytest.raises(cumem.SleepFailure, match="bad fails") as caught:
        allocator.sleep()
    assert log.take() == ["one after_sleep", "bad after_sleep", "three after_sleep"]
    assert (len(caught.value.asleep), caught.value.resident, caught.value.lost, caught.value.failed) == (1, [], [], [])
    assert isinstance(caught.value.__cause__, ValueError)
    assert allocator.state() == "asleep"
    allocator.hooks.unregister("bad")
    allocator.wake_up()
    sample.check()


def test_a_hook_that_fails_after_a_wake_leaves_all_awake_and_the_other_hooks_run():
    allocator, sample, log = with_log()
    for name in ("one", "bad", "three"):
        log.add(name, "after_wake", fails="after_wake" if name == "bad" else None)
    allocator.sleep()
    with pytest.raises(cumem.WakeUpPartialFailure, match="bad fails") as caught:
        allocator.wake_up()
    assert log.take() == ["three after_wake", "bad after_wake", "one after_wake"]
    assert (caught.value.failed, caught.value.woken, caught.value.rolled_back) == ([], ["weights"], False)
    assert isinstance(caught.value.first_exception, ValueError)
    assert allocator.state() == "resident"
    sample.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("spot", ["before_sleep", "after_sleep", "before_wake", "after_wake"])
def test_ctrl_c_in_a_hook_reaches_the_caller_and_every_other_hook_still_runs_or_is_undone(spot, error):
    allocator, sample, log = with_log()
    down, up = ("before_sleep", "before_wake") if spot.startswith("before") else ("after_sleep", "after_wake")
    log.add("one", down, up)
    log.add("bad", down, up, fails=spot, error=error)
    log.add("three", down, up)
    if spot.endswith("wake"):
        allocator.sleep()
        log.take()
    with pytest.raises(error):
        allocator.sleep() if spot.endswith("sleep") else allocator.wake_up()
    assert (
        log.take()
        == {
            "before_sleep": ["one before_sleep", "bad before_sleep", "one before_wake undo"],
            "after_sleep": ["one after_sleep", "bad after_sleep", "three after_sleep"],
            "before_wake": ["three before_wake", "bad before_wake", "three before_sleep undo"],
            "after_wake": ["three after_wake", "bad after_wake", "one after_wake"],
        }[spot]
    )
    assert allocator.state() == ("resident" if spot in ("before_sleep", "after_wake") else "asleep")
    allocator.hooks.unregister("bad")
    allocator.sleep()
    allocator.wake_up()
    sample.check()


def test_ctrl_c_in_an_undo_does_not_keep_earlier_hooks_from_being_undone():
    allocator, sample, log = with_log()
    log.add("one", "before_sleep", "before_wake")
    log.add("two", "before_sleep", "before_wake", fails="before_wake", error=KeyboardInterrupt)
    log.add("bad", "before_sleep", fails="before_sleep")
    with pytest.raises(KeyboardInterrupt) as caught:
        allocator.sleep()
    assert log.take()[-2:] == ["two before_wake undo", "one before_wake undo"]
    if hasattr(caught.value, "__notes__"):
        assert any("ValueError: bad fails" in note for note in caught.value.__notes__)
    assert allocator.state() == "resident"
    sample.check()
