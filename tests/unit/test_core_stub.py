"""The parameters in `_core.pyi` are those of the compiled module.

stubtest compares names of classes and methods; the signatures of a pybind11 function stand only in its docstring, which
stubtest does not read.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import cumem._core

STUB = ast.parse((Path(__file__).resolve().parents[2] / "cumem" / "_core.pyi").read_text())


def _functions() -> list[tuple[str, ast.FunctionDef]]:
    """Every function and method of the stub but properties and operators, by dotted name."""
    bodies = [("", STUB.body), *((f"{node.name}.", node.body) for node in STUB.body if isinstance(node, ast.ClassDef))]
    return [
        (prefix + node.name, node)
        for prefix, body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
        if node.name == "__init__" or not node.name.startswith("__")
    ]


def _parameters(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    return [
        *((argument.arg, "positional or keyword", at >= required) for at, argument in enumerate(plain)),
        *(
            (argument.arg, "keyword only", default is not None)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ),
    ]


def _compiled(name: str) -> ast.FunctionDef:
    found: Any = cumem._core
    for part in name.split("."):
        found = getattr(found, part)
    signature = found.__doc__.splitlines()[0]
    function = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


@pytest.mark.parametrize(("name", "stub"), _functions(), ids=[name for name, _ in _functions()])
def test_the_stub_and_the_compiled_module_have_the_same_parameters(name: str, stub: ast.FunctionDef) -> None:
    assert _parameters(stub) == _parameters(_compiled(name))
