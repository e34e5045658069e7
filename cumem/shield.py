"""Shield: runs a transition where no signal handler and no asynchronous exception can cut it in two.

Python runs signal handlers, and raises what they raise, on the main thread between any two bytecodes. A transition
therefore
decides and acts on a thread of its own. The calling thread waits, runs the hooks that the transition hands it (hooks
expect
the caller's thread: its device, its stream), and holds back what is raised into it meanwhile. The transition asks for
that at its checkpoints, between phases; past its decision it runs to its end, and the caller raises then. An
interpreter that exits meanwhile waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import StateError

__all__ = ["Interrupted", "Shield"]

T = TypeVar("T")

_LOOK_S = 0.05  # how often the caller looks whether something was raised into it


class Interrupted(Exception):
    """Raised inside a transition, at a checkpoint, to abort it; the caller gets what interrupted it instead."""


class _Request:
    """One function that the caller's thread runs for the transition."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._begun = False
        self.answered = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        if self._begun:  # something was raised into the middle of it
            self.error = self.error or StateError("interrupted")
            self.answered.set()
            return
        self._begun = True
        try:
            self._function()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.answered.set()


class Shield(Generic[T]):
    """One transition's two threads."""

    def __init__(self, body: Callable[[Shield[T]], T], what: str) -> None:
        self._body = body
        self._what = what
        self._begin = threading.Event()  # the caller serves, or is gone
        self._turn = threading.Event()  # something changed for the caller
        self._request: _Request | None = None
        self._finished = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._interrupt: BaseException | None = None
        self._gone = False
        self._decided = False

    @property
    def over(self) -> bool:
        """Whether the caller waits no more."""
        return self._gone or self._finished

    # --- on the caller's thread ---

    def run(self) -> T:
        """Runs the body; returns its result or raises its error, or what was raised into this thread meanwhile."""
        worker = threading.Thread(target=self._work, name=f"cumem-{self._what}", daemon=False)
        try:
            worker.start()  # what is raised in here, too, must not leave a transition that nobody serves
            self._serve()
        finally:
            self._gone = True
            self._begin.set()
        if self._interrupt is not None:
            self._add_notes(self._interrupt)
            raise self._interrupt
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _add_notes(self, interrupt: BaseException) -> None:
        """Says on what interrupted the caller what became of the transition, since its own error is not raised."""
        ended = "had passed its decision and ran to its end" if self._decided else "was aborted; nothing changed"
        notes = [f"cumem: the {self._what} {ended}"]
        if self._error is not None and self._error is not interrupt:
            if not isinstance(self._error, Interrupted):
                notes.append(f"cumem: it failed: {type(self._error).__name__}: {self._error}")
            notes += getattr(self._error, "__notes__", [])
        if hasattr(interrupt, "add_note"):
            for note in notes:
                interrupt.add_note(note)

    def _serve(self) -> None:
        while True:
            try:
                self._serve_uninterrupted()
                return
            except BaseException as error:
                self._interrupt = self._interrupt or error

    def _serve_uninterrupted(self) -> None:
        self._begin.set()
        while True:
            request = self._request
            if request is not None and not request.answered.is_set():
                self._run_request(request)
            elif self._finished:
                return
            else:
                # A signal that comes just before the wait does not end it, and what is sent into a thread never does.
                self._turn.wait(_LOOK_S)
                self._turn.clear()

    def _run_request(self, request: _Request) -> None:
        try:
            request.run()
        except Exception:
            return  # the hook's own error: the transition has it
        # a KeyboardInterrupt or SystemExit inside the hook goes on to _serve, as an interrupt

    # --- on the transition's thread ---

    def _work(self) -> None:
        self._begin.wait()
        if self._gone:
            return
        try:
            self._result = self._body(self)
        except BaseException as error:
            self._error = error
        finally:
            self._finished = True
            self._turn.set()

    def checkpoint(self) -> None:
        """Between two phases before the decision: raises `Interrupted` if the caller was interrupted."""
        if self._interrupt is not None or self._gone:
            raise Interrupted(f"the {self._what} was interrupted")

    def decide(self) -> None:
        """The last checkpoint: from here on the transition runs to its end."""
        self.checkpoint()
        self._decided = True

    def on_caller(self, function: Callable[[], object]) -> None:
        """Runs `function` on the caller's thread and waits. Raises what it raised."""
        request = _Request(function)
        self._request = request
        self._turn.set()
        while not request.answered.wait(timeout=1.0):
            if self._gone:  # the caller was torn out of its wait: nobody will answer
                raise Interrupted(f"the thread that called for the {self._what} is gone")
        if request.error is not None:
            raise request.error
