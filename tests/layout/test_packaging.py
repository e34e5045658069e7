"""The lists of packages in pyproject.toml agree with each other and with what `import cumem` may need."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from layout.source_tree import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_builds_without_isolation_get_every_build_requirement(pyproject: dict[str, Any]) -> None:
    assert set(pyproject["build-system"]["requires"]) <= set(pyproject["dependency-groups"]["build"])


def test_torch_is_no_hard_dependency(pyproject: dict[str, Any]) -> None:
    assert not any(requirement.startswith("torch") for requirement in pyproject["project"]["dependencies"])


def test_every_requirement_of_a_published_package_says_from_which_version(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    assert [entry for entries in lists for entry in entries if ">=" not in entry and "==" not in entry] == []
