"""Ctrl-C, a SIGTERM handler that raises, an exception sent into a thread: a legal state, and the next call works."""

import signal
import threading
from contextlib import contextmanager

import pytest
import torch

from unit.interpreter import run_script
from unit.machine import (
    GRANULE,
    PATIENCE_S,
    Sample,
    counts,
    faulty_driver,
    held_at,
    in_background,
    small_allocator,
    until,
    used_bytes,
)

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


class Stopped(BaseException):
    """What the handler of SIGTERM raises."""


RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Stopped}


@pytest.fixture(params=RAISED, ids=["SIGINT", "SIGTERM"])
def signum(request):
    def stop(*_):
        raise RAISED[request.param]

    before = signal.signal(request.param, stop)
    yield request.param
    signal.signal(request.param, before)


@contextmanager
def interrupted_at(driver, gate, signum, shields):
    """When the body's transition stands at the gate: signals, lets the caller notice, and opens the gate."""
    driver.hold(gate)

    def interrupt():
        try:
            assert driver.wait_held(gate, PATIENCE_S)
            signal.pthread_kill(threading.main_thread().ident, signum)
            until(lambda: shields and shields[-1]._interrupt is not None)
        finally:
            driver.release(gate)

    interruption = in_background(interrupt)
    with pytest.raises(RAISED[signum]) as caught:
        yield caught
    interruption.result(PATIENCE_S)


def notes(error):
    return " ".join(getattr(error, "__notes__", ["aborted", "ran to its end"]))  # Python 3.10 has no notes


# --- a sleep ---


@pytest.mark.parametrize("gate", ["register_host", "synchronize", "create_stream", "copy_to_host", "query_event"])
def test_a_sleep_that_is_interrupted_before_its_decision_leaves_all_resident(gate, signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, tag, seed=n) for n, tag in enumerate(("a", "b", "b"))]
    undone = []
    allocator.hooks.register(
        "h", before_sleep=lambda t: undone.append("down"), before_wake=lambda t: undone.append(t.undo)
    )
    with interrupted_at(driver, gate, signum, shields) as caught:
        allocator.sleep()
    assert "aborted" in notes(caught.value)
    assert "unmap" not in driver.calls
    assert undone in ([], ["down", True])
    assert (allocator.state("a"), allocator.state("b")) == ("resident", "resident")
    assert allocator.stats().by_tag["a"].backup_bytes == allocator.stats().by_tag["b"].backup_bytes == 0
    for sample in samples:
        sample.check()
    assert allocator.sleep().freed_bytes == 3 * GRANULE
    allocator.wake_up()
    for sample in samples:
        sample.check()


@pytest.mark.parametrize("gate", ["unmap", "release"])
def test_a_sleep_that_is_interrupted_after_its_decision_ends_and_raises_then(gate, signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, tag, seed=n) for n, tag in enumerate(("a", "b", "b"))]
    ran = []
    allocator.hooks.register("h", before_sleep=lambda _: ran.append("before"))
    allocator.hooks.register("g", after_sleep=lambda _: ran.append("after"))
    with interrupted_at(driver, gate, signum, shields) as caught:
        allocator.sleep()
    assert "ran to its end" in notes(caught.value)
    assert ran == ["before", "after"]
    assert (allocator.state("a"), allocator.state("b"), used_bytes(allocator)) == ("asleep", "asleep", 0)
    assert allocator.sleep().by_tag == {}
    allocator.wake_up()
    for sample in samples:
        sample.check()


# --- a wake ---


def test_a_wake_that_is_interrupted_before_its_decision_leaves_all_asleep(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", seed=n) for n in range(3)]
    allocator.sleep()
    for gate in ("memory_info", "synchronize"):
        driver.clear()
        with interrupted_at(driver, gate, signum, shields) as caught:
            allocator.wake_up()
        assert "aborted" in notes(caught.value)
        assert "map" not in driver.calls
        assert (allocator.state("weights"), used_bytes(allocator)) == ("asleep", 0)
    allocator.wake_up()
    for sample in samples:
        sample.check()


@pytest.mark.parametrize("gate", ["create", "map", "set_access", "copy_to_device"])
def test_a_wake_that_is_interrupted_after_its_decision_ends_and_raises_then(gate, signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", seed=n) for n in range(3)]
    allocator.sleep()
    with interrupted_at(driver, gate, signum, shields) as caught:
        allocator.wake_up()
    assert "ran to its end" in notes(caught.value)
    assert allocator.state("weights") == "resident"
    for sample in samples:
        sample.check()
    assert allocator.wake_up().by_tag == {}


def test_an_interrupted_call_that_failed_as_well_says_so(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.fail_at(0, only="map", times=2)
    with interrupted_at(driver, "create", signum, shields) as caught:
        allocator.wake_up()
    if hasattr(caught.value, "__notes__"):
        assert "WakeUpPartialFailure" in notes(caught.value)
    assert allocator.state("weights") == "asleep"
    allocator.wake_up()
    sample.check()


# --- discard, asleep ---


def test_a_discard_that_is_interrupted_before_its_decision_drops_nothing(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    awake, asleep = Sample(allocator, "awake", seed=1), Sample(allocator, "asleep", seed=2)
    allocator.sleep(tags=["asleep"])
    with interrupted_at(driver, "synchronize", signum, shields):
        allocator.discard(["awake", "asleep"])
    awake.check()
    allocator.wake_up()
    asleep.check()


def test_a_discard_of_what_sleeps_that_is_interrupted_drops_nothing(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    asleep, dead = Sample(allocator, "asleep"), Sample(allocator, "other")
    allocator.sleep(tags=["asleep"])
    del dead  # so that the discard has something to wait for
    with interrupted_at(driver, "synchronize", signum, shields) as caught:
        allocator.discard(["asleep"])
    assert "aborted" in notes(caught.value)
    allocator.wake_up()
    asleep.check()


def test_a_discard_that_is_interrupted_after_its_decision_drops_what_it_was_told_to(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    awake, asleep = Sample(allocator, "awake", seed=1), Sample(allocator, "asleep", seed=2)
    allocator.sleep(tags=["asleep"])
    with interrupted_at(driver, "unmap", signum, shields):
        allocator.discard(["awake", "asleep"])
    assert sum(tag.backup_bytes for tag in allocator.stats().by_tag.values()) == 0
    assert allocator.wake_up().undefined_tags == ["awake", "asleep"]
    assert awake.tensor.data_ptr() != asleep.tensor.data_ptr()


def test_asleep_that_is_interrupted_while_it_falls_asleep_is_awake_again_and_has_no_body(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample, other = Sample(allocator, "weights"), Sample(allocator, "other", seed=1)
    allocator.sleep(tags=["other"])
    with interrupted_at(driver, "unmap", signum, shields), allocator.asleep():
        pytest.fail("the body runs")
    sample.check()
    assert allocator.state("other") == "asleep"
    allocator.wake_up()
    other.check()


def test_asleep_that_is_interrupted_while_it_wakes_wakes_all_the_same(signum, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    with interrupted_at(driver, "memory_info", signum, shields), allocator.asleep():
        pass
    sample.check()


# --- allocating ---


@pytest.mark.parametrize("gate", ["reserve", "create", "map", "set_access"])
def test_an_allocation_or_adoption_that_is_interrupted_leaves_nothing_that_nobody_frees(gate, signum):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    module = torch.nn.Linear(100, 100)
    before = module.weight.detach().clone()

    def interrupt():
        assert driver.wait_held(gate, PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident, signum)
        driver.release(gate)

    for call in (lambda: allocator.empty(5, tag="weights"), lambda: allocator.adopt(module, "weights")):
        driver.hold(gate)
        interruption = in_background(interrupt)
        with pytest.raises(RAISED[signum]):
            call()
        interruption.result(PATIENCE_S)
        allocator.trim()
        assert (counts(driver)["ranges"], counts(driver)["physical_bytes"]) == (0, 0)
    assert torch.equal(module.weight, before)
    assert allocator.adopt(module, "weights").storages == 2
    assert torch.equal(module.weight, before)


# --- waiting ---


def test_a_call_that_waits_for_its_turn_can_be_interrupted(signum, shields):
    driver = faulty_driver()
    other, allocator = small_allocator(driver), small_allocator()
    others, mine = Sample(other, "weights"), Sample(allocator, "weights")
    with held_at(driver, "copy_to_host", other.sleep) as sleep:

        def interrupt():
            until(lambda: len(shields) == 2)
            signal.pthread_kill(threading.main_thread().ident, signum)

        interruption = in_background(interrupt)
        with pytest.raises(RAISED[signum]):
            allocator.sleep()
        interruption.result(PATIENCE_S)
        mine.check()
    sleep.result(PATIENCE_S)
    allocator.sleep()
    for each in (allocator, other):
        each.wake_up()
    mine.check()
    others.check()


# --- the real thing ---


def test_ctrl_c_with_pythons_own_handler_ends_a_script_with_its_memory_in_a_legal_state():
    printed = run_script(
        """
import signal
driver.hold("copy_to_host")
def interrupt():
    driver.wait_held("copy_to_host", 60)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    driver.release("copy_to_host")
helper = threading.Thread(target=interrupt)
helper.start()
try:
    a.sleep()
except KeyboardInterrupt:
    print("interrupted")
helper.join()
print(a.state() in ("resident", "asleep"))
a.wake_up()
print(int(weights[0]), int(cache[-1]))
"""
    )
    assert printed.split() == ["interrupted", "True", "7", "9"]


def test_sigterm_without_a_handler_ends_a_sleeping_process_as_it_always_does():
    script = "import signal; a.sleep(); os.kill(os.getpid(), signal.SIGTERM)"
    assert run_script(script, status=-signal.SIGTERM) == ""
