"""Hooks: their order, what they are told, what they may do, and how they are registered."""

import gc
import threading

import pytest

import cumem
from unit.hook_log import SPOTS, with_log
from unit.machine import GRANULE, Sample, counts, faulty_driver, small_allocator

# --- order ---


def test_hooks_run_in_order_going_down_and_in_reverse_coming_up():
    allocator, sample, log = with_log()
    log.add("late", "before_sleep", "after_wake", order=5)
    log.add("first", "before_sleep", "before_wake", order=-1)
    log.add("second", "after_sleep", "after_wake")
    log.add("third", "before_sleep", "before_wake")
    allocator.sleep()
    assert log.take() == ["first before_sleep", "third before_sleep", "late before_sleep", "second after_sleep"]
    allocator.wake_up()
    assert log.take() == ["third before_wake", "first before_wake", "late after_wake", "second after_wake"]
    sample.check()


def test_hooks_see_the_memory_as_their_name_says():
    allocator, sample, _ = with_log()
    seen = {}
    for spot in SPOTS:
        allocator.hooks.register(spot, **{spot: lambda _, spot=spot: seen.update({spot: allocator.state()})})
    allocator.sleep()
    allocator.wake_up()
    assert seen == {
        "before_sleep": "resident",
        "after_sleep": "asleep",
        "before_wake": "asleep",
        "after_wake": "resident",
    }
    sample.check()


def test_hooks_are_told_the_kind_the_tags_that_change_and_the_level():
    allocator, sample, log = with_log()
    cache = Sample(allocator, "cache", seed=1)
    log.add("h", *SPOTS[::2])
    allocator.sleep(tags=["weights"], level=2)
    allocator.sleep()
    allocator.wake_up()
    assert log.told == [
        cumem.Transition("sleep", ("weights",), 2),
        cumem.Transition("sleep", ("cache",), 1),
        cumem.Transition("wake_up", ("weights", "cache"), 0),
    ]
    sample.check()
    cache.check()


def test_hooks_run_on_the_callers_thread():
    allocator, sample, _ = with_log()
    threads = []
    for spot in SPOTS:
        allocator.hooks.register(spot, **{spot: lambda _: threads.append(threading.get_ident())})
    allocator.sleep()
    allocator.wake_up()
    assert threads == [threading.get_ident()] * 4
    sample.check()


def test_a_transition_that_changes_nothing_runs_no_hooks():
    allocator, sample, log = with_log()
    log.add("h", "before_sleep", "before_wake")
    allocator.wake_up()
    allocator.sleep(tags=[])
    assert log.take() == []
    allocator.sleep()
    allocator.sleep()
    assert log.take() == ["h before_sleep"]
    allocator.wake_up()
    sample.check()


# --- hooks that do too much ---


@pytest.mark.parametrize("spot", SPOTS)
@pytest.mark.parametrize("call", ["sleep", "wake_up", "discard", "asleep"])
def test_a_hook_that_starts_a_transition_gets_a_state_error_and_nothing_hangs(spot, call):
    allocator, sample, _ = with_log()
    other = small_allocator()
    errors = []

    def nested(_):
        for each in (allocator, other):
            with pytest.raises(cumem.StateError, match="from inside a transition") as caught:
                each.discard(["weights"]) if call == "discard" else each.asleep().__enter__() if call == "asleep" else (
                    getattr(each, call)()
                )
            errors.append(caught.value)

    others = Sample(other, "weights", seed=1)
    allocator.hooks.register("nested", **{spot: nested})
    allocator.sleep()
    allocator.wake_up()
    assert len(errors) == 2
    sample.check()
    others.check()


@pytest.mark.parametrize("spot", SPOTS)
def test_a_hook_may_ask_allocate_and_free(spot):
    allocator, sample, _ = with_log()
    made = [Sample(allocator, "scratch", seed=1)]

    def busy(_):
        allocator.stats(), allocator.is_sleeping(), allocator.bytes_needed_to_wake()
        made.append(Sample(allocator, "weights", seed=2))
        made[-1].check()
        made.pop(0)
        allocator.trim()

    allocator.hooks.register("busy", **{spot: busy})
    allocator.sleep()
    allocator.wake_up()
    sample.check()
    made[0].check()
    assert allocator.state() == "resident"


@pytest.mark.parametrize("spot", SPOTS)
def test_a_tensor_in_a_cycle_that_is_collected_in_a_hook_harms_nothing(spot):
    driver = faulty_driver()
    allocator, sample, _ = with_log(driver)
    cycle = [Sample(allocator, "weights", 2, seed=1)]
    cycle.append(cycle)
    allocator.hooks.register("collect", **{spot: lambda _: gc.collect()})
    gc.disable()
    try:
        if spot.endswith("sleep"):
            del cycle
        allocator.sleep()
        if spot.endswith("wake"):
            del cycle
        allocator.wake_up()
    finally:
        gc.enable()
    sample.check()
    allocator.trim()
    now = counts(driver)
    assert (now["ranges"], now["physical_bytes"]) == (1, GRANULE)


# --- registering ---


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("", {"before_sleep": print}, "empty"),
        ("taken", {"before_sleep": print}, "'taken' is taken"),
        (3, {"before_sleep": print}, "3"),
        (["h"], {"before_sleep": print}, "h"),
        ("h", {}, "at least one function"),
        ("h", {"before_sleep": 5}, "5"),
        ("h", {"before_sleep": print, "after_wake": "f"}, "'f'"),
        ("h", {"before_sleep": print, "after_sleep": print}, "two functions for one way"),
        ("h", {"before_wake": print, "after_wake": print}, "two functions for one way"),
        ("h", {"before_sleep": print, "order": "first"}, "'first'"),
        ("h", {"before_sleep": print, "order": None}, "None"),
    ],
    ids=repr,
)
def test_a_hook_that_makes_no_sense_is_refused(name, options, shown):
    allocator, sample, log = with_log()
    log.add("taken", "before_sleep")
    with pytest.raises(cumem.InvalidArgument, match=shown):
        allocator.hooks.register(name, **options)
    allocator.sleep()
    assert log.take() == ["taken before_sleep"]
    allocator.wake_up()
    sample.check()


def test_only_a_hook_that_exists_can_be_unregistered_and_its_name_is_free_then():
    allocator, _, log = with_log()
    log.add("h", "before_sleep")
    allocator.hooks.unregister("h")
    with pytest.raises(cumem.InvalidArgument, match=r"no hook 'h'; there are \[\]"):
        allocator.hooks.unregister("h")
    log.add("h", "before_sleep")
    allocator.sleep()
    assert log.take() == ["h before_sleep"]


def test_the_hooks_of_one_allocator_are_not_those_of_another():
    _, sample, log = with_log()
    other = small_allocator()
    others = Sample(other, "weights", seed=1)
    log.add("h", "before_sleep")
    other.sleep()
    assert log.take() == []
    other.wake_up()
    others.check()
    sample.check()
