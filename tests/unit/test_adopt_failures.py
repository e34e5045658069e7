"""adopt() that fails half-way: each tensor is moved or untouched, nothing leaks, and the same call ends the job."""

import gc
import importlib
from contextlib import suppress

import pytest
import torch
from torch import nn

import cumem
from cumem import _core, storages
from cumem.errors import CumemError, OutOfDeviceMemory

adopt_module = importlib.import_module("cumem.adopt")  # the package's attribute of that name is the function

SIZE = 64 << 10  # of a storage
GROUP = 4 * SIZE
SEGMENT = 2 << 20  # of a group, rounded up to the driver's granularity


@pytest.fixture(params=["swap", "assign"], autouse=True)
def route(request, monkeypatch):
    monkeypatch.setattr(adopt_module, "GROUP_BYTES", GROUP)
    if request.param == "assign":
        monkeypatch.setattr(storages, "can_swap", lambda: False)
    elif not storages.can_swap():
        pytest.skip("this torch cannot swap the memory of storages")


class Pair(nn.Module):
    """Twelve parameters, each with a view of a detached copy: three groups of four storages with three tensors each."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((SIZE // 4,), float(n)) for n in range(12))
        for number, weight in enumerate(self.weights):
            self.register_buffer(f"view_{number}", weight.detach()[10:20])

    def check(self):
        for number, weight in enumerate(self.weights):
            assert torch.equal(weight.detach(), torch.full((SIZE // 4,), float(number)))
            view = self.get_buffer(f"view_{number}")
            assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def moved(allocator, module):
    return [allocator.tag_of(weight) == "weights" for weight in module.weights]


def segments(allocator):
    stats = allocator.stats().by_tag.get("weights")
    return 0 if stats is None else stats.segments


@pytest.mark.parametrize("room", [0, 1, 2])
def test_out_of_memory_at_any_group_leaves_each_tensor_moved_or_untouched(room):
    with cumem.Allocator(driver=_core.host_driver(device_bytes=3 * SEGMENT, granularity_bytes=SEGMENT)) as allocator:
        module = Pair()
        filler = allocator.empty((3 - room) * SEGMENT, dtype=torch.uint8, tag="filler")
        with pytest.raises(OutOfDeviceMemory) as error:
            allocator.adopt(module, tag="weights")
        assert moved(allocator, module) == [n < 4 * room for n in range(12)]
        module.check()
        # Nothing leaks, even while the error and its traceback are held.
        assert allocator.stats().virtual_bytes == 3 * SEGMENT
        del error, filler
        gc.collect()
        report = allocator.adopt(module, tag="weights")
        assert (report.already, report.storages, report.segments) == (8 * room, 12 - 4 * room, 3 - room)
        assert all(moved(allocator, module))
        module.check()


def test_a_driver_call_that_fails_at_any_place_loses_nothing():
    call = 0
    while True:
        driver = _core.FaultyDriver(_core.host_driver())
        with cumem.Allocator(driver=driver) as allocator:
            module = Pair()
            driver.clear()
            driver.fail_at(call)
            with suppress(CumemError):
                allocator.adopt(module, tag="weights")
            if driver.failed == 0:
                break
            driver.clear()
            module.check()
            done = moved(allocator, module)
            assert done == [n < done.count(True) for n in range(12)]
            gc.collect()
            assert segments(allocator) == done.count(True) / 4
            allocator.adopt(module, tag="weights")
            assert all(moved(allocator, module))
            module.check()
            del module
            gc.collect()
            assert allocator.stats().live_bytes == 0
        call += 1
    assert call > 5


def test_an_interrupt_between_two_tensors_of_a_storage_leaves_them_together(monkeypatch):
    with cumem.Allocator(driver="host") as allocator:
        module = Pair()
        real, calls = storages.build, 0

        def interrupted(*args):
            nonlocal calls
            calls += 1
            if calls == 11:  # the second of three tensors over the fourth storage
                raise KeyboardInterrupt
            return real(*args)

        if storages.can_swap():
            pytest.skip("a swap is one call: nothing is between")
        monkeypatch.setattr(storages, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            allocator.adopt(module, tag="weights")
        monkeypatch.setattr(storages, "build", real)
        assert moved(allocator, module) == [n < 3 for n in range(12)]
        module.check()
        gc.collect()
        assert segments(allocator) == 1
        allocator.adopt(module, tag="weights")
        assert all(moved(allocator, module))
        module.check()


def test_a_group_that_fails_leaves_no_segment_even_while_its_error_is_held():
    driver = _core.FaultyDriver(_core.host_driver())
    with cumem.Allocator(driver=driver) as allocator:
        module = Pair()
        driver.clear()
        driver.fail_at(2, only="synchronize")  # before the first group, after its copies, after the second one's
        with pytest.raises(CumemError) as error:
            allocator.adopt(module, tag="weights")
        assert segments(allocator) == 1
        assert moved(allocator, module) == [n < 4 for n in range(12)]
        module.check()
        del error


def test_a_copy_that_fails_leaves_the_group_untouched(monkeypatch):
    with cumem.Allocator(driver="host") as allocator:
        module = Pair()
        real, calls = torch.UntypedStorage.copy_, 0

        def failing(self, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == 6:
                raise RuntimeError("a copy failed")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.UntypedStorage, "copy_", failing)
        with pytest.raises(RuntimeError, match="a copy failed"):
            allocator.adopt(module, tag="weights")
        monkeypatch.undo()
        assert moved(allocator, module) == [n < 4 for n in range(12)]
        module.check()
        gc.collect()
        assert segments(allocator) == 1
