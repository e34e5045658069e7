"""How a command ends when something fails: one clear line and exit code 1, or a traceback on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cumem.errors import CumemError

__all__ = ["TracebackOption", "one_line_failures"]

TracebackOption = Annotated[bool, typer.Option("--traceback", help="Show Python's traceback of an error.")]


@contextmanager
def one_line_failures(*, traceback: bool) -> Iterator[None]:
    """Turns an error of cumem, of memory or of a file into one line on stderr and exit code 1.

    With `traceback` the error passes through unchanged. Other errors are defects and always show their traceback.
    """
    try:
        yield
    except (CumemError, MemoryError, OSError) as error:
        if traceback:
            raise
        message = " ".join(str(error).split()) or "no memory left"
        line = Text.assemble((f"{type(error).__name__}: ", "bold red"), message)
        Console(stderr=True).print(line, soft_wrap=True)
        raise typer.Exit(1) from None
