"""What the core costs on a GPU: pages away and back, and contents over the link. Writes JSON.

    python benchmarks/core.py OUT.json [--malloc-free build/cpp/malloc_free]

Rows: {"case", "phase", "median_s", "runs", "bytes", "GBps"}; `malloc-free` rows are the C++ program's.
Nothing is asserted: a benchmark says what is, tests say what must be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cumem
from machine import describe

GIB = 1 << 30
RUNS = 7


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def row(case: str, phase: str, times: list[float], nbytes: int) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "case": case,
        "phase": phase,
        "median_s": median,
        "best_s": min(times),
        "runs": len(times),
        "bytes": nbytes,
        "GBps": nbytes / median / 1e9,
    }


def phases(reports: list[Any]) -> dict[str, float]:
    """Median milliseconds of each phase."""
    names = reports[0].phases
    return {name: round(1e3 * statistics.median(report.phases[name] for report in reports), 3) for name in names}


def discard_32_gib(pause_s: float) -> list[dict[str, Any]]:
    """32 tensors of 1 GiB each, dropped and mapped again: the cost of pages alone.

    With a pause between sleep and wake, as in use; and without one, when the driver may still be clearing the pages.
    """
    allocator = cumem.Allocator(driver="cuda")
    cache = [allocator.empty(GIB, dtype=torch.uint8, tag="cache", backend="discard") for _ in range(32)]
    sleeps, wakes = [], []
    for _ in range(RUNS + 1):
        sleeps.append(allocator.sleep())
        time.sleep(pause_s)
        wakes.append(allocator.wake_up())
    del cache
    allocator.trim()
    case = f"discard-32g-1g-pause-{pause_s:g}s"
    return [
        {**row(case, phase, [r.seconds for r in reports[1:]], 32 * GIB), "phases_ms": phases(reports[1:])}
        for phase, reports in (("sleep", sleeps), ("wake", wakes))
    ]


def kept(gib: int, tensors: int) -> list[dict[str, Any]]:
    """`gib` GiB of bf16 in so many tensors, adopted, to the host and back."""
    allocator = cumem.Allocator(driver="cuda", host_budget=(gib + 2) * GIB)
    each = gib * GIB // tensors // 2
    weights = [torch.randn(each, dtype=torch.bfloat16, device="cuda") for _ in range(tensors)]
    allocator.adopt(weights, tag="weights")
    total = sum(w.numel() * 2 for w in weights)
    sleeps, wakes = [], []
    for _ in range(RUNS + 1):
        sleeps.append(allocator.sleep())
        wakes.append(allocator.wake_up())
    host = allocator.stats().host_bytes
    del weights
    allocator.trim()
    case = f"{gib}g-{tensors}"
    return [
        {**row(case, phase, [r.seconds for r in reports], total), "phases_ms": phases(reports)}
        for phase, reports in (("first_sleep", sleeps[:1]), ("later_sleep", sleeps[1:]), ("wake", wakes[1:]))
    ] + [
        {"case": case, "phase": "host_memory", "bytes": host, "ratio": host / total},
    ]


def pinned_copy(gib: int) -> list[dict[str, Any]]:
    """The yardstick: one plain copy between pinned and device memory."""
    device = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty(gib * GIB, dtype=torch.uint8, pin_memory=True)
    out, back = [], []
    for _ in range(RUNS):
        out.append(seconds(lambda: (host.copy_(device), torch.cuda.synchronize())))
        back.append(seconds(lambda: (device.copy_(host), torch.cuda.synchronize())))
    case = f"torch_pinned_copy-{gib}g"
    return [row(case, "to_host", out, gib * GIB), row(case, "to_device", back, gib * GIB)]


def malloc_free(program: Path) -> list[dict[str, Any]]:
    """The C++ benchmark at three sizes."""
    rows = []
    for mib in (2, 64, 1024):
        text = subprocess.run([str(program), str(mib), "201"], capture_output=True, text=True, check=True).stdout
        rows.append({"case": f"malloc-free-{mib}m", "phase": "malloc+free", **json.loads(text)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--malloc-free", type=Path)
    parser.add_argument("--gib", type=int, default=8)
    arguments = parser.parse_args()
    rows = malloc_free(arguments.malloc_free) if arguments.malloc_free else []
    for pause_s in (0.0, 0.5):
        rows += discard_32_gib(pause_s)
    rows += pinned_copy(arguments.gib)
    torch.cuda.empty_cache()
    for tensors in (1, 300):
        rows += kept(arguments.gib, tensors)
        torch.cuda.empty_cache()
    arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    for each in rows:
        print(each)


if __name__ == "__main__":
    main()
