"""What a result was measured on."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from typing import Any

__all__ = ["describe"]


def describe() -> dict[str, Any]:
    """Hardware, driver and library versions, as written into every result file."""
    import torch

    import cumem

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cumem": cumem.__version__,
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
