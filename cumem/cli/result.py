"""What a demo run found: all figures, and their form as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cumem.cli.machine import Machine
from cumem.cli.timeline import Phase, Sample
from cumem.reports import AdoptReport, MemoryStats, SleepReport, WakeReport

if TYPE_CHECKING:
    from cumem.cli.presets import DemoPlan

__all__ = ["Continuation", "DemoResult", "Snapshot"]

_JSON_FORMAT = 1  # raised when a field changes its meaning or goes away


@dataclass(frozen=True)
class Snapshot:
    """What the device and the host hold at one moment."""

    moment: str
    stats: MemoryStats
    free_bytes: int  # of the device, as its driver says
    total_bytes: int


@dataclass(frozen=True)
class Continuation:
    """The same tokens generated twice: without a sleep, and after one. One list a sequence."""

    prompt: list[list[int]]
    before: list[list[int]]  # generated before the sleep, replayed after it
    reference: list[list[int]]
    after_wake: list[list[int]]
    logits_equal: bool  # the last step's logits, bit by bit

    @property
    def tokens_equal(self) -> bool:
        """Whether the sleep left no trace."""
        return self.reference == self.after_wake


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """A whole run."""

    driver: str
    machine: Machine
    plan: DemoPlan
    dtype: str
    parameters: int
    weight_bytes: int
    cache_bytes: int
    guest_bytes: int  # held by someone else while the model was asleep
    adopt: AdoptReport
    sleep: SleepReport
    wake_weights: WakeReport
    wake_cache: WakeReport
    snapshots: list[Snapshot]
    addresses: int  # tensors whose address was compared
    addresses_equal: bool
    continuation: Continuation
    phases: list[Phase]
    samples: list[Sample]

    @property
    def passed(self) -> bool:
        """Whether every address and every token is what it was."""
        return self.addresses_equal and self.continuation.tokens_equal

    def as_json(self) -> dict[str, Any]:
        """All figures in plain types; bytes and seconds as the field names say."""
        continuation = asdict(self.continuation) | {"tokens_equal": self.continuation.tokens_equal}
        fields = asdict(self) | {"continuation": continuation}
        return {"format": _JSON_FORMAT, "passed": self.passed} | fields
