"""The host memory that backups need: how much there may be, and how fast it can be pinned."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from cumem import _core
from cumem.doctor.finding import Finding, Verdict

__all__ = ["check_host_memory"]

_AREA = "host memory"
GIB = 1 << 30
_NO_LIMIT = 1 << 60  # a cgroup without one says nearly that, or nothing


def check_host_memory(root: Path = Path("/")) -> list[Finding]:
    """Limits of this process and machine. Backups of sleeping tags with backend cpu must fit into them."""
    return [_available(root), _cgroup(root), _locked(), _huge_pages(root), _cores()]


def _headroom(root: Path, *, system_too: bool) -> tuple[int, str]:
    return _core.host_headroom(system_too, os.fspath(root).rstrip("/"))


def _available(root: Path) -> Finding:
    free, limit = _headroom(root, system_too=True)
    found = f"{free / GIB:.1f} GiB, by {limit}" if limit else "nothing tells a limit"
    if free >= GIB:
        return Finding(_AREA, "room for backups", Verdict.ok, found)
    cost = "a sleep with backend cpu fails with OutOfHostMemory"
    remedy = 'free host memory, raise the limit, or use backend="discard" for what can be made again'
    return Finding(_AREA, "room for backups", Verdict.limited, found, cost, remedy)


def _cgroup(root: Path) -> Finding:
    free, limit = _headroom(root, system_too=False)
    if free >= _NO_LIMIT:
        return Finding(_AREA, "memory cgroups", Verdict.ok, "no limit")
    return Finding(
        _AREA,
        "memory cgroups",
        Verdict.ok,
        f"{free / GIB:.1f} GiB left, by {limit}",
        "backups count against it, pinned or not; past it the kernel kills the process, so cumem refuses before",
        "raise the container's memory limit if its GPUs hold more than that",
    )


def _locked() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(_AREA, "RLIMIT_MEMLOCK", Verdict.ok, "unlimited")
    return Finding(
        _AREA,
        "RLIMIT_MEMLOCK",
        Verdict.limited,
        f"{soft >> 10} KiB (hard limit {'none' if hard == resource.RLIM_INFINITY else f'{hard >> 10} KiB'})",
        "CUDA's pinning is not counted, but network cards register no more than that",
        "ulimit -l unlimited; in a container --ulimit memlock=-1",
    )


def _huge_pages(root: Path) -> Finding:
    subject = "transparent huge pages"
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        text = ""
    mode = re.search(r"\[(\w+)\]", text)
    if mode is not None and mode.group(1) in ("always", "madvise"):
        return Finding(_AREA, subject, Verdict.ok, mode.group(1))
    found = mode.group(1) if mode is not None else "not told by this kernel"
    cost = "the first sleep pins its memory at a fifth of the speed (about 5 instead of 24 GiB/s)"
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(_AREA, subject, Verdict.limited, found, cost, remedy)


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count >= 4:
        return Finding(_AREA, "CPUs for this process", Verdict.ok, str(count))
    cost = "the first sleep pins its memory more slowly: 8 threads do it well"
    return Finding(_AREA, "CPUs for this process", Verdict.limited, str(count), cost, "give the process more CPUs")
