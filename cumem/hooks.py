"""Hooks: what other parts of a program do when memory goes away and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import InvalidArgument

__all__ = ["Hook", "Hooks", "Transition"]


@dataclass(frozen=True)
class Transition:
    """What a hook is told: one call over one or more tags."""

    kind: str  # "sleep" or "wake_up"
    tags: tuple[str, ...]  # the tags that this transition changes
    level: int  # of a sleep; 0 for a wake
    undo: bool = False  # called to take back what the counterpart did in a transition that failed


HookFunction = Callable[[Transition], object]


@dataclass(frozen=True)
class Hook:
    """At most one function for each way, each before or after the memory moves; the up undoes the down."""

    name: str
    before_sleep: HookFunction | None = None
    after_sleep: HookFunction | None = None
    before_wake: HookFunction | None = None
    after_wake: HookFunction | None = None
    order: int = 0

    @property
    def down(self) -> HookFunction | None:
        """What runs at a sleep."""
        return self.before_sleep or self.after_sleep

    @property
    def up(self) -> HookFunction | None:
        """What runs at a wake."""
        return self.before_wake or self.after_wake


class Hooks:
    """The hooks of one allocator, or those of all.

    Hooks run on the thread that called `sleep` or `wake_up`, at every transition that changes something. Going down
    they run
    in `order` (ties: as registered), coming up in reverse. If one fails before memory has moved, those that ran are
    undone by their counterparts (`transition.undo` is true) and its exception goes to the caller.
    """

    def __init__(self) -> None:
        self._hooks: dict[str, Hook] = {}

    def register(
        self,
        name: str,
        *,
        before_sleep: HookFunction | None = None,
        after_sleep: HookFunction | None = None,
        before_wake: HookFunction | None = None,
        after_wake: HookFunction | None = None,
        order: int = 0,
    ) -> None:
        """Adds a hook.

        Raises:
            InvalidArgument: the name is taken, empty or no string, no function is given, two for one way, one is not
                callable, or the order is no number.
        """
        given = [f for f in (before_sleep, after_sleep, before_wake, after_wake) if f is not None]
        if not isinstance(name, str):
            raise InvalidArgument(f"hook name {name!r} is no string")
        if isinstance(order, bool) or not isinstance(order, int | float):
            raise InvalidArgument(f"hook {name!r} has order={order!r}, which is no number")
        if not name or name in self._hooks:
            raise InvalidArgument(f"a hook needs a name of its own; {name!r} is {'taken' if name else 'empty'}")
        if not given or not all(callable(function) for function in given):
            raise InvalidArgument(f"hook {name!r} needs at least one function; it has {given}")
        if (before_sleep and after_sleep) or (before_wake and after_wake):
            raise InvalidArgument(f"hook {name!r} has two functions for one way; give at most one down and one up")
        self._hooks[name] = Hook(name, before_sleep, after_sleep, before_wake, after_wake, order)

    def unregister(self, name: str) -> None:
        """Removes a hook. Raises `InvalidArgument` if there is none of that name."""
        if self._hooks.pop(name, None) is None:
            raise InvalidArgument(f"no hook {name!r}; there are {sorted(self._hooks)}")

    def down(self) -> list[Hook]:
        """All hooks in the order of a sleep."""
        return sorted(self._hooks.values(), key=lambda hook: hook.order)
