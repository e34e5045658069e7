"""Greedy decoding of a batch of sequences into one static KV cache. Imports torch; loaded by the demo only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cumem.cli.decoder import Decoder

__all__ = ["Decoding"]


def _ignore_progress() -> None:
    pass


class Decoding:
    """Sequences under way: `position` tokens of each are in the cache, `logits` (batch, vocab) predict the next.

    Rebuilding a lost cache with `prefill` and `replay` runs the same kernels over the same shapes as building it did,
    so that on one device even the bits are the same: a token that differs is a byte that was lost, never rounding.
    """

    def __init__(self, decoder: Decoder, cache: Tensor) -> None:
        self.decoder = decoder
        self.cache = cache
        self.position = 0
        self.logits: Tensor | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Tensor) -> None:
        """Begins anew with `prompt`, (batch, length), in one pass."""
        self.position = 0
        self._feed(prompt)

    @torch.inference_mode()
    def replay(self, tokens: Tensor, advance: Callable[[], None] = _ignore_progress) -> None:
        """Feeds known tokens, (batch, count), one at a time, as `generate` did when it chose them."""
        for token in torch.split(tokens, 1, dim=1):
            self._feed(token)
            advance()

    @torch.inference_mode()
    def generate(self, count: int, advance: Callable[[], None] = _ignore_progress) -> Tensor:
        """Chooses and feeds the likeliest token `count` times; the tokens, (batch, count)."""
        chosen = []
        for _ in range(count):
            assert self.logits is not None, "prefill comes first"
            token = self.logits.argmax(dim=-1, keepdim=True)
            chosen.append(token)
            self._feed(token)
            advance()
        return torch.cat(chosen, dim=1)

    def _feed(self, tokens: Tensor) -> None:
        self.logits = self.decoder(tokens, self.cache, self.position, last=True)[:, -1]
        self.position += tokens.shape[1]
