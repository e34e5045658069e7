"""Contents that prove themselves: random, and compared by an independent checksum or a copy on the device."""

from __future__ import annotations

import torch

__all__ = ["checksum", "fill_random"]


def fill_random(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes, different for each seed."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(seed)
    tensor.view(torch.uint8).view(-1).view(torch.int64).random_(generator=generator)


def checksum(tensor: torch.Tensor, step: int = 1 << 27) -> int:
    """A position-weighted sum of the 64-bit words, modulo 2**64: a moved, lost or changed word changes it."""
    words = tensor.view(torch.uint8).view(-1).view(torch.int64)
    total = 0
    for begin in range(0, words.numel(), step):
        part = words[begin : begin + step]
        weights = torch.arange(begin, begin + part.numel(), device=part.device, dtype=torch.int64) * 2 + 1
        total = (total + int((part * weights).sum())) % (1 << 64)
    return total
