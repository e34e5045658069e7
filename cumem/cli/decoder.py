"""A small decoder-only transformer: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, a static KV cache.

Loaded by the demo only: this module imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cumem.errors import InvalidArgument

__all__ = ["Decoder", "DecoderConfig", "rotate"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. Raises `InvalidArgument` where they do not fit each other."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # width of the MLP
    vocab: int
    tied: bool = False  # the head is the embedding
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "vocab"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise InvalidArgument(f"width {self.width} is no multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise InvalidArgument(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.head_width % 2:
            raise InvalidArgument(
                f"width / heads is {self.head_width}; rotary embedding turns pairs, so it must be even"
            )

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Elements of all weights, a tied head counted once."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_width
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.width

    def cache_shape(self, batch: int, context: int) -> tuple[int, ...]:
        """(layers, 2 for keys and values, batch, kv_heads, context, head_width)."""
        return self.layers, 2, batch, self.kv_heads, context, self.head_width


class Projection(nn.Module):
    """y = x W^T. Its weight is made uninitialised: `Decoder.initialise` fills all weights from one seed."""

    def __init__(self, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return functional.linear(x, self.weight)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + half]) by its position's angle (Su et al., 2021, RoFormer).

    Args:
        x: (batch, heads, length, head_width), any float type; the turn itself is done in float32.
        angles: (length, head_width / 2), float32, in radians.
    """
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which each key and value head serves `heads / kv_heads` query heads."""

    def __init__(self, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        shared = config.kv_heads * config.head_width
        self.query = Projection(config.width, config.width, device=device, dtype=dtype)
        self.key = Projection(config.width, shared, device=device, dtype=dtype)
        self.value = Projection(config.width, shared, device=device, dtype=dtype)
        self.output = Projection(config.width, config.width, device=device, dtype=dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, n * head_width) -> (batch, n, length, head_width)."""
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.config.head_width).transpose(1, 2)

    def forward(self, x: Tensor, angles: Tensor, cache: Tensor | None, start: int) -> Tensor:
        """(batch, length, width) -> the same, for positions from `start` on.

        Args:
            x: Normalised input.
            angles: Rotary angles of these positions.
            cache: (2, batch, kv_heads, context, head_width); written at these positions, read up to the last of them
                and no further, so that what lies beyond may be undefined. None: `x` is the whole sequence.
            start: Position of the first token; 0 without a cache.
        """
        length = x.shape[1]
        query = rotate(self._heads(self.query(x)), angles)
        key = rotate(self._heads(self.key(x)), angles)
        value = self._heads(self.value(x))
        if cache is not None:
            end = start + length
            cache[0, :, :, start:end] = key
            cache[1, :, :, start:end] = value
            key, value = cache[0, :, :, :end], cache[1, :, :, :end]
        mask = None
        if start > 0 and length > 1:
            mask = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=start == 0 and length > 1, enable_gqa=True
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return result


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020, GLU Variants Improve Transformer)."""

    def __init__(self, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Projection(config.width, config.hidden, device=device, dtype=dtype)
        self.up = Projection(config.width, config.hidden, device=device, dtype=dtype)
        self.down = Projection(config.hidden, config.width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon, device=device, dtype=dtype)
        self.attention = Attention(config, device=device, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon, device=device, dtype=dtype)
        self.mlp = SwiGlu(config, device=device, dtype=dtype)

    def forward(self, x: Tensor, angles: Tensor, cache: Tensor | None, start: int) -> Tensor:
        """As `Attention.forward`, with the residual stream in and out."""
        x = x + self.attention(self.attention_norm(x), angles, cache, start)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Decoder(nn.Module):
    """Tokens in, logits out. The caller owns the KV cache (`config.cache_shape`)."""

    inverse_frequencies: Tensor

    def __init__(self, config: DecoderConfig, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.width, device=device, dtype=dtype))
        self.layers = nn.ModuleList(Layer(config, device=device, dtype=dtype) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon, device=device, dtype=dtype)
        self.head = Projection(config.width, config.vocab, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.embedding
        half = torch.arange(config.head_width // 2, device=device, dtype=torch.float32)
        frequencies = config.rotary_base ** (-half / (config.head_width // 2))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fills all matrices from N(0, 0.02), those that write into the residual stream less, and all norms with 1.

        The factor 1 / sqrt(2 layers) is GPT-2's (Radford et al., 2019): the stream's variance does not grow with depth.
        """
        generator = torch.Generator(device=self.embedding.device).manual_seed(seed)
        into_stream = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = into_stream if name.endswith(("output.weight", "down.weight")) else 0.02
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor, cache: Tensor | None = None, start: int = 0, *, last: bool = False) -> Tensor:
        """Logits in float32, (batch, length, vocab), or (batch, 1, vocab) of the last position only.

        Args:
            tokens: (batch, length), int64, at positions `start` to `start + length - 1`.
            cache: See `DecoderConfig.cache_shape`. None: the whole sequence is in `tokens`.
            start: Tokens that are in the cache already.
            last: Skip the head for all positions but the last.
        """
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequencies)
        x = functional.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, None if cache is None else cache[index], start)
        if last:
            x = x[:, -1:]
        logits: Tensor = self.head(self.norm(x))
        return logits.float()
