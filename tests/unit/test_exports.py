"""The public names: what `import cumem` gives is what is listed, and each of them is documented."""

import inspect
import types

import pytest

import cumem
from cumem import errors, reports

# What belongs to one allocator alone, and what belongs to none.
OWN_METHODS = {"close", "driver_memory", "driver_name", "torch_device", "hooks", "follow_memory_fraction"}
OWN_FUNCTIONS = {"configure", "default_allocator", "exclude"}


def public(namespace):
    return {name for name in vars(namespace) if not name.startswith("_")}


def methods(cls):
    return {name for name in public(cls) if callable(getattr(cls, name))}


def test_the_listed_names_are_sorted_and_each_once():
    assert cumem.__all__ == sorted(set(cumem.__all__))


def test_every_listed_name_exists_and_every_public_name_is_listed():
    modules = {name for name in public(cumem) if isinstance(getattr(cumem, name), types.ModuleType)}
    assert set(cumem.__all__) - {"__version__"} - modules == public(cumem) - modules
    assert "backends" in cumem.__all__, "what third parties write backends against"
    for name in cumem.__all__:
        assert getattr(cumem, name) is not None


def test_a_star_import_brings_what_is_listed():
    namespace = {}
    exec("from cumem import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(cumem.__all__)


@pytest.mark.parametrize("name", cumem.__all__)
def test_every_public_name_is_documented(name):
    value = getattr(cumem, name)
    if name == "__version__":
        assert value[0].isdigit()
        return
    assert inspect.getdoc(value), f"cumem.{name} has no docstring"
    if inspect.isclass(value):
        for method in methods(value):
            assert inspect.getdoc(getattr(value, method)), f"cumem.{name}.{method} has no docstring"


def test_every_method_of_an_allocator_is_a_function_of_the_module_too():
    functions = {name for name in cumem.__all__ if inspect.isfunction(getattr(cumem, name))}
    assert methods(cumem.Allocator) - OWN_METHODS == functions - OWN_FUNCTIONS


def test_every_error_and_report_is_public():
    assert {name for name in errors.__all__ if name[0].isupper()} <= set(cumem.__all__)
    assert set(reports.__all__) <= set(cumem.__all__)


def test_the_hooks_of_the_module_are_those_of_an_allocator():
    assert methods(type(cumem.hooks)) == {"register", "unregister"}
    assert {"register", "unregister"} <= methods(type(cumem.Allocator(driver="host").hooks))
