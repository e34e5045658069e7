"""Regions beside torch's own settings: all are left exactly as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import cumem

GIB = 1 << 30
MIB = 1 << 20

PROGRAM = """
import torch, cumem
torch.cuda.init()
def settings():
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])
before = settings()
a = cumem.Allocator(driver="cuda")
native = torch.full((1 << 22,), 1.0, device="cuda")
with a.region("weights"):
    w = torch.full((1 << 22,), 2.0, device="cuda")
    small = torch.full((100,), 3.0, device="cuda")
    with cumem.exclude():
        n = torch.full((1 << 22,), 4.0, device="cuda")
a.sleep()
more = torch.full((1 << 22,), 5.0, device="cuda")
a.wake_up()
a.trim()
torch.cuda.synchronize()
assert [float(t.mean()) for t in (native, w, small, n, more)] == [1, 2, 3, 4, 5]
assert [a.tag_of(t) for t in (native, w, small, n, more)] == [None, "weights", "weights", None, None]
assert settings() == before, (before, settings())
print("held")
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
        ("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.5"),
    ],
)
def test_a_setting_stays_as_it_is_and_regions_work_beside_it(variable: str, value: str) -> None:
    environment = {**os.environ, variable: value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout.strip() == "held", done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "caching"),
    ],
)
def test_an_allocator_that_cannot_be_routed_is_unsupported_with_the_reason(
    variable: str, value: str, shown: str
) -> None:
    program = """
import cumem, torch
a = cumem.Allocator(driver="cuda")
try:
    with a.region("weights"):
        pass
except cumem.Unsupported as error:
    print(error)
t = a.zeros(4, tag="other", dtype=torch.float32)
assert float(t.sum()) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, variable: value},
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_a_memory_fraction_counts_sleeping_bytes_unless_it_is_followed() -> None:
    allocator = cumem.Allocator(driver="cuda", host_budget=4 * GIB)
    _, total = allocator.driver_memory()
    torch.cuda.empty_cache()
    fraction = 12 * GIB / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        region = allocator.region("kv_cache", backend="discard")
        with pytest.warns(cumem.CumemWarning, match="counts sleeping memory"):
            region.__enter__()
        cache = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        region.__exit__(None, None, None)
        allocator.sleep()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        allocator.wake_up()
        allocator.follow_memory_fraction()
        allocator.sleep()
        others = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        del others
        torch.cuda.empty_cache()
        allocator.wake_up()
        assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(fraction, abs=1 / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert cache.numel() == 8 * GIB


def test_no_visible_gpu_is_unsupported_with_the_reason_and_auto_takes_the_host_driver() -> None:
    program = """
import cumem
try:
    cumem.Allocator(driver="cuda")
except cumem.Unsupported as error:
    print("refused:", error)
print(cumem.Allocator().driver_name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.startswith("refused:"), done.stderr
    assert done.stdout.split()[-1] == "host"


def test_another_tenant_that_takes_and_gives_memory_changes_no_result() -> None:
    allocator = cumem.Allocator(driver="cuda", host_budget=2 * GIB)
    with allocator.region("weights"):
        kept = torch.full((64 * MIB,), 7, dtype=torch.int32, device="cuda")
    tenant = """
import torch, sys
print("ready", flush=True)
for line in sys.stdin:
    t = torch.empty(int(line) << 20, dtype=torch.uint8, device="cuda"); torch.cuda.synchronize()
    print("has", flush=True)
    del t; torch.cuda.empty_cache()
"""
    with subprocess.Popen(
        [sys.executable, "-c", tenant], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for round_ in range(10):
            process.stdin.write(f"{(round_ % 3 + 1) * 1024}\n")
            process.stdin.flush()
            report = allocator.sleep()
            assert process.stdout.readline() == "has\n"
            assert report.freed_bytes == 256 * MIB, "the report counts what is ours"
            assert allocator.wake_up().mapped_bytes == 256 * MIB
            assert bool((kept == 7).all())
        process.stdin.close()


def test_repeated_overlapping_and_unknown_calls_have_defined_results() -> None:
    allocator = cumem.Allocator(driver="cuda")
    with allocator.region("a"):
        a = torch.full((MIB,), 1, dtype=torch.int32, device="cuda")
    with allocator.region("b"):
        b = torch.full((MIB,), 2, dtype=torch.int32, device="cuda")
    assert set(allocator.sleep().by_tag) == {"a", "b"}
    assert allocator.sleep().by_tag == {}
    with pytest.raises(cumem.UnknownTag, match="wieghts"):
        allocator.wake_up(["a", "wieghts"])
    assert allocator.state("a") == "asleep", "nothing changed"
    assert set(allocator.wake_up(["a"]).by_tag) == {"a"}
    assert set(allocator.wake_up().by_tag) == {"b"}
    assert allocator.wake_up().by_tag == {}
    assert bool((a == 1).all())
    assert bool((b == 2).all())
