"""Torch tensors over segments, and what a tensor's memory is now.

A tensor's memory is a block: it lives until the last tensor over it dies, and keeps its segment alive. The memory of
other tensors, which cumem does not manage, is called native here as elsewhere; it is resident for ever.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cumem.blocks import block, build, from_capsule, storage_address, with_bits_of
from cumem.errors import AsleepError, InvalidArgument, StateError, Unsupported
from cumem.walk import inner_tensors, walk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cumem._core import SegmentInfo
    from cumem.memory import Memory

    Device = torch.device | str | int | None

__all__ = [
    "assert_resident",
    "block",
    "build",
    "empty",
    "full",
    "host_view",
    "is_resident",
    "size_of",
    "tag_of",
    "zeros",
]

MAX_BYTES = 2**63 - 1  # torch counts storage bytes in a signed 64-bit integer


def empty(
    memory: Memory,
    size: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    tag: str,
    device: Device = None,
    shareable: bool = False,
) -> Tensor:
    """A tensor with undefined contents in a segment of its own.

    `size`: integers, or one sequence of them. `dtype`: torch's default dtype if None. A tensor without elements has no
    segment and is native. Works on every dtype but quantized ones, and on any thread.

    Raises:
        InvalidArgument: size, dtype or device is wrong. Nothing changed.
        OutOfDeviceMemory: after torch's cache was emptied once. Nothing else changed.
    """
    import torch

    shape = size_of(size)
    chosen = _checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
    ordinal = memory.device_index(device)
    nbytes = math.prod(shape) * chosen.itemsize
    if nbytes > MAX_BYTES:
        raise InvalidArgument(f"size {shape} of {chosen} is {nbytes} bytes; a tensor has at most {MAX_BYTES}")
    if nbytes == 0:
        where = torch.device("cpu") if memory.device_type == "cpu" else torch.device(memory.device_type, ordinal)
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            return torch.empty(shape, dtype=chosen, device=where)
    storage = from_capsule(memory.malloc(tag, nbytes, ordinal, shareable=shareable)).untyped_storage()
    return build(storage, chosen, 0, shape, _contiguous(shape))


def zeros(
    memory: Memory,
    size: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    tag: str,
    device: Device = None,
    shareable: bool = False,
) -> Tensor:
    """`empty`, filled with zero bytes on the current stream. Raises as `empty` does."""
    import torch

    made = empty(memory, size, dtype=dtype, tag=tag, device=device, shareable=shareable)
    storage = made.untyped_storage()
    build(storage, torch.uint8, 0, (storage.nbytes(),), (1,)).zero_()
    return made


def full(
    memory: Memory,
    size: Sequence[Any],
    fill_value: float | complex,
    *,
    dtype: torch.dtype | None = None,
    tag: str,
    device: Device = None,
    shareable: bool = False,
) -> Tensor:
    """`empty`, filled with `fill_value` on the current stream. `dtype` None: what `torch.full` takes for that value.

    Raises:
        InvalidArgument: also when the dtype cannot hold the value. Nothing changed.
    """
    import torch

    if not isinstance(fill_value, (bool, int, float, complex)):
        raise InvalidArgument(f"fill_value is {fill_value!r}; it must be a number")
    try:
        sample = torch.full((), fill_value, dtype=None if dtype is None else _checked_dtype(dtype), device="cpu")
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"fill_value {fill_value!r} does not fit dtype {dtype}: {error}") from error
    made = empty(memory, size, dtype=sample.dtype, tag=tag, device=device, shareable=shareable)
    with torch.inference_mode(False), torch.no_grad():
        return made.fill_(fill_value)


def size_of(size: Sequence[Any]) -> tuple[int, ...]:
    """`*shape` as torch takes it, integers or one sequence of them, checked.

    Raises:
        InvalidArgument: an entry is no integer, or negative.
    """
    entries: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    shape = []
    for entry in entries:
        try:
            number = operator.index(entry)
        except TypeError:
            raise InvalidArgument(f"size {tuple(entries)!r}: {entry!r} is no integer") from None
        if isinstance(entry, bool) or number < 0:
            raise InvalidArgument(f"size {tuple(entries)!r}: {entry!r} must be an integer of 0 or more")
        shape.append(number)
    return tuple(shape)


def tag_of(memory: Memory, tensor: Tensor) -> str | None:
    """The tag whose memory `tensor` lies in; None for native memory. Any thread, any time, no side effects.

    A wrapper subclass or sparse tensor: the tag of its first inner tensor that is in one.

    Raises:
        InvalidArgument: `tensor` is no tensor.
    """
    for _, info in _segments_of(memory, _checked_tensor(tensor)):
        if info is not None:
            return memory.tag_of_slot(info.slot)
    return None


def is_resident(memory: Memory, tensor: Tensor) -> bool:
    """Whether all of `tensor` can be read now; always true for native memory. Any thread, any time, no side effects.

    Raises:
        InvalidArgument: `tensor` is no tensor.
    """
    return all(_is_resident(info) for _, info in _segments_of(memory, _checked_tensor(tensor)))


def assert_resident(memory: Memory, *objects: object) -> None:
    """Holds every tensor of `objects` (tensors, modules, optimizers, containers) to be readable now.

    Raises:
        AsleepError: one is not; its `tag` is what to wake.
        InvalidArgument: an object of another kind.
    """
    for obj in objects:
        for reached in walk(obj).tensors:
            for part, info in _segments_of(memory, reached.tensor):
                if info is not None and not _is_resident(info):
                    tag = memory.tag_of_slot(info.slot)
                    raise AsleepError(
                        f"{reached.path} {_shape(part)} of tag {tag!r} is {info.state}: "
                        f"call wake_up(tags=[{tag!r}]) first",
                        tag=tag,
                    )


def host_view(memory: Memory, tensor: Tensor) -> Tensor:
    """A CPU tensor over the backup of a tensor whose memory is away: same size, stride and dtype, nothing is copied.

    It must not be written: torch has no read-only tensors, and a write would come back as contents at the next wake. It
    holds its slab of host memory for as long as it lives, also after the wake, and then shows what the backup held.

    Raises:
        StateError: the tensor is resident (read it itself), or its contents were dropped, so that there is no backup.
        InvalidArgument: it is no tensor, or in no tag of this allocator.
        Unsupported: a wrapper subclass or sparse tensor; ask for its inner tensors.
    """
    import torch

    part, info = _segments_of(memory, _checked_tensor(tensor))[0]
    if part is not tensor:
        raise Unsupported(f"a {type(tensor).__name__} has no memory of its own: ask for the views of its inner tensors")
    if info is None:
        raise InvalidArgument("this tensor is in no tag of this allocator, so it has no backup: read it itself")
    if _is_resident(info):
        raise StateError(f"tag {memory.tag_of_slot(info.slot)!r} is resident here: read the tensor itself")
    with torch._C.DisableTorchFunction():
        return _view_of_backup(memory, tensor)


def _view_of_backup(memory: Memory, tensor: Tensor) -> Tensor:
    import torch

    size, stride = tuple(tensor.shape), tensor.stride()
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    bytes_view = from_capsule(memory.core.host_view(tensor.data_ptr(), elements * tensor.element_size()))
    return with_bits_of(tensor, build(bytes_view.untyped_storage(), tensor.dtype, 0, size, stride))


def _checked_dtype(dtype: object) -> torch.dtype:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype is {dtype!r}; give a torch.dtype")
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise InvalidArgument(f"dtype is {dtype}; quantized dtypes need a quantizer: use an integer dtype")
    return dtype


def _checked_tensor(tensor: object) -> Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"expected a tensor, got a {type(tensor).__name__}")
    return tensor


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _parts(tensor: Tensor) -> list[Tensor]:
    """Those tensors that hold the memory of `tensor`: itself, or what it is made of."""
    import torch

    inner = [part for _, value in inner_tensors(tensor) for part in _parts(value)]
    if inner:
        return inner
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _segments_of(memory: Memory, tensor: Tensor) -> list[tuple[Tensor, SegmentInfo | None]]:
    """What holds the memory of `tensor`, each with its segment; None for native memory."""
    import torch

    with torch._C.DisableTorchFunction():  # a subclass has no say in where its bytes are
        located = [(part, storage_address(part)) for part in _parts(tensor)]
    return [(part, memory.core.find(address) if address else None) for part, address in located]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    import torch

    with torch._C.DisableTorchFunction():
        return tuple(tensor.shape)


def _is_resident(info: SegmentInfo | None) -> bool:
    return info is None or info.state == "resident"
