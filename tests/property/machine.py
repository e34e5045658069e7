"""The real allocator on emulated devices, driven against the plain model of bytes.

Devices are small, so that memory runs out; some steps have a driver call fail. After every step: the model's bytes,
addresses, the ledger against the driver's own counts, and all invariants of the core.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property.model import Block, Model

import cumem
from cumem import storages
from cumem.errors import CumemError, OutOfDeviceMemory, OutOfHostMemory, StateError, WakeUpPartialFailure
from cumem.testing import Fault, faulty, pattern, says
from cumem.testing.strategies import Step, TagPolicy, faults, policies, sizes, steps, tag_sets

GRANULE = 64 << 10
DEVICE_BYTES = 12 * GRANULE
TAGS = ("weights", "cache", "states")
UNIT = 512  # live bytes are counted in these

adopt_module = importlib.import_module("cumem.adopt")  # the package's attribute of that name is the function

maybe_fault = st.none() | st.none() | st.none() | faults(most_calls=5) | faults(most_calls=40)
numbers = st.integers(0, 10**6)
tag_names = st.sampled_from(TAGS)
devices = st.sampled_from([0, 1])


def rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def without_frames(error: CumemError) -> CumemError:
    """The error without tracebacks: their frames keep tensors alive."""
    below: BaseException | None = error
    while below is not None:
        below = below.with_traceback(None).__cause__ or below.__context__
    return error


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.views: list[tuple[torch.Tensor, bytes]] = []
        self.dirty = False  # a fault has left something that the ledger cannot see; gone after a trim
        self.seed = 0

    @initialize(
        first=policies(), second=policies(), third=policies(), host_budget=st.sampled_from([None, None, 6 * GRANULE, 0])
    )
    def begin(self, first: TagPolicy, second: TagPolicy, third: TagPolicy, host_budget: int | None) -> None:
        self.driver = faulty(device_count=2, device_bytes=DEVICE_BYTES, granularity_bytes=GRANULE)
        self.host_budget = host_budget
        self.allocator = cumem.Allocator(driver=self.driver, host_budget=host_budget)
        for tag, policy in zip(TAGS, (first, second, third), strict=True):
            policy.apply(self.allocator, tag)
            self.model.policies[tag] = policy

    # --- how a step is done ---

    @property
    def core(self) -> cumem._core.Core:
        return self.allocator._memory.core

    def attempt(self, fault: Fault | None, call: Callable[[], object]) -> CumemError | None:
        """Does one step, perhaps with a fault, and looks what became of every block; what it raised."""
        error: CumemError | None = None
        self.driver.clear()
        if fault is not None:
            fault.arm(self.driver)
        try:
            call()
        except CumemError as raised:
            error = without_frames(raised)
        hit = self.driver.failed > 0
        self.driver.clear()
        self.dirty = self.dirty or hit
        if error is not None and hit:
            codes = {fault.code, "busy"} if fault.times != 1 else {fault.code}
            assert any(says(error, code) for code in codes) or self.may_be_short(error), (
                f"{fault} was told as {error!r}"
            )
        self.observe()
        return None if hit else error

    def may_be_short(self, error: CumemError) -> bool:
        """A fault can make memory short: what could not be freed is still there."""
        return isinstance(error, OutOfDeviceMemory | OutOfHostMemory)

    def observe(self) -> None:
        for block in self.model.blocks:
            self.model.observe(block, self.allocator.is_resident(block.tensor))
        self.model.forget_promises()

    def chosen(self, number: int) -> Block:
        return self.model.blocks[number % len(self.model.blocks)]

    def new_bytes(self, nbytes: int) -> bytes:
        self.seed += 1
        return pattern(nbytes, self.seed)

    def add(self, tensor: torch.Tensor, tag: str, device: int, contents: bytes | None = None) -> None:
        block = Block(tensor, tag, device, tensor.numpy().tobytes() if contents is None else contents)
        self.model.blocks.append(block)

    def free_bytes(self, device: int) -> int:
        """What is free once the dead are gone. Nothing else uses these devices."""
        return DEVICE_BYTES - sum(info.mapped_bytes for info in self.core.segments() if info.device == device)

    def explain_shortage(self, error: CumemError | None, needed: dict[int, int]) -> None:
        """Out of device memory is raised exactly where there is too little; unless pages are held by a failure."""
        if self.dirty:
            assert error is None or isinstance(error, OutOfDeviceMemory)
            return
        short = any(nbytes > self.free_before[device] for device, nbytes in needed.items())
        assert isinstance(error, OutOfDeviceMemory) if short else error is None, (error, needed, self.free_before)

    def note_free_bytes(self) -> None:
        self.free_before = {device: self.free_bytes(device) for device in (0, 1)}

    # --- allocation ---

    @rule(tag=tag_names, device=devices, nbytes=sizes(GRANULE), how=st.sampled_from(["empty", "zeros", "full"]),
          shareable=st.booleans(), fault=maybe_fault)  # fmt: skip
    def make(self, tag: str, device: int, nbytes: int, how: str, shareable: bool, fault: Fault | None) -> None:
        options = {"dtype": torch.uint8, "tag": tag, "device": device, "shareable": shareable}
        made: list[torch.Tensor] = []
        self.note_free_bytes()
        if how == "full":
            options["fill_value"] = 7
        error = self.attempt(fault, lambda: made.append(getattr(self.allocator, how)(nbytes, **options)))
        if made:
            contents = {"empty": None, "zeros": bytes(nbytes), "full": b"\7" * nbytes}[how]
            self.add(made.pop(), tag, device, contents)
        if fault is None:
            self.explain_shortage(error, {device: rounded(nbytes, GRANULE)})

    @rule(tag=tag_names, lengths=st.lists(sizes(GRANULE, most=2), min_size=1, max_size=5), swap=st.booleans(),
          views=st.booleans(), fault=maybe_fault)  # fmt: skip
    def adopt(self, tag: str, lengths: list[int], swap: bool, views: bool, fault: Fault | None) -> None:
        native = [torch.frombuffer(bytearray(self.new_bytes(length)), dtype=torch.uint8) for length in lengths]
        contents = [tensor.numpy().tobytes() for tensor in native]
        seen = [tensor[:1] for tensor in native] if views else []
        swap = swap and storages.can_swap()
        self.note_free_bytes()
        with mock.patch.object(adopt_module, "GROUP_BYTES", 2 * GRANULE):
            needed = self.bytes_of_groups(lengths)
            with mock.patch.object(storages, "can_swap", return_value=swap):
                error = self.attempt(fault, lambda: self.allocator.adopt([native, seen], tag))
        moved = [self.allocator.tag_of(tensor) == tag for tensor in native]
        assert moved == sorted(moved, reverse=True), "groups move in order"
        for tensor, held in zip(native, contents, strict=True):
            assert tensor.numpy().tobytes() == held, "adopt changed contents"
        for view, tensor in zip(seen, native, strict=False):
            assert view.data_ptr() == tensor.data_ptr(), "adopt parted a view from its tensor"
        for tensor, held, is_moved in zip(native, contents, moved, strict=True):
            if is_moved:
                self.add(tensor, tag, 0, held)
        if fault is None:
            self.explain_shortage(error, {0: needed})
            assert error is not None or all(moved)

    def bytes_of_groups(self, lengths: list[int]) -> int:
        groups = [0]
        for length in lengths:
            if groups[-1] and groups[-1] + length > 2 * GRANULE:
                groups.append(0)
            groups[-1] += rounded(length, UNIT)
        return sum(rounded(group, GRANULE) for group in groups)

    @precondition(lambda self: self.model.blocks)
    @rule(number=numbers)
    def free(self, number: int) -> None:
        self.model.blocks.remove(self.chosen(number))

    @precondition(lambda self: self.model.blocks)
    @rule(tag=st.none() | tag_names, fault=maybe_fault)
    def trim(self, tag: str | None, fault: Fault | None) -> None:
        error = self.attempt(fault, lambda: self.allocator.trim(tag))
        assert error is None
        if fault is None:
            self.dirty = any(info.state == "lost" for info in self.core.segments())
            assert self.core.dead_bytes == 0
            needed = self.views or any(self.core.backup_bytes(info.id) for info in self.core.segments())
            assert needed or self.core.host_bytes == 0, "host memory is held that no backup needs"

    # --- contents ---

    @precondition(lambda self: any(block.resident for block in self.model.blocks))
    @rule(number=numbers)
    def write(self, number: int) -> None:
        awake = [block for block in self.model.blocks if block.resident]
        block = awake[number % len(awake)]
        self.core.wait_devices([block.device])  # a user's own synchronise
        self.observe()
        block.contents = self.new_bytes(block.nbytes)
        block.tensor.copy_(torch.frombuffer(bytearray(block.contents), dtype=torch.uint8))

    @precondition(lambda self: any(block.resident for block in self.model.blocks))
    @rule(number=numbers, byte=st.integers(0, 255), first=numbers, length=numbers)
    def launch_fill(self, number: int, byte: int, first: int, length: int) -> None:
        """Work in flight: it runs when its device is waited for, and not before."""
        awake = [block for block in self.model.blocks if block.resident]
        block = awake[number % len(awake)]
        begin = first % block.nbytes
        end = begin + 1 + length % (block.nbytes - begin)
        self.driver.launch_fill(block.address + begin, byte, end - begin)
        held = block.quiet_contents()
        block.filled = held[:begin] + bytes([byte]) * (end - begin) + held[end:]

    # --- transitions ---

    @precondition(lambda self: self.model.blocks)
    @rule(tags=tag_sets(TAGS), level=st.sampled_from([1, 1, 2]), keep=st.lists(numbers, max_size=3), fault=maybe_fault)
    def sleep(self, tags: tuple[str, ...] | None, level: int, keep: list[int], fault: Fault | None) -> None:
        kept = [self.chosen(number) for number in keep]
        before = {id(block): block.resident for block in self.model.blocks}
        self.model.will_sleep(tags, level, kept)
        tensors = [block.tensor for block in kept]
        error = self.attempt(fault, lambda: self.allocator.sleep(tags, level=level, keep=tensors))
        tensors.clear()
        if fault is not None:
            return
        if error is not None:
            assert isinstance(error, OutOfHostMemory)
            assert self.host_budget is not None
            assert before == {id(block): block.resident for block in self.model.blocks}
        else:
            assert not any(block.resident for block in self.model.selected(tags))

    @precondition(lambda self: any(not block.resident for block in self.model.blocks))
    @rule(tags=tag_sets(TAGS), restore=st.sampled_from([True, True, True, False]),
          on_failure=st.sampled_from([None, "rollback"]), fault=maybe_fault)  # fmt: skip
    def wake_up(self, tags: tuple[str, ...] | None, restore: bool, on_failure: str | None, fault: Fault | None) -> None:
        self.wake(Step("wake_up", tags, {"restore": restore, "on_failure": on_failure}), fault)

    @precondition(lambda self: self.model.blocks)
    @rule(tags=tag_sets(TAGS), level=st.sampled_from([1, 2]), keep=st.lists(numbers, max_size=3),
          on_failure=st.sampled_from([None, "rollback"]), down=maybe_fault, up=maybe_fault)  # fmt: skip
    def cycle(
        self,
        tags: tuple[str, ...] | None,
        level: int,
        keep: list[int],
        on_failure: str | None,
        down: Fault | None,
        up: Fault | None,
    ) -> None:
        self.sleep(tags, level, keep, down)
        self.wake(Step("wake_up", tags, {"restore": True, "on_failure": on_failure}), up)
        if up is not None:
            self.wake(Step("wake_up", tags, {"restore": True, "on_failure": on_failure}), None)

    def wake(self, step: Step, fault: Fault | None) -> None:
        self.note_free_bytes()
        needed = {0: 0, 1: 0}
        for tag in TAGS if step.tags is None else step.tags:
            for info in self.core.segments(self.allocator._memory.slot(tag)):
                needed[info.device] += info.backing_bytes - info.mapped_bytes
        before = {id(block): block.resident for block in self.model.blocks}
        self.model.restores = step.options["restore"]
        error = self.attempt(fault, lambda: step.apply(self.allocator))
        if fault is None:
            if not isinstance(error, WakeUpPartialFailure):
                self.explain_shortage(error, needed)
            assert self.dirty or not isinstance(error, WakeUpPartialFailure)
        if error is None and fault is None:
            assert all(block.resident for block in self.model.selected(step.tags))
        elif isinstance(error, OutOfDeviceMemory):
            assert before == {id(block): block.resident for block in self.model.blocks}, (
                "the preflight changed something"
            )

    @precondition(lambda self: self.model.blocks)
    @rule(tags=st.lists(tag_names, max_size=2, unique=True).map(tuple), fault=maybe_fault)
    def discard(self, tags: tuple[str, ...], fault: Fault | None) -> None:
        self.model.will_discard(tags)
        done: list[object] = []
        error = self.attempt(fault, lambda: done.append(self.allocator.discard(tags)))
        assert error is None
        if done:
            assert not any(block.resident for block in self.model.selected(tags))
            self.model.discarded(tags)

    @precondition(lambda self: all(block.resident for block in self.model.blocks))
    @rule(step=steps(TAGS))
    def step_without_effect(self, step: Step) -> None:
        """Waking what is awake; any step where there is nothing."""
        if step.method == "wake_up" or not self.model.blocks:
            self.driver.clear()
            report = step.apply(self.allocator)
            assert report.by_tag == {}
            assert set(self.driver.calls) <= {"synchronize", "unmap", "release", "address_free", "unregister_host"}

    @rule(tag=tag_names, policy=policies())
    def set_policy(self, tag: str, policy: TagPolicy) -> None:
        if self.allocator.is_sleeping(tag):
            with pytest.raises(StateError):
                policy.apply(self.allocator, tag)
        else:
            policy.apply(self.allocator, tag)
            self.model.policies[tag] = policy

    @rule(tag=tag_names)
    def mark_loaded(self, tag: str) -> None:
        self.allocator.mark_loaded(tag)
        self.model.undefined.discard(tag)

    # --- backups ---

    @precondition(lambda self: any(not block.resident for block in self.model.blocks))
    @rule(number=numbers, hold=st.booleans())
    def host_view(self, number: int, hold: bool) -> None:
        away = [block for block in self.model.blocks if not block.resident]
        block = away[number % len(away)]
        if not block.backed_up:
            with pytest.raises(StateError):
                self.allocator.host_view(block.tensor)
            return
        view = self.allocator.host_view(block.tensor)
        assert view.numpy().tobytes() == block.wakes_with
        if hold:
            self.views.append((view, block.wakes_with))

    @precondition(lambda self: self.views)
    @rule()
    def drop_views(self) -> None:
        self.views.clear()

    # --- what always holds ---

    def has_begun(self) -> bool:
        return hasattr(self, "allocator")

    @precondition(has_begun)
    @invariant()
    def bytes_and_addresses_are_the_models(self) -> None:
        self.observe()
        for block in self.model.blocks:
            assert block.tensor.data_ptr() == block.address
            assert self.allocator.tag_of(block.tensor) == block.tag
        for view, contents in self.views:
            assert view.numpy().tobytes() == contents, "a host view changed"

    @precondition(has_begun)
    @invariant()
    def every_backup_is_whole(self) -> None:
        for block in self.model.blocks:
            if not block.resident and block.backed_up:
                assert self.allocator.host_view(block.tensor).numpy().tobytes() == block.wakes_with, "a backup changed"

    @precondition(has_begun)
    @invariant()
    def the_ledger_is_right(self) -> None:
        self.core.check_valid()
        stats, counts = self.allocator.stats(), self.driver.counts()
        live = {self.core.find(block.address).id for block in self.model.blocks}
        infos = self.core.segments()
        assert {info.id for info in infos} == live, "segments live that no tensor needs, or the other way round"
        assert stats.mapped_bytes == sum(info.mapped_bytes for info in infos) + self.core.dead_bytes
        assert stats.live_bytes == sum(rounded(block.nbytes, UNIT) for block in self.model.blocks)
        assert counts.physical_bytes == stats.mapped_bytes or (
            self.dirty and counts.physical_bytes > stats.mapped_bytes
        )
        assert self.allocator.is_sleeping() == any(info.state != "resident" for info in infos)
        assert self.allocator.undefined_tags() == sorted(self.model.undefined)

    @precondition(has_begun)
    @invariant()
    def host_memory_is_what_backups_need(self) -> None:
        backed_up = sum(self.core.backup_bytes(info.id) for info in self.core.segments())
        assert backed_up <= self.core.host_used_bytes <= self.core.host_bytes
        if self.host_budget is not None:
            assert self.core.host_bytes <= self.host_budget

    def teardown(self) -> None:
        if not self.has_begun() or sys.exc_info()[0] is not None:
            return  # nothing to end, or a step has failed: that is what is to be seen
        self.driver.clear()
        self.model.blocks.clear()
        self.views.clear()
        self.allocator.trim()
        assert self.core.segments() == []
        assert (self.core.host_bytes, self.core.dead_bytes) == (0, 0)
        counts = self.driver.counts()
        left = (counts.handles, counts.ranges, counts.mappings, counts.registrations, counts.physical_bytes)
        assert left == (0, 0, 0, 0, 0), f"handles, ranges, mappings, registrations, bytes left: {left}"
        self.allocator.close()
