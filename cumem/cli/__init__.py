"""The command line `cumem`: one file a command, listed in `app.py`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line; the console script's entry point. Always leaves by `SystemExit`."""
    from cumem.cli.app import app

    app(prog_name="cumem")
