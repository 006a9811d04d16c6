"""Reads JSON and TOML that others may have written: it is as its type says, or an error names the key."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from rewriter.base.errors import UsageError, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

Extra = Literal["ignore", "forbid"]


def from_json(text: str | bytes, kind: Any, where: str, hint: str, *, extra: Extra = "forbid") -> Any:
    """Returns the content of a JSON text as an instance of a type; nothing is converted to fit.

    Data nested more than 200 levels deep, and numbers of more than 4,300 digits, are refused.

    Args:
        kind: A data class, or any other type that Pydantic knows; its every field is checked.
        hint: What to do if it is something else.
        extra: What to do with keys that are no fields of a data class.

    Raises:
        UsageError: it is not JSON or not of the type; the message names `where` and the key.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], kind, where, hint) from error


def read_json(path: Path, kind: Any, hint: str, *, extra: Extra = "forbid") -> Any:
    """Returns the content of a file, as `from_json`."""
    return from_json(content_of(path, hint), kind, str(path), hint, extra=extra)


def read_toml(path: Path, hint: str, where: str = "") -> dict[str, Any]:
    """Returns the tables of a file; a UsageError names `where`, or else the path, if it is not TOML."""
    where, text = where or str(path), ""
    try:
        text = content_of(path, hint, where).decode()
        return tomllib.loads(text)
    except RecursionError:
        what = "it is nested too deeply"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"it is not TOML: {error}"
    except ValueError:  # Python reads no integer of over 4,300 digits, and does not report its position
        before = re.split(r"[\d_]{4300}", text)[0]
        what = f"the integer in line {before.count(chr(10)) + 1} has too many digits"
    raise UsageError(what, where=where, hint=hint)


def own_table(package: str, name: str) -> dict[str, Any]:
    """The tables of a TOML file that comes with a package of ours."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def tuples(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table with tuples for its lists, as frozen data classes have them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def content_of(path: str | os.PathLike[str], hint: str, where: str = "") -> bytes:
    """The bytes of a file; raises a UsageError that names `where`, or else the path, if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, TypeError, ValueError) as error:  # no path, or one with a NUL
        what = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(what, where=where or str(path), hint=hint) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _refusal(problem: ErrorDetails, kind: Any, where: str, hint: str) -> UsageError:
    """The error for the first problem that Pydantic found: where it is, what it is, and what is expected."""
    *above, key = problem["loc"] or ("",)
    inside = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in above).lstrip(".")
    position = f"{where}: {inside}" if inside else where
    if problem["type"] == "json_invalid":
        return UsageError(f"it is not JSON: {problem.get('ctx', {})['error']}", where=where, hint=hint)
    if problem["type"] in ("missing", "missing_argument"):
        return UsageError(f"it has no {key!r}", where=position, hint=hint)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        hint = f"there are {', '.join(_fields(kind, above))}"
        return UsageError(f"there is no field {key!r}", where=position, hint=hint)
    expected = problem["msg"].replace("Input should be", "it has to be").removeprefix("Value error, ")
    what = repr(key) if isinstance(key, str) and key else f"item {key}" if above else "it"
    return UsageError(f"{what} cannot be {shortened(problem['input'])}", where=position, hint=expected)


def _fields(kind: Any, position: Iterable[int | str]) -> Iterable[str]:
    """The names of the fields of the data class at a place of `kind`."""
    for step in (*position, ""):
        while kinds := [argument for argument in get_args(kind) if argument not in (NoneType, ...)]:
            kind = kinds[-1]  # of `T | None`, `tuple[T, ...]` or `dict[str, T]`
        kind = get_type_hints(kind).get(str(step), kind)
    return get_type_hints(kind)
