"""`cumem demo`: a real transformer sleeps, someone else uses its memory, and it goes on as if nothing had been."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cumem.cli.failures import TracebackOption, one_line_failures
from cumem.cli.plot import check_plot_file, draw_timeline
from cumem.cli.tables import print_result
from cumem.cli.units import format_bytes
from cumem.errors import InvalidArgument

if TYPE_CHECKING:
    from cumem.cli.presets import DemoSizes
    from cumem.cli.result import DemoResult

__all__ = ["demo"]


def _size(help_text: str, *, default: str = "by driver") -> Any:
    """An option for a size that need not be given."""
    return typer.Option(min=1, show_default=default, help=help_text)


class DriverChoice(str, Enum):
    """Which driver to run on."""

    auto = "auto"
    cuda = "cuda"
    host = "host"


def demo(
    driver: Annotated[DriverChoice, typer.Option(help="auto: cuda where there is a GPU, else host.")] = (
        DriverChoice.auto
    ),
    layers: Annotated[int | None, _size("Layers of the decoder.")] = None,
    width: Annotated[int | None, _size("Width of its residual stream.")] = None,
    heads: Annotated[int | None, _size("Query heads.", default="by width")] = None,
    kv_heads: Annotated[int | None, _size("Key and value heads.", default="heads / 4")] = None,
    vocab: Annotated[int | None, _size("Tokens it knows.")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="The head shares the embedding's weights.")] = False,
    batch: Annotated[int | None, _size("Sequences.")] = None,
    context: Annotated[int | None, _size("Cache positions of a sequence.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each sequence.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generated before the sleep, and after it.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and prompt.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw bytes over time (png, pdf, svg).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
    traceback: TracebackOption = False,
) -> None:
    """Put a transformer to sleep, fill its memory with something else, wake it up and check that it goes on the same.

    Exit code 1 when a token or an address differs from the run without a sleep.
    """
    with one_line_failures(traceback=traceback):
        _check_files(plot, json_file)
        from cumem.cli.presets import DemoSizes

        sizes = DemoSizes(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
            tied=tied,
            batch=batch,
            context=context,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            seed=seed,
        )
        console = Console()
        result = _run(driver, sizes, console)
        print_result(console, result)
        _write_files(console, result, plot, json_file)
    if not result.passed:
        raise typer.Exit(1)


def _check_files(plot: Path | None, json_file: Path | None) -> None:
    if plot is not None:
        check_plot_file(plot)
    for option, path in (("--plot", plot), ("--json", json_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{option} {str(path)!r}: there is no folder {str(path.absolute().parent)!r}")


def _run(driver: DriverChoice, sizes: DemoSizes, console: Console) -> DemoResult:
    from cumem.allocator import Allocator
    from cumem.cli.presets import plan_demo
    from cumem.cli.scenario import run_scenario

    with Allocator(driver=driver.value) as allocator:
        plan = plan_demo(allocator.driver_name, sizes)
        console.print(
            f"[bold]cumem demo[/] ({allocator.driver_name} driver): {plan.decoder.parameters / 1e6:.1f} million "
            f"parameters in {plan.decoder.layers} layers of width {plan.decoder.width}",
            highlight=False,
        )
        return run_scenario(allocator, plan, console)


def _write_files(console: Console, result: DemoResult, plot: Path | None, json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")
        console.print(f"figures in {json_file}", highlight=False)
    if plot is not None:
        title = (
            f"cumem demo on {result.machine.device}: {format_bytes(result.weight_bytes)} of weights, "
            f"{format_bytes(result.cache_bytes)} of KV cache"
        )
        draw_timeline(plot, result.phases, result.samples, title=title)
        console.print(f"picture in {plot}", highlight=False)
