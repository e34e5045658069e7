"""Hooks that say when they ran: what the tests of hooks share."""

from unit.machine import Sample, small_allocator

SPOTS = ("before_sleep", "after_sleep", "before_wake", "after_wake")


class HookLog:
    """A line for each call: "name spot", with "undo" behind it where the hook was told to undo."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.lines = []
        self.told = []

    def add(self, name, *spots, order=0, fails=None, error=ValueError):
        def at(spot):
            def function(transition):
                self.lines.append(f"{name} {spot}{' undo' if transition.undo else ''}")
                self.told.append(transition)
                if spot == fails:
                    raise error(f"{name} fails")

            return function

        self.allocator.hooks.register(name, order=order, **{spot: at(spot) for spot in spots})

    def take(self):
        lines, self.lines = self.lines, []
        return lines


def with_log(driver=None):
    """An allocator, a sample in "weights", and the log."""
    allocator = small_allocator(driver)
    return allocator, Sample(allocator, "weights"), HookLog(allocator)
