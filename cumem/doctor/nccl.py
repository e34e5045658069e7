"""NCCL: which library torch would load, and whether communicators can give their memory away."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from cumem.doctor.finding import Finding, Verdict

__all__ = ["check_nccl", "find_nccl"]

_AREA = "NCCL"
_SONAME = "libnccl.so.2"
_SUSPENDING = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")  # 2.29.7
_COST = "communicators keep their memory while ranks sleep: several hundred MiB a device"


def find_nccl(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The library that torch uses or would load: what is loaded already, its wheel's, or the system's."""
    for candidate in (*_loaded(maps), *_of_wheels(), _SONAME):
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return candidate
    return None


def _loaded(maps: Path) -> Iterator[str]:
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libnccl.so"):
            yield path


def _of_wheels() -> Iterator[str]:
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield os.fspath(Path(folder) / "lib" / _SONAME)


def check_nccl(path: str | None) -> list[Finding]:
    """Asks the library at `path` without making it touch a device."""
    if path is None:
        cost = "no collectives between GPUs by torch's nccl backend; one process needs none"
        return [Finding(_AREA, "library", Verdict.missing, f"no {_SONAME}", cost, "install torch's CUDA build")]
    library = ctypes.CDLL(path)
    findings = [Finding(_AREA, "library", Verdict.ok, path), _version(library), _suspends(library)]
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        cost = f"{_COST}; suspending succeeds and frees nothing"
        findings.append(Finding(_AREA, "NCCL_CUMEM_ENABLE", Verdict.limited, "0", cost, "unset NCCL_CUMEM_ENABLE"))
    return findings


def _version(library: ctypes.CDLL) -> Finding:
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return Finding(_AREA, "version", Verdict.limited, "not told", "not known", "install NCCL again")
    numbers = code.value // 10000, code.value % 10000 // 100, code.value % 100
    return Finding(_AREA, "version", Verdict.ok, ".".join(map(str, numbers)))


def _suspends(library: ctypes.CDLL) -> Finding:
    absent = [name for name in _SUSPENDING if not hasattr(library, name)]
    if not absent:
        return Finding(_AREA, "suspend and resume", Verdict.ok, "yes")
    remedy = "use NCCL 2.29.7 or newer (2.30.3 for several communicators at once)"
    return Finding(_AREA, "suspend and resume", Verdict.limited, f"no {', '.join(absent)}", _COST, remedy)
