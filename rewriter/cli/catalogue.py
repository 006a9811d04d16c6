"""`rewriter passes` and `rewriter presets`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import Command, Group
from rewriter.cli.exits import STDOUT, echo, exit_codes, write_document
from rewriter.cli.parameters import Json, check_outputs, completer
from rewriter.pipeline.options import KEYS


def _listing(list_all: Callable[..., None], text: str) -> typer.Typer:
    """A group of commands that lists all entries when it is called without a command, or with `list`."""
    group = typer.Typer(cls=Group, help=text)

    @group.callback(invoke_without_command=True)
    def run(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            with exit_codes():
                list_all()

    group.command("list", cls=Command)(list_all)
    return group


def _list_passes(json: Json = None) -> None:
    """List all of them; * marks the default."""
    from rewriter.pipeline import catalogue
    from rewriter.report.tables import Cell, Table
    from rewriter.report.terminal import console, printed

    content = catalogue.passes()
    if _is_json_alone("passes", content, json):
        return
    rows = []
    for title in catalogue.GROUPS.values():
        rows.append([Cell(f"[{title}]"), Cell(""), Cell("")])
        for part in content:
            if part["group"] == title:
                name = f"{'*' if part['default'] else ' '} {part['name']}"
                rows.append([Cell(name), Cell(part["exactness"]), Cell(part["summary"])])
    table = Table({"pass": "choice", "FP32 result": "choice", "why": "text"}, rows)
    console().print(printed(table))
    echo("", "* runs in the default preset. `rewriter passes show NAME` explains one.", "")


def _is_json_alone(name: str, content: object, json: Path | None) -> bool:
    """Writes JSON if it is requested; True if it went to standard output."""
    from rewriter.report.json import document

    check_outputs([], json=json)
    if json is not None:
        write_document(document({name: content}), json)
    return json == STDOUT


def _list_presets(json: Json = None) -> None:
    """List all of them."""
    from rewriter.pipeline import catalogue
    from rewriter.pipeline.presets import PRESETS

    if _is_json_alone("presets", catalogue.presets(), json):
        return
    entries = map(catalogue.preset_entry, PRESETS.values())
    echo(*"\n\n".join([*entries, "rewriter presets show NAME explains one."]).split("\n"))


passes = _listing(_list_passes, "List the passes; `passes show NAME` explains one")
presets = _listing(_list_presets, "Pipelines by name; `presets show NAME`")


@passes.command("show", cls=Command)
def _show_pass(
    name: Annotated[
        str, typer.Argument(help="As `rewriter passes` lists it.", autocompletion=completer(KEYS["skip"]))
    ],
) -> None:
    """Show why a pass exists, its options, an example before and after, and what it declines."""
    from rewriter.pipeline.catalogue import page
    from rewriter.pipeline.text import find

    echo(*page(find(name, where="passes show")).rstrip().split("\n"))


@presets.command("show", cls=Command)
def _show_preset(
    name: Annotated[
        str, typer.Argument(help="As `rewriter presets` lists it.", autocompletion=completer(KEYS["preset"]))
    ],
) -> None:
    """Show the pipeline of a preset, its defaults, and when to use it."""
    from rewriter.pipeline.catalogue import preset_page
    from rewriter.pipeline.presets import preset_named

    echo(*preset_page(preset_named(name)).split("\n"))
