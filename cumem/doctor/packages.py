"""Packages that cumem uses where they are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from cumem.doctor.finding import Finding, Verdict

__all__ = ["OPTIONAL", "check_packages"]

OPTIONAL = {  # package: (extra that installs it, what is not there without it)
    "matplotlib": ("plot", "no cumem demo --plot"),
    "fastapi": ("serve", "no HTTP endpoints"),
    "uvicorn": ("serve", "no HTTP endpoints"),
    "pydantic": ("serve", "no HTTP endpoints"),
    "prometheus-client": ("serve", "no metrics for Prometheus"),
    "ray": ("ray", "no work with Ray actors"),
}


def check_packages() -> list[Finding]:
    """What is installed of what is optional. Imports none of them."""
    findings: list[Finding] = []
    for package, (extra, cost) in OPTIONAL.items():
        try:
            findings.append(Finding("packages", package, Verdict.ok, version(package)))
        except PackageNotFoundError:
            remedy = f'pip install "cumem[{extra}]"'
            findings.append(Finding("packages", package, Verdict.missing, "not installed", cost, remedy))
    return findings
