"""Host memory for backups: exact, reused, given back, and refused before anything is unmapped."""

from pathlib import Path

import pytest

import cumem
from cumem import _core
from unit.machine import GRANULE, Sample, counts, faulty_driver, small_allocator, small_driver, used_bytes

MIB = 1 << 20


def anonymous_bytes():
    """Resident memory of this process that no file is behind: backups, not the emulated devices' pages."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


# --- how much ---


@pytest.mark.parametrize("sizes", [[5], [0.5, 2, 3.25], [1] * 7], ids=repr)
def test_backups_take_what_they_need_and_not_the_next_power_of_two(sizes):
    allocator = small_allocator()
    samples = [Sample(allocator, "weights", size, seed=n) for n, size in enumerate(sizes)]
    assert allocator.sleep().host_bytes == allocator.stats().host_bytes == sum(sizes) * GRANULE
    allocator.wake_up()
    for sample in samples:
        sample.check()


def test_cycles_reuse_the_host_memory_of_the_first():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sizes = [(3 * n) % 7 + 1 for n in range(12)]  # such that any other packing of these needs more
    samples = [Sample(allocator, "abc"[n % 3], size, seed=n) for n, size in enumerate(sizes)]
    held = allocator.sleep().host_bytes
    assert held == sum(sizes) * GRANULE
    allocator.wake_up()
    assert allocator.stats().host_bytes == held
    driver.clear()
    for n in range(20):
        if n % 2:
            allocator.sleep(tags=["a"])
        assert allocator.sleep().host_bytes == held
        allocator.wake_up()
    assert not {"register_host", "unregister_host", "create_stream"} & set(driver.calls)
    for sample in samples:
        sample.check()


def test_kept_host_memory_serves_another_tag():
    allocator = small_allocator(host_budget=4 * GRANULE)
    for n, tag in enumerate(("a", "b", "c")):
        sample = Sample(allocator, tag, 4, seed=n)
        allocator.sleep(tags=[tag])
        allocator.wake_up()
        sample.check()
        assert allocator.stats().host_bytes == 4 * GRANULE


def test_trim_gives_kept_host_memory_back_and_leaves_backups_alone():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    a, b = Sample(allocator, "a", 2, seed=1), Sample(allocator, "b", 3, seed=2)
    allocator.sleep(tags=["a"])
    allocator.sleep(tags=["b"])
    allocator.wake_up(tags=["a"])
    assert allocator.trim() == 2 * GRANULE
    assert allocator.trim() == 0
    assert (allocator.stats().host_bytes, counts(driver)["registrations"]) == (3 * GRANULE, 1)
    allocator.wake_up()
    assert allocator.trim() == 3 * GRANULE
    assert (allocator.stats().host_bytes, counts(driver)["registrations"]) == (0, 0)
    a.check()
    b.check()


@pytest.mark.parametrize("host", ["keep", "release"])
def test_the_process_shrinks_after_a_wake_as_the_policy_says(host):
    allocator = cumem.Allocator(driver=_core.host_driver(device_bytes=256 * MIB))
    allocator.set_policy("weights", "cpu", host=host)
    sample = Sample(allocator, "weights", 64 * MIB / GRANULE)
    before = anonymous_bytes()
    allocator.sleep()
    assert anonymous_bytes() - before > 56 * MIB
    allocator.wake_up()
    held = allocator.stats().host_bytes
    assert (held, anonymous_bytes() - before > 56 * MIB) == ((64 * MIB, True) if host == "keep" else (0, False))
    if host == "release":
        assert anonymous_bytes() - before < 8 * MIB
    sample.check()


def test_a_view_of_a_backup_keeps_its_memory_past_release():
    allocator = small_allocator()
    allocator.set_policy("weights", "cpu", host="release")
    sample = Sample(allocator, "weights", 2)
    allocator.sleep()
    view = allocator.host_view(sample.tensor)
    allocator.wake_up()
    sample.tensor.zero_()
    assert view.equal(sample.expected)
    del view
    allocator.trim()
    assert allocator.stats().host_bytes == 0


# --- too little ---


@pytest.mark.parametrize("budget", [0, 1, 3 * GRANULE - 1], ids=str)
def test_a_budget_that_is_too_small_is_told_before_anything_is_unmapped(budget):
    driver = faulty_driver()
    allocator = small_allocator(driver, host_budget=budget)
    samples = [Sample(allocator, "weights", size, seed=size) for size in (1, 2)]
    with pytest.raises(cumem.OutOfHostMemory, match=r"'weights'.*192 KiB needed.*host_budget") as caught:
        allocator.sleep()
    error = caught.value
    assert (error.needed_bytes, error.free_bytes, error.tag) == (3 * GRANULE, budget, "weights")
    assert isinstance(error, MemoryError)
    assert not {"unmap", "copy_to_host"} & set(driver.calls)
    assert (allocator.state(), allocator.stats().host_bytes) == ("resident", 0)
    assert counts(driver)["registrations"] == 0
    for sample in samples:
        sample.check()


def test_a_budget_of_exactly_what_is_needed_is_enough():
    allocator = small_allocator(host_budget=3 * GRANULE)
    samples = [Sample(allocator, "weights", size, seed=size) for size in (1, 2)]
    allocator.sleep()
    allocator.wake_up()
    for sample in samples:
        sample.check()


def test_tags_that_need_no_backup_sleep_without_any_budget():
    allocator = small_allocator(host_budget=0)
    allocator.set_policy("cache", "discard")
    cache, weights = Sample(allocator, "cache"), Sample(allocator, "weights")
    assert allocator.sleep(tags=["cache"]).freed_bytes == cache.tensor.numel()
    with pytest.raises(cumem.OutOfHostMemory):
        allocator.sleep()
    weights.check()


def test_what_sleeps_already_keeps_its_backup_when_the_next_sleep_has_no_room():
    allocator = small_allocator(host_budget=2 * GRANULE)
    a, b = Sample(allocator, "a", 1, seed=1), Sample(allocator, "b", 2, seed=2)
    allocator.sleep(tags=["a"])
    with pytest.raises(cumem.OutOfHostMemory) as caught:
        allocator.sleep()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (2 * GRANULE, GRANULE)
    assert (allocator.state("a"), allocator.state("b")) == ("asleep", "resident")
    b.check()
    allocator.wake_up()
    a.check()
    assert allocator.sleep(tags=["b"]).saved_bytes == 2 * GRANULE


@pytest.mark.parametrize("tags", [("b", "b"), ("b", "c")], ids=repr)
def test_kept_memory_that_does_not_fit_makes_room_before_a_sleep_is_refused(tags):
    allocator = small_allocator(host_budget=6 * GRANULE)
    old = Sample(allocator, "a", 3)
    allocator.sleep()
    allocator.wake_up()
    del old
    samples = [Sample(allocator, tag, size, seed=size) for tag, size in zip(tags, (2, 4), strict=True)]
    assert allocator.sleep().saved_bytes == allocator.stats().host_bytes == 6 * GRANULE
    allocator.wake_up()
    for sample in samples:
        sample.check()


def test_each_allocator_has_a_budget_of_its_own():
    poor, rich = small_allocator(host_budget=0), small_allocator(host_budget=GRANULE)
    for allocator in (poor, rich):
        sample = Sample(allocator, "weights")
        if allocator is poor:
            with pytest.raises(cumem.OutOfHostMemory):
                allocator.sleep()
        else:
            allocator.sleep()
            allocator.wake_up()
        sample.check()


def test_a_system_that_has_no_pages_is_told_like_a_budget():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    driver.fail_at(0, only="register_host", code="out_of_host_memory")
    allocator.sleep()
    allocator.wake_up()
    sample.check()


# --- pinning ---


def test_backups_whose_pinning_is_refused_work_and_are_reported():
    allocator = small_allocator(small_driver(refuse_pinning=True))
    samples = [Sample(allocator, "weights", size, seed=size) for size in (1, 2)]
    for _ in range(2):
        allocator.sleep()
        assert allocator._memory.core.host_pageable_bytes == 3 * GRANULE
        assert used_bytes(allocator) == 0
        allocator.wake_up()
        for sample in samples:
            sample.check()


def test_backups_that_could_be_pinned_are_not_reported_as_pageable():
    allocator = small_allocator()
    sample = Sample(allocator, "weights")
    allocator.sleep()
    assert allocator._memory.core.host_pageable_bytes == 0
    allocator.wake_up()
    sample.check()


# --- limits of the machine ---


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "proc/meminfo": "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n",
    "sys/fs/cgroup/jobs/memory.max": "8000000\n",
    "sys/fs/cgroup/jobs/memory.current": "1000000\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "900000\n",
}
V1 = {
    "proc/self/cgroup": "12:cpu,cpuacct:/elsewhere\n4:memory:/docker/box\n1:name=systemd:/docker/box\n",
    "proc/meminfo": V2["proc/meminfo"],
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000000\n",
    "sys/fs/cgroup/memory/docker/box/memory.limit_in_bytes": "4000000\n",
    "sys/fs/cgroup/memory/docker/box/memory.usage_in_bytes": "3500000\n",
    "sys/fs/cgroup/memory/docker/box/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
    "sys/fs/cgroup/cpu,cpuacct/elsewhere/memory.limit_in_bytes": "1\n",
}
BOX = "sys/fs/cgroup/jobs"


@pytest.mark.parametrize(
    ("changes", "free", "limit"),
    [
        ({}, 7_000_000, "jobs"),
        ({f"{BOX}/memory.stat": "anon 5\ninactive_file 600000\n"}, 7_600_000, "jobs"),
        ({f"{BOX}/memory.stat": "inactive_file 9000000\n"}, 8_000_000, "jobs"),
        ({f"{BOX}/mine/memory.max": "1500000\n"}, 600_000, "mine"),
        ({f"{BOX}/mine/memory.max": "900000\n"}, 0, "mine"),
        ({f"{BOX}/mine/memory.max": "10\n"}, 0, "mine"),
        ({"sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "3\n"}, 7, "cgroup"),
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        ({"proc/self/cgroup": "0::/elsewhere/deep\n"}, None, None),
        ({"proc/self/cgroup": "0::/../jobs\n"}, None, None),
        ({"proc/self/cgroup": "nonsense\n\n0:\n"}, None, None),
        ({f"{BOX}/memory.max": "lots\n"}, None, None),
        ({f"{BOX}/memory.current": ""}, None, None),
    ],
    ids=repr,
)
def test_the_strictest_cgroup_up_to_the_root_limits_in_version_2(tmp_path, changes, free, limit):
    write(tmp_path, V2 | changes)
    unlimited, _ = _core.host_headroom(False, str(tmp_path / "no such root"))
    found, what = _core.host_headroom(False, str(tmp_path))
    assert found == (unlimited if free is None else free)
    assert limit is None or what.rstrip("/").endswith(limit)


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, 1_000_000),
        ({"sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "9\n"}, 1_000_000),
        (
            {
                "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "3900000\n",
                "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": "3600000\n",
            },
            300_000,
        ),
    ],
    ids=repr,
)
def test_the_strictest_cgroup_up_to_the_root_limits_in_version_1(tmp_path, changes, free):
    write(tmp_path, V1 | changes)
    assert _core.host_headroom(False, str(tmp_path))[0] == free


def test_memory_that_the_system_has_left_limits_too_unless_there_is_a_budget(tmp_path):
    write(tmp_path, V2)
    assert _core.host_headroom(True, str(tmp_path)) == (5000 * 1024, "MemAvailable")
    assert _core.host_headroom(False, str(tmp_path))[0] == 7_000_000


def test_this_machine_has_some_limit():
    free, limit = _core.host_headroom(True)
    assert 0 < free < 1 << 60
    assert limit
