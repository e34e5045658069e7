"""Sleep and wake beside real GPU work."""

from __future__ import annotations

import pytest
import torch

import cumem
from gpu.checksums import checksum, fill_random

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def allocator() -> cumem.Allocator:
    return cumem.Allocator(driver="cuda", host_budget=16 * GIB)


def spin(stream: torch.cuda.Stream, cycles: int = 1_000_000_000) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def test_a_wake_without_room_raises_with_numbers_and_works_once_there_is_room(allocator: cumem.Allocator) -> None:
    tensors = [allocator.empty(GIB, dtype=torch.uint8, tag="weights") for _ in range(4)]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    torch.cuda.empty_cache()
    allocator.sleep()
    free, _ = allocator.driver_memory()
    filler = torch.empty(free - 2 * GIB - 512 * MIB, dtype=torch.uint8, device="cuda")  # two of the four fit
    for _ in range(50):
        with pytest.raises(cumem.OutOfDeviceMemory) as caught:
            allocator.wake_up()
        assert caught.value.needed_bytes == 4 * GIB
        assert caught.value.free_bytes < 4 * GIB
        assert allocator.state("weights") == "asleep"
    left, _ = allocator.driver_memory()
    assert 2 * GIB <= left <= 3 * GIB, "failed wakes leak device memory"
    del filler
    torch.cuda.empty_cache()
    allocator.wake_up()
    assert [checksum(tensor) for tensor in tensors] == sums


def test_a_wake_that_runs_out_while_mapping_keeps_what_woke_and_retries(allocator: cumem.Allocator) -> None:
    tensors = [allocator.empty(GIB, dtype=torch.uint8, tag="weights") for _ in range(4)]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    torch.cuda.empty_cache()
    allocator.sleep()
    fillers: list[torch.Tensor] = []

    def another_tenant_takes_the_room(_: cumem.Transition) -> None:  # between preflight and map
        if not fillers:
            free, _total = allocator.driver_memory()
            fillers.append(torch.empty(free - 2 * GIB - 512 * MIB, dtype=torch.uint8, device="cuda"))

    allocator.hooks.register("tenant", before_wake=another_tenant_takes_the_room)
    with pytest.raises(cumem.WakeUpPartialFailure) as caught:
        allocator.wake_up()
    failure = caught.value
    assert len(failure.failed) == 2
    assert isinstance(failure.first_exception, cumem.OutOfDeviceMemory)
    assert allocator.state("weights") == "mixed"
    fillers[0] = torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    report = failure.retry()
    assert report.mapped_bytes == 2 * GIB
    assert [checksum(tensor) for tensor in tensors] == sums


def test_a_rolled_back_wake_leaves_everything_asleep_and_its_backups_whole(allocator: cumem.Allocator) -> None:
    tensors = [allocator.empty(GIB, dtype=torch.uint8, tag="weights") for _ in range(4)]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    torch.cuda.empty_cache()
    allocator.sleep()
    before, _ = allocator.driver_memory()
    fillers: list[torch.Tensor] = []

    def another_tenant_takes_the_room(_: cumem.Transition) -> None:
        free, _total = allocator.driver_memory()
        fillers.append(torch.empty(free - 2 * GIB - 512 * MIB, dtype=torch.uint8, device="cuda"))

    allocator.hooks.register("tenant", before_wake=another_tenant_takes_the_room)
    with pytest.raises(cumem.WakeUpPartialFailure) as caught:
        allocator.wake_up(on_failure="rollback")
    assert caught.value.rolled_back
    assert allocator.state("weights") == "asleep"
    fillers.clear()
    torch.cuda.empty_cache()
    after, _ = allocator.driver_memory()
    assert abs(before - after) <= 2 * MIB
    allocator.hooks.unregister("tenant")
    allocator.wake_up()
    assert [checksum(tensor) for tensor in tensors] == sums


def test_sleep_waits_for_work_on_a_side_stream(allocator: cumem.Allocator) -> None:
    tensor = allocator.zeros(64 * MIB, dtype=torch.int32, tag="weights")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    spin(side)  # about half a second
    with torch.cuda.stream(side):
        tensor.fill_(7)
    assert not side.query(), "the kernel ended before sleep was called: this test proves nothing"
    allocator.sleep()
    allocator.wake_up()
    assert bool((tensor == 7).all())


def test_a_tensor_dropped_under_a_running_kernel_faults_nothing(allocator: cumem.Allocator) -> None:
    side = torch.cuda.Stream()
    for _ in range(8):
        tensor = allocator.zeros(8 * MIB, dtype=torch.int32, tag="scratch")
        torch.cuda.synchronize()
        spin(side, 50_000_000)
        with torch.cuda.stream(side):
            tensor.fill_(1)
        del tensor
        allocator.trim()  # waits, then unmaps
    torch.cuda.synchronize()


def test_a_busy_device_is_a_typed_error_and_the_next_sleep_works() -> None:
    allocator = cumem.Allocator(driver="cuda", device_timeout=0.1)
    tensor = allocator.full(MIB, fill_value=3, dtype=torch.int32, tag="weights")
    torch.cuda.synchronize()
    spin(torch.cuda.Stream())
    with pytest.raises(cumem.DeviceBusy):
        allocator.sleep()
    assert allocator.state("weights") == "resident"
    torch.cuda.synchronize()
    allocator.sleep()
    allocator.wake_up()
    assert bool((tensor == 3).all())


def test_a_cuda_graph_over_our_tensors_replays_right_after_each_cycle(allocator: cumem.Allocator) -> None:
    weight = allocator.empty(1024, 1024, dtype=torch.float32, tag="weights")
    x = allocator.zeros(64, 1024, dtype=torch.float32, tag="io")
    y = allocator.zeros(64, 1024, dtype=torch.float32, tag="io")
    weight.normal_()
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        torch.matmul(x, weight, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, weight, out=y)
    for cycle in range(10):
        allocator.sleep()
        allocator.wake_up()
        x.copy_(torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(cycle)))
        graph.replay()
        expected = torch.matmul(x, weight)
        torch.cuda.synchronize()
        assert torch.equal(y, expected), f"cycle {cycle}"


def test_sleep_during_a_capture_is_refused_and_the_capture_survives(allocator: cumem.Allocator) -> None:
    x = allocator.zeros(1024, dtype=torch.float32, tag="io")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(cumem.StateError):
            allocator.sleep()
        late = allocator.empty(1024, dtype=torch.float32, tag="late")  # driver calls beside a capture are legal
    graph.replay()
    torch.cuda.synchronize()
    assert float(x[0]) == 1.0
    assert late.numel() == 1024


def test_discard_policies_on_wake(allocator: cumem.Allocator) -> None:
    zero = allocator.full(MIB, fill_value=5, dtype=torch.float32, tag="zero", backend="discard")
    allocator.set_policy("zero", "discard", wake="zero")
    poison = allocator.full(MIB, fill_value=5, dtype=torch.bfloat16, tag="poison", backend="discard")
    allocator.set_policy("poison", "discard", wake="poison")
    allocator.sleep()
    allocator.wake_up()
    assert bool((zero == 0).all())
    assert bool(torch.isnan(poison).all())
    assert allocator.undefined_tags() == ["poison"]


def test_many_small_and_odd_tensors_adopted_from_a_module_come_back(allocator: cumem.Allocator) -> None:
    layers = [torch.nn.Linear(33 + i % 7, 65 + i % 11) for i in range(400)]
    model = torch.nn.Sequential(*layers).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = allocator.adopt(model, tag="weights")
    assert report.tensors == 800
    allocator.sleep()
    viewed = allocator.host_view(model[0].weight)
    assert torch.equal(viewed, before["0.weight"].cpu())
    assert torch.equal(viewed.cuda(), before["0.weight"]), "a copy from the backup crosses no registration"
    allocator.wake_up()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    out = model[0](torch.randn(3, 33, device="cuda"))
    out.sum().backward()
    assert model[0].weight.grad is not None


def test_a_cpu_module_is_moved_to_the_device(allocator: cumem.Allocator) -> None:
    model = torch.nn.Linear(128, 64)
    reference = model.weight.detach().clone()
    identity = id(model.weight)
    allocator.adopt(model, tag="weights")
    assert model.weight.is_cuda
    assert id(model.weight) == identity
    allocator.sleep()
    allocator.wake_up()
    assert torch.equal(model.weight.cpu(), reference)


def test_malloc_retries_after_emptying_torchs_cache(allocator: cumem.Allocator) -> None:
    free, _ = allocator.driver_memory()
    native = torch.empty(free - 4 * GIB, dtype=torch.uint8, device="cuda")
    del native  # cached by torch, not free
    tensor = allocator.empty(8 * GIB, dtype=torch.uint8, tag="weights")
    assert tensor.numel() == 8 * GIB


def test_too_large_a_tensor_says_what_is_needed_and_free(allocator: cumem.Allocator) -> None:
    _, total = allocator.driver_memory()
    with pytest.raises(cumem.OutOfDeviceMemory) as caught:
        allocator.empty(total + GIB, dtype=torch.uint8, tag="weights")
    assert caught.value.needed_bytes >= total + GIB
    assert 0 < caught.value.free_bytes <= total
    assert caught.value.tag == "weights"
    small = allocator.zeros(1024, dtype=torch.float32, tag="weights")
    torch.cuda.synchronize()
    assert float(small.sum()) == 0.0


def test_the_callers_current_device_and_stream_stay(allocator: cumem.Allocator) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = allocator.zeros(1024, dtype=torch.float32, tag="weights")
        allocator.sleep()
        allocator.wake_up()
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == 0
    assert tensor.is_cuda
