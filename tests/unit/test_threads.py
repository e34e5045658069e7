"""Many threads at once: each call has a defined result, and contents are exact."""

import random
import threading

import pytest
import torch

import cumem
from unit.machine import (
    GRANULE,
    PATIENCE_S,
    Sample,
    counts,
    faulty_driver,
    held_at,
    in_background,
    small_allocator,
    small_driver,
)

THREADS = 8
ROUNDS = 40  # of each thread


@pytest.fixture(autouse=True)
def torch_on_one_thread():
    """Torch's own threads would only be in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def all_at_once(function):
    """Runs `function(number)` on every thread, all begun together; raises the first error."""
    begin = threading.Barrier(THREADS)

    def work(number):
        begin.wait(PATIENCE_S)
        function(number)

    calls = [in_background(work, number) for number in range(THREADS)]
    for call in calls:
        call.result(PATIENCE_S)


def test_threads_that_each_sleep_wake_allocate_and_free_in_a_tag_of_their_own_keep_their_contents():
    driver = small_driver()
    allocator = small_allocator(driver)
    allocator.set_policy("tag 0", "cpu", host="release")

    def live(number):
        tag, dice = f"tag {number}", random.Random(number)
        held = [Sample(allocator, tag, 1, seed=number, device=number % 2)]
        for turn in range(ROUNDS):
            match dice.randrange(4):
                case 0:
                    held.append(Sample(allocator, tag, dice.choice([0.3, 1, 2]), seed=turn, device=dice.randrange(2)))
                case 1 if len(held) > 1:
                    held.pop(dice.randrange(len(held)))
                case 2:
                    with allocator.asleep([tag]):
                        assert allocator.state(tag) == "asleep"
                case _:
                    report = allocator.sleep([tag], level=dice.choice([1, 2]))
                    assert (list(report.by_tag), report.discarded_bytes) == ([tag], 0)
                    if dice.random() < 0.3:
                        held.pop()
                        held.append(Sample(allocator, tag, 1, seed=turn))
                    assert allocator.wake_up([tag]).undefined_tags == []
            for sample in held:
                sample.check()

    all_at_once(live)
    allocator.sleep()
    allocator.wake_up()
    allocator.trim()
    now = counts(driver)
    assert (now["ranges"], now["physical_bytes"], now["registrations"]) == (0, 0, 0)
    allocator._memory.core.check_valid()


def test_threads_that_sleep_and_wake_everything_at_once_end_in_a_defined_state():
    allocator = small_allocator()
    samples = [Sample(allocator, f"tag {n % 3}", 1, seed=n, device=n % 2) for n in range(6)]

    def live(number):
        dice = random.Random(number)
        for _ in range(ROUNDS):
            match dice.randrange(5):
                case 0:
                    allocator.sleep()
                case 1:
                    allocator.wake_up(dice.sample(allocator.tags(), 2))
                case 2:
                    allocator.wake_up()
                case 3:
                    scratch = allocator.empty(GRANULE, dtype=torch.uint8, tag=f"tag {dice.randrange(3)}")
                    assert allocator.tag_of(scratch) is not None
                    del scratch
                case 4:
                    assert allocator.state() in ("resident", "asleep", "mixed", "moving")
                    stats = allocator.stats()
                    assert stats.mapped_bytes >= 0
                    assert stats.live_bytes >= 6 * GRANULE
                    allocator.trim()

    all_at_once(live)
    allocator.wake_up()
    assert (allocator.state(), allocator.undefined_tags()) == ("resident", [])
    for sample in samples:
        sample.check()
    allocator._memory.core.check_valid()


def test_threads_of_two_allocators_take_turns():
    first, second = small_allocator(), small_allocator()
    samples = {allocator: Sample(allocator, "weights", seed=n) for n, allocator in enumerate((first, second))}
    seen = []

    def watch(transition):
        seen.append(transition)
        assert len(seen) == 1, "two transitions at once"
        seen.clear()

    for allocator in samples:
        allocator.hooks.register("watch", before_sleep=watch)

    def live(number):
        allocator = (first, second)[number % 2]
        for _ in range(ROUNDS // 4):
            allocator.sleep()
            allocator.wake_up()

    all_at_once(live)
    for allocator, sample in samples.items():
        allocator.wake_up()
        sample.check()


def test_many_threads_make_one_tag_and_agree_on_it():
    allocator = small_allocator()
    held = [None] * THREADS

    def make(number):
        held[number] = Sample(allocator, "weights", seed=number)

    all_at_once(make)
    assert allocator.tags() == ["weights"]
    assert allocator.stats().by_tag["weights"].segments == THREADS
    for sample in held:
        sample.check()


def test_two_sleeps_at_once_share_the_work_and_both_succeed():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, tag, seed=n) for n, tag in enumerate("ab")]
    with held_at(driver, "copy_to_host", allocator.sleep, ["a"]) as first:
        second = in_background(allocator.sleep)
        assert allocator.state() == "resident"
    assert list(first.result(PATIENCE_S).by_tag) == ["a"]
    assert list(second.result(PATIENCE_S).by_tag) == ["b"]
    with held_at(driver, "copy_to_device", allocator.wake_up) as first:
        second = in_background(allocator.wake_up, ["a"])
    assert set(first.result(PATIENCE_S).by_tag) == {"a", "b"}
    assert second.result(PATIENCE_S).by_tag == {}
    for sample in samples:
        sample.check()


def test_a_wake_that_waits_for_a_sleep_wakes_what_it_put_to_sleep():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    with held_at(driver, "unmap", allocator.sleep) as sleep:
        wake = in_background(allocator.wake_up)
    assert sleep.result(PATIENCE_S).freed_bytes == wake.result(PATIENCE_S).mapped_bytes == GRANULE
    sample.check()


def test_allocating_and_freeing_wait_for_no_transition():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    for gate, call in (("copy_to_host", allocator.sleep), ("copy_to_device", allocator.wake_up)):
        with held_at(driver, gate, call) as transition:
            for n in range(5):
                Sample(allocator, ("weights", "other")[n % 2], seed=n).check()
            assert allocator.trim() >= 0
            assert not transition.done()
        transition.result(PATIENCE_S)
    sample.check()


def test_a_tensor_that_is_dropped_on_another_thread_during_its_transition_is_gone_afterwards():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    held = [Sample(allocator, "weights", 2), Sample(allocator, "weights", seed=1)]
    with held_at(driver, "copy_to_host", allocator.sleep) as sleep:
        in_background(held.pop, 0).result(PATIENCE_S)
    sleep.result(PATIENCE_S)
    assert allocator.wake_up().mapped_bytes == GRANULE
    held[0].check()


def test_a_transition_of_a_thread_that_ends_at_once_is_whole():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    for _ in range(5):
        for call in (allocator.sleep, allocator.wake_up):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(PATIENCE_S)
    sample.check()
    assert isinstance(allocator.stats(), cumem.MemoryStats)
