"""The NVIDIA driver: whether there is one, its version, and whether cumem can use it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cumem import _core
from cumem.doctor.finding import Finding, Verdict
from cumem.doctor.libcuda import LibCuda
from cumem.errors import CumemError

__all__ = ["check_driver"]

_AREA = "driver"
_NO_GPU = "no GPU memory can be managed; the host driver emulates devices for tests and demos"
_MINIMUM_CUDA = (12, 0)  # csrc/driver/cuda_api.cpp looks its functions up as of this version


def check_driver(*, libcuda: str = "libcuda.so.1", root: Path = Path("/")) -> list[Finding]:
    """What a GPU needs below cumem, from the kernel up."""
    findings = [_kernel_module(root)]
    if _is_wsl(root):
        findings.append(
            Finding(
                _AREA,
                "WSL",
                Verdict.limited,
                "this is Windows Subsystem for Linux",
                "Windows limits pinned memory, and memory may not be exportable to other processes",
                "keep backups small (host_budget=), or use Linux itself",
            )
        )
    try:
        library = LibCuda(libcuda)
    except OSError:
        found = "libcuda.so.1 cannot be opened"
        remedy = "install NVIDIA's driver; in a container, start it with its GPUs (--gpus all)"
        return [*findings, Finding(_AREA, "libcuda", Verdict.missing, found, _NO_GPU, remedy)]
    return [*findings, _cuda_version(library), _initialised(library), _usable()]


def _kernel_module(root: Path) -> Finding:
    subject = "NVIDIA kernel driver"
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        remedy = "install NVIDIA's driver and load its module (nvidia-smi must work)"
        return Finding(_AREA, subject, Verdict.missing, "not loaded", _NO_GPU, remedy)
    version = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return Finding(_AREA, subject, Verdict.ok, version.group() if version else "loaded")


def _is_wsl(root: Path) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text().lower()
    except OSError:
        return False


def _cuda_version(library: LibCuda) -> Finding:
    version = library.cuda_version()
    if version is None:
        return Finding(
            _AREA, "CUDA", Verdict.limited, "the driver does not tell its version", "not known", "reinstall it"
        )
    found = f"{version[0]}.{version[1]}"
    if version < _MINIMUM_CUDA:
        return Finding(
            _AREA, "CUDA", Verdict.missing, found, _NO_GPU, "install a driver for CUDA 12 or newer (525 or newer)"
        )
    return Finding(_AREA, "CUDA", Verdict.ok, found)


def _initialised(library: LibCuda) -> Finding:
    error = library.initialise()
    if error is None:
        return Finding(_AREA, "cuInit", Verdict.ok, "succeeds")
    return Finding(_AREA, "cuInit", Verdict.missing, error, _NO_GPU, _remedy_of(error))


def _remedy_of(error: str) -> str:
    if error == "CUDA_ERROR_NO_DEVICE":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"CUDA_VISIBLE_DEVICES={visible!r} hides them" if visible is not None else "no GPU is in this machine"
        return f"{hidden}, or the container was started without its GPUs"
    if error == "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH":
        return "libcuda and the kernel module differ in version: reboot; in a container, use the machine's own libcuda"
    if error == "CUDA_ERROR_SYSTEM_NOT_READY":
        return "start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)"
    return "see dmesg and nvidia-smi"


def _usable() -> Finding:
    try:
        driver = _core.cuda_driver()
    except CumemError as error:
        return Finding(_AREA, "virtual memory calls", Verdict.missing, str(error), _NO_GPU, "see the lines above")
    return Finding(_AREA, "virtual memory calls", Verdict.ok, f"usable, {driver.device_count()} device(s) visible")
