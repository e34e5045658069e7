"""Memory: one allocator's tags, slots and segments over one core."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import _core, backends, torch_glue
from .backends.base import BackendContext, SleepModeBackend
from .errors import DriverError, InvalidArgument, OutOfDeviceMemory, StateError, UnknownTag, Unsupported
from .pools import Pools

if TYPE_CHECKING:
    import torch

__all__ = ["Memory", "Parked", "Policy", "Tag"]


@dataclass(frozen=True)
class Policy:
    """A tag's backend with its options."""

    backend: str = "cpu"
    options: dict[str, object] = field(default_factory=dict)  # the backend's own
    reloadable: bool = False  # a level 2 sleep may drop the contents: someone can load them again


@dataclass
class Tag:
    """A label, its slot in the core, its policy, and that policy's backend."""

    name: str
    slot: int
    policy: Policy
    backend: SleepModeBackend


@dataclass(frozen=True)
class Parked:
    """Part of an asleep segment: which backend has it, under which extents."""

    backend: SleepModeBackend
    extents: list[_core.Extent]


def split_policy(backend: str, options: dict[str, object]) -> Policy:
    """The policy that these options mean. Raises `InvalidArgument` if `reloadable` is not a bool."""
    own = dict(options)
    reloadable = own.pop("reloadable", False)
    if not isinstance(reloadable, bool):
        raise InvalidArgument(f"reloadable={reloadable!r} is not a bool")
    return Policy(backend, own, reloadable)


class Memory:
    """What all parts of an allocator share.

    `parked` and `undefined` belong to the transition under way; others read them. A tag, once made, stays.
    """

    def __init__(self, core: _core.Core, default_device: int) -> None:
        self.core = core
        self.driver = core.driver
        self.device_type = core.driver.device_type
        self.default_device = default_device
        self.context = BackendContext(core)
        self.pools = Pools(core) if core.driver.device_type == "cuda" else None  # torch cannot be routed elsewhere
        self.parked: dict[int, list[Parked]] = {}  # by segment
        self.undefined: set[str] = set()  # tags whose contents nobody restored
        self._lock = threading.RLock()  # of what follows; finalizers and signal handlers may ask while it is held
        self._tags: dict[str, Tag] = {}
        self._by_slot: dict[int, str] = {}

    # --- state of the whole ---

    @staticmethod
    def refuse_fork() -> None:
        """Raises `Unsupported` in a forked child: its devices, locks and backups are its parent's."""
        if _core.is_forked_child():
            raise Unsupported(
                "this process is a fork of the one that loaded cumem, and CUDA does not survive a fork: "
                "start workers with the 'spawn' method and make an allocator there"
            )

    def check_usable(self) -> None:
        """Raises `Unsupported` in a forked child, `DriverError` once the context is contaminated."""
        self.refuse_fork()
        broken = self.core.broken
        if broken is not None:
            raise DriverError(
                f"the device's context is lost ({broken}): only host_view() still works, restart the process",
                call=broken.split(":")[0],
                code=0,
                context_broken=True,
            )

    def beside_capture(self) -> bool:
        """Whether a graph is being captured on the stream that torch captures on, by whatever thread."""
        stream = torch_glue.capture_stream() if self.device_type == "cuda" else None
        return stream is not None and self.driver.is_capturing(stream)

    def torch_asleep_bytes(self) -> dict[int, int]:
        """By device: bytes of torch's segments that have no pages now; torch counts them as used."""
        asleep: dict[int, int] = {}
        for info in self.core.segments():
            if info.owned:
                asleep[info.device] = asleep.get(info.device, 0) + info.size - info.mapped_bytes
        return asleep

    def wait_devices(self, devices: list[int]) -> None:
        """Waits for all work of these devices, and leaves a capture beside it alone. Raises `DeviceBusy`."""
        self.core.wait_devices(devices, beside_capture=self.beside_capture())

    def reap(self) -> int:
        """Frees what has died since; bytes given back. Raises `DeviceBusy`."""
        return self.core.reap(beside_capture=self.beside_capture())

    def seal_pools(self, tags: list[Tag]) -> None:
        """Lets torch allocate no more from the pools of these tags, and takes back what is dead in them.

        Raises:
            StateError: a thread has a region of one of them open; nothing changed.
        """
        if self.pools is not None:
            self.pools.check_no_thread_region(tags)
            if self.pools.seal(tags):
                torch_glue.empty_cache()

    def live_runs(self, infos: list[_core.SegmentInfo]) -> dict[int, list[_core.Extent]]:
        """The runs of live bytes of these segments, by id: from torch's snapshot for its own, else from our blocks."""
        live: dict[int, list[_core.Extent]] = {info.id: [] for info in infos}
        known = {} if self.pools is None else self.pools.live_runs(infos)
        for segment, runs in known.items():
            live[segment] = [_core.Extent(segment, offset, length) for offset, length in runs]
        for extent in self.core.live_extents([segment for segment in live if segment not in known]):
            live[extent.segment].append(extent)
        return live

    # --- tags ---

    def ensure_tag(self, name: str, backend: str | None = None, options: dict[str, object] | None = None) -> Tag:
        """The tag, made if it is new.

        Raises:
            InvalidArgument: the name is no non-empty string; no such backend; options that it does not take.
            StateError: the tag exists with another policy.
        """
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"tag={name!r} is not a non-empty string")
        asked = backend is not None or options
        policy = split_policy("cpu" if backend is None else backend, options or {}) if asked else None
        with self._lock:
            tag = self._tags.get(name)
            if tag is None:
                return self._add_tag(name, policy or Policy())
        if policy is None or policy == tag.policy or (not options and policy.backend == tag.policy.backend):
            return tag
        raise StateError(
            f"tag {name!r} has backend {tag.policy.backend!r} {tag.policy.options}, not {policy.backend!r} "
            f"{policy.options}: change it with set_policy({name!r}, ...) while it is awake"
        )

    def _add_tag(self, name: str, policy: Policy) -> Tag:
        backend = backends.create(policy.backend, self.context, policy.options)
        tag = Tag(name, self.core.create_slot(), policy, backend)
        self._tags[name] = tag
        self._by_slot[tag.slot] = name
        return tag

    def set_policy(self, name: str, policy: Policy) -> None:
        """Gives the tag, made if it is new, that policy. Raises as `ensure_tag`, and `StateError` while it sleeps."""
        backend = backends.create(policy.backend, self.context, policy.options)
        tag = self.ensure_tag(name)
        if any(info.state != "resident" for info in self.core.segments(tag.slot)):
            raise StateError(
                f"tag {name!r} is {self.state(name)}: its policy can be changed once it is awake; wake_up([{name!r}])"
            )
        with self._lock:
            tag.policy, tag.backend = policy, backend

    def tag(self, name: str) -> Tag:
        """Raises `UnknownTag`."""
        with self._lock:
            tag = self._tags.get(name) if isinstance(name, str) else None
            if tag is None:
                raise UnknownTag(f"no tag {name!r}; there are {sorted(self._tags)}", tag=name, known=sorted(self._tags))
            return tag

    def select(self, names: Iterable[str] | None) -> list[Tag]:
        """These tags, or all; each once, in order. Raises `UnknownTag` before anything changes."""
        if isinstance(names, str):
            raise InvalidArgument(f"tags={names!r} is a string; give a list: [{names!r}]")
        if names is not None and not isinstance(names, Iterable):
            raise InvalidArgument(f"tags={names!r} is no list of tags")
        if names is None:
            with self._lock:
                return list(self._tags.values())
        return list({tag.name: tag for tag in map(self.tag, names)}.values())

    def slot(self, tag: str) -> int:
        """The tag's slot. Raises `UnknownTag`."""
        return self.tag(tag).slot

    def tag_of_slot(self, slot: int) -> str:
        """The tag that owns a slot."""
        with self._lock:
            return self._by_slot[slot]

    def state(self, name: str) -> str:
        """The state of a tag's segments; "mixed" if they differ, "empty" if there are none."""
        states = {info.state for info in self.core.segments(self.slot(name))}
        return states.pop() if len(states) == 1 else "mixed" if states else "empty"

    # --- devices and allocation ---

    def device_index(self, device: int | str | torch.device | None) -> int:
        """The ordinal that `device` means; None is the allocator's own.

        Raises:
            InvalidArgument: not a device, another type than the driver's, or an ordinal that is not visible.
        """
        index = self._parse_device(device)
        count = self.driver.device_count()
        if not 0 <= index < count:
            raise InvalidArgument(f"device={device!r}: the {self.driver.name} driver has devices 0 to {count - 1}")
        return index

    def _parse_device(self, device: int | str | torch.device | None) -> int:
        if device is None:
            return self.default_device
        if isinstance(device, int) and not isinstance(device, bool):
            return device
        kind, _, number = str(device).partition(":")
        if kind != self.device_type or (number and not number.isdecimal()):
            raise InvalidArgument(f"device={device!r} is not an index, {self.device_type!r} or '{self.device_type}:N'")
        return int(number) if number else self.default_device

    def malloc(self, tag: str, nbytes: int, device: int, *, shareable: bool = False) -> object:
        """A DLPack capsule over a block of `nbytes` at the begin of a new resident segment, which its blocks hold.

        Empties torch's cache and tries once more when the device is full.

        Raises:
            OutOfDeviceMemory: with the tag, the bytes needed and free, and what torch still caches idly; nothing
            changed.
        """
        self.check_usable()
        slot = self.slot(tag)
        try:
            return self.core.malloc_capsule(slot, nbytes, device, shareable)
        except OutOfDeviceMemory:
            torch_glue.empty_cache()
        try:
            return self.core.malloc_capsule(slot, nbytes, device, shareable)
        except OutOfDeviceMemory as error:
            idle = torch_glue.idle_cache_bytes(device)
            raise OutOfDeviceMemory(
                f"tag {tag!r} on device {device}: {error}; torch caches {idle >> 20} MiB idly",
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
                device=device,
                tag=tag,
                idle_cache_bytes=idle,
            ) from error
