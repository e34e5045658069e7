"""The list of torch's private names is complete, true of the torch at hand, and the page made of it is current."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cumem import torch_names
from cumem.torch_names import NAMES, TorchName
from layout.source_tree import REPOSITORY, python_files

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch_versions

SCRIPT = REPOSITORY / "docs" / "torch_names.py"
OURS_ON_TORCH_OBJECTS = {"_is_flat_param", "_local_tensor", "_parameters", "_buffers", "_modules"}
VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def private_names(text: str) -> set[str]:
    """Last parts of a module's private names of torch: attributes after `torch.`, and names looked up as strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name, value=owner) if ast.unparse(owner).split(".")[0] in ("torch", "cuda"):
                is_private = name.startswith("_") or "._" in ast.unparse(owner)
                found |= {name} if is_private and name != "_C" and not name.endswith("__") else set()
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                found |= {name} if name.startswith("_") and "torch" in ast.unparse(owner) else set()
    return found


def test_every_private_name_of_torch_in_the_source_is_in_the_list() -> None:
    listed = {name.path.rpartition(".")[2] for name in NAMES}
    used = {
        f"{module}: {name}"
        for module, path in python_files(REPOSITORY).items()
        for name in private_names(path.read_text())
        if name not in listed | OURS_ON_TORCH_OBJECTS
    }
    assert not used


def test_every_name_in_the_list_is_used() -> None:
    source = "".join(
        path.read_text() for module, path in python_files(REPOSITORY).items() if module != "cumem.torch_names"
    )
    unused = [name.path for name in NAMES if not re.search(rf"\b{name.path.rpartition('.')[2]}\b", source)]
    assert unused == []


@pytest.mark.parametrize(
    "line", ["torch._C._new()", "hasattr(torch.UntypedStorage, '_new')", "cuda._new(1)", "torch.cuda.memory._new()"]
)
def test_a_private_name_is_seen_in(line: str) -> None:
    assert private_names(line) == {"_new"}


def test_the_list_names_each_name_once_and_says_why_and_what_without() -> None:
    assert len({name.path for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert name.path.startswith("torch."), name
        assert name.why, name
        assert name.without, name


def test_this_torch_lacks_only_what_came_later_or_needs_cuda() -> None:
    def excused(name: TorchName) -> bool:
        later = bool(name.since) and tuple(map(int, name.since.split("."))) > VERSION
        return later or (name.cuda_only and not torch_names.has_cuda())

    assert [name.path for name in torch_names.missing() if not excused(name)] == []


def test_this_torch_has_nothing_before_the_release_that_is_said_to_bring_it() -> None:
    early = [
        n.path for n in NAMES if n.since and tuple(map(int, n.since.split("."))) > VERSION and torch_names.is_present(n)
    ]
    assert early == []


def test_a_name_that_is_nowhere_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = TorchName("torch._C._nobody_has_this", why="a test", without="nothing")
    monkeypatch.setattr(torch_names, "NAMES", (*NAMES, gone))
    assert gone in torch_names.missing()


def test_a_name_without_a_parameter_that_cumem_gives_it_is_missing() -> None:
    assert torch_names.is_present(TorchName("torch.nn.parameter.is_lazy", why="", without="", takes=("param",)))
    assert not torch_names.is_present(TorchName("torch.nn.parameter.is_lazy", why="", without="", takes=("other",)))


def test_on_a_build_without_cuda_its_names_are_missing_though_torch_has_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = next(name for name in NAMES if name.path == "torch._C._cuda_releasePool")
    assert hasattr(torch._C, "_cuda_releasePool")
    monkeypatch.setattr(torch_names, "has_cuda", lambda: False)
    assert not torch_names.is_present(release)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("f(arg0: int, arg1: tuple[int, int]) -> None", ["arg0", "arg1"]),
        ("f(self: torch._C.T, arg0: set) -> bool", ["arg0"]),
        ("f() -> str", []),
        ("Prose about a function.", []),
    ],
)
def test_parameters_of_a_function_in_c_are_read_from_its_docstring(head: str, names: list[str]) -> None:
    class InC:
        __doc__ = f"{head}\n"
        __signature__ = "none that Python could read"

        def __call__(self) -> None: ...

    assert torch_names.parameters(InC()) == names


def test_the_page_is_the_one_that_the_list_and_the_data_give() -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--check"], check=False)
    assert run.returncode == 0, "run python docs/torch_names.py"


def test_a_page_that_is_not_current_is_noticed(tmp_path: Path) -> None:
    for file in ("torch_names.py", "torch_versions.json", "torch_names.md"):
        (tmp_path / file).write_bytes((SCRIPT.parent / file).read_bytes())
    with (tmp_path / "torch_names.md").open("a") as page:
        page.write("edited by hand\n")
    run = subprocess.run([sys.executable, tmp_path / "torch_names.py", "--check"], check=False)
    assert run.returncode == 1


def test_what_is_recorded_of_this_release_is_what_it_has() -> None:
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    recorded = script["recorded"]().get(torch.__version__)
    if recorded is None:
        pytest.skip(f"nothing is recorded of torch {torch.__version__}")
    assert script["observe"]() == recorded


def test_every_supported_release_is_recorded_with_its_cuda_build() -> None:
    recorded = runpy.run_path(str(SCRIPT))["recorded"]()
    minors = {version.rpartition(".")[0] for version, release in recorded.items() if release["cuda_build"]}
    assert minors >= {"2.11", "2.12", "2.13", "2.14"}
