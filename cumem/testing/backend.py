"""`check_backend`: the suite that every sleep-mode backend passes."""

from __future__ import annotations

from typing import Any

from ..backends.base import BackendFactory
from .backend_checks import CHECKS, Candidate
from .backend_cycle import CYCLES

__all__ = ["check_backend"]


def check_backend(factory: BackendFactory, **options: Any) -> None:
    """Holds a backend to the contract of `cumem.backends.SleepModeBackend`, on emulated devices, without a GPU.

    Makes many backends, over extents of many shapes: contents come back exactly where `keeps_contents`; `restore` again
    and in parts; `release` of anything; failed copies are told and leave it usable; no mapping of its own; whole
    allocators with the backend registered, with failing transitions. Every call comes from another thread. Needs torch,
    about 250 MiB of memory and a few seconds.

    Args:
        factory: what `cumem.backends.register` takes. It is registered for a while under a name of its own.
        options: given to the factory, as `set_policy(tag, backend, **options)` would.

    Raises:
        AssertionError: the first law that does not hold, in a sentence that begins with the law's name.
    """
    candidate = Candidate(factory, options)
    for check in (*CHECKS, *CYCLES):
        law = check.__name__.replace("_", " ")
        try:
            check(candidate)
        except AssertionError as error:
            raise AssertionError(f"{law}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{law}: {type(error).__name__}: {error}") from error
