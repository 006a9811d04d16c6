"""Declares an option once, as the field of a dataclass, and reads the declarations back.

The command line's parameter, the key in files, the variable, the keyword of the API and the row of
docs/configuration.md all come from the field's `Declaration`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike
from types import NoneType
from typing import Any, Literal, get_args

PREFIX = "REWRITER_"

AnyPath = str | PathLike[str]
Names = Sequence[str]
Paths = Sequence[AnyPath]
Shapes = Mapping[str, Sequence[int]]

Place = Literal["python", "command line", "file"]
EVERYWHERE: tuple[Place, ...] = ("python", "command line", "file")
ONE_RUN: tuple[Place, ...] = ("python", "command line")
"""For what belongs to one run, so that no file may set it. `file` stands for the environment, too."""


@dataclass(frozen=True)
class Declaration:
    """One option of a command.

    Attributes:
        name: The name of its field, which is the keyword of the API.
        kind: The type of its value on the command line and in files, without `None`.
        default: The value where nobody sets it; None: the preset or the model decides.
        help: The line in `--help`.
        about: The text of docs/configuration.md and of `help(rewriter.fix)`: its entry in the docstring of
            the class. "": that of `help`.
        panel: The group in `--help`.
        metavar: Its value in `--help`; "" for a switch.
        flags: Its names on the command line, if they are not `--name`.
        places: Where it may be set.
        check: Raises `UsageError` or `ValueError` for a value of the right type that makes no sense.
        read: Reads its value from text, where the type alone does not say how.
        complete: Returns what the shell offers for an incomplete value.
        commas: Whether one text of the command line lists several values.
        least: The smallest value, for a whole number.
        words: Other names that users may try; for hints.
    """

    name: str = ""
    kind: Any = None
    default: Any = None
    help: str = ""
    about: str = ""
    panel: str = ""
    metavar: str = ""
    flags: tuple[str, ...] = ()
    places: tuple[Place, ...] = EVERYWHERE
    check: Callable[[Any], object] | None = None
    read: Callable[[str], Any] | None = None
    complete: Callable[[str], list[Any]] | None = None
    commas: bool = False
    least: int | None = None
    words: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """As in a file: `keep-fp32`."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """As on the command line: `--keep-fp32`."""
        return self.flags[0].partition("/")[0] if self.flags else f"--{self.key}"

    @property
    def variable(self) -> str:
        """As in the environment: `REWRITER_KEEP_FP32`."""
        return PREFIX + self.name.upper()

    @property
    def text(self) -> str:
        """The explanation outside `--help`."""
        return self.about or f"{self.help}."


def option(default: Any, text: str, panel: str = "", metavar: str = "", **more: Any) -> Any:
    """A field of an options class; `text` is its help, and `more` are attributes of `Declaration`."""
    declared = Declaration(default=default, help=text, panel=panel, metavar=metavar, **more)
    return field(default=default, metadata={"option": declared})


def like(options: type, name: str, /, **changed: Any) -> Any:
    """A field declared as that of another options class, with other values for some attributes."""
    declared = replace(declarations(options)[name], **changed)
    return field(default=declared.default, metadata={"option": declared})


@cache
def declarations(kind: type) -> Mapping[str, Declaration]:
    """The options of an options class by name, in the order of its fields."""
    found = {}
    for item in fields(kind):
        declared: Declaration = item.metadata["option"]
        owner = next(base for base in kind.__mro__ if item.name in vars(base).get("__annotations__", {}))
        taken = declared.kind or _without_none(_annotation(owner, item.name))
        about = entries(owner.__doc__ or "", "Attributes").get(item.name, declared.about)
        found[item.name] = replace(declared, name=item.name, kind=taken, about=about)
    return found


def entries(docstring: str, section: str) -> dict[str, str]:
    """The entries `name: text` of one section of a docstring; their further lines are indented."""
    body = inspect.cleandoc(docstring).partition(f"{section}:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^(\w+):\s+", textwrap.dedent(body), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _annotation(owner: type, name: str) -> Any:
    """The evaluated annotation of one field; others may name types that load for type checkers only."""
    return eval(owner.__annotations__[name], vars(sys.modules[owner.__module__]))


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    kinds = get_args(kind)
    return next(k for k in kinds if k is not NoneType) if NoneType in kinds else kind
