"""`rewriter passes` and `rewriter presets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli import Command, Group
from rewriter.cli.exits import STDOUT, echo, exit_codes, reader_may_leave, write_document
from rewriter.cli.parameters import Json, check_outputs, completer
from rewriter.pipeline.options import KEYS

if TYPE_CHECKING:
    from rich.console import RenderableType

passes = typer.Typer(cls=Group, help="What a pipeline can do; `passes show NAME`")
presets = typer.Typer(cls=Group, help="Pipelines by name; `presets show NAME`")


@passes.callback(invoke_without_command=True)
@presets.callback(invoke_without_command=True)
def _overview(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with exit_codes(), reader_may_leave():
            _list(context.info_name or "", None)


@passes.command("list", cls=Command)
@presets.command("list", cls=Command)
def _listed(context: typer.Context, json: Json = None) -> None:
    """List all of them; * marks the default."""
    assert context.parent is not None
    _list(context.parent.info_name or "", json)


def _list(name: str, json: Any) -> None:
    from rewriter.pipeline import catalogue
    from rewriter.report.json import document
    from rewriter.report.terminal import console

    check_outputs([], json=json)
    content = catalogue.passes() if name == "passes" else catalogue.presets()
    if json is not None:
        write_document(document({name: content}), json)
    if json != STDOUT:
        console().print(_table(content) if name == "passes" else _presets())


def _table(content: list[dict[str, Any]]) -> RenderableType:
    """All passes by their stages; * marks those of the default preset."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("pass", no_wrap=True)
    table.add_column("FP32 result", no_wrap=True)
    table.add_column("why", overflow="fold")
    for title in dict.fromkeys(one["group"] for one in content):
        table.add_row(f"[{title}]")
        for one in content:
            if one["group"] == title:
                mark = "*" if one["default"] else " "
                table.add_row(f"{mark} {one['name']}", one["exactness"], one["summary"])
    note = "* runs in the default preset. `rewriter passes show NAME` explains one.\n"
    return Lines(table, "", Text(note))


def _presets() -> RenderableType:
    from rich.text import Text

    from rewriter.pipeline.catalogue import preset_entry
    from rewriter.pipeline.presets import PRESETS

    last = "rewriter presets show NAME tells more."
    return Text("\n\n".join([*map(preset_entry, PRESETS.values()), last]))


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
