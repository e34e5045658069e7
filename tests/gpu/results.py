"""GPU tests write what they saw as data: CUMEM_RESULTS names the folder (default benchmarks/results)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["record"]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def record(name: str, figures: dict[str, Any]) -> None:
    """Writes `<name>.json` with the machine and these figures."""
    sys.path.insert(0, str(_BENCHMARKS))
    try:
        from machine import describe
    finally:
        sys.path.pop(0)
    folder = Path(os.environ.get("CUMEM_RESULTS", _BENCHMARKS / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": describe(), **figures}, indent=1) + "\n")
