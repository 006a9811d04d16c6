"""Reads values by their type from TOML and from text, and writes them back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rewriter.pipeline.declaration import Declaration, Names, Paths, Shapes
from rewriter.pipeline.pass_options import nearest

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
TRUTH: dict[str, bool] = dict.fromkeys(TRUE, True)
TRUTH.update(dict.fromkeys(FALSE, False))

EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Names: "a list of texts",
    Paths: "a list of paths",
    Shapes: "a table of shapes, such as { image = [1, 3, 224, 224] }",
}


def expected(key: Declaration) -> str:
    """Returns the type for people: `true or false`, `fp16, bf16 or fp32`, `a list of texts`."""
    if get_origin(key.kind) is Literal:
        *most, last = get_args(key.kind)
        return f"{', '.join(most)} or {last}"
    if key.name == "passes":
        return "a text or a list of texts"
    return EXPECTED[key.kind]


def from_toml(key: Declaration, value: Any, folder: Path) -> Any:
    """Returns the value of an option from TOML; paths are relative to `folder`.

    Raises:
        ValueError: it has another type; the message names the expected type.
    """
    kind = key.kind
    if key.name == "passes" and _texts(value):
        return ",".join(value)
    if get_origin(kind) is Literal and isinstance(value, str):
        return _choice(value, get_args(kind))
    if kind == Names and _texts(value):
        return tuple(value)
    if kind == Paths and _texts(value):
        return tuple(folder / Path(part).expanduser() for part in value)
    if kind == Shapes and isinstance(value, Mapping):
        return {name: _shape(dims) for name, dims in value.items()}
    if kind is Path and isinstance(value, str) and value:
        return folder / Path(value).expanduser()
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:  # True is an int, too
        return value
    raise ValueError(f"it takes {expected(key)}")


def from_text(key: Declaration, text: str) -> Any:
    """Returns the value of an option from the environment; paths are relative to the current folder.

    Raises:
        ValueError: the text does not fit the type; the message names the expected type.
    """
    kind = key.kind
    if key.read is not None:
        return key.read(text)
    if kind in (Names, Paths):
        return from_toml(key, [part.strip() for part in text.split(",") if part.strip()], Path())
    if kind == Shapes:
        return dict(shape_from_text(part) for part in text.split(","))
    if kind in (bool, int, float):
        try:
            return TRUTH[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"it takes {expected(key)}") from None
    return from_toml(key, text, Path())


def shape_from_text(text: str) -> tuple[str, tuple[int, ...]]:
    """Reads `image:1x3x224x224`: the name may contain colons, the shape of a scalar is empty.

    Raises:
        ValueError: the text is no shape.
    """
    name, colon, dims = text.strip().rpartition(":")
    try:
        if name and colon:
            return name, _shape([int(dim) for dim in dims.split("x") if dim or dims])
    except ValueError:
        pass
    raise ValueError("it takes NAME:1x3x224x224, sizes from 1")


def to_text(value: Any) -> str:
    """Returns the value as written in a file; `-` for none."""
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_bare(k)} = {list(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, default=str, ensure_ascii=False)


def _bare(name: str) -> str:
    plain = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if plain else json.dumps(name)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(nearest(text, choices))
    return text


def _shape(dims: Any) -> tuple[int, ...]:
    if not (isinstance(dims, list) and all(type(dim) is int and dim > 0 for dim in dims)):
        raise ValueError("a shape is a list of sizes from 1, such as [1, 3, 224, 224]")
    return tuple(dims)
