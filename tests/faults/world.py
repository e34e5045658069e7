"""A small world of tensors whose contents are known in every state: what the fault matrix breaks and checks.

Contents follow from what is seen of each tensor: one that fell asleep wakes with what its tag's policy promises, one
that did not still has what it had.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

import cumem
from cumem._core import FaultyDriver
from cumem.testing import faulty, pattern

GRANULE = 64 << 10
SEGMENT_STATES = {"resident", "asleep", "moving", "lost"}
ANY = None  # contents that nobody promises


@dataclass(eq=False, repr=False)  # both would read the tensor, which may be asleep
class Piece:
    """One tensor and what its bytes are."""

    tensor: torch.Tensor
    tag: str
    address: int
    contents: bytes | None  # while it is resident
    parked: bytes | None = ANY  # with which it wakes
    backed_up: bool = False  # host_view shows `parked`
    was_resident: bool = True

    def read(self) -> bytes:
        return self.tensor.numpy().tobytes()


@dataclass(eq=False, repr=False)
class World:
    """Three tags on two devices: "weights" (cpu), "cache" (discard, zeros) and "states" (cpu, reloadable, released).

    The devices have room for what is in it and one granule: pages that leak leave no room for a wake.
    """

    driver: FaultyDriver
    allocator: cumem.Allocator = field(init=False)
    pieces: dict[str, Piece] = field(default_factory=dict)
    restores: bool = True  # whether the last wake was to restore
    native: dict[str, torch.Tensor] = field(default_factory=dict)  # to be adopted
    views: list[torch.Tensor] = field(default_factory=list)  # of these

    def __post_init__(self) -> None:
        self.allocator = cumem.Allocator(driver=self.driver)
        self.allocator.set_policy("weights", "cpu")
        self.allocator.set_policy("cache", "discard", wake="zero")
        self.allocator.set_policy("states", "cpu", reloadable=True, host="release")
        self.make("w0", "weights", GRANULE + 1, 0)
        self.make("w1", "weights", GRANULE + 300, 1)
        self.make("c0", "cache", GRANULE, 0)
        self.make("c1", "cache", 5, 1)
        self.make("s0", "states", 1000, 0)
        self.make("s1", "states", GRANULE - 1, 1)

    @classmethod
    def driver_of_its_size(cls) -> FaultyDriver:
        return faulty(device_count=2, device_bytes=5 * GRANULE, granularity_bytes=GRANULE)

    @classmethod
    def driver_with_room_for_a_hole(cls) -> FaultyDriver:
        return faulty(device_count=2, device_bytes=(17 << 20) + 5 * GRANULE, granularity_bytes=GRANULE)

    # --- making and dropping ---

    def make(self, name: str, tag: str, nbytes: int, device: int, *, shareable: bool = False) -> None:
        tensor = self.allocator.empty(nbytes, dtype=torch.uint8, tag=tag, device=device, shareable=shareable)
        self.add(name, tag, tensor, pattern(nbytes, name))
        tensor.copy_(torch.frombuffer(bytearray(self.pieces[name].contents), dtype=torch.uint8))

    def add(self, name: str, tag: str, tensor: torch.Tensor, contents: bytes) -> None:
        self.pieces[name] = Piece(tensor, tag, tensor.data_ptr(), contents)

    def drop(self, *names: str) -> None:
        for name in names:
            self.pieces.pop(name, None)
        gc.collect()  # tensors in a traceback's cycle

    # --- transitions, and what they promise ---

    def sleep(self, tags: Iterable[str] | None = None, *, level: int = 1, keep: Iterable[str] = ()) -> None:
        self.observe()
        kept = set(keep)
        for name, piece in self.pieces.items():
            if piece.was_resident and (tags is None or piece.tag in tags):
                dropped = piece.tag == "cache" or (piece.tag == "states" and level == 2)
                piece.backed_up = name in kept or not dropped
                if piece.backed_up:
                    piece.parked = piece.contents
                else:
                    piece.parked = bytes(len(piece.contents)) if piece.tag == "cache" else ANY
        self.allocator.sleep(tags, level=level, keep=[self.pieces[name].tensor for name in kept])

    def discard(self, tags: Iterable[str]) -> None:
        self.observe()
        for piece in self.pieces.values():
            if piece.was_resident and piece.tag in tags:
                piece.parked = bytes(len(piece.contents)) if piece.tag == "cache" else ANY
                piece.backed_up = False
        self.allocator.discard(tags)
        for piece in self.pieces.values():  # what was asleep; not before the discard has succeeded
            if piece.tag in tags and piece.backed_up:
                piece.parked, piece.backed_up = ANY, False

    def wake(self, tags: Iterable[str] | None = None, *, restore: bool = True, on_failure: str | None = None) -> None:
        self.observe()
        self.restores = restore
        self.allocator.wake_up(tags, restore=restore, on_failure=on_failure)

    def woken_contents(self, piece: Piece) -> bytes | None:
        return piece.parked if self.restores else ANY

    def observe(self) -> None:
        """Takes over what became of each tensor; what follows is measured against that."""
        for piece in self.pieces.values():
            resident = self.allocator.is_resident(piece.tensor)
            if resident and not piece.was_resident:
                piece.contents = self.woken_contents(piece)
                if piece.contents is ANY:
                    piece.contents = piece.read()
            piece.was_resident = resident

    # --- what must hold ---

    @property
    def core(self) -> cumem._core.Core:
        return self.allocator._memory.core

    def check(self) -> None:
        """Laws that hold after anything, whatever failed. Looks only: changes nothing."""
        self.core.check_valid()
        assert {info.state for info in self.core.segments()} <= SEGMENT_STATES
        for name, piece in self.pieces.items():
            assert piece.tensor.data_ptr() == piece.address, f"{name} moved"
            assert self.allocator.tag_of(piece.tensor) == piece.tag
            if self.allocator.is_resident(piece.tensor):
                expected = piece.contents if piece.was_resident else self.woken_contents(piece)
                assert expected is ANY or piece.read() == expected, f"contents of {name}, which is resident"
            else:
                self.check_backup(name, piece)

    def check_backup(self, name: str, piece: Piece) -> None:
        if piece.backed_up:
            view = self.allocator.host_view(piece.tensor)
            assert view.numpy().tobytes() == piece.parked, f"backup of {name}"
        else:
            try:
                self.allocator.host_view(piece.tensor)
            except cumem.StateError:
                return
            raise AssertionError(f"{name} was dropped but has a backup")

    def check_next_call(self) -> None:
        """A failed call leaves nothing behind that makes an unrelated one fail."""
        for device in (0, 1):
            other = self.allocator.full(GRANULE, fill_value=7, dtype=torch.uint8, tag="unrelated", device=device)
            assert other.sum() == 7 * GRANULE
            del other
        self.allocator.trim()

    def check_awake(self) -> None:
        assert not self.allocator.is_sleeping()
        self.check()

    def end(self) -> None:
        """Drops everything. Raises `AssertionError` unless the driver has all back."""
        self.pieces.clear()
        self.native.clear()
        self.views.clear()
        gc.collect()
        if self.allocator.state() != "broken":
            self.allocator.trim()
            assert self.core.host_bytes == 0, "host memory was not trimmed"
            assert self.core.segments() == [], "segments outlive their tensors"
        self.allocator.close()
        del self.allocator
        gc.collect()
        assert no_leak(self.driver), describe(self.driver)


def no_leak(driver: FaultyDriver) -> bool:
    counts = driver.counts()
    return not any((counts.handles, counts.ranges, counts.mappings, counts.registrations, counts.physical_bytes))


def describe(driver: FaultyDriver) -> str:
    counts = driver.counts()
    names = ("handles", "ranges", "mappings", "registrations", "streams", "events", "physical_bytes")
    return "leaked: " + ", ".join(f"{name} {getattr(counts, name)}" for name in names if getattr(counts, name))
