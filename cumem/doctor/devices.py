"""The devices: what each can do, what lies near it, and which reach which."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cumem.doctor.finding import Finding, Verdict
from cumem.errors import CumemError

if TYPE_CHECKING:
    from cumem._core import DeviceProperties, Driver

__all__ = ["check_devices", "check_peers"]

GIB = 1 << 30
MIB = 1 << 20


def check_devices(
    driver: Driver, *, bus_id: Callable[[int], str | None] | None = None, root: Path = Path("/")
) -> list[Finding]:
    """Each device's abilities. `bus_id` tells a device's address on the PCI bus, if it has one."""
    findings: list[Finding] = []
    for device in range(driver.device_count()):
        area = f"{driver.name} device {device}"
        try:
            properties = driver.properties(device)
        except CumemError as error:
            cost, remedy = "this device cannot be used", "see nvidia-smi; leave it out of CUDA_VISIBLE_DEVICES"
            findings.append(Finding(area, "properties", Verdict.missing, str(error), cost, remedy))
            continue
        findings += _abilities(area, properties)
        findings += _near(area, bus_id(device) if bus_id is not None else None, root)
    return findings


def _abilities(area: str, properties: DeviceProperties) -> list[Finding]:
    size = f"{properties.total_bytes / GIB:.1f} GiB"
    findings = [Finding(area, "name", Verdict.ok, f"{properties.name}, {size}, {properties.uuid}")]
    if " MIG " in f"{properties.name} ":
        findings.append(
            Finding(
                area,
                "MIG",
                Verdict.limited,
                "a slice of a GPU",
                "a slice reaches no other device, so that tensor parallel work goes through the host",
                "use whole GPUs for work over several",
            )
        )
    if not properties.virtual_memory:
        cost, remedy = "its memory cannot go away and come back", "use another device, or a newer driver"
        return [*findings, Finding(area, "virtual memory", Verdict.missing, "not supported", cost, remedy)]
    granularity = f"in steps of {properties.granularity_bytes / MIB:g} MiB"
    findings.append(Finding(area, "virtual memory", Verdict.ok, granularity))
    findings.append(
        _ability(
            area,
            "export by file descriptor",
            properties.exportable,
            "segments cannot be shared with other processes",
            "use a driver for Linux outside of WSL and virtual GPUs",
        )
    )
    findings.append(
        _ability(
            area,
            "GPUDirect RDMA",
            properties.rdma,
            "network cards cannot read or write managed memory; transfers go through the host",
            "load the module nvidia-peermem, or use a kernel and driver with DMA-BUF",
        )
    )
    if properties.integrated:
        cost = "device and host share their memory: a backup in host memory frees nothing"
        findings.append(Finding(area, "integrated", Verdict.limited, "yes", cost, 'use backend="discard"'))
    return findings


def _ability(area: str, subject: str, able: bool, cost: str, remedy: str) -> Finding:
    if able:
        return Finding(area, subject, Verdict.ok, "yes")
    return Finding(area, subject, Verdict.limited, "no", cost, remedy)


def _near(area: str, bus_id: str | None, root: Path) -> list[Finding]:
    """The host memory that is nearest to a device, and whether this process runs beside it."""
    if bus_id is None:
        return []
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return []
    if node < 0:
        return [Finding(area, "NUMA node", Verdict.ok, "one for all, or not told")]
    near = _cpus_of_node(node, root)
    if not near or near & os.sched_getaffinity(0):
        return [Finding(area, "NUMA node", Verdict.ok, str(node))]
    return [
        Finding(
            area,
            "NUMA node",
            Verdict.limited,
            f"{node}; this process runs on CPUs of other nodes only",
            "backups lie in far memory and copies are slower",
            f"start the process with numactl --cpunodebind={node} --membind={node}",
        )
    ]


def _cpus_of_node(node: int, root: Path) -> set[int]:
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def check_peers(driver: Driver) -> list[Finding]:
    """Which devices reach which: one line a device, of more than one."""
    count = driver.device_count()
    if count < 2:
        return []
    findings: list[Finding] = []
    for source in range(count):
        marks = [
            "-" if source == target else str(int(driver.can_access_peer(source, target))) for target in range(count)
        ]
        blocked = [target for target in range(count) if marks[target] == "0"]
        subject, row = f"{driver.name} device {source} reaches", " ".join(marks)
        if not blocked:
            findings.append(Finding("peers", subject, Verdict.ok, row))
            continue
        cost = f"no direct copies to {blocked}, and no memory shared with them: bytes go through the host"
        remedy = "see nvidia-smi topo -p2p r; in a virtual machine, switch ACS off or pass whole NVLink groups through"
        findings.append(Finding("peers", subject, Verdict.limited, row, cost, remedy))
    return findings
