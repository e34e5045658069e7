"""`SleepModeBackend`: where a tag's bytes go while its memory is away.

A backend moves contents; it never maps or unmaps. Around it, a transition does:

    sleep:  reserve -> save -> (vote, unmap)          an abort before the unmap: release
    wake:   (map) -> restore -> (commit) -> release   a failure before the commit: no release; restore is called again

Third parties write one against `BackendContext`, register it (`cumem.backends.register`, or an entry point in the group
`cumem.backends`), and prove it with `cumem.testing.check_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .._core import Extent

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .._core import Core

__all__ = ["BackendContext", "BackendFactory", "Extent", "Restored", "Saved", "SleepModeBackend"]


@dataclass(frozen=True)
class Saved:
    """What a `save` did, in bytes."""

    copied_bytes: int = 0  # crossed the link
    clean_bytes: int = 0  # were not copied because an older backup of them was proved to be still true


@dataclass(frozen=True)
class Restored:
    """What a `restore` did, in bytes."""

    copied_bytes: int = 0
    zeroed_bytes: int = 0  # filled with a constant
    defined: bool = True  # whether the contents are what the user may read


@runtime_checkable
class SleepModeBackend(Protocol):
    """One tag's store. All methods get whole lists, run on a thread of the transition, and may block.

    An extent is named by (segment, offset, length); the same extent always means the same bytes of the same segment.
    Extents of one segment never overlap. Errors are raised as they are; a method that raised has changed nothing that
    `release` of the same extents does not undo.
    """

    @property
    def name(self) -> str:
        """The name it is registered under."""

    @property
    def keeps_contents(self) -> bool:
        """Whether `restore` brings back what `save` saw."""

    @property
    def survives_process(self) -> bool:
        """Whether saved contents outlive this process."""

    @property
    def preserves_graphs(self) -> bool:
        """Whether CUDA graphs over this memory replay right after a cycle (needs whole segments' contents)."""

    def reserve(self, extents: Sequence[Extent]) -> None:
        """Takes all that `save` could fail to get. Raises before anything changes: `OutOfHostMemory`, or its own
        error."""

    def save(self, extents: Sequence[Extent]) -> Saved:
        """Stores the contents of reserved extents; they are mapped and idle. Complete on return."""

    def restore(self, extents: Sequence[Extent]) -> Restored:
        """Brings saved extents back; they are mapped. Complete on return. May be called again after a failure."""

    def release(self, extents: Sequence[Extent]) -> None:
        """Forgets reserved or saved extents; unknown ones are ignored. Never raises."""


class BackendContext:
    """What a backend may do to device memory: copies and fills of extents, in one batch, complete on return."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def copy_to_host(self, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None:
        """Copies each extent into its writable, contiguous buffer.

        Raises:
            InvalidArgument: a buffer is shorter than its extent.
            DriverError, DeviceBusy: the buffers' contents are undefined then.
        """
        self.core.copy_to_host(extents, buffers)

    def copy_to_device(self, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None:
        """Copies each buffer into its extent; errors as `copy_to_host`, the extents' contents undefined then."""
        self.core.copy_to_device(extents, buffers)

    def fill(self, extents: Sequence[Extent], byte: int) -> None:
        """Sets every byte of the extents."""
        self.core.fill(extents, byte)


# Makes a tag's backend from its policy's options. Unknown or wrong options: `InvalidArgument` (a TypeError for an
# unknown keyword is turned into one).
BackendFactory = Callable[..., SleepModeBackend]
