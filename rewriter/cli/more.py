"""`rewriter record`, `report`, `probe`, `config`, `rule`, `why`, `passes` and `presets`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.base.text import command_line, count
from rewriter.cli import Command, Group
from rewriter.cli.exits import PAGES, STDOUT, echo, exit_codes, write_document
from rewriter.cli.parameters import (
    FLAG,
    Json,
    Outputs,
    Quiet,
    check_extra,
    check_outputs,
    completer,
    option,
    with_options,
)
from rewriter.pipeline.options import DATA, KEYS, OUTCOME, VerifyOptions

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Takes the samples")]
ScriptWords = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="python my_script.py ...")]
Calls = Annotated[int, option(DATA, "N", "End the script after N calls [0: at its end]", "--calls", min=0)]
Disk = Annotated[float, option(DATA, "GIB", "Most that samples take on disk [4]", "--disk", min=0)]
Saved = Annotated[Path, typer.Argument(metavar="RUN.json", help="JSON that fix, scan or verify wrote")]
Page = Annotated[Path, option(OUTCOME, "FILE", "The page", "-o", "--output")]
Ask = Annotated[bool, option(OUTCOME, FLAG, "Build and run every question's graph here, now", "--ask")]
SetOnly = Annotated[bool, option(OUTCOME, FLAG, "Only what some source sets", "-q", "--quiet")]
Kind = Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False)]
Node = Annotated[str, typer.Argument(help="A node's name, or one of its outputs")]
Fixed = Annotated[Path, typer.Argument(metavar="FIXED.onnx", help="A result of `fix`")]


def record(
    folder: Folder, command: ScriptWords, calls: Calls = 0, disk: Disk = 4.0, quiet: Quiet = False
) -> None:
    """Run a script that calls ONNX Runtime, and keep what its models are called with.

    What it prints and its exit code pass through. `rewriter fix FOLDER -o fixed/` fixes its models.
    """
    from rewriter.jobs.record import record_script

    recording = record_script(folder, command, calls=calls, disk_gib=disk)
    if not recording.calls:
        raise typer.Exit(recording.exit_code)
    for note in recording.notes:
        echo(f"warning: {note}", err=True)
    for state in () if quiet else recording.states:
        moves = "grows" if state.step is None else f"moves by {state.step:.2g} of FP16's last places a call"
        echo(f"{state.file}: {state.output} becomes {state.input}, and {moves}", err=True)
    if not quiet:
        parts = (len(recording.files), "file"), (len(recording.calls), "call"), (len(recording.links), "link")
        echo(f"{folder}: {', '.join(count(*part) for part in parts)}", err=True)
        echo(f"next: {command_line(['rewriter', 'fix', folder, '-o', 'fixed'])}", err=True)
    raise typer.Exit(recording.exit_code)


def report(saved: Saved, output: Page) -> None:
    """Make the page of a saved JSON report.

    It is the page that the command wrote, or would have written, with --report FILE.html.
    """
    from rewriter.ir.model import write_text
    from rewriter.report.html import html_of_saved

    check_extra("output", output, [saved], PAGES)
    write_text(html_of_saved(saved), output)


@with_options(VerifyOptions, "engine", outputs=("json", "verbose", "quiet"))
def probe(outputs: Outputs, ask: Ask = False, **given: Any) -> None:
    """Print how this TensorRT and GPU compute in FP16; with --ask, measure it and keep it for `fix`."""
    from rewriter.jobs.probe import probe as job
    from rewriter.report import probe as report

    outputs.check([])
    outputs.run(partial(job, ask=ask, **given), report)


def config(json: Json = None, quiet: SetOnly = False) -> None:
    """Show the options in force in this folder, and where each comes from.

    Options of the command line come before all of them. Where a model lies does not matter.
    """
    from rewriter.pipeline.config import load, shown
    from rewriter.pipeline.schema import to_text
    from rewriter.report.json import document
    from rewriter.report.tables import Cell, Table
    from rewriter.report.terminal import console, printed

    check_outputs([], json=json)
    resolved = load().resolve()
    file, sources, values = resolved.configuration.file, resolved.sources, resolved.values
    notes = [*resolved.ignored, *resolved.configuration.warnings]
    if json is not None:
        options = {key.key: {"value": values[n], "from": sources[n].named(n)} for n, key in KEYS.items()}
        report = {"file": str(file) if file else None, "options": options, "warnings": notes}
        write_document(document(report), json)
    if json == STDOUT:
        return
    rows = []
    for name, key in KEYS.items():
        own = sources[name].is_users
        if own or not quiet:
            cells = key.key, to_text(values[name]), sources[name].named(name)
            rows.append([Cell(cell, state="good" if own else "plain") for cell in cells])
    title = f"File: {shown(file)}" if file else f"No file from {Path.cwd()} up to the project's root"
    table = printed(Table({"option": "choice", "value": "text", "from": "text"}, rows))
    console().print(title, "", table, *(["", *notes] if notes else []), sep="\n")


def rule(kind: Kind = None) -> None:
    """Explain a kind of finding, a rule of a plan or a known defect; without KIND, list them."""
    from rewriter.report.explain import rule as explanation
    from rewriter.report.explain import rules

    if kind is None:
        width = max(map(len, rules()))
        echo(*(f"{name:<{width}}  {title}" for name, title in rules().items()))
    else:
        _print(explanation(kind))


def why(node: Node, model: Fixed) -> None:
    """Explain the type of a node in a result of `fix`: the reason, its neighbours, and the rule."""
    from rewriter.report.explain import why as explanation

    found = explanation(node, model)
    _print(found)
    if found.rule is not None:
        echo("")
        _print(found.rule)


def _print(explanation: Any) -> None:
    from rewriter.report.terminal import console, print_rows

    out = console()
    (name, text), *rows = explanation.summary()
    out.print(f"{name}: {text}", soft_wrap=True)
    print_rows(rows, out)
    if picture := getattr(explanation, "picture", ""):
        echo("", *(f"    {line}" for line in picture.split("\n")), "")


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
