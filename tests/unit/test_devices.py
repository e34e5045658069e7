"""Several devices: the right one is used, and both sleep and wake together."""

import pytest
import torch

import cumem
from unit.machine import (
    GRANULE,
    Sample,
    faulty_driver,
    held_at,
    in_background,
    small_allocator,
    small_driver,
    used_bytes,
)


def devices_of(allocator):
    return sorted(info.device for info in allocator._memory.core.segments())


@pytest.mark.parametrize("device", [1, "cpu:1", torch.device("cpu", 1)], ids=repr)
def test_memory_comes_from_the_device_that_is_asked_for_though_another_is_the_default(device):
    allocator = small_allocator()
    sample = Sample(allocator, "weights", 2, device=device)
    assert (used_bytes(allocator, 0), used_bytes(allocator, 1)) == (0, 2 * GRANULE)
    sample.check()


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), 1], ids=repr)
def test_the_default_device_is_the_allocators(device):
    allocator = small_allocator(device=1)
    sample = Sample(allocator, "weights", device=device)
    assert devices_of(allocator) == [1]
    assert allocator.driver_memory() == allocator.driver_memory(1)
    sample.check()


@pytest.mark.parametrize("device", [2, -1, "cuda", "cuda:1", "cpu:7", "1", 1.0, True, torch.device("meta")], ids=repr)
def test_a_device_that_is_not_there_is_refused_and_makes_no_tag(device):
    allocator = small_allocator()
    for make in (allocator.empty, allocator.zeros):
        with pytest.raises(cumem.InvalidArgument, match="device="):
            make(1, tag="weights", device=device)
    with pytest.raises(cumem.InvalidArgument, match="device="):
        allocator.driver_memory(device)
    assert allocator.tags() == []


def test_one_tag_on_two_devices_sleeps_and_wakes_on_both():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", 1 + device, seed=device, device=device) for device in (0, 1)]
    driver.launch_fill(samples[1].tensor.data_ptr(), 7, GRANULE)
    samples[1].expected[:GRANULE] = 7
    report = allocator.sleep()
    assert (report.freed_bytes, report.by_tag["weights"].segments) == (3 * GRANULE, 2)
    assert used_bytes(allocator, 0) == used_bytes(allocator, 1) == 0
    assert allocator.wake_up().mapped_bytes == 3 * GRANULE
    assert (used_bytes(allocator, 0), used_bytes(allocator, 1)) == (GRANULE, 2 * GRANULE)
    assert devices_of(allocator) == [0, 1]
    for sample in samples:
        sample.check()


def test_a_full_second_device_keeps_both_asleep_and_is_named():
    driver = small_driver(granules=4)
    allocator, tenant = small_allocator(driver), small_allocator(driver, device=1)
    samples = [Sample(allocator, f"tag {device}", 2, seed=device, device=device) for device in (0, 1)]
    allocator.sleep()
    filler = [tenant.empty(3 * GRANULE, dtype=torch.uint8, tag="filler")]
    with pytest.raises(cumem.OutOfDeviceMemory, match="device 1") as caught:
        allocator.wake_up()
    error = caught.value
    assert (error.device, error.needed_bytes, error.free_bytes, error.tag) == (1, 2 * GRANULE, GRANULE, "tag 1")
    assert allocator.state() == "asleep"
    assert allocator.wake_up(tags=["tag 0"]).mapped_bytes == 2 * GRANULE
    samples[0].check()
    filler.clear()
    tenant.trim()
    allocator.wake_up()
    samples[1].check()


def test_a_full_device_is_told_though_the_other_has_room():
    allocator = small_allocator(small_driver(granules=2))
    first = Sample(allocator, "weights", 2)
    with pytest.raises(cumem.OutOfDeviceMemory) as caught:
        allocator.empty(GRANULE, dtype=torch.uint8, tag="weights")
    assert caught.value.device == 0
    second = Sample(allocator, "weights", 2, seed=1, device=1)
    for sample in (first, second):
        sample.check()


def test_only_the_devices_that_a_transition_touches_are_waited_for():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, f"tag {device}", seed=device, device=device) for device in (0, 1)]
    driver.clear()
    allocator.sleep(tags=["tag 1"])
    assert driver.calls.count("synchronize") == 2, "once before the copies and once after"
    driver.clear()
    allocator.wake_up()
    assert driver.calls.count("synchronize") == 1
    for sample in samples:
        sample.check()


def test_allocations_on_both_devices_from_two_threads_land_where_they_should():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    with held_at(driver, "create", Sample, allocator, "first") as first:
        second = in_background(Sample, allocator, "second", 2, seed=1, device=1)
    for sample in (first.result(), second.result()):
        sample.check()
    assert (used_bytes(allocator, 0), used_bytes(allocator, 1)) == (GRANULE, 2 * GRANULE)
