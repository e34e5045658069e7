"""A picture of a timeline: bytes on the device by tag, bytes on the host, phase by phase."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cumem.cli.timeline import Phase, Sample
from cumem.cli.units import ByteUnit, common_unit, format_seconds
from cumem.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_plot_file", "draw_timeline", "timeline_figure"]

_FORMATS = {".png", ".pdf", ".svg"}
_TAG_COLOURS = ("#3b6fb6", "#e08a3c", "#9aa5b1", "#5a9e6f", "#b65c7a", "#7a68b3")  # told apart in grey, too
_HOST_COLOUR = "#3f8f7f"
_LEAST_SHARE = 0.075  # of the width, for the shortest phase: room for its label


def check_plot_file(path: Path) -> None:
    """Refuses what could not be written later, before any work is done.

    Raises:
        InvalidArgument: The name ends in no known format.
        Unsupported: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InvalidArgument(f"cannot draw {str(path)!r}: its name must end in one of {', '.join(sorted(_FORMATS))}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw_timeline(path: Path, phases: Sequence[Phase], samples: Sequence[Sample], *, title: str) -> None:
    """Writes the picture of `timeline_figure` to `path`; its suffix is the format."""
    timeline_figure(phases, samples, title=title).savefig(path)


def timeline_figure(phases: Sequence[Phase], samples: Sequence[Sample], *, title: str) -> Figure:
    """The picture. Each phase has a time scale of its own, so that short transitions can be seen.

    Args:
        phases: In order of time, at least one.
        samples: In order of time; a value holds until the next sample.
        title: The headline.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no pyplot: no state outside this figure
    device, host = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = [phase.begin_s for phase in phases] + [phases[-1].end_s]
    places = _places(phases)
    x = _interpolate([sample.seconds for sample in samples], edges, places)
    unit = common_unit(max(max(sum(sample.mapped_bytes.values()), sample.host_bytes) for sample in samples))
    _draw_device(device, x, samples, unit)
    held = [sample.host_bytes / unit.size_bytes for sample in samples]
    host.fill_between(x, held, step="post", color=_HOST_COLOUR, linewidth=0)
    host.set_ylim(0, 1.12 * max(held) or 1.0)
    host.set_ylabel(f"host, backups ({unit.name})")
    for axes in (device, host):
        _style(axes, places)
    host.set_xticks(places, [f"{edge - edges[0]:.2f}" for edge in edges], fontsize=8)
    host.set_xlabel("seconds since the start (each phase is drawn at its own time scale)")
    _label_phases(device, phases, places)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def _places(phases: Sequence[Phase]) -> list[float]:
    """Where on the axis, 0 to 1, each phase begins, and where the last ends."""
    least = min(_LEAST_SHARE, 1 / len(phases))
    spare = 1 - least * len(phases)
    total = sum(phase.seconds for phase in phases) or 1.0
    places = [0.0]
    for phase in phases:
        places.append(places[-1] + least + spare * phase.seconds / total)
    return places


def _interpolate(seconds: Sequence[float], edges: Sequence[float], places: Sequence[float]) -> list[float]:
    import numpy

    return [float(place) for place in numpy.interp(seconds, edges, places)]


def _draw_device(axes: Axes, x: Sequence[float], samples: Sequence[Sample], unit: ByteUnit) -> None:
    tags = list(dict.fromkeys(tag for sample in samples for tag in sample.mapped_bytes))
    below = [0.0] * len(samples)
    for index, tag in enumerate(tags):
        above = [
            base + sample.mapped_bytes.get(tag, 0) / unit.size_bytes
            for base, sample in zip(below, samples, strict=True)
        ]
        colour = _TAG_COLOURS[index % len(_TAG_COLOURS)]
        axes.fill_between(x, below, above, step="post", color=colour, linewidth=0, label=tag)
        below = above
    axes.set_ylim(0, 1.12 * max(below) or 1.0)
    axes.set_ylabel(f"device, mapped ({unit.name})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title="tag", reverse=True)  # as stacked


def _style(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlim(0, 1)
    axes.grid(axis="y", color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for index in range(0, len(places) - 1, 2):
        axes.axvspan(places[index], places[index + 1], color="#f3f5f7", zorder=-2)
    for place in places[1:-1]:
        axes.axvline(place, color="#b8c0c8", linewidth=0.7, linestyle=(0, (3, 3)))


def _label_phases(axes: Axes, phases: Sequence[Phase], places: Sequence[float]) -> None:
    for phase, left, right in zip(phases, places, places[1:], strict=False):
        axes.annotate(
            "\n".join((*phase.name.split(), format_seconds(phase.seconds))),
            ((left + right) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
        )
