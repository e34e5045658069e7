"""The operations of the fault matrix, by name. Whoever adds one to the allocator registers it here."""

from __future__ import annotations

import importlib
from unittest import mock

import torch

from cumem import storages
from cumem.testing import FaultMatrix, pattern

from .checks import check, check_sleep_instead
from .world import GRANULE, World

matrix: FaultMatrix[World] = FaultMatrix(World, check, World.end, driver=World.driver_of_its_size)
then_sleep = matrix.with_check(check_sleep_instead)

_adopt = importlib.import_module("cumem.adopt")  # the package's attribute of that name is the function


# --- allocation ---


def with_room(world: World) -> None:
    world.drop("c0", "c1")
    world.allocator.trim()


@matrix.operation("empty", prepare=with_room, done=lambda world: world.check_awake())
def empty(world: World) -> None:
    world.make("new", "weights", GRANULE - 3, 0)


@matrix.operation("empty, shareable", prepare=with_room, done=lambda world: world.check_awake())
def empty_shareable(world: World) -> None:
    world.make("new", "new tag", 10, 1, shareable=True)


@matrix.operation("empty where only dead segments make room", prepare=lambda world: world.drop("w0", "s0"))
def empty_in_the_room_of_the_dead(world: World) -> None:
    world.make("new", "weights", 3 * GRANULE, 0)


@matrix.operation("free", done=lambda world: world.check_awake())
def free(world: World) -> None:
    world.drop("w0", "c1")
    world.allocator.trim()


@matrix.operation("free while asleep", prepare=lambda world: world.sleep())
def free_asleep(world: World) -> None:
    world.drop("w0", "c1", "s1")
    world.allocator.trim()


# --- sleep ---


def all_asleep(world: World) -> None:
    assert {world.allocator.state(tag) for tag in ("weights", "cache", "states")} == {"asleep"}
    world.check()


@matrix.operation("sleep", done=all_asleep)
def sleep(world: World) -> None:
    world.sleep()


@matrix.operation("sleep of one tag", done=lambda world: world.check())
def sleep_one(world: World) -> None:
    world.sleep(["weights"])


@matrix.operation("sleep, level 2", done=all_asleep)
def sleep_level_2(world: World) -> None:
    world.sleep(level=2)


@matrix.operation("sleep, level 2, keep", done=all_asleep)
def sleep_keep(world: World) -> None:
    world.sleep(level=2, keep=["c1", "s0"])


@matrix.operation("sleep with freed memory", prepare=lambda world: world.drop("s0", "c1"), done=all_asleep)
def sleep_with_freed_memory(world: World) -> None:
    world.sleep()


@matrix.operation("discard", done=all_asleep)
def discard(world: World) -> None:
    world.discard(["weights", "cache", "states"])


@matrix.operation("discard, part asleep", prepare=lambda world: world.sleep(["weights"]), done=all_asleep)
def discard_asleep(world: World) -> None:
    world.discard(["weights", "cache", "states"])


# --- wake ---


@matrix.operation("wake_up", prepare=lambda world: world.sleep(), done=lambda world: world.check_awake())
def wake(world: World) -> None:
    world.wake()


@matrix.operation("wake_up, rollback", prepare=lambda world: world.sleep(), done=lambda world: world.check_awake())
def wake_rollback(world: World) -> None:
    world.wake(on_failure="rollback")


def kept_asleep(world: World) -> None:
    world.sleep(level=2, keep=["c1", "s0"])


@matrix.operation("wake_up of what was kept", prepare=kept_asleep, done=lambda world: world.check_awake())
def wake_kept(world: World) -> None:
    world.wake()


def nothing_restored(world: World) -> None:
    world.check_awake()
    assert world.allocator.undefined_tags() == ["cache", "states", "weights"]


@matrix.operation("wake_up, restore=False", prepare=lambda world: world.sleep(), done=nothing_restored)
def wake_unrestored(world: World) -> None:
    world.wake(restore=False)


# --- adopt ---


def with_native_tensors(world: World) -> None:
    """Five storages in two groups, each group a segment."""
    world.drop("c0", "s0")
    world.allocator.trim()
    world.native = {f"n{i}": torch.frombuffer(bytearray(pattern(7000 + i, i)), dtype=torch.uint8) for i in range(5)}
    world.views = [tensor[10:20] for tensor in world.native.values()]


def adopted(world: World) -> None:
    assert all(world.allocator.tag_of(tensor) == "weights" for tensor in world.native.values())
    for name, tensor in world.native.items():
        world.add(name, "weights", tensor, pattern(tensor.numel(), int(name[1:])))
    world.native, world.views = {}, []
    world.check_awake()


def _adopt_into(world: World, *, swap: bool) -> None:
    with mock.patch.object(_adopt, "GROUP_BYTES", 30000), mock.patch.object(storages, "can_swap", return_value=swap):
        world.allocator.adopt([world.native, world.views], "weights")


if storages.can_swap():  # torch 2.12

    @matrix.operation("adopt by swapping", prepare=with_native_tensors, done=adopted)
    def adopt_by_swapping(world: World) -> None:
        _adopt_into(world, swap=True)


@matrix.operation("adopt by assigning", prepare=with_native_tensors, done=adopted)
def adopt_by_assigning(world: World) -> None:
    _adopt_into(world, swap=False)


# --- segments with holes: several mappings each ---

HOLE_BYTES = 16 << 20  # the smallest that a wake leaves without pages


def with_a_hole(world: World) -> None:
    """One segment of "weights" whose live bytes are far apart, asleep: the next wake gives it two mappings."""
    world.drop("w0", "w1", "c0", "c1", "s1")
    native = [torch.frombuffer(bytearray(pattern(n, n)), dtype=torch.uint8) for n in (1000, HOLE_BYTES + 1, 500)]
    world.allocator.adopt(native, "weights")
    for number in (0, 2):
        world.add(f"h{number}", "weights", native[number], pattern(native[number].numel(), native[number].numel()))
    del native
    world.allocator.trim()
    world.sleep()


def with_a_hole_awake(world: World) -> None:
    with_a_hole(world)
    world.wake()
    assert world.core.driver.counts().mappings == 3, "the segment was to have two mappings"


holed: FaultMatrix[World] = FaultMatrix(World, check, World.end, driver=World.driver_with_room_for_a_hole)
holed_then_sleep = holed.with_check(check_sleep_instead)


@holed.operation("wake_up with a hole", prepare=with_a_hole, done=lambda world: world.check_awake())
def wake_with_a_hole(world: World) -> None:
    world.wake()


@holed.operation("sleep with a hole", prepare=with_a_hole_awake, done=lambda world: world.check())
def sleep_with_a_hole(world: World) -> None:
    world.sleep()


@holed.operation("discard with a hole", prepare=with_a_hole_awake, done=lambda world: world.check())
def discard_with_a_hole(world: World) -> None:
    world.discard(["weights"])


@holed.operation("free with a hole", prepare=with_a_hole_awake, done=lambda world: world.check())
def free_with_a_hole(world: World) -> None:
    world.drop("h0", "h2")
    world.allocator.trim()
