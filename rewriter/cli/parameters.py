"""Turns declared options into the parameters of a command, and reads what the user gave."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from rewriter.base.errors import OutputError, UsageError
from rewriter.base.text import command_line
from rewriter.cli.exits import PAGES, STDOUT, echo, is_page, write_document
from rewriter.pipeline.options import DATA, OUTCOME, PANELS
from rewriter.pipeline.schema import Option, Text, declarations, read

if TYPE_CHECKING:
    from rewriter.pipeline.config import ResolvedOptions

T = TypeVar("T")

FLAG = " "  # metavar of an option without a value; Typer would print `<bool>`

ENDINGS: Mapping[str, tuple[str, ...]] = {
    "report": ("", *PAGES, ".json"),
    "json": ("", ".json", ".txt", ".log"),
    "sarif": ("", ".sarif", ".json"),
}
"""Suffixes of files by the options that name them."""


def option(panel: str, metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option in the panel `panel` of a command's help."""
    text = re.sub(r"\[(?=[a-z])", r"\\[", text)  # a default in brackets is not markup of rich
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, **more)


Verbose = Annotated[bool, option(OUTCOME, FLAG, "List everything", "-v", "--verbose")]
Json = Annotated[Path | None, option(OUTCOME, "FILE", "Write JSON, too; - is stdout")]
Quiet = Annotated[bool, option(OUTCOME, FLAG, "Print only the verdict", "-q", "--quiet")]

OUTPUTS: Mapping[str, Any] = {
    "json": Json,
    "sarif": Annotated[Path | None, option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too", "--sarif")],
    "report": Annotated[Path | None, option(OUTCOME, "FILE", "A page (.html) or JSON, too", "--report")],
    "verbose": Verbose,
    "quiet": Quiet,
}


@dataclass(frozen=True)
class Outputs:
    """Where the result of a command goes: the files that are named, and how much of it to the terminal."""

    json: Path | None = None
    sarif: Path | None = None
    report: Path | None = None
    verbose: bool = False
    quiet: bool = False

    def check(self, inputs: Iterable[Any]) -> None:
        """Refuses files that could not be written, or that are an input or another output."""
        check_outputs(inputs, json=self.json, sarif=self.sarif, report=self.report)

    def run(self, job: Callable[..., T], report: Any) -> T:
        """Runs a job with its progress on stderr, and shows the result."""
        from rewriter.report.progress import progress

        with progress(shown=not self.quiet) as shown:
            result = job(progress=shown)
        self.show(result, report)
        return result

    def show(self, result: Any, report: Any, more: Iterable[Callable[[], object]] = ()) -> None:
        """Write a result to the files that are named, and print it: on stderr if JSON goes to stdout.

        It is printed even if a file cannot be written.

        Args:
            report: The module of `rewriter.report` for the command, with `print_result` and `as_dict`.
            more: Each writes another file.

        Raises:
            OutputError: a file cannot be written; the message says that the model was, if it was.
        """
        from rewriter.report.terminal import console

        failures = []
        writes: list[Callable[[], object]] = [
            partial(_write, result, report, path) for path in (self.json, self.report) if path
        ]
        for write in (*writes, *more):
            try:
                write()
            except OutputError as error:
                failures.append(error)
        out = console(stderr=STDOUT in (self.json, self.sarif, self.report))
        report.print_result(result, out, verbosity=int(self.verbose) - int(self.quiet))
        for failure in failures:
            model = getattr(result, "output", None)
            also = f"; the model was written to {model}" if model else ""
            hint = failure.hint or "name another file"
            raise OutputError(failure.what + also, where=failure.where, hint=hint)


def _write(result: Any, report: Any, path: Path) -> None:
    from rewriter.report import html

    command = command_line(["rewriter", *sys.argv[1:]])
    if is_page(path):
        html.write(result, path, command)
    else:
        write_document(report.as_dict(result) | html.saved_page(result, command), path)


def with_options(
    kind: type, *only: str, outputs: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command `f(..., **given)`: adds the options that `kind` declares, or some of them.

    `given` has what the user set, by the names of the declarations. A command with some of `OUTPUTS` has
    them as one argument `outputs`.
    """
    options = {
        name: declared
        for name, declared in declarations(kind).items()
        if "command line" in declared.set_in and (not only or name in only)
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {n: _read(o, values[n]) for n, o in options.items() if values[n] not in (None, [])}
            if outputs:
                given["outputs"] = Outputs(**{name: values.pop(name) for name in outputs})
            command(**{n: v for n, v in values.items() if n not in options}, **given)

        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=OUTPUTS[name])
            for name, default in vars(Outputs()).items()
            if name in outputs
        ]
        parameters = sorted([*_own(command), *added, *map(_parameter, options.values())], key=_panel)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _read(declared: Option, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if declared.several and not declared.commas:
        return read(declared, [Text(text) for text in value])
    return read(declared, Text(",".join(value) if declared.several else value))


def _own(command: Callable[..., None]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name != "outputs":
            yield parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)


def _parameter(declared: Option) -> inspect.Parameter:
    """The parameter of an option, as text but for switches; None: the user did not set it."""
    switch, off = declared.kind is bool, f"/{declared.off}" if declared.off else ""
    kind: Any = bool if switch else list[str] if declared.several else str
    names, metavar = ([declared.flag + off], FLAG) if switch else ([declared.flag], declared.metavar)
    info = option(declared.panel, metavar, declared.help, *names, autocompletion=completer(declared))
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def completer(declared: Option) -> Callable[[str], list[tuple[str, str]]] | None:
    """Completions of a value in the shell: names, or the last name of a comma-separated list."""
    if not (declared.offers or get_origin(declared.kind) is Literal):
        return None

    def complete(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",")
        return [(before + comma + n, text) for n, text in declared.choices().items() if n.startswith(last)]

    return complete


def _panel(parameter: inspect.Parameter) -> int:
    """Arguments first, then the panels in their order."""
    info = parameter.annotation.__metadata__[0]
    if isinstance(info, ArgumentInfo):
        return -1
    panel = info.rich_help_panel or DATA
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def configured(given: Mapping[str, Any], model: Path | None = None, *, quiet: bool) -> ResolvedOptions:
    """Resolves every option; sources, and a file beside `model` that is not read, are named on stderr."""
    from rewriter.pipeline import config

    configuration = config.load()
    warnings = [*configuration.warnings]
    beside = model.parent / "rewriter.toml" if model else None
    here = configuration.file
    if beside and beside.is_file() and not (here and beside.samefile(here)):
        warnings.append(f"{beside} is not read: only the current folder's project is configured")
    for warning in warnings:
        echo(f"warning: {warning}", err=True)
    resolved = configuration.resolve(**given)
    for sentence in () if quiet else resolved.messages():
        echo(f"configuration: {sentence}", err=True)
    return resolved


def check_outputs(inputs: Iterable[Any], **files: Path | None) -> None:
    """`check_extra` for several outputs, by the names of their options; none may be an earlier one."""
    taken = list(inputs)
    for name, path in files.items():
        check_extra(name.replace("_", "-"), path, taken)
        taken += [path] if path != STDOUT else []


def check_extra(option: str, path: Path | None, inputs: Iterable[Any], endings: Sequence[str] = ()) -> None:
    """Refuses, before the work starts, an output that could not be written after it, or is an input.

    Args:
        option: The key of the option that names it.
        inputs: Other files and folders of the command; values that are not paths are ignored. The weights
            of models are inputs, too.
        endings: Suffixes that it may have, if they differ from `ENDINGS`.
    """
    if path is None or path == STDOUT:
        return
    from rewriter.ir.model import data_files
    from rewriter.ir.model.output_files import overwrites

    subject: Any = {"option": option, "where": str(path)}
    if not path.parent.is_dir():
        raise OutputError("its folder does not exist", hint="make it first", **subject)
    if not os.access(path.parent, os.W_OK):
        raise OutputError("its folder cannot be written", hint="name another folder", **subject)
    try:
        folder = path.is_dir()
    except OSError as error:  # its name is too long, or its link leads back to itself
        raise OutputError(str(error.strerror), hint="name another file", **subject) from error
    if folder:
        raise OutputError("it is a folder", hint="name a file in it", **subject)
    named = [Path(other) for other in inputs if isinstance(other, (str, os.PathLike))]
    models = [other for other in named if other.suffix == ".onnx"] if path.is_file() else []
    for other in (*named, *(data for model in models for data in data_files(model))):
        if overwrites(path, other):
            raise UsageError(f"it would overwrite {other}", hint="name another file", **subject)
    endings = endings or ENDINGS.get(option, (path.suffix,))
    if path.suffix.lower() not in endings:
        hint = f"its name may end in {', '.join(filter(None, endings))}"
        raise UsageError(f"nothing of the kind {path.suffix} can be written", hint=hint, **subject)
