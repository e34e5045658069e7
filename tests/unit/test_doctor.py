"""`cumem doctor` describes any machine and says whether cumem works on it with the driver that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cumem import _core
from cumem.cli.app import app
from cumem.doctor import Finding, Verdict, diagnose, diagnosis
from cumem.errors import Unsupported


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", *arguments])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose libcuda cannot be used, wherever this runs."""

    def refuse() -> _core.Driver:
        raise Unsupported("libcuda: libcuda.so.1 cannot be opened: no NVIDIA driver is installed")

    monkeypatch.setattr(_core, "cuda_driver", refuse)
    monkeypatch.delenv("CUMEM_DRIVER", raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Only these findings, to be filled by the test."""
    findings: list[Finding] = []
    for check in ("check_driver", "check_host_memory", "check_packages"):
        monkeypatch.setattr(diagnosis, check, lambda: findings[:])
    for check in ("check_torch", "check_nccl", "check_environment"):
        monkeypatch.setattr(diagnosis, check, lambda _: [])
    monkeypatch.setattr(diagnosis, "find_nccl", lambda: None)
    return findings


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_described_and_runs_the_host_driver() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for area in ("driver", "host driver", "host memory", "torch", "NCCL", "settings", "packages"):
        assert area in result.output
    assert "cumem runs here on the host driver" in result.output


@pytest.mark.usefixtures("no_gpu", "quick")
@pytest.mark.parametrize(("driver", "code"), [("auto", 0), ("host", 0), ("cuda", 1)])
def test_the_exit_code_says_whether_the_asked_driver_is_usable(driver: str, code: int) -> None:
    result = run("--driver", driver)
    assert result.exit_code == code, result.output
    if code:
        assert "cannot run with --driver cuda" in result.output
        assert "no NVIDIA driver is installed" in result.output


@pytest.mark.usefixtures("no_gpu", "quick")
def test_a_driver_that_the_environment_asks_for_in_vain_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "cuda")
    assert run().exit_code == 1


@pytest.mark.usefixtures("no_gpu")
def test_what_limits_or_lacks_says_what_it_costs_and_what_to_do() -> None:
    for finding in diagnose().findings:
        if finding.verdict is not Verdict.ok:
            assert finding.cost, finding
            assert finding.remedy, finding


@pytest.mark.usefixtures("no_gpu")
def test_json_holds_what_the_table_holds(quick: list[Finding]) -> None:
    quick.append(Finding("area", "subject", Verdict.limited, "found [bold]", "cost", "remedy"))
    result = run("--json", "--driver", "cuda")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["driver"]["asked"] == "cuda"
    assert data["driver"]["chosen"] is None
    assert "no NVIDIA driver" in data["driver"]["reason"]
    assert data["usable"] is False
    assert data["findings"][0] == {
        "area": "area",
        "subject": "subject",
        "verdict": "limited",
        "found": "found [bold]",
        "cost": "cost",
        "remedy": "remedy",
    }
    table = run("--driver", "cuda").output
    for text in ("area", "subject", "limited", "found [bold]", "cost", "remedy"):
        assert text in table


@pytest.mark.usefixtures("quick")
def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str | None) -> list[Finding]:
        raise OSError("odd machine")

    monkeypatch.setattr(diagnosis, "check_nccl", fail)
    (finding,) = [finding for finding in diagnose("host").findings if finding.area == "NCCL"]
    assert finding.verdict is Verdict.limited
    assert "odd machine" in finding.found


def test_the_command_is_there_without_loading_torch(tmp_path: Path) -> None:
    code = "import sys; from cumem.cli.app import app; assert not {'torch', 'cumem.doctor'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_all_of_it_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
        "sys.modules['torch'] = None\n"  # an import of it fails
        "from cumem.doctor import diagnose\n"
        "d = diagnose('host')\n"
        "print([f.found for f in d.findings if f.area == 'torch'], d.usable)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "['no'] True\n"
