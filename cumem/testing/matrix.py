"""FaultMatrix: every operation, with every driver call made to fail, each time in a fresh world.

    matrix = FaultMatrix(begin=World, check=check, end=World.end)

    @matrix.operation("sleep")
    def sleep(world): world.allocator.sleep()

    matrix.run("sleep", code="driver", times=1)     # one world for each call that sleep makes

An operation runs once without a fault, to count its driver calls; then, for each of them, in a new world in which that
call fails. Whoever registers an operation has it covered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .._core import FaultyDriver
from .faults import FOR_EVER, Fault, faulty

__all__ = ["FaultMatrix", "Hit", "Operation"]

W = TypeVar("W")


@dataclass(frozen=True)
class Operation(Generic[W]):
    """What is made to fail. `prepare` sets the world up, without faults; `done` holds once `run` has succeeded."""

    name: str
    run: Callable[[W], object]
    prepare: Callable[[W], object] | None = None
    done: Callable[[W], object] | None = None


@dataclass(frozen=True)
class Hit:
    """A fault that met an operation. `error` is None where the operation succeeded all the same."""

    fault: Fault
    call: str  # the name of the first call that failed
    error: Exception | None


class FaultMatrix(Generic[W]):
    """Operations by name over one kind of world.

    Args:
        begin: makes a world over a driver. It must do the same driver calls each time.
        check: is handed the world after the fault, with the fault gone. Raises `AssertionError` for what is wrong.
        end: drops all that is in the world and raises `AssertionError` for what leaked. By then the operation's
            error is gone, with all that its traceback held.
        driver: makes the driver; `faulty` by default.
    """

    def __init__(
        self,
        begin: Callable[[FaultyDriver], W],
        check: Callable[[W, Operation[W], Hit], None],
        end: Callable[[W], None],
        *,
        driver: Callable[[], FaultyDriver] = faulty,
    ) -> None:
        self._begin = begin
        self._check = check
        self._end = end
        self._driver = driver
        self._operations: dict[str, Operation[W]] = {}

    def with_check(self, check: Callable[[W, Operation[W], Hit], None]) -> FaultMatrix[W]:
        """A matrix over the same operations, now and later, that checks something else."""
        other = FaultMatrix(self._begin, check, self._end, driver=self._driver)
        other._operations = self._operations
        return other

    def operation(
        self, name: str, *, prepare: Callable[[W], object] | None = None, done: Callable[[W], object] | None = None
    ) -> Callable[[Callable[[W], object]], Callable[[W], object]]:
        """Registers the decorated function. Raises `ValueError` if the name is taken."""

        def register(run: Callable[[W], object]) -> Callable[[W], object]:
            if name in self._operations:
                raise ValueError(f"an operation named {name!r} is registered already")
            self._operations[name] = Operation(name, run, prepare, done)
            return run

        return register

    @property
    def names(self) -> list[str]:
        """All operations, in the order in which they were registered."""
        return list(self._operations)

    def calls(self, name: str) -> list[str]:
        """The driver calls of an operation that nothing disturbs. Raises `AssertionError` if it fails by itself."""
        operation = self._operations[name]
        driver, world = self._prepared(operation)
        operation.run(world)
        calls = driver.calls
        if operation.done is not None:
            operation.done(world)
        self._end(world)
        return calls

    def run(self, name: str, *, code: str = "driver", times: int = 1) -> int:
        """Makes each call of an operation fail, with `code` and `times` times (`FOR_EVER`: to its end); how many.

        Raises:
            AssertionError: what `check` found, with the fault; or the fault was not met, because the calls are not the
                same in every run.
        """
        calls = self.calls(name)
        for number, call in enumerate(calls):
            self._run_one(self._operations[name], Fault(number, code, times), call)
        return len(calls)

    def run_all(self, name: str, *, codes: tuple[str, ...], times: tuple[int, ...] = (1, FOR_EVER)) -> int:
        """`run` for each of these codes and times; how many worlds."""
        return sum(self.run(name, code=code, times=often) for code in codes for often in times)

    def _prepared(self, operation: Operation[W]) -> tuple[FaultyDriver, W]:
        driver = self._driver()
        world = self._begin(driver)
        if operation.prepare is not None:
            operation.prepare(world)
        driver.clear()
        return driver, world

    def _run_one(self, operation: Operation[W], fault: Fault, call: str) -> None:
        driver, world = self._prepared(operation)
        where = f"{operation.name} with {fault} ({call})"
        fault.arm(driver)
        error = _error_of(operation, world)
        met = driver.failed > 0
        driver.clear()
        outcome = "succeeded" if error is None else f"raised {type(error).__name__}: {error}"
        if not met:
            raise AssertionError(f"{where}: the call was not made, so the operation's calls differ between two runs")
        try:
            self._check(world, operation, Hit(fault, call, error))
            del error
            self._end(world)
        except Exception as found:
            raise AssertionError(f"{where}: it {outcome}; then: {type(found).__name__}: {found}") from found


def _error_of(operation: Operation[W], world: W) -> Exception | None:
    try:
        operation.run(world)
    except Exception as error:
        return error
    return None
