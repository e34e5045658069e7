"""Shield: a transition's two threads, and what is raised into the caller's."""

import ctypes
import signal
import threading

import pytest

import cumem
from cumem.shield import Interrupted, Shield
from unit.machine import GRANULE, PATIENCE_S, Sample, faulty_driver, held_at, in_background, small_allocator, until


class Stopped(BaseException):
    """What is raised into a thread."""


def send(thread, error=Stopped):
    """Raises an exception into a thread, as soon as it runs Python code."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error)) == 1


def noted(error):
    return " ".join(getattr(error, "__notes__", ["aborted", "ran to its end", "ValueError: own"]))


def interrupted_in(body):
    """Runs a shield with this body on another thread; the body calls its argument to interrupt the caller for sure."""
    caller = []

    def wrapped(shield):
        def interrupt():
            send(caller[0])
            until(lambda: shield._interrupt is not None)

        return body(shield, interrupt)

    def run():
        caller.append(threading.get_ident())
        return Shield(wrapped, "sleep").run()

    with pytest.raises(Stopped) as caught:
        in_background(run).result(PATIENCE_S)
    return caught.value


# --- one shield ---


def test_the_body_runs_on_a_thread_of_its_own_and_its_result_comes_back():
    threads = []

    def body(shield):
        threads.append(threading.current_thread())
        shield.checkpoint()
        shield.decide()
        return 7

    assert Shield(body, "sleep").run() == 7
    assert threads[0] is not threading.current_thread()
    assert (threads[0].name, threads[0].daemon) == ("cumem-sleep", False)
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_body_comes_back_as_it_is(error):
    own = error("own")

    def body(_):
        raise own

    with pytest.raises(error) as caught:
        Shield(body, "sleep").run()
    assert caught.value is own


def test_what_the_body_asks_for_runs_on_the_callers_thread_and_its_error_comes_back():
    threads = []

    def fail():
        threads.append(threading.get_ident())
        raise ValueError("in the hook")

    def body(shield):
        for _ in range(3):
            shield.on_caller(lambda: threads.append(threading.get_ident()))
        with pytest.raises(ValueError, match="in the hook"):
            shield.on_caller(fail)
        return "went on"

    assert Shield(body, "sleep").run() == "went on"
    assert threads == [threading.get_ident()] * 4


def test_an_interrupt_shows_at_the_next_checkpoint_and_the_caller_gets_it():
    passed = []

    def body(shield, interrupt):
        shield.checkpoint()
        interrupt()
        passed.append("before")
        shield.checkpoint()
        passed.append("after")

    error = interrupted_in(body)
    assert passed == ["before"]
    assert "aborted" in noted(error)


def test_an_interrupt_after_the_decision_waits_for_the_end():
    passed = []

    def body(shield, interrupt):
        shield.decide()
        interrupt()
        shield.on_caller(lambda: passed.append("hook"))
        passed.append("end")

    error = interrupted_in(body)
    assert passed == ["hook", "end"]
    assert "ran to its end" in noted(error)


def test_a_second_interrupt_changes_nothing_more():
    def body(shield, interrupt):
        interrupt()
        interrupt()
        with pytest.raises(Interrupted):
            shield.decide()
        shield.checkpoint()

    assert "aborted" in noted(interrupted_in(body))


def test_the_bodys_own_failure_is_told_with_the_interrupt():
    def body(shield, interrupt):
        shield.decide()
        interrupt()
        raise ValueError("own")

    assert "ValueError: own" in noted(interrupted_in(body))


def test_an_interrupt_in_the_middle_of_a_hook_ends_that_hook_and_the_next_one_runs():
    ran = []

    def body(shield, interrupt):
        inside = threading.Event()

        def hook():
            inside.set()
            until(lambda: False)

        def interrupt_inside():
            inside.wait(PATIENCE_S)
            interrupt()

        interruption = in_background(interrupt_inside)
        with pytest.raises(Stopped):
            shield.on_caller(hook)
        interruption.result(PATIENCE_S)
        shield.on_caller(lambda: ran.append("next"))

    interrupted_in(body)
    assert ran == ["next"]


# --- transitions ---


@pytest.mark.parametrize("waiting", [False, True])
def test_a_signal_handler_that_starts_a_transition_inside_one_gets_a_state_error(waiting, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.hooks.register("h", before_sleep=lambda _: None)
    other = small_allocator(other_driver := faulty_driver())
    others = Sample(other, "weights", seed=1)
    gate = other_driver if waiting else driver
    errors = []

    def handler(*_):
        try:
            allocator.sleep()
        except BaseException as error:
            errors.append(error)

    def signal_then_open():
        assert gate.wait_held("copy_to_host", PATIENCE_S)
        until(lambda: len(shields) == (2 if waiting else 1))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        until(lambda: errors)
        gate.release("copy_to_host")

    before = signal.signal(signal.SIGUSR1, handler)
    gate.hold("copy_to_host")
    try:
        first = in_background(other.sleep) if waiting else None
        assert not waiting or gate.wait_held("copy_to_host", PATIENCE_S)
        opened = in_background(signal_then_open)
        allocator.sleep()
        opened.result(PATIENCE_S)
        if first is not None:
            first.result(PATIENCE_S)
    finally:
        gate.release("copy_to_host")
        signal.signal(signal.SIGUSR1, before)
    assert [type(error) for error in errors] == [cumem.StateError]
    allocator.wake_up()
    sample.check()
    other.wake_up()
    others.check()


def test_a_signal_while_the_transitions_thread_begins_leaves_nobody_waiting(monkeypatch):
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    allocator.hooks.register("h", before_sleep=lambda _: None)
    begin = threading.Thread.start

    def start(thread):
        begin(thread)
        if thread.name == "cumem-sleep":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            allocator.sleep()
    sample.check()
    assert allocator.sleep().freed_bytes == GRANULE
    allocator.wake_up()
    sample.check()


# --- an exception sent into a thread ---


@pytest.mark.parametrize(
    ("gate", "state"), [("synchronize", "resident"), ("copy_to_host", "resident"), ("unmap", "asleep")]
)
def test_an_exception_sent_into_a_sleeping_thread_aborts_before_the_decision_and_waits_after_it(gate, state, shields):
    driver = faulty_driver()
    allocator = small_allocator(driver)
    samples = [Sample(allocator, "weights", seed=n) for n in range(2)]
    thread = []

    def sleep():
        thread.append(threading.get_ident())
        allocator.sleep()

    with held_at(driver, gate, sleep) as call:
        sent = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread[0]), ctypes.py_object(Stopped))
        assert sent == 1
        until(lambda: shields[-1]._interrupt is not None)
    with pytest.raises(Stopped):
        call.result(PATIENCE_S)
    assert allocator.state("weights") == state
    allocator.wake_up()
    for sample in samples:
        sample.check()
    assert allocator.sleep().freed_bytes == 2 * GRANULE
    allocator.wake_up()
