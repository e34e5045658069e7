"""The strategies that engines use: what they draw is legal, and reaches what it should."""

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import cumem
from cumem.errors import CumemError
from cumem.testing import CODES, FOR_EVER, faulty
from cumem.testing.strategies import Step, TagPolicy, faults, histories, policies, sizes, steps, tag_sets

GRANULE = 64 << 10
TAGS = ["weights", "cache"]


def allocator_with_tags():
    allocator = cumem.Allocator(driver=faulty(device_bytes=1 << 20, granularity_bytes=GRANULE))
    for tag in TAGS:
        allocator.set_policy(tag, "cpu")
    return allocator


@given(size=sizes(GRANULE, most=3))
def test_sizes_are_of_1_to_the_most_granules(size):
    assert 1 <= size <= 3 * GRANULE


@pytest.mark.parametrize("wanted", [1, GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE])
def test_sizes_reach_every_border(wanted):
    assert find(sizes(GRANULE, most=3), lambda size: size == wanted) == wanted


@given(policy=policies())
def test_every_policy_is_taken_by_an_allocator(policy):
    allocator = allocator_with_tags()
    policy.apply(allocator, "weights")
    assert allocator.stats().by_tag["weights"].backend == policy.backend


def test_policies_reach_every_backend_and_option():
    for policy in (
        TagPolicy("cpu", {"host": "release", "reloadable": True}),
        TagPolicy("discard", {"wake": "poison", "reloadable": False}),
    ):
        assert find(policies(), lambda drawn, wanted=policy: drawn == wanted) == policy


@given(tags=tag_sets(TAGS))
def test_tag_sets_name_each_tag_at_most_once(tags):
    assert tags is None or (set(tags) <= set(TAGS) and len(set(tags)) == len(tags))


@given(fault=faults(most_calls=5))
def test_faults_can_be_armed(fault):
    fault.arm(faulty())
    assert fault.call <= 5
    assert fault.code in CODES
    assert fault.times > 0 or fault.times == FOR_EVER


@given(history=histories(TAGS), contents=st.integers(0, 255))
@settings(max_examples=50)
def test_a_history_of_steps_is_legal_and_keeps_what_no_step_dropped(history, contents):
    allocator = allocator_with_tags()
    tensors = {tag: allocator.full(100, fill_value=contents, dtype=torch.uint8, tag=tag) for tag in TAGS}
    kept = set(TAGS)
    for step in history:
        step.apply(allocator)
        if step.method == "discard" or step.options.get("restore") is False:
            kept -= set(TAGS if step.tags is None else step.tags)
    allocator.wake_up()
    assert all(tensors[tag].tolist() == [contents] * 100 for tag in kept)


@pytest.mark.parametrize("method", ["sleep", "wake_up", "discard"])
def test_steps_reach_every_transition(method):
    step = find(steps(TAGS), lambda step: step.method == method and step.tags == ("cache",))
    assert step.tags == ("cache",)


def test_a_step_raises_what_the_allocator_raises():
    with pytest.raises(CumemError):
        Step("sleep", ("no such tag",)).apply(allocator_with_tags())
