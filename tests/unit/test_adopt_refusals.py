"""adopt() says no before anything moves, names the tensor, and leaves all as it was."""

import copy
import gc

import pytest
import torch
from torch import nn

import cumem
from cumem import storages
from cumem.errors import StateError, Unsupported


@pytest.fixture
def allocator():
    with cumem.Allocator(driver="host") as made:
        yield made


def use_assign(monkeypatch):
    monkeypatch.setattr(storages, "can_swap", lambda: False)


@pytest.fixture
def assign(monkeypatch):
    """The route of torch before 2.12: `.data =` on each tensor that is known."""
    use_assign(monkeypatch)


@pytest.fixture
def swap():
    if not storages.can_swap():
        pytest.skip("this torch cannot swap the memory of storages")


@pytest.fixture(params=["swap", "assign"])
def either(request):
    request.getfixturevalue(request.param)


def assert_refuses(allocator, bad, path):
    """`bad` beside a good tensor: the error names `path`, and the good one was not moved."""
    good = torch.ones(3)
    at = good.data_ptr()
    with pytest.raises(Unsupported) as error:
        allocator.adopt({"good": good, "bad": bad}, tag="t")
    assert str(error.value).startswith(path), error.value
    assert good.data_ptr() == at
    assert allocator.stats().virtual_bytes == 0
    return str(error.value)


# --- kinds of tensors ---


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: some of these are in beta, others on their way out
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.nn.LazyLinear(3).weight, "not initialised"),
        (lambda: torch._efficientzerotensor(3), "lazy zero"),
    ],
    ids=["coo", "csr", "nested", "quantized", "meta", "lazy module", "lazy zero"],
)
def test_a_tensor_without_strided_memory_is_refused_by_its_path(allocator, either, make, says):
    assert says in assert_refuses(allocator, make(), "['bad']")


def test_a_fake_tensor_is_refused(allocator, either):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    assert "FakeTensor" in assert_refuses(allocator, fake, "['bad']")


def test_the_path_in_a_module_is_its_state_dict_name(allocator, either):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert_refuses(allocator, module, "['bad'].1.weight")
    with pytest.raises(Unsupported, match=r"^1\.weight is a"):
        allocator.adopt(module, tag="t")


def test_an_inference_tensor_moves_by_swap_and_is_refused_otherwise(allocator, monkeypatch):
    with torch.inference_mode():
        t = torch.arange(3.0)
    use_assign(monkeypatch)
    assert "inference tensor" in assert_refuses(allocator, t, "['bad']")
    monkeypatch.undo()
    if storages.can_swap():
        allocator.adopt(t, tag="t")
        assert t.is_inference()
        assert t.tolist() == [0.0, 1.0, 2.0]
        assert allocator.tag_of(t) == "t"


def test_a_tensor_with_named_dimensions_is_refused_where_they_would_be_lost(allocator, assign):
    if not hasattr(torch.Tensor, "names"):
        pytest.skip("this torch has no named tensors")
    t = torch.zeros(2)
    with pytest.warns(UserWarning, match="Named tensors"):
        t.names = ("a",)
    assert "named dimensions" in assert_refuses(allocator, t, "['bad']")


def test_two_storages_over_the_same_bytes_are_refused(allocator, either):
    array = torch.zeros(4).numpy()
    message = assert_refuses(allocator, [torch.from_numpy(array), torch.from_numpy(array[1:])], "['bad'][0]")
    assert "['bad'][1] share memory" in message


# --- tags ---


def test_a_tensor_of_another_tag_is_refused_with_both_tags(allocator, either):
    module = nn.Linear(2, 2)
    other = nn.Parameter(allocator.zeros(2, tag="kv_cache"))
    module.bias = other
    at = module.weight.data_ptr()
    with pytest.raises(StateError, match=r"bias is in tag 'kv_cache' and cannot be moved to 'weights'"):
        allocator.adopt(module, tag="weights")
    assert module.weight.data_ptr() == at
    assert allocator.tag_of(other) == "kv_cache"


# --- aliases that were not reached ---

ALIASES = {
    "a view": lambda p: p[1:],
    "a detached copy": lambda p: p.detach(),
    "a .data": lambda p: p.data,
    "a numpy array": lambda p: p.detach().numpy(),
    "a storage": lambda p: p.untyped_storage(),
    "a state dict": lambda p: {"weight": p.detach()},
    "a saved tensor": lambda p: (p.detach() * 1, p.view(-1).exp()),
}


@pytest.mark.parametrize("kind", ["a view", "a detached copy", "a .data", "a numpy array", "a storage", "a state dict"])
def test_an_alias_that_was_not_reached_is_refused_where_it_would_part(allocator, assign, kind):
    p = nn.Parameter(torch.arange(4.0))
    kept = ALIASES[kind](p)
    message = assert_refuses(allocator, p, "['bad']")
    assert "1 more object(s)" in message
    del kept
    allocator.adopt(p, tag="t")
    assert p.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_alias_that_was_not_reached_follows_a_swap(allocator, swap):
    p = nn.Parameter(torch.arange(4.0))
    kept = {kind: alias(p) for kind, alias in ALIASES.items() if kind in ("a view", "a detached copy", "a .data")}
    allocator.adopt(p, tag="t")
    with torch.no_grad():
        p.add_(10)
    assert kept["a view"].tolist() == [11.0, 12.0, 13.0]
    assert kept["a detached copy"].tolist() == kept["a .data"].tolist() == [10.0, 11.0, 12.0, 13.0]


def test_an_output_that_autograd_saved_follows_a_swap_and_is_refused_otherwise(allocator, monkeypatch):
    p = nn.Parameter(torch.zeros(2))
    y = p.exp()  # saved for the backward, through an alias of its own
    use_assign(monkeypatch)
    assert_refuses(allocator, y, "['bad']")
    monkeypatch.undo()
    if storages.can_swap():
        allocator.adopt(y, tag="t")
        y.sum().backward()
        assert p.grad.tolist() == [1.0, 1.0]


def test_an_alias_that_is_reached_in_the_same_call_is_none(allocator, assign):
    module = nn.Linear(2, 2)
    state = module.state_dict()
    report = allocator.adopt([module, state], tag="t")
    assert (report.tensors, report.storages) == (4, 2)
    assert state["weight"].data_ptr() == module.weight.data_ptr()


def test_an_alias_in_a_dead_cycle_is_none(allocator, assign):
    p = nn.Parameter(torch.arange(4.0))
    gc.collect()
    gc.disable()
    try:
        ring: list[object] = [p[1:]]
        ring.append(ring)
        del ring
        allocator.adopt(p, tag="t")
    finally:
        gc.enable()
    assert p.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_deep_copy_is_no_alias(allocator, assign):
    module = nn.Linear(2, 2)
    twin = copy.deepcopy(module)
    allocator.adopt(module, tag="t")
    assert allocator.tag_of(twin.weight) is None


# --- FSDP ---


@pytest.fixture
def process_group():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_module_that_fsdp2_manages_is_refused(allocator, either, process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    for managed in (module, module[0]):
        with pytest.raises(Unsupported, match="managed by FSDP"):
            allocator.adopt(managed, tag="t")


def test_a_flat_parameter_of_fsdp1_is_refused(allocator, either):
    from torch.distributed.fsdp._flat_param import FlatParameter

    flat = torch.zeros(4)
    flat._is_flat_param = True
    assert isinstance(flat, FlatParameter)
    assert "flat parameter of FSDP" in assert_refuses(allocator, flat, "['bad']")


def test_the_local_tensor_of_a_dtensor_moves(allocator, either, process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    distributed = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)])
    allocator.adopt(distributed, tag="t")
    assert allocator.tag_of(distributed) == "t"
    assert distributed.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    allocator.sleep()
    assert not allocator.is_resident(distributed)
    with pytest.raises(Unsupported, match="inner tensors"):
        allocator.host_view(distributed)
