"""The Python layers point one way, `import cumem` loads nothing heavy, and pools.py alone touches torch's pools."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from layout.source_tree import REPOSITORY, cycles, imports, python_files, reachable

_VALUES, _CORE, _LEAVES, _PARTS, _ALLOCATOR, _DEFAULT, _NAMES, _USERS = range(8)
_LAYERS = {
    "errors": _VALUES,
    "reports": _VALUES,
    "_core": _CORE,
    "backends": _LEAVES,
    "ranks": _LEAVES,
    "hooks": _LEAVES,
    "allocator": _ALLOCATOR,
    "default": _DEFAULT,
    "cli": _USERS,
    "serving": _USERS,
    "integrations": _USERS,
    "timeshare": _USERS,
    "testing": _USERS,
}  # what has no name here lies between the leaves and the allocator: transition, pools, region, ...
_POOL_NAMES = {"MemPool", "MemPoolContext", "use_mem_pool"}
_POOL_CALLS = ("_cuda_beginAllocate", "_cuda_endAllocate", "_cuda_releasePool", "_cuda_customAllocator")


def _layer(module: str) -> int:
    if module == "cumem":
        return _NAMES
    return _LAYERS.get(module.split(".")[1], _PARTS)


def _is_ours(module: str) -> bool:
    return module == "cumem" or module.startswith("cumem.")


def upward_imports(root: Path) -> list[str]:
    return [
        f"{found.source} imports {found.target}"
        for found in imports(root)
        if _is_ours(found.target) and not found.typing_only and _layer(found.target) > _layer(found.source)
    ]


def import_cycles(root: Path) -> list[str]:
    edges: dict[str, set[str]] = {}
    for found in imports(root):
        if _is_ours(found.target) and not found.typing_only:
            edges.setdefault(found.source, set()).add(found.target)
    return [" -> ".join(cycle) for cycle in cycles(edges)]


def values_that_import_cumem(root: Path) -> list[str]:
    return [
        f"{found.source} imports {found.target}"
        for found in imports(root)
        if found.source in {"cumem.errors", "cumem.reports"} and _is_ours(found.target)
    ]


def code_in_the_list_of_names(root: Path) -> list[str]:
    file = root / "cumem" / "__init__.py"
    statements = ast.parse(file.read_text()).body if file.exists() else []
    return [ast.unparse(node) for node in statements if not _names_something(node)]


def _names_something(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
            return True
    return False


def torch_imported_at_module_level(root: Path) -> list[str]:
    """Only files that some command loads late may: those of the outermost layer."""
    return [
        f"{found.source} imports {found.target}"
        for found in imports(root)
        if found.target.split(".")[0] == "torch"
        and not (found.deferred or found.typing_only)
        and _layer(found.source) != _USERS
    ]


def torch_loaded_with_cumem_or_its_command(root: Path) -> list[str]:
    edges: dict[str, set[str]] = {}
    for found in imports(root):
        if not (found.deferred or found.typing_only):
            edges.setdefault(found.source, set()).add(found.target)
    loaded = reachable(edges, {"cumem", "cumem.cli", "cumem.cli.app"})
    return sorted(module for module in loaded if module.split(".")[0] == "torch")


def torch_pools_outside_pools(root: Path) -> list[str]:
    return [
        f"{module}:{node.lineno} names {name}"
        for module, path in python_files(root).items()
        if module != "cumem.pools"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in [_name_of(node)]
        if name in _POOL_NAMES or name.startswith(_POOL_CALLS)
    ]


def _name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
            return name
    return ""


Check = Callable[[Path], list[str]]

# Each check with a smallest tree that breaks it: {file under cumem/: its text}.
BROKEN_BY: list[tuple[Check, dict[str, str]]] = [
    (upward_imports, {"backends/cpu.py": "from cumem.allocator import Allocator\n"}),
    (upward_imports, {"backends/cpu.py": "from ..allocator import Allocator\n"}),
    (upward_imports, {"hooks.py": "def f():\n    from cumem import transition\n", "transition.py": ""}),
    (upward_imports, {"transition.py": "import cumem\n"}),
    (import_cycles, {"region.py": "import cumem.pools\n", "pools.py": "def f():\n    import cumem.region\n"}),
    (values_that_import_cumem, {"reports.py": "from cumem import errors\n"}),
    (code_in_the_list_of_names, {"__init__.py": "def sleep(): ...\n"}),
    (torch_imported_at_module_level, {"tensors.py": "from torch import Tensor\n"}),
    (torch_loaded_with_cumem_or_its_command, {"__init__.py": "from .a import f\n", "a.py": "import torch.cuda\n"}),
    (torch_pools_outside_pools, {"region.py": "pool = torch.cuda.MemPool()\n"}),
    (torch_pools_outside_pools, {"region.py": "getattr(torch._C, '_cuda_releasePool')(0, 0)\n"}),
]
CHECKS = list(dict.fromkeys(check for check, _ in BROKEN_BY))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_rule_against(check: Check) -> None:
    assert check(REPOSITORY) == []


@pytest.mark.parametrize(("check", "files"), BROKEN_BY, ids=lambda value: getattr(value, "__name__", ""))
def test_a_tree_that_breaks_the_rule_is_found_by(check: Check, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        file = tmp_path / "cumem" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert len(check(tmp_path)) == 1


def test_imports_for_type_checkers_may_point_up(tmp_path: Path) -> None:
    (tmp_path / "cumem").mkdir()
    lines = ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", "    import torch", "    import cumem.allocator"]
    (tmp_path / "cumem" / "hooks.py").write_text("\n".join(lines))
    assert [upward_imports(tmp_path), torch_imported_at_module_level(tmp_path)] == [[], []]
