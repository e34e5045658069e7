"""Allocator: how it is made and closed, its ledger, its questions, and several of them in one process."""

import gc

import pytest
import torch

import cumem
from unit.machine import GRANULE, Sample, counts, faulty_driver, held_at, small_allocator, small_driver, used_bytes

# --- making and closing ---


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"driver": "metal"}, "'metal'.*'auto', 'cuda', 'host'"),
        ({"driver": None}, "None"),
        ({"driver": 3}, "3"),
        ({"device": 2}, "devices 0 to 1"),
        ({"device": -1}, "-1"),
        ({"device": "cuda:0"}, "'cuda:0'"),
        ({"device": "cpu:x"}, "'cpu:x'"),
        ({"device": 1.0}, "1.0"),
        ({"device": True}, "True"),
        ({"device": torch.device("meta")}, "meta"),
        ({"host_budget": -1}, "-1"),
        ({"host_budget": 1.5}, "1.5"),
        ({"host_budget": "1"}, "'1'"),
        ({"host_budget": True}, "True"),
        ({"host_budget": 2**63}, str(2**63)),
        ({"margin": None}, "None"),
        ({"margin": -5}, "-5"),
        ({"margin": 0.5}, "0.5"),
        ({"margin": 2**64}, str(2**64)),
        ({"device_timeout": 0}, "0"),
        ({"device_timeout": -1}, "-1"),
        ({"device_timeout": "60"}, "'60'"),
        ({"device_timeout": True}, "True"),
        ({"device_timeout": float("nan")}, "nan"),
        ({"device_timeout": float("inf")}, "inf"),
        ({"device_timeout": 1e10}, "1e9|1e\\+09"),
    ],
    ids=repr,
)
def test_an_option_that_makes_no_sense_is_refused_with_its_value(options, shown):
    with pytest.raises(cumem.InvalidArgument, match=shown):
        cumem.Allocator(**{"driver": small_driver()} | options)


def test_a_closed_allocator_takes_no_new_work_and_its_tensors_stay_valid():
    driver = small_driver()
    with small_allocator(driver) as allocator:
        awake, asleep = Sample(allocator, "awake", seed=1), Sample(allocator, "asleep", seed=2)
        allocator.sleep(tags=["asleep"])
    allocator.close()
    refused = {
        "empty": (1,),
        "adopt": ([torch.ones(1)], "t"),
        "set_policy": ("t", "cpu"),
        "sleep": (),
        "discard": (["awake"],),
        "trim": (),
    }
    for name, arguments in refused.items():
        with pytest.raises(cumem.StateError, match="closed"):
            getattr(allocator, name)(*arguments)
    with pytest.raises(cumem.StateError, match="closed"), allocator.asleep():
        pytest.fail("the body runs")
    awake.check()
    assert torch.equal(allocator.host_view(asleep.tensor), asleep.expected)
    assert (allocator.state("awake"), allocator.state("asleep")) == ("resident", "asleep")
    assert allocator.tags() == ["awake", "asleep"]
    assert allocator.stats().mapped_bytes == GRANULE
    del allocator, awake, asleep
    gc.collect()
    assert set(counts(driver).values()) == {0}


def test_an_exception_in_its_with_block_is_not_swallowed():
    with pytest.raises(KeyError), small_allocator():
        raise KeyError


# --- device memory ---


@pytest.mark.parametrize("nbytes", [1, GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE + 7])
def test_a_segment_is_rounded_up_to_the_granularity_and_its_pages_come_back(nbytes):
    allocator = small_allocator()
    tensor = allocator.empty(nbytes, dtype=torch.uint8, tag="t")
    pages = -(-nbytes // GRANULE) * GRANULE
    assert used_bytes(allocator) == pages
    assert allocator.stats().virtual_bytes == allocator.stats().mapped_bytes == pages
    assert allocator.stats().live_bytes == -(-nbytes // 512) * 512
    del tensor
    assert allocator.trim() == pages
    assert used_bytes(allocator) == 0


def test_a_full_device_is_told_with_the_tag_and_the_numbers_and_changes_nothing():
    driver = faulty_driver(devices=1, granules=4)
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights", 3)
    before = counts(driver)
    with pytest.raises(cumem.OutOfDeviceMemory, match="'weights'") as caught:
        allocator.empty(2 * GRANULE, dtype=torch.uint8, tag="weights")
    error = caught.value
    assert (error.needed_bytes, error.free_bytes, error.device) == (2 * GRANULE, GRANULE, 0)
    assert (error.tag, error.idle_cache_bytes) == ("weights", 0)
    assert counts(driver) == before
    Sample(allocator, "weights").check()
    sample.check()


def test_a_margin_stays_free():
    allocator = small_allocator(small_driver(devices=1, granules=8), margin=3 * GRANULE)
    samples = [Sample(allocator, "weights", seed=n) for n in range(5)]
    with pytest.raises(cumem.OutOfDeviceMemory, match="margin") as caught:
        Sample(allocator, "weights")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (GRANULE, 0)
    del samples[0]
    samples.append(Sample(allocator, "weights", seed=9))
    for sample in samples:
        sample.check()


def test_what_died_makes_room_before_a_device_counts_as_full():
    allocator = small_allocator(small_driver(devices=1, granules=4))
    for n in range(10):
        Sample(allocator, "scratch", 3, seed=n).check()
    assert used_bytes(allocator) == 3 * GRANULE
    assert allocator.stats().mapped_bytes == 3 * GRANULE, (
        "pages of the dead are in the ledger until they are given back"
    )


def test_one_failed_driver_call_does_not_spoil_the_next_allocation():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    for call in ("reserve", "create", "map", "set_access"):
        driver.fail_at(0, only=call)
        with pytest.raises(cumem.DriverError, match=call):
            allocator.empty(1, tag="weights")
        Sample(allocator, "weights").check()
    allocator.trim()
    assert counts(driver)["ranges"] == 0


# --- the ledger ---


def test_statistics_count_what_each_tag_has_in_each_state():
    allocator = small_allocator()
    allocator.set_policy("cache", "discard")
    weights = [Sample(allocator, "weights", size, seed=size) for size in (1, 2)]
    cache = Sample(allocator, "cache", 3)
    small = allocator.empty(10, dtype=torch.uint8, tag="small")
    stats = allocator.stats()
    assert stats.by_tag == {
        "cache": cumem.TagStats("resident", "discard", 1, 3 * GRANULE, 3 * GRANULE, 3 * GRANULE, 0),
        "weights": cumem.TagStats("resident", "cpu", 2, 3 * GRANULE, 3 * GRANULE, 3 * GRANULE, 0),
        "small": cumem.TagStats("resident", "cpu", 1, GRANULE, GRANULE, 512, 0),
    }
    assert (stats.virtual_bytes, stats.mapped_bytes, stats.live_bytes) == (7 * GRANULE, 7 * GRANULE, 6 * GRANULE + 512)
    assert stats.host_bytes == 0
    allocator.sleep(tags=["weights", "cache"])
    stats = allocator.stats()
    assert stats.by_tag["weights"] == cumem.TagStats("asleep", "cpu", 2, 3 * GRANULE, 0, 3 * GRANULE, 3 * GRANULE)
    assert stats.by_tag["cache"] == cumem.TagStats("asleep", "discard", 1, 3 * GRANULE, 0, 3 * GRANULE, 0)
    assert (stats.virtual_bytes, stats.mapped_bytes) == (7 * GRANULE, GRANULE)
    assert stats.host_bytes == 3 * GRANULE
    assert allocator.bytes_needed_to_wake() == 6 * GRANULE
    assert allocator.bytes_needed_to_wake(["small"]) == 0
    allocator.wake_up()
    assert allocator.stats().by_tag["weights"].backup_bytes == 0
    for sample in weights:
        sample.check()
    assert {allocator.tag_of(t) for t in (cache.tensor, small)} == {"cache", "small"}


def test_what_others_do_on_the_device_is_not_in_the_ledger():
    driver = small_driver()
    mine, other = small_allocator(driver), small_allocator(driver)
    sample = Sample(mine, "weights", 2)
    before = mine.stats()
    others = Sample(other, "weights", 5, seed=1)
    assert mine.stats() == before
    assert used_bytes(mine) == 7 * GRANULE
    assert mine.sleep().freed_bytes == 2 * GRANULE
    assert used_bytes(mine) == 5 * GRANULE
    late = Sample(other, "late", 1, seed=2)
    assert mine.bytes_needed_to_wake() == 2 * GRANULE
    assert mine.wake_up().mapped_bytes == 2 * GRANULE
    for each in (sample, others, late):
        each.check()


# --- questions ---


def test_states_of_tags_and_of_the_whole():
    allocator = small_allocator()
    assert (allocator.state(), allocator.is_sleeping(), allocator.tags()) == ("empty", False, [])
    a = Sample(allocator, "a")
    allocator.set_policy("b", "cpu")
    assert (allocator.state("a"), allocator.state("b"), allocator.state()) == ("resident", "empty", "resident")
    allocator.sleep()
    assert (allocator.state("a"), allocator.state("b"), allocator.state()) == ("asleep", "empty", "asleep")
    assert (allocator.is_sleeping("a"), allocator.is_sleeping("b"), allocator.is_sleeping()) == (True, False, True)
    beside = Sample(allocator, "a", seed=1)
    assert (allocator.state("a"), allocator.is_sleeping("a")) == ("mixed", True)
    allocator.wake_up()
    assert (allocator.state("a"), allocator.is_sleeping()) == ("resident", False)
    a.check()
    beside.check()


def test_every_question_answers_while_a_transition_stands_still():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    for gate, call, state in (
        ("copy_to_host", allocator.sleep, "resident"),
        ("unmap", allocator.sleep, "resident"),
        ("map", allocator.wake_up, "asleep"),
        ("copy_to_device", allocator.wake_up, "moving"),
    ):
        allocator.sleep() if call == allocator.wake_up else allocator.wake_up()
        with held_at(driver, gate, call) as future:
            assert allocator.state("weights") == allocator.state() == allocator.stats().by_tag["weights"].state == state
            assert allocator.is_sleeping() is (state != "resident")
            assert allocator.is_resident(sample.tensor) is (state == "resident")
            assert allocator.tag_of(sample.tensor) == "weights"
            assert allocator.bytes_needed_to_wake() == (GRANULE if state == "asleep" else 0)
            assert (allocator.tags(), allocator.undefined_tags()) == (["weights"], [])
            if state != "resident":
                with pytest.raises(cumem.AsleepError, match=state):
                    allocator.assert_resident(sample.tensor)
        future.result()
    sample.check()


def test_questions_about_a_tag_that_does_not_exist_are_refused():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    for ask in (allocator.state, allocator.is_sleeping, allocator.mark_loaded, allocator.trim):
        with pytest.raises(cumem.UnknownTag, match="'wieghts'"):
            ask("wieghts")
    with pytest.raises(cumem.UnknownTag):
        allocator.bytes_needed_to_wake(["weights", "wieghts"])
    with pytest.raises(cumem.InvalidArgument):
        allocator.bytes_needed_to_wake("weights")
    sample.check()


# --- several ---


def test_two_allocators_know_nothing_of_each_others_tags_and_tensors():
    first, second = small_allocator(), small_allocator()
    a, b = Sample(first, "weights", seed=1), Sample(second, "weights", seed=2)
    assert (first.tag_of(b.tensor), second.tag_of(a.tensor)) == (None, None)
    first.sleep()
    assert (first.state("weights"), second.state("weights")) == ("asleep", "resident")
    b.check()
    second.sleep()
    first.wake_up()
    a.check()
    assert second.is_sleeping()
    second.wake_up()
    b.check()


def test_two_allocators_over_one_driver_sleep_and_end_apart():
    driver = small_driver()
    first, second = small_allocator(driver), small_allocator(driver)
    a, b = Sample(first, "weights", seed=1), Sample(second, "weights", 2, seed=2)
    second.sleep()
    del first
    a.check()
    del a
    gc.collect()
    assert counts(driver)["physical_bytes"] == 0
    second.wake_up()
    b.check()
