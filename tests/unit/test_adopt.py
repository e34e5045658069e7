"""adopt(): existing tensors move into a tag and keep identities, ties, views and contents, by both routes of torch."""

import gc
import importlib
import mmap
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import cumem
from cumem import storages
from cumem.errors import AsleepError, InvalidArgument

adopt_module = importlib.import_module("cumem.adopt")  # the package's attribute of that name is the function


@pytest.fixture
def allocator():
    with cumem.Allocator(driver="host") as made:
        yield made


@pytest.fixture(params=["swap", "assign"], autouse=True)
def route(request, monkeypatch):
    """Both ways to replace memory: in place where torch can, else by assigning to every tensor."""
    if request.param == "assign":
        monkeypatch.setattr(storages, "can_swap", lambda: False)
    elif not storages.can_swap():
        pytest.skip("this torch cannot swap the memory of storages")
    return request.param


def model():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False))
    module[0].register_buffer("scratch", torch.randn(3), persistent=False)
    return module


def contents(module):
    return {name: t.detach().clone() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def assert_same(module, expected):
    now = contents(module)
    assert now.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(now[name], value), name


def address_is_aligned(t):
    return t.untyped_storage().data_ptr() % 512 == 0


# --- modules ---


def test_a_module_moves_whole_and_keeps_its_tensors(allocator):
    module = model()
    objects = {name: id(p) for name, p in module.named_parameters()}
    before, grads = contents(module), {n: p.requires_grad for n, p in module.named_parameters()}
    report = allocator.adopt(module, tag="weights")
    assert {name: id(p) for name, p in module.named_parameters()} == objects
    assert {n: p.requires_grad for n, p in module.named_parameters()} == grads
    assert_same(module, before)
    moved = [*module.parameters(), *module.buffers()]
    assert {allocator.tag_of(t) for t in moved} == {"weights"}
    assert all(address_is_aligned(t) for t in moved)
    assert (report.tensors, report.storages, report.already, report.segments) == (9, 9, 0, 1)
    assert report.bytes == sum(t.untyped_storage().nbytes() for t in moved)


def test_an_adopted_module_sleeps_and_wakes_with_its_contents(allocator):
    module = model()
    before = contents(module)
    allocator.adopt(module, tag="weights")
    allocator.sleep()
    assert not any(allocator.is_resident(p) for p in module.parameters())
    allocator.wake_up()
    assert_same(module, before)


def test_an_adopted_module_trains_as_its_twin_does(allocator):
    module, twin = model(), model()
    twin.load_state_dict(module.state_dict())
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (module, twin)]
    for step in range(6):
        if step == 2:
            allocator.adopt(pairs[0], tag="training")
        if step == 4:
            allocator.sleep()
            allocator.wake_up()
        for net, optimizer in pairs:
            optimizer.zero_grad()
            net(torch.full((4, 8), float(step)) + torch.arange(4.0)[:, None]).square().sum().backward()
            optimizer.step()
    assert_same(module, contents(twin))


def test_a_module_can_be_saved_loaded_and_copied_afterwards(allocator, tmp_path):
    module = model()
    before = contents(module)
    allocator.adopt(module, tag="weights")
    torch.save(module.state_dict(), tmp_path / "m.pt")
    module.load_state_dict({k: torch.zeros_like(v) for k, v in module.state_dict().items()})
    assert {allocator.tag_of(p) for p in module.parameters()} == {"weights"}
    module.load_state_dict(torch.load(tmp_path / "m.pt"))
    assert_same(module, before)


def test_a_dead_module_gives_its_memory_back(allocator):
    module = model()
    allocator.adopt(module, tag="weights")
    del module
    gc.collect()
    assert allocator.stats().live_bytes == 0


class Witness(bytearray):
    """Memory for a tensor; a weak reference shows when it goes."""

    @classmethod
    def tensor(cls, nbytes):
        buffer = cls(nbytes)
        return torch.frombuffer(buffer, dtype=torch.uint8), weakref.ref(buffer)


def test_the_old_memory_of_a_group_is_dropped_before_the_next_one_moves(allocator, monkeypatch):
    monkeypatch.setattr(adopt_module, "GROUP_BYTES", 1024)
    made = [Witness.tensor(512) for _ in range(6)]
    real, alive = adopt_module._move_group, []

    def counted(*args):
        alive.append(sum(seen() is not None for _, seen in made))
        return real(*args)

    monkeypatch.setattr(adopt_module, "_move_group", counted)
    allocator.adopt([t for t, _ in made], tag="t")
    assert alive == [6, 4, 2]
    assert not any(seen() for _, seen in made)
    assert all(t.sum().item() == 0 for t, _ in made)


def test_a_subclass_that_handles_no_torch_function_moves(allocator):
    class Closed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    t = torch.Tensor._make_subclass(Closed, torch.arange(3.0))
    allocator.adopt([t], tag="t")
    assert allocator.tag_of(t) == "t"
    allocator.sleep()
    assert not allocator.is_resident(t)
    assert allocator.host_view(t).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(AsleepError, match=r"\(3,\) of tag 't' is asleep"):
        allocator.assert_resident(t)


def test_a_recurrent_module_with_its_flat_list_of_weights_moves(allocator):
    module = nn.LSTM(4, 8, num_layers=2)
    x = torch.randn(3, 1, 4)
    before = module(x)[0]
    allocator.adopt(module, tag="weights")
    assert torch.equal(module(x)[0], before)


# --- what shares memory goes on sharing it ---


def test_ties_stay_ties(allocator):
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    module[1].weight = module[0].weight
    module[1].register_buffer("alias", module[0].weight.detach())
    report = allocator.adopt(module, tag="weights")
    assert module[1].weight is module[0].weight
    assert module[1].alias.data_ptr() == module[0].weight.data_ptr()
    assert (report.tensors, report.storages) == (2, 1)
    with torch.no_grad():
        module[0].weight[3] = 5.0
    assert torch.equal(module[1].alias[3], torch.full((4,), 5.0))


def test_views_and_strides_stay_as_they_are(allocator):
    whole = torch.arange(24.0).view(4, 6)
    views = {
        "whole": whole,
        "row": whole[2],
        "turned": whole.t(),
        "steps": whole[1:3, ::2],
        "wide": whole[:, :1].expand(4, 5),
    }
    expected = {name: (v.clone(), v.stride(), v.storage_offset()) for name, v in views.items()}
    report = allocator.adopt(views, tag="t")
    assert report.storages == 1
    for name, (value, stride, offset) in expected.items():
        assert torch.equal(views[name], value)
        assert (views[name].stride(), views[name].storage_offset()) == (stride, offset)
    whole.fill_(9.0)
    assert all((v == 9.0).all() for v in views.values())


def test_a_view_moves_with_the_whole_storage_of_its_base(allocator):
    view = torch.arange(1000.0)[500:502]  # autograd's hold on the base is the only one left
    report = allocator.adopt(view, tag="t")
    assert (report.tensors, report.bytes) == (1, 4000)
    assert view.tolist() == [500.0, 501.0]
    view.add_(1)
    assert view._base[500:502].tolist() == [501.0, 502.0]


def test_a_channels_last_tensor_stays_channels_last(allocator):
    t = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = t.clone()
    allocator.adopt(t, tag="t")
    assert t.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(t, value)


def test_lazy_conjugates_and_negatives_keep_their_values(allocator):
    t, real = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    views = [t, t.conj(), torch._neg_view(real)]
    values = [v.resolve_conj().resolve_neg().clone() for v in views]
    allocator.adopt(views, tag="t")
    for view, value in zip(views, values, strict=True):
        assert torch.equal(view, value)
    assert views[1].is_conj()
    assert views[2].is_neg()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.int8], ids=str
)
def test_every_dtype_moves(allocator, dtype):
    t = torch.ones(7, dtype=dtype)
    allocator.adopt(t, tag="t")
    assert t.dtype == dtype
    assert torch.equal(t.view(torch.uint8), torch.ones(7, dtype=dtype).view(torch.uint8))


# --- autograd ---


def test_version_counters_and_hooks_are_kept(allocator):
    p = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        p.add_(1)
    fired = []
    p.register_hook(fired.append)
    version = p._version
    allocator.adopt(p, tag="t")
    assert p._version == version
    p.sum().backward()
    assert len(fired) == 1


def test_a_backward_over_tensors_saved_before_is_right(allocator):
    p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    loss = (p * p).sum()
    allocator.adopt(p, tag="t")
    loss.backward()
    assert p.grad.tolist() == [2.0, 4.0, 6.0]


def test_a_non_leaf_keeps_its_graph(allocator):
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    y = p * 3
    allocator.adopt(y, tag="t")
    assert allocator.tag_of(y) == "t"
    assert y.requires_grad
    y.square().sum().backward()
    assert p.grad.tolist() == [18.0, 36.0]


def test_a_gradient_stays_native(allocator):
    p = nn.Parameter(torch.ones(3))
    p.sum().backward()
    allocator.adopt(p, tag="t")
    assert allocator.tag_of(p.grad) is None
    assert p.grad.tolist() == [1.0, 1.0, 1.0]


def test_adopt_works_inside_inference_mode_and_under_a_default_device(allocator):
    module = nn.Linear(2, 2)
    with torch.inference_mode(), torch.device("meta"):
        allocator.adopt(module, tag="t")
    assert not module.weight.is_inference()
    module(torch.ones(1, 2)).sum().backward()


# --- optimizers and containers ---


def test_an_optimizer_alone_takes_its_parameters_along(allocator):
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    report = allocator.adopt(optimizer, tag="t")
    assert report.tensors == 4
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert {allocator.tag_of(t) for t in [*module.parameters(), *states]} == {"t"}
    optimizer.step()


def test_nested_containers_keep_their_structure(allocator):
    @dataclass
    class Cache:
        key: torch.Tensor
        steps: int

    shared = torch.arange(3.0)
    obj = {"a": [shared, (shared[1:], 5)], "b": OrderedDict(c=Cache(torch.ones(2), 3)), "n": None}
    inner = obj["a"]
    report = allocator.adopt(obj, tag="t")
    assert (report.tensors, report.storages) == (3, 2)
    assert obj["a"] is inner
    assert obj["a"][1][0].data_ptr() == shared.data_ptr() + 4
    assert allocator.tag_of(obj["b"]["c"].key) == "t"


def test_the_iterator_of_parameters_is_adopted(allocator):
    module = model()
    assert allocator.adopt(module.parameters(), tag="t").tensors == 5
    assert {allocator.tag_of(b) for b in module.buffers()} == {None}


@pytest.mark.parametrize(
    "obj", [nn.ReLU(), [], {"a": 3}, torch.optim, "weights", None], ids=lambda obj: type(obj).__name__
)
def test_an_object_without_tensors_is_refused(allocator, obj):
    with pytest.raises(InvalidArgument, match="holds no tensors"):
        allocator.adopt(obj, tag="t")


def test_empty_tensors_are_passed_over(allocator):
    t = torch.empty(0, 3)
    report = allocator.adopt([t, torch.ones(2)], tag="t")
    assert (report.tensors, report.storages) == (2, 1)
    assert t.shape == (0, 3)


def test_what_is_in_the_tag_already_stays_where_it_is(allocator):
    module = model()
    first = allocator.adopt(module[0], tag="weights")
    before = {name: t.data_ptr() for name, t in module[0].named_parameters()}
    second = allocator.adopt(module, tag="weights")
    assert (second.already, second.storages) == (first.tensors, 9 - first.storages)
    assert {name: t.data_ptr() for name, t in module[0].named_parameters()} == before
    third = allocator.adopt(module, tag="weights")
    assert (third.already, third.storages, third.bytes, third.segments, third.peak_extra_bytes) == (9, 0, 0, 0, 0)


def test_adopting_into_a_tag_that_sleeps_gives_resident_memory(allocator):
    first, second = torch.ones(3), torch.full((3,), 2.0)
    allocator.adopt(first, tag="t")
    allocator.sleep()
    allocator.adopt([first, second], tag="t")
    assert (allocator.is_resident(first), allocator.is_resident(second)) == (False, True)
    allocator.wake_up()
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)


# --- memory that is not torch's ---


def test_memory_of_numpy_is_copied_in_and_no_longer_shared(allocator):
    array = np.arange(4, dtype=np.float32)
    t = torch.from_numpy(array)
    allocator.adopt(t, tag="t")
    array[:] = 9
    assert t.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_shared_and_mapped_memory_is_copied_in(allocator, tmp_path):
    shared = torch.arange(4.0).share_memory_()
    path = tmp_path / "mapped.bin"
    path.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    with path.open("r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32)
    allocator.adopt([shared, mapped], tag="t")
    assert shared.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert mapped.sum().item() == 1023 * 512
    assert not shared.is_shared()


# --- groups ---


def test_storages_are_packed_in_groups_and_larger_ones_stand_alone(allocator, monkeypatch):
    monkeypatch.setattr(adopt_module, "GROUP_BYTES", 4096)
    kib = [1, 2, 9, 1, 1, 5, 2]  # groups: 1+2+1, 9, 1+2, 5
    made = [torch.full((256 * n,), float(n)) for n in kib]
    report = allocator.adopt(made, tag="t")
    assert report.segments == 4
    assert [t.unique().tolist() for t in made] == [[float(n)] for n in kib]
    at = [t.data_ptr() for t in made]
    assert (at[1] - at[0], at[3] - at[1], at[6] - at[4]) == (1024, 2048, 1024)


def test_blocks_are_padded_to_512_bytes_and_do_not_overlap(allocator):
    made = [torch.full((n,), n % 256, dtype=torch.uint8) for n in (1, 511, 512, 513, 3)]
    allocator.adopt(made, tag="t")
    at = [t.data_ptr() - made[0].data_ptr() for t in made]
    assert at == [0, 512, 1024, 1536, 2560]
    for t in made:
        assert t.unique().tolist() == [t.numel() % 256]


def test_the_extra_memory_is_that_of_one_group(allocator, monkeypatch):
    group = 8 << 20
    monkeypatch.setattr(adopt_module, "GROUP_BYTES", group)
    made = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(40)]
    report = allocator.adopt(made, tag="t")
    assert report.segments == 5
    assert report.bytes == 40 << 20
    assert report.peak_extra_bytes == group


def test_the_group_size_is_512_mib():
    assert adopt_module.GROUP_BYTES == 512 * 1024 * 1024
