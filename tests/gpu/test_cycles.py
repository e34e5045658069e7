"""Many cycles over much memory: contents exact, addresses equal, nothing left behind."""

from __future__ import annotations

import statistics

import torch

import cumem
from gpu.checksums import checksum, fill_random
from gpu.results import record

GIB = 1 << 30
GRANULE = 2 << 20


def test_48_gib_in_three_tags_come_back_exactly_20_times() -> None:
    allocator = cumem.Allocator(driver="cuda", host_budget=40 * GIB)
    # The context, torch's kernels (loaded at their first use, into device memory) and our stream are not what sleeps.
    warm_up = allocator.empty(2 << 20, dtype=torch.uint8, tag="warm_up")
    fill_random(warm_up, 0)
    checksum(warm_up)
    warm_up.fill_(1)
    allocator.sleep()
    allocator.wake_up()
    del warm_up
    allocator.trim()
    torch.cuda.empty_cache()
    free_without_arena, _ = allocator.driver_memory()

    # Registered host memory has its page table on the device, 8 bytes for each 4 KiB. The arena stays for all
    # cycles: build it.
    first = [allocator.empty(GIB, dtype=torch.uint8, tag="weights") for _ in range(32)]
    first_sleep = allocator.sleep()
    allocator.wake_up()
    del first
    allocator._memory.core.reap()
    free_at_start, _ = allocator.driver_memory()
    page_table_bytes = free_without_arena - free_at_start
    assert page_table_bytes <= 32 * GIB // 512 + GRANULE

    weights = [allocator.empty(GIB, dtype=torch.uint8, tag="weights") for _ in range(24)]
    scales = [allocator.empty(GIB // 8, dtype=torch.uint8, tag="scales") for _ in range(64)]
    cache = [allocator.empty(GIB, dtype=torch.uint8, tag="kv_cache", backend="discard") for _ in range(16)]
    kept = weights + scales
    for seed, tensor in enumerate(kept):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in kept]
    torch.cuda.empty_cache()
    addresses = [tensor.data_ptr() for tensor in kept + cache]

    drift, sleeps, wakes = [], [], []
    for cycle in range(20):
        report = allocator.sleep()
        assert report.freed_bytes == 48 * GIB
        assert report.saved_bytes == 32 * GIB
        sleeps.append(report.seconds)
        drift.append(free_at_start - allocator.driver_memory()[0])
        woken = allocator.wake_up(["weights", "scales"])
        wakes.append(woken.seconds)
        allocator.wake_up(["kv_cache"])
        assert [tensor.data_ptr() for tensor in kept + cache] == addresses
        if cycle in (0, 1, 10, 19):  # the checksum's own scratch is given back before the next reading of free memory
            assert [checksum(tensor) for tensor in kept] == sums
            torch.cuda.empty_cache()
        cache[cycle % 16].fill_(cycle)
    torch.cuda.synchronize()
    record(
        "cycles-48g",
        {
            "cycles": 20,
            "bytes": 48 * GIB,
            "kept_bytes": 32 * GIB,
            "first_sleep_s": first_sleep.seconds,
            "first_sleep_phases_s": first_sleep.phases,
            "later_sleep_median_s": statistics.median(sleeps),
            "wake_median_s": statistics.median(wakes),
            "device_bytes_asleep_above_start": drift,
            "device_bytes_of_host_page_tables": page_table_bytes,
            "host_bytes": allocator.stats().host_bytes,
        },
    )
    assert max(drift) <= GRANULE, drift
    del kept, weights, scales, cache, tensor
    assert allocator.trim() >= 48 * GIB
    assert allocator._memory.driver.counts().handles == 0
