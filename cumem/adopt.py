"""Moving tensors that exist already into a tag: packed, with all identities, ties and views kept."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cumem import storages
from cumem.blocks import block, from_capsule
from cumem.errors import CumemError, InvalidArgument, StateError, Unsupported
from cumem.reports import AdoptReport
from cumem.storages import Viewed
from cumem.walk import Walk, walk

if TYPE_CHECKING:
    from torch import Tensor

    from cumem.memory import Memory

__all__ = ["adopt"]

GROUP_BYTES = 512 << 20  # storages moved together, into one segment
ALIGNMENT_BYTES = 512  # of a block; what torch's own allocator gives

FSDP_CLASSES = {"FSDPModule", "FullyShardedDataParallel"}  # by name, so that torch.distributed is not imported for it


def adopt(memory: Memory, obj: object, tag: str) -> AdoptReport:
    """Moves every tensor that `obj` holds into `tag`, in place: the objects stay, only their memory changes.

    `obj` is what `cumem.walk.walk` takes: modules, optimizers, tensors, nested containers. Whole distinct storages
    move, each to a block at a multiple of 512 bytes, in walk order, up to 512 MiB of them in one segment; a larger one
    gets a segment of its own. A group's old memory is dropped before the next group moves, so that about the largest
    group is needed on top. Old memory that is not torch's (numpy, shared, mapped files) is copied like any other and
    the hold on it dropped: from then on the tensor shares no more with it.

    Device tensors stay on their device; CPU tensors go to the allocator's. Not moved: what is in the tag already,
    tensors without bytes, gradients, and CPU scalars in an optimizer's bookkeeping (step counts), which torch keeps
    on the CPU on purpose; with the host driver all of these but gradients and empty tensors count as device memory.

    Waits for the devices before it begins and before each group's old memory is dropped. Call it before compiling and
    capturing: a CUDA graph captured earlier keeps the old addresses. Move a recurrent module to its device first: cuDNN
    wants its weights in one storage, which `.to(device)` makes and adopt keeps. No other thread may use or alias the
    tensors meanwhile.

    Raises:
        InvalidArgument: `obj` holds no tensors.
        Unsupported: a tensor that cannot be moved, by its path: no strided memory of its own, another kind of device,
            FSDP's, or (where torch cannot swap memory in place) with aliases that were not reached, or an inference
            tensor.
        StateError: a tensor is in another tag.
        DeviceBusy: a device did not become idle in time.
        OutOfDeviceMemory: while moving.

        All but the last two before anything moves. After these each tensor is either moved or untouched, contents are
        whole, and the same call again moves the rest.
    """
    try:
        return _adopt(memory, obj, tag)
    except BaseException as error:
        # Whoever still holds the error would hold the storages that these frames name: aliases, at the next call.
        traceback.clear_frames(error.__traceback__)
        raise


def _adopt(memory: Memory, obj: object, tag: str) -> AdoptReport:
    import torch

    held = walk(obj)
    if not held.tensors:
        raise InvalidArgument(f"this {type(obj).__name__} holds no tensors to adopt")
    with torch._C.DisableTorchFunction():  # a subclass has no say in where its bytes are
        moves, already = _plan(memory, held, tag)
        groups = _groups(moves)
        held_bytes = peak_bytes = sum(move.freed_bytes for move in moves)
        memory.core.wait_devices(sorted({group.device for group in groups}))
        for group in groups:
            held_bytes += _move_group(memory, group, tag)
            peak_bytes = max(peak_bytes, held_bytes)
            held_bytes -= sum(move.freed_bytes for move in group.moves)
            if memory.device_type == "cuda":
                torch.cuda.empty_cache()
    return AdoptReport(
        tensors=len(held.tensors),
        storages=len(moves),
        bytes=sum(move.viewed.nbytes for move in moves),
        already=already,
        segments=len(groups),
        peak_extra_bytes=peak_bytes - held_bytes,
    )


@dataclass(frozen=True)
class _Move:
    """One storage and how it gets to `device`."""

    viewed: Viewed
    device: int
    crossing: bool  # from host memory to the device's
    swap: bool

    @property
    def stays(self) -> bool:
        """Whether it is an optimizer's CPU scalar, which is read on the CPU in every step."""
        return self.crossing and all(r.bookkeeping and r.tensor.dim() == 0 for r in self.viewed.reached)

    @property
    def freed_bytes(self) -> int:
        """What its old memory gives back to the device."""
        return 0 if self.crossing else self.viewed.nbytes


@dataclass
class _Group:
    """Storages that share a segment."""

    device: int
    nbytes: int = 0
    moves: list[_Move] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, move: _Move) -> None:
        self.moves.append(move)
        self.offsets.append(self.nbytes)
        self.nbytes += _aligned(move.viewed.nbytes)


def _plan(memory: Memory, held: Walk, tag: str) -> tuple[list[_Move], int]:
    """The moves to make, all of them checked, and the number of tensors that are in the tag already."""
    _refuse_fsdp(held)
    moves, already = [], 0
    for viewed in storages.collect(held):
        found = _tag_of(memory, viewed)
        if found == tag:
            already += len(viewed.reached)
            continue
        if found is not None:
            raise StateError(f"{viewed.path} is in tag {found!r} and cannot be moved to {tag!r}; nothing was moved")
        move = _move_for(memory, viewed)
        if not move.stays:
            _check(move)
            moves.append(move)
    return moves, already


def _tag_of(memory: Memory, viewed: Viewed) -> str | None:
    info = memory.core.find(viewed.storage.data_ptr())
    return None if info is None else memory.tag_of_slot(info.slot)


def _move_for(memory: Memory, viewed: Viewed) -> _Move:
    kind = viewed.device.type
    if kind not in (memory.device_type, "cpu"):
        raise Unsupported(
            f"{viewed.path} is on {viewed.device}; only {memory.device_type} and cpu tensors can be adopted here; "
            "nothing was moved"
        )
    same = kind == memory.device_type
    try:
        device = memory.device_index(viewed.device) if kind != "cpu" else memory.default_device
    except CumemError as error:
        raise Unsupported(f"{viewed.path} is on {viewed.device}: {error}; nothing was moved") from error
    return _Move(viewed, device, crossing=not same, swap=same and storages.can_swap())


def _check(move: _Move) -> None:
    """Holds a move to be possible for every tensor over the storage."""
    for reached in move.viewed.reached:
        reason = _why_not(move, reached.tensor)
        if move.crossing and reached.wrapped:
            reason = "is inside a tensor subclass on the CPU, which would not follow it: use .to(device) first"
        if reason is not None:
            raise Unsupported(f"{reached.path} {reason}; nothing was moved")
    if not move.swap:
        storages.check_aliases(move.viewed)


def _why_not(move: _Move, tensor: Tensor) -> str | None:
    if move.crossing and tensor.grad_fn is not None:
        return "is part of an autograd graph on the CPU: detach it, or move it before the forward"
    if move.crossing and tensor.is_leaf and tensor.grad is not None:
        return "has a gradient on the CPU, which would not follow it to the device: zero_grad(set_to_none=True) first"
    if not move.swap and tensor.is_inference():
        return "is an inference tensor, whose memory cannot be assigned: clone it outside of inference_mode"
    if not move.swap and any(name is not None for name in getattr(tensor, "names", ())):  # gone by torch 2.13
        return "has named dimensions, which assigning would lose: rename(None) first"
    return None


def _refuse_fsdp(held: Walk) -> None:
    for path, module in held.modules:
        bases = [base for base in type(module).__mro__ if base.__module__.startswith("torch.distributed")]
        if FSDP_CLASSES & {base.__name__ for base in bases} or getattr(module, "_is_fsdp_managed_module", False):
            raise Unsupported(
                f"{path} is managed by FSDP, which frees, regrows and views its parameters' storages itself: "
                "build the model inside a region instead; nothing was moved"
            )


def _groups(moves: list[_Move]) -> list[_Group]:
    """Packs in order: a storage joins its device's open group, or has one of its own if it is larger than a group."""
    groups: list[_Group] = []
    unfilled: dict[int, _Group] = {}
    for move in moves:
        group = unfilled.get(move.device)
        if group is None or group.nbytes + move.viewed.nbytes > GROUP_BYTES:
            group = _Group(move.device)
            groups.append(group)
            if move.viewed.nbytes <= GROUP_BYTES:
                unfilled[move.device] = group
        group.add(move)
    return groups


def _move_group(memory: Memory, group: _Group, tag: str) -> int:
    """Moves a group into a new segment; the segment's size. On failure nothing is held but what was moved."""
    blocks: list[Tensor] = []  # used by index: a name for one in a traceback's frame would keep the segment alive
    whole: list[Tensor] = []  # holds the segment until its blocks do
    try:
        whole.append(from_capsule(memory.malloc(tag, group.nbytes, group.device)))
        address = whole[0].data_ptr()
        for move, offset in zip(group.moves, group.offsets, strict=True):
            blocks.append(block(memory, address, offset, move.viewed.nbytes))
        for index, move in enumerate(group.moves):
            blocks[index].untyped_storage().copy_(move.viewed.storage)
        memory.core.wait_devices([group.device])
        for index, move in enumerate(group.moves):
            storages.replace(move.viewed, blocks[index].untyped_storage(), swap=move.swap)
        info = memory.core.find(address)
        return group.nbytes if info is None else info.size
    finally:
        blocks.clear()
        whole.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
