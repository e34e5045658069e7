"""Profiles of Hypothesis, chosen by CUMEM_HYPOTHESIS_PROFILE: `ci` (default, the same examples each time) or `deep`."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None,  # nothing here is timed
    "print_blob": True,  # what reproduces a failure
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile("ci", max_examples=60, stateful_step_count=40, derandomize=True, database=None, **_COMMON)
settings.register_profile(
    "deep", max_examples=3000, stateful_step_count=80, phases=set(Phase) - {Phase.explain}, **_COMMON
)
settings.load_profile(os.environ.get("CUMEM_HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header():
    return f"hypothesis profile of tests/property: {settings.get_current_profile_name()}"


@pytest.fixture(autouse=True, scope="session")
def small_worlds_are_fast():
    """Torch's threads cost more than they bring here, and what was imported need not be collected again and again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
