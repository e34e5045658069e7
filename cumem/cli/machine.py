"""What figures were measured on: the machine, the device and the versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cumem import __version__

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "describe_machine"]


@dataclass(frozen=True)
class Machine:
    """The hardware and software under a measurement."""

    system: str
    architecture: str
    processor: str
    processor_cores: int
    memory_bytes: int
    device: str
    python_version: str
    torch_version: str
    cumem_version: str


def describe_machine(device: torch.device) -> Machine:
    """Describes this machine with `device` as the device measured."""
    import torch

    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor(),
        processor_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory",
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        cumem_version=__version__,
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()  # aarch64 names no model there
