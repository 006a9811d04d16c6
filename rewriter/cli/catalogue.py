"""`rewriter passes` and `rewriter presets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import Command, Group
from rewriter.cli.exits import echo, exit_codes, reader_may_leave
from rewriter.cli.parameters import completer
from rewriter.pipeline.options import KEYS

passes = typer.Typer(cls=Group, help="What a pipeline can do; `passes show NAME`")
presets = typer.Typer(cls=Group, help="Pipelines by name; `presets show NAME`")


@passes.callback(invoke_without_command=True)
def _passes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            _list_passes()


@passes.command("list", cls=Command)
def _list_passes() -> None:
    """List all of them; * marks the default."""
    from rewriter.pipeline.catalogue import GROUPS, exactness_text, summary
    from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS
    from rewriter.pipeline.text import own_passes
    from rewriter.report.tables import Cell, Table
    from rewriter.report.terminal import console, printed

    default = {step.name for step in PRESETS[DEFAULT_PRESET].steps}
    rows = []
    for stage, title in GROUPS.items():
        rows.append([Cell(f"[{title}]"), Cell(""), Cell("")])
        for kind in own_passes().values():
            if kind.stage is stage:
                name = f"{'*' if kind.name in default else ' '} {kind.name}"
                rows.append([Cell(name), Cell(exactness_text(kind.exactness)), Cell(summary(kind))])
    table = Table({"pass": "choice", "FP32 result": "choice", "why": "text"}, rows)
    console().print(printed(table))
    echo("\n* runs in the default preset. `rewriter passes show NAME` explains one.\n")


@presets.callback(invoke_without_command=True)
def _presets(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            _list_presets()


@presets.command("list", cls=Command)
def _list_presets() -> None:
    """List all of them."""
    from rewriter.pipeline.catalogue import preset_entry
    from rewriter.pipeline.presets import PRESETS

    entries = map(preset_entry, PRESETS.values())
    echo("\n\n".join([*entries, "rewriter presets show NAME tells more."]))


@passes.command("show", cls=Command)
def _show_pass(
    name: Annotated[
        str, typer.Argument(help="As `rewriter passes` lists it.", autocompletion=completer(KEYS["skip"]))
    ],
) -> None:
    """Show why a pass exists, its options, an example before and after, and what it declines."""
    from rewriter.pipeline.catalogue import page
    from rewriter.pipeline.text import find

    echo(page(find(name, "passes show")).rstrip())


@passes.command("run", cls=Command)
def _run_passes(
    pipeline: Annotated[str, typer.Argument(help="A pass, or several: `simplify,clean-casts`.")],
    graph: Annotated[Path, typer.Argument(help="A graph in the syntax of onnx.parser, or a model.")],
) -> None:
    """Print what passes remove from a graph (-) and add to it (+), and what they decline.

    That is a whole report of a bug: GRAPH may be such a text, too.
    """
    from rewriter.ir.model import load
    from rewriter.pipeline import onnx_text
    from rewriter.pipeline.driver import run

    before = load(graph if graph.suffix == ".onnx" else onnx_text.read(graph))
    result = run(before, pipeline)
    echo(onnx_text.outcome(before, result.model, result.passes))


@presets.command("show", cls=Command)
def _show_preset(
    name: Annotated[
        str,
        typer.Argument(help="As `rewriter presets` lists it.", autocompletion=completer(KEYS["preset"])),
    ],
) -> None:
    """Show the pipeline of a preset, its defaults, and when to use it."""
    from rewriter.pipeline.catalogue import preset_page
    from rewriter.pipeline.presets import preset_named

    echo(preset_page(preset_named(name)))
