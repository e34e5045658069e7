"""torch's own allocations, caught by regions: what is kept, what is given back, what stays native."""

from __future__ import annotations

import pytest
import torch

import cumem
from cumem.cli.decoder import Decoder, DecoderConfig
from gpu.checksums import checksum, fill_random
from gpu.results import record

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def allocator() -> cumem.Allocator:
    return cumem.Allocator(driver="cuda", host_budget=24 * GIB)


def test_a_region_catches_torchs_allocations_and_a_sleep_gives_them_away(allocator: cumem.Allocator) -> None:
    with allocator.region("weights") as region:
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()
    assert {allocator.tag_of(p) for p in model.parameters()} == {"weights"}
    assert region.report.caught_bytes >= sum(p.numel() * 4 for p in model.parameters())
    x = torch.randn(8, 2048, device="cuda")
    before = model(x)
    addresses = [p.data_ptr() for p in model.parameters()]
    for _ in range(3):
        report = allocator.sleep()
        assert report.by_tag["weights"].freed_bytes >= 16 * 2048 * 2048 * 4
        assert not allocator.is_resident(model[0].weight)
        allocator.wake_up()
        assert [p.data_ptr() for p in model.parameters()] == addresses
        assert torch.equal(model(x), before)


def test_a_transformer_lives_wholly_in_regions(allocator: cumem.Allocator) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(layers=8, width=1024, heads=16, kv_heads=8, hidden=2816, vocab=4096)
    with allocator.region("weights"):
        model = Decoder(config, seed=0, device=torch.device("cuda"), dtype=torch.bfloat16)
    with allocator.region("activations", backend="discard"):
        tokens = torch.randint(0, 4096, (4, 64), device="cuda")
    kept = tokens.clone()

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(kept).float().cpu()

    before = logits()
    for level in (1, 1, 2):
        allocator.sleep(level=level)
        allocator.wake_up()
        assert torch.equal(logits(), before)


def test_load_and_convert_ends_within_a_tenth_of_the_live_bytes_after_trim(allocator: cumem.Allocator) -> None:
    weights = []
    with allocator.region("weights"):
        for layer in range(16):  # temporaries of twice the final size, as dequantising loaders make them
            raw = torch.randn(64 * MIB, dtype=torch.float32, device="cuda")
            weights.append(raw.to(torch.bfloat16))
            del raw, layer
    live = sum(w.numel() * 2 for w in weights)
    before = allocator.stats().mapped_bytes
    allocator.trim("weights")
    after = allocator.stats().mapped_bytes
    record("region-load-and-convert", {"live_bytes": live, "mapped_in_region": before, "mapped_after_trim": after})
    assert after <= 1.1 * live, (after, live)


def test_rotate_bounds_what_is_stranded_inside_a_region(allocator: cumem.Allocator) -> None:
    weights, peak = [], 0
    with allocator.region("weights") as region:
        for _ in range(16):
            raw = torch.randn(64 * MIB, dtype=torch.float32, device="cuda")
            weights.append(raw.to(torch.bfloat16))
            del raw
            torch.cuda.synchronize()
            region.rotate()
            peak = max(peak, allocator.stats().mapped_bytes)
    live = sum(w.numel() * 2 for w in weights)
    assert peak <= 1.1 * live, (peak, live)


def test_dead_blocks_are_neither_copied_nor_given_pages_again(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        one = torch.empty(9 * GIB, dtype=torch.uint8, device="cuda")
        del one
        parts = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(9)]  # split from the dead 9 GiB
    assert allocator.stats().by_tag["weights"].segments == 1
    fill_random(parts[4], 4)
    kept, total = parts[4], checksum(parts[4])
    del parts
    report = allocator.sleep()
    assert report.copied_bytes <= 1.01 * GIB
    assert report.freed_bytes == 9 * GIB
    woken = allocator.wake_up()
    assert woken.mapped_bytes <= 1.01 * GIB
    assert checksum(kept) == total
    again = allocator.sleep()
    assert again.freed_bytes <= 1.01 * GIB
    allocator.wake_up()
    assert checksum(kept) == total
    del kept
    allocator.trim()
    assert allocator.stats().mapped_bytes == 0


def test_the_same_size_freed_in_one_tag_and_allocated_in_another_stays_apart(allocator: cumem.Allocator) -> None:
    with allocator.region("a"):
        first = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")
    del first
    with allocator.region("b"):
        second = torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda")
    assert allocator.tag_of(second) == "b"
    allocator.sleep(["a"])
    assert bool((second == 2).all())
    allocator.wake_up()


def test_a_kept_region_inside_a_dropped_one(allocator: cumem.Allocator) -> None:
    with allocator.region("kv_cache", backend="discard", wake="poison"):
        cache = torch.full((16 * MIB,), 1.0, dtype=torch.bfloat16, device="cuda")
        with allocator.region("scales"):
            scales = torch.full((1024,), 3.0, device="cuda")
        table = torch.arange(1024, device="cuda")
    assert [allocator.tag_of(t) for t in (cache, scales, table)] == ["kv_cache", "scales", "kv_cache"]
    report = allocator.sleep()
    assert report.dropped_tags == ["kv_cache"]
    assert report.saved_tags == ["scales"]
    allocator.wake_up()
    assert bool((scales == 3).all())
    assert bool(torch.isnan(cache).all())


def test_exclude_allocates_natively_and_restores_the_routing_under_errors(allocator: cumem.Allocator) -> None:
    with allocator.region("outer"):
        with allocator.region("inner"):
            made = []

            def fail() -> None:
                with cumem.exclude():
                    made.append(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                fail()
            inner = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        outer = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    after = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert [allocator.tag_of(t) for t in (made[0], inner, outer, after)] == [None, "inner", "outer", None]


def test_allocating_in_a_sleeping_tag_works_and_both_come_out_right(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        old = torch.full((8 * MIB,), 1, dtype=torch.int32, device="cuda")
    allocator.sleep()
    with allocator.region("weights"):
        new = torch.full((8 * MIB,), 2, dtype=torch.int32, device="cuda")
    assert allocator.state("weights") == "mixed"
    assert bool((new == 2).all())
    allocator.wake_up()
    assert bool((old == 1).all())
    assert bool((new == 2).all())


def test_tensors_freed_while_their_tag_sleeps_leave_nothing_behind(allocator: cumem.Allocator) -> None:
    with allocator.region("weights"):
        tensors = [torch.full((8 * MIB,), i, dtype=torch.int32, device="cuda") for i in range(8)]
    allocator.sleep()
    for _ in range(7):
        tensors.pop()
    torch.cuda.empty_cache()
    report = allocator.wake_up()
    assert report.mapped_bytes < 8 * 32 * MIB
    assert bool((tensors[0] == 0).all())
    allocator.sleep()
    del tensors
    torch.cuda.empty_cache()
    allocator.trim()
    stats = allocator.stats()
    assert (stats.virtual_bytes, stats.mapped_bytes) == (0, 0)
    counts = allocator._memory.driver.counts()
    assert (counts.handles, counts.ranges, counts.mappings) == (0, 0, 0)


def test_out_of_memory_in_a_region_is_torchs_error_and_the_next_allocation_works(allocator: cumem.Allocator) -> None:
    free, _ = allocator.driver_memory()
    with allocator.region("weights"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free + GIB, dtype=torch.uint8, device="cuda")
        small = torch.zeros(1024, device="cuda")
    assert allocator.tag_of(small) == "weights"


def test_a_margin_is_kept_free_by_regions() -> None:
    allocator = cumem.Allocator(driver="cuda", margin=100 * GIB)
    with allocator.region("weights"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")
        assert allocator.tag_of(torch.empty(1024, device="cuda")) == "weights"


def test_a_process_wide_region_catches_autograds_gradients_and_survives_a_sleep(allocator: cumem.Allocator) -> None:
    layer = torch.nn.Linear(1024, 1024).cuda()
    x = torch.randn(64, 1024, device="cuda")
    with allocator.region("gradients", scope="process"):
        layer(x).sum().backward()
        assert allocator.tag_of(layer.weight.grad) == "gradients"
        first = layer.weight.grad.clone()
        reference = first.cpu()
        allocator.sleep()  # the region goes on with a fresh pool
        second = torch.full((1024,), 5.0, device="cuda")
        assert allocator.tag_of(second) == "gradients"
        assert bool((second == 5).all())
        allocator.wake_up()
        assert torch.equal(first.cpu(), reference)
        with cumem.exclude():
            native = torch.empty(1024, device="cuda")
        assert allocator.tag_of(native) is None
    assert allocator.tag_of(torch.empty(4 * MIB, device="cuda")) is None


def test_the_report_names_live_blocks_that_no_tensor_reaches(allocator: cumem.Allocator) -> None:
    with allocator.region("weights") as region:
        reached = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        address = torch.cuda.caching_allocator_alloc(8 * MIB)  # as a library's own buffer
    unreached = dict(region.report.unreached)
    assert address in unreached
    assert reached.data_ptr() not in unreached
    torch.cuda.caching_allocator_delete(address)


def test_adopt_and_empty_take_the_regions_tag(allocator: cumem.Allocator) -> None:
    model = torch.nn.Linear(512, 512).cuda()
    with allocator.region("weights"):
        allocator.adopt(model)
        made = allocator.zeros(16, dtype=torch.float32)
    assert allocator.tag_of(model.weight) == allocator.tag_of(made) == "weights"
