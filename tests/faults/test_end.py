"""An allocator that ends while driver calls fail: what can go is given back, the rest is leaked, nothing is raised."""

import gc

import pytest
from faults.world import World, describe, no_leak

from cumem.testing import FOR_EVER, FaultMatrix


def check(world, operation, hit):
    assert hit.error is None
    # A device that was not waited for may still use its pages: they are leaked. All else is tried once more.
    if hit.fault.times == 1 and hit.call not in ("synchronize", "fence"):
        assert no_leak(world.driver), describe(world.driver)


ends: FaultMatrix[World] = FaultMatrix(World, check, lambda world: None, driver=World.driver_of_its_size)


def forget(world):
    world.pieces.clear()
    del world.allocator
    gc.collect()


@ends.operation("awake")
def end_awake(world):
    forget(world)


@ends.operation("asleep", prepare=lambda world: world.sleep())
def end_asleep(world):
    forget(world)


@ends.operation("with what died", prepare=lambda world: world.drop("w0", "c1", "s0"))
def end_with_the_dead(world):
    forget(world)


@pytest.mark.parametrize("times", [1, FOR_EVER], ids=["once", "for ever"])
@pytest.mark.parametrize("name", ends.names)
def test_a_driver_call_that_fails_at_the_end_of_an_allocator_is_told_to_nobody(name, times):
    assert ends.run(name, times=times) > 0
