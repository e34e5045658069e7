"""torch's settings are read as torch reads them, and what regions cannot work with is refused or warned about."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest

from cumem import torch_names, torch_settings
from cumem.errors import CumemWarning, Unsupported
from cumem.torch_settings import AllocatorSettings, configuration_from, is_uncached, parse

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch_versions

TELLS_SETTINGS = torch_names.has_cuda() or hasattr(torch._C, "_accelerator_getAllocatorSettings")


def in_fresh_torch(environment: dict[str, str], expression: str) -> str:
    """What an expression over `torch_settings` gives in an interpreter whose torch starts with this environment."""
    code = f"import torch; from cumem import torch_settings as s; print({expression})"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        ("expandable_segments:False", AllocatorSettings()),
        (" backend:cudaMallocAsync ", AllocatorSettings(backend="cudaMallocAsync")),
        ("max_split_size_mb:64", AllocatorSettings(max_split_size_bytes=64 << 20)),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=True)),
        ("roundup_power2_divisions:[256:1,512:1,>:1]", AllocatorSettings()),
        (
            "roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.6",
            AllocatorSettings(roundup_power2_divisions=True, garbage_collection_threshold=0.6),
        ),
        ("per_process_memory_fraction:0.5,unheard_of:x", AllocatorSettings(per_process_memory_fraction=0.5)),
    ],
)
def test_a_configuration_is_parsed(text: str, settings: AllocatorSettings) -> None:
    parsed = parse(text, source="default")
    assert (parsed.text, parsed.source) == (text, "default")
    assert AllocatorSettings(**{**vars(parsed), "text": ""}) == settings


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        parse("garbage_collection_threshold:much", source="default")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (("CUDA", "HIP", ""), "CUDA"),
        (("HIP", ""), "HIP"),
        (("",), ""),
    ],
)
@pytest.mark.skipif(not TELLS_SETTINGS, reason="this torch does not tell its settings")
def test_of_several_variables_that_one_counts_which_torch_reads(given: tuple[str, ...], read: str) -> None:
    sizes = {f"PYTORCH_{kind}_ALLOC_CONF".replace("__", "_"): f"max_split_size_mb:{50 + len(kind)}" for kind in given}
    ours = configuration_from(sizes)
    assert ours[0] == f"PYTORCH_{read}_ALLOC_CONF".replace("__", "_")
    assert in_fresh_torch(sizes, "s.read_settings().text") == ours[1]


def test_without_a_variable_nothing_is_configured() -> None:
    assert configuration_from({"PYTORCH_CUDA_ALLOC": "x"}) == (None, "")
    assert in_fresh_torch({}, "s.read_settings().text") == ""


@pytest.mark.skipif(not TELLS_SETTINGS, reason="this torch does not tell its settings")
def test_settings_written_at_run_time_are_read_and_nothing_of_them_is_lost() -> None:
    write = "torch._C._accelerator_setAllocatorSettings('expandable_segments:True,max_split_size_mb:40')"
    read = in_fresh_torch(
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:30"}, f"[{write}, s.read_settings(), s.read_settings()][2]"
    )
    assert read == str(
        AllocatorSettings(
            "expandable_segments:True,max_split_size_mb:40",
            "torch",
            expandable_segments=True,
            max_split_size_bytes=40 << 20,
        )
    )


def test_a_torch_that_does_not_tell_is_described_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_settings, "allocator_backend", lambda: None)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    for name in torch_settings.CONFIGURATION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert torch_settings.read_settings() == AllocatorSettings()
    text = "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    assert torch_settings.read_settings() == AllocatorSettings(text, "PYTORCH_ALLOC_CONF", expandable_segments=True)


@pytest.mark.skipif(not torch_names.has_cuda(), reason="this torch has no CUDA")
@pytest.mark.parametrize(
    ("environment", "backend"),
    [({}, "native"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync")],
)
def test_the_backend_is_the_one_that_torch_took(environment: dict[str, str], backend: str) -> None:
    assert in_fresh_torch(environment, "s.allocator_backend()") == backend


@pytest.mark.skipif(not torch_names.has_cuda(), reason="this torch has no CUDA")
def test_an_allocator_of_the_users_own_is_seen_and_refused() -> None:
    replace = "torch._C._cuda_changeCurrentAllocator(torch._C._cuda_customAllocator(1, 2))"
    assert in_fresh_torch({}, f"[{replace}, s.allocator_backend()][1]") == "pluggable"
    assert "change_current_allocator" in in_fresh_torch(
        {}, f"[{replace}, [f() for f in [lambda: exec('try: s.check_routable()\\nexcept Exception as e: print(e)')]]]"
    )


@pytest.mark.skipif(torch_names.has_cuda(), reason="this torch has CUDA")
def test_a_torch_without_cuda_has_no_backend_and_no_fraction_and_is_refused() -> None:
    assert torch_settings.allocator_backend() is None
    assert torch_settings.memory_fraction(0) is None
    with pytest.raises(Unsupported, match="without CUDA"):
        torch_settings.warn_about_settings([0])


@pytest.mark.parametrize(
    ("environment", "uncached"),
    [
        ({}, False),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, False),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, True),
        ({"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}, True),
    ],
)
def test_caching_is_off_where_torch_has_it_off(environment: dict[str, str], uncached: bool) -> None:
    assert is_uncached(environment) == uncached
    own = "getattr(torch._C, '_cuda_cudaCachingAllocator_is_enabled', lambda: None)()"
    ours, torchs = in_fresh_torch(environment, f"s.caching_enabled(), {own}").split()
    assert (ours == "False") == uncached
    if torchs == "False":  # older releases do not count the variable there
        assert uncached


# --- what a region says at its entry; torch's part is played ---


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that has nothing to complain about, and no warning given yet."""
    monkeypatch.setattr(torch_settings, "_warned", set())
    monkeypatch.setattr(torch_settings, "allocator_backend", lambda: "native")
    monkeypatch.setattr(torch_settings, "caching_enabled", lambda: True)
    monkeypatch.setattr(torch_settings, "memory_fraction", lambda device: None)
    monkeypatch.setattr(torch_settings, "read_settings", AllocatorSettings)
    return monkeypatch


def warnings_of(devices: list[int]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        torch_settings.warn_about_settings(devices)
    assert all(warning.category is CumemWarning for warning in caught)
    assert all((warning.filename, warning.lineno) == (__file__, line) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_nothing_is_said_where_nothing_is_wrong(native: pytest.MonkeyPatch) -> None:
    assert warnings_of([0, 1]) == []


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("cudaMallocAsync", "take backend:cudaMallocAsync out"),
        ("pluggable", "change_current_allocator"),
        ("new", "own caching"),
    ],
)
def test_an_allocator_without_pools_is_refused(native: pytest.MonkeyPatch, backend: str, remedy: str) -> None:
    native.setattr(torch_settings, "allocator_backend", lambda: backend)
    with pytest.raises(Unsupported, match=remedy):
        torch_settings.warn_about_settings([0])


def test_caching_switched_off_is_refused_and_not_known_is_let_pass(native: pytest.MonkeyPatch) -> None:
    native.setattr(torch_settings, "caching_enabled", lambda: False)
    with pytest.raises(Unsupported, match="PYTORCH_NO_CUDA_MEMORY_CACHING"):
        torch_settings.warn_about_settings([0])
    native.setattr(torch_settings, "caching_enabled", lambda: None)
    torch_settings.warn_about_settings([0])


def test_a_fraction_is_warned_of_once_a_device(native: pytest.MonkeyPatch) -> None:
    native.setattr(torch_settings, "memory_fraction", lambda device: None if device == 1 else 0.5)
    first, second = warnings_of([0, 1, 2])
    assert "50% of device 0" in first
    assert "device 2" in second
    assert warnings_of([0, 1, 2]) == []


def test_a_collection_threshold_is_warned_of_only_with_a_fraction(native: pytest.MonkeyPatch) -> None:
    native.setattr(torch_settings, "read_settings", lambda: AllocatorSettings(garbage_collection_threshold=0.8))
    assert warnings_of([0]) == []
    native.setattr(torch_settings, "memory_fraction", lambda device: 0.5)
    assert ["garbage_collection_threshold:0.8" in text for text in warnings_of([0])] == [False, True]
