"""Reads the options of a pass, which are its dataclass fields, from text and writes them back.

A field may be a bool, int, float, str, a Literal of strings, or a tuple of strings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rewriter.base import Pass
from rewriter.errors import UsageError, did_you_mean

_PLAIN = re.compile(r"[A-Za-z0-9_./*?:+-]+")


@dataclass(frozen=True)
class Option:
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


@cache  # evaluating the annotations of all passes costs 30 ms, and every report renders them
def options_of(kind: type[Pass]) -> Mapping[str, Option]:
    """The options of a pass by name, in the order of its fields.

    Raises:
        TypeError: a field has a type that cannot be written as text, or has no default: a defect
            of the pass.
    """
    hints = get_type_hints(kind)
    return {f.name: _option(kind, f.name, hints[f.name], f.default) for f in fields(kind)}


def parse_option(kind: type[Pass], name: str, values: list[str], where: str) -> object:
    """Reads the value of option `name` from its texts (several for a tuple), quotes included.

    Raises:
        UsageError: no such option, or text that its type does not take.
    """
    options = options_of(kind)
    if name not in options:
        hint = nearest(name, options) if options else f"{kind.name} has no options"
        raise UsageError(f"{kind.name} has no option {name!r}", where=where, hint=hint)
    option = options[name]
    try:
        return _value(option.kind, [_unquoted(value) for value in values])
    except ValueError as error:
        raise UsageError(
            f"{kind.name}: option {name!r} cannot be {','.join(values)!r}",
            where=where,
            hint=_value_hint(option, values, str(error)),
        ) from error


def render_options(step: Pass) -> str:
    """`{name=value ...}` of the options that differ from their defaults; empty if none does."""
    parts = []
    for option in options_of(type(step)).values():
        value = getattr(step, option.name)
        if value != option.default or type(value) is not type(option.default):
            parts.append(f"{option.name}={_text(value)}")
    return "{" + " ".join(parts) + "}" if parts else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint: the known name closest to `name`, or all names if none is close."""
    names = list(known)
    return did_you_mean(name, names) or "choose from " + ", ".join(names)


def _option(kind: type[Pass], name: str, hint: Any, default: Any) -> Option:
    known = hint in (bool, int, float, str) or hint == tuple[str, ...]
    literal = get_origin(hint) is Literal and all(isinstance(a, str) for a in get_args(hint))
    if default is MISSING or not (known or literal):
        raise TypeError(f"{kind.__name__}.{name}: {hint} with default {default!r} cannot be an option")
    return Option(name, hint, default)


def _value(kind: Any, values: list[str]) -> object:
    if get_origin(kind) is tuple:
        return tuple(values)
    if len(values) != 1:
        raise ValueError("it takes one value")
    (text,) = values
    if get_origin(kind) is Literal:
        return _one_of(text, {choice: choice for choice in get_args(kind)})
    if kind is bool:
        return _one_of(text, {"true": True, "false": False})
    if kind is float:
        return _number(text)
    return kind(text)


def _one_of(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(nearest(text, choices))
    return choices[text]


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError("NaN is not a setting")
    return number


def _value_hint(option: Option, values: list[str], reason: str) -> str:
    own_words = len(values) != 1 or not (option.kind is int or option.kind is float)
    return (
        reason if own_words else f"it takes a value of type {option.type_text}, such as {option.default_text}"
    )


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_text(part) for part in value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return repr(value)
