"""Raw memory as torch sees it: storages over blocks, and tensors of any dtype, size and stride over storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cumem.memory import Memory

__all__ = ["block", "build", "from_capsule", "storage_address", "with_bits_of"]


def block(memory: Memory, address: int, offset: int, nbytes: int) -> Tensor:
    """A uint8 tensor over a new block of `nbytes` bytes at `offset` of the segment at `address`.

    The segment is kept alive by the block, the block by the tensor's storage. The storage cannot be resized, and
    `record_stream` on it does nothing: torch did not allocate it.
    """
    return from_capsule(memory.core.capsule(address, offset, nbytes))


def build(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A tensor of any dtype over `storage`: offset and stride in elements. It is no view, and no inference tensor."""
    import torch

    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(size), tuple(stride))


def with_bits_of(original: Tensor, made: Tensor) -> Tensor:
    """`made` read as `original` is read: conjugated or negated if that is a lazy conjugate or negative."""
    import torch

    if original.is_conj():
        made = torch._conj(made)
    return torch._neg_view(made) if original.is_neg() else made


def from_capsule(capsule: object) -> Tensor:
    """A uint8 tensor over a DLPack capsule: no inference tensor, whatever mode is on."""
    import torch
    from torch.utils.dlpack import from_dlpack

    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        return from_dlpack(capsule)


def storage_address(tensor: Tensor) -> int:
    """Where the storage of `tensor` begins; 0 where there is none (meta, fake, empty and opaque tensors)."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() if storage.nbytes() else 0
    except (RuntimeError, NotImplementedError):
        return 0
