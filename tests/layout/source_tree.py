"""Reads what files include and import, without building or importing anything.

Every check takes the root of a tree, so that the tests can show it a tree that breaks the rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[2]
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True, order=True)
class Include:
    """One #include of a file under csrc/. `target` is a path under csrc/ if `local`, else the name as written."""

    source: str
    target: str
    local: bool


@dataclass(frozen=True, order=True)
class Import:
    """One import of a module under cumem/. `target` is a dotted module; `deferred`: it runs inside a function."""

    source: str
    target: str
    deferred: bool
    typing_only: bool


def cpp_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cuh", ".cu"})


def includes(root: Path) -> list[Include]:
    csrc = root / "csrc"
    found = []
    for path in cpp_files(root):
        source = path.relative_to(csrc).as_posix()
        for bracket, name in _INCLUDE.findall(path.read_text()):
            local = next((file for file in (path.parent / name, csrc / name) if file.is_file()), None)
            if bracket == '"' and local is not None:
                found.append(Include(source, local.resolve().relative_to(csrc.resolve()).as_posix(), True))
            else:
                found.append(Include(source, name, False))
    return found


def python_files(root: Path) -> dict[str, Path]:
    """Dotted module name -> file, of every module of the package."""
    modules = {}
    for path in sorted((root / "cumem").rglob("*.py")):
        parts = PurePosixPath(path.relative_to(root).as_posix()).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports(root: Path) -> list[Import]:
    modules = python_files(root)
    known = set(modules) | {"cumem._core"}
    return [
        found
        for name, path in modules.items()
        for found in _Imports(name, path.name == "__init__.py", known).of(ast.parse(path.read_text()))
    ]


def cycles(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The cycles that a depth-first walk meets; none if and only if the graph has none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> Iterator[list[str]]:
        if node in path:
            yield [*path[path.index(node) :], node]
        elif node not in done:
            for target in sorted(edges.get(node, ())):
                yield from walk(target, [*path, node])
            done.add(node)

    for start in sorted(edges):
        yield from walk(start, [])


def reachable(edges: Mapping[str, set[str]], starts: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(edges.get(node, ()))
    return seen


class _Imports(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool, known: set[str]) -> None:
        self._module = module
        self._package = module if is_package else module.rpartition(".")[0]
        self._known = known
        self._deferred = False
        self._typing_only = False
        self._found: list[Import] = []

    def of(self, tree: ast.Module) -> list[Import]:
        self.visit(tree)
        return self._found

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self._package.split(".")
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            self._add(submodule if submodule in self._known else base)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._deferred = self._deferred, True
        self.generic_visit(node)
        self._deferred = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        outer = self._typing_only
        self._typing_only = outer or ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for child in node.body:
            self.visit(child)
        self._typing_only = outer
        for child in node.orelse:
            self.visit(child)

    def _add(self, target: str) -> None:
        self._found.append(Import(self._module, target, self._deferred, self._typing_only))
