"""Writes the figures of the documents from the data in benchmarks/results: `python docs/figures.py [--check]`.

Between `<!-- figures -->` and `<!-- /figures -->` of README.md stands a table; nothing else is touched. With
`--check` nothing is written, and the exit status is 1 if the table is not the one that the data gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def load(name: str) -> dict[str, Any]:
    """One result file."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def find(rows: list[dict[str, Any]], case: str, phase: str) -> dict[str, Any]:
    """The row of a case and phase."""
    return next(row for row in rows if row["case"] == case and row["phase"] == phase)


def ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    return f"{seconds * 1e3:.3g} ms"


def table() -> list[str]:
    """The table's lines."""
    core = load("h200-core")
    rows = core["rows"]
    cycles = load("h200-cycles-48g")
    machine = core["machine"]
    bare = find(rows, "malloc-free-64m", "malloc+free")
    plain = find(rows, "torch_pinned_copy-16g", "to_host"), find(rows, "torch_pinned_copy-16g", "to_device")
    drift = max(0, *cycles["device_bytes_asleep_above_start"])
    lines = [
        f"Medians on one {machine['gpus'][0].split(',')[0]}, driver {machine['gpus'][0].split(',')[1].strip()}, "
        f"torch {machine['torch']}, {machine['date']}; data in `benchmarks/results`.",
        "",
        "| what | cumem | beside it |",
        "|---|---|---|",
        f"| malloc and free of a 64 MiB segment | {bare['cumem_us']:.0f} us | {bare['bare_us']:.0f} us: bare calls |",
    ]
    for pause in ("0.5", "0"):
        case = f"discard-32g-1g-pause-{pause}s"
        down, up = find(rows, case, "sleep"), find(rows, case, "wake")
        when = "half a second apart" if pause == "0.5" else "at once one after the other"
        lines.append(f"| 32 GiB dropped and mapped again, {when} | {ms(down['median_s'])} and {ms(up['median_s'])} | |")
    for tensors in (1, 300):
        down, up = find(rows, f"16g-{tensors}", "later_sleep"), find(rows, f"16g-{tensors}", "wake")
        lines.append(
            f"| 16 GiB in {tensors} tensor{'s' if tensors > 1 else ''}, to host and back | {ms(down['median_s'])} and "
            f"{ms(up['median_s'])} | {ms(plain[0]['median_s'])} and {ms(plain[1]['median_s'])}: a plain pinned copy |"
        )
    lines.append(
        f"| device memory held asleep above the start, 48 GiB over {cycles['cycles']} cycles | {drift >> 20} MiB | "
        f"2 MiB: one granule |"
    )
    return lines


def main() -> int:
    """Writes or checks; the exit status."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    made = f"{head}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(made != text)
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
