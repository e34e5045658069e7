"""Backends: all pass one suite, the suite catches what is broken, and third parties' are found by name."""

import os
import shutil
import sys
import tempfile
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import cumem
from cumem import _core, backends
from cumem.backends import CpuBackend, DiscardBackend, Extent, Restored, Saved
from cumem.errors import CumemError, InvalidArgument, OutOfHostMemory, Unsupported
from cumem.testing import check_backend

MIB = 1 << 20


class FileBackend:
    """A third party's backend: one file an extent in a directory."""

    name = "file"
    keeps_contents = True
    survives_process = True
    preserves_graphs = True

    def __init__(self, context, *, directory):
        self.context = context
        self.directory = Path(tempfile.mkdtemp(dir=directory))

    def path(self, extent):
        return self.directory / f"{extent.segment}-{extent.offset}-{extent.length}"

    def reserve(self, extents):
        try:
            for extent in extents:
                with self.path(extent).open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, extent.length)
        except OSError as error:
            self.release(extents)
            raise OutOfHostMemory(f"no room in {self.directory}: {error}") from error

    def save(self, extents):
        for extent in extents:
            buffer = bytearray(extent.length)
            self.context.copy_to_host([extent], [buffer])
            self.path(extent).write_bytes(buffer)
        return Saved(copied_bytes=sum(extent.length for extent in extents))

    def restore(self, extents):
        self.context.copy_to_device(extents, [self.path(extent).read_bytes() for extent in extents])
        return Restored(copied_bytes=sum(extent.length for extent in extents))

    def release(self, extents):
        for extent in extents:
            self.path(extent).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (CpuBackend, {}),
        (CpuBackend, {"host": "release"}),
        (DiscardBackend, {}),
        (DiscardBackend, {"wake": "zero"}),
        (DiscardBackend, {"wake": "poison"}),
    ],
    ids=str,
)
def test_a_backend_of_ours_keeps_its_contract(factory, options):
    check_backend(factory, **options)


def test_a_third_partys_backend_keeps_its_contract_and_leaves_nothing(tmp_path):
    known = backends.names()
    check_backend(FileBackend, directory=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert backends.names() == known


# --- what check_backend catches: each differs from a good backend in one thing ---


class DropsAByte(FileBackend):
    def save(self, extents):
        saved = super().save(extents)
        for extent in extents[-1:]:
            self.path(extent).write_bytes(self.path(extent).read_bytes()[:-1] + b"\0")
        return saved


class DropsWhatIsBeyondAChunk(FileBackend):
    def restore(self, extents):
        buffers = [bytearray(self.path(extent).read_bytes()) for extent in extents]
        for buffer in buffers:
            buffer[64 * MIB :] = bytes(len(buffer[64 * MIB :]))
        self.context.copy_to_device(extents, buffers)
        return Restored(copied_bytes=sum(extent.length for extent in extents))


class ForgetsToRestore(FileBackend):
    def restore(self, extents):
        return Restored(copied_bytes=sum(extent.length for extent in extents))


class RestoresTheFirstOnly(FileBackend):
    def restore(self, extents):
        return super().restore(extents[:1])


class RestoresInTheWrongOrder(FileBackend):
    def restore(self, extents):
        contents = [self.path(extent).read_bytes() for extent in extents]
        for first in range(len(extents)):
            for second in range(first):
                if len(contents[first]) == len(contents[second]):
                    contents[first], contents[second] = contents[second], contents[first]
        self.context.copy_to_device(extents, contents)
        return Restored(copied_bytes=sum(extent.length for extent in extents))


class RestoresOnce(FileBackend):
    def restore(self, extents):
        restored = super().restore(extents)
        self.release(extents)
        return restored


class RestoresOnlyWhatItSavedTogether(FileBackend):
    def save(self, extents):
        self.saved = list(extents)
        return super().save(extents)

    def restore(self, extents):
        if list(extents) != self.saved:
            raise ValueError("these were not saved together")
        return super().restore(extents)


class SpillsWhereItRestores(FileBackend):
    def restore(self, extents):
        wider = [Extent(e.segment, e.offset - (e.offset > 0), e.length + (e.offset > 0)) for e in extents]
        contents = [b"\0" * (e.offset > 0) + self.path(e).read_bytes() for e in extents]
        self.context.copy_to_device(wider, contents)
        return Restored(copied_bytes=sum(extent.length for extent in extents))


class ChangesWhatItSaves(FileBackend):
    def save(self, extents):
        saved = super().save(extents)
        self.context.fill(extents[:1], 0)
        return saved


class KeepsTheFirstSave(FileBackend):
    def __init__(self, context, *, directory):
        super().__init__(context, directory=directory)
        self.seen = set()

    def save(self, extents):
        saved = super().save([extent for extent in extents if extent not in self.seen])
        self.seen.update(extents)
        return saved

    def release(self, extents):
        """Keeps the files: they are thought to be clean the next time."""

    def reserve(self, extents):
        super().reserve([extent for extent in extents if extent not in self.seen])


class ReleasesAll(FileBackend):
    def release(self, extents):
        if extents:
            shutil.rmtree(self.directory)
            self.directory.mkdir()


class RaisesOnUnknown(FileBackend):
    def release(self, extents):
        for extent in extents:
            self.path(extent).unlink()


class RaisesInRelease(FileBackend):
    def release(self, extents):
        raise OSError("the disk is gone")


class NeedsReleaseBeforeReserve(FileBackend):
    def release(self, extents):
        """Forgets to."""


class SwallowsAFailedSave(FileBackend):
    def save(self, extents):
        try:
            return super().save(extents)
        except CumemError:
            return Saved()


class SwallowsAFailedRestore(FileBackend):
    def restore(self, extents):
        try:
            return super().restore(extents)
        except CumemError:
            return Restored()


class BreaksAfterAFailure(FileBackend):
    failed = False

    def save(self, extents):
        if self.failed:
            raise RuntimeError("failed before")
        self.failed = True
        saved = super().save(extents)
        self.failed = False
        return saved


class SharesFilesBetweenTags(FileBackend):
    def __init__(self, context, *, directory):
        self.context = context
        self.directory = directory

    def path(self, extent):
        return self.directory / f"{extent.length}"

    def reserve(self, extents):
        """Overwrites."""


class BelongsToAThread(FileBackend):
    thread = None

    def save(self, extents):
        self.thread = threading.get_ident()
        self.released = threading.local()
        self.released.no = True
        return super().save(extents)

    def restore(self, extents):
        if not getattr(self.released, "no", False):
            raise RuntimeError("called from another thread")
        return super().restore(extents)


class UnmapsByItself(FileBackend):
    def save(self, extents):
        saved = super().save(extents)
        self.context.core.unmap([extent.segment for extent in extents])
        return saved


class TakesAnyOption(FileBackend):
    def __init__(self, context, *, directory, **options):
        super().__init__(context, directory=directory)


class HasNoFlag(FileBackend):
    survives_process = None


class HasNoName(FileBackend):
    name = ""


class ReturnsNothing(FileBackend):
    def save(self, extents):
        super().save(extents)


class CountsTooMuch(FileBackend):
    def save(self, extents):
        super().save(extents)
        return Saved(copied_bytes=sum(extent.length for extent in extents), clean_bytes=1)


class KeepsButSaysUndefined(FileBackend):
    def restore(self, extents):
        super().restore(extents)
        return Restored(defined=False)


class HalfReserves(CpuBackend):
    def reserve(self, extents):
        for extent in extents:
            super().reserve([extent])


class KeepsHostMemory(CpuBackend):
    def release(self, extents):
        super().release(extents[:-1])


class ZeroesAllButOne(DiscardBackend):
    def restore(self, extents):
        restored = super().restore(extents)
        self._context.fill([Extent(e.segment, e.offset, 1) for e in extents[-1:]], 1)
        return restored


class PromisesGraphs(DiscardBackend):
    preserves_graphs = True


IN_A_FILE = {
    DropsAByte: r"every shape: contents of .* did not come back",
    DropsWhatIsBeyondAChunk: r"larger than a copy chunk comes back: contents of .* did not come back",
    ForgetsToRestore: r"every shape: contents of .* did not come back",
    RestoresTheFirstOnly: r"every shape: contents of .* did not come back",
    RestoresInTheWrongOrder: r"every shape: contents of .* did not come back",
    RestoresOnce: r"restore can be called again: restore raised FileNotFoundError",
    RestoresOnlyWhatItSavedTogether: r"a part can be restored .* alone: restore raised ValueError",
    SpillsWhereItRestores: r"every shape: restore wrote outside of its extents",
    ChangesWhatItSaves: r"every shape: save changed \[Extent",
    KeepsTheFirstSave: r"every shape: contents of .* did not come back",
    ReleasesAll: r"a part can be .* released alone: restore raised FileNotFoundError",
    RaisesOnUnknown: r"release takes anything: release raised FileNotFoundError",
    RaisesInRelease: r"release raised OSError: the disk is gone",
    NeedsReleaseBeforeReserve: r"reserve raised OutOfHostMemory",
    SwallowsAFailedSave: r"failed copy is told .*after a driver call failed in save .*which it did not raise",
    SwallowsAFailedRestore: r"failed copy is told .*after a driver call failed in restore .*which it did not raise",
    BreaksAfterAFailure: r"failed copy is told .*save raised RuntimeError: failed before",
    SharesFilesBetweenTags: r"every shape: contents of .* did not come back",
    BelongsToAThread: r"restore raised RuntimeError: called from another thread",
    UnmapsByItself: r"save made the driver calls \['release', 'unmap'\]",
    TakesAnyOption: r"unknown options are refused: the factory took",
    HasNoFlag: r"survives_process is None",
    HasNoName: r"name is ''",
    ReturnsNothing: r"save returned None; it must return a Saved",
    CountsTooMuch: r"more than there are",
    KeepsButSaysUndefined: r"restore says that contents are not defined",
}


@pytest.mark.parametrize("broken", IN_A_FILE, ids=lambda broken: broken.__name__)
def test_check_backend_catches_one_that(broken, tmp_path):
    with pytest.raises(AssertionError, match=IN_A_FILE[broken]):
        check_backend(broken, directory=tmp_path)


@pytest.mark.parametrize(
    ("broken", "options", "sentence"),
    [
        (HalfReserves, {}, "reserve raised OutOfHostMemory but holds .* bytes: it is all or nothing"),
        (KeepsHostMemory, {}, "bytes of host memory are still in use after all extents were released"),
        (ZeroesAllButOne, {"wake": "zero"}, "restore says that it filled all .* but they hold 2 values"),
        (PromisesGraphs, {}, "preserves_graphs is True, but contents are not kept"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_backend_catches_one_of_ours_that(broken, options, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_backend(broken, **options)


def test_check_backend_tells_of_a_factory_that_fails(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(AssertionError, match="it has what the protocol asks for: NotADirectoryError"):
        check_backend(FileBackend, directory=tmp_path / "file")


# --- options of ours ---


@pytest.mark.parametrize(
    ("name", "options"),
    [("cpu", {"host": "hold"}), ("cpu", {"wake": "zero"}), ("discard", {"wake": None}), ("discard", {"host": "keep"})],
)
def test_an_option_that_a_backend_does_not_take_is_refused_and_makes_no_tag(name, options):
    with cumem.Allocator(driver="host") as allocator:
        with pytest.raises(InvalidArgument, match=f"{next(iter(options))}"):
            allocator.set_policy("t", name, **options)
        assert allocator.tags() == []


# --- names ---


@pytest.fixture
def forget_what_was_registered():
    before = dict(backends._factories)
    yield
    backends._factories.clear()
    backends._factories.update(before)


@pytest.mark.usefixtures("forget_what_was_registered")
def test_a_registered_backend_is_used_by_its_name(tmp_path):
    backends.register("file", FileBackend)
    assert "file" in backends.names()
    with cumem.Allocator(driver="host") as allocator:
        allocator.set_policy("weights", "file", directory=tmp_path)
        weights = allocator.full(1000, fill_value=7, dtype=torch.uint8, tag="weights")
        report = allocator.sleep()
        assert report.saved_tags == ["weights"]
        assert sum(path.stat().st_size for path in tmp_path.rglob("*-*")) == 1024  # whole units of 512
        with pytest.raises(cumem.StateError, match="backup"):
            allocator.host_view(weights)  # its backup is not in host memory
        allocator.wake_up()
        assert weights.tolist() == [7] * 1000
        assert list(tmp_path.rglob("*-*")) == []


@pytest.mark.usefixtures("forget_what_was_registered")
def test_a_taken_name_is_refused_and_the_same_factory_again_is_not():
    with pytest.raises(InvalidArgument, match="'cpu' is registered already"):
        backends.register("cpu", DiscardBackend)
    backends.register("cpu", CpuBackend)
    backends.register("file", FileBackend)
    with pytest.raises(InvalidArgument, match="'file' is registered already"):
        backends.register("file", CpuBackend)


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_is_no_name_cannot_be_registered(name):
    with pytest.raises(InvalidArgument, match="no name for a backend"):
        backends.register(name, FileBackend)


def test_an_unknown_backend_is_refused_with_the_names_there_are():
    with cumem.Allocator(driver="host") as allocator:
        with pytest.raises(InvalidArgument, match=r"no backend is named 'gpu'; there are \['cpu', 'discard'"):
            allocator.empty(1, tag="t", backend="gpu")
        assert allocator.tags() == []


# --- entry points ---


@pytest.fixture
def installed(monkeypatch, tmp_path, forget_what_was_registered):
    """Installs packages: `installed(name, value)` adds an entry point of that name to the module `somebodys`."""
    points = []
    (tmp_path / "somebodys.py").write_text("from cumem.backends import CpuBackend as backend\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backends, "entry_points", lambda *, group: [p for p in points if p.group == group])
    yield lambda name, value, group="cumem.backends": points.append(EntryPoint(name, value, group))
    sys.modules.pop("somebodys", None)


def test_a_backend_of_an_entry_point_is_listed_and_loaded_at_its_first_use(installed):
    installed("theirs", "somebodys:backend")
    installed("nothing of ours", "somebodys:backend", group="other")
    assert "theirs" in backends.names()
    assert "nothing of ours" not in backends.names()
    assert "somebodys" not in sys.modules
    with cumem.Allocator(driver="host") as allocator:
        allocator.set_policy("t", "theirs", host="release")
        assert "somebodys" in sys.modules
        assert allocator.zeros(1, tag="t").item() == 0


@pytest.mark.parametrize("value", ["missing_module:backend", "somebodys:missing"])
def test_an_entry_point_that_cannot_be_loaded_says_where_it_leads(installed, value):
    installed("theirs", value)
    with cumem.Allocator(driver="host") as allocator:
        with pytest.raises(Unsupported, match=f"'theirs' cannot be loaded from '{value}'"):
            allocator.set_policy("t", "theirs")
        assert allocator.tags() == []


def test_an_entry_point_that_leads_to_no_factory_is_refused(installed):
    installed("theirs", "somebodys:number")
    with cumem.Allocator(driver="host") as allocator:
        with pytest.raises(InvalidArgument, match="'theirs'"):
            allocator.set_policy("t", "theirs")
        assert allocator.tags() == []


def test_an_entry_point_does_not_replace_a_backend_of_ours(installed):
    installed("cpu", "missing_module:backend")
    core = _core.Core(_core.host_driver())
    assert isinstance(backends.create("cpu", backends.BackendContext(core), {}), CpuBackend)


# --- failures in an allocator ---


class Failing(FileBackend):
    """Fails on order, with an error that is not ours."""

    fails_in = ""

    def __init__(self, context, *, directory):
        super().__init__(context, directory=directory)
        type(self).made = self

    def reserve(self, extents):
        self.fail("reserve")
        super().reserve(extents)

    def save(self, extents):
        self.fail("save")
        return super().save(extents)

    def restore(self, extents):
        self.fail("restore")
        return super().restore(extents)

    def fail(self, method):
        if method == self.fails_in:
            raise OSError(f"the disk failed in {method}")


@pytest.fixture
def failing(tmp_path, forget_what_was_registered):
    backends.register("failing", Failing)
    with cumem.Allocator(driver="host") as allocator:
        allocator.set_policy("t", "failing", directory=tmp_path)
        yield allocator


@pytest.mark.parametrize("method", ["reserve", "save"])
def test_a_third_partys_error_in_a_sleep_reaches_the_caller_and_changes_nothing(failing, method, tmp_path):
    tensor = failing.full(10, fill_value=5, dtype=torch.uint8, tag="t")
    Failing.made.fails_in = method
    with pytest.raises(OSError, match=f"the disk failed in {method}"):
        failing.sleep()
    assert failing.state("t") == "resident"
    assert list(tmp_path.rglob("*-*")) == []
    Failing.made.fails_in = ""
    failing.sleep()
    failing.wake_up()
    assert tensor.tolist() == [5] * 10


def test_a_third_partys_error_in_a_wake_leaves_the_tag_asleep_and_a_retry_works(failing):
    tensor = failing.full(10, fill_value=5, dtype=torch.uint8, tag="t")
    failing.sleep()
    Failing.made.fails_in = "restore"
    with pytest.raises(cumem.WakeUpPartialFailure) as error:
        failing.wake_up()
    assert isinstance(error.value.first_exception, OSError)
    assert failing.state("t") == "asleep"
    Failing.made.fails_in = ""
    error.value.retry()
    assert tensor.tolist() == [5] * 10
