"""The functions whose addresses torch is given, called as torch calls them: with size, device and stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

import cumem
from cumem import _core

MIB = 1 << 20
MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Shim:
    """One core with an entry for one slot."""

    def __init__(self, driver: _core.Driver) -> None:
        self.driver = driver
        self.core = _core.Core(driver)
        self.slot = self.core.create_slot()
        self.entry = _core.torch_entry(self.core, self.slot)
        self.malloc: Callable[..., int | None] = MALLOC(_core.torch_malloc_address(self.entry))
        self.free: Callable[..., None] = FREE(_core.torch_free_address())


@pytest.fixture
def shim() -> Shim:
    return Shim(_core.FaultyDriver(_core.host_driver(device_bytes=64 * MIB, granularity_bytes=64 << 10)))


def counts(driver: _core.Driver) -> tuple[int, int, int]:
    now = driver.counts()
    return now.handles, now.ranges, now.mappings


def test_malloc_gives_a_resident_segment_of_the_slot_and_free_takes_it_back_at_once(shim: Shim) -> None:
    address = shim.malloc(100_000, 1, None)
    assert address is not None
    info = shim.core.find(address)
    assert info is not None
    assert (info.slot, info.device, info.size, info.state) == (shim.slot, 1, 131072, "resident")
    assert info.owned
    assert not info.captured
    ctypes.memset(address, 7, 100_000)
    shim.free(address, 100_000, 1, None)
    assert shim.core.find(address) is None
    assert counts(shim.driver) == (0, 0, 0)


def test_each_entry_allocates_in_its_own_slot_and_one_free_serves_all(shim: Shim) -> None:
    other = Shim(_core.host_driver(device_bytes=64 * MIB))
    second_slot = shim.core.create_slot()
    second: Callable[..., int | None] = MALLOC(_core.torch_malloc_address(_core.torch_entry(shim.core, second_slot)))
    mine, sibling, foreign = shim.malloc(1, 0, None), second(1, 0, None), other.malloc(1, 0, None)
    assert [len(shim.core.segments(slot)) for slot in (shim.slot, second_slot)] == [1, 1]
    for address in (mine, sibling, foreign):
        other.free(address, 1, 0, None)
    assert shim.core.segments() == other.core.segments() == []


def test_the_size_that_free_is_told_is_ignored(shim: Shim) -> None:
    address = shim.malloc(3 * MIB, 0, None)
    shim.free(address, 1, 5, None)
    assert counts(shim.driver) == (0, 0, 0)


def test_no_room_gives_null_without_an_error_kept_and_the_next_malloc_works(shim: Shim) -> None:
    assert shim.malloc(65 * MIB, 0, None) is None
    _core.check_torch_entry(shim.entry)
    address = shim.malloc(MIB, 0, None)
    assert address is not None
    shim.free(address, MIB, 0, None)


def test_another_failure_gives_null_and_is_raised_once(shim: Shim) -> None:
    assert shim.malloc(1, 99, None) is None
    with pytest.raises(cumem.InvalidArgument, match="device 99"):
        _core.check_torch_entry(shim.entry)
    _core.check_torch_entry(shim.entry)


@pytest.mark.parametrize("call", ["reserve", "create", "map", "set_access"])
def test_a_malloc_whose_driver_call_fails_leaks_nothing(shim: Shim, call: str) -> None:
    assert isinstance(shim.driver, _core.FaultyDriver)
    shim.free(shim.malloc(1, 0, None), 1, 0, None)
    shim.driver.fail_at(0, only=call)
    assert shim.malloc(MIB, 0, None) is None
    shim.driver.clear()
    shim.core.reap()
    assert counts(shim.driver) == (0, 0, 0)


def test_unknown_and_null_pointers_are_ignored(shim: Shim) -> None:
    shim.free(None, 0, 0, None)
    shim.free(1234, 0, 0, None)


def test_a_free_during_a_transition_waits_for_its_end_without_blocking(shim: Shim) -> None:
    address = shim.malloc(MIB, 0, None)
    assert address is not None
    info = shim.core.find(address)
    assert info is not None
    held = shim.core.claim([info.id])
    shim.free(address, MIB, 0, None)  # returns although the claim stands
    assert shim.driver.counts().handles == 1
    shim.core.unclaim(held)
    shim.core.reap()
    assert counts(shim.driver) == (0, 0, 0)


def test_a_free_of_an_asleep_segment_gives_its_address_and_backup_back(shim: Shim) -> None:
    address = shim.malloc(MIB, 0, None)
    assert address is not None
    info = shim.core.find(address)
    assert info is not None
    extents = shim.core.live_extents([info.id])
    shim.core.claim([info.id])
    shim.core.reserve_backup(extents)
    shim.core.save(extents)
    shim.core.unmap([info.id])
    shim.core.unclaim([info.id])
    assert shim.core.host_used_bytes == MIB
    shim.free(address, MIB, 0, None)
    assert counts(shim.driver) == (0, 0, 0)
    assert shim.core.host_used_bytes == 0


def test_a_free_waits_for_work_in_flight(shim: Shim) -> None:
    address = shim.malloc(MIB, 0, None)
    assert address is not None
    shim.driver.launch_fill(address, 1, MIB)
    shim.free(address, MIB, 0, None)
    assert shim.core.broken is None
    again = shim.malloc(MIB, 0, None)  # the device works on
    shim.free(again, MIB, 0, None)


def test_many_threads_allocate_and_free_each_others_memory(shim: Shim) -> None:
    handed: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(50):
            address = shim.malloc(64 << 10, 0, None)
            assert address is not None
            with lock:
                handed.append(address)
                other = handed.pop(0)
            shim.free(other, 64 << 10, 0, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for address in handed:
        shim.free(address, 64 << 10, 0, None)
    assert counts(shim.driver) == (0, 0, 0)
    shim.core.check_valid()
