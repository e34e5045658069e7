"""Strategies for Hypothesis: what an allocator is given, and what is done to it. For engines that fuzz their own use of
cumem. Imports hypothesis, which `cumem[test]` brings.

    @given(history=histories(["weights", "kv_cache"]))
    def test_my_engine_answers_the_same_after(history):
        for step in history:
            step.apply(allocator)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from .faults import CODES, FOR_EVER, Fault

if TYPE_CHECKING:
    from ..allocator import Allocator
    from ..reports import SleepReport, WakeReport

__all__ = ["Step", "TagPolicy", "faults", "histories", "policies", "sizes", "steps", "tag_sets"]


@dataclass(frozen=True)
class TagPolicy:
    """A backend with its options: `allocator.set_policy(tag, policy.backend, **policy.options)`."""

    backend: str
    options: dict[str, Any] = field(default_factory=dict)

    def apply(self, allocator: Allocator, tag: str) -> None:
        """Gives it to a tag. Raises as `Allocator.set_policy`."""
        allocator.set_policy(tag, self.backend, **self.options)


@dataclass(frozen=True)
class Step:
    """One transition: a method of the allocator and what it is called with."""

    method: str  # "sleep", "wake_up" or "discard"
    tags: tuple[str, ...] | None
    options: dict[str, Any] = field(default_factory=dict)

    def apply(self, allocator: Allocator) -> SleepReport | WakeReport:
        """Calls it. Raises as that method."""
        report: SleepReport | WakeReport = getattr(allocator, self.method)(self.tags, **self.options)
        return report


def sizes(granularity_bytes: int, *, most: int = 4) -> st.SearchStrategy[int]:
    """Bytes of a tensor: 1 to `most` granules, borders and their neighbours often. Shrinks to 1."""
    borders = [
        border + step for border in range(0, (most + 1) * granularity_bytes, granularity_bytes) for step in (-1, 0, 1)
    ]
    near = [size for size in borders if 0 < size <= most * granularity_bytes]
    return st.sampled_from(near) | st.integers(1, most * granularity_bytes)


def policies() -> st.SearchStrategy[TagPolicy]:
    """Policies of the built-in backends with every option."""
    reloadable = st.booleans()
    cpu = st.builds(
        lambda host, reload: TagPolicy("cpu", {"host": host, "reloadable": reload}),
        st.sampled_from(["keep", "release"]),
        reloadable,
    )
    discard = st.builds(
        lambda wake, reload: TagPolicy("discard", {"wake": wake, "reloadable": reload}),
        st.sampled_from(["zero", "poison", "undefined"]),
        reloadable,
    )
    return cpu | discard


def tag_sets(tags: Sequence[str]) -> st.SearchStrategy[tuple[str, ...] | None]:
    """What a transition may be given: all tags, as None, or any selection, also an empty one."""
    return st.none() | st.lists(st.sampled_from(list(tags)), unique=True).map(tuple)


def faults(*, most_calls: int = 60, codes: Sequence[str] = CODES) -> st.SearchStrategy[Fault]:
    """Driver calls that fail, up to the `most_calls`-th. Shrinks to the first call, once."""
    times = st.sampled_from([1, 2, 3, FOR_EVER])
    return st.builds(Fault, st.integers(0, most_calls), st.sampled_from(list(codes)), times)


def steps(tags: Sequence[str]) -> st.SearchStrategy[Step]:
    """Any transition over these tags, which must exist."""
    chosen = tag_sets(tags)
    some = st.lists(st.sampled_from(list(tags)), unique=True).map(tuple)
    sleep = st.builds(lambda tags, level: Step("sleep", tags, {"level": level}), chosen, st.sampled_from([1, 2]))
    on_failure = st.sampled_from([None, "partial", "rollback"])
    wake = st.builds(
        lambda tags, restore, failure: Step("wake_up", tags, {"restore": restore, "on_failure": failure}),
        chosen,
        st.sampled_from([True, True, True, False]),
        on_failure,
    )
    return sleep | wake | st.builds(lambda tags: Step("discard", tags), some)


def histories(tags: Sequence[str], *, most: int = 20) -> st.SearchStrategy[list[Step]]:
    """Transitions in a row. Keeps contents unless `steps` drew a level 2, a discard or `restore=False`."""
    return st.lists(steps(tags), max_size=most)
