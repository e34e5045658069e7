"""What adopt() plans for CPU tensors where the allocator's memory is a device's. No device is needed to plan."""

import importlib
import types

import pytest
import torch
from torch import nn

from cumem.errors import InvalidArgument, Unsupported
from cumem.walk import walk

adopt_module = importlib.import_module("cumem.adopt")  # the package's attribute of that name is the function


def device_index(device):
    raise InvalidArgument(f"device {device} is not this allocator's")


MEMORY = types.SimpleNamespace(
    device_type="cuda",
    default_device=3,
    device_index=device_index,
    core=types.SimpleNamespace(find=lambda address: None),
)


def plan(obj):
    return adopt_module._plan(MEMORY, walk(obj), "t")[0]


def test_cpu_tensors_go_to_the_allocators_device_by_assigning():
    moves = plan(nn.Linear(2, 2))
    assert [(m.device, m.crossing, m.swap, m.freed_bytes) for m in moves] == [(3, True, False, 0)] * 2


def test_an_optimizers_step_counts_and_tensor_hyperparameters_stay_on_the_cpu():
    module = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert [m.viewed.path for m in plan(optimizer)] == [
        "param_groups[0]['params'][0]",
        "state[0]['exp_avg']",
        "state[0]['exp_avg_sq']",
    ]


def test_a_scalar_parameter_is_moved():
    scale = nn.Parameter(torch.tensor(1.0))
    assert len(plan(torch.optim.SGD([scale]))) == 1


def test_a_gradient_that_would_stay_behind_is_refused():
    p = nn.Parameter(torch.ones(2))
    p.sum().backward()
    with pytest.raises(Unsupported, match=r"^\[0\] has a gradient on the CPU.*set_to_none=True"):
        plan([p])
    p.grad = None
    assert len(plan([p])) == 1


def test_a_graph_that_would_stay_behind_is_refused():
    y = nn.Parameter(torch.ones(2)) * 2
    with pytest.raises(Unsupported, match=r"^\[0\] is part of an autograd graph on the CPU"):
        plan([y])


def test_an_unreached_alias_is_refused():
    p = nn.Parameter(torch.ones(2))
    kept = p.detach()
    with pytest.raises(Unsupported, match="1 more object"):
        plan([p])
    assert len(plan([p, kept])) == 1


def test_the_inner_tensors_of_a_subclass_are_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    with pytest.raises(Unsupported, match=r"^\['w'\]\.inner is inside a tensor subclass on the CPU"):
        plan({"w": Wrapper(torch.ones(2))})
