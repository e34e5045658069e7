"""Tensors straight from the core: empty, zeros, full, and what a tensor's memory is now."""

import gc
import threading

import pytest
import torch
from torch import nn

import cumem
from cumem.errors import AsleepError, InvalidArgument, StateError, Unsupported

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


@pytest.fixture
def allocator():
    with cumem.Allocator(driver="host") as made:
        yield made


def sevens(allocator, tag="t"):
    return allocator.full(3, 4, fill_value=7.0, tag=tag)


def sparse_over(values):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=True)


# --- making ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_gives_a_contiguous_tensor_of_every_dtype(allocator, dtype):
    t = allocator.empty(3, 5, dtype=dtype, tag="t")
    assert (t.shape, t.dtype, t.stride()) == ((3, 5), dtype, (5, 1))
    assert t.untyped_storage().nbytes() == 15 * dtype.itemsize
    assert allocator.tag_of(t) == "t"
    t.copy_(torch.ones(3, 5, dtype=dtype))
    assert torch.equal(t.view(torch.uint8), torch.ones(3, 5, dtype=dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_are_zero_bytes_in_every_dtype(allocator, dtype):
    t = allocator.zeros(2, 3, dtype=dtype, tag="t")
    assert bytes(t.view(torch.uint8).flatten().tolist()) == bytes(6 * dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_holds_the_value_in_every_dtype(allocator, dtype):
    t = allocator.full(4, fill_value=1, dtype=dtype, tag="t")
    assert torch.equal(t.view(torch.uint8), torch.ones(4, dtype=dtype).view(torch.uint8))


@pytest.mark.parametrize("shape", [(2, 3), ([2, 3],), ((2, 3),), (torch.Size([2, 3]),)], ids=repr)
def test_a_shape_is_integers_or_one_sequence_of_them(allocator, shape):
    assert allocator.empty(*shape, tag="t").shape == (2, 3)


def test_a_shape_of_nothing_is_a_scalar(allocator):
    assert allocator.full(fill_value=3.0, tag="t").item() == 3.0


def test_the_dtype_is_torchs_default_one(allocator):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert allocator.empty(1, tag="t").dtype == torch.float64
        assert allocator.zeros(1, tag="t").dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("value", [True, 7, 7.5, 1j], ids=repr)
def test_full_takes_the_dtype_that_torch_takes_for_the_value(allocator, value):
    assert allocator.full(2, fill_value=value, tag="t").dtype == torch.full((2,), value).dtype


@pytest.mark.parametrize("size", [(0,), (3, 0), (0, 2**62)], ids=repr)
def test_a_tensor_without_elements_is_native_and_on_the_right_device(allocator, size):
    t = allocator.empty(*size, tag="t")
    assert t.shape == size
    assert t.device.type == "cpu"
    assert allocator.tag_of(t) is None
    assert allocator.is_resident(t)


@pytest.mark.parametrize("size", [(-1,), (2, -3), (1.0,), ("4",), (None,), (True,), ([2], 3)], ids=repr)
def test_a_size_that_is_no_count_is_refused_with_its_value(allocator, size):
    bad = next(e for e in size if isinstance(e, bool) or not isinstance(e, int) or e < 0)
    with pytest.raises(InvalidArgument) as error:
        allocator.empty(*size, tag="t")
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("size", [(2**63,), (2**61,), (2**32, 2**32)], ids=repr)
def test_a_size_that_overflows_is_refused_with_its_bytes(allocator, size):
    with pytest.raises(InvalidArgument, match=r"\d{19,} bytes"):
        allocator.empty(*size, dtype=torch.float32, tag="t")


@pytest.mark.parametrize("dtype", ["float32", torch.quint8, 3], ids=repr)
def test_a_wrong_dtype_is_refused_with_its_value(allocator, dtype):
    for make in (allocator.empty, allocator.zeros):
        with pytest.raises(InvalidArgument) as error:
            make(2, dtype=dtype, tag="t")
        assert str(dtype) in str(error.value)


@pytest.mark.parametrize(("value", "dtype"), [(300, torch.uint8), ("3", None), (None, None), (1j, torch.float32)])
def test_a_fill_value_that_does_not_fit_is_refused(allocator, value, dtype):
    with pytest.raises(InvalidArgument) as error:
        allocator.full(2, fill_value=value, dtype=dtype, tag="t")
    assert repr(value) in str(error.value)


def test_tensors_made_in_inference_mode_are_ordinary_ones(allocator):
    with torch.inference_mode():
        made = [
            allocator.empty(2, tag="t"),
            allocator.zeros(2, tag="t"),
            sevens(allocator),
            allocator.empty(0, tag="t"),
        ]
    assert not any(t.is_inference() or t.requires_grad for t in made)
    made[0].requires_grad_().sum().backward()


def test_a_default_device_of_torch_has_no_say(allocator):
    with torch.device("meta"):
        assert sevens(allocator).sum().item() == 84


def test_two_tensors_do_not_overlap(allocator):
    made = [allocator.full(100, fill_value=float(n), tag="t") for n in range(20)]
    for n, t in enumerate(made):
        assert torch.equal(t, torch.full((100,), float(n)))


def test_a_segment_dies_with_the_last_view_of_its_tensor(allocator):
    t = allocator.empty(1 << 20, dtype=torch.uint8, tag="t")
    view = t[5:]
    del t
    gc.collect()
    assert allocator.stats().by_tag["t"].live_bytes >= 1 << 20
    del view
    gc.collect()
    assert allocator.stats().live_bytes == 0


def test_a_tensor_can_be_used_and_dropped_on_another_thread(allocator):
    box = [sevens(allocator)]

    def use():
        box.append(box.pop().sum().item())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert box == [84.0]


# --- what a tensor's memory is ---


def test_views_and_detached_copies_have_the_tag_of_their_tensor(allocator):
    t = sevens(allocator)
    for view in (t, t[1:], t.t(), t.detach(), t.view(-1)[3:3], nn.Parameter(t)):
        assert allocator.tag_of(view) == "t"
    assert allocator.tag_of(t.clone()) is None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("kind", ["dense", "no elements", "meta", "coo", "csr", "csc"])
def test_native_tensors_have_no_tag_and_are_always_resident(allocator, kind):
    native = {
        "dense": lambda: torch.ones(2),
        "no elements": lambda: torch.empty(0),
        "meta": lambda: torch.ones(2, device="meta"),
        "coo": lambda: torch.eye(2).to_sparse(),
        "csr": lambda: torch.eye(2).to_sparse_csr(),
        "csc": lambda: torch.eye(2).to_sparse_csc(),
    }[kind]()
    assert allocator.tag_of(native) is None
    assert allocator.is_resident(native)
    allocator.assert_resident(native)


def test_a_tensor_is_resident_until_its_tag_sleeps_and_after_it_woke(allocator):
    a, b = sevens(allocator, "a"), sevens(allocator, "b")
    allocator.sleep(tags=["a"])
    assert (allocator.is_resident(a), allocator.is_resident(b)) == (False, True)
    assert allocator.tag_of(a) == "a"
    allocator.wake_up()
    assert allocator.is_resident(a)
    assert torch.equal(a, torch.full((3, 4), 7.0))


def test_assert_resident_names_the_tag_and_the_tensor(allocator):
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(allocator.zeros(2, tag="biases"))
    allocator.assert_resident(module, module.bias, [module.weight])
    allocator.sleep()
    with pytest.raises(AsleepError, match=r"bias \(2,\) of tag 'biases' is asleep.*wake_up") as error:
        allocator.assert_resident(torch.ones(1), module)
    assert error.value.tag == "biases"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_sparse_tensor_over_managed_memory_is_as_resident_as_its_values(allocator):
    sparse = sparse_over(allocator.zeros(2, tag="values"))
    assert allocator.tag_of(sparse) == "values"
    allocator.sleep()
    assert not allocator.is_resident(sparse)


@pytest.mark.parametrize("bad", [None, 3, [1]], ids=repr)
def test_what_is_no_tensor_is_refused(allocator, bad):
    for ask in (allocator.tag_of, allocator.is_resident, allocator.host_view):
        with pytest.raises(InvalidArgument, match=f"expected a tensor, got a {type(bad).__name__}"):
            ask(bad)


# --- host_view ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_host_view_shows_the_contents_of_an_asleep_tensor(allocator, dtype):
    t = allocator.full(3, 4, fill_value=1, dtype=dtype, tag="t")
    allocator.sleep()
    view = allocator.host_view(t)
    assert (view.shape, view.stride(), view.dtype, view.device.type) == (t.shape, t.stride(), dtype, "cpu")
    assert torch.equal(view.view(torch.uint8), torch.ones(3, 4, dtype=dtype).view(torch.uint8))


def test_a_host_view_keeps_offsets_strides_and_lazy_conjugates(allocator):
    t = allocator.empty(4, 6, dtype=torch.complex64, tag="t")
    t.copy_(torch.arange(24).view(4, 6) * (1 + 2j))
    views = [t[1:3, ::2], t.t(), t[2], t[0, 0], t.conj(), t.conj().imag, t[:, :1].expand(4, 3), t[4:]]
    expected = [v.clone() for v in views]
    allocator.sleep()
    for view, value in zip(views, expected, strict=True):
        shown = allocator.host_view(view)
        assert (shown.shape, shown.stride()) == (view.shape, view.stride())
        assert torch.equal(shown, value)


def test_a_host_view_outlives_the_wake_and_the_tensor(allocator):
    t = sevens(allocator)
    allocator.sleep()
    view = allocator.host_view(t)
    allocator.wake_up()
    t.fill_(1.0)
    allocator.sleep()
    del t
    gc.collect()
    assert torch.equal(view, torch.full((3, 4), 7.0))


def test_a_host_view_of_resident_native_or_dropped_memory_is_refused(allocator):
    t = sevens(allocator)
    with pytest.raises(StateError, match="'t' is resident"):
        allocator.host_view(t)
    with pytest.raises(InvalidArgument, match="in no tag"):
        allocator.host_view(torch.ones(2))
    allocator.set_policy("dropped", "discard")
    gone = sevens(allocator, "dropped")
    allocator.sleep()
    with pytest.raises(StateError):
        allocator.host_view(gone)
    assert torch.equal(allocator.host_view(t), torch.full((3, 4), 7.0))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_host_view_of_a_sparse_tensor_is_refused(allocator):
    sparse = sparse_over(allocator.zeros(2, tag="values"))
    allocator.sleep()
    with pytest.raises(Unsupported, match="inner tensors"):
        allocator.host_view(sparse)
