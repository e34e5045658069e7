"""torch: which one, what its allocator is set to, and which of the names that cumem uses it has."""

from __future__ import annotations

import re
from importlib.util import find_spec

from cumem import torch_names, torch_settings
from cumem.doctor.finding import Finding, Verdict
from cumem.errors import Unsupported

__all__ = ["check_torch"]

_AREA = "torch"
_MINIMUM = (2, 11)
_NO_TORCH = "no tensors: cumem's Python API cannot be used"


def check_torch(cuda_of_driver: tuple[int, int] | None) -> list[Finding]:
    """Imports torch if it is there; makes no context on a device."""
    if find_spec("torch") is None:
        return [Finding(_AREA, "installed", Verdict.missing, "no", _NO_TORCH, 'pip install "cumem[torch]"')]
    try:
        import torch
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return [Finding(_AREA, "installed", Verdict.missing, found, _NO_TORCH, "install torch again")]
    findings = [_version(str(torch.__version__)), _build(torch.version.cuda, cuda_of_driver)]
    if torch_names.has_cuda():
        findings += [_routable(), _settings()]
    return [*findings, *_names()]


def _version(version: str) -> Finding:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= _MINIMUM:
        return Finding(_AREA, "version", Verdict.ok, version)
    remedy = 'pip install "torch>=2.11"'
    return Finding(_AREA, "version", Verdict.limited, version, "no regions, and nothing here was tried with it", remedy)


def _build(cuda: str | None, cuda_of_driver: tuple[int, int] | None) -> Finding:
    subject = "CUDA build"
    if not torch_names.has_cuda() or cuda is None:
        cost = "torch cannot use a GPU; cumem runs on the host driver"
        return Finding(_AREA, subject, Verdict.limited, "no", cost, "install torch's CUDA build on machines with a GPU")
    wanted = tuple(int(part) for part in re.findall(r"\d+", cuda)[:2])
    if cuda_of_driver is not None and wanted[0] > cuda_of_driver[0]:
        known = ".".join(map(str, cuda_of_driver))
        cost = f"the driver knows CUDA up to {known}: torch cannot start on it"
        remedy = f"install a driver for CUDA {wanted[0]}, or torch built for CUDA {cuda_of_driver[0]}"
        return Finding(_AREA, subject, Verdict.missing, cuda, cost, remedy)
    return Finding(_AREA, subject, Verdict.ok, cuda)


def _routable() -> Finding:
    subject = "allocator"
    try:
        torch_settings.check_routable()
    except Unsupported as error:
        reason, _, remedy = str(error).partition(": ")
        cost = "no regions; empty and adopt work"
        return Finding(_AREA, subject, Verdict.limited, reason, cost, remedy)
    return Finding(_AREA, subject, Verdict.ok, "native, caching")


def _settings() -> Finding:
    settings = torch_settings.read_settings()
    where = f" ({settings.source})" if settings.text else ""
    return Finding(_AREA, "allocator settings", Verdict.ok, (settings.text or "none set") + where)


def _names() -> list[Finding]:
    subject = "private names"
    missing = torch_names.missing()
    if not torch_names.has_cuda():
        missing = [name for name in missing if not name.cuda_only]
    wanted = sum(torch_names.has_cuda() or not name.cuda_only for name in torch_names.NAMES)
    findings = [Finding(_AREA, subject, Verdict.ok, f"{wanted - len(missing)} of {wanted} there")]
    for name in missing:
        since = f"; {name.since} has it" if name.since else ""
        found = f"{name.path} is not there{since}"
        remedy = (
            f"use torch {name.since or _at_least()} or newer" if name.since else "use a release of torch that was tried"
        )
        findings.append(
            Finding(_AREA, subject, Verdict.limited, found, f"{name.why}. Without it: {name.without}", remedy)
        )
    return findings


def _at_least() -> str:
    return ".".join(map(str, _MINIMUM))
