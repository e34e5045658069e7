"""The Typer application. A command is one function in a file of its own and one line in `COMMANDS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from cumem import __version__
from cumem.cli.demo import demo
from cumem.cli.doctor import doctor

__all__ = ["COMMANDS", "app"]

COMMANDS: tuple[Callable[..., None], ...] = (demo, doctor)

app = typer.Typer(
    help="GPU memory that goes away and comes back without changing one address.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cumem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that come before a command."""


for _command in COMMANDS:
    app.command()(_command)
