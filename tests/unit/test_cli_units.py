"""Figures read as they should."""

from __future__ import annotations

import pytest

from cumem.cli.units import common_unit, format_bytes, format_rate, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 29, "2.50 GiB"),
        (-(3 << 20), "-3.0 MiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_seconds_turn_into_milliseconds_when_short() -> None:
    assert format_seconds(1.234) == "1.23 s"
    assert format_seconds(0.01234) == "12.3 ms"


def test_a_rate_of_nothing_is_a_dash() -> None:
    assert format_rate(1 << 30, 0.5) == "2.00 GiB/s"
    assert format_rate(0, 0.5) == "-"
    assert format_rate(1, 0.0) == "-"


@pytest.mark.parametrize(
    ("largest", "name", "text"),
    [(4 << 30, "GiB", "0.500"), ((2 << 30) - 1, "MiB", "512.0"), (1 << 20, "KiB", "524,288.0")],
)
def test_figures_that_are_compared_share_the_unit_of_the_largest(largest: int, name: str, text: str) -> None:
    unit = common_unit(largest)
    assert unit.name == name
    assert unit(1 << 29) == text
