"""All findings about this machine, and whether cumem can be used on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cumem import _core, config
from cumem.doctor.devices import check_devices, check_peers
from cumem.doctor.driver import check_driver
from cumem.doctor.environment import check_environment
from cumem.doctor.finding import Finding, Verdict
from cumem.doctor.host_memory import check_host_memory
from cumem.doctor.libcuda import LibCuda
from cumem.doctor.nccl import check_nccl, find_nccl
from cumem.doctor.packages import check_packages
from cumem.doctor.torch_build import check_torch
from cumem.errors import CumemError

__all__ = ["Diagnosis", "diagnose"]

GIB = 1 << 30


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `chosen` is the driver that the asked one leads to; None if that cannot be used: `reason`."""

    asked: str
    chosen: str | None
    reason: str
    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether cumem works here with the driver that was asked for."""
        return self.chosen is not None

    def as_json(self) -> dict[str, Any]:
        """The findings as JSON has them. Keys stay what they are; new ones may come."""
        return {
            "cumem": _core.__version__,
            "driver": {"asked": self.asked, "chosen": self.chosen, "reason": self.reason},
            "usable": self.usable,
            "findings": [{**asdict(finding), "verdict": finding.verdict.value} for finding in self.findings],
        }


def diagnose(driver: str = "auto") -> Diagnosis:
    """Looks at everything. Makes no context on a device, changes nothing; imports torch.

    Nothing found is an error: what cannot be looked at is a finding, too.
    """
    chosen, reason = _choose(driver)
    cuda = _library()
    # torch comes before NCCL: the library that it has loaded is the one that it uses.
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("driver", check_driver),
        ("devices", lambda: _devices(chosen, cuda)),
        ("host memory", check_host_memory),
        ("torch", lambda: check_torch(cuda.cuda_version() if cuda is not None else None)),
        ("NCCL", lambda: check_nccl(find_nccl())),
        ("settings", lambda: check_environment(os.environ)),
        ("packages", check_packages),
    )
    findings = [finding for area, check in checks for finding in _guarded(area, check)]
    return Diagnosis(driver, chosen.name if chosen is not None else None, reason, tuple(findings))


def _choose(driver: str) -> tuple[_core.Driver | None, str]:
    try:
        return config.choose_driver(driver), ""
    except CumemError as error:
        return None, str(error)


def _library() -> LibCuda | None:
    try:
        return LibCuda()
    except OSError:
        return None


def _devices(driver: _core.Driver | None, cuda: LibCuda | None) -> list[Finding]:
    if driver is None:
        return []
    if driver.name != "cuda":
        return [_emulated(driver)]
    bus_id = cuda.pci_bus_id if cuda is not None else None
    return [*check_devices(driver, bus_id=bus_id), *check_peers(driver)]


def _emulated(driver: _core.Driver) -> Finding:
    sizes = [f"{driver.properties(device).total_bytes / GIB:.1f} GiB" for device in range(driver.device_count())]
    found = f"{len(sizes)} emulated devices of {' and '.join(dict.fromkeys(sizes))}"
    return Finding(f"{driver.name} driver", "devices", Verdict.ok, found)


def _guarded(area: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """A machine that is odd in one way is still described in the others."""
    try:
        return check()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return [Finding(area, "could not be looked at", Verdict.limited, found, "not known", "report this as a defect")]
