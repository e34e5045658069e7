"""Regions where torch cannot be routed: the tag and its policy for `empty` and `adopt`, and their bad input."""

from __future__ import annotations

import threading

import pytest
import torch

import cumem
from cumem import _core


@pytest.fixture
def allocator() -> cumem.Allocator:
    return cumem.Allocator(driver=_core.host_driver(device_bytes=256 << 20, granularity_bytes=64 << 10))


def test_empty_and_adopt_take_the_innermost_regions_tag(allocator: cumem.Allocator) -> None:
    model = torch.nn.Linear(4, 4)
    with allocator.region("weights"):
        allocator.adopt(model)
        with allocator.region("kv_cache", backend="discard", wake="zero"):
            cache = allocator.empty(16)
        scales = allocator.zeros(16)
    tags = [allocator.tag_of(t) for t in (model.weight, cache, scales)]
    assert tags == ["weights", "kv_cache", "weights"]
    allocator.sleep()
    allocator.wake_up()
    assert bool((cache == 0).all())


def test_outside_of_a_region_a_tag_must_be_given(allocator: cumem.Allocator) -> None:
    with pytest.raises(cumem.InvalidArgument, match="inside a region"):
        allocator.empty(4)
    with pytest.raises(cumem.InvalidArgument, match="inside a region"):
        allocator.adopt(torch.zeros(4))


def test_exclude_hides_the_regions_and_brings_them_back_under_an_error(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        with pytest.raises(cumem.InvalidArgument, match="inside a region"), cumem.exclude():
            allocator.empty(4)
        assert allocator.tag_of(allocator.empty(4)) == "weights"


def test_a_region_of_another_allocator_gives_no_tag(allocator: cumem.Allocator) -> None:
    other = cumem.Allocator(driver="host")
    with other.region("weights"), pytest.raises(cumem.InvalidArgument, match="inside a region"):
        allocator.empty(4)


def test_a_region_is_of_the_thread_that_entered_it(allocator: cumem.Allocator) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            allocator.empty(4)
        except cumem.InvalidArgument as error:
            errors.append(error)

    with allocator.region("weights"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_a_region_with_another_backend_than_its_tags_is_refused(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        pass
    with pytest.raises(cumem.StateError, match="set_policy"):
        allocator.region("weights", backend="discard")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"scope": "global"}, "global"),
        ({"backend": "disk"}, "disk"),
        ({"devices": [7]}, "7"),
        ({"devices": ["cuda:0"]}, "cuda:0"),
        ({"backend": "discard", "wake": "random"}, "random"),
    ],
)
def test_bad_input_is_refused_and_the_message_shows_it(
    allocator: cumem.Allocator, options: dict[str, object], shown: str
) -> None:
    with pytest.raises(cumem.InvalidArgument, match=shown):
        allocator.region("weights", **options)


def test_a_region_object_is_entered_once(allocator: cumem.Allocator) -> None:
    region = allocator.region("weights")
    with region:
        pass
    with pytest.raises(cumem.StateError, match="entered before"):
        region.__enter__()


def test_regions_are_left_in_order(allocator: cumem.Allocator) -> None:
    outer, inner = allocator.region("a"), allocator.region("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(cumem.StateError, match="innermost"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


def test_the_report_counts_what_the_tag_gained(allocator: cumem.Allocator) -> None:
    with allocator.region("weights") as region:
        kept = allocator.zeros(1 << 20, dtype=torch.uint8)
    report = region.report
    assert (report.tag, report.caught_bytes, report.native_bytes, report.unreached) == ("weights", 1 << 20, 0, [])
    assert kept.numel() == 1 << 20


def test_a_wake_gives_no_pages_to_holes_of_16_mib_and_more(allocator: cumem.Allocator) -> None:
    parts = [torch.full((20 << 20,), i, dtype=torch.uint8) for i in range(5)]
    allocator.adopt(parts, tag="weights")
    assert allocator.stats().by_tag["weights"].segments == 1
    del parts[1:4]
    report = allocator.sleep()
    assert report.copied_bytes == 40 << 20
    assert report.freed_bytes == 100 << 20
    assert allocator.bytes_needed_to_wake() == 40 << 20
    woken = allocator.wake_up()
    assert woken.mapped_bytes == 40 << 20
    assert allocator.stats().mapped_bytes == 40 << 20
    assert [int(part[0]) for part in parts] == [0, 4]
    assert all(bool((part == part[0]).all()) for part in parts)
    allocator._memory.core.check_valid()
    again = allocator.sleep()
    assert (again.freed_bytes, again.copied_bytes) == (40 << 20, 40 << 20)
    allocator.wake_up()
    assert [int(part[0]) for part in parts] == [0, 4]
    del parts[:]
    allocator.trim()
    assert allocator._memory.driver.counts().physical_bytes == 0


def test_a_shareable_segment_keeps_all_its_pages() -> None:
    core = _core.Core(_core.host_driver())
    address = core.malloc(core.create_slot(), 64 << 20, 0, True)
    info = core.find(address)
    assert info is not None
    core.claim([info.id])
    core.unmap([info.id])
    with pytest.raises(cumem.StateError, match="keeps its pages"):
        core.set_backing(info.id, [(0, 2 << 20)])
