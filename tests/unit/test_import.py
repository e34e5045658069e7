"""`import cumem` is cheap and needs no GPU: it loads neither torch nor libcuda."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPORT = "import sys, pathlib; print(*sys.modules); print(pathlib.Path('/proc/self/maps').read_text())"


def _loaded_by(statement: str, cwd: Path) -> tuple[set[str], str]:
    """The modules and the memory map of a fresh interpreter after `statement`."""
    run = subprocess.run(
        [sys.executable, "-c", f"{statement}; {REPORT}"], cwd=cwd, capture_output=True, text=True, check=True
    )
    modules, _, maps = run.stdout.partition("\n")
    return set(modules.split()), maps


def test_importing_cumem_loads_no_torch_and_no_command_line(tmp_path: Path) -> None:
    modules, _ = _loaded_by("import cumem", tmp_path)
    assert "cumem" in modules
    assert not modules & {"torch", "numpy", "typer", "rich"}


def test_importing_the_compiled_core_loads_no_cuda_and_no_torch_library(tmp_path: Path) -> None:
    _, maps = _loaded_by("import cumem._core", tmp_path)
    assert "_core.cpython" in maps
    assert not [line for line in maps.splitlines() if "libcuda" in line or "libtorch" in line or "libc10" in line]


def test_the_report_sees_torch_where_it_is_loaded(tmp_path: Path) -> None:
    modules, maps = _loaded_by("import torch", tmp_path)
    assert "torch" in modules
    assert "libtorch" in maps
