"""The C++ layers point one way: bindings -> torch_shim -> core -> {table, plan, arena, ...} -> vmm -> driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from layout.source_tree import REPOSITORY, cpp_files, cycles, includes, reachable

_BASE, _DRIVER, _VMM, _PARTS, _CORE, _SHIM, _BINDINGS = range(7)
_NAMED = {
    "status": _BASE,
    "types": _BASE,
    "process": _BASE,
    "vmm": _VMM,
    "core": _CORE,
    "core_copies": _CORE,
    "core_transitions": _CORE,
    "torch_shim": _SHIM,
}
_FOLDERS = {"driver": _DRIVER, "bindings": _BINDINGS}
_TORCH_HEADERS = ("torch/", "ATen/", "c10/")
_CUDA_HEADER = re.compile(r"(cuda|cu[A-Z]|nvrtc|nvml|nccl).*\.h")
_INCLUDES_CUDA = ("driver/cuda_api.", "driver/cuda_driver.")  # libcuda's entry points, and who calls them
_SEES_CUDA = "driver/cuda_"  # the rest of the CUDA driver, through cuda_api.h
_LEAVES_PROCESS = re.compile(r"(?<![\w.>])(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\(")


def _layer(file: str) -> int:
    folder, _, _ = file.rpartition("/")
    if folder:
        return _FOLDERS[folder]
    return _NAMED.get(file.rpartition(".")[0], _PARTS)


def upward_includes(root: Path) -> list[str]:
    return [
        f"{found.source} includes {found.target}"
        for found in includes(root)
        if found.local and _layer(found.target) > _layer(found.source)
    ]


def include_cycles(root: Path) -> list[str]:
    edges: dict[str, set[str]] = {}
    for found in includes(root):
        if found.local:
            edges.setdefault(found.source, set()).add(found.target)
    return [" -> ".join(cycle) for cycle in cycles(edges)]


def cuda_headers_outside_the_cuda_driver(root: Path) -> list[str]:
    return [
        f"{found.source} includes {found.target}"
        for found in includes(root)
        if not found.local and _CUDA_HEADER.fullmatch(found.target) and not found.source.startswith(_INCLUDES_CUDA)
    ]


def cuda_headers_that_reach_other_files(root: Path) -> list[str]:
    """Files that see CUDA's headers through a header of ours."""
    edges: dict[str, set[str]] = {}
    for found in includes(root):
        edges.setdefault(found.source, set()).add(found.target)
    return [
        f"{source} sees {target}"
        for source in sorted(edges)
        if not source.startswith(_SEES_CUDA)
        for target in sorted(reachable(edges, {source}) - set(edges) - edges[source])
        if _CUDA_HEADER.fullmatch(target)
    ]


def python_headers_outside_the_bindings(root: Path) -> list[str]:
    return [
        f"{found.source} includes {found.target}"
        for found in includes(root)
        if found.target.startswith(("pybind11/", "Python.h")) and not found.source.startswith("bindings/")
    ]


def torch_headers(root: Path) -> list[str]:
    return [
        f"{found.source} includes {found.target}" for found in includes(root) if found.target.startswith(_TORCH_HEADERS)
    ]


def unresolved_local_includes(root: Path) -> list[str]:
    """Quoted includes that name no file under csrc/: a header that is gone, or one that wants angle brackets."""
    text = {path.relative_to(root / "csrc").as_posix(): path.read_text() for path in cpp_files(root)}
    return [
        f"{found.source} includes {found.target}"
        for found in includes(root)
        if not found.local and re.search(rf'#\s*include\s*"{re.escape(found.target)}"', text[found.source])
    ]


def calls_that_leave_the_process(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in cpp_files(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _LEAVES_PROCESS.search(line.partition("//")[0])
    ]


Check = Callable[[Path], list[str]]

# Each check with a smallest tree that breaks it: {file under csrc/: its text}.
BROKEN_BY: list[tuple[Check, dict[str, str]]] = [
    (upward_includes, {"vmm.h": '#include "core.h"\n', "core.h": ""}),
    (upward_includes, {"driver/host_driver.cpp": '#include "../vmm.h"\n', "vmm.h": ""}),
    (upward_includes, {"plan.h": '#include "bindings/errors.h"\n', "bindings/errors.h": ""}),
    (include_cycles, {"plan.h": '#include "extent.h"\n', "extent.h": '#include "plan.h"\n'}),
    (cuda_headers_outside_the_cuda_driver, {"transfer.cpp": "#include <cuda.h>\n"}),
    (cuda_headers_outside_the_cuda_driver, {"driver/host_driver.cpp": "#include <cuda_runtime_api.h>\n"}),
    (cuda_headers_outside_the_cuda_driver, {"driver/cuda_fence.cpp": "#include <cuda.h>\n"}),
    (
        cuda_headers_that_reach_other_files,
        {"core.cpp": '#include "driver/cuda_driver.h"\n', "driver/cuda_driver.h": "#include <cuda.h>\n"},
    ),
    (
        cuda_headers_that_reach_other_files,
        {
            "driver/host_driver.cpp": '#include "cuda_fence.h"\n',
            "driver/cuda_fence.h": '#include "cuda_api.h"\n',
            "driver/cuda_api.h": "#include <cuda.h>\n",
        },
    ),
    (python_headers_outside_the_bindings, {"torch_shim.cpp": "#include <Python.h>\n"}),
    (python_headers_outside_the_bindings, {"core.h": "#include <pybind11/pybind11.h>\n"}),
    (torch_headers, {"torch_shim.cpp": "#include <c10/cuda/CUDACachingAllocator.h>\n"}),
    (unresolved_local_includes, {"core.cpp": '#include "gone.h"\n'}),
    (calls_that_leave_the_process, {"core.cpp": "void f() { std::abort(); }\n"}),
    (calls_that_leave_the_process, {"core.cpp": "void f() { exit(1); }\n"}),
]
CHECKS = list(dict.fromkeys(check for check, _ in BROKEN_BY))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_rule_against(check: Check) -> None:
    assert check(REPOSITORY) == []


@pytest.mark.parametrize(("check", "files"), BROKEN_BY, ids=lambda value: getattr(value, "__name__", ""))
def test_a_tree_that_breaks_the_rule_is_found_by(check: Check, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        file = tmp_path / "csrc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert len(check(tmp_path)) == 1


def test_every_folder_of_csrc_has_a_layer() -> None:
    folders = {path.relative_to(REPOSITORY / "csrc").parent.as_posix() for path in cpp_files(REPOSITORY)}
    assert folders <= {".", *_FOLDERS}
