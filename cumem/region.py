"""`region` and `exclude`: which of torch's allocations a tag gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import native_state, torch_glue, torch_settings
from .errors import InvalidArgument, StateError
from .memory import Memory, Tag
from .pools import (
    Pool,
    Pools,
    begin_thread,
    end_routing,
    native_pool,
    pause_routing,
    process_devices,
    resume_routing,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Region", "RegionReport", "current_region", "exclude"]

SCOPES = ("thread", "process")
_FLUSH_BYTES = 256 << 20  # torch's idle cache above this is given back before a region opens


class _Open(threading.local):
    """This thread's open regions, oldest first."""

    def __init__(self) -> None:
        self.regions: list[Region] = []


_open = _Open()


def current_region() -> Region | None:
    """The innermost region that this thread has open."""
    return _open.regions[-1] if _open.regions else None


@dataclass(frozen=True)
class RegionReport:
    """What a region caught."""

    tag: str
    caught_bytes: int  # pages that the tag gained on the region's devices
    native_bytes: int  # what torch allocated meanwhile on other devices, outside of the tag
    unreached: list[tuple[int, int]]  # (address, bytes) of live blocks that no tensor which Python knows lies in


class Region:
    """`with allocator.region(tag) as region:` routes torch's CUDA allocations of the body into the tag.

    On the host driver torch cannot be routed; there, as everywhere, `empty` and `adopt` without a tag use the innermost
    region's.
    """

    def __init__(self, memory: Memory, tag: Tag, scope: str, devices: Sequence[int]) -> None:
        if scope not in SCOPES:
            raise InvalidArgument(f"scope={scope!r} is none of {list(SCOPES)}")
        self._memory = memory
        self._tag = tag
        self._scope = scope
        self._devices = list(dict.fromkeys(devices))
        self._pools: dict[int, Pool] = {}
        self._stack = ExitStack()
        self._mapped_at_entry = 0
        self._native_at_entry: dict[int, int] = {}
        self._entered = False

    @property
    def tag(self) -> str:
        """The tag that allocations go to."""
        return self._tag.name

    @property
    def allocator_memory(self) -> Memory:
        """Whose region it is."""
        return self._memory

    # --- entering and leaving ---

    def __enter__(self) -> Region:
        if self._entered:
            raise StateError(f"this region of tag {self.tag!r} was entered before: call region() again for another")
        self._entered = True
        if self._memory.pools is not None:
            self._enter_torch(self._memory.pools)
        _open.regions.append(self)
        return self

    def _enter_torch(self, pools: Pools) -> None:
        torch_settings.warn_about_settings(self._devices, stacklevel=4)
        for device in self._devices:
            with exclude():
                native_state.warm_up(device)
            if torch_glue.idle_cache_bytes(device) >= _FLUSH_BYTES:
                torch_glue.empty_cache()  # inside, torch up to 2.12 would not do it when memory runs out
        self._mapped_at_entry = self._mapped_bytes()
        self._native_at_entry = torch_glue.allocated_bytes(exclude=self._devices)
        with ExitStack() as stack:
            for device in self._devices:
                self._route(pools, device)
                stack.callback(self._unroute, pools, device)
            self._stack = stack.pop_all()

    def _route(self, pools: Pools, device: int) -> None:
        if self._scope == "process":
            pools.begin_process(self._tag, device)
        else:
            self._pools[device] = pools.begin_thread(self._tag, device)

    def _unroute(self, pools: Pools, device: int) -> None:
        if self._scope == "process":
            pools.end_process(self._tag, device)
        else:
            pools.end_thread(self._pools.pop(device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _open.regions or _open.regions[-1] is not self:
            raise StateError(f"region of tag {self.tag!r} is not this thread's innermost: leave regions in order")
        _open.regions.pop()
        self._stack.close()
        if self._memory.pools is not None and error is None:
            self._memory.pools.check(self._tag)

    # --- inside ---

    def rotate(self) -> int:
        """Seals the pool and goes on with a fresh one; gives back what is dead of the old one. Bytes given back.

        For code that loads and converts layer by layer: an open pool gives nothing back.

        Raises:
            StateError: not this thread's innermost region, or a process-wide one.
        """
        if current_region() is not self or self._scope != "thread":
            raise StateError("rotate() is for a thread's innermost region of scope 'thread'")
        pools = self._memory.pools
        if pools is None:
            return 0
        before = self._mapped_bytes()
        self._stack.close()
        pools.check_no_thread_region([self._tag])
        pools.seal([self._tag])
        torch_glue.empty_cache()
        self._memory.core.reap(beside_capture=self._memory.beside_capture())
        with ExitStack() as stack:
            for device in self._devices:
                self._route(pools, device)
                stack.callback(self._unroute, pools, device)
            self._stack = stack.pop_all()
        return max(0, before - self._mapped_bytes())

    def pause(self) -> None:
        """Ends the routing for now; `resume` begins it again. For `exclude`."""
        for device, pool in self._pools.items():
            pause_routing(device, pool.id)

    def resume(self) -> None:
        """Begins the routing again."""
        for device, pool in self._pools.items():
            resume_routing(device, pool.id)

    @property
    def is_routed_by_thread(self) -> bool:
        """Whether this thread's routing can be paused."""
        return self._scope == "thread" and self._memory.pools is not None

    # --- afterwards ---

    @property
    def report(self) -> RegionReport:
        """What the region caught so far, or in all once it was left. Looks at every tensor that Python knows."""
        native = torch_glue.allocated_bytes(exclude=self._devices)
        grown = sum(max(0, native[d] - self._native_at_entry.get(d, 0)) for d in native)
        return RegionReport(
            tag=self.tag,
            caught_bytes=max(0, self._mapped_bytes() - self._mapped_at_entry),
            native_bytes=grown,
            unreached=self._unreached(),
        )

    def _mapped_bytes(self) -> int:
        return sum(i.mapped_bytes for i in self._memory.core.segments(self._tag.slot) if i.device in self._devices)

    def _unreached(self) -> list[tuple[int, int]]:
        pools = self._memory.pools
        if pools is None:
            return []
        reached = torch_glue.storage_addresses()
        infos = self._memory.core.segments(self._tag.slot)
        return [block for block in pools.live_blocks(infos) if block[0] not in reached]


@contextmanager
def exclude() -> Iterator[None]:
    """Native allocations for the body, inside regions of this thread; their exact state is restored, come what may."""
    paused = [region for region in _open.regions if region.is_routed_by_thread]
    outer, _open.regions = _open.regions, []
    with ExitStack() as stack:
        stack.callback(setattr, _open, "regions", outer)
        for region in reversed(paused):
            region.pause()
            stack.callback(region.resume)  # the oldest is paused last, so it is resumed first
        for device in process_devices():
            pool = native_pool(device)
            begin_thread(device, pool)
            stack.callback(end_routing, device, pool)
        yield


def default_tag(memory: Memory, tag: str | None) -> str:
    """`tag`, or that of this thread's innermost region of this allocator. Raises `InvalidArgument` without either."""
    if tag is not None:
        return tag
    for region in reversed(_open.regions):
        if region.allocator_memory is memory:
            return region.tag
    raise InvalidArgument("tag is missing: give one, or call this inside a region")


def as_devices(memory: Memory, devices: Sequence[Any] | None) -> list[int]:
    """The ordinals of `devices=`; None is torch's current device, or the allocator's own where torch has none."""
    if devices is not None:
        return [memory.device_index(device) for device in devices]
    return [torch_glue.current_device(memory.default_device) if memory.device_type == "cuda" else memory.default_device]
