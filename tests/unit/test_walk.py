"""walk(): what tensors an object holds, and by which path."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from cumem.errors import InvalidArgument
from cumem.walk import walk


def paths(obj):
    return [reached.path for reached in walk(obj).tensors]


class Wrapper(torch.Tensor):
    """A subclass that stands for two inner tensors."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, device=left.device)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Wrapper(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_module_gives_parameters_and_all_buffers_by_their_state_dict_names():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert paths(module) == [
        "0.weight",
        "0.bias",
        "0.scratch",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert [path for path, _ in walk(module).modules] == ["the object", "0", "1"]


def test_a_gradient_and_a_plain_attribute_are_not_reached():
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    module.scratch = torch.ones(3)
    assert paths(module) == ["weight", "bias"]


def test_a_scripted_module_gives_the_same_as_the_plain_one():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3)))
    assert paths(scripted) == ["0.weight", "0.bias"]


def test_a_tied_parameter_is_reached_once():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert paths(module) == ["0.weight"]


def test_an_optimizer_gives_its_parameters_and_its_bookkeeping_marked_as_such():
    module = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    marks = {reached.path: reached.bookkeeping for reached in walk(optimizer).tensors}
    assert marks == {
        "param_groups[0]['params'][0]": False,
        "param_groups[0]['lr']": True,
        "state[0]['step']": True,
        "state[0]['exp_avg']": True,
        "state[0]['exp_avg_sq']": True,
    }


def test_containers_are_reached_to_any_depth_with_their_paths():
    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Caches:
        key: torch.Tensor
        name: str
        rest: object

    def t():
        return torch.zeros(1)

    obj = {
        "list": [t(), (t(), 3, None, "text")],
        7: Pair(t(), deque([t()])),
        ("odd", "key"): frozenset([t()]),
        "caches": Caches(t(), "name", OrderedDict(x=t())),
    }
    assert paths(obj) == [
        "['list'][0]",
        "['list'][1][0]",
        "[7][0]",
        "[7][1][0]",
        "[2][0]",
        "['caches'].key",
        "['caches'].rest['x']",
    ]


def test_tensors_that_are_keys_are_reached():
    key = torch.zeros(1)
    assert [reached.tensor is key for reached in walk({key: 3}).tensors] == [True]


def test_an_iterator_and_a_view_of_a_dict_are_taken_as_lists():
    module = nn.Linear(2, 2)
    assert paths(module.parameters()) == ["[0]", "[1]"]
    assert paths(module.state_dict().values()) == ["[0]", "[1]"]


def test_cycles_end():
    ring: list[object] = [torch.zeros(1)]
    ring.append({"again": ring})
    module = nn.Linear(1, 1)
    module.register_module("myself", module)
    assert paths([ring, module]) == ["[0][0]", "[1].weight", "[1].bias"]


def test_nesting_deeper_than_the_recursion_limit_is_reached():
    obj: list[object] = [torch.zeros(1)]
    for _ in range(10_000):
        obj = [obj]
    assert len(walk(obj).tensors) == 1


def test_a_wrapper_subclass_stands_for_its_inner_tensors():
    left, right = torch.zeros(2), torch.ones(2)
    reached = walk([Wrapper(left, Wrapper(right, torch.ones(2)))]).tensors
    assert [(r.path, r.wrapped) for r in reached] == [
        ("[0].left", True),
        ("[0].right.left", True),
        ("[0].right.right", True),
    ]
    assert reached[0].tensor is left


@pytest.mark.parametrize(
    "obj", [None, 3, "text", torch.float32, object(), nn.Linear], ids=lambda obj: type(obj).__name__
)
def test_an_object_of_another_kind_is_refused_with_its_type(obj):
    with pytest.raises(InvalidArgument, match=f"a {type(obj).__name__} holds no tensors"):
        walk(obj)
