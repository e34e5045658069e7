"""Settings in environment variables that change what cumem does, or what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cumem import _core, config, torch_settings
from cumem.doctor.finding import Finding, Verdict
from cumem.errors import InvalidArgument
from cumem.torch_settings import AllocatorSettings

__all__ = ["OWN", "check_environment"]

_AREA = "settings"


@dataclass(frozen=True)
class _Setting:
    """A setting of torch's allocator that matters here, when it does, and why."""

    name: str
    shown: Callable[[AllocatorSettings], object]  # false where it is as by default
    cost: str
    remedy: str
    verdict: Verdict = Verdict.limited


_ALLOCATOR: tuple[_Setting, ...] = (
    _Setting(
        "backend",
        lambda s: s.backend if s.backend != "native" else "",
        "no regions: they need torch's own allocator; empty and adopt work",
        "take backend:... out",
    ),
    _Setting(
        "expandable_segments",
        lambda s: s.expandable_segments,
        "none: regions and cumem's own segments do without; native memory is as expandable as before",
        "leave it as it is",
        Verdict.ok,
    ),
    _Setting(
        "max_split_size_mb",
        lambda s: s.max_split_size_bytes and s.max_split_size_bytes >> 20,
        "larger blocks are never split: a region's segments hold more bytes that nobody uses",
        "take it out unless native memory needs it",
    ),
    _Setting(
        "roundup_power2_divisions",
        lambda s: s.roundup_power2_divisions,
        "sizes are rounded up: regions map more than tensors need. Backups hold what was asked for only",
        "take it out unless native memory needs it",
    ),
    _Setting(
        "garbage_collection_threshold",
        lambda s: s.garbage_collection_threshold,
        "with a memory fraction, sleeping memory counts as used: torch frees cached blocks at each miss",
        "take it out, or call cumem.default_allocator().follow_memory_fraction()",
    ),
    _Setting(
        "per_process_memory_fraction",
        lambda s: s.per_process_memory_fraction if s.per_process_memory_fraction < 1 else 0,
        "sleeping memory counts as used: allocations fail on an empty device",
        "call cumem.default_allocator().follow_memory_fraction(), or take it out",
    ),
)


@dataclass(frozen=True)
class _Variable:
    """A variable that matters when it has certain values."""

    name: str
    matters: Callable[[str], bool]
    verdict: Verdict
    cost: str
    remedy: str


_VARIABLES: tuple[_Variable, ...] = (
    _Variable(
        "CUDA_VISIBLE_DEVICES",
        lambda value: value.strip() in ("", "-1"),
        Verdict.missing,
        "no GPU is visible",
        "unset it, or list devices: CUDA_VISIBLE_DEVICES=0,1",
    ),
    _Variable(
        "CUDA_LAUNCH_BLOCKING",
        lambda value: value == "1",
        Verdict.limited,
        "every kernel and copy is waited for: slow, and copies do not overlap",
        "unset it outside of debugging",
    ),
    _Variable(
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        lambda value: value.lower() in ("1", "true", "yes", "on", "y"),
        Verdict.limited,
        "NCCL registers torch's segments, those of regions too: such pages must not go away",
        "unset it, or deregister in a before_sleep hook",
    ),
)


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """What is set there and matters; one line that says so if nothing is."""
    findings = [*_configuration(environment), *_uncached(environment), *_known(environment), *_own(environment)]
    return findings or [Finding(_AREA, "environment", Verdict.ok, "nothing set that changes anything")]


def _configuration(environment: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    given = [name for name in torch_settings.CONFIGURATION_VARIABLES if name in environment]
    if len(set(map(environment.__getitem__, given))) > 1:
        cost = f"torch reads {given[0]} only; the others have no effect"
        findings.append(Finding(_AREA, " and ".join(given), Verdict.limited, "differ", cost, f"set only {given[0]}"))
    variable, text = torch_settings.configuration_from(environment)
    if variable is None:
        return findings
    try:
        settings = torch_settings.parse(text, source=variable)
    except ValueError as error:
        return [*findings, Finding(_AREA, variable, Verdict.missing, text, f"torch refuses it: {error}", "correct it")]
    for setting in _ALLOCATOR:
        shown = setting.shown(settings)
        if shown:
            subject = f"{variable}: {setting.name}"
            findings.append(Finding(_AREA, subject, setting.verdict, str(shown), setting.cost, setting.remedy))
    return findings


def _uncached(environment: Mapping[str, str]) -> list[Finding]:
    if not torch_settings.is_uncached(environment):
        return []
    names = " or ".join(name for name in torch_settings.UNCACHED_VARIABLES if environment.get(name) == "1")
    cost = "no regions: allocations go past every pool; empty and adopt work"
    return [Finding(_AREA, names, Verdict.limited, "1", cost, "unset it")]


def _known(environment: Mapping[str, str]) -> list[Finding]:
    return [
        Finding(_AREA, known.name, known.verdict, repr(value), known.cost, known.remedy)
        for known in _VARIABLES
        if (value := environment.get(known.name)) is not None and known.matters(value)
    ]


def _own(environment: Mapping[str, str]) -> list[Finding]:
    """cumem's own variables, and those that only look like them."""
    findings: list[Finding] = []
    for name in sorted(name for name in environment if name.startswith("CUMEM_")):
        shown, check = repr(environment[name]), OWN.get(name)
        if check is None:
            cost, remedy = "no effect: cumem has no such setting", f"one of {', '.join(OWN)}"
            findings.append(Finding(_AREA, name, Verdict.limited, shown, cost, remedy))
            continue
        try:
            check(environment[name])
        except InvalidArgument as error:
            findings.append(Finding(_AREA, name, Verdict.missing, shown, str(error), "correct it or unset it"))
        else:
            findings.append(Finding(_AREA, name, Verdict.ok, shown))
    return findings


def _check_driver_name(value: str) -> None:
    if value not in config.DRIVERS:
        raise InvalidArgument(f"{value!r} is none of {list(config.DRIVERS)}")


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise InvalidArgument(f"{value!r} is not a positive number")
    return number


def _whole(value: str) -> int:
    number = _positive(value)
    if not number.is_integer():
        raise InvalidArgument(f"{value!r} is not a whole number")
    return int(number)


OWN: dict[str, Callable[[str], object]] = {  # those that `cumem.config` reads, and what each takes
    "CUMEM_DRIVER": _check_driver_name,
    "CUMEM_DEVICE_TIMEOUT": _positive,
    "CUMEM_HOST_DEVICES": lambda value: _core.host_driver(device_count=_whole(value)),
    "CUMEM_HOST_DEVICE_BYTES": lambda value: _core.host_driver(device_bytes=_whole(value)),
}
