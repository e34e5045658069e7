"""The compiled core: it moves bytes and knows no tag, policy or rank. See csrc/core.h for the contracts.

Every method releases the GIL while it works, raises the errors of `cumem.errors`, and is safe to call from any thread.
Sizes are in bytes. Addresses are device addresses as integers.
"""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

__version__: str

@final
class Extent:
    """A run of live bytes: `length` bytes from `offset` in segment `segment`. Hashable, ordered, immutable."""

    def __init__(self, segment: int, offset: int, length: int) -> None: ...
    @property
    def segment(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __lt__(self, other: Extent) -> bool: ...

@final
class SegmentInfo:
    """A moment's view of one segment."""

    @property
    def id(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def backing_bytes(self) -> int:
        """Bytes that have pages, or get them at the next map."""
    @property
    def shareable(self) -> bool: ...
    @property
    def owned(self) -> bool:
        """Whether whoever called malloc still holds it; else its blocks do."""
    @property
    def captured(self) -> bool:
        """Whether it was made while a stream was captured."""
    @property
    def state(self) -> str:
        """ "resident", "asleep", "moving" or "lost"."""
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...

@final
class Outcome:
    """What became of one segment in a batch."""

    @property
    def segment(self) -> int: ...
    @property
    def error(self) -> Exception | None: ...

@final
class DriverCounts:
    """What a driver has made and not yet taken back. All zero: no leak."""

    @property
    def handles(self) -> int: ...
    @property
    def ranges(self) -> int: ...
    @property
    def mappings(self) -> int: ...
    @property
    def registrations(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def physical_bytes(self) -> int: ...

@final
class DeviceProperties:
    """What a device is and can do."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def granularity_bytes(self) -> int: ...
    @property
    def virtual_memory(self) -> bool: ...
    @property
    def exportable(self) -> bool: ...
    @property
    def rdma(self) -> bool: ...
    @property
    def integrated(self) -> bool: ...

class Driver:
    """A table of virtual-memory calls; csrc/driver/driver.h is its contract."""

    @property
    def name(self) -> str: ...
    @property
    def device_type(self) -> str:
        """What torch calls a tensor over this driver's memory: "cuda" or "cpu"."""
    def counts(self) -> DriverCounts: ...
    def device_count(self) -> int: ...
    def properties(self, device: int) -> DeviceProperties: ...
    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of the whole device."""
    def can_access_peer(self, source: int, target: int) -> bool: ...
    def is_capturing(self, stream: int) -> bool:
        """Whether the stream with this native handle is being captured into a graph."""
    def launch_fill(self, address: int, byte: int, size: int) -> None:
        """Queues a fill on a side stream of the address's device and returns at once: work in flight, for tests."""

def cuda_driver() -> Driver:
    """The driver over libcuda. Raises `Unsupported` where there is none or no device that can."""

def host_driver(
    device_count: int = ..., device_bytes: int = ..., granularity_bytes: int = ..., refuse_pinning: bool = ...
) -> Driver:
    """The driver that keeps the same laws on host memory."""

@final
class FaultyDriver(Driver):
    """Wraps a driver: logs calls, fails chosen ones, holds chosen ones at a gate."""

    def __init__(self, inner: Driver) -> None: ...
    @property
    def calls(self) -> list[str]:
        """Names of the calls since `clear`, in order ("create", "map", ...)."""
    def clear(self) -> None:
        """Forgets the log, the fault and the gates' counts."""
    def fail_at(self, call: int, *, code: str = ..., times: int = ..., only: str | None = ...) -> None:
        """Makes the `call`-th call from now (from 0; counting only calls named `only` if given) fail with `code`,
        `times` times (-1: for ever)."""
    @property
    def failed(self) -> int:
        """How many calls were made to fail since `clear`."""
    def hold(self, call: str) -> None:
        """Makes every call of that name wait until `release`."""
    def release(self, call: str) -> None: ...
    def wait_held(self, call: str, timeout_s: float) -> bool:
        """Waits until a call stands at the gate."""

@final
class Core:
    """Segments, blocks, backups and copies over one driver."""

    def __init__(
        self,
        driver: Driver,
        *,
        host_budget_bytes: int | None = ...,
        margin_bytes: int = ...,
        device_timeout_s: float = ...,
    ) -> None: ...
    @property
    def driver(self) -> Driver: ...
    @property
    def broken(self) -> str | None:
        """Why the device's context is contaminated; None while it is not."""
    def create_slot(self) -> int: ...

    # --- memory ---
    def malloc(self, slot: int, size: int, device: int, shareable: bool = ...) -> int:
        """A resident segment of at least `size` bytes, held by its owner until `free`; its address."""
    def free(self, address: int) -> None:
        """Drops the owner's hold. Without live blocks the segment goes at once, after a wait for the device."""
    def capsule(self, address: int, offset: int, length: int) -> object:
        """A DLPack capsule (uint8, `length`) over a new block of the segment at `address`; the block dies with it."""
    def malloc_capsule(self, slot: int, size: int, device: int, shareable: bool = ...) -> object:
        """A DLPack capsule (uint8, `size`) over a new resident segment that its blocks alone hold.

        One call: an exception raised into the thread meanwhile leaves nothing that nobody frees.
        """
    def find(self, address: int) -> SegmentInfo | None:
        """The segment that contains `address`."""
    def segments(self, slot: int | None = ...) -> list[SegmentInfo]: ...
    def live_extents(self, segments: Sequence[int]) -> list[Extent]:
        """Runs of live bytes; holes under 16 MiB belong to a run."""
    def reap(self, *, beside_capture: bool = ...) -> int:
        """Frees what has died since; the bytes given back to the device."""
    @property
    def dead_bytes(self) -> int:
        """Mapped bytes of segments that died and wait for `reap`."""

    # --- transitions ---
    def claim(self, segments: Sequence[int]) -> list[int]:
        """Holds segments against destruction until `unclaim`; those that still exist."""
    def unclaim(self, segments: Sequence[int]) -> None: ...
    def wait_devices(self, devices: Sequence[int], *, beside_capture: bool = ...) -> None:
        """Waits for all work of these devices. Raises `DeviceBusy` at the deadline, nothing changed.

        `beside_capture`: a capture is known to be under way on some thread: wait in the way that leaves it alone.
        """
    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of the whole device, other processes included."""
    def unmap(self, segments: Sequence[int]) -> list[Outcome]:
        """resident or moving -> asleep. Does not wait for the device."""
    def map(self, segments: Sequence[int]) -> list[Outcome]:
        """asleep -> moving."""
    def settle(self, segments: Sequence[int]) -> None:
        """moving -> resident."""
    def set_backing(self, segment: int, runs: Sequence[tuple[int, int]]) -> None:
        """What the next `map` of an asleep segment gives pages to: (offset, length) runs, rounded outwards.

        Raises `StateError` for segments that keep one layout: shareable ones, and those made during a capture.
        """
    def fill(self, extents: Sequence[Extent], byte: int) -> None: ...

    # --- backups ---
    def reserve_backup(self, extents: Sequence[Extent]) -> None:
        """Host memory for each extent, all or nothing. Raises `OutOfHostMemory`."""
    def save(self, extents: Sequence[Extent]) -> None:
        """Copies reserved extents to their backups and waits."""
    def restore(self, extents: Sequence[Extent]) -> None:
        """Copies backups into their extents and waits."""
    def release_backup(self, extents: Sequence[Extent], *, keep_memory: bool = ...) -> None:
        """Drops backups; unknown ones are ignored. keep_memory=False gives empty slabs back to the system."""
    def backup_bytes(self, segment: int) -> int:
        """Bytes of a segment's backups."""
    def trim_host(self) -> int:
        """Gives all empty slabs back to the system; bytes."""
    def host_view(self, address: int, length: int) -> object:
        """A DLPack capsule (CPU, uint8) over the backup of [address, address + length)."""
    def copy_to_host(self, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None:
        """Copies each extent into a writable buffer of at least its length, and waits."""
    def copy_to_device(self, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None: ...
    @property
    def host_bytes(self) -> int:
        """Bytes of all slabs, used or not."""
    @property
    def host_used_bytes(self) -> int: ...
    @property
    def host_pageable_bytes(self) -> int:
        """Bytes of slabs whose pinning was refused."""
    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) bytes of the copy batch under way."""
    def check_valid(self) -> None:
        """Walks all invariants. Raises `CumemError` naming the first that does not hold."""

def host_headroom(system_too: bool, root: str = ...) -> tuple[int, str]:
    """(bytes, what sets the limit): what the memory cgroups, and with `system_too` MemAvailable, leave this process."""

def is_forked_child() -> bool:
    """Whether this process is a fork of the one that loaded the library."""

def torch_entry(core: Core, slot: int) -> int:
    """An entry of the table of mallocs for torch. Raises `Unsupported` once all are taken."""

def torch_malloc_address(entry: int) -> int:
    """The address of that entry's malloc: `void* (size_t size, int device, cudaStream_t stream)`."""

def torch_free_address() -> int:
    """The address of the one free: `void (void* pointer, size_t size, int device, cudaStream_t stream)`."""

def check_torch_entry(entry: int) -> None:
    """Raises why the entry's last malloc gave null, if not for lack of memory; forgets it."""

def live_runs(blocks: Sequence[tuple[int, int]], segment_size: int) -> list[tuple[int, int]]:
    """The runs that cover these (offset, length) blocks; holes under 16 MiB belong to a run."""

def immortalize(thing: object) -> None:
    """Takes a reference that is never given back: the object outlives the interpreter."""

def mark_exiting() -> None:
    """From now on deleters leak instead of calling the driver. Registered with `atexit` at import."""
