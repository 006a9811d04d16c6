"""Turns declared options into the parameters of a command, and reads what the user gave."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo

from rewriter.cli.echo import echo
from rewriter.cli.exits import STDOUT, exit_codes
from rewriter.errors import OutputError, UsageError
from rewriter.model import data_files
from rewriter.model.output_files import overwrites
from rewriter.pipeline.config.option_values import shape_from_text
from rewriter.pipeline.declaration import Declaration, Names, Paths, Shapes, declarations
from rewriter.pipeline.options import DATA, OUTCOME, PANELS

if TYPE_CHECKING:
    from rewriter.pipeline.config import Configuration, ResolvedOptions

FLAG = " "
"""Metavar of an option without a value; Typer would print `<bool>`."""

KINDS = {Names: list[str], Shapes: list[str], Paths: list[Path]}
"""Types of the command line for those of options; others are their own."""


def option(panel: str, metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option in the panel `panel` of a command's help."""
    text = re.sub(r"\[(?=[a-z])", r"\\[", text)  # a default in brackets is not markup of rich
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, **more)


ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", hidden=True)]
Verbose = Annotated[bool, option(OUTCOME, FLAG, "List everything", "-v", "--verbose")]
Json = Annotated[Path | None, option(OUTCOME, "FILE", "Write JSON, too; - is stdout")]
Report = Annotated[Path | None, option(OUTCOME, "FILE", "A page (.html) or JSON, too", "--report")]
Quiet = Annotated[bool, option(OUTCOME, FLAG, "Print the verdict alone", "-q", "--quiet")]


def with_options(kind: type, *only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command `f(..., **given)`: adds the options that `kind` declares, or some of them.

    `given` has what the user set, by the names of the declarations. Errors become exit codes.
    """
    options = {
        name: declared
        for name, declared in declarations(kind).items()
        if "command line" in declared.places and (not only or name in only)
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            with exit_codes():
                command(**{n: v for n, v in values.items() if n not in options}, **_given(options, values))

        parameters = sorted([*_own(command), *map(_parameter, options.values())], key=_place)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _own(command: Callable[..., None]) -> Iterator[inspect.Parameter]:
    """The parameters that the command itself has."""
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)


def _parameter(declared: Declaration) -> inspect.Parameter:
    """The parameter of an option; None: the user did not set it."""
    kind: Any = str if declared.read else KINDS.get(declared.kind, declared.kind)
    names = declared.flags or ((declared.flag,) if kind is bool else ())
    more = {"autocompletion": declared.complete, "min": declared.least}
    made = option(declared.panel, declared.metavar or FLAG, declared.help, *names, **more)
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, made]
    )


def _place(parameter: inspect.Parameter) -> int:
    """Arguments first, then the panels in their order."""
    made = parameter.annotation.__metadata__[0]
    if isinstance(made, ArgumentInfo):
        return -1
    panel = made.rich_help_panel or DATA
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def _given(options: Mapping[str, Declaration], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the user set, by their types."""
    return {
        name: _read(declared, values[name])
        for name, declared in options.items()
        if values[name] not in (None, [])
    }


def _read(declared: Declaration, value: Any) -> Any:
    if declared.read is not None:
        try:
            return declared.read(value)
        except ValueError as error:
            raise UsageError(f"it cannot be {value!r}", where=declared.flag, hint=str(error)) from error
    if declared.commas:
        value = [part.strip() for text in value for part in text.split(",") if part.strip()]
    return shapes(value, declared.flag) if declared.kind == Shapes else value


def shapes(texts: list[str], flag: str) -> dict[str, tuple[int, ...]]:
    """`["image:1x3x224x224"]` as `{"image": (1, 3, 224, 224)}`."""
    found = {}
    for text in texts:
        try:
            name, dims = shape_from_text(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is not a shape", where=flag, hint=str(error)) from error
        found[name] = dims
    return found


def configured(model: Path, given: Mapping[str, Any], *, quiet: bool) -> ResolvedOptions:
    """Every option, with those of the command line; stderr reports the sources that were read."""
    from rewriter.pipeline import config

    configuration = config.load()
    for warning in (*configuration.warnings, *_unused(configuration.file, model)):
        echo(f"warning: {warning}", err=True)
    resolved = configuration.resolve(**given)
    for sentence in () if quiet else resolved.messages():
        echo(f"configuration: {sentence}", err=True)
    return resolved


def read_configuration(*, quiet: bool) -> Configuration:
    """What files and the environment set, for a command of many models; stderr reports it once."""
    from rewriter.pipeline import config

    configuration = config.load()
    for warning in configuration.warnings:
        echo(f"warning: {warning}", err=True)
    for sentence in () if quiet else configuration.resolve().messages():
        echo(f"configuration: {sentence}", err=True)
    return configuration


def _unused(file: Path | None, model: Path) -> Iterator[str]:
    """A sentence about a rewriter.toml beside the model, which has no effect from elsewhere."""
    beside = model.absolute().parent / "rewriter.toml"
    if beside != file and beside.is_file():
        yield f"{beside} is not read: configuration is that of the current folder's project"


def check_extra(option: str, path: Path | None, inputs: Iterable[Any]) -> None:
    """Refuses, before the work starts, an output that could not be written after it, or is an input.

    Args:
        inputs: Other files and folders of the command; what is no path is ignored. The weights of models
            are inputs, too.
    """
    if path in (None, STDOUT):
        return
    assert path is not None
    where = f"{option} {path}"
    if not path.absolute().parent.is_dir():
        raise OutputError("its folder does not exist", where=where, hint="make it first")
    if path.is_dir():
        raise OutputError("it is a folder", where=where, hint="name a file in it")
    named = [Path(other) for other in inputs if isinstance(other, (str, os.PathLike))]
    for other in named + (_weights(named) if path.is_file() else []):
        if overwrites(path, other):
            raise UsageError(f"it would overwrite {other}", where=where, hint="name another file")


def _weights(files: Iterable[Path]) -> list[Path]:
    """The files with the weights of those that are models."""
    return [data for file in files if file.suffix == ".onnx" for data in data_files(file)]
