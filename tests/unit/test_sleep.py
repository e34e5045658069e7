"""sleep(): what it gives away, what it keeps, and what is left after it failed."""

import pytest
import torch

import cumem
from unit.machine import GRANULE, Sample, counts, faulty_driver, held_at, in_background, small_allocator, used_bytes


def test_sleep_gives_the_pages_back_and_keeps_address_and_contents():
    allocator = small_allocator()
    sample = Sample(allocator, "weights", 3)
    address = sample.tensor.data_ptr()
    assert used_bytes(allocator) == 3 * GRANULE
    allocator.sleep()
    assert used_bytes(allocator) == 0
    assert (allocator.state("weights"), allocator.is_sleeping("weights"), allocator.is_sleeping()) == (
        "asleep",
        True,
        True,
    )
    allocator.wake_up()
    assert sample.tensor.data_ptr() == address
    sample.check()
    assert (allocator.state("weights"), allocator.is_sleeping()) == ("resident", False)


def test_sleep_touches_only_the_tags_it_is_given():
    allocator = small_allocator()
    a, b = Sample(allocator, "a", seed=1), Sample(allocator, "b", seed=2)
    report = allocator.sleep(tags=["a"])
    assert list(report.by_tag) == ["a"]
    assert (allocator.state("a"), allocator.state("b"), allocator.state()) == ("asleep", "resident", "mixed")
    b.check()
    allocator.wake_up()
    a.check()


def test_a_tag_sleeps_alone_though_another_freed_memory_of_the_same_size():
    allocator = small_allocator()
    freed = Sample(allocator, "a", 2, seed=1)
    kept = Sample(allocator, "a", seed=2)
    del freed
    other = Sample(allocator, "b", 2, seed=3)
    allocator.sleep(tags=["a"])
    other.check()
    allocator.wake_up()
    kept.check()


def test_sleeping_what_sleeps_is_a_no_op_that_the_report_shows():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.clear()
    report = allocator.sleep()
    assert (report.freed_bytes, report.saved_bytes, report.copied_bytes, report.by_tag) == (0, 0, 0, {})
    assert driver.calls == []
    allocator.wake_up()
    sample.check()


def test_a_report_is_the_sum_of_its_tags_and_its_seconds_cover_its_phases():
    allocator = small_allocator()
    allocator.set_policy("cache", "discard")
    Sample(allocator, "unused")
    samples = [Sample(allocator, "weights", 2, seed=1), Sample(allocator, "weights", 1.5, seed=2)]
    cache = Sample(allocator, "cache", 4, seed=3)
    report = allocator.sleep()
    assert report.by_tag == {
        "cache": cumem.TagSleep("discard", True, 1, 4 * GRANULE, 0, 4 * GRANULE),
        "weights": cumem.TagSleep("cpu", False, 2, 4 * GRANULE, 3.5 * GRANULE, 0),
    }
    assert (report.freed_bytes, report.saved_bytes, report.discarded_bytes) == (8 * GRANULE, 3.5 * GRANULE, 4 * GRANULE)
    assert (report.copied_bytes, report.clean_bytes) == (3.5 * GRANULE, 0)
    assert report.host_bytes == allocator.stats().host_bytes >= report.saved_bytes
    assert (report.dropped_tags, report.saved_tags) == (["cache"], ["weights"])
    assert set(report.phases) == {"check", "reserve", "hooks", "quiesce", "save", "wait", "unmap"}
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert report.seconds >= sum(report.phases.values())
    allocator.wake_up()
    for sample in samples:
        sample.check()
    assert allocator.tag_of(cache.tensor) == "cache"


def test_only_live_bytes_are_saved():
    allocator = small_allocator()
    sample = Sample(allocator, "weights", 1)
    small = allocator.full(10, fill_value=3.0, tag="weights")
    report = allocator.sleep()
    assert report.freed_bytes == 2 * GRANULE
    assert report.saved_bytes == GRANULE + 512
    allocator.wake_up()
    sample.check()
    assert torch.equal(small, torch.full((10,), 3.0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tags": ["weights", "wieghts"]}, cumem.UnknownTag),
        ({"tags": ["weights", 3]}, cumem.UnknownTag),
        ({"tags": [["weights"]]}, cumem.UnknownTag),
        ({"tags": "weights"}, cumem.InvalidArgument),
        ({"tags": 5}, cumem.InvalidArgument),
        ({"level": 3}, cumem.InvalidArgument),
        ({"level": 0}, cumem.InvalidArgument),
        ({"level": "1"}, cumem.InvalidArgument),
        ({"level": None}, cumem.InvalidArgument),
        ({"keep": [1]}, cumem.InvalidArgument),
        ({"keep": ["weights"]}, cumem.InvalidArgument),
        ({"keep": None}, cumem.InvalidArgument),
        ({"keep": 7}, cumem.InvalidArgument),
        ({"keep": torch.ones(2)}, cumem.InvalidArgument),
        ({"keep": torch.nn.Linear(1, 1)}, cumem.InvalidArgument),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_refused_before_anything_changes(options, error):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    driver.clear()
    with pytest.raises(error) as caught:
        allocator.sleep(**options)
    ((_, value),) = options.items()
    shown = type(value).__name__ if isinstance(value, torch.Tensor | torch.nn.Module) else repr(value)[1:-1]
    assert shown.split(", ")[-1] in str(caught.value)
    assert driver.calls == []
    assert allocator.state("weights") == "resident"
    sample.check()


def test_an_unknown_tag_is_named_with_those_that_exist():
    allocator = small_allocator()
    Sample(allocator, "weights")
    with pytest.raises(cumem.UnknownTag, match=r"'wieghts'.*\['weights'\]") as caught:
        allocator.sleep(tags=["wieghts"])
    assert (caught.value.tag, caught.value.known) == ("wieghts", ["weights"])


@pytest.mark.parametrize("tags", [[], (), iter(["weights", "weights"]), {"weights": 1}], ids=type)
def test_tags_may_be_any_iterable_and_name_a_tag_twice(tags):
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    empty = isinstance(tags, list | tuple)
    report = allocator.sleep(tags=tags)
    assert list(report.by_tag) == ([] if empty else ["weights"])
    allocator.wake_up()
    sample.check()


# --- work in flight ---


def test_work_in_flight_ends_before_its_bytes_are_saved():
    allocator = small_allocator(driver := faulty_driver())
    tensor = allocator.zeros(GRANULE, dtype=torch.uint8, tag="weights")
    driver.launch_fill(tensor.data_ptr(), 0x5A, GRANULE)
    assert tensor[0] == 0, "the kernel is not in flight"
    allocator.sleep()
    allocator.wake_up()
    assert torch.all(tensor == 0x5A)


def test_sleep_right_after_wake_and_a_kernel_keeps_what_the_kernel_wrote():
    allocator = small_allocator(driver := faulty_driver())
    tensor = allocator.zeros(GRANULE, dtype=torch.uint8, tag="weights")
    for byte in range(1, 6):
        driver.launch_fill(tensor.data_ptr(), byte, GRANULE)
        allocator.sleep()
        allocator.wake_up()
        assert torch.all(tensor == byte)
    assert allocator.state() == "resident"


def test_work_that_is_queued_while_the_copies_run_does_not_meet_memory_that_is_gone():
    allocator = small_allocator(driver := faulty_driver())
    sample = Sample(allocator, "weights")
    with held_at(driver, "copy_to_host", allocator.sleep) as sleep:
        driver.launch_fill(sample.tensor.data_ptr(), 1, GRANULE)
    sleep.result()
    allocator.wake_up()
    assert allocator.state() == "resident"
    Sample(allocator, "weights", seed=1).check()


def test_a_temporary_freed_under_a_running_kernel_is_not_pulled_away():
    allocator = small_allocator(driver := faulty_driver())
    kept = Sample(allocator, "weights")
    for end in (allocator.trim, allocator.sleep):
        temporary = allocator.empty(GRANULE, dtype=torch.uint8, tag="weights")
        driver.launch_fill(temporary.data_ptr(), 1, GRANULE)
        del temporary
        end()
    allocator.wake_up()
    kept.check()
    assert allocator.state() == "resident", "the kernel lost its memory"


def test_a_device_that_stays_busy_leaves_everything_resident_and_the_next_sleep_works():
    driver = faulty_driver()
    allocator = small_allocator(driver, device_timeout=1.0)
    samples = [Sample(allocator, tag, seed=n) for n, tag in enumerate(("a", "a", "b"))]
    before = counts(driver)
    driver.hold("synchronize")
    try:
        with pytest.raises(cumem.DeviceBusy, match=r"device 0 still works after 1") as caught:
            allocator.sleep()
    finally:
        driver.release("synchronize")
    assert caught.value.timeout_s == 1.0
    assert {allocator.state("a"), allocator.state("b")} == {"resident"}
    assert "unmap" not in driver.calls
    assert counts(driver) == before | {"registrations": counts(driver)["registrations"]}
    for sample in samples:
        sample.check()
    assert allocator.sleep().freed_bytes == 3 * GRANULE
    allocator.wake_up()
    for sample in samples:
        sample.check()


# --- beside others ---


def test_a_tensor_freed_during_a_sleep_goes_with_its_backup():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    kept = Sample(allocator, "weights", seed=1)
    for gate in ("copy_to_host", "unmap"):
        freed = Sample(allocator, "weights", 2, seed=2)
        with held_at(driver, gate, allocator.sleep) as sleep:
            del freed
        assert sleep.result().by_tag["weights"].segments == 2
        assert allocator.stats().by_tag["weights"].backup_bytes == GRANULE
        assert counts(driver)["ranges"] == 1
        allocator.wake_up()
        kept.check()


def test_a_tensor_allocated_during_a_sleep_stays_resident():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    old = Sample(allocator, "weights", seed=1)
    with held_at(driver, "copy_to_host", allocator.sleep) as sleep:
        new = Sample(allocator, "weights", seed=2)
    sleep.result()
    assert allocator.state("weights") == "mixed"
    assert allocator.is_resident(new.tensor)
    assert not allocator.is_resident(old.tensor)
    new.check()
    allocator.wake_up()
    old.check()


def test_a_tensor_allocated_in_a_sleeping_tag_works_and_both_are_right_after_the_wake():
    allocator = small_allocator()
    old = Sample(allocator, "weights", seed=1)
    allocator.sleep()
    new = Sample(allocator, "weights", 2, seed=2)
    new.check()
    assert allocator.state("weights") == "mixed"
    assert allocator.bytes_needed_to_wake() == GRANULE
    report = allocator.sleep()
    assert report.by_tag["weights"].segments == 1
    assert report.freed_bytes == 2 * GRANULE
    assert allocator.state("weights") == "asleep"
    allocator.wake_up()
    old.check()
    new.check()


def test_a_call_that_may_not_wait_is_refused_while_another_transition_runs():
    driver = faulty_driver()
    allocator, other = small_allocator(driver), small_allocator()
    mine, others = Sample(allocator, "weights"), Sample(other, "weights")
    with held_at(driver, "copy_to_host", allocator.sleep) as sleep:
        for refused in (allocator.sleep, allocator.wake_up, other.sleep, other.wake_up):
            with pytest.raises(cumem.StateError, match="another transition is under way"):
                refused(blocking=False)
        with pytest.raises(cumem.StateError, match="another transition is under way"):
            allocator.discard(["weights"], blocking=False)
        waiting = in_background(other.sleep)
        others.check()
    assert sleep.result().freed_bytes == waiting.result().freed_bytes == GRANULE
    assert (allocator.state(), other.state()) == ("asleep", "asleep")
    allocator.wake_up(blocking=False)
    other.wake_up(blocking=False)
    mine.check()
    others.check()
