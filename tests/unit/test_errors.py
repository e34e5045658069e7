"""Errors: one tree, typed fields, whole after a pickle, also from another process."""

import copy
import inspect
import multiprocessing
import pickle

import pytest

import cumem
from cumem import errors
from unit.machine import GRANULE, Sample, faulty_driver, small_allocator

CLASSES = [
    value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, errors.CumemError)
]
FAILED = errors.FailedSegment("weights", 7, 0x7000, 4096, 1, "map", "asleep", errors.OutOfDeviceMemory("full"))
VALUES = {
    "call": "cuMemCreate",
    "code": 2,
    "context_broken": False,
    "needed_bytes": 3 << 30,
    "free_bytes": 1 << 30,
    "device": 1,
    "tag": "weights",
    "idle_cache_bytes": 5,
    "known": ["a", "b"],
    "timeout_s": 0.5,
    "asleep": [1],
    "resident": [2],
    "lost": [3],
    "failed": [FAILED],
    "woken": ["a"],
    "first_exception": errors.DriverError("failed", call="cuMemMap", code=1),
    "rolled_back": True,
}


def made(cls, **fields):
    return cls("3 GiB needed, 1 GiB free", **fields)


def shown(value):
    """A value as something that can be compared: exceptions by class and text."""
    return repr(value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_comes_back_from_a_pickle_with_its_message_and_fields(cls, filled, protocol):
    error = made(cls, **({name: VALUES[name] for name in cls._fields} if filled else {}))
    for back in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is cls
        assert str(back) == str(error) == "3 GiB needed, 1 GiB free"
        assert back.args == error.args
        for name in cls._fields:
            assert shown(getattr(back, name)) == shown(getattr(error, name))
            assert filled or getattr(back, name) is None


def test_every_field_has_a_value_here_so_that_none_is_forgotten():
    assert {name for cls in CLASSES for name in cls._fields} <= set(VALUES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_a_cumem_error_with_documentation_and_no_unknown_fields(cls):
    assert issubclass(cls, RuntimeError)
    assert inspect.getdoc(cls)
    with pytest.raises(TypeError, match=r"no fields \['nonsense'\]"):
        cls("message", nonsense=1)


def test_errors_are_also_what_python_programs_catch():
    assert issubclass(cumem.OutOfDeviceMemory, MemoryError)
    assert issubclass(cumem.OutOfHostMemory, MemoryError)
    assert issubclass(cumem.UnknownTag, KeyError)
    assert issubclass(cumem.InvalidArgument, ValueError)
    assert issubclass(cumem.AsleepError, cumem.StateError)
    assert str(cumem.UnknownTag("no tag 'x'")) == "no tag 'x'", "KeyError shows its argument's repr"


def real_failure():
    driver = faulty_driver()
    allocator = small_allocator(driver)
    sample = Sample(allocator, "weights")
    allocator.sleep()
    driver.fail_at(0, only="create", code="out_of_device_memory")
    with pytest.raises(cumem.WakeUpPartialFailure) as caught:
        allocator.wake_up()
    return caught.value, sample


def test_a_partial_failure_can_be_retried_where_it_was_raised_and_not_where_it_was_unpickled():
    error, sample = real_failure()
    back = pickle.loads(pickle.dumps(error))
    assert (back.woken, back.rolled_back) == ([], False)
    assert [(f.tag, f.phase, f.state, f.size_bytes) for f in back.failed] == [("weights", "map", "asleep", GRANULE)]
    assert isinstance(back.first_exception, cumem.OutOfDeviceMemory)
    with pytest.raises(cumem.StateError, match=r"another process.*wake_up"):
        back.retry()
    assert error.retry().mapped_bytes == GRANULE
    sample.check()


def raise_in_child(cls, fields):
    raise made(cls, **fields)


def test_an_error_that_a_spawned_worker_raises_arrives_whole():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for cls in CLASSES:
            fields = {name: VALUES[name] for name in cls._fields}
            with pytest.raises(cls, match="3 GiB needed") as caught:
                pool.apply(raise_in_child, (cls, fields))
            assert type(caught.value) is cls
            for name, value in fields.items():
                assert shown(getattr(caught.value, name)) == shown(value)


def test_a_failed_segment_is_frozen():
    with pytest.raises(AttributeError):
        FAILED.tag = "other"
