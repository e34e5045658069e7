"""A snapshot costs Python no references, which torch's own does."""

from __future__ import annotations

import sys

import pytest

from cumem import torch_names, torch_snapshot

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch_versions,
    pytest.mark.skipif(not torch_names.has_cuda(), reason="this torch has no CUDA to take a snapshot of"),
]


def test_thousands_of_snapshots_leave_as_many_references_as_before() -> None:
    def references() -> tuple[int, int]:
        return sys.getrefcount(0), sys.getrefcount(False)

    before = references()
    for _ in range(5000):
        torch_snapshot.segments()
    lost = [one - other for one, other in zip(before, references(), strict=True)]
    assert max(lost) < 1000, lost


def test_the_settings_in_force_are_part_of_it() -> None:
    assert {"expandable_segments", "max_split_size"} <= set(torch_snapshot.settings())
