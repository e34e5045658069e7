"""A backend inside an allocator: registered by name, through sleeps, wakes, failures and the end of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import backends
from .._core import FaultyDriver
from ..allocator import Allocator
from ..errors import CumemError, SleepFailure, WakeUpPartialFailure
from .backend_checks import Candidate
from .bench import demand
from .faults import Fault, faulty
from .layouts import GRANULE_BYTES, SMALL
from .patterns import pattern

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CYCLES"]

_TAG = "checked"
_LENGTHS = (1, 777, GRANULE_BYTES, 3 * GRANULE_BYTES + 5)


@contextmanager
def _registered(candidate: Candidate) -> Iterator[str]:
    """A name that is the candidate's for a while."""
    with candidate.on(SMALL) as (_, subject):
        name = f"{subject.backend.name} (checked)"
    backends.register(name, candidate.factory)
    try:
        yield name
    finally:
        del backends._factories[name]


class _World:
    """An allocator whose tag uses the candidate, and tensors with known contents."""

    def __init__(self, candidate: Candidate, name: str) -> None:
        import torch

        self.driver: FaultyDriver = faulty(device_count=2, device_bytes=64 << 20, granularity_bytes=GRANULE_BYTES)
        self.allocator = Allocator(driver=self.driver)
        self.allocator.set_policy(_TAG, name, **candidate.options)
        self.keeps = self.allocator._memory.tag(_TAG).backend.keeps_contents
        self.tensors: list[Tensor] = []
        for length in _LENGTHS:
            for device in (0, 1):
                self.tensors.append(self.allocator.empty(length, dtype=torch.uint8, tag=_TAG, device=device))
        self.write("first")

    def write(self, seed: object) -> None:
        import torch

        self.seed = seed
        for number, tensor in enumerate(self.tensors):
            tensor.copy_(torch.frombuffer(bytearray(pattern(tensor.numel(), (seed, number))), dtype=torch.uint8))

    def demand_contents(self, when: str) -> None:
        for number, tensor in enumerate(self.tensors):
            whole = tensor.numpy().tobytes() == pattern(tensor.numel(), (self.seed, number))
            demand(whole, f"contents of a tensor of {tensor.numel()} bytes are wrong {when}")

    def demand_kept(self, when: str) -> None:
        demand(self.allocator.state(_TAG) == "resident", f"the tag is {self.allocator.state(_TAG)} {when}")
        if self.keeps:
            self.demand_contents(when)
        else:
            self.write(self.seed)

    def end(self) -> None:
        del self.tensors
        self.allocator.trim()
        self.allocator._memory.core.check_valid()
        used = self.allocator._memory.core.host_used_bytes
        demand(used == 0, f"{used} bytes of host memory are in use after the last tensor died")
        del self.allocator
        gc.collect()  # errors of transitions are cycles
        counts = self.driver.counts()
        left = (counts.handles, counts.ranges, counts.mappings, counts.registrations)
        demand(left == (0, 0, 0, 0), f"handles, ranges, mappings, registrations {left} outlive the allocator")


def an_allocator_sleeps_and_wakes_with_it(candidate: Candidate) -> None:
    with _registered(candidate) as name:
        world = _World(candidate, name)
        for cycle in range(2):
            world.write(cycle)
            slept = world.allocator.sleep()
            demand(slept.by_tag[_TAG].dropped != world.keeps, "the sleep's report says the opposite of keeps_contents")
            demand(world.allocator.state(_TAG) == "asleep", "a sleep left the tag resident")
            world.allocator.sleep()
            world.allocator.wake_up()
            world.demand_kept("after a sleep and a wake")
            undefined = world.allocator.undefined_tags() == [_TAG]
            demand(not (undefined and world.keeps), "keeps_contents is True, but the tag woke undefined")
        world.end()


def tensors_end_while_they_sleep(candidate: Candidate) -> None:
    with _registered(candidate) as name:
        world = _World(candidate, name)
        world.allocator.sleep()
        kept = world.tensors.pop(0)
        del world.tensors[1:]
        del kept
        world.allocator.wake_up()
        world.seed = None  # numbers have moved
        world.write("again")
        world.allocator.sleep()
        world.allocator.wake_up()
        world.demand_kept("after others had died asleep")
        world.allocator.sleep()
        world.end()


def contents_can_be_dropped_and_loaded_anew(candidate: Candidate) -> None:
    with _registered(candidate) as name:
        world = _World(candidate, name)
        world.allocator.discard([_TAG])
        world.allocator.wake_up()
        world.write("loaded")
        world.allocator.sleep()
        world.allocator.discard([_TAG])
        world.allocator.wake_up()
        world.write("loaded again")
        world.allocator.sleep()
        world.allocator.wake_up(restore=False)
        world.write("loaded once more")
        world.allocator.sleep()
        world.allocator.wake_up()
        world.demand_kept("after they had been dropped and loaded")
        world.end()


def failed_transitions_lose_nothing(candidate: Candidate) -> None:
    with _registered(candidate) as name:
        world = _World(candidate, name)
        for transition in ("sleep", "wake_up"):
            for call in ("copy_to_host", "copy_to_device", "fill", "synchronize", "unmap", "map"):
                world.write(call)
                _fail(world, transition, Fault(1, times=3, only=call))
        world.end()


def _fail(world: _World, transition: str, fault: Fault) -> None:
    if transition == "wake_up":
        world.allocator.sleep()
    world.driver.clear()
    fault.arm(world.driver)
    try:
        getattr(world.allocator, transition)()
    except (SleepFailure, WakeUpPartialFailure) as error:
        failed = error.failed
        demand(bool(failed), f"a {transition} with {fault} failed without a segment: {error}")
    except CumemError:
        state = "resident" if transition == "sleep" else "asleep"
        demand(world.allocator.state(_TAG) == state, f"a {transition} with {fault} failed but changed the tag")
    world.driver.clear()
    getattr(world.allocator, transition)()
    world.allocator.wake_up()
    world.demand_kept(f"after a {transition} with {fault} and another without")


CYCLES = (
    an_allocator_sleeps_and_wakes_with_it,
    tensors_end_while_they_sleep,
    contents_can_be_dropped_and_loaded_anew,
    failed_transitions_lose_nothing,
)
