"""torch's memory pools by (tag, device): opened, sealed, read. The only module that touches `MemPool`.

A pool is entered again and again until a sleep or a trim *seals* it: one more `_cuda_releasePool`, after which
nothing is allocated from it any more and torch itself hands fully dead segments back. So no open pool ever contains a
segment that sleeps, or torch would serve its dead blocks without asking us.

A pool that a CUDA graph uses (its use count stays above one, or a segment of it was made during a capture) is a
*graph pool*: its dead blocks are written at replay. It is never sealed, copied whole, and not entered again by regions.

Pools and allocator objects are never destroyed, at exit neither: a `MemPool` destructor can abort the process, and
torch frees late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core, torch_glue
from .errors import StateError, Unsupported

if TYPE_CHECKING:
    from .memory import Tag

__all__ = [
    "Pool",
    "Pools",
    "begin_thread",
    "end_routing",
    "native_pool",
    "pause_routing",
    "process_devices",
    "resume_routing",
]

PoolId = tuple[int, int]

_process_devices: dict[int, int] = {}  # device -> open process-wide regions, of all allocators
_native_pools: dict[int, Any] = {}


@dataclass
class Pool:
    """One pool of torch's, of one tag on one device."""

    tag: str
    device: int
    mempool: Any  # torch.cuda.MemPool
    sealed: bool = False
    thread: int | None = None  # that has a region open on it; torch lets a pool be open once
    process: bool = False  # a process-wide region is open on it

    @property
    def id(self) -> tuple[int, int]:
        """torch's name of the pool."""
        identity: tuple[int, int] = tuple(self.mempool.id)
        return identity

    @property
    def own_uses(self) -> int:
        """What the use count is when no graph uses the pool: one for the object, one for an open region."""
        return (0 if self.sealed else 1) + int(self.is_open)

    @property
    def is_open(self) -> bool:
        """Whether a region is open on it."""
        return self.thread is not None or self.process

    def is_graph_pool(self) -> bool:
        """Whether something but our regions uses it."""
        return int(self.mempool.use_count()) > self.own_uses


class Pools:
    """The pools of one allocator. Its lock is never held while torch is called back into us: only around our own
    tables."""

    def __init__(self, core: _core.Core) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._allocators: dict[str, tuple[int, Any]] = {}  # tag -> (entry, torch's allocator object)
        self._pools: list[Pool] = []

    # --- opening ---

    def begin_thread(self, tag: Tag, device: int) -> Pool:
        """Routes this thread's allocations on that device to a pool of the tag, an earlier one if it is not in use."""
        with self._lock:
            pool = self._idle_pool(tag, device)
            begin_thread(device, pool.id)
            pool.thread = threading.get_ident()
            return pool

    def end_thread(self, pool: Pool) -> None:
        """Ends that routing, on any thread."""
        with self._lock:
            pool.thread = None
            end_routing(pool.device, pool.id)

    def begin_process(self, tag: Tag, device: int) -> Pool:
        """Routes every thread's allocations on that device to a pool of the tag.

        Raises:
            StateError: another region of this allocator is open on the device: the later one would take its
            allocations.
        """
        with self._lock:
            for pool in self._pools:
                if pool.device == device and pool.is_open:
                    raise StateError(
                        f"a region of tag {pool.tag!r} is open on device {device}: a process-wide region would take "
                        "its allocations; leave it first"
                    )
            pool = self._idle_pool(tag, device)
            self._begin_process(pool)
            return pool

    @staticmethod
    def _begin_process(pool: Pool) -> None:
        begin_process(pool.device, pool.id)
        pool.process = True
        _process_devices[pool.device] = _process_devices.get(pool.device, 0) + 1

    def end_process(self, tag: Tag, device: int) -> None:
        """Ends the tag's process-wide routing on that device, on whichever pool it is by now."""
        with self._lock:
            for pool in self._pools:
                if (pool.tag, pool.device) == (tag.name, device) and pool.process:
                    self._end_process(pool)

    @staticmethod
    def _end_process(pool: Pool) -> None:
        pool.process = False
        _process_devices[pool.device] -= 1
        end_routing(pool.device, pool.id)

    def _idle_pool(self, tag: Tag, device: int) -> Pool:
        for pool in self._pools:
            same = (pool.tag, pool.device) == (tag.name, device)
            if same and not pool.sealed and not pool.is_open and not self._holds_graph(pool):
                return pool
        return self._new_pool(tag, device)

    def _new_pool(self, tag: Tag, device: int) -> Pool:
        import torch

        _, allocator = self._allocator(tag)
        with torch.cuda.device(device):  # a pool belongs to the device that is current when it is made
            mempool = torch.cuda.MemPool(allocator=allocator)
        pool = Pool(tag.name, device, mempool)
        _core.immortalize(mempool)
        self._pools.append(pool)
        return pool

    def _allocator(self, tag: Tag) -> tuple[int, Any]:
        if tag.name not in self._allocators:
            import torch

            make = getattr(torch._C, "_cuda_customAllocator", None)
            if make is None:
                raise Unsupported("this torch has no torch._C._cuda_customAllocator: regions need a CUDA build, 2.11+")
            entry = _core.torch_entry(self._core, tag.slot)
            allocator = make(_core.torch_malloc_address(entry), _core.torch_free_address())
            _core.immortalize(allocator)
            self._allocators[tag.name] = entry, allocator
        return self._allocators[tag.name]

    def check(self, tag: Tag) -> None:
        """Raises why the tag's last allocation failed, if that was not for lack of memory."""
        if tag.name in self._allocators:
            _core.check_torch_entry(self._allocators[tag.name][0])

    # --- sealing ---

    def check_no_thread_region(self, tags: Iterable[Tag]) -> None:
        """Raises `StateError` if a thread has a region of one of these tags open."""
        names = {tag.name for tag in tags}
        with self._lock:
            for pool in self._pools:
                if pool.tag in names and pool.thread is not None:
                    raise StateError(
                        f"a region of tag {pool.tag!r} is open in thread {pool.thread}: leave it before the tag sleeps "
                        "or is trimmed"
                    )

    def seal(self, tags: Iterable[Tag]) -> list[Pool]:
        """Seals the open pools of these tags, graph pools excepted; those that were sealed now.

        A process-wide region that is open on one goes on with a fresh pool. pre: no thread region is open on them.
        """
        names = {tag.name: tag for tag in tags}
        with self._lock:
            sealed = [
                pool for pool in self._pools if pool.tag in names and not pool.sealed and not self._holds_graph(pool)
            ]
            for pool in sealed:
                self._seal_one(pool, names[pool.tag])
            return sealed

    def _seal_one(self, pool: Pool, tag: Tag) -> None:
        process = pool.process
        if process:
            self._end_process(pool)
        pool.sealed = True
        release_pool(pool.device, pool.id)
        if process:
            self._begin_process(self._new_pool(tag, pool.device))

    def _holds_graph(self, pool: Pool) -> bool:
        return pool.is_graph_pool() or pool.id in self._captured_pools()

    def _captured_pools(self) -> set[tuple[int, int]]:
        """The pools with a segment that was made during a capture. Asks torch only if there is such a segment."""
        captured = {info.address for info in self._core.segments() if info.captured}
        if not captured:
            return set()
        return {pool_of(segment) for segment in torch_glue.snapshot() if segment["address"] in captured}

    # --- reading ---

    def live_runs(self, infos: Iterable[_core.SegmentInfo]) -> dict[int, list[tuple[int, int]]]:
        """The (offset, length) runs of live bytes of torch's segments, by segment id.

        Only segments that torch lists under a pool of ours that no graph uses; all others live as a whole and are
        left out. Live is every block whose state is not "inactive", with what was asked for rounded up to 512 bytes.
        """
        return {
            info.id: _core.live_runs(list(_live_blocks(segment)), info.size) for info, segment in self._listed(infos)
        }

    def live_blocks(self, infos: Iterable[_core.SegmentInfo]) -> list[tuple[int, int]]:
        """(address, bytes asked for) of every live block of torch's segments."""
        return [
            (segment["address"] + offset, size)
            for _, segment in self._listed(infos)
            for offset, size in _live_blocks(segment)
        ]

    def _listed(self, infos: Iterable[_core.SegmentInfo]) -> Iterator[tuple[_core.SegmentInfo, dict[str, Any]]]:
        wanted = {info.address: info for info in infos if info.owned and not info.captured}
        if not wanted:
            return
        segments = torch_glue.snapshot()
        with self._lock:
            listed = {pool_of(segment) for segment in segments}
            # torch forgets a sealed pool with its last segment; so do we.
            self._pools = [pool for pool in self._pools if not pool.sealed or pool.id in listed]
            ours = {pool.id for pool in self._pools if not self._holds_graph(pool)}
        for segment in segments:
            info = wanted.get(segment["address"])
            if info is not None and pool_of(segment) in ours and segment["total_size"] <= info.size:
                yield info, segment


def process_devices() -> list[int]:
    """Devices on which a process-wide region is open, of any allocator."""
    return [device for device, count in _process_devices.items() if count > 0]


def native_pool(device: int) -> tuple[int, int]:
    """A pool of torch's own memory, for what is excluded from a process-wide region. It never gives memory back."""
    import torch

    if device not in _native_pools:
        with torch.cuda.device(device):
            _native_pools[device] = torch.cuda.MemPool()
            _core.immortalize(_native_pools[device])
    identity: tuple[int, int] = tuple(_native_pools[device].id)
    return identity


# --- routing; a pool is named by its id ---


def begin_thread(device: int, pool: PoolId) -> None:
    """Routes this thread's allocations on the device to the pool."""
    import torch

    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)


def begin_process(device: int, pool: PoolId) -> None:
    """Routes every thread's allocations on the device to the pool."""
    import torch

    torch._C._cuda_beginAllocateToPool(device, pool)


def end_routing(device: int, pool: PoolId) -> None:
    """Ends either routing, and drops the use that its begin took."""
    import torch

    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def pause_routing(device: int, pool: PoolId) -> None:
    """Ends a routing but keeps its use of the pool."""
    import torch

    torch._C._cuda_endAllocateToPool(device, pool)


def resume_routing(device: int, pool: PoolId) -> None:
    """Begins a paused thread routing again."""
    import torch

    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def release_pool(device: int, pool: PoolId) -> None:
    """Drops one use of the pool; the last one lets torch give its dead segments back."""
    import torch

    torch._C._cuda_releasePool(device, pool)


def pool_of(segment: dict[str, Any]) -> tuple[int, int]:
    """The id of the pool that a segment of torch's snapshot belongs to."""
    first, second = segment["segment_pool_id"]
    return first, second


def _live_blocks(segment: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield block["address"] - segment["address"], max(block["requested_size"], 1)
