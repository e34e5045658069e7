"""Regions, streams, captures and threads at once."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import cumem

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def allocator() -> cumem.Allocator:
    return cumem.Allocator(driver="cuda", host_budget=8 * GIB)


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_threads_allocate_and_free_in_regions_while_another_cycles_200_times(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        kept = [torch.full((MIB,), i, dtype=torch.int32, device="cuda") for i in range(32)]
    stop = threading.Event()
    errors: list[BaseException] = []
    handed_over: list[torch.Tensor] = []

    def churn(seed: int) -> None:
        try:
            torch.manual_seed(seed)
            while not stop.is_set():
                with allocator.region(f"churn_{seed}"):
                    tensors = [torch.full((MIB,), seed, dtype=torch.int32, device="cuda") for _ in range(4)]
                assert bool((tensors[0] == seed).all())
                handed_over.append(tensors.pop())  # freed by another thread
                cycle = [tensors]
                cycle.append(cycle)  # freed by the garbage collector
        except BaseException as error:
            errors.append(error)

    threads = [in_thread(lambda seed=seed: churn(seed)) for seed in range(3)]
    try:
        for round_ in range(200):
            allocator.sleep(["weights"])
            handed_over.clear()
            if round_ % 10 == 0:
                gc.collect()
            allocator.wake_up(["weights"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(kept))
    handed_over.clear()
    gc.collect()
    allocator.trim()
    assert allocator.stats().by_tag["churn_0"].mapped_bytes == 0


def test_a_region_open_in_another_thread_makes_sleep_raise_and_nothing_changes(allocator: cumem.Allocator) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with allocator.region("weights"):
            entered.set()
            leave.wait()

    with allocator.region("weights"):
        tensor = torch.full((MIB,), 3, dtype=torch.int32, device="cuda")
    thread = in_thread(hold)
    entered.wait()
    try:
        with pytest.raises(cumem.StateError, match="region of tag 'weights'"):
            allocator.sleep()
        assert allocator.state("weights") == "resident"
    finally:
        leave.set()
        thread.join()
    allocator.sleep()
    allocator.wake_up()
    assert bool((tensor == 3).all())


def test_two_threads_have_regions_of_one_tag_open_at_once(allocator: cumem.Allocator) -> None:
    both = threading.Barrier(2)
    tensors: list[torch.Tensor] = []

    def fill(value: int) -> None:
        with allocator.region("weights"):
            both.wait()
            tensors.append(torch.full((MIB,), value, dtype=torch.int32, device="cuda"))
            both.wait()

    threads = [in_thread(lambda value=value: fill(value)) for value in (1, 2)]
    for thread in threads:
        thread.join()
    assert [allocator.tag_of(t) for t in tensors] == ["weights"] * 2
    allocator.sleep()
    allocator.wake_up()
    assert sorted(int(t[0]) for t in tensors) == [1, 2]


@pytest.mark.parametrize("recorded", [False, True], ids=["without_record_stream", "with_record_stream"])
def test_temporaries_dropped_under_running_kernels_on_two_streams(allocator: cumem.Allocator, recorded: bool) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    for round_ in range(10):
        with allocator.region("activations", backend="discard"):
            for stream in streams:
                with torch.cuda.stream(stream):
                    temporary = torch.ones(16 * MIB, dtype=torch.int32, device="cuda")
                    torch.cuda._sleep(20_000_000)
                    temporary.add_(round_)
                    if recorded:
                        temporary.record_stream(torch.cuda.current_stream())
                    del temporary
        allocator.sleep() if round_ % 2 else allocator.trim()
        allocator.wake_up()
    torch.cuda.synchronize()


def test_a_capture_on_one_thread_survives_frees_trims_and_sleeps_on_another(allocator: cumem.Allocator) -> None:
    x = torch.zeros(1024, device="cuda")
    with allocator.region("weights"):
        victims = [torch.full((4 * MIB,), i, dtype=torch.int32, device="cuda") for i in range(8)]
    torch.cuda.synchronize()
    capturing, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def disturb() -> None:
        capturing.wait()
        try:
            victims.pop()
            allocator.trim("weights")
            allocator.sleep(["weights"])
            victims.pop()
            allocator.trim("weights")
            made = allocator.empty(MIB, dtype=torch.int32, tag="other")
            del made
            allocator.trim("other")
            allocator.wake_up(["weights"])
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = in_thread(disturb)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        capturing.set()
        done.wait()
        x.add_(1)
    thread.join()
    assert not errors, errors
    graph.replay()
    torch.cuda.synchronize()
    assert float(x[0]) == 2.0
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(victims))


def test_a_graph_captured_into_a_tags_pool_is_copied_whole_and_replays_right(allocator: cumem.Allocator) -> None:
    x = torch.zeros(1024, 1024, device="cuda")
    w = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(x, w)
    torch.cuda.synchronize()
    with allocator.region("graphs"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            intermediate = x * 2
            out = torch.mm(intermediate, w)
            del intermediate
    for seed in range(5):
        allocator.sleep()
        allocator.wake_up()
        x.copy_(torch.randn(1024, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        graph.replay()
        expected = torch.mm(x * 2, w)
        assert torch.allclose(out, expected, rtol=1e-4, atol=1e-3), seed
