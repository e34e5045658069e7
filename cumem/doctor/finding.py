"""Finding: one thing that was looked at, what was found, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Verdict"]


class Verdict(str, Enum):
    """What a finding means for cumem."""

    ok = "ok"
    limited = "limited"  # it works, with a cost
    missing = "missing"  # something does not work


@dataclass(frozen=True)
class Finding:
    """`cost` and `remedy` are empty where the verdict is ok, unless there is something to know."""

    area: str
    subject: str
    verdict: Verdict
    found: str
    cost: str = ""
    remedy: str = ""
