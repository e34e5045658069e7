"""What the doctor finds above the driver: torch, NCCL, settings, packages."""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cumem import config, torch_names, torch_settings
from cumem.doctor import environment, nccl, packages, torch_build
from cumem.doctor.environment import OWN, check_environment
from cumem.doctor.finding import Finding, Verdict
from cumem.doctor.nccl import check_nccl, find_nccl
from cumem.doctor.packages import OPTIONAL, check_packages
from cumem.doctor.torch_build import check_torch
from cumem.errors import InvalidArgument, Unsupported
from cumem.torch_names import NAMES
from layout.source_tree import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.verdict.value for finding in findings}


# --- torch ---


@pytest.fixture
def torch_13(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch 2.14 with CUDA 13.0 in which nothing is wrong."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch_names, "has_cuda", lambda: True)
    monkeypatch.setattr(torch_names, "missing", list)
    monkeypatch.setattr(torch_settings, "check_routable", lambda: None)
    monkeypatch.setattr(torch_settings, "read_settings", torch_settings.AllocatorSettings)
    return monkeypatch


def test_a_torch_with_all_that_is_needed_is_ok(torch_13: pytest.MonkeyPatch) -> None:
    found = check_torch((13, 0))
    assert set(verdicts(found).values()) == {"ok"}
    assert found[-1].found == f"{len(NAMES)} of {len(NAMES)} there"


def test_no_torch_at_all_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "find_spec", lambda name: None)
    (finding,) = check_torch(None)
    assert (finding.verdict, finding.found) == (Verdict.missing, "no")


def test_a_torch_that_cannot_be_imported_is_missing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def fail(name: str, *arguments: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return original(name, *arguments)

    monkeypatch.setattr(torch_build, "find_spec", lambda name: object())
    monkeypatch.setattr(builtins, "__import__", fail)
    (finding,) = check_torch(None)
    assert finding.verdict is Verdict.missing
    assert "libcudart.so.13" in finding.found


@pytest.mark.parametrize(("version", "verdict"), [("2.9.1", "limited"), ("2.11.0", "ok"), ("3.0.0a0+git1", "ok")])
def test_a_torch_before_the_oldest_supported_is_limited(
    torch_13: pytest.MonkeyPatch, version: str, verdict: str
) -> None:
    import torch

    torch_13.setattr(torch, "__version__", version)
    assert verdicts(check_torch((13, 0)))["version"] == verdict


@pytest.mark.parametrize(("driver", "verdict"), [((12, 8), "missing"), ((13, 0), "ok"), ((13, 2), "ok"), (None, "ok")])
def test_a_torch_for_a_newer_cuda_than_the_drivers_cannot_start(
    torch_13: pytest.MonkeyPatch, driver: tuple[int, int] | None, verdict: str
) -> None:
    assert verdicts(check_torch(driver))["CUDA build"] == verdict


def test_a_torch_without_cuda_is_limited_once_and_not_for_each_name(torch_13: pytest.MonkeyPatch) -> None:
    torch_13.setattr(torch_names, "has_cuda", lambda: False)
    torch_13.setattr(torch_names, "missing", lambda: [name for name in NAMES if name.cuda_only])
    found = check_torch(None)
    assert [finding.subject for finding in found if finding.verdict is not Verdict.ok] == ["CUDA build"]


def test_an_allocator_that_regions_cannot_use_says_what_to_change(torch_13: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Unsupported("torch's allocator is 'pluggable', without pools: do not replace it")

    torch_13.setattr(torch_settings, "check_routable", refuse)
    (finding,) = [finding for finding in check_torch((13, 0)) if finding.subject == "allocator"]
    assert (finding.verdict, finding.remedy) == (Verdict.limited, "do not replace it")


def test_each_missing_name_says_what_is_lost_and_which_release_has_it(torch_13: pytest.MonkeyPatch) -> None:
    swap = next(name for name in NAMES if name.path.endswith("_swap_data_ptr_"))
    torch_13.setattr(torch_names, "missing", lambda: [swap])
    found = check_torch((13, 0))[-2:]
    assert found[0].found == f"{len(NAMES) - 1} of {len(NAMES)} there"
    assert swap.path in found[1].found
    assert swap.without in found[1].cost
    assert "2.12" in found[1].remedy


# --- NCCL ---


class FakeNccl:
    """A libnccl of that version with these functions."""

    def __init__(self, code: int, *names: str) -> None:
        self._code = code
        for name in names:
            setattr(self, name, lambda: 0)

    def ncclGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._code
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)

    def use(code: int, *names: str) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda path: FakeNccl(code, *names))

    return use


def test_an_nccl_that_can_suspend_is_ok(library: Any) -> None:
    library(23007, "ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
    found = check_nccl("libnccl.so.2")
    assert set(verdicts(found).values()) == {"ok"}
    assert [finding.found for finding in found] == ["libnccl.so.2", "2.30.7", "yes"]


def test_an_older_nccl_is_limited_and_names_what_it_lacks(library: Any) -> None:
    library(22809, "ncclCommResume")
    found = check_nccl("libnccl.so.2")
    assert verdicts(found)["suspend and resume"] == "limited"
    assert found[-1].found == "no ncclCommSuspend, ncclCommMemStats"
    assert found[1].found == "2.28.9"


def test_nccl_without_its_own_virtual_memory_frees_nothing(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library(23007, "ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert verdicts(check_nccl("libnccl.so.2"))["NCCL_CUMEM_ENABLE"] == "limited"


def test_no_nccl_is_missing() -> None:
    assert verdicts(check_nccl(None)) == {"library": "missing"}


def test_the_library_that_is_loaded_comes_before_that_of_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "nvidia" / "nccl"
    spec = type("Spec", (), {"submodule_search_locations": [str(wheel)]})()
    monkeypatch.setattr(nccl, "find_spec", lambda name: spec)
    opened: list[str] = []

    def only(*there: str) -> None:
        def open_library(path: str) -> object:
            opened.append(path)
            if path not in there:
                raise OSError(path)
            return object()

        monkeypatch.setattr(ctypes, "CDLL", open_library)

    maps = tmp_path / "maps"
    maps.write_text("7f-80 r-xp 0 00:00 1     /loaded/libnccl.so.2\n7f-80 rw-p 0 00:00 0 \n")
    in_wheel = str(wheel / "lib" / "libnccl.so.2")
    only("/loaded/libnccl.so.2", in_wheel, "libnccl.so.2")
    assert find_nccl(maps) == "/loaded/libnccl.so.2"
    only(in_wheel, "libnccl.so.2")
    assert find_nccl(tmp_path / "nothing") == in_wheel
    only("libnccl.so.2")
    assert find_nccl(tmp_path / "nothing") == "libnccl.so.2"
    only()
    assert find_nccl(maps) is None
    assert opened[-3:] == ["/loaded/libnccl.so.2", in_wheel, "libnccl.so.2"]


# --- settings ---


def test_an_environment_that_changes_nothing_is_one_line() -> None:
    assert verdicts(check_environment({"HOME": "/root", "CUDA_VISIBLE_DEVICES": "0,1"})) == {"environment": "ok"}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF: expandable_segments", "expandable_segments:True", "ok"),
        ("PYTORCH_ALLOC_CONF: backend", "backend:cudaMallocAsync", "limited"),
        ("PYTORCH_HIP_ALLOC_CONF: max_split_size_mb", "max_split_size_mb:128", "limited"),
        ("PYTORCH_ALLOC_CONF: roundup_power2_divisions", "roundup_power2_divisions:[256:2]", "limited"),
        ("PYTORCH_ALLOC_CONF: garbage_collection_threshold", "garbage_collection_threshold:0.8", "limited"),
        ("PYTORCH_ALLOC_CONF: per_process_memory_fraction", "per_process_memory_fraction:0.5", "limited"),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:much", "missing"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "limited"),
        ("CUDA_LAUNCH_BLOCKING", "1", "limited"),
        ("CUDA_VISIBLE_DEVICES", "", "missing"),
        ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "true", "limited"),
        ("CUMEM_DRVIER", "host", "limited"),
        ("CUMEM_DRIVER", "host", "ok"),
        ("CUMEM_DRIVER", "gpu", "missing"),
        ("CUMEM_HOST_DEVICES", "1.5", "missing"),
        ("CUMEM_DEVICE_TIMEOUT", "soon", "missing"),
    ],
)
def test_a_setting_that_matters_is_found(name: str, value: str, verdict: str) -> None:
    assert verdicts(check_environment({name.partition(":")[0]: value})) == {name: verdict}


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_a_setting_that_is_off_is_not_mentioned(name: str) -> None:
    assert verdicts(check_environment({name: "0"})) == {"environment": "ok"}


def test_configurations_that_differ_say_which_one_counts() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = check_environment(both)
    assert verdicts(found) == {
        "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF": "limited",
        "PYTORCH_CUDA_ALLOC_CONF: expandable_segments": "ok",
    }
    assert "PYTORCH_CUDA_ALLOC_CONF only" in found[0].cost


def test_the_doctor_knows_the_variables_that_cumem_reads() -> None:
    documented = {line.split()[0] for line in (config.__doc__ or "").splitlines() if line.startswith("CUMEM_")}
    assert set(OWN) == documented


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in OWN for value in ("host", "2", "0", "-1", "1.5", "nan", "x")],
)
def test_the_doctor_takes_the_values_that_cumem_takes(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    def taken() -> Iterator[bool]:
        monkeypatch.setenv(name, value)
        for read in (
            config.device_timeout_s,
            lambda: config.choose_driver("host"),
            lambda: config.choose_driver("auto"),
        ):
            try:
                read()
            except InvalidArgument:
                yield False
            except Unsupported:
                yield True

    refused = not all(taken())
    assert (verdicts(environment.check_environment({name: value}))[name] == "missing") == refused


# --- packages ---


def test_packages_are_looked_up_and_what_is_not_there_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "ray":
            raise PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr(packages, "version", version)
    found = {finding.subject: finding for finding in check_packages()}
    assert set(found) == set(OPTIONAL)
    assert found.pop("ray").remedy == 'pip install "cumem[ray]"'
    assert {(finding.verdict, finding.found) for finding in found.values()} == {(Verdict.ok, "1.2.3")}


def test_the_optional_packages_are_those_of_the_extras() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, (extra, _) in OPTIONAL.items():
        assert any(wanted.startswith(f"{package}>") for wanted in extras[extra]), package
    wanted = {line.partition(">")[0] for extra in ("serve", "plot", "ray") for line in extras[extra]}
    assert wanted == set(OPTIONAL)
