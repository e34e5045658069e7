"""The demo's sizes fit the machine they are for, and what the user gives moves what follows from it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cumem.errors import InvalidArgument

pytest.importorskip("torch")

from cumem.cli.presets import DemoSizes, plan_demo

MIB = 1 << 20


@pytest.mark.parametrize(
    ("driver", "itemsize", "weights_mib", "cache_mib"), [("host", 4, 285, 384), ("cuda", 2, 1777, 2304)]
)
def test_presets_have_the_sizes_that_they_state(driver: str, itemsize: int, weights_mib: int, cache_mib: int) -> None:
    plan = plan_demo(driver, DemoSizes())
    assert plan.decoder.parameters * itemsize // MIB == weights_mib
    assert math.prod(plan.decoder.cache_shape(plan.batch, plan.context)) * itemsize == cache_mib * MIB


def test_heads_and_mlp_follow_a_given_width() -> None:
    decoder = plan_demo("host", DemoSizes(width=256)).decoder
    assert (decoder.heads, decoder.kv_heads, decoder.hidden) == (4, 1, 768)


def test_key_and_value_heads_follow_given_heads() -> None:
    assert plan_demo("host", DemoSizes(heads=16)).decoder.kv_heads == 4
    assert plan_demo("host", DemoSizes(heads=6)).decoder.kv_heads == 6


def test_given_sizes_are_kept() -> None:
    given: dict[str, Any] = {"batch": 3, "context": 70, "prompt_tokens": 10, "new_tokens": 30, "seed": 9}
    plan = plan_demo("host", DemoSizes(layers=2, vocab=50, tied=True, **given))
    assert {name: getattr(plan, name) for name in given} == given
    assert (plan.decoder.layers, plan.decoder.vocab, plan.decoder.tied) == (2, 50, True)


def test_a_context_too_short_for_prompt_and_tokens_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(InvalidArgument, match="it must be at least 70"):
        plan_demo("host", DemoSizes(context=69, prompt_tokens=10, new_tokens=30))
