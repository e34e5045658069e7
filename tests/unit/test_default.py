"""The default allocator: made at its first use, configured before it, and behind every function of the module."""

import pytest
import torch

import cumem
from cumem import _core, default
from unit.machine import GRANULE, Sample, faulty_driver, held_at, in_background, small_driver


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No default allocator yet, and afterwards the one there was."""
    monkeypatch.setattr(default, "_allocator", None)
    monkeypatch.setattr(default, "_options", {})


def test_the_default_allocator_is_made_once_at_its_first_use():
    cumem.configure(driver=small_driver())
    assert default._allocator is None
    assert cumem.tags() == []
    made = cumem.default_allocator()
    assert made is cumem.default_allocator() is default._allocator


def test_configure_sets_an_allocators_options_and_the_last_call_counts():
    cumem.configure(driver=small_driver(), device=1, host_budget=5)
    cumem.configure(driver=small_driver(), host_budget=0)
    sample = cumem.zeros(GRANULE, dtype=torch.uint8, tag="weights")
    assert cumem.default_allocator().driver_memory(0) != cumem.default_allocator().driver_memory(1)
    with pytest.raises(cumem.OutOfHostMemory):
        cumem.sleep()
    assert sample.sum() == 0


def test_configure_after_the_first_use_is_refused():
    cumem.configure(driver=small_driver())
    cumem.stats()
    with pytest.raises(cumem.StateError, match="in use already"):
        cumem.configure(driver=small_driver())
    with pytest.raises(cumem.StateError):
        cumem.configure()


def test_configure_refuses_an_option_that_no_allocator_has_and_keeps_the_others():
    cumem.configure(driver=small_driver(), host_budget=0)
    with pytest.raises(TypeError, match="hots_budget"):
        cumem.configure(hots_budget=1)
    assert default._options["host_budget"] == 0


def test_a_first_use_that_fails_leaves_it_to_be_configured_again(monkeypatch):
    def refuse():
        raise cumem.Unsupported("there is no libcuda.so.1")

    monkeypatch.setattr(_core, "cuda_driver", refuse)
    cumem.configure(driver="cuda")
    for _ in range(2):
        with pytest.raises(cumem.Unsupported):
            cumem.tags()
    cumem.configure(driver=small_driver())
    assert cumem.tags() == []


def test_two_threads_that_use_it_first_get_the_same_one(monkeypatch):
    driver = faulty_driver()
    made = []

    def slow(**options):
        made.append(cumem.Allocator(**options))
        made[-1].driver_memory()
        return made[-1]

    cumem.configure(driver=driver)
    monkeypatch.setattr(default, "Allocator", slow)
    with held_at(driver, "memory_info", cumem.default_allocator) as first:
        second = in_background(cumem.default_allocator)
    assert first.result() is second.result() is made[0]
    assert len(made) == 1


def test_the_functions_of_the_module_are_those_of_the_default_allocator():
    cumem.configure(driver=small_driver())
    mine = cumem.default_allocator()
    cumem.set_policy("cache", "discard", wake="zero")
    cache = cumem.full(4, fill_value=2.0, tag="cache")
    weights = Sample(mine, "weights")
    zeros, empty = cumem.zeros(3, tag="weights"), cumem.empty(3, tag="weights")
    module = torch.nn.Linear(2, 2)
    assert cumem.adopt(module, "model").storages == 2
    assert cumem.tags() == mine.tags() == ["cache", "weights", "model"]
    assert (cumem.tag_of(empty), cumem.is_resident(zeros)) == ("weights", True)
    cumem.assert_resident(module)
    ran = []
    cumem.hooks.register("h", before_sleep=lambda transition: ran.append(transition.kind))
    report = cumem.sleep(["weights", "cache"], level=2)
    assert (list(report.by_tag), ran) == (["weights", "cache"], ["sleep"])
    cumem.hooks.unregister("h")
    assert (cumem.state("weights"), cumem.state("model"), cumem.state()) == ("asleep", "resident", "mixed")
    assert (cumem.is_sleeping(), cumem.is_sleeping("model")) == (True, False)
    assert cumem.bytes_needed_to_wake() == 4 * mine._memory.driver.properties(0).granularity_bytes
    assert torch.equal(cumem.host_view(weights.tensor), weights.expected)
    assert cumem.wake_up(["weights"], restore=True).copied_bytes == GRANULE + 2 * 512
    cumem.wake_up()
    assert torch.all(cache == 0)
    assert cumem.discard(["model"]).discarded_bytes == 2 * 512
    cumem.wake_up()
    assert cumem.undefined_tags() == ["model"]
    cumem.mark_loaded("model")
    assert cumem.undefined_tags() == []
    with cumem.asleep(["weights"]):
        assert cumem.stats().by_tag["weights"].state == "asleep"
    weights.check()
    assert cumem.trim() > 0
    assert cumem.stats().host_bytes == 0
