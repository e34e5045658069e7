"""discard(): contents dropped, awake or asleep, and nothing dropped by a call that fails."""

import pytest
import torch

import cumem
from unit.machine import GRANULE, Sample, faulty_driver, small_allocator, used_bytes


def test_an_awake_tag_falls_asleep_without_a_backup():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample, other = Sample(allocator, "weights", 1.5), Sample(allocator, "other", seed=1)
    address = sample.tensor.data_ptr()
    driver.clear()
    report = allocator.discard(["weights"])
    assert report.by_tag == {"weights": cumem.TagSleep("cpu", True, 1, 2 * GRANULE, 0, 1.5 * GRANULE)}
    assert (report.freed_bytes, report.saved_bytes, report.discarded_bytes) == (2 * GRANULE, 0, 1.5 * GRANULE)
    assert (report.host_bytes, report.copied_bytes) == (0, 0)
    assert "copy_to_host" not in driver.calls
    assert (allocator.state("weights"), used_bytes(allocator)) == ("asleep", GRANULE)
    other.check()
    assert allocator.wake_up().undefined_tags == ["weights"]
    assert sample.tensor.data_ptr() == address


def test_an_asleep_tag_loses_its_backup_and_its_host_bytes_are_free():
    allocator = small_allocator()
    sample, other = Sample(allocator, "weights", 2), Sample(allocator, "other", seed=1)
    allocator.sleep()
    report = allocator.discard(["weights"])
    assert (report.freed_bytes, report.discarded_bytes) == (0, 2 * GRANULE)
    assert report.by_tag["weights"].discarded_bytes == 2 * GRANULE
    assert allocator.stats().by_tag["weights"].backup_bytes == 0
    with pytest.raises(cumem.StateError):
        allocator.host_view(sample.tensor)
    assert allocator.wake_up().undefined_tags == ["weights"]
    other.check()
    allocator.trim()
    assert allocator.stats().host_bytes == 0


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize(("wake", "byte"), [("zero", 0), ("poison", cumem.backends.POISON_BYTE)])
def test_what_a_discard_policy_says_of_a_wake_holds_after_discard_too(asleep, wake, byte):
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake=wake)
    sample = Sample(allocator, "cache")
    if asleep:
        allocator.sleep()
    allocator.discard(["cache"])
    allocator.wake_up()
    assert torch.all(sample.tensor == byte)


def test_a_discard_that_fails_drops_nothing():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    asleep, awake = Sample(allocator, "asleep", seed=1), Sample(allocator, "awake", seed=2)
    allocator.sleep(tags=["asleep"])

    def veto(_):
        raise ValueError("not now")

    allocator.hooks.register("veto", before_sleep=veto)
    with pytest.raises(ValueError, match="not now"):
        allocator.discard(["asleep", "awake"])
    allocator.hooks.unregister("veto")
    awake.check()
    allocator.wake_up()
    asleep.check()
    assert allocator.undefined_tags() == []


@pytest.mark.parametrize(
    ("tags", "error"),
    [(["weights", "wieghts"], cumem.UnknownTag), ("weights", cumem.InvalidArgument), (None, cumem.InvalidArgument)],
    ids=repr,
)
def test_a_wrong_argument_drops_nothing(tags, error):
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    with pytest.raises(error):
        allocator.discard(tags)
    assert allocator.state() == "resident"
    sample.check()


def test_discarding_twice_and_discarding_nothing_are_no_ops():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    assert allocator.discard([]).by_tag == {}
    sample.check()
    allocator.discard(["weights"])
    assert allocator.discard(["weights"]).by_tag == {}
    assert allocator.wake_up().mapped_bytes == GRANULE


def test_a_discarded_tag_can_be_loaded_again_and_sleeps_as_its_policy_says():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    allocator.discard(["weights"])
    allocator.wake_up()
    sample.tensor.copy_(sample.expected)
    allocator.mark_loaded("weights")
    allocator.sleep()
    allocator.wake_up()
    sample.check()
    assert allocator.undefined_tags() == []
