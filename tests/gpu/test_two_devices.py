"""Memory on two GPUs: the right device, the caller's device restored, peers' access after a wake."""

from __future__ import annotations

import pytest
import torch

import cumem
from gpu.checksums import checksum, fill_random
from gpu.results import record

GIB = 1 << 30


@pytest.fixture
def allocator() -> cumem.Allocator:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there is {torch.cuda.device_count()}")
    return cumem.Allocator(driver="cuda", host_budget=20 * GIB)


def test_both_devices_sleep_and_wake_in_one_transition(allocator: cumem.Allocator) -> None:
    tensors = [allocator.empty(4 * GIB, dtype=torch.uint8, tag="weights", device=d) for d in (0, 1)]
    assert [t.device.index for t in tensors] == [0, 1]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    torch.cuda.empty_cache()
    before = [allocator.driver_memory(d)[0] for d in (0, 1)]
    first = allocator.sleep()
    after = [allocator.driver_memory(d)[0] for d in (0, 1)]
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([4 * GIB] * 2, abs=64 << 20)
    allocator.wake_up()
    second = allocator.sleep()
    woken = allocator.wake_up()
    assert [checksum(tensor) for tensor in tensors] == sums
    record(
        "two-devices",
        {
            "bytes_each": 4 * GIB,
            "first_sleep_s": first.seconds,
            "later_sleep_s": second.seconds,
            "later_sleep_phases_s": second.phases,
            "wake_s": woken.seconds,
            "wake_phases_s": woken.phases,
        },
    )


def test_an_allocation_on_device_1_leaves_device_0_current(allocator: cumem.Allocator) -> None:
    torch.cuda.set_device(0)
    tensor = allocator.full(1 << 20, fill_value=3, dtype=torch.float32, tag="other", device="cuda:1")
    allocator.sleep()
    allocator.wake_up()
    assert torch.cuda.current_device() == 0
    assert tensor.device == torch.device("cuda", 1)
    assert bool((tensor == 3).all())


def test_peers_read_our_memory_before_and_after_a_wake(allocator: cumem.Allocator) -> None:
    tensor = allocator.empty(1 << 26, dtype=torch.int32, tag="weights", device=0)
    tensor.random_()
    reference = tensor.cpu()
    assert torch.equal(tensor.to("cuda:1").cpu(), reference)
    for _ in range(3):
        allocator.sleep()
        allocator.wake_up()
        assert torch.equal(tensor.to("cuda:1").cpu(), reference)
    if torch.cuda.can_device_access_peer(1, 0):
        with torch.cuda.device(1):  # a kernel of device 1 that reads device 0
            out = torch.empty_like(tensor, device="cuda:1")
            out.copy_(tensor)
        assert torch.equal(out.cpu(), reference)


def test_work_in_flight_on_the_other_device_is_waited_for(allocator: cumem.Allocator) -> None:
    tensor = allocator.zeros(1 << 24, dtype=torch.int32, tag="other", device=1)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)
            tensor.fill_(9)
    assert not side.query()
    allocator.sleep()
    allocator.wake_up()
    assert bool((tensor == 9).all())


def test_a_tensor_of_device_1_is_adopted_where_it_is(allocator: cumem.Allocator) -> None:
    model = torch.nn.Linear(256, 256).to("cuda:1")
    reference = model.weight.detach().clone()
    allocator.adopt(model, tag="weights")
    allocator.sleep()
    allocator.wake_up()
    assert model.weight.device.index == 1
    assert torch.equal(model.weight, reference)


def test_a_region_on_device_1_while_device_0_is_current(allocator: cumem.Allocator) -> None:
    torch.cuda.set_device(0)
    with allocator.region("other", devices=[1]) as region:
        there = torch.full((1 << 20,), 4, dtype=torch.int32, device="cuda:1")
        here = torch.empty(1 << 20, dtype=torch.int32, device="cuda:0")
        assert torch.cuda.current_device() == 0
    assert [allocator.tag_of(t) for t in (there, here)] == ["other", None]
    assert region.report.native_bytes >= 4 << 20
    allocator.sleep()
    allocator.wake_up()
    assert bool((there == 4).all())
    assert torch.equal(there.to("cuda:0").cpu(), there.cpu())


def test_a_region_over_both_devices(allocator: cumem.Allocator) -> None:
    with allocator.region("both", devices=[0, 1]):
        tensors = [torch.full((1 << 20,), d, dtype=torch.int32, device=f"cuda:{d}") for d in (0, 1)]
    assert [allocator.tag_of(t) for t in tensors] == ["both", "both"]
    allocator.sleep()
    allocator.wake_up()
    assert [int(t[0]) for t in tensors] == [0, 1]
    assert torch.equal(tensors[0].to("cuda:1").cpu(), tensors[0].cpu())
