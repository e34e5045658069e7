"""The figures of the documents are those of the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_is_made_from_the_results() -> None:
    script = ROOT / "docs" / "figures.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run python docs/figures.py\n{done.stderr}"
