"""Every operation with every driver call made to fail, once and for ever, with every kind of error."""

import pytest
from faults.operations import matrix, then_sleep

from cumem.testing import CODES, FOR_EVER


@pytest.mark.parametrize("times", [1, FOR_EVER], ids=["once", "for ever"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", matrix.names)
def test_a_driver_call_that_fails_loses_nothing_in(name, code, times):
    assert matrix.run(name, code=code, times=times) > 0


@pytest.mark.parametrize("name", matrix.names)
def test_a_context_that_breaks_is_told_at_once_and_backups_stay_readable_in(name):
    assert matrix.run(name, code="context_broken") > 0


@pytest.mark.parametrize("times", [1, FOR_EVER], ids=["once", "for ever"])
@pytest.mark.parametrize("name", matrix.names)
def test_after_a_driver_call_failed_a_sleep_gives_all_memory_away_in(name, times):
    assert then_sleep.run(name, times=times) > 0
