"""What this machine gives cumem, what it lacks, what that costs and what to do: `cumem doctor`."""

from __future__ import annotations

from cumem.doctor.diagnosis import Diagnosis, diagnose
from cumem.doctor.finding import Finding, Verdict

__all__ = ["Diagnosis", "Finding", "Verdict", "diagnose"]
