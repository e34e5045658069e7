"""A demo's result as Rich tables and lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from cumem.cli.result import DemoResult, Snapshot
from cumem.cli.units import common_unit, format_rate, format_seconds

__all__ = ["print_result"]

_STATE_STYLE = {"resident": "green", "asleep": "blue", "moving": "yellow", "mixed": "yellow", "lost": "red"}


def print_result(console: Console, result: DemoResult) -> None:
    """Prints what was held when, what each transition did, and whether all is as it was."""
    console.print()
    console.print(_held(result.snapshots))
    console.print(_transitions(result))
    _print_checks(console, result)


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _held(snapshots: list[Snapshot]) -> Table:
    unit = common_unit(max(snapshot.stats.live_bytes for snapshot in snapshots))
    table = _table(f"What is held ({unit.name})", ("", "tag", "state"), ("live", "device", "host", "device free"))
    for snapshot in snapshots:
        stats = snapshot.stats
        moment = snapshot.moment
        for tag, part in stats.by_tag.items():
            if part.segments == 0:
                continue
            style = _STATE_STYLE.get(part.state, "default")
            sizes = (unit(size) for size in (part.live_bytes, part.mapped_bytes, part.backup_bytes))
            table.add_row(moment, tag, f"[{style}]{part.state}[/]", *sizes, "")
            moment = ""
        sizes = (unit(size) for size in (stats.live_bytes, stats.mapped_bytes, stats.host_bytes, snapshot.free_bytes))
        table.add_row(moment, "all", "", *sizes, style="bold", end_section=True)
    return table


def _transitions(result: DemoResult) -> Table:
    sleep = result.sleep
    unit = common_unit(max(sleep.freed_bytes, sleep.copied_bytes))
    table = _table(
        f"What each transition did ({unit.name})",
        ("",),
        ("pages", "copied", "dropped", "zeroed", "time", "copy rate"),
    )
    table.add_row(
        "sleep",
        f"-{unit(sleep.freed_bytes)}",
        unit(sleep.copied_bytes),
        unit(sleep.discarded_bytes),
        "",
        format_seconds(sleep.seconds),
        format_rate(sleep.copied_bytes, sleep.phases.get("save", 0.0)),
    )
    for tag, wake in (("weights", result.wake_weights), ("kv_cache", result.wake_cache)):
        table.add_row(
            f"wake up {tag}",
            f"+{unit(wake.mapped_bytes)}",
            unit(wake.copied_bytes),
            "",
            unit(wake.zeroed_bytes),
            format_seconds(wake.seconds),
            format_rate(wake.copied_bytes, wake.phases.get("restore", 0.0)),
        )
    return table


def _print_checks(console: Console, result: DemoResult) -> None:
    continuation = result.continuation
    total = sum(len(row) for row in continuation.reference)
    same = sum(
        one == other
        for reference, after in zip(continuation.reference, continuation.after_wake, strict=True)
        for one, other in zip(reference, after, strict=True)
    )
    shown = " ".join(str(token) for token in continuation.after_wake[0][:8])
    console.print(f"  sequence 0 went on with [cyan]{shown} ...[/]", highlight=False)
    _print_check(console, result.addresses_equal, f"addresses of {result.addresses} tensors", "unchanged", "CHANGED")
    bits = "; the last logits too, bit by bit" if continuation.logits_equal else ""
    _print_check(console, continuation.tokens_equal, f"tokens: {same} of {total}", f"equal{bits}", "DIFFER")


def _print_check(console: Console, passed: bool, what: str, good: str, bad: str) -> None:
    mark, word = ("[green]✔[/]", f"[green]{good}[/]") if passed else ("[red]✘[/]", f"[bold red]{bad}[/]")
    console.print(f"{mark} {what} {word}", highlight=False)
