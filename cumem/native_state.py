"""State that torch makes once for a whole process, made natively before a region could catch it.

The first matrix product on a stream makes cuBLAS's workspace (32 MiB on Hopper, measured) and keeps it for ever; the
first
graph capture makes the generator's seed and offset tensors, which up to torch 2.11 all graphs share. Made inside a
region they would sleep with its tag, and the next product or replay would fault.
"""

from __future__ import annotations

import threading
from typing import Any

from . import _core

__all__ = ["warm_up"]

_lock = threading.Lock()
_streams: set[tuple[int, int]] = set()  # (device, stream) whose workspaces exist
_graphs: dict[int, Any] = {}  # device -> the graph that holds the default generator's tensors, kept for ever


def warm_up(device: int) -> None:
    """Makes that state on torch's default pool for the device and its current stream. Cheap from the second call on."""
    import torch

    with _lock, torch.cuda.device(device):
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        if key not in _streams and not torch.cuda.is_current_stream_capturing():
            _warm_products(device)
            _streams.add(key)
        if device not in _graphs and not torch.cuda.is_current_stream_capturing():
            _graphs[device] = _warm_generator(device)
            _core.immortalize(_graphs[device])


def _warm_products(device: int) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        a = torch.zeros(16, 16, device=f"cuda:{device}", dtype=dtype)
        torch.mm(a, a)
        torch.nn.functional.linear(a, a, a[0])  # cuBLASLt, with a bias


def _warm_generator(device: int) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.rand(1, device=f"cuda:{device}")
    return graph
