"""The README's Python runs, in one go, as a reader would paste it, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_python_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUMEM_DRIVER": "host", "CUMEM_HOST_DEVICE_BYTES": str(4 << 30)},
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ MiB freed, \d+ MiB saved, ", done.stdout)
