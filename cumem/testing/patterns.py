"""Bytes that show where they belong: exact contents for tests, without a random state of their own."""

from __future__ import annotations

import random

__all__ = ["pattern"]

_PERIOD_BYTES = (1 << 20) + 7  # long patterns repeat: at no distance at which bytes are likely to be misplaced


def pattern(length: int, seed: object) -> bytes:
    """`length` bytes that another seed (any object, by its `repr`) does not give. The same in every process."""
    period = random.Random(repr(seed)).randbytes(min(length, _PERIOD_BYTES))
    return (period * (length // _PERIOD_BYTES + 1))[:length]
