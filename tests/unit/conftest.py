"""Fixtures of this folder."""

import pytest

pytest.register_assert_rewrite("unit.machine", "unit.interpreter", "unit.hook_log")

from cumem import transition  # noqa: E402


@pytest.fixture
def shields(monkeypatch):
    """The shields of the transitions to come: what their callers have noticed can be asked of them."""
    made = []

    class Watched(transition.Shield):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(transition, "Shield", Watched)
    return made
