"""Bytes, seconds and rates as people read them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ByteUnit", "common_unit", "format_bytes", "format_rate", "format_seconds"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class ByteUnit:
    """One unit for many figures that are to be compared."""

    name: str
    size_bytes: int

    def __call__(self, count: int) -> str:
        """`count` bytes in this unit, without its name: three digits after the point in GiB, one in smaller units."""
        return f"{count / self.size_bytes:,.{3 if self.size_bytes == GIB else 1}f}"


def common_unit(largest: int) -> ByteUnit:
    """The unit for figures up to `largest` bytes: GiB from 2 GiB on, MiB, or KiB under 2 MiB."""
    if largest >= 2 * GIB:
        return ByteUnit("GiB", GIB)
    return ByteUnit("MiB", MIB) if largest >= 2 * MIB else ByteUnit("KiB", KIB)


def format_bytes(count: int) -> str:
    """Binary units: GiB with two decimals, MiB and KiB with one, exact bytes below."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MiB"
    if abs(count) >= KIB:
        return f"{count / KIB:.1f} KiB"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Seconds with two decimals; milliseconds under a tenth of a second."""
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms"


def format_rate(count: int, seconds: float) -> str:
    """Bytes a second in GiB/s; a dash where nothing moved or no time passed."""
    if count == 0 or seconds <= 0:
        return "-"
    return f"{count / seconds / GIB:.2f} GiB/s"
