"""Values of options and arguments against their annotations, for calls from Python.

Fields that list something take one text, too: `keep_fp32="*/norm*"` is one pattern.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rewriter.errors import UsageError, did_you_mean
from rewriter.pipeline.declaration import declarations

SHOWN = 60
"""Characters of a wrong value that a message shows."""

_WANTED: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
    types.NoneType: "None",
    Mapping: "a dict such as {'input': (1, 3, 8)}",
}


class _Misfit(Exception):
    """A value is not of a type."""


def checked_options(options: Any, kind: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an options class as they are to be used: keywords replace those of `options`.

    Args:
        options: An instance of `kind`; None: its defaults.

    Raises:
        UsageError: a keyword is no option, or a value has the wrong type.
    """
    if options is not None and not isinstance(options, kind):
        hint = f"give options by name, such as inputs=...; or a rewriter.{kind.__name__}"
        raise UsageError(f"it cannot be {shortened(options)}", where="options=", hint=hint)
    known = declarations(kind)
    for name in keywords:
        if name not in known:
            called = {word.replace("-", "_"): key for key, d in known.items() for word in (key, *d.words)}
            raise unknown_keyword(name, called)
    own = {name: getattr(options, name) if options else d.default for name, d in known.items()}
    values = {**own, **keywords}
    hints = type_hints(kind)
    return {name: fitted(value, hints[name], known[name].flag) for name, value in values.items()}


def unknown_keyword(name: str, called: Mapping[str, str]) -> UsageError:
    """The error for a keyword that a function lacks; `called` maps words that users try to its keywords."""
    close = did_you_mean(name, called)
    word = close.partition("'")[2].rpartition("'")[0]
    hint = (
        f"did you mean {called[word]}=?"
        if close
        else f"there are {', '.join(dict.fromkeys(called.values()))}"
    )
    return UsageError("there is no such keyword", where=f"{name}=", hint=hint)


@cache
def type_hints(kind: Any) -> Mapping[str, Any]:
    """The evaluated annotations of a class or function."""
    from rewriter.base import Pass
    from rewriter.figures.tolerances import Tolerance
    from rewriter.hazards import Rule

    later = {"Tolerance": Tolerance, "Pass": Pass, "Rule": Rule, "EllipsisType": types.EllipsisType}
    return get_type_hints(kind, localns=later)


def fitted(value: Any, kind: Any, where: str) -> Any:
    """The value as its annotation has it.

    Raises:
        UsageError: it has another type; the message names `where`, and what is accepted.
    """
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for choice in choices:
        try:
            return _read(value, choice)
        except _Misfit:
            continue
    if any(get_origin(choice) is Sequence for choice in choices) and str not in choices:
        choices = (str, *choices)
    wanted = " or ".join(dict.fromkeys(_wanted(choice) for choice in choices if choice is not types.NoneType))
    words = get_args(choices[0]) if get_origin(choices[0]) is Literal else ()
    hint = f"choose from {', '.join(map(str, words))}" if words else f"it takes {wanted}"
    raise UsageError(f"it cannot be {shortened(value)}", where=where, hint=hint)


def shortened(value: Any) -> str:
    """The value as Python writes it, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}... (a {type(value).__name__})"


def _read(value: Any, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is Any:
        return value
    if origin is Literal:
        return _only(value, isinstance(value, str) and value in get_args(kind))
    if origin is Sequence:
        return _several(value, get_args(kind)[0])
    if origin is Mapping:
        return _mapped(value, get_args(kind))
    if origin in (int, float):
        number = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        return _only(value, number)
    if origin is Callable:
        return _only(value, callable(value))
    return _only(value, isinstance(value, origin))


def _only(value: Any, fits: bool) -> Any:
    if not fits:
        raise _Misfit
    return value


def _several(value: Any, kind: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, os.PathLike)):
        value = (value,)
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise _Misfit
    return tuple(_of_any(item, kind) for item in value)


def _mapped(value: Any, kinds: tuple[Any, Any]) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _Misfit
    return {_read(key, kinds[0]): _of_any(item, kinds[1]) for key, item in value.items()}


def _of_any(value: Any, kind: Any) -> Any:
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for choice in choices:
        try:
            return _read(value, choice)
        except _Misfit:
            continue
    raise _Misfit


def _wanted(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin is Sequence:
        inner = get_args(kind)[0]
        of_numbers = inner in (int, float)
        return "a list of numbers" if of_numbers else "a list of texts such as ['*/norm*', 'head']"
    return _WANTED.get(origin) or f"a {getattr(origin, '__name__', 'value')}"
