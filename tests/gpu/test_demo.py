"""`cumem demo` on a GPU: the same proof, with bfloat16 weights and the device's own word on free memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cumem.cli.app import app

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_the_demo_goes_on_with_the_same_tokens_after_a_sleep_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["demo", "--driver", "cuda", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["driver"] == "cuda"
    assert figures["dtype"] == "bfloat16"
    assert figures["addresses_equal"] is True
    assert figures["continuation"]["tokens_equal"] is True
    assert figures["continuation"]["logits_equal"] is True
    awake, asleep, _, again = figures["snapshots"]
    freed = figures["sleep"]["freed_bytes"]
    assert freed >= figures["weight_bytes"] + figures["cache_bytes"]
    assert asleep["stats"]["mapped_bytes"] == 0
    assert asleep["free_bytes"] - awake["free_bytes"] == pytest.approx(freed, abs=64 * MIB)
    assert again["free_bytes"] == pytest.approx(awake["free_bytes"], abs=64 * MIB)


def test_weights_that_nobody_restored_are_noticed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumem.allocator import Allocator

    wake_up = Allocator.wake_up

    def wake_without_contents(self: Allocator, tags: list[str] | None = None) -> object:
        return wake_up(self, tags, restore=False)

    monkeypatch.setattr(Allocator, "wake_up", wake_without_contents)
    small = ["--layers", "4", "--width", "512", "--context", "512"]
    result = CliRunner().invoke(app, ["demo", "--driver", "cuda", *small])
    assert result.exit_code == 1
    assert "DIFFER" in result.output
