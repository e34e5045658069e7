"""`cumem demo` on the host driver: it proves what it says, and it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cumem.cli.app import app
from cumem.errors import InvalidArgument

torch = pytest.importorskip("torch")

# fmt: off
TINY = [
    "demo", "--driver", "host", "--layers", "2", "--width", "64", "--heads", "4", "--vocab", "128", "--batch", "2",
    "--context", "64", "--prompt-tokens", "8", "--new-tokens", "6",
]
# fmt: on


def run(arguments: Sequence[str]) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_demo_says_that_tokens_and_addresses_are_equal() -> None:
    result = run(TINY)
    assert result.exit_code == 0, result.output
    assert "tokens: 12 of 12 equal; the last logits too, bit by bit" in result.output
    assert "unchanged" in result.output
    for word in ("weights", "kv_cache", "resident", "asleep"):
        assert word in result.output


def test_a_tied_head_comes_back_tied() -> None:
    result = run([*TINY, "--tied"])
    assert result.exit_code == 0, result.output


def test_weights_that_nobody_restored_end_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumem.allocator import Allocator

    wake_up = Allocator.wake_up

    def wake_without_contents(self: Allocator, tags: Any = None) -> Any:
        return wake_up(self, tags, restore=False)

    monkeypatch.setattr(Allocator, "wake_up", wake_without_contents)
    result = run(TINY)
    assert result.exit_code == 1
    assert "DIFFER" in result.output


def test_one_poisoned_weight_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumem.cli.scenario import WEIGHTS, _Scenario

    build, wake = _Scenario.build_weights, _Scenario.wake
    decoders: list[Any] = []

    def build_and_keep(self: _Scenario) -> Any:
        built = build(self)
        decoders.append(built[0])
        return built

    def wake_and_poison(self: _Scenario, name: str, tag: str) -> Any:
        report = wake(self, name, tag)
        if tag == WEIGHTS:
            with torch.no_grad():
                decoders[0].norm.weight[0] = 1e6
        return report

    monkeypatch.setattr(_Scenario, "build_weights", build_and_keep)
    monkeypatch.setattr(_Scenario, "wake", wake_and_poison)
    result = run(TINY)
    assert result.exit_code == 1
    assert "DIFFER" in result.output


def test_a_cache_that_is_not_refilled_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumem.cli.decoding import Decoding

    def skip(self: Decoding, tokens: Any, *_: Any) -> None:
        self.position += tokens.shape[1]

    monkeypatch.setattr(Decoding, "replay", skip)
    result = run(TINY)
    assert result.exit_code == 1
    assert "DIFFER" in result.output


def test_the_json_file_holds_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run([*TINY, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["format"] == 1
    assert figures["passed"] is True
    assert figures["driver"] == "host"
    assert figures["dtype"] == "float32"
    assert figures["machine"]["torch_version"] == torch.__version__
    assert figures["machine"]["device"] == "host memory"
    assert figures["plan"]["decoder"]["layers"] == 2
    assert figures["weight_bytes"] == 4 * figures["parameters"]
    assert figures["cache_bytes"] == 2 * 2 * 2 * 64 * 16 * 4  # layers, keys and values, batch, context, head, float32
    assert figures["addresses_equal"] is True
    continuation = figures["continuation"]
    assert continuation["tokens_equal"] is True
    assert continuation["reference"] == continuation["after_wake"]
    assert [len(row) for row in continuation["reference"]] == [6, 6]


def test_the_figures_agree_with_each_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run([*TINY, "--json", str(path)])
    figures = json.loads(path.read_text())
    awake, asleep, weights_awake, again = figures["snapshots"]
    sleep = figures["sleep"]
    assert asleep["stats"]["mapped_bytes"] == 0
    assert asleep["stats"]["host_bytes"] >= sleep["saved_bytes"] >= figures["weight_bytes"]
    assert sleep["freed_bytes"] == awake["stats"]["mapped_bytes"] == asleep["free_bytes"] - awake["free_bytes"]
    assert sleep["discarded_bytes"] >= figures["cache_bytes"]
    assert weights_awake["stats"]["by_tag"]["weights"]["state"] == "resident"
    assert weights_awake["stats"]["by_tag"]["kv_cache"]["state"] == "asleep"
    assert again["free_bytes"] == awake["free_bytes"]
    assert figures["wake_weights"]["copied_bytes"] == sleep["copied_bytes"]
    assert figures["wake_cache"]["zeroed_bytes"] == sleep["discarded_bytes"]
    names = [phase["name"] for phase in figures["phases"]]
    assert names[5:9] == ["sleep", "guest", "wake weights", "wake cache"]
    assert len(figures["samples"]) >= 2 * len(names)
    assert max(sample["mapped_bytes"].get("guest", 0) for sample in figures["samples"]) >= sleep["freed_bytes"]


def test_the_plot_file_is_a_png(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plot.png"
    result = run([*TINY, "--plot", str(path)])
    assert result.exit_code == 0, result.output
    assert image.imread(path).shape == (832, 1625, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "5"], "InvalidArgument: width 64 is no multiple of heads 5"),
        (["--new-tokens", "60"], "must be at least 128"),
        (["--plot", "plot.txt"], "must end in one of .pdf, .png, .svg"),
        (["--plot", "missing/plot.png"], "--plot 'missing/plot.png': there is no folder"),
        (["--json", "missing/figures.json"], "--json 'missing/figures.json': there is no folder"),
    ],
)
def test_sizes_and_files_that_cannot_be_end_in_one_line_and_exit_code_1(options: list[str], message: str) -> None:
    result = run([*TINY, *options])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_a_missing_matplotlib_ends_in_one_line_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run([*TINY, "--plot", "plot.png"])
    assert result.exit_code == 1
    assert result.output == result.stderr
    assert "pip install matplotlib" in result.stderr


def test_traceback_lets_the_error_through() -> None:
    result = run([*TINY, "--heads", "5", "--traceback"])
    assert isinstance(result.exception, InvalidArgument)


def test_values_that_are_no_sizes_are_usage_errors() -> None:
    for options in (["--layers", "0"], ["--driver", "metal"], ["--no-such-option"]):
        assert run([*TINY, *options]).exit_code == 2


def test_the_version_is_printed() -> None:
    result = run(["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("cumem ")


def test_the_command_line_loads_no_torch_and_no_matplotlib_before_a_command_needs_them() -> None:
    program = (
        "import sys; import cumem.cli.app; "
        "loaded = {'torch', 'matplotlib', 'numpy'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
