"""The steps of a long command: each is shown while it runs and recorded as a phase of the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from cumem.cli.timeline import Timeline
from cumem.cli.units import format_seconds

__all__ = ["Stages"]


class Stages:
    """A context manager that shows one line a stage: a bar where its steps are counted, a spinner otherwise."""

    def __init__(self, console: Console, timeline: Timeline) -> None:
        self.timeline = timeline
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✔"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", style="cyan"),
            console=console,
        )

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextmanager
    def stage(
        self, name: str, description: str, *, steps: int | None = None, watch: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Shows `description` and records phase `name` over the body; yields what to call after each of `steps`.

        Args:
            name: The phase's short name, for plots.
            description: What the user reads.
            steps: How many steps the body has; None: not counted.
            watch: Sample the allocator's ledger while the body runs.
        """
        task = self._progress.add_task(description, total=steps, note="")
        with self.timeline.phase(name, watch=watch):
            yield lambda: self._progress.advance(task)
        note = format_seconds(self.timeline.phases[-1].seconds)
        self._progress.update(task, total=steps or 1, completed=steps or 1, note=note)
