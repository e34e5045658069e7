"""The picture can be read: by a PNG reader, and by a person."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

from cumem.cli.plot import check_plot_file, draw_timeline, timeline_figure
from cumem.cli.timeline import Phase, Sample
from cumem.errors import InvalidArgument, Unsupported

MIB = 1 << 20
NAMES = ["build", "adopt", "generate", "sleep", "guest", "wake weights", "wake cache", "refill cache", "generate again"]


def make_phases(seconds: list[float]) -> list[Phase]:
    phases, begin = [], 0.0
    for name, length in zip(NAMES, seconds, strict=False):
        phases.append(Phase(name, begin, begin + length))
        begin += length
    return phases


SAMPLES = [
    Sample(0.0, {}, 0),
    Sample(1.0, {"weights": 300 * MIB}, 0),
    Sample(2.0, {"weights": 300 * MIB, "kv_cache": 200 * MIB}, 0),
    Sample(12.0, {"weights": 0, "kv_cache": 0}, 300 * MIB),
    Sample(13.0, {"weights": 300 * MIB, "kv_cache": 200 * MIB}, 0),
    Sample(40.0, {"weights": 300 * MIB, "kv_cache": 200 * MIB}, 0),
]
# a transition of 2 ms among phases of many seconds
SECONDS = [1.0, 1.0, 9.9, 0.1, 0.002, 0.998, 0.01, 0.5, 26.49]


def test_the_file_is_a_png_with_an_area_in_each_tags_colour(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plot.png"
    draw_timeline(path, make_phases(SECONDS), SAMPLES, title="a title")
    pixels = image.imread(path)
    assert pixels.shape == (832, 1625, 4)
    for colour in ("#3b6fb6", "#e08a3c", "#3f8f7f"):
        red, green, blue = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
        close = (abs(pixels[..., :3] - (red, green, blue)) < 0.01).all(axis=-1)
        assert close.mean() > 0.01, colour


def test_labels_of_phases_do_not_overlap_even_where_one_is_a_thousandth_of_another() -> None:
    pytest.importorskip("matplotlib")
    figure = timeline_figure(make_phases(SECONDS), SAMPLES, title="a title")
    figure.draw_without_rendering()
    labels = figure.axes[0].texts
    assert [label.get_text().split("\n")[0] for label in labels] == [name.split()[0] for name in NAMES]
    boxes = [label.get_window_extent() for label in labels]
    for (one, left), (other, right) in combinations(zip(NAMES, boxes, strict=True), 2):
        assert not left.overlaps(right), (one, other)
    assert figure.get_suptitle() == "a title"
    assert not figure.axes[0].get_legend().get_window_extent().overlaps(figure.axes[0].get_window_extent())


def test_areas_are_stacked_in_the_unit_that_the_axis_names() -> None:
    pytest.importorskip("matplotlib")
    device, host = timeline_figure(make_phases(SECONDS), SAMPLES, title="").axes
    weights, cache = device.collections[:2]
    assert "MiB" in device.get_ylabel()
    assert "MiB" in host.get_ylabel()
    assert weights.get_datalim(device.transData).y1 == pytest.approx(300)
    assert cache.get_datalim(device.transData).y1 == pytest.approx(500)
    assert [text.get_text() for text in device.get_legend().get_texts()] == ["kv_cache", "weights"]  # from the top


def test_a_value_holds_until_the_next_sample() -> None:
    pytest.importorskip("matplotlib")
    device, _ = timeline_figure([Phase("one", 0.0, 10.0)], [*SAMPLES[:2], Sample(10.0, {}, 0)], title="").axes
    (area,) = device.collections[0].get_paths()
    assert not area.contains_point((0.09, 10.0))  # 300 MiB are seen at 1 s of 10, not on a slope towards it
    assert area.contains_point((0.11, 290.0))
    assert area.contains_point((0.99, 290.0))


def test_a_run_that_holds_nothing_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    draw_timeline(path, [Phase("nothing", 0.0, 0.0)], [Sample(0.0, {"weights": 0}, 0)], title="")
    assert "<svg" in path.read_text()


def test_a_name_that_is_no_picture_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'plot\.txt': its name must end in one of \.pdf, \.png, \.svg"):
        check_plot_file(Path("plot.txt"))


def test_a_missing_matplotlib_is_unsupported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="pip install matplotlib"):
        check_plot_file(Path("plot.png"))
