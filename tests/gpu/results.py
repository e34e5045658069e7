"""GPU tests write what they saw as data: CUMEM_RESULTS names the folder (default benchmarks/results).

A file's name begins with the GPU's: "NVIDIA H200" -> "h200-cycles-48g.json".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["record"]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def record(name: str, figures: dict[str, Any]) -> None:
    """Writes `<gpu>-<name>.json` with the machine and these figures."""
    sys.path.insert(0, str(_BENCHMARKS))
    try:
        from machine import describe
    finally:
        sys.path.pop(0)
    folder = Path(os.environ.get("CUMEM_RESULTS", _BENCHMARKS / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe()
    gpu = machine["gpus"][0].split(",")[0].removeprefix("NVIDIA ").lower().replace(" ", "-")
    (folder / f"{gpu}-{name}.json").write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n")
