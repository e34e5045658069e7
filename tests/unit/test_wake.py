"""wake_up(): rooms that are too small, failures half-way, retries, and tensors that come and go meanwhile."""

import pytest
import torch

import cumem
from unit.machine import GRANULE, Sample, counts, faulty_driver, held_at, small_allocator, used_bytes


def asleep_without_room(segments=4, room=2):
    """Samples of one granule each that sleep, on a device where another tenant left too little free."""
    driver = faulty_driver(devices=1, granules=segments)
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", seed=n) for n in range(segments)]
    allocator.sleep()
    tenant = small_allocator(driver)
    filler = tenant.empty((segments - room) * GRANULE, dtype=torch.uint8, tag="filler")
    return driver, allocator, samples, (tenant, [filler])


def leave(tenant):
    allocator, filler = tenant
    filler.clear()
    allocator.trim()


# --- without room ---


def test_a_wake_without_room_says_what_is_needed_and_free_and_maps_nothing():
    driver, allocator, samples, tenant = asleep_without_room()
    driver.clear()
    with pytest.raises(cumem.OutOfDeviceMemory, match=r"'weights'.*free device memory") as caught:
        allocator.wake_up()
    error = caught.value
    assert (error.needed_bytes, error.free_bytes) == (4 * GRANULE, 2 * GRANULE)
    assert (error.device, error.tag, error.idle_cache_bytes) == (0, "weights", 0)
    assert isinstance(error, MemoryError)
    assert not {"create", "map", "unmap"} & set(driver.calls)
    assert allocator.state("weights") == "asleep"
    leave(tenant)
    allocator.wake_up()
    for sample in samples:
        sample.check()


def test_fifty_wakes_without_room_leave_no_trace():
    driver, allocator, samples, tenant = asleep_without_room()
    before, used, host = counts(driver), used_bytes(allocator), allocator.stats().host_bytes
    for _ in range(50):
        with pytest.raises(cumem.OutOfDeviceMemory):
            allocator.wake_up()
    assert (counts(driver), used_bytes(allocator), allocator.stats().host_bytes) == (before, used, host)
    leave(tenant)
    allocator.wake_up()
    for sample in samples:
        sample.check()


def test_fifty_wakes_that_fail_half_way_leave_no_trace():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", seed=n) for n in range(3)]
    for expected in (used_bytes(allocator), used_bytes(allocator)):
        allocator.sleep()
        before = counts(driver)
        for n in range(50):
            # Two calls: a copy to the device is tried for all segments at once, then for each by itself.
            driver.fail_at(0, only=("map", "create", "set_access", "copy_to_device")[n % 4], times=6)
            with pytest.raises(cumem.WakeUpPartialFailure) as caught:
                allocator.wake_up()
            assert caught.value.woken == []
            driver.clear()
            now = counts(driver)
            assert now | {"streams": 0, "events": 0} == before | {"streams": 0, "events": 0}
        allocator.wake_up()
        assert used_bytes(allocator) == expected
        for sample in samples:
            sample.check()


def test_tags_that_fit_wake_while_the_others_wait_for_room():
    driver = faulty_driver(devices=1, granules=4)
    allocator = small_allocator(driver)
    a, b = Sample(allocator, "a", 1, seed=1), Sample(allocator, "b", 3, seed=2)
    allocator.sleep()
    filler = small_allocator(driver).empty(2 * GRANULE, dtype=torch.uint8, tag="filler")
    assert allocator.wake_up(tags=["a"]).mapped_bytes == GRANULE
    a.check()
    with pytest.raises(cumem.OutOfDeviceMemory) as caught:
        allocator.wake_up()
    assert (caught.value.needed_bytes, caught.value.tag) == (3 * GRANULE, "b")
    assert (allocator.state("a"), allocator.state("b")) == ("resident", "asleep")
    del filler
    allocator.wake_up()
    b.check()


def test_memory_that_died_makes_room_for_a_wake():
    driver = faulty_driver(devices=1, granules=2)
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    temporary = allocator.empty(2 * GRANULE, dtype=torch.uint8, tag="scratch")
    del temporary
    assert used_bytes(allocator) == 2 * GRANULE, "a deleter gave pages back: it may not call the driver"
    allocator.wake_up()
    sample.check()


def test_a_device_that_stays_busy_leaves_everything_asleep_and_the_next_wake_works():
    driver = faulty_driver()
    allocator = small_allocator(driver, device_timeout=1.0)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.hold("synchronize")
    try:
        with pytest.raises(cumem.DeviceBusy, match="device 0"):
            allocator.wake_up()
    finally:
        driver.release("synchronize")
    assert "map" not in driver.calls[driver.calls.index("unmap") :]
    assert allocator.state() == "asleep"
    allocator.wake_up()
    sample.check()


# --- half-way ---


def partly_woken(on_failure=None):
    """Three segments in two tags; the second page that a wake asks for is refused."""
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = {tag: Sample(allocator, tag, seed=n) for n, tag in enumerate(("a", "b", "c"))}
    allocator.sleep()
    driver.fail_at(1, only="create", code="out_of_device_memory")
    with pytest.raises(cumem.WakeUpPartialFailure) as caught:
        allocator.wake_up(on_failure=on_failure)
    return allocator, samples, caught.value


def test_a_segment_that_fails_stays_asleep_while_the_others_wake_and_retry_does_the_rest():
    allocator, samples, error = partly_woken()
    (failed,) = error.failed
    assert isinstance(error.first_exception, cumem.OutOfDeviceMemory)
    assert error.__cause__ is error.first_exception is failed.error
    assert (failed.phase, failed.state, failed.size_bytes, failed.device) == ("map", "asleep", GRANULE, 0)
    assert failed.address == samples[failed.tag].tensor.data_ptr()
    assert (sorted([*error.woken, failed.tag]), error.rolled_back) == (["a", "b", "c"], False)
    for tag in error.woken:
        samples[tag].check()
    assert allocator.state(failed.tag) == "asleep"
    report = error.retry()
    assert list(report.by_tag) == [failed.tag]
    for sample in samples.values():
        sample.check()
    assert error.retry().by_tag == {}, "a second retry has nothing to do"


def test_a_second_wake_finishes_the_job_of_one_that_failed_half_way():
    allocator, samples, error = partly_woken(on_failure="partial")
    assert list(allocator.wake_up().by_tag) == [error.failed[0].tag]
    for sample in samples.values():
        sample.check()


def test_a_rollback_puts_everything_that_this_call_woke_back_to_sleep():
    allocator, samples, error = partly_woken(on_failure="rollback")
    assert (error.woken, error.rolled_back) == ([], True)
    assert "rolled back" in str(error)
    assert {allocator.state(tag) for tag in samples} == {"asleep"}
    assert used_bytes(allocator) == 0
    error.retry()
    for sample in samples.values():
        sample.check()


def test_a_rollback_leaves_what_was_awake_before_alone():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    a, b = Sample(allocator, "a", seed=1), Sample(allocator, "b", seed=2)
    allocator.sleep()
    allocator.wake_up(tags=["a"])
    driver.fail_at(0, only="create", code="out_of_device_memory")
    with pytest.raises(cumem.WakeUpPartialFailure):
        allocator.wake_up(on_failure="rollback")
    assert (allocator.state("a"), allocator.state("b")) == ("resident", "asleep")
    a.check()
    allocator.wake_up()
    b.check()


def test_one_failed_driver_call_spoils_no_later_unrelated_call():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.fail_at(0, only="set_access", times=2)
    with pytest.raises(cumem.WakeUpPartialFailure):
        allocator.wake_up()
    other = Sample(allocator, "other", seed=5)
    other.check()
    assert allocator.sleep(tags=["other"]).freed_bytes == GRANULE
    allocator.wake_up()
    other.check()
    sample.check()


# --- arguments ---


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tags": ["weights", "wieghts"]}, cumem.UnknownTag),
        ({"tags": "weights"}, cumem.InvalidArgument),
        ({"tags": 5}, cumem.InvalidArgument),
        ({"on_failure": "x"}, cumem.InvalidArgument),
        ({"on_failure": ["partial"]}, cumem.InvalidArgument),
        ({"on_failure": True}, cumem.InvalidArgument),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_refused_before_anything_changes(options, error):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.clear()
    with pytest.raises(error):
        allocator.wake_up(**options)
    assert driver.calls == []
    assert allocator.state("weights") == "asleep"
    allocator.wake_up()
    sample.check()


# --- repeated, partial, without contents ---


def test_waking_what_is_awake_is_a_no_op_that_the_report_shows():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    driver.clear()
    report = allocator.wake_up()
    assert (report.mapped_bytes, report.copied_bytes, report.by_tag) == (0, 0, {})
    assert driver.calls == []
    sample.check()


def test_tags_wake_one_after_the_other_each_with_a_report_of_its_own():
    allocator = small_allocator()
    a, b = Sample(allocator, "a", 1.5, seed=1), Sample(allocator, "b", 3, seed=2)
    allocator.sleep()
    assert (allocator.bytes_needed_to_wake(), allocator.bytes_needed_to_wake(["a"])) == (5 * GRANULE, 2 * GRANULE)
    first = allocator.wake_up(tags=["a"])
    assert first.by_tag == {"a": cumem.TagWake(1, 2 * GRANULE, 1.5 * GRANULE, 0)}
    assert (first.mapped_bytes, first.copied_bytes, first.zeroed_bytes) == (2 * GRANULE, 1.5 * GRANULE, 0)
    assert (allocator.state("a"), allocator.state("b")) == ("resident", "asleep")
    assert allocator.bytes_needed_to_wake() == 3 * GRANULE
    a.check()
    second = allocator.wake_up()
    assert list(second.by_tag) == ["b"]
    assert set(second.phases) == {"check", "preflight", "hooks", "quiesce", "map", "restore"}
    assert second.seconds >= sum(second.phases.values())
    assert allocator.bytes_needed_to_wake() == 0
    b.check()


def test_a_wake_without_restore_maps_only_and_drops_the_backups():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.clear()
    report = allocator.wake_up(restore=False)
    assert (report.mapped_bytes, report.copied_bytes, report.undefined_tags) == (GRANULE, 0, ["weights"])
    assert not {"copy_to_device", "fill"} & set(driver.calls)
    assert allocator.undefined_tags() == ["weights"]
    assert allocator.stats().by_tag["weights"].backup_bytes == 0
    sample.tensor.copy_(sample.expected)
    allocator.mark_loaded("weights")
    assert allocator.undefined_tags() == []
    allocator.sleep()
    allocator.wake_up()
    sample.check()


# --- freed in every state ---


@pytest.mark.parametrize("state", ["resident", "asleep", "wake failed", "undefined", "mapping", "restoring"])
def test_a_tensor_can_be_freed_in_every_state_and_gives_all_back(state):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    kept, freed = Sample(allocator, "kept", seed=1), [Sample(allocator, "freed", 2, seed=2)]
    if state != "resident":
        allocator.sleep()
    if state == "wake failed":
        driver.fail_at(0, only="create", times=8)
        with pytest.raises(cumem.WakeUpPartialFailure) as caught:
            allocator.wake_up()
        del caught
        driver.clear()
    if state == "undefined":
        allocator.wake_up(restore=False)
        kept.tensor.copy_(kept.expected)
    if state in ("mapping", "restoring"):
        with held_at(driver, "map" if state == "mapping" else "copy_to_device", allocator.wake_up) as wake:
            freed.clear()
        wake.result()
    freed.clear()
    allocator.wake_up()
    kept.check()
    allocator.trim()
    now = counts(driver)
    assert (now["ranges"], now["handles"], now["mappings"], now["physical_bytes"]) == (1, 1, 1, GRANULE)
    assert now["registrations"] == 0
    assert allocator.stats().host_bytes == 0
    assert "freed" in allocator.tags()
    assert allocator.state("freed") == "empty"


def test_the_last_tensor_takes_everything_along_even_after_its_allocator():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    awake, asleep = Sample(allocator, "awake"), Sample(allocator, "asleep")
    allocator.sleep(tags=["asleep"])
    del allocator
    awake.check()
    assert counts(driver)["ranges"] == 2
    del awake, asleep
    assert set(counts(driver).values()) == {0}
