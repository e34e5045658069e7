"""Allocator: the object that users hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import _core, config, tensors, torch_glue
from .adopt import adopt as adopt_into
from .claims import forget_dead
from .errors import CumemError, InvalidArgument, StateError, WakeUpPartialFailure
from .fraction_hook import FractionHook
from .hooks import Hooks
from .keeping import address_runs
from .ledger import memory_stats
from .memory import Memory, split_policy
from .region import Region, as_devices, default_tag
from .reports import AdoptReport, MemoryStats, SleepReport, WakeReport
from .sleeping import Sleep, discard
from .transition import add_notes, run_transition, unless_under_way
from .waking import Wake

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["Allocator"]

_LEVELS = (1, 2)
_ON_FAILURE = ("partial", "rollback")
_MAX_BYTES = 2**63 - 1


def _checked_bytes(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_BYTES:
        raise InvalidArgument(f"{name}={value!r} is not a number of bytes: an integer from 0 to {_MAX_BYTES}")
    return value


class Allocator:
    """Owns tags and the memory under them. Several may live in one process; all methods may be called from any thread.

    Args:
        device: the device of what is allocated without one: an index, "cuda:1", a torch.device. None: device 0.
        driver: "cuda", "host", or "auto" (cuda where a usable GPU is, else host; `CUMEM_DRIVER` overrides); or a
            driver object.
        host_budget: the most bytes of host memory for backups. None: what MemAvailable leaves; the limits of the memory
            cgroups always hold.
        margin: bytes that stay free on the device: an allocation that would leave less raises `OutOfDeviceMemory`.
        device_timeout: seconds that a wait for the device may last before `DeviceBusy`. None:
            `CUMEM_DEVICE_TIMEOUT`, else 60.

    Raises:
        Unsupported: `driver="cuda"` without a usable GPU; the message says what is missing.
        InvalidArgument: a value that is refused.
    """

    def __init__(
        self,
        device: int | str | torch.device | None = None,
        driver: str | _core.Driver = "auto",
        *,
        host_budget: int | None = None,
        margin: int = 0,
        device_timeout: float | None = None,
    ) -> None:
        Memory.refuse_fork()
        core = _core.Core(
            config.choose_driver(driver),
            host_budget_bytes=None if host_budget is None else _checked_bytes("host_budget", host_budget),
            margin_bytes=_checked_bytes("margin", margin),
            device_timeout_s=config.device_timeout_s(device_timeout),
        )
        self._memory = Memory(core, 0)
        self._memory.default_device = self._memory.device_index(device)
        self._closed = False
        self.hooks = Hooks()

    # --- life ---

    def close(self) -> None:
        """Refuses new work from now on. Tensors stay valid; their memory goes with the last of them. Idempotent."""
        self._closed = True

    def __enter__(self) -> Allocator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> Memory:
        if self._closed:
            raise StateError("this allocator is closed: it takes no new work")
        self._memory.check_usable()
        return self._memory

    def _asked(self) -> Memory:
        """For questions: they are answered after close(), and when the context is lost, too."""
        self._memory.refuse_fork()
        return self._memory

    def _place(
        self, tag: str | None, backend: str | None, device: int | str | torch.device | None
    ) -> tuple[Memory, str, int]:
        """Where a new tensor goes: (memory, tag, device index); a new tag is made once all was checked."""
        memory = self._usable()
        index = memory.device_index(device)
        name = default_tag(memory, tag)
        memory.ensure_tag(name, backend)
        return memory, name, index

    # --- tensors ---

    def empty(
        self,
        *shape: Any,
        dtype: torch.dtype | None = None,
        tag: str | None = None,
        backend: str | None = None,
        device: int | str | torch.device | None = None,
        shareable: bool = False,
    ) -> torch.Tensor:
        """A torch tensor in `tag`, contents undefined; `shape` as `torch.empty` takes it.

        Args:
            shape: integers, or one sequence of them.
            dtype: None is torch's default.
            tag: made if it is new, with `backend`. None is that of this thread's innermost region.
            backend: None is the tag's own, "cpu" for a new tag.
            device: None is the allocator's.
            shareable: pages that can be exported to other processes; a wake makes them so again.

        Raises:
            OutOfDeviceMemory: the device is full, after torch's cache was emptied. Nothing changed.
            InvalidArgument: a shape, dtype, device or backend that is refused. Nothing changed.
            StateError: the tag has another backend; the allocator is closed.
            Unsupported: torch is missing; the device cannot export memory.

        May wait for the device when memory is short, to reuse what died.
        """
        memory, tag, index = self._place(tag, backend, device)
        return tensors.empty(memory, shape, dtype=dtype, tag=tag, device=index, shareable=shareable)

    def zeros(
        self,
        *shape: Any,
        dtype: torch.dtype | None = None,
        tag: str | None = None,
        backend: str | None = None,
        device: int | str | torch.device | None = None,
        shareable: bool = False,
    ) -> torch.Tensor:
        """As `empty`, filled with zeros on the current stream."""
        memory, tag, index = self._place(tag, backend, device)
        return tensors.zeros(memory, shape, dtype=dtype, tag=tag, device=index, shareable=shareable)

    def full(
        self,
        *shape: Any,
        fill_value: complex | bool,
        dtype: torch.dtype | None = None,
        tag: str | None = None,
        backend: str | None = None,
        device: int | str | torch.device | None = None,
        shareable: bool = False,
    ) -> torch.Tensor:
        """As `empty`, filled with `fill_value` on the current stream."""
        memory, tag, index = self._place(tag, backend, device)
        return tensors.full(
            memory, shape, fill_value=fill_value, dtype=dtype, tag=tag, device=index, shareable=shareable
        )

    def adopt(self, obj: Any, tag: str | None = None, backend: str | None = None) -> AdoptReport:
        """Moves existing tensors into `tag`, packed; see `cumem.adopt.adopt` for what is kept and what is refused.

        Raises:
            OutOfDeviceMemory: part of `obj` may be in the tag by then; every tensor is whole, old or new, and a
                second call moves the rest.
            Unsupported: a tensor that cannot be moved; nothing was moved.
            InvalidArgument: `obj` holds no tensor; a tag or backend that is refused.
            StateError: a tensor belongs to another tag; the tag has another backend.
        """
        memory, tag, _ = self._place(tag, backend, None)
        return adopt_into(memory, obj, tag)

    def host_view(self, t: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over the backup of an asleep tensor: no copy, not to be written; it keeps its memory alive.

        Works after the device's context was lost, too.

        Raises:
            StateError: the tensor is resident, or its contents were dropped.
            InvalidArgument: not a tensor, or not in a tag of this allocator.
        """
        return tensors.host_view(self._asked(), t)

    def tag_of(self, t: torch.Tensor) -> str | None:
        """The tag that a tensor's memory belongs to; None for native memory."""
        return tensors.tag_of(self._asked(), t)

    def is_resident(self, t: torch.Tensor) -> bool:
        """Whether a tensor's memory may be touched; true for native memory."""
        return tensors.is_resident(self._asked(), t)

    def assert_resident(self, *objects: Any) -> None:
        """Raises `AsleepError`, naming the tag, if any of these tensors' or modules' memory may not be touched."""
        tensors.assert_resident(self._asked(), *objects)

    def region(
        self,
        tag: str,
        *,
        backend: str | None = None,
        scope: str = "thread",
        devices: Sequence[Any] | None = None,
        **policy: Any,
    ) -> Region:
        """`with allocator.region(tag):` puts what torch allocates on CUDA in the body into the tag.

        Everything that this thread's torch code allocates is caught, temporaries and library workspaces too; cuBLAS's
        workspaces and the generators' tensors are made natively before. Regions nest: the innermost wins. A region
        may be
        entered again later by another call; until a sleep or `trim` both share a pool. Keep regions short: while one
        is open torch (up to 2.12) gives nothing back on that device, in any thread.

        Args:
            tag: made if it is new.
            backend: None is the tag's own, "cpu" for a new tag; with `policy` its options. See `set_policy`.
            scope: "thread", or "process" for every thread's allocations, autograd's too; one such region a device.
            devices: those whose allocations are caught; None is torch's current one.

        Raises:
            StateError: the tag has another policy; a process-wide region beside another one; later, at a `sleep` of
            the tag in
                another thread.
            Unsupported: torch's allocator back end cannot be routed.

        On the host driver only the tag and its policy are set: for `empty` and `adopt`, which take the innermost
        region's tag where none is given.
        """
        memory = self._usable()
        made = memory.ensure_tag(tag, backend, policy)
        return Region(memory, made, scope, as_devices(memory, devices))

    def follow_memory_fraction(self) -> None:
        """Keeps torch's per-process memory fraction true from now on: torch counts sleeping region memory as used.

        A hook raises the fraction by what sleeps and restores it to the byte. Raises `InvalidArgument` the second time.
        """
        FractionHook(self._memory.torch_asleep_bytes).register(self.hooks)

    # --- policies and state ---

    def set_policy(self, tag: str, backend: str, **options: Any) -> None:
        """Gives a tag, made if it is new, another backend or other options.

        Args:
            tag: must be awake.
            backend: a name of `cumem.backends.names()`.
            options: `reloadable` (bool; a level 2 sleep may drop the contents) and the backend's own: `host` for
                cpu, `wake` for discard.

        Raises:
            StateError: the tag is not awake; nothing changed.
            InvalidArgument: a backend or option that is refused; nothing changed.
        """
        self._usable().set_policy(tag, split_policy(backend, options))

    def tags(self) -> list[str]:
        """All tags, in the order they were made."""
        return [tag.name for tag in self._asked().select(None)]

    def state(self, tag: str | None = None) -> str:
        """A tag's state: "resident", "asleep", "moving", "lost", "mixed" or "empty". Raises `UnknownTag`.

        Without a tag the allocator's: "broken" once the device's context is lost, "mixed" if its tags differ.
        """
        memory = self._asked()
        if tag is not None:
            return memory.state(tag)
        if memory.core.broken is not None:
            return "broken"
        states = {info.state for info in memory.core.segments()}
        return states.pop() if len(states) == 1 else "mixed" if states else "empty"

    def is_sleeping(self, tag: str | None = None) -> bool:
        """Whether some segment (of the tag) is not resident. Raises `UnknownTag`."""
        memory = self._asked()
        slot = None if tag is None else memory.slot(tag)
        return any(info.state != "resident" for info in memory.core.segments(slot))

    def undefined_tags(self) -> list[str]:
        """Tags whose contents nobody restored since they woke; `mark_loaded` takes them off."""
        return sorted(self._asked().undefined)

    def mark_loaded(self, tag: str) -> None:
        """Says that the tag's contents are loaded. Raises `UnknownTag`."""
        memory = self._asked()
        memory.undefined.discard(memory.tag(tag).name)

    def bytes_needed_to_wake(self, tags: Iterable[str] | None = None) -> int:
        """Device bytes that `wake_up(tags)` would map. Raises `UnknownTag`."""
        self._asked()
        return sum(
            info.backing_bytes
            for tag in self._memory.select(tags)
            for info in self._memory.core.segments(tag.slot)
            if info.state in ("asleep", "lost")
        )

    def stats(self) -> MemoryStats:
        """The allocator's own ledger. Waits for nothing; other memory of the process is not in it."""
        return memory_stats(self._asked())

    @property
    def driver_name(self) -> str:
        """ "cuda" or "host"."""
        return self._memory.driver.name

    @property
    def torch_device(self) -> torch.device:
        """Where torch builds native tensors beside this allocator's: the device, or the CPU on the host driver."""
        import torch

        kind = self._memory.device_type
        return torch.device(kind, self._memory.default_device) if kind == "cuda" else torch.device(kind)

    def driver_memory(self, device: int | str | torch.device | None = None) -> tuple[int, int]:
        """(free, total) bytes of a device as the driver says, other processes included."""
        memory = self._asked()
        return memory.core.memory_info(memory.device_index(device))

    # --- transitions ---

    def sleep(
        self, tags: Iterable[str] | None = None, *, level: int = 1, keep: Iterable[Any] = (), blocking: bool = True
    ) -> SleepReport:
        """Gives the memory of these tags, or of all, away. Addresses stay; sleeping what sleeps is a no-op.

        Args:
            tags: None for all.
            level: 1 follows each tag's policy. 2 drops the tags whose policy says `reloadable=True` and saves the
                others as at level 1.
            keep: tensors, or modules for their buffers, that are saved even inside a dropped tag.
            blocking: False raises `StateError` instead of waiting for a transition that is under way.

        Raises:
            UnknownTag, InvalidArgument: before anything changes.
            OutOfHostMemory: the backups have no room; everything stays resident.
            DeviceBusy: work on the device did not end in time; everything stays resident.
            SleepFailure: past the decision, some segments could not be unmapped or a hook failed; nothing is lost.
            Exception: what a hook raised before memory moved; everything stays resident, earlier hooks are undone.

        Waits for the device, without the GIL. A signal handler's exception is raised once the transition was
        aborted, or, past its decision, ended.
        """
        memory = self._usable()
        selected = memory.select(tags)
        if level not in _LEVELS:
            raise InvalidArgument(f"level={level!r} is none of {list(_LEVELS)}")
        sleep = Sleep(memory, self.hooks, selected, level=level, keep=address_runs(keep))
        return run_transition(memory, "sleep", sleep, blocking=blocking)

    def wake_up(
        self,
        tags: Iterable[str] | None = None,
        *,
        restore: bool = True,
        on_failure: str | None = None,
        blocking: bool = True,
    ) -> WakeReport:
        """Takes the memory of these tags, or of all, back at the same addresses. Waking what is awake is a no-op.

        Args:
            tags: None for all.
            restore: False maps only: contents are undefined until someone loads them (`undefined_tags`,
                `mark_loaded`), and the backups are dropped.
            on_failure: "partial" (default) keeps what woke when some segments fail; "rollback" puts it back to sleep.
            blocking: as in `sleep`.

        Raises:
            UnknownTag, InvalidArgument: before anything changes.
            OutOfDeviceMemory: too little is free, found before anything was mapped, or `DeviceBusy`: all stay asleep.
            WakeUpPartialFailure: some segments failed later, or a hook did; those are asleep with their backups,
                `retry()` does the rest.
            Exception: what a hook raised before memory moved; all stay asleep.
        """
        memory = self._usable()
        selected = memory.select(tags)
        if on_failure not in (None, *_ON_FAILURE):
            raise InvalidArgument(f"on_failure={on_failure!r} is none of {list(_ON_FAILURE)}")
        wake = Wake(memory, self.hooks, selected, restore=restore, rollback=on_failure == "rollback")
        try:
            return run_transition(memory, "wake_up", wake, blocking=blocking)
        except WakeUpPartialFailure as error:
            names = [tag.name for tag in selected]
            error._retry = lambda: self.wake_up(names, restore=restore, on_failure=on_failure, blocking=blocking)
            raise

    def discard(self, tags: Iterable[str], *, blocking: bool = True) -> SleepReport:
        """Drops the contents of these tags: awake ones fall asleep without a backup, asleep ones lose theirs.

        They wake undefined, or as their discard policy says. Raises as `sleep`; the host bytes of asleep tags are free
        on return.
        """
        memory = self._usable()
        if tags is None:  # a call that destroys names what it destroys
            raise InvalidArgument("discard needs a list of tags; for all of them give tags()")
        selected = memory.select(tags)
        return run_transition(memory, "discard", discard(memory, self.hooks, selected), blocking=blocking)

    @contextmanager
    def asleep(self, tags: Iterable[str] | None = None) -> Iterator[SleepReport]:
        """Sleeps these tags for the body and wakes what it put to sleep, whatever happens inside.

        A sleep that raises although it put tags to sleep (Ctrl-C past its decision) is taken back.
        """
        names = [tag.name for tag in self._usable().select(tags)]
        awake = [name for name in names if not self.is_sleeping(name)]
        try:
            report = self.sleep(names)
        except BaseException as error:
            self._take_back([name for name in awake if self.is_sleeping(name)], error)
            raise
        try:
            yield report
        finally:
            self._wake_again(list(report.by_tag))

    def _take_back(self, names: list[str], error: BaseException) -> None:
        try:
            if names:
                self.wake_up(names)
        except CumemError as failed:
            add_notes(error, [failed], f"waking {names} again failed")

    def _wake_again(self, names: list[str]) -> None:
        if sys.is_finalizing():  # a suspended generator dies with the interpreter: nobody is left to use the memory
            return
        try:
            self.wake_up(names)
        except Exception:
            raise
        except BaseException:  # interrupted, perhaps before the decision: the memory comes back all the same
            self.wake_up(names)
            raise

    def trim(self, tag: str | None = None) -> int:
        """Gives back what no live tensor needs: dead segments, and host memory that holds no backup. Bytes given back.

        Seals the pools of the tag, or of all: later regions get fresh ones. While any region is open on the device,
        torch up to 2.12 keeps its dead segments until a later trim. Waits for the device.

        Raises:
            UnknownTag, StateError (a thread has a region of the tag open), DeviceBusy: nothing changed.
        """
        memory = self._usable()
        before = sum(info.mapped_bytes for info in memory.core.segments()) + memory.core.dead_bytes
        memory.seal_pools(memory.select(None if tag is None else [tag]))
        torch_glue.empty_cache()  # torch hands back what is dead in sealed pools
        memory.reap()
        after = sum(info.mapped_bytes for info in memory.core.segments()) + memory.core.dead_bytes
        unless_under_way(lambda: forget_dead(memory))  # else backends keep what died asleep until the next transition
        return max(0, before - after) + memory.core.trim_host()
