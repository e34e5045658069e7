"""What tensors an object holds: modules, optimizers, tensor subclasses and nested containers, each tensor once."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cumem.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ["Reached", "Walk", "inner_tensors", "walk"]


@dataclass(frozen=True)
class Reached:
    """One tensor and how it was reached."""

    path: str
    tensor: Tensor
    wrapped: bool  # the inner tensor of a subclass
    bookkeeping: bool  # an optimizer's own: its state or a tensor hyperparameter, not a parameter


@dataclass
class Walk:
    """All that an object holds, in the order in which it holds it."""

    tensors: list[Reached] = field(default_factory=list)
    modules: list[tuple[str, Module]] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    path: str
    value: object
    wrapped: bool = False
    bookkeeping: bool = False

    def to(self, suffix: str, value: object, *, wrapped: bool = False, bookkeeping: bool = False) -> _Step:
        return _Step(self.path + suffix, value, self.wrapped or wrapped, self.bookkeeping or bookkeeping)


def walk(obj: object) -> Walk:
    """Reaches every tensor in `obj`.

    `obj`: a tensor, a `torch.nn.Module` (parameters and all buffers, gradients not), a `torch.optim.Optimizer` (its
    parameters, state and tensor hyperparameters), a mapping, list, tuple, set, deque or dataclass of such things to any
    depth, or an iterator over them (`module.parameters()`), which is consumed. Inside a container what holds no tensors
    is passed over; cycles end. A wrapper subclass (`__tensor_flatten__`, as DTensor) stands for its inner tensors.

    Raises:
        InvalidArgument: `obj` itself is none of these. Nothing changed.
    """
    found = Walk()
    if isinstance(obj, (Iterator, ValuesView, ItemsView)):
        obj = list(obj)
    seen: dict[int, object] = {}  # keeps what it names alive: ids of the dead are used again
    stack = [_Step("", obj)]
    while stack:
        step = stack.pop()
        if id(step.value) in seen:
            continue
        children = _visit(step, found)
        if children is None:
            if step.value is obj:
                raise InvalidArgument(
                    f"a {type(obj).__name__} holds no tensors that can be reached: give a module, an optimizer, "
                    "a tensor, or a list, dict or dataclass of them"
                )
            continue
        seen[id(step.value)] = step.value
        stack.extend(reversed(children))
    return found


def inner_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that a wrapper subclass stands for, by attribute; empty for a tensor that has memory of its own."""
    import torch

    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten(tensor)
    values = [(name, getattr(tensor, name)) for name in names]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def _visit(step: _Step, found: Walk) -> list[_Step] | None:
    """Notes a tensor or module; the steps to what `step` holds, or None where that is nothing we know."""
    import torch

    value = step.value
    if isinstance(value, torch.Tensor):
        inner = inner_tensors(value)
        if not inner:
            found.tensors.append(Reached(_name(step.path), value, step.wrapped, step.bookkeeping))
        return [step.to(f".{name}", tensor, wrapped=True) for name, tensor in inner]
    if isinstance(value, torch.nn.Module):
        found.modules.append((_name(step.path), value))
        registered = (value._parameters, value._buffers, value._modules)
        return [step.to(f".{name}", child) for held in registered for name, child in held.items()]
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_steps(step, value)
    return _container_steps(step, value)


def _optimizer_steps(step: _Step, optimizer: Optimizer) -> list[_Step]:
    steps = []
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            suffix = f".param_groups[{number}][{key!r}]"
            steps.append(step.to(suffix, value, bookkeeping=key != "params"))
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        steps.append(step.to(f".state.keys[{number}]", parameter))
        steps.append(step.to(f".state[{number}]", state, bookkeeping=True))
    return steps


def _container_steps(step: _Step, value: object) -> list[_Step] | None:
    import torch

    if isinstance(value, Mapping):
        keys = [step.to(f".keys[{n}]", key) for n, key in enumerate(value) if isinstance(key, torch.Tensor)]
        return keys + [step.to(f"[{_key(key, n)}]", value[key]) for n, key in enumerate(value)]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [step.to(f"[{n}]", item) for n, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return [step.to(f".{name}", getattr(value, name)) for name in names]
    return None


def _key(key: Any, number: int) -> str:
    return repr(key) if isinstance(key, (str, int)) else str(number)


def _name(path: str) -> str:
    return path.removeprefix(".") or "the object"
