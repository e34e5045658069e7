"""Segments whose pages have holes: several mappings, of which some may fail and others not."""

import pytest
from faults.operations import holed, holed_then_sleep

from cumem.testing import FOR_EVER

TIMES = pytest.mark.parametrize("times", [1, 2, FOR_EVER], ids=["once", "twice", "for ever"])


@TIMES
@pytest.mark.parametrize("name", holed.names)
def test_a_driver_call_that_fails_loses_nothing_in(name, times):
    assert holed.run(name, times=times) > 0


@pytest.mark.parametrize("name", holed.names)
def test_a_context_that_breaks_is_told_at_once_and_backups_stay_readable_in(name):
    assert holed.run(name, code="context_broken") > 0


@TIMES
@pytest.mark.parametrize("name", holed.names)
def test_after_a_driver_call_failed_a_sleep_gives_all_memory_away_in(name, times):
    assert holed_then_sleep.run(name, times=times) > 0
