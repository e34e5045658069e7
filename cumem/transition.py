"""What a sleep and a wake share: one at a time in a process, phases with their times, hooks with their undo.

sleep: check -> reserve -> hooks -> quiesce -> save -> wait again -> unmap -> commit -> hooks
wake:  check -> preflight -> hooks -> quiesce -> map -> restore -> commit -> quiesce -> hooks
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from . import torch_glue
from ._core import SegmentInfo
from .errors import CumemError, FailedSegment, StateError
from .hooks import Hook, HookFunction, Hooks, Transition
from .memory import Memory, Tag
from .shield import Shield

__all__ = ["HookRun", "Phases", "failed_segment", "run_transition", "unless_under_way"]

T = TypeVar("T")

_lock = threading.Lock()  # held by the transition under way, in any allocator of the process
_here = threading.local()  # `shield`: of the transition that this thread called for; `works`: it is a transition's own
_WAIT_STEP_S = 0.05  # how often a waiting caller's interrupt is looked at


class Phases:
    """Seconds by phase, in order. A phase that runs twice adds up."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since the transition began."""
        return time.perf_counter() - self._begin


def run_transition(memory: Memory, what: str, body: Callable[[Shield[T]], T], *, blocking: bool) -> T:
    """Runs `body` alone in the process, shielded from signals.

    Raises:
        StateError: called from inside a transition (a hook, a backend, a signal handler), while the current stream is
            captured, while the interpreter ends, or with `blocking=False` while another transition is under way.
            Nothing changed.
        DriverError: the context is contaminated.
    """
    memory.check_usable()
    if _is_inside():
        raise StateError(
            f"{what} was called from inside a transition: hooks, backends and signal handlers may not start another"
        )
    if sys.is_finalizing():  # no thread can begin any more
        raise StateError(f"{what} was called while the interpreter ends")
    if memory.device_type == "cuda" and torch_glue.is_capturing():
        raise StateError(f"{what} was called while a CUDA graph is being captured: end the capture first")

    def alone(shield: Shield[T]) -> T:
        _here.works = True
        _acquire(shield, what, blocking)
        try:
            return body(shield)
        finally:
            _lock.release()

    shield = Shield(alone, what)
    try:
        _here.shield = shield
        return shield.run()
    finally:
        _here.shield = None


def _is_inside() -> bool:
    shield = getattr(_here, "shield", None)
    return getattr(_here, "works", False) or (shield is not None and not shield.over)


def unless_under_way(body: Callable[[], object]) -> None:
    """Runs `body` alone; does nothing while a transition is under way. Never waits."""
    if not _lock.acquire(blocking=False):
        return
    try:
        body()
    finally:
        _lock.release()


def _acquire(shield: Shield[T], what: str, blocking: bool) -> None:
    if not blocking:
        if not _lock.acquire(blocking=False):
            raise StateError(f"{what}(blocking=False): another transition is under way")
        return
    while not _lock.acquire(timeout=_WAIT_STEP_S):
        shield.checkpoint()


class HookRun:
    """One transition's hooks: runs them on the caller's thread and undoes those that ran."""

    def __init__(self, shield: Shield[T], hooks: Hooks, transition: Transition) -> None:
        self._shield = shield
        self._transition = transition
        down = hooks.down()
        self._hooks = down if transition.kind == "sleep" else down[::-1]
        self._ran: list[Hook] = []

    def _call(self, function: HookFunction, transition: Transition) -> None:
        self._shield.on_caller(lambda: function(transition))

    def before(self) -> None:
        """Runs the hooks that come before memory moves; the first error stops them and is raised, nothing undone."""
        for hook in self._hooks:
            function = hook.before_sleep if self._transition.kind == "sleep" else hook.before_wake
            if function is not None:
                self._call(function, self._transition)
                self._ran.append(hook)

    def after(self) -> list[Exception]:
        """Runs the hooks that come after memory has moved, all of them; their errors."""
        errors: list[Exception] = []
        for hook in self._hooks:
            function = hook.after_sleep if self._transition.kind == "sleep" else hook.after_wake
            if function is None:
                continue
            try:
                self._call(function, self._transition)
            except BaseException as error:  # Ctrl-C in one hook: the caller gets it, the other hooks run all the same
                errors.append(as_exception(error))
        return errors

    def undo(self) -> list[Exception]:
        """Takes back what `before` did, last first; errors of that."""
        told = Transition(self._transition.kind, self._transition.tags, self._transition.level, undo=True)
        errors: list[Exception] = []
        for hook in reversed(self._ran):
            function = hook.up if self._transition.kind == "sleep" else hook.down
            if function is None:
                continue
            try:
                self._call(function, told)
            except BaseException as error:
                errors.append(as_exception(error))
        self._ran.clear()
        return errors


def add_notes(error: BaseException, others: list[Exception], what: str) -> None:
    """Says on `error` that other things failed as well."""
    for other in others:
        if hasattr(error, "add_note"):
            error.add_note(f"cumem: {what}: {type(other).__name__}: {other}")


def failed_segment(tag: Tag, info: SegmentInfo, phase: str, error: Exception) -> FailedSegment:
    """What became of one segment that could not be moved."""
    return FailedSegment(tag.name, info.id, info.address, info.size, info.device, phase, info.state, error)


def as_exception(error: BaseException) -> Exception:
    """An error as something that a list of failures can hold."""
    return error if isinstance(error, Exception) else CumemError(f"{type(error).__name__}: {error}")
