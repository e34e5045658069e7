"""Every name of torch that cumem uses and torch does not promise: why, since when, and what happens without it.

Also the few public names whose parameters cumem relies on and older releases lack. `docs/torch_names.md` is made from
this list and from what was found in the releases (`docs/torch_versions.json`): `python docs/torch_names.py`. A private
name that `cumem/` uses and this list lacks fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

__all__ = ["NAMES", "TorchName", "exists", "find", "has_cuda", "is_present", "missing", "parameters"]


@dataclass(frozen=True)
class TorchName:
    """One name of torch.

    `since` is the first release that has it with all of `takes`; "" stands for the oldest supported one or before.
    `cuda_only`: builds of torch without CUDA lack it, and need it for nothing.
    """

    path: str  # from "torch." on
    why: str
    without: str
    since: str = ""
    public: bool = False
    cuda_only: bool = False
    takes: tuple[str, ...] = ()  # parameters that cumem gives it; of a function in C as its docstring calls them


NAMES: tuple[TorchName, ...] = (
    # --- pools: regions ---
    TorchName(
        "torch.cuda.MemPool",
        why="a pool of torch's allocator whose memory comes from a tag",
        without="no regions; `empty` and `adopt` work",
        public=True,
        cuda_only=True,
        takes=("allocator", "use_on_oom", "no_split"),
    ),
    TorchName(
        "torch.cuda.MemPool.use_count",
        why="whether something but our regions, a graph say, uses a pool: it is then copied whole and never trimmed",
        without="no regions",
        public=True,
        cuda_only=True,
    ),
    TorchName(
        "torch._C._cuda_customAllocator",
        why="makes an allocator of two addresses, so that each tag has a malloc of its own",
        without="no regions",
        cuda_only=True,
        takes=("arg0", "arg1"),
    ),
    TorchName(
        "torch._C._cuda_beginAllocateCurrentThreadToPool",
        why="routes one thread's allocations to a pool, and again when `exclude()` ends",
        without='no regions but those of `scope="process"`',
        cuda_only=True,
        takes=("arg0", "arg1"),
    ),
    TorchName(
        "torch._C._cuda_beginAllocateToPool",
        why='routes every thread\'s allocations to a pool: `scope="process"`',
        without="regions of one thread only; autograd's threads allocate natively",
        cuda_only=True,
        takes=("arg0", "arg1"),
    ),
    TorchName(
        "torch._C._cuda_endAllocateToPool",
        why="ends routing: at a region's end, and for as long as `exclude()` lasts",
        without="no regions",
        cuda_only=True,
        takes=("arg0", "arg1"),
    ),
    TorchName(
        "torch._C._cuda_releasePool",
        why="gives a use of a pool back after routing; once more seals it: torch then hands dead segments back itself",
        without="no regions",
        cuda_only=True,
        takes=("arg0", "arg1"),
    ),
    TorchName(
        "torch.cuda.graph.default_capture_stream",
        why="the stream that captures run on, to see a capture that another thread has under way",
        without="only a capture on the current stream is seen",
        cuda_only=True,
    ),
    # --- what lives where ---
    TorchName(
        "torch.cuda.memory_snapshot",
        why="its parameter shows that `_cuda_memorySnapshot` can leave out a recorded history, which costs time",
        without="no regions",
        public=True,
        cuda_only=True,
        takes=("mempool_id", "include_traces"),
    ),
    TorchName(
        "torch._C._cuda_memorySnapshot",
        why="segments, blocks and the settings in force; called as `cumem/torch_snapshot.py` says",
        without="no regions: what of a pool is alive is not known",
        cuda_only=True,
    ),
    # --- settings ---
    TorchName(
        "torch.cuda.get_allocator_backend",
        why="regions need torch's own caching allocator",
        without="the environment says which allocator it is",
        public=True,
        cuda_only=True,
    ),
    TorchName(
        "torch._C._cuda_cudaCachingAllocator_is_enabled",
        why="whether `caching_allocator_enable(False)` was called: allocations then bypass every pool",
        without="not known: a region that caught nothing says so at its end",
        since="2.12",
        cuda_only=True,
    ),
    TorchName(
        "torch._C._accelerator_getAllocatorSettings",
        why="the settings as last written, where torch has no CUDA to take a snapshot of",
        without="the environment says what was set at the start",
        since="2.12",
    ),
    TorchName(
        "torch.cuda.get_per_process_memory_fraction",
        why="the limit that counts sleeping memory; `FractionHook` raises it meanwhile",
        without="the limit cannot be read and is left alone",
        public=True,
        cuda_only=True,
        takes=("device",),
    ),
    # --- tensors and storages: adopt ---
    TorchName(
        "torch.UntypedStorage._swap_data_ptr_",
        why="gives a storage other memory; everything that looks at it follows",
        without="each tensor gets its new storage by `.data`; a storage with an alias that was not reached is refused",
        since="2.12",
    ),
    TorchName(
        "torch._C._storage_Use_Count",
        why="finds aliases of a storage that `adopt` did not reach",
        without="no `adopt` where storages cannot be swapped",
    ),
    TorchName(
        "torch.UntypedStorage._cdata",
        why="one storage's identity: two Python objects may stand for it",
        without="no `adopt`",
    ),
    TorchName("torch.Tensor._base", why="the base of a view, which autograd alone may hold", without="no `adopt`"),
    TorchName(
        "torch.Tensor._is_zerotensor",
        why="a lazy zero tensor has no memory to move",
        without="no `adopt`",
    ),
    TorchName(
        "torch.Tensor._indices",
        why="a sparse COO tensor's parts; the public name refuses an uncoalesced one",
        without="no `assert_resident` of sparse tensors",
    ),
    TorchName(
        "torch.Tensor._values",
        why="a sparse COO tensor's parts; the public name refuses an uncoalesced one",
        without="no `assert_resident` of sparse tensors",
    ),
    TorchName(
        "torch._conj", why="keeps a tensor's lazy conjugation on new memory", without="no `adopt` of such tensors"
    ),
    TorchName(
        "torch._neg_view", why="keeps a tensor's lazy negation on new memory", without="no `adopt` of such tensors"
    ),
    TorchName(
        "torch._C.DisableTorchFunction",
        why="a tensor subclass has no say in where its bytes are",
        without="no `empty`, no `adopt`",
    ),
    TorchName(
        "torch.nn.parameter.is_lazy",
        why="a lazy parameter has no memory yet",
        without="no `adopt`",
        takes=("param",),
    ),
)


def has_cuda() -> bool:
    """Whether this build of torch knows CUDA at all. Imports torch; asks for no device."""
    import torch

    backend: ModuleType = torch.backends.cuda
    return bool(backend.is_built())


def find(name: TorchName) -> object:
    """What the name stands for in this torch. Imports torch. Raises `AttributeError` if it is not there."""
    import torch

    if name.cuda_only and not has_cuda():  # torch puts classes that only raise where its CUDA functions would be
        raise AttributeError(f"{name.path} needs a build with CUDA")
    found: object = torch
    for part in name.path.split(".")[1:]:
        found = getattr(found, part)
    return found


def exists(name: TorchName) -> bool:
    """Whether the name is there, whatever it takes."""
    try:
        find(name)
    except AttributeError:
        return False
    return True


def is_present(name: TorchName) -> bool:
    """Whether the name is there with all parameters that cumem gives it."""
    return exists(name) and set(name.takes) <= set(parameters(find(name)))


def missing() -> list[TorchName]:
    """The names that this torch lacks, or that lack a parameter. Imports torch; creates no context on a device."""
    return [name for name in NAMES if not is_present(name)]


def parameters(function: object) -> list[str]:
    """A callable's parameters; for one in C those that its docstring lists; [] where neither says."""
    if not callable(function):
        return []
    try:
        return [name for name in _signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        head = (function.__doc__ or "").partition("\n")[0]
        names = (part.partition(":")[0].strip() for part in head.partition("(")[2].split(","))
        return [name for name in names if name.isidentifier() and name != "self"]


def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)
