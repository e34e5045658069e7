"""What the environment sets, and the choice of driver."""

import pytest

import cumem
from cumem import _core
from unit.machine import GRANULE, Sample, faulty_driver

VARIABLES = ("CUMEM_DRIVER", "CUMEM_DEVICE_TIMEOUT", "CUMEM_HOST_DEVICES", "CUMEM_HOST_DEVICE_BYTES")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    def refuse():
        raise cumem.Unsupported("there is no libcuda.so.1")

    monkeypatch.setattr(_core, "cuda_driver", refuse)


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose "cuda" driver is an emulated one with a single device."""
    monkeypatch.setattr(_core, "cuda_driver", lambda: _core.host_driver(device_count=1))


# --- the driver ---


def test_auto_is_cuda_where_a_gpu_is(gpu):
    assert cumem.Allocator()._memory.driver.device_count() == 1


def test_auto_is_the_host_driver_where_no_gpu_is(no_gpu):
    assert cumem.Allocator().driver_name == "host"


def test_cuda_where_no_gpu_is_says_what_is_missing(no_gpu, monkeypatch):
    with pytest.raises(cumem.Unsupported, match="libcuda"):
        cumem.Allocator(driver="cuda")
    monkeypatch.setenv("CUMEM_DRIVER", "cuda")
    with pytest.raises(cumem.Unsupported, match="libcuda"):
        cumem.Allocator()


def test_the_environment_decides_what_auto_is_and_an_argument_goes_before_it(gpu, monkeypatch):
    monkeypatch.setenv("CUMEM_DRIVER", "host")
    monkeypatch.setenv("CUMEM_HOST_DEVICES", "3")
    assert cumem.Allocator()._memory.driver.device_count() == 3
    assert cumem.Allocator(driver="cuda")._memory.driver.device_count() == 1
    monkeypatch.setenv("CUMEM_DRIVER", "cuda")
    assert cumem.Allocator()._memory.driver.device_count() == 1
    assert cumem.Allocator(driver="host")._memory.driver.device_count() == 3


@pytest.mark.parametrize("value", ["metal", "", "HOST", "host "])
def test_an_unknown_driver_in_the_environment_is_refused_with_its_value(value, monkeypatch):
    monkeypatch.setenv("CUMEM_DRIVER", value)
    with pytest.raises(cumem.InvalidArgument, match=f"'{value}'"):
        cumem.Allocator()
    assert cumem.Allocator(driver="host").driver_name == "host"


def test_a_driver_object_is_taken_as_it_is():
    driver = faulty_driver()
    allocator = cumem.Allocator(driver=driver)
    Sample(allocator, "weights").check()
    assert "create" in driver.calls


def test_each_host_driver_has_devices_of_its_own():
    first, second = cumem.Allocator(driver="host"), cumem.Allocator(driver="host")
    sample = Sample(first, "weights")
    free, total = second.driver_memory()
    assert free == total
    sample.check()


# --- numbers ---


def test_the_emulated_devices_are_as_many_and_as_large_as_the_environment_says(monkeypatch):
    monkeypatch.setenv("CUMEM_HOST_DEVICES", "4")
    monkeypatch.setenv("CUMEM_HOST_DEVICE_BYTES", str(16 << 20))
    allocator = cumem.Allocator(driver="host", device=3)
    assert allocator.driver_memory() == (16 << 20, 16 << 20)
    with pytest.raises(cumem.InvalidArgument, match="devices 0 to 3"):
        allocator.driver_memory(4)
    with pytest.raises(cumem.OutOfDeviceMemory):
        Sample(allocator, "weights", (18 << 20) / GRANULE)


@pytest.mark.parametrize("name", VARIABLES[2:])
@pytest.mark.parametrize("value", ["0", "-1", "many", "", "inf", "nan", "1.5", "1e40"])
def test_a_number_that_makes_no_sense_is_refused_with_its_name_and_value(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(cumem.InvalidArgument, match=f"{name}='{value}'"):
        cumem.Allocator(driver="host")


def test_a_device_that_is_no_multiple_of_the_granularity_is_refused(monkeypatch):
    monkeypatch.setenv("CUMEM_HOST_DEVICE_BYTES", "1000000")
    with pytest.raises(cumem.InvalidArgument, match=r"CUMEM_HOST_DEVICE_BYTES=1000000.*multiple"):
        cumem.Allocator(driver="host")


def test_the_environments_deadline_is_kept_and_an_argument_goes_before_it(monkeypatch):
    for variable, options in (("0.25", {}), ("600", {"device_timeout": 0.25})):
        monkeypatch.setenv("CUMEM_DEVICE_TIMEOUT", variable)
        driver = faulty_driver()
        allocator = cumem.Allocator(driver=driver, **options)
        sample = Sample(allocator, "weights")
        driver.hold("synchronize")
        try:
            with pytest.raises(cumem.DeviceBusy, match=r"0\.25"):
                allocator.sleep()
        finally:
            driver.release("synchronize")
        sample.check()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "", "inf", "nan", "1e10"])
def test_a_deadline_that_makes_no_sense_is_refused_with_its_value(value, monkeypatch):
    monkeypatch.setenv("CUMEM_DEVICE_TIMEOUT", value)
    with pytest.raises(cumem.InvalidArgument, match=f"CUMEM_DEVICE_TIMEOUT='{value}'"):
        cumem.Allocator(driver="host")
    assert cumem.Allocator(driver="host", device_timeout=5).driver_name == "host"
