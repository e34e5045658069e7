"""`cumem doctor`: what this machine gives cumem, what it lacks, what that costs and what to do."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumem.cli.demo import DriverChoice

if TYPE_CHECKING:
    from cumem.doctor import Diagnosis, Finding

__all__ = ["doctor"]

_STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(
    driver: Annotated[DriverChoice, typer.Option(help="The driver that must be usable. auto: any.")] = (
        DriverChoice.auto
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Explain this machine: what works, what does not, what that costs and what to do.

    Needs no GPU, no torch and no NCCL; touches no device's memory. Exit code 1 if cumem cannot be used with --driver.
    """
    from cumem.doctor import diagnose

    diagnosis = diagnose(driver.value)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        _print(Console(), diagnosis)
    if not diagnosis.usable:
        raise typer.Exit(1)


def _print(console: Console, diagnosis: Diagnosis) -> None:
    console.print(_table(diagnosis.findings))
    counts = {verdict: sum(f.verdict.value == verdict for f in diagnosis.findings) for verdict in _STYLES}
    console.print(", ".join(f"[{_STYLES[v]}]{count} {v}[/]" for v, count in counts.items()), highlight=False)
    if diagnosis.usable:
        console.print(f"[green]✔[/] cumem runs here on the [bold]{diagnosis.chosen}[/] driver", highlight=False)
    else:
        reason = escape(diagnosis.reason)
        console.print(f"[red]✘[/] cumem cannot run with --driver {diagnosis.asked}: {reason}", highlight=False)


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what")
    table.add_column("found")
    table.add_column("what it costs; what to do", ratio=1)
    for area, group in groupby(findings, key=lambda finding: finding.area):
        table.add_row("", f"[bold]{escape(area)}[/]", "", "")
        for finding in group:
            style = _STYLES[finding.verdict.value]
            advice = "\n".join(
                filter(None, (escape(finding.cost), finding.remedy and f"[cyan]→[/] {escape(finding.remedy)}"))
            )
            table.add_row(
                f"[{style}]{finding.verdict.value}[/]", escape(finding.subject), escape(finding.found), advice
            )
        table.add_section()
    return table
