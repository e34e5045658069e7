"""200 cycles with churn: device bytes asleep, resident set, file descriptors and reserved addresses stay flat."""

from __future__ import annotations

import gc
import random
import statistics
from pathlib import Path

import torch

import cumem
from gpu.results import record

GIB = 1 << 30
MIB = 1 << 20


def status_kib(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def used_bytes(allocator: cumem.Allocator) -> int:
    free, total = allocator.driver_memory()
    return total - free


def test_200_cycles_with_churn_stay_flat() -> None:
    allocator = cumem.Allocator(driver="cuda", host_budget=8 * GIB)
    choose = random.Random(7)
    with allocator.region("weights"):
        kept = [torch.full((choose.randrange(1, 4 * MIB),), i, dtype=torch.int32, device="cuda") for i in range(100)]
    history: list[dict[str, int]] = []
    churn: list[torch.Tensor] = []
    for cycle in range(200):
        with allocator.region("churn", backend="discard"):
            churn = [torch.ones(choose.randrange(1, 8 * MIB), device="cuda") for _ in range(20)]
        if cycle % 5 == 4:
            churn.clear()
        allocator.sleep()
        gc.collect()
        history.append(
            {
                "device_bytes_used": used_bytes(allocator),
                "rss_kib": status_kib("VmRSS"),
                "file_descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "virtual_bytes": allocator.stats().virtual_bytes,
                "ranges": allocator._memory.driver.counts().ranges,
            }
        )
        allocator.wake_up()
        assert bool((kept[cycle % 100] == cycle % 100).all())
        del churn[:]
        allocator.trim()
    early, late = history[20:60], history[160:]
    flat = {}
    for name in history[0]:
        before = statistics.median(h[name] for h in early)
        after = statistics.median(h[name] for h in late)
        flat[name] = {"early": before, "late": after}
    record("region-churn-200", {"cycles": 200, "medians": flat})
    assert flat["device_bytes_used"]["late"] - flat["device_bytes_used"]["early"] <= 2 * MIB
    assert flat["rss_kib"]["late"] <= 1.02 * flat["rss_kib"]["early"]
    assert flat["file_descriptors"]["late"] <= flat["file_descriptors"]["early"]
    assert flat["ranges"]["late"] <= flat["ranges"]["early"] * 1.25 + 8
