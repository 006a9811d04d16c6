"""Pipelines as text: `fuse-layer-norm{channel_axis=transpose},clean-casts` and back.

    pipeline = [ pass { "," pass } ]
    pass     = name [ "{" [ option { " " option } ] "}" ]
    option   = field "=" [ value { "," value } ]

A value that holds anything but letters, digits and `_ . / * ? : + -` stands in double quotes, with
the escapes of JSON. Spaces around commas and braces do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any

from rewriter.base import GraphPass, ModelPass, Pass
from rewriter.errors import UsageError
from rewriter.pipeline import registry
from rewriter.pipeline.pass_options import parse_option, render_options

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OPTION = re.compile(r"[A-Za-z0-9_-]+\s*=")
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z0-9_./*?:+-]+')


def parse(text: str) -> tuple[Pass, ...]:
    """Reads the passes of a pipeline's text.

    Raises:
        UsageError: an unknown pass or option, a value of the wrong type, or a syntax error; the
            message gives the column (from 1) and the nearest name that exists.
    """
    return tuple(_Reader(text).pipeline())


def listed(
    passes: str | Iterable[str | Pass | EllipsisType], preset: Sequence[Pass] = ()
) -> tuple[Pass, ...]:
    """Reads a pipeline that is text, or a list of such texts and passes; `...` stands for the preset's.

    Raises:
        UsageError: as `parse`; or an entry is something else.
    """
    if isinstance(passes, str):
        return parse(passes)
    found: list[Pass] = []
    for entry in passes:
        if isinstance(entry, str):
            found.extend(parse(entry))
        elif isinstance(entry, EllipsisType):
            found.extend(preset)
        else:
            found.append(_given(entry))
    return tuple(found)


def _given(entry: Any) -> Pass:
    """A pass of the user's code."""
    if isinstance(entry, type) and issubclass(entry, Pass):
        entry = entry()
    if not isinstance(entry, (GraphPass, ModelPass)):
        hint = "give names, or objects of classes that derive from GraphPass or ModelPass of rewriter.base"
        raise UsageError(f"it is no pass: {entry!r}", where="--passes", hint=hint)
    if not isinstance(getattr(entry, "name", None), str):
        hint = 'give its class a name: name = "my-pass"'
        raise UsageError("the pass has no name", where=f"--passes {type(entry).__name__}()", hint=hint)
    try:
        hash(entry)
    except TypeError as error:
        what = f"its options cannot be compared: {error}"
        hint = "make it a frozen dataclass with fields that can be hashed: tuples for lists, and no dicts"
        raise UsageError(what, where=f"pass {entry.name!r}", hint=hint) from error
    return entry


def render(passes: Iterable[Pass]) -> str:
    """Writes the shortest text of a pipeline: options at their defaults are left out.

    A pass of the user's own code, which no text can name, is written with its name alone.
    """
    ours = frozenset(registry.own_passes().values()) if (passes := tuple(passes)) else frozenset()
    return ",".join(step.name + (_options(step, known=type(step) in ours)) for step in passes)


def _options(step: Pass, *, known: bool) -> str:
    try:
        return render_options(step)
    except TypeError:  # its fields hold what no text can
        if known:
            raise
        return ""


class _Reader:
    """Recursive descent over the grammar in the module's docstring."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def pipeline(self) -> Iterable[Pass]:
        if not self.text.strip():
            return
        yield self.one_pass()
        while self.accept(","):
            yield self.one_pass()
        self.skip_spaces()
        if self.position < len(self.text):
            raise self.error("expected a comma or the end")

    def one_pass(self) -> Pass:
        self.skip_spaces()
        start = self.position
        kind = registry.find(self.take(_NAME, "the name of a pass"), self.at(start))
        options: dict[str, object] = {}
        if self.accept("{"):
            while not self.accept("}"):
                self.option(kind, options)
        return kind(**options)

    def option(self, kind: type[Pass], options: dict[str, object]) -> None:
        self.skip_spaces()
        start = self.position
        name = self.take(_NAME, "an option or }")
        if name in options:
            raise UsageError(
                f"{kind.name}: option {name!r} is given twice",
                where=self.at(start),
                hint="keep one of the two",
            )
        if not self.accept("="):
            raise self.error(f"expected = after option {name!r}")
        options[name] = parse_option(kind, name, self.values(), self.at(start))

    def values(self) -> list[str]:
        self.skip_spaces()
        if self.starts_option() or self.text.startswith("}", self.position):
            return []
        values = [self.take(_VALUE, "a value")]
        while self.accept(","):
            self.skip_spaces()
            values.append(self.take(_VALUE, "a value"))
        return values

    def starts_option(self) -> bool:
        """True if `name=` comes next; after an `=` this means that the value before it is empty."""
        return _OPTION.match(self.text, self.position) is not None

    def accept(self, sign: str) -> bool:
        self.skip_spaces()
        if not self.text.startswith(sign, self.position):
            return False
        self.position += len(sign)
        return True

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.error(f"expected {what}")
        self.position = match.end()
        return match[0]

    def skip_spaces(self) -> None:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1

    def at(self, position: int) -> str:
        return f"pipeline {self.text!r}, column {position + 1}"

    def error(self, message: str) -> UsageError:
        found = repr(self.text[self.position]) if self.position < len(self.text) else "the end"
        return UsageError(
            f"{message}, found {found}",
            where=self.at(self.position),
            hint='the form is "pass{option=value other=value},pass"',
        )
