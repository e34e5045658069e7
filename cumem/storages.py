"""Distinct storages, who looks at them, and giving one other memory.

A storage's memory is replaced in one of two ways:

* **swap**: `UntypedStorage._swap_data_ptr_` (torch 2.12 and later, both memories on one device type). Whatever looks at
  the storage follows, reached or not.
* **assign**: `tensor.data = ...` on each tensor over the storage. One that was not reached would silently keep the old
  memory, so they are counted first and an unexplained one is refused.

Both keep the tensor objects, their version counters, hooks, `requires_grad` and autograd history. A non-leaf that
requires grad is moved like any other tensor: its contents stay the same, so what its graph saved stays right. Where the
graph saved it through an alias of its own, assign refuses it like any other alias.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from cumem.blocks import build, storage_address, with_bits_of
from cumem.errors import Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cumem.walk import Reached, Walk

__all__ = ["Viewed", "can_swap", "check_aliases", "check_memory", "collect", "replace"]


@dataclass
class Viewed:
    """A storage and the tensors over it that are known."""

    storage: torch.UntypedStorage
    path: str  # of the first tensor
    nbytes: int
    device: torch.device
    reached: list[Reached] = field(default_factory=list)
    bases: list[Tensor] = field(default_factory=list)  # of views: autograd holds them, perhaps nobody else

    @property
    def tensors(self) -> list[Tensor]:
        """Those reached and their bases, each once."""
        known = {id(t): t for t in [*(r.tensor for r in self.reached), *self.bases]}
        return list(known.values())


def can_swap() -> bool:
    """Whether this torch can exchange the memory of two storages in place."""
    import torch

    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def collect(walk: Walk) -> list[Viewed]:
    """The distinct storages that hold bytes, in the order in which they were reached.

    Raises:
        Unsupported: a tensor without a storage that could be moved, by its path; or two storages over the same bytes.
    """
    found: dict[int, Viewed] = {}
    for reached in walk.tensors:
        check_memory(reached)
        tensor, storage = reached.tensor, reached.tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        key = storage._cdata
        if key not in found:
            found[key] = Viewed(storage, reached.path, storage.nbytes(), storage.device)
        viewed = found[key]
        viewed.reached.append(reached)
        base = tensor._base
        if base is not None and base.untyped_storage()._cdata == key:
            viewed.bases.append(base)
    _check_overlaps(list(found.values()))
    return list(found.values())


def check_memory(reached: Reached) -> None:
    """Holds a tensor to be strided bytes in a storage of its own.

    Raises:
        Unsupported: it is not; names its path.
    """
    reason = _why_no_memory(reached.tensor)
    if reason is not None:
        raise Unsupported(f"{reached.path} {reason}; nothing was moved")


def _why_no_memory(tensor: Tensor) -> str | None:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run the lazy module once before"
    if getattr(tensor, "_is_flat_param", False):
        return "is a flat parameter of FSDP, which frees and regrows its storage itself"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is a {tensor.layout} tensor{' (nested)' if tensor.is_nested else ''}: only strided ones can be adopted"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}), which cannot be adopted"
    if tensor._is_zerotensor():
        return "is a lazy zero tensor without memory: clone it first"
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return f"is a {type(tensor).__name__} without a storage"
    if storage.device.type == "meta" or (storage.nbytes() and not storage_address(tensor)):
        return f"is a {type(tensor).__name__} on {storage.device}, without memory behind it"
    return None


def check_aliases(viewed: Viewed) -> None:
    """Holds everything that looks at a storage to be known, so that assigning to what is known leaves nothing behind.

    Raises:
        Unsupported: something else does: a view, a detached copy, a state dict, a tensor that autograd saved, or a
            storage object that the caller holds.
    """
    if _unknown_users(viewed) == 0:
        return
    gc.collect()  # what only dead cycles hold is no alias
    unknown = _unknown_users(viewed)
    if unknown:
        raise Unsupported(
            f"{viewed.path}: its storage is used by {unknown} more object(s) that were not reached from what was given "
            "(a view, a detached copy, a state dict, a tensor saved for backward, a storage): they would keep the old "
            "memory. Drop them, or adopt them in the same call; nothing was moved"
        )


def _unknown_users(viewed: Viewed) -> int:
    import torch

    users: int = torch._C._storage_Use_Count(viewed.storage._cdata)
    handle = 1  # the Python object of the storage is one user, however many hold it
    holders = sys.getrefcount(viewed.storage) - _holders_when_private()
    return users - handle - len(viewed.tensors) + holders


def _holders_when_private() -> int:
    """What `sys.getrefcount(viewed.storage)` says when nobody else holds it: it differs by Python and torch version."""
    import torch

    tensor = torch.empty(1, device="cpu")
    viewed = Viewed(tensor.untyped_storage(), "", 4, tensor.device)
    return sys.getrefcount(viewed.storage)


def replace(viewed: Viewed, new: torch.UntypedStorage, *, swap: bool) -> None:
    """Gives the tensors over a storage the memory of `new`, whose bytes are equal.

    The old memory goes to `new` (swap) or is dropped with the hold on it, and `viewed` is not to be used again. An
    exception in the middle (Ctrl-C) leaves all tensors on the old memory.
    """
    if swap:
        viewed.storage._swap_data_ptr_(new)  # type: ignore[attr-defined]
        return
    tensors = viewed.tensors
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = with_bits_of(t, build(new, t.dtype, int(t.storage_offset()), t.shape, t.stride()))
    except BaseException:
        for t, old in zip(tensors, before, strict=True):
            t.data = old
        del new  # the traceback holds this frame
        raise
    del viewed.storage  # else the plan would keep the old memory


def _check_overlaps(found: list[Viewed]) -> None:
    """Refuses two storages over the same bytes (made from one array, say): they would part ways."""
    ordered = sorted(found, key=lambda v: (str(v.device), v.storage.data_ptr()))
    for first, second in pairwise(ordered):
        if first.device == second.device and second.storage.data_ptr() < first.storage.data_ptr() + first.nbytes:
            raise Unsupported(
                f"{first.path} and {second.path} share memory through different storages; moving would part them: "
                "make one a view of the other; nothing was moved"
            )
