"""Tools to test what is built on cumem, and what is built into it. Needs no GPU.

`check_backend` holds a sleep-mode backend to its contract. `faulty` and `FaultMatrix` make driver calls fail.
Strategies for Hypothesis are in `cumem.testing.strategies`, which imports hypothesis.
"""

from .backend import check_backend
from .faults import CODES, FOR_EVER, Fault, cause_of, faulty, says
from .matrix import FaultMatrix, Hit, Operation
from .patterns import pattern

__all__ = [
    "CODES",
    "FOR_EVER",
    "Fault",
    "FaultMatrix",
    "Hit",
    "Operation",
    "cause_of",
    "check_backend",
    "faulty",
    "pattern",
    "says",
]
