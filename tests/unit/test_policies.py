"""Policies: where a tag's bytes go, what it wakes with, and when that can be changed."""

import itertools

import pytest
import torch

import cumem
from cumem.backends import POISON_BYTE, BackendContext, Restored, Saved
from unit.machine import GRANULE, Sample, faulty_driver, held_at, small_allocator

numbers = itertools.count()


# --- discard ---


@pytest.mark.parametrize(
    ("wake", "byte", "undefined"),
    [("zero", 0, []), ("poison", POISON_BYTE, ["cache"])],
)
def test_a_dropped_tag_wakes_filled_as_its_policy_says(wake, byte, undefined):
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake=wake)
    cache, weights = Sample(allocator, "cache", 1.5, seed=1), Sample(allocator, "weights", seed=2)
    report = allocator.sleep()
    assert (report.discarded_bytes, report.saved_bytes) == (1.5 * GRANULE, GRANULE)
    woken = allocator.wake_up()
    assert torch.all(cache.tensor == byte)
    assert (woken.zeroed_bytes, woken.copied_bytes, woken.undefined_tags) == (1.5 * GRANULE, GRANULE, undefined)
    weights.check()


def test_a_dropped_tag_wakes_undefined_by_default_and_nothing_is_written_to_it():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    cache = allocator.zeros(GRANULE, dtype=torch.uint8, tag="cache", backend="discard")
    allocator.sleep()
    driver.clear()
    woken = allocator.wake_up()
    assert not {"fill", "copy_to_device"} & set(driver.calls)
    assert (woken.zeroed_bytes, woken.undefined_tags) == (0, ["cache"])
    assert torch.all(cache != 0), "these are not fresh pages: nobody saw that the contents are gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_poison_is_nan_so_that_stale_bytes_show_even_through_a_product_with_zero(dtype):
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake="poison")
    cache = allocator.zeros(64, dtype=dtype, tag="cache")
    allocator.sleep()
    allocator.wake_up()
    assert torch.all(torch.isnan(cache.float() * 0))


def test_zeros_leave_nothing_stale_that_a_product_with_zero_could_spread():
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake="zero")
    cache = allocator.full(64, fill_value=float("nan"), tag="cache")
    allocator.sleep()
    allocator.wake_up()
    assert torch.equal(cache * 0, torch.zeros(64))


# --- one tag, one policy ---


def test_a_new_tag_has_the_backend_cpu():
    allocator = small_allocator()
    Sample(allocator, "weights")
    assert allocator.stats().by_tag["weights"].backend == "cpu"


def test_a_tag_can_be_named_again_with_its_backend_or_without_and_with_no_other():
    allocator = small_allocator()
    first = Sample(allocator, "cache", backend="discard")
    Sample(allocator, "cache")
    Sample(allocator, "cache", backend="discard")
    with pytest.raises(cumem.StateError, match=r"'cache' has backend 'discard'.*set_policy") as caught:
        allocator.empty(1, tag="cache", backend="cpu")
    assert "'cpu'" in str(caught.value)
    with pytest.raises(cumem.StateError):
        allocator.adopt([torch.ones(2)], "cache", backend="cpu")
    Sample(allocator, "weights")
    with pytest.raises(cumem.StateError, match="'weights' has backend 'cpu'"):
        allocator.empty(1, tag="weights", backend="discard")
    first.check()
    assert allocator.stats().by_tag["cache"].backend == "discard"


def test_options_stay_when_a_tag_is_named_again_with_its_backend():
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake="zero")
    cache = Sample(allocator, "cache", backend="discard")
    allocator.sleep()
    allocator.wake_up()
    assert torch.all(cache.tensor == 0)


@pytest.mark.parametrize(
    ("backend", "options", "shown"),
    [
        ("nonsense", {}, "'nonsense'.*'cpu', 'discard'"),
        ("", {}, "''"),
        (None, {}, "None"),
        (["cpu"], {}, "cpu"),
        ("cpu", {"hots": "keep"}, "hots"),
        ("cpu", {"host": "drop"}, "'drop'"),
        ("cpu", {"wake": "zero"}, "wake"),
        ("cpu", {"reloadable": 1}, "1"),
        ("discard", {"wake": "zeros"}, "'zeros'"),
        ("discard", {"wake": None}, "None"),
        ("discard", {"wake": ["zero"]}, "zero"),
        ("discard", {"host": "keep"}, "host"),
        ("discard", {"reloadable": "yes"}, "'yes'"),
    ],
    ids=repr,
)
def test_a_backend_or_option_that_is_refused_changes_nothing(backend, options, shown):
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake="zero")
    cache = Sample(allocator, "cache")
    for tag in ("cache", "new"):
        with pytest.raises(cumem.InvalidArgument, match=shown):
            allocator.set_policy(tag, backend, **options)
    assert allocator.tags() == ["cache"]
    allocator.sleep()
    allocator.wake_up()
    assert torch.all(cache.tensor == 0)


@pytest.mark.parametrize("tag", ["", None, 5, b"weights", ["weights"]], ids=repr)
def test_a_tag_is_a_string_with_something_in_it(tag):
    allocator = small_allocator()
    with pytest.raises(cumem.InvalidArgument, match="tag"):
        allocator.empty(1, tag=tag)
    with pytest.raises(cumem.InvalidArgument, match="non-empty string"):
        allocator.set_policy(tag, "cpu")
    assert allocator.tags() == []


def test_a_tensor_that_is_refused_makes_no_tag_of_an_unknown_backend():
    allocator = small_allocator()
    for backend in ("nonsense", "", ["cpu"], 3):
        with pytest.raises(cumem.InvalidArgument):
            allocator.empty(1, tag="weights", backend=backend)
    assert allocator.tags() == []


# --- changing it ---


def test_a_policy_changes_while_its_tag_is_awake_and_counts_from_the_next_sleep():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    allocator.set_policy("weights", "discard", wake="zero")
    assert allocator.sleep().dropped_tags == ["weights"]
    allocator.wake_up()
    assert torch.all(sample.tensor == 0)
    sample.tensor.copy_(sample.expected)
    allocator.set_policy("weights", "cpu")
    assert allocator.sleep().saved_tags == ["weights"]
    allocator.wake_up()
    sample.check()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_policy_cannot_change_while_some_of_its_tag_sleeps(mixed):
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    allocator.sleep()
    beside = Sample(allocator, "weights") if mixed else None
    assert allocator.state("weights") == ("asleep" if beside is None else "mixed")
    with pytest.raises(cumem.StateError, match=r"'weights' is .*wake_up\(\['weights'\]\)"):
        allocator.set_policy("weights", "discard")
    assert allocator.stats().by_tag["weights"].backend == "cpu"
    allocator.wake_up()
    sample.check()
    allocator.set_policy("weights", "discard")


def test_a_policy_cannot_change_while_its_tag_wakes():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    waking = held_at(driver, "copy_to_device", allocator.wake_up)
    with waking as wake, pytest.raises(cumem.StateError, match="moving"):
        allocator.set_policy("weights", "discard")
    wake.result()
    sample.check()


def test_a_policy_that_changes_during_a_sleep_does_not_mislead_the_wake():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    with held_at(driver, "copy_to_host", allocator.sleep) as sleep:
        allocator.set_policy("weights", "discard", wake="zero")
    assert sleep.result().saved_bytes == GRANULE
    allocator.wake_up()
    sample.check()


# --- backends of others ---


def backend_that(**methods):
    """A registered backend's name; it keeps nothing but does what `methods` say."""
    name = f"of-others-{next(numbers)}"

    class Other:
        keeps_contents = survives_process = preserves_graphs = False

        def __init__(self, context: BackendContext) -> None:
            self.name = name
            methods.get("made", lambda: None)()

        def reserve(self, extents):
            methods.get("reserve", lambda: None)()

        def save(self, extents):
            methods.get("save", lambda: None)()
            return Saved()

        def restore(self, extents):
            methods.get("restore", lambda: None)()
            return Restored(defined=False)

        def release(self, extents):
            pass

    cumem.backends.register(name, Other)
    return name


@pytest.mark.parametrize("method", ["reserve", "save"])
def test_a_backend_that_starts_a_transition_gets_a_state_error_and_nothing_hangs(method):
    allocator = small_allocator()
    name = backend_that(**{method: allocator.wake_up})
    sample = Sample(allocator, "weights", backend=name)
    with pytest.raises(cumem.StateError, match="from inside a transition"):
        allocator.sleep()
    assert allocator.state() == "resident"
    sample.check()


def test_a_backend_that_starts_a_transition_in_restore_leaves_its_segments_asleep():
    allocator = small_allocator()
    calls = iter([allocator.sleep, allocator.sleep])  # of the batch, and of the segment by itself

    def restore():
        next(calls, lambda: None)()

    name = backend_that(restore=restore)
    sample = Sample(allocator, "weights", backend=name)
    allocator.sleep()
    with pytest.raises(cumem.WakeUpPartialFailure, match="from inside a transition") as caught:
        allocator.wake_up()
    assert caught.value.failed[0].phase == "restore"
    assert allocator.state() == "asleep"
    assert caught.value.retry().mapped_bytes == sample.tensor.numel()


def test_a_backend_may_ask_about_the_allocator_while_it_is_made():
    allocator = small_allocator()
    seen = []
    name = backend_that(made=lambda: seen.append(allocator.tags()))
    allocator.set_policy("weights", name)
    Sample(allocator, "cache", backend=name)
    assert seen == [[], ["weights"]]


@pytest.mark.parametrize("name", ["", None, 3], ids=repr)
def test_a_backend_needs_a_name_of_its_own(name):
    with pytest.raises(cumem.InvalidArgument, match="no name"):
        cumem.backends.register(name, cumem.backends.CpuBackend)
    with pytest.raises(cumem.InvalidArgument, match="registered already"):
        cumem.backends.register("cpu", cumem.backends.DiscardBackend)
    cumem.backends.register("cpu", cumem.backends.CpuBackend)
    assert {"cpu", "discard"} <= set(cumem.backends.names())
