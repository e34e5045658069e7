"""FractionHook raises torch's limit by what sleeps and restores it to the byte."""

from __future__ import annotations

import pytest

from cumem.fraction_hook import FractionHook
from cumem.hooks import Hooks, Transition

GIB = 1 << 30
TOTAL = 141 * GIB + 12345  # no round number, so that fractions do not come back by luck


class Limits:
    """torch's: whole bytes, cut off; 1 lifts the limit."""

    def __init__(self, *fractions: float) -> None:
        self.allowed: dict[int, int | None] = dict.fromkeys(range(len(fractions)))
        self.writes = 0
        for device, fraction in enumerate(fractions):
            self.write(device, fraction)
        self.writes = 0

    def read(self, device: int) -> float | None:
        allowed = self.allowed[device]
        return 1.0 if allowed is None else allowed / TOTAL

    def write(self, device: int, fraction: float) -> None:
        assert 0 <= fraction <= 1
        self.writes += 1
        self.allowed[device] = int(fraction * TOTAL) if fraction < 1 else None

    def total_bytes(self, device: int) -> int:
        return TOTAL


def hook_over(limits: Limits, asleep: dict[int, int]) -> FractionHook:
    return FractionHook(lambda: asleep, limits=limits)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3, 0.5, 0.7, 0.123456789])
def test_the_limit_grows_by_what_sleeps_and_comes_back_to_the_byte(fraction: float) -> None:
    limits, asleep = Limits(fraction), {0: 0}
    hook, before = hook_over(limits, asleep), limits.allowed[0]
    assert before is not None
    for size in (3 * GIB, 7 * GIB + 512, 0, 5 * GIB, 0):
        asleep[0] = size
        hook.update()
        allowed = limits.allowed[0]
        assert allowed is not None
        assert 0 <= allowed - before - size <= (0 if size == 0 else 2)


def test_a_limit_comes_back_to_the_byte_for_thousands_of_fractions() -> None:
    asleep = {0: 0}
    for step in range(1, 3000):
        limits = Limits(step / 3001)
        hook, before = hook_over(limits, asleep), limits.allowed[0]
        for asleep[0] in (GIB, 0):
            hook.update()
        assert limits.allowed[0] == before, step


def test_more_asleep_than_the_rest_lifts_the_limit_until_the_wake() -> None:
    limits, asleep = Limits(0.5), {0: 100 * GIB}
    hook, before = hook_over(limits, asleep), limits.allowed[0]
    hook.update()
    assert limits.allowed[0] is None
    asleep[0] = 0
    hook.update()
    assert limits.allowed[0] == before


def test_a_device_without_a_limit_and_one_where_nothing_sleeps_are_left_alone() -> None:
    limits = Limits(1.0, 0.5)
    hook_over(limits, {0: GIB, 1: 0}).update()
    assert limits.writes == 0


def test_a_limit_that_someone_sets_meanwhile_is_theirs() -> None:
    limits, asleep = Limits(0.5), {0: GIB}
    hook = hook_over(limits, asleep)
    hook.update()
    limits.write(0, 0.25)
    hook.update()  # they sleep on
    allowed = limits.allowed[0]
    assert allowed is not None
    assert allowed - int(0.25 * TOTAL) in range(GIB, GIB + 3)
    limits.write(0, 0.125)
    asleep[0] = 0
    hook.update()
    assert limits.allowed[0] == int(0.125 * TOTAL)


def test_nothing_is_touched_before_torch_has_a_limit_to_read() -> None:
    class Early(Limits):
        def read(self, device: int) -> float | None:
            return None

    limits = Early(0.5)
    hook_over(limits, {0: GIB}).update()
    assert limits.writes == 0


def test_it_registers_as_a_hook_that_runs_after_memory_has_moved() -> None:
    limits, asleep, hooks = Limits(0.5), {0: GIB}, Hooks()
    hook_over(limits, asleep).register(hooks)
    (registered,) = hooks.down()
    assert registered.before_sleep is None
    assert registered.before_wake is None
    assert registered.after_sleep is not None
    assert registered.after_wake is not None
    registered.after_sleep(Transition("sleep", ("weights",), 1))
    assert limits.writes == 1
    asleep[0] = 0
    registered.after_wake(Transition("wake_up", ("weights",), 0))
    assert limits.allowed[0] == int(0.5 * TOTAL)


def test_without_torchs_cuda_in_use_the_real_limits_are_none() -> None:
    torch = pytest.importorskip("torch")
    from cumem.fraction_hook import TorchMemoryLimits

    if torch.cuda.is_initialized():
        pytest.skip("torch has CUDA in use in this process")
    assert TorchMemoryLimits().read(0) is None
