"""What `sleep(keep=...)` names: the bytes that are saved even inside a dropped tag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["AddressRun", "address_runs"]


@dataclass(frozen=True)
class AddressRun:
    """`length` bytes from a device address."""

    address: int
    length: int


def _tensors(keep: Iterable[Any]) -> Iterator[torch.Tensor]:
    import torch

    from .walk import inner_tensors

    for item in keep:
        if isinstance(item, torch.nn.Module):
            yield from item.buffers()
        elif not isinstance(item, torch.Tensor):
            raise InvalidArgument(f"keep takes tensors and modules, not {type(item).__name__}: {item!r}")
        elif inner := inner_tensors(item):
            yield from _tensors(tensor for _, tensor in inner)
        else:
            yield item


def _listed(keep: Any) -> list[Any]:
    import torch

    if isinstance(keep, torch.Tensor | torch.nn.Module) or not isinstance(keep, Iterable):
        raise InvalidArgument(
            f"keep takes a list of tensors and modules, not a {type(keep).__name__}: put it in a list"
        )
    return list(keep)


def address_runs(keep: Iterable[Any]) -> list[AddressRun]:
    """The memory that these tensors, and these modules' buffers, can address.

    Memory that is not asleep afterwards (native, or of a tag that is not put to sleep) needs no saving; it is ignored.

    Raises:
        InvalidArgument: something else than a list of tensors and modules; nothing changed.
    """
    if isinstance(keep, tuple | list) and not keep:
        return []
    items = _listed(keep)
    runs = []
    for tensor in _tensors(items):
        if tensor.numel() > 0:
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            runs.append(AddressRun(tensor.data_ptr(), span * tensor.element_size()))
    return runs
