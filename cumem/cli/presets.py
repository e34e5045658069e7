"""Sizes of the demo by driver, and how given ones change the others. Imports torch; loaded by the demo only."""

from __future__ import annotations

from dataclasses import dataclass

from cumem.cli.decoder import DecoderConfig
from cumem.errors import InvalidArgument

__all__ = ["DemoPlan", "DemoSizes", "plan_demo"]


@dataclass(frozen=True, kw_only=True)
class DemoSizes:
    """What the user asked for; None leaves a size to the driver's preset."""

    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    tied: bool = False
    batch: int | None = None
    context: int | None = None
    prompt_tokens: int = 32
    new_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """What the demo builds and runs. Raises `InvalidArgument` where the tokens do not fit the cache."""

    decoder: DecoderConfig
    batch: int  # sequences
    context: int  # positions of a sequence in the cache
    prompt_tokens: int
    new_tokens: int  # generated before the sleep, and again after it
    seed: int

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be at least 1")
        needed = self.prompt_tokens + 2 * self.new_tokens
        if needed > self.context:
            raise InvalidArgument(
                f"a context of {self.context} is too short for {self.prompt_tokens} prompt tokens and twice "
                f"{self.new_tokens} new ones: it must be at least {needed}"
            )


@dataclass(frozen=True)
class _Preset:
    layers: int
    width: int
    head_width: int
    vocab: int
    batch: int
    context: int


# host: 285 MiB of float32 weights, 384 MiB of cache. cuda: 1.74 GiB of bfloat16 weights, 2.25 GiB of cache.
_PRESETS = {
    "host": _Preset(layers=8, width=768, head_width=64, vocab=16384, batch=8, context=4096),
    "cuda": _Preset(layers=18, width=2048, head_width=128, vocab=32768, batch=8, context=8192),
}


def _given(value: int | None, preset: int) -> int:
    return preset if value is None else value


def plan_demo(driver: str, sizes: DemoSizes) -> DemoPlan:
    """The driver's preset with the user's sizes in it; what follows from them (heads, MLP width) follows.

    Args:
        driver: "cuda" or "host".
        sizes: What the user gave.

    Raises:
        InvalidArgument: Sizes do not fit each other.
    """
    preset = _PRESETS[driver]
    width = _given(sizes.width, preset.width)
    heads = _given(sizes.heads, max(1, width // preset.head_width))
    kv_heads = _given(sizes.kv_heads, heads // 4 if heads % 4 == 0 else heads)
    decoder = DecoderConfig(
        layers=_given(sizes.layers, preset.layers),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=-(-8 * width // (3 * 128)) * 128,  # 8/3 of the width: as many weights as 4x without a gate
        vocab=_given(sizes.vocab, preset.vocab),
        tied=sizes.tied,
    )
    return DemoPlan(
        decoder=decoder,
        batch=_given(sizes.batch, preset.batch),
        context=_given(sizes.context, preset.context),
        prompt_tokens=sizes.prompt_tokens,
        new_tokens=sizes.new_tokens,
        seed=sizes.seed,
    )
