"""Level 2: reloadable tags are dropped, the rest and what `keep` names are saved, and undefined contents are listed."""

import pytest
import torch
from torch import nn

import cumem
from unit.machine import GRANULE, Sample, small_allocator, used_bytes


def reloadable(tag="weights", **options):
    allocator = small_allocator()
    allocator.set_policy(tag, "cpu", reloadable=True, **options)
    return allocator


def test_level_2_drops_reloadable_tags_and_saves_the_others():
    allocator = reloadable()
    weights, scales = Sample(allocator, "weights", 2, seed=1), Sample(allocator, "scales", seed=2)
    report = allocator.sleep(level=2)
    assert (report.dropped_tags, report.saved_tags) == (["weights"], ["scales"])
    assert report.by_tag["weights"] == cumem.TagSleep("cpu", True, 1, 2 * GRANULE, 0, 2 * GRANULE)
    assert report.by_tag["scales"] == cumem.TagSleep("cpu", False, 1, GRANULE, GRANULE, 0)
    assert (report.saved_bytes, report.discarded_bytes, report.host_bytes) == (GRANULE, 2 * GRANULE, GRANULE)
    assert used_bytes(allocator) == 0
    woken = allocator.wake_up()
    assert (woken.undefined_tags, woken.copied_bytes) == (["weights"], GRANULE)
    scales.check()
    assert allocator.tag_of(weights.tensor) == "weights"


def test_level_1_saves_reloadable_tags_too():
    allocator = reloadable()
    weights = Sample(allocator, "weights")
    report = allocator.sleep(level=1)
    assert (report.dropped_tags, report.saved_bytes) == ([], GRANULE)
    assert allocator.wake_up().undefined_tags == []
    weights.check()


def test_level_2_leaves_a_tag_that_sleeps_already_with_its_backup():
    allocator = reloadable()
    weights = Sample(allocator, "weights")
    allocator.sleep(level=1)
    assert allocator.sleep(level=2).by_tag == {}
    allocator.wake_up()
    weights.check()


# --- keep ---


def test_keep_saves_one_tensor_of_a_dropped_tag():
    allocator = reloadable()
    dropped, kept = Sample(allocator, "weights", 2, seed=1), Sample(allocator, "weights", 1.5, seed=2)
    report = allocator.sleep(level=2, keep=[kept.tensor])
    assert (report.saved_bytes, report.discarded_bytes) == (1.5 * GRANULE, 2 * GRANULE)
    assert report.dropped_tags == ["weights"]
    assert torch.equal(allocator.host_view(kept.tensor), kept.expected)
    with pytest.raises(cumem.StateError):
        allocator.host_view(dropped.tensor)
    assert allocator.wake_up().undefined_tags == ["weights"]
    kept.check()


@pytest.mark.parametrize("wake", ["undefined", "zero", "poison"])
def test_keep_saves_inside_a_discard_tag_and_the_rest_wakes_as_the_policy_says(wake):
    allocator = small_allocator()
    allocator.set_policy("cache", "discard", wake=wake)
    cache = Sample(allocator, "cache", 2)
    table = cache.tensor[100:612]
    report = allocator.sleep(keep=[table])
    assert (report.saved_bytes, report.discarded_bytes) == (512, 2 * GRANULE - 512)
    woken = allocator.wake_up()
    assert torch.equal(table, cache.expected[100:612])
    filler = {"zero": 0, "poison": cumem.backends.POISON_BYTE}.get(wake)
    if filler is not None:
        assert woken.zeroed_bytes == 2 * GRANULE
        assert torch.all(cache.tensor[:100] == filler)
        assert torch.all(cache.tensor[612:] == filler)


def test_keep_takes_views_of_any_stride_and_overlapping_ones_once():
    allocator = reloadable()
    weights = Sample(allocator, "weights", 2)
    matrix, expected = weights.tensor.view(512, 256), weights.expected.view(512, 256)
    views = [matrix[10:20], matrix[15:30], matrix[100:110, ::2], matrix.t()[:, 200], matrix[300:300], matrix[5, 5]]
    report = allocator.sleep(level=2, keep=views)
    spans = (30 - 10) * 256 + (9 * 256 + 255) + 256 + 1
    assert report.saved_bytes == spans
    assert report.discarded_bytes == 2 * GRANULE - spans
    assert allocator.wake_up().copied_bytes == spans
    for rows in (slice(10, 30), slice(100, 109), slice(200, 201)):
        assert torch.equal(matrix[rows], expected[rows])
    assert torch.equal(matrix[100:110, ::2], expected[100:110, ::2])
    assert matrix[5, 5] == expected[5, 5]


def test_keep_takes_a_modules_buffers_and_not_its_parameters():
    allocator = reloadable()
    module = nn.BatchNorm1d(64)
    with torch.no_grad():
        module.running_mean.uniform_()
        module.weight.uniform_()
    allocator.adopt(module, "weights")
    mean, steps = module.running_mean.clone(), module.num_batches_tracked.clone()
    report = allocator.sleep(level=2, keep=[nn.Sequential(module)])
    assert report.saved_bytes == 64 * 4 + 64 * 4 + 8
    allocator.wake_up()
    assert torch.equal(module.running_mean, mean)
    assert torch.equal(module.running_var, torch.ones(64))
    assert torch.equal(module.num_batches_tracked, steps)
    assert allocator.undefined_tags() == ["weights"]


def test_keep_ignores_native_memory_and_tags_that_are_saved_anyway():
    allocator = reloadable()
    weights, scales = Sample(allocator, "weights", seed=1), Sample(allocator, "scales", seed=2)
    report = allocator.sleep(level=2, keep=[torch.ones(10), torch.empty(0), scales.tensor])
    assert report.saved_bytes == GRANULE
    assert report.discarded_bytes == weights.expected.numel()
    allocator.wake_up()
    scales.check()


def test_what_was_kept_is_saved_by_the_next_level_2_sleep_only_if_it_is_named_again():
    allocator = reloadable()
    kept = Sample(allocator, "weights")
    for _ in range(3):
        allocator.sleep(level=2, keep=[kept.tensor])
        allocator.wake_up()
        kept.check()
    assert allocator.sleep(level=2).saved_bytes == 0
    assert allocator.stats().by_tag["weights"].backup_bytes == 0


def test_small_state_made_inside_a_dropped_region_is_kept_by_a_region_of_its_own():
    allocator = small_allocator()
    with allocator.region("kv_cache", backend="discard"):
        cache = allocator.full(GRANULE, fill_value=1.0)
        with allocator.region("scales"):
            scales = allocator.full(16, fill_value=0.5)
        table = allocator.full(8, fill_value=2.0)
    report = allocator.sleep(keep=[table])
    assert (report.dropped_tags, report.saved_tags) == (["kv_cache"], ["scales"])
    assert report.by_tag["kv_cache"].saved_bytes == 8 * 4
    allocator.wake_up()
    assert torch.equal(scales, torch.full((16,), 0.5))
    assert torch.equal(table, torch.full((8,), 2.0))
    assert allocator.tag_of(cache) == "kv_cache"


# --- undefined contents ---


def test_a_tag_is_undefined_from_its_wake_until_someone_says_that_it_is_loaded():
    allocator = reloadable()
    weights = Sample(allocator, "weights")
    assert allocator.undefined_tags() == []
    allocator.sleep(level=2)
    assert allocator.undefined_tags() == []
    allocator.wake_up()
    assert allocator.undefined_tags() == ["weights"]
    allocator.sleep()
    report = allocator.wake_up()
    assert report.undefined_tags == allocator.undefined_tags() == ["weights"], "a backup of nothing defines nothing"
    weights.tensor.copy_(weights.expected)
    allocator.mark_loaded("weights")
    allocator.mark_loaded("weights")
    allocator.sleep()
    assert allocator.wake_up().undefined_tags == allocator.undefined_tags() == []
    weights.check()


def test_only_a_tag_that_exists_can_be_marked_as_loaded():
    allocator = small_allocator()
    with pytest.raises(cumem.UnknownTag, match="wieghts"):
        allocator.mark_loaded("wieghts")


# --- the context manager ---


def test_asleep_gives_the_memory_away_for_its_body_and_wakes_it_again():
    allocator = small_allocator()
    sample = Sample(allocator, "weights", 2)
    with allocator.asleep() as report:
        assert report.freed_bytes == 2 * GRANULE
        assert used_bytes(allocator) == 0
    sample.check()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_asleep_wakes_whatever_its_body_raises(error):
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    with pytest.raises(error), allocator.asleep():
        raise error
    sample.check()


def test_asleep_wakes_only_what_it_put_to_sleep():
    allocator = small_allocator()
    a, b = Sample(allocator, "a", seed=1), Sample(allocator, "b", seed=2)
    allocator.sleep(tags=["a"])
    with allocator.asleep(), allocator.asleep():
        assert allocator.state() == "asleep"
    assert (allocator.state("a"), allocator.state("b")) == ("asleep", "resident")
    b.check()
    with allocator.asleep(tags=iter(["b"])):
        allocator.wake_up(tags=["b"])
        b.check()
    allocator.wake_up()
    a.check()


def test_asleep_that_cannot_begin_changes_nothing():
    allocator = small_allocator(host_budget=0)
    sample = Sample(allocator, "weights")
    with pytest.raises(cumem.OutOfHostMemory), allocator.asleep():
        pytest.fail("the body runs")
    with pytest.raises(cumem.UnknownTag), allocator.asleep(["wieghts"]):
        pytest.fail("the body runs")
    sample.check()


def test_a_wake_that_fails_at_the_end_of_asleep_says_so_beside_what_the_body_raised():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")

    def refuse(_):
        raise RuntimeError("not yet")

    def body():
        with allocator.asleep():
            allocator.hooks.register("refuse", before_wake=refuse)
            raise ValueError("in the body")

    with pytest.raises(RuntimeError, match="not yet") as caught:
        body()
    assert isinstance(caught.value.__context__, ValueError)
    allocator.hooks.unregister("refuse")
    allocator.wake_up()
    sample.check()
