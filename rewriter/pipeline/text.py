"""Pipelines as text: `merge-projections{longest=256},clean-casts` and back.

    pipeline = [ pass { "," pass } ]
    pass     = name [ "{" { option "=" value } "}" ]

Spaces separate options and are ignored elsewhere. The options of a pass are its dataclass fields: bool, int,
float, str or a Literal of strings. A value consists of letters, digits and `_ . / * ? : + -`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import EllipsisType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rewriter.base.errors import UsageError, nearest
from rewriter.passes.base import GraphPass, ModelPass, Pass
from rewriter.pipeline.schema import Option, Text, read

_STEP = re.compile(r"\s*([\w-]+)\s*(?:\{([^{}]*)\}\s*)?(,|$)")
_OPTION = re.compile(r"\s*([\w-]+)\s*=\s*([\w./*?:+-]+)(?:\s+|$)")


def own_passes() -> dict[str, type[Pass]]:
    """Our passes by name, in the order of `ALL`."""
    from rewriter.passes import ALL

    return {kind.name: kind for kind in ALL}


def find(name: str, **where: Any) -> type[Pass]:
    """Returns the pass of that name; raises UsageError, with its `where` or `option`, if there is none."""
    own = own_passes()
    if name not in own:
        hint = f"{nearest(name, own)}; `rewriter passes` lists them"
        raise UsageError(f"unknown pass {name!r}", hint=hint, **where)
    return own[name]


def require(names: Iterable[str]) -> None:
    for name in names:
        find(name)


@cache  # evaluating the annotations of all passes costs 30 ms, and every report renders them
def options_of(kind: type[Pass]) -> Mapping[str, Option]:
    """The options of a pass by name; TypeError: it has one that cannot be written as text, or no default."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        literal = get_origin(hint) is Literal and all(isinstance(choice, str) for choice in get_args(hint))
        if item.default is MISSING or not (literal or hint in (bool, int, float, str)):
            raise TypeError(f"{kind.__name__}.{item.name}: {hint} cannot be an option, or has no default")
    return {item.name: Option(item.name, hints[item.name], item.default) for item in fields(kind)}


def parse(text: str) -> tuple[Pass, ...]:
    """Reads the passes of a pipeline's text.

    Raises:
        UsageError: an unknown pass or option, a value of the wrong type, or a syntax error; the
            message gives the column (from 1) and the nearest name that exists.
    """
    return tuple(_steps(text)) if text.strip() else ()


def _steps(text: str) -> Iterator[Pass]:
    end, more = 0, ","
    while more:
        where = f"pipeline {text!r}, column {end + 1}"
        match = _STEP.match(text, end)
        if match is None:
            hint = 'the form is "pass{option=value other=value},pass"'
            raise UsageError(f"expected a pass, found {text[end:] or 'the end'!r}", where=where, hint=hint)
        name, options, more = match.groups()
        kind, end = find(name, where=where), match.end()
        yield kind(**_values(kind, options or "", where))


def _values(kind: type[Pass], text: str, where: str) -> dict[str, Any]:
    options, values = options_of(kind), dict[str, Any]()
    text = text.strip()
    while text:
        match = _OPTION.match(text)
        if match is None:
            what, hint = f"{kind.name}: expected option=value, found {text!r}", "spaces separate options"
            raise UsageError(what, where=where, hint=f"{hint}; a value has no spaces and no quotes")
        name, value = match.groups()
        if name not in options:
            hint = nearest(name, options) if options else f"{kind.name} has no options"
            raise UsageError(f"{kind.name} has no option {name!r}", where=where, hint=hint)
        if name in values:
            what = f"{kind.name}: option {name!r} is given twice"
            raise UsageError(what, where=where, hint="keep one of the two")
        values[name] = read(options[name], Text(value), f"{where}, {kind.name}'s option {name!r}")
        text = text[match.end() :]
    return values


def listed(
    passes: str | Iterable[str | Pass | EllipsisType], preset: Sequence[Pass] = ()
) -> tuple[Pass, ...]:
    """Reads a pipeline that is text, or a list of such texts and passes; `...` inserts the preset's passes.

    Raises:
        UsageError: as `parse`; or an entry is something else.
    """
    steps: list[Pass] = []
    for entry in [passes] if isinstance(passes, str) else passes:
        if isinstance(entry, str):
            steps.extend(parse(entry))
        elif isinstance(entry, EllipsisType):
            steps.extend(preset)
        else:
            steps.append(_given(entry))
    return tuple(steps)


def _given(entry: Any) -> Pass:
    """A pass of the user's code."""
    if isinstance(entry, type) and issubclass(entry, Pass):
        entry = entry()
    if not isinstance(entry, (GraphPass, ModelPass)):
        hint = "give names, or objects of classes derived from GraphPass or ModelPass of rewriter.passes.base"
        raise UsageError(f"it is no pass: {entry!r}", option="passes", hint=hint)
    try:
        hash(entry)
    except TypeError as error:
        what = f"its options cannot be compared: {error}"
        hint = "make it a frozen dataclass with fields that can be hashed: tuples for lists, and no dicts"
        raise UsageError(what, where=f"pass {entry.name!r}", hint=hint) from error
    return entry


def render(passes: Iterable[Pass]) -> str:
    """The shortest text of a pipeline, without options at their defaults, or that no text can hold."""
    return ",".join(step.name + _options(step) for step in passes)


def _options(step: Pass) -> str:
    """`{name=value ...}` of the options that differ from their defaults; empty if none does."""
    try:
        options = options_of(type(step)).values()
    except TypeError:
        return ""
    values = [(option, getattr(step, option.name)) for option in options]
    parts = [f"{option.name}={value_text(value)}" for option, value in values if value != option.default]
    return "{" + " ".join(parts) + "}" if parts else ""


def value_text(value: object) -> str:
    """The value of an option in a pipeline's text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
