"""What the fault matrix demands of the world after every fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cumem
from cumem.testing import Hit, Operation, pattern, says

from .world import World


def check(world: World, operation: Operation[World], hit: Hit) -> None:
    """After any fault: the right error, nothing lost, nothing leaked; the same call works once the fault is gone."""
    check_error(hit)
    check_world(world)
    if hit.fault.code == "context_broken":
        check_broken(world, hit)
        return
    if hit.fault.times == 1:
        states = {info.state for info in world.core.segments()}
        assert states <= {"resident", "asleep"}, f"one failed call left segments {states}"
    world.check_next_call()
    if hit.error is not None:
        operation.run(world)
    check_world(world)
    if operation.done is not None:
        operation.done(world)
    check_still_good(world)


def check_sleep_instead(world: World, operation: Operation[World], hit: Hit) -> None:
    """After any fault, whoever does not want to try again can sleep, and wake later."""
    check_error(hit)
    check_world(world)
    world.sleep()
    check_world(world)
    assert world.core.driver.counts().physical_bytes == 0, "a sleep left pages on the device"
    check_still_good(world)


def check_error(hit: Hit) -> None:
    # A copy that failed, and the wait for it as well, says that the device is busy: it may still be under way.
    codes = (hit.fault.code, "busy") if hit.fault.times != 1 else (hit.fault.code,)
    assert hit.error is None or any(says(hit.error, code) for code in codes), "the error is not of the right class"


def check_world(world: World) -> None:
    world.check()
    for name, tensor in world.native.items():
        if not world.allocator.is_resident(tensor):
            continue  # adopted, and asleep by now
        assert tensor.numpy().tobytes() == pattern(tensor.numel(), int(name[1:])), f"contents of {name}"
    for view, tensor in zip(world.views, world.native.values(), strict=True):
        assert view.data_ptr() == tensor.data_ptr() + 10, "a view was parted from its tensor"


def check_still_good(world: World) -> None:
    """Another cycle, which takes all the room there is."""
    for _ in range(2):
        world.wake()
        world.check_awake()
        check_world(world)
        world.sleep()
        check_world(world)
    world.wake()
    world.check_awake()
    check_world(world)


def check_broken(world: World, hit: Hit) -> None:
    """A broken context: every call says so at once, without asking the driver; questions and backups still work."""
    # What a backend releases at the end no longer decides over success.
    assert hit.error is not None or hit.call == "unregister_host", "the operation succeeded on a broken context"
    allocator = world.allocator
    assert allocator.state() == "broken"
    world.driver.clear()
    calls: list[Callable[[], object]] = [
        lambda: allocator.empty(1, dtype=torch.uint8, tag="weights"),
        lambda: allocator.adopt([torch.zeros(1)], "weights"),
        allocator.sleep,
        allocator.wake_up,
        lambda: allocator.discard(["cache"]),
        lambda: allocator.set_policy("cache", "cpu"),
        allocator.trim,
    ]
    for call in calls:
        with pytest.raises(cumem.DriverError) as told:
            call()
        assert told.value.context_broken
    assert world.driver.calls == []
    assert len(allocator.tags()) >= 3
    allocator.stats()
    check_world(world)
