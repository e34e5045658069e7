"""What the doctor finds below torch: the driver, devices and their peers, host memory."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from cumem import _core
from cumem.doctor import devices, driver, host_memory
from cumem.doctor.devices import check_devices, check_peers
from cumem.doctor.driver import check_driver
from cumem.doctor.finding import Finding, Verdict
from cumem.doctor.host_memory import check_host_memory
from cumem.doctor.libcuda import LibCuda
from cumem.errors import DriverError, Unsupported


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.subject for finding in findings}) == len(findings)
    return {finding.subject: finding for finding in findings}


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- the driver ---


class FakeLibrary:
    """libcuda as ctypes would show it: functions that fill what they are given."""

    def __init__(self, *, version: int = 13000, init: int = 0) -> None:
        self._version, self._init = version, init

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._version
        return 0 if self._version else 1

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._init

    def cuGetErrorName(self, code: int, out: Any) -> int:  # noqa: N802
        out._obj.value = {100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}.get(code)
        return 0

    def cuDeviceGet(self, out: Any, device: int) -> int:  # noqa: N802
        return 0 if device < 2 else 101

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:  # noqa: N802
        text.value = b"0000:1B:00.0"
        return 0


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(library: FakeLibrary) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda path: library)

    use(FakeLibrary())
    monkeypatch.setattr(_core, "cuda_driver", _core.host_driver)
    return use


def test_a_machine_without_a_driver_says_so_and_stops_there(tmp_path: Path) -> None:
    found = by_subject(check_driver(libcuda="libcuda-that-is-nowhere.so", root=tmp_path))
    assert {subject: finding.verdict for subject, finding in found.items()} == {
        "NVIDIA kernel driver": Verdict.missing,
        "libcuda": Verdict.missing,
    }


def test_a_healthy_driver_is_shown_with_its_versions(tmp_path: Path, libcuda: Any) -> None:
    write(
        tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.01  Tue Nov\n"
    )
    found = by_subject(check_driver(root=tmp_path))
    assert {finding.verdict for finding in found.values()} == {Verdict.ok}
    assert found["NVIDIA kernel driver"].found == "580.159.01"
    assert found["CUDA"].found == "13.0"
    assert found["virtual memory calls"].found == "usable, 2 device(s) visible"


@pytest.mark.parametrize(("version", "verdict"), [(0, "limited"), (11080, "missing"), (12000, "ok")])
def test_a_driver_older_than_cuda_12_is_too_old(tmp_path: Path, libcuda: Any, version: int, verdict: str) -> None:
    libcuda(FakeLibrary(version=version))
    assert by_subject(check_driver(root=tmp_path))["CUDA"].verdict.value == verdict


@pytest.mark.parametrize(
    ("code", "visible", "remedy"),
    [
        (100, "", "CUDA_VISIBLE_DEVICES='' hides them"),
        (100, None, "no GPU is in this machine"),
        (803, None, "differ in version"),
        (999, None, "dmesg"),
    ],
)
def test_a_driver_that_does_not_start_says_why(
    tmp_path: Path, libcuda: Any, monkeypatch: pytest.MonkeyPatch, code: int, visible: str | None, remedy: str
) -> None:
    libcuda(FakeLibrary(init=code))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = by_subject(check_driver(root=tmp_path))["cuInit"]
    assert finding.verdict is Verdict.missing
    assert remedy in finding.remedy


def test_devices_that_cumem_cannot_use_are_missing(
    tmp_path: Path, libcuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> _core.Driver:
        raise Unsupported("none of the 1 visible devices supports virtual memory management")

    monkeypatch.setattr(_core, "cuda_driver", refuse)
    finding = by_subject(check_driver(root=tmp_path))["virtual memory calls"]
    assert (finding.verdict, "none of the 1" in finding.found) == (Verdict.missing, True)


def test_windows_subsystem_for_linux_is_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/version", "Linux version 5.15.146.1-microsoft-standard-WSL2\n")
    found = by_subject(driver.check_driver(libcuda="libcuda-that-is-nowhere.so", root=tmp_path))
    assert found["WSL"].verdict is Verdict.limited


@pytest.mark.usefixtures("libcuda")
def test_a_device_is_found_on_the_bus_as_sysfs_writes_it() -> None:
    assert LibCuda().pci_bus_id(0) == "0000:1b:00.0"
    assert LibCuda().pci_bus_id(7) is None


# --- devices ---


class Properties:
    name, uuid = "NVIDIA H200", "GPU-1"
    total_bytes, granularity_bytes = 141 << 30, 2 << 20
    virtual_memory = exportable = rdma = True
    integrated = False


class Machine:
    """A driver with devices of these properties; pairs listed reach each other."""

    name = "cuda"

    def __init__(self, *changes: dict[str, object], apart: tuple[tuple[int, int], ...] = ()) -> None:
        self._devices = [type("Changed", (Properties,), change)() for change in changes]
        self._apart = apart

    def device_count(self) -> int:
        return len(self._devices)

    def properties(self, device: int) -> Any:
        return self._devices[device]

    def can_access_peer(self, source: int, target: int) -> bool:
        return source != target and (source, target) not in self._apart


def looked_at(*changes: dict[str, object], **options: Any) -> dict[str, Finding]:
    machine: Any = Machine(*changes)
    return by_subject(check_devices(machine, **options))


def test_a_device_that_can_all_is_ok() -> None:
    found = looked_at({})
    assert {finding.verdict for finding in found.values()} == {Verdict.ok}
    assert found["name"].found == "NVIDIA H200, 141.0 GiB, GPU-1"
    assert found["virtual memory"].found == "in steps of 2 MiB"


@pytest.mark.parametrize(
    ("change", "subject", "verdict"),
    [
        ({"virtual_memory": False}, "virtual memory", Verdict.missing),
        ({"exportable": False}, "export by file descriptor", Verdict.limited),
        ({"rdma": False}, "GPUDirect RDMA", Verdict.limited),
        ({"integrated": True}, "integrated", Verdict.limited),
        ({"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, "MIG", Verdict.limited),
    ],
)
def test_what_a_device_cannot_do_is_named(change: dict[str, object], subject: str, verdict: Verdict) -> None:
    found = looked_at(change)
    assert [name for name, finding in found.items() if finding.verdict is not Verdict.ok] == [subject]
    assert found[subject].verdict is verdict


def test_a_device_that_does_not_answer_does_not_hide_the_next() -> None:
    class OneBroken(Machine):
        def properties(self, device: int) -> Any:
            if device == 0:
                raise DriverError("cuDeviceGetName: unknown error", call="cuDeviceGetName", code=999)
            return super().properties(device)

    machine: Any = OneBroken({}, {})
    found = check_devices(machine)
    assert (found[0].verdict, found[0].area) == (Verdict.missing, "cuda device 0")
    assert {finding.area for finding in found[1:]} == {"cuda device 1"}


def test_the_host_driver_answers_the_same_questions() -> None:
    found = check_devices(_core.host_driver(device_count=1))
    assert {"name", "virtual memory", "export by file descriptor"} <= set(by_subject(found))


def test_a_process_on_far_cpus_is_told_where_its_device_is(tmp_path: Path) -> None:
    write(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/numa_node", "1\n")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "4000-4003,4010\n")
    far = looked_at({}, bus_id=lambda device: "0000:1b:00.0", root=tmp_path)["NUMA node"]
    assert far.verdict is Verdict.limited
    assert "numactl --cpunodebind=1" in far.remedy
    here = min(os.sched_getaffinity(0))
    write(tmp_path, "sys/devices/system/node/node1/cpulist", f"{here},4000-4003\n")
    near = looked_at({}, bus_id=lambda device: "0000:1b:00.0", root=tmp_path)["NUMA node"]
    assert (near.verdict, near.found) == (Verdict.ok, "1")


@pytest.mark.parametrize("text", ["-1\n", None])
def test_a_device_whose_node_is_not_told_is_no_finding_against_it(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/numa_node", text)
    found = looked_at({}, bus_id=lambda device: "0000:1b:00.0", root=tmp_path)
    assert {finding.verdict for finding in found.values()} == {Verdict.ok}


def test_peers_are_a_matrix_and_a_pair_apart_is_named() -> None:
    machine: Any = Machine({}, {}, {}, apart=((0, 2), (2, 0)))
    rows = check_peers(machine)
    assert [row.found for row in rows] == ["- 1 0", "1 - 1", "0 1 -"]
    assert [row.verdict for row in rows] == [Verdict.limited, Verdict.ok, Verdict.limited]
    assert "[2]" in rows[0].cost


def test_one_device_has_no_peers() -> None:
    machine: Any = Machine({})
    assert devices.check_peers(machine) == []


# --- host memory ---


def on_host(root: Path) -> dict[str, Finding]:
    return by_subject(check_host_memory(root))


@pytest.mark.parametrize(("kib", "verdict"), [(64 << 20, Verdict.ok), (1 << 10, Verdict.limited)])
def test_room_for_backups_is_what_the_system_has(tmp_path: Path, kib: int, verdict: Verdict) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
    found = on_host(tmp_path)["room for backups"]
    assert (found.verdict, "MemAvailable" in found.found) == (verdict, True)


def test_a_cgroup_above_the_processs_own_is_seen(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", str(8 << 30))
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", str(3 << 30))
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "max\n")
    found = on_host(tmp_path)["memory cgroups"]
    assert found.found.startswith("5.0 GiB left")
    assert found.remedy


def test_without_limits_nothing_is_said_against_them(tmp_path: Path) -> None:
    found = on_host(tmp_path)
    assert found["room for backups"].verdict is Verdict.ok
    assert found["memory cgroups"].found == "no limit"


@pytest.mark.parametrize(("soft", "verdict"), [(resource.RLIM_INFINITY, "ok"), (64 << 10, "limited")])
def test_a_limit_of_locked_memory_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: int, verdict: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    finding = on_host(tmp_path)["RLIMIT_MEMLOCK"]
    assert finding.verdict.value == verdict
    assert ("64 KiB (hard limit none)" in finding.found) == (verdict == "limited")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("always [madvise] never\n", "ok"),
        ("[always] madvise never\n", "ok"),
        ("always madvise [never]\n", "limited"),
        (None, "limited"),
    ],
)
def test_huge_pages_switched_off_slow_the_first_sleep(tmp_path: Path, text: str | None, verdict: str) -> None:
    if text is not None:
        write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert on_host(tmp_path)["transparent huge pages"].verdict.value == verdict


@pytest.mark.parametrize(("count", "verdict"), [(1, "limited"), (16, "ok")])
def test_few_cpus_slow_the_first_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, verdict: str
) -> None:
    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda pid: set(range(count)))
    assert on_host(tmp_path)["CPUs for this process"].verdict.value == verdict
