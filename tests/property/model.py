"""The plain model: what bytes each tensor holds, or will hold when it wakes. It knows no pages and no copies.

A transition's promise is noted before the call (`will_sleep`, ...); what then became of a tensor is seen from its state
alone: one that fell asleep wakes with what was promised, one that did not still has what it had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cumem.backends import POISON_BYTE
from cumem.testing.strategies import TagPolicy

UNKNOWN = None  # contents that nobody promises


@dataclass(eq=False, repr=False)  # both would read the tensor, which may be asleep
class Block:
    """One tensor."""

    tensor: torch.Tensor
    tag: str
    device: int
    contents: bytes
    address: int = 0
    resident: bool = True  # when it was last looked at
    filled: bytes | None = None  # contents once the fills in flight have run; None: there are none
    wakes_with: bytes | None = UNKNOWN
    wakes_undefined: bool = False
    backed_up: bool = False  # host_view shows `wakes_with`
    promise: Promise | None = None

    def __post_init__(self) -> None:
        self.address = self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return len(self.contents)

    def read(self) -> bytes:
        return self.tensor.numpy().tobytes()

    def quiet_contents(self) -> bytes:
        """What it holds once its device is idle."""
        return self.contents if self.filled is None else self.filled


@dataclass(frozen=True)
class Promise:
    """What a block that falls asleep now will wake with."""

    contents: bytes | None
    undefined: bool
    backed_up: bool


@dataclass(eq=False, repr=False)
class Model:
    """All blocks and policies."""

    blocks: list[Block] = field(default_factory=list)
    policies: dict[str, TagPolicy] = field(default_factory=dict)
    undefined: set[str] = field(default_factory=set)
    restores: bool = True  # whether the wake under way restores

    # --- promises ---

    def will_sleep(self, tags: tuple[str, ...] | None, level: int, kept: list[Block]) -> None:
        for block in self.selected(tags):
            keep = any(block is each for each in kept)
            block.promise = self.promise(block, level=level, keep=keep, drop=False)

    def will_discard(self, tags: tuple[str, ...]) -> None:
        for block in self.selected(tags):
            block.promise = self.promise(block, level=1, keep=False, drop=True)

    def forget_promises(self) -> None:
        for block in self.blocks:
            block.promise = None

    def discarded(self, tags: tuple[str, ...]) -> None:
        """A discard has succeeded: what slept before has no backup any more."""
        for block in self.selected(tags):
            if block.backed_up:
                promise = self.promise(block, level=1, keep=False, drop=True)
                block.wakes_with, block.wakes_undefined, block.backed_up = promise.contents, promise.undefined, False

    def promise(self, block: Block, *, level: int, keep: bool, drop: bool) -> Promise:
        policy = self.policies[block.tag]
        reloaded = level == 2 and policy.options.get("reloadable", False)
        if not (drop or reloaded or self.drops(block.tag)):
            return Promise(block.quiet_contents(), undefined=False, backed_up=True)
        wake = policy.options.get("wake", "undefined") if self.drops(block.tag) else "undefined"
        if keep:
            return Promise(block.quiet_contents(), undefined=wake != "zero", backed_up=True)
        fills = {"zero": bytes(block.nbytes), "poison": bytes([POISON_BYTE]) * block.nbytes}
        return Promise(fills.get(wake, UNKNOWN), undefined=wake != "zero", backed_up=False)

    # --- questions ---

    def drops(self, tag: str) -> bool:
        return self.policies[tag].backend == "discard"

    def selected(self, tags: tuple[str, ...] | None) -> list[Block]:
        return [block for block in self.blocks if tags is None or block.tag in tags]

    # --- what is seen ---

    def observe(self, block: Block, resident: bool) -> None:
        """Takes over what became of a block; while it is resident its contents must be those that are due."""
        if resident and not block.resident:
            self._woke(block)
        elif block.resident and not resident:
            self._fell_asleep(block)
        elif resident:
            self._stayed(block)
        block.resident = resident

    def _woke(self, block: Block) -> None:
        found = block.read()
        if self.restores and block.wakes_with is not UNKNOWN:
            assert found == block.wakes_with, (
                f"a block of {block.nbytes} bytes in {block.tag!r} woke with other contents"
            )
        block.contents = found
        if not self.restores or block.wakes_undefined:
            self.undefined.add(block.tag)
        block.wakes_with, block.backed_up = UNKNOWN, False

    def _fell_asleep(self, block: Block) -> None:
        assert block.promise is not None, f"a block in {block.tag!r} fell asleep though nobody asked for it"
        block.wakes_with = block.promise.contents
        block.wakes_undefined = block.promise.undefined
        block.backed_up = block.promise.backed_up
        block.filled = None

    def _stayed(self, block: Block) -> None:
        found = block.read()
        if block.filled is not None and found == block.filled:
            block.contents, block.filled = block.filled, None
        assert found == block.contents, f"contents of a resident block of {block.nbytes} bytes in {block.tag!r} changed"
