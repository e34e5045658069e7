"""Every test of this folder needs a CUDA device that torch can use; where there is none they are skipped."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup() -> None:
    if not _has_device():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")
