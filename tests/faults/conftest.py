"""Speed: these tests make thousands of small worlds."""

import gc

import pytest
import torch


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
