"""Declares an option once, as the field of a dataclass, and reads the declarations back.

The command line's parameter, the key in files, the variable, the keyword of the API and the row of
docs/configuration.md all come from the field: its name, type and default, and its entry in the docstring of
the class, whose first sentence is the line in `--help`.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

PREFIX = "REWRITER_"

AnyPath = str | PathLike[str]
Names = Sequence[str]
Paths = Sequence[AnyPath]
Shapes = Mapping[str, Sequence[int]]

Place = Literal["python", "command line", "file"]
EVERYWHERE: tuple[Place, ...] = ("python", "command line", "file")
ONE_RUN: tuple[Place, ...] = ("python", "command line")
"""For options of a single run, which no file may set. `file` includes the environment."""

COMMAND: tuple[Place, ...] = ("command line",)
"""For options of one command that no function of the API has."""

METAVARS: Mapping[Any, str] = {int: "N", float: "NUMBER", Path: "FILE", Names: "A,B", Paths: "FILE"}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        kind: The type of its value in texts and files, without `None`.
        default: The value if it is not set; None: the preset or the model decides.
        text: Its explanation; the first sentence is the line in `--help`.
        read: Reads its value from text, where the type is not enough.
        check: Raises `UsageError` or `ValueError` for a value of the right type that makes no sense. It may
            be given as `package.module:name`, as may the next: a shell that completes imports nothing then.
        offers: The names that the shell offers, or a function that returns them with their explanations.
        commas: True if one text of the command line lists several values.
        above: A number that is too small.
    """

    name: str = ""
    kind: Any = None
    default: Any = None
    text: str = ""
    panel: str = ""
    metavar: str = ""
    places: tuple[Place, ...] = EVERYWHERE
    read: Callable[[str], Any] | None = None
    check: str | Callable[[Any], object] | None = None
    offers: str | Callable[[], Mapping[str, str]] | Iterable[str] = ()
    commas: bool = True
    least: float | None = None
    above: float | None = None

    @property
    def key(self) -> str:
        """The name in a file and in messages: `keep-fp32`."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The name on the command line: `--keep-fp32`."""
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        """The name in the environment: `REWRITER_KEEP_FP32`."""
        return PREFIX + self.name.upper()

    @property
    def several(self) -> bool:
        """True if the command line may name it several times."""
        return self.kind in (Names, Paths, Shapes)

    @property
    def help(self) -> str:
        """The line in `--help`, with the default."""
        line, default = self.text.partition(". ")[0].removesuffix("."), self.default
        if default is None or default is False or default == () or "[" in line or str(default) in line:
            return line
        return f"{line} [{'on' if default is True else f'{default:g}' if self.kind is float else default}]"

    @property
    def off(self) -> str:
        """The negative flag of a switch that a file may have turned on: `--no-strict`; else ""."""
        turned = self.kind is bool and self.default is not None and "file" in self.places
        return f"--no-{self.key}" if turned else ""

    def choices(self) -> Mapping[str, str]:
        """The names that the shell offers, each with its explanation."""
        literal = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        offers = loaded(self.offers) or literal
        values: Any = offers() if callable(offers) else offers
        return values if isinstance(values, dict) else dict.fromkeys(values, "")


def loaded(later: Any) -> Any:
    """The function or the names, imported if they are given as `package.module:name`."""
    return pkgutil.resolve_name(later) if isinstance(later, str) else later


def option(default: Any, panel: str = "", metavar: str = "", **more: Any) -> Any:
    """A field of an options class; `more` are attributes of `Option`."""
    return field(
        default=default, metadata={"option": Option(default=default, panel=panel, metavar=metavar, **more)}
    )


def like(options: type, name: str, /, **changed: Any) -> Any:
    """A field declared like a field of another options class, with other values for some attributes."""
    declared = replace(declarations(options)[name], **changed)
    return field(default=declared.default, metadata={"option": declared})


@cache
def declarations(kind: Any) -> Mapping[str, Option]:
    """The options of an options class by name, in the order of its fields."""
    options = {}
    for item in fields(kind):
        declared: Option = item.metadata["option"]
        owner = next(base for base in kind.__mro__ if item.name in vars(base).get("__annotations__", {}))
        taken = declared.kind or _declared_type(owner, item.name)
        text = entries(owner.__doc__ or "", "Attributes").get(item.name, declared.text)
        metavar = declared.metavar or METAVARS.get(taken, "TYPE")
        options[item.name] = replace(declared, name=item.name, kind=taken, text=text, metavar=metavar)
    return options


@cache
def entries(docstring: str, section: str) -> dict[str, str]:
    """The entries `name: text` of one section of a docstring; their further lines are indented."""
    body = inspect.cleandoc(docstring).partition(f"{section}:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^(\w+):\s+", textwrap.dedent(body), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _declared_type(owner: type, name: str) -> Any:
    """The type of one field without None; other annotations may name types that load for checkers only."""
    kind = eval(owner.__annotations__[name], vars(sys.modules[owner.__module__]))
    kinds = [argument for argument in get_args(kind) if argument is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind
