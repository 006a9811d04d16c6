"""Pipelines as text: `fuse-layer-norm{channel_axis=transpose},clean-casts` and back.

    pipeline = [ pass { "," pass } ]
    pass     = name [ "{" [ option { " " option } ] "}" ]
    option   = field "=" [ value { "," value } ]

A value that holds anything but letters, digits and `_ . / * ? : + -` stands in double quotes, with
the escapes of JSON. Spaces around commas and braces do not matter. The options of a pass are its dataclass
fields: a bool, int, float, str, a Literal of strings, or a tuple of strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import EllipsisType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rewriter.ir.base import GraphPass, ModelPass, Pass
from rewriter.ir.errors import UsageError, nearest
from rewriter.pipeline import registry
from rewriter.pipeline.reader import Text, converted, expected

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_./*?:+-]+")
_VALUE = re.compile(rf'"(?:[^"\\]|\\.)*"|{_PLAIN.pattern}')
_TOKEN = re.compile(rf"{_VALUE.pattern}|\S")


@dataclass(frozen=True)
class PassOption:
    """One option of a pass. `kind` is the annotation of its field."""

    name: str
    kind: Any
    default: Any

    @property
    def type_text(self) -> str:
        """The type as a user writes it: `auto | always | never`, `float`, `text,text`."""
        if get_origin(self.kind) is Literal:
            return " | ".join(map(str, get_args(self.kind)))
        if get_origin(self.kind) is tuple:
            return "text,text,..."
        return {bool: "true | false", str: "text"}.get(self.kind) or str(self.kind.__name__)

    @property
    def default_text(self) -> str:
        """The default as a user writes it; empty for an empty list."""
        return _text(self.default)

    def read(self, texts: Sequence[str], where: str) -> object:
        """Returns its value from texts, several for a tuple.

        Raises:
            UsageError: the type does not take them.
        """
        try:
            given = [str(json.loads(text)) if text.startswith('"') else text for text in texts]
            if get_origin(self.kind) is tuple:
                return tuple(given)
            if len(given) != 1:
                raise ValueError(f"it takes one value: {expected(self.kind)}")
            return converted(Text(given[0]), self.kind)
        except ValueError as error:
            what = f"option {self.name!r} cannot be {','.join(texts)!r}"
            raise UsageError(what, where=where, hint=f"{error}, such as {self.default_text}") from error


@cache  # evaluating the annotations of all passes costs 30 ms, and every report renders them
def options_of(kind: type[Pass]) -> Mapping[str, PassOption]:
    """The options of a pass by name, in the order of its fields.

    Raises:
        TypeError: a field has a type that cannot be written as text, or has no default: a defect
            of the pass.
    """
    hints = get_type_hints(kind)
    return {f.name: _option(kind, f.name, hints[f.name], f.default) for f in fields(kind)}


def _option(kind: type[Pass], name: str, hint: Any, default: Any) -> PassOption:
    known = hint in (bool, int, float, str) or hint == tuple[str, ...]
    literal = get_origin(hint) is Literal and all(isinstance(a, str) for a in get_args(hint))
    if default is MISSING or not (known or literal):
        raise TypeError(f"{kind.__name__}.{name}: {hint} with default {default!r} cannot be an option")
    return PassOption(name, hint, default)


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
    found: list[Pass] = []
    for entry in [passes] if isinstance(passes, str) else passes:
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
        hint = "give names, or objects of classes that derive from GraphPass or ModelPass of rewriter.ir.base"
        raise UsageError(f"it is no pass: {entry!r}", where="`passes`", hint=hint)
    if not isinstance(getattr(entry, "name", None), str):
        hint = 'give its class a name: name = "my-pass"'
        raise UsageError("the pass has no name", where=f"`passes` {type(entry).__name__}()", hint=hint)
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
    return ",".join(step.name + _options(step, known=type(step) in ours) for step in passes)


def _options(step: Pass, *, known: bool) -> str:
    """`{name=value ...}` of the options that differ from their defaults; empty if none does."""
    try:
        options = options_of(type(step)).values()
    except TypeError:  # its fields hold what no text can
        if known:
            raise
        return ""
    values = [(option, getattr(step, option.name)) for option in options]
    parts = [f"{o.name}={_text(v)}" for o, v in values if v != o.default or type(v) is not type(o.default)]
    return "{" + " ".join(parts) + "}" if parts else ""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_text(part) for part in value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return repr(value)


class _Reader:
    """Recursive descent over the grammar in the module's docstring."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*_TOKEN.finditer(text)][::-1]
        """Those to come; the next one is the last."""

    def pipeline(self) -> Iterator[Pass]:
        if not self.tokens:
            return
        yield self.one_pass()
        while self.accept(","):
            yield self.one_pass()
        if self.tokens:
            raise self.error("expected a comma or the end")

    def one_pass(self) -> Pass:
        where, options = self.where(), dict[str, object]()
        kind = registry.find(self.take(_NAME, "the name of a pass"), where)
        if self.accept("{"):
            while not self.accept("}"):
                self.option(kind, options)
        return kind(**options)

    def option(self, kind: type[Pass], options: dict[str, object]) -> None:
        where, known = self.where(), options_of(kind)
        name = self.take(_NAME, "an option or }")
        if name not in known:
            hint = nearest(name, known) if known else f"{kind.name} has no options"
            raise UsageError(f"{kind.name} has no option {name!r}", where=where, hint=hint)
        if name in options:
            what = f"{kind.name}: option {name!r} is given twice"
            raise UsageError(what, where=where, hint="keep one of the two")
        if not self.accept("="):
            raise self.error(f"expected = after option {name!r}")
        options[name] = known[name].read([*self.values()], where)

    def values(self) -> Iterator[str]:
        if self.next() == "}" or self.next(after=1) == "=":  # `name=` next: the value before it is empty
            return
        yield self.take(_VALUE, "a value")
        while self.accept(","):
            yield self.take(_VALUE, "a value")

    def next(self, after: int = 0) -> str:
        return self.tokens[-1 - after][0] if len(self.tokens) > after else ""

    def accept(self, sign: str) -> bool:
        accepted = self.next() == sign
        if accepted:
            self.tokens.pop()
        return accepted

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        if not pattern.fullmatch(self.next()):
            raise self.error(f"expected {what}")
        return self.tokens.pop()[0]

    def where(self) -> str:
        position = self.tokens[-1].start() if self.tokens else len(self.text)
        return f"pipeline {self.text!r}, column {position + 1}"

    def error(self, message: str) -> UsageError:
        found = repr(self.next()[0]) if self.tokens else "the end"
        hint = 'the form is "pass{option=value other=value},pass"'
        return UsageError(f"{message}, found {found}", where=self.where(), hint=hint)
