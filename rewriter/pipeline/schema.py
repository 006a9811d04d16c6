"""Declares an option once, as the field of a dataclass, and reads its value from any source.

Parameters, keys, variables, keywords and the rows of docs/configuration.md come from the field and from its
entry in the docstring of the class, whose first sentence is the line in `--help`. All sources go through
`converted`; those that only have texts wrap them in `Text`. A list accepts a single value, too.
"""

import inspect
import json
import os
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from rewriter.base.errors import UsageError, did_you_mean, nearest, shortened

PREFIX = "REWRITER_"

AnyPath = str | PathLike[str]
Names = Sequence[str]
Paths = Sequence[AnyPath]
Shapes = Mapping[str, Sequence[int]]

Source = Literal["python", "command line", "file"]
EVERYWHERE: tuple[Source, ...] = ("python", "command line", "file")
ONE_RUN: tuple[Source, ...] = ("python", "command line")
"""For options of a single run, which no file may set. `file` includes the environment."""

COMMAND: tuple[Source, ...] = ("command line",)
"""For options of one command that no function of the API has."""

METAVARS: Mapping[Any, str] = {int: "N", float: "NUMBER", Path: "FILE", Names: "A,B", Paths: "FILE"}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        read: Reads its value from text, where the type is not enough.
        check: Raises `UsageError` or `ValueError` for a value of the right type that makes no sense. It may
            be given as `package.module:name`, as may the next: a shell that completes imports nothing then.
        offers: The names that the shell offers, or a function that returns them with their explanations.
    """

    name: str = ""
    kind: Any = None  # the type of its value in texts and files, without `None`
    default: Any = None  # the value if it is not set; None: the preset or the model decides
    text: str = ""
    panel: str = ""
    metavar: str = ""
    set_in: tuple[Source, ...] = EVERYWHERE
    read: Callable[[str], Any] | None = None
    check: str | Callable[[Any], object] | None = None
    offers: str | Callable[[], Mapping[str, str]] | Iterable[str] = ()
    commas: bool = True  # True if one text of the command line lists several values
    least: float | None = None
    above: float | None = None  # a number that is too small

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
        turned = self.kind is bool and self.default is not None and "file" in self.set_in
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
    declared = Option(default=default, panel=panel, metavar=metavar, **more)
    return field(default=default, metadata={"option": declared})


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
        # other annotations may name types that load for checkers only
        kind_of = declared.kind or eval(owner.__annotations__[item.name], vars(sys.modules[owner.__module__]))
        taken = get_args(kind_of)[0] if NoneType in get_args(kind_of) else kind_of
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


TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
TRUTH: dict[str, bool] = {text: text in TRUE for text in (*TRUE, *FALSE)}

LARGEST = 2**63  # bound on whole numbers, as in TOML

WANTED: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    os.PathLike: "a path",
    dict: "numbers by input, such as { sr = 16000 }",
    Mapping: "shapes, such as { image = [1, 3, 224, 224] }",
}

INSTEAD: Mapping[str, str] = {
    "fp16": "leave it out: FP16 is the default",
    "bf16": "use `preset=trt-bf16`",
    "best": "build with `preset=trt-fp16` and with `preset=trt-bf16`, and compare",
    "fp32": "use `preset=structure-only`",
    "data": "use `inputs`",
    "calibration-data": "use `inputs`",
    "exclude": "use `skip` for passes, `keep-fp32` for nodes",
    "stronglyTyped": "leave it out: results are strongly typed",
    "noTF32": "leave it out: it is an option of the engine's builder",
    "i": "use `inputs`",
    "jobs": "`rewriter batch` fixes several models side by side",
}
"""Advice on options of other tools."""

QUANTISED = ("fp8", "int8", "fp4", "int4", "nvfp4")  # types that a model only has with scales

SCALED = "quantise the model first, for example with NVIDIA's Model Optimizer: its Q/DQ nodes are kept"


class Text(str):
    """A value as the command line and variables have it: text, whatever the type of the option."""

    __slots__ = ()


def read(option: Option, given: Any, title: str = "", *, kind: Any = None, folder: Path | None = None) -> Any:
    """Returns the value of an option, of its type and checked.

    Args:
        title: The file or variable that set it; "": the option itself.
        kind: The type, where it differs from the type in texts and files.
        folder: The folder that paths in a file are relative to.

    Raises:
        UsageError: it has another type, or makes no sense; the message names `title`, and what is accepted.
    """
    try:
        given = option.read(given) if option.read and isinstance(given, str) else given
        value = converted(given, kind or option.kind, folder)
        if value is not None:
            if option.least is not None and value < option.least and value != option.default:
                raise ValueError(f"it takes {expected(option.kind)} from {option.least:g} on")
            if option.above is not None and not value > option.above:
                raise ValueError(f"it takes a number above {option.above:g}")
            if option.check and value is not option.default:
                loaded(option.check)(value)
    except UsageError as error:
        inside = error.source or error.where
        what = f"{error.what} ({inside})" if inside else error.what
        raise UsageError(what, option=option.key, source=title, hint=error.hint) from error
    except ValueError as error:
        what = f"it cannot be {shortened(given)}"
        raise UsageError(what, option=option.key, source=title, hint=str(error)) from error
    return value


def read_table(
    options: Mapping[str, Option], table: Mapping[str, Any], title: str, folder: Path
) -> dict[str, Any]:
    """The values of a file's table by the names of their options.

    Args:
        options: By key, those that the table may set.
        title: Names the table in messages.
        folder: What its paths are relative to.

    Raises:
        UsageError: it sets something else, or a value has another type or makes no sense.
    """
    if wrong := next((word for word in table if word not in options), None):
        raise unknown(wrong, f"unknown key {wrong!r}", title, options)
    return {
        options[word].name: read(options[word], value, f"{title}, key {word!r}", folder=folder)
        for word, value in table.items()
    }


def converted(value: Any, kind: Any, folder: Path | None = None) -> Any:
    """Converts a value to a type; a ValueError names the expected type."""
    origin, choices = get_origin(kind) or kind, get_args(kind)
    if origin is Any:
        return value
    if origin in (Union, types.UnionType):
        return _of_any(value, kind, folder)
    if origin is Literal and isinstance(value, str):
        if value not in choices:
            raise ValueError(SCALED if value in QUANTISED and "bf16" in choices else nearest(value, choices))
        return str(value)
    if origin is Mapping and isinstance(value, (Text, Mapping)):
        return dict(_shape(name, sizes) for name, sizes in _shapes(value))
    if origin is Sequence and not isinstance(value, Mapping):
        return _list(value, kind, folder)
    if origin is Path and isinstance(value, (str, os.PathLike)) and str(value):
        return (folder or Path()) / Path(value).expanduser() if folder or isinstance(value, str) else value
    if origin in (bool, int, float):
        return _number(value, origin)
    if callable(value) if origin is Callable else isinstance(origin, type) and isinstance(value, origin):
        return str(value) if isinstance(value, Text) else value
    raise ValueError(f"it takes {expected(kind)}")


def _of_any(value: Any, kind: Any, folder: Path | None) -> Any:
    """Converts a value to the first of several types that accepts it."""
    for choice in get_args(kind):
        try:
            return converted(value, choice, folder)
        except ValueError:
            if isinstance(value, str) and get_origin(choice) is Literal:
                raise
    raise ValueError(f"it takes {expected(kind)}")


def _number(value: Any, kind: type) -> Any:
    try:
        if isinstance(value, Text):
            value = TRUTH[value.lower()] if kind is bool else kind(value)
        wanted: Any = {bool: bool, int: Integral, float: Real}[kind]
        fits = value == value and not (isinstance(value, Integral) and abs(int(value)) >= LARGEST)  # no NaN
        if isinstance(value, wanted) and isinstance(value, bool) == (kind is bool) and fits:
            return cast("Any", kind)(value)
    except (KeyError, ValueError, OverflowError):
        pass
    raise ValueError(f"it takes {expected(kind)}")


def _list(value: Any, kind: Any, folder: Path | None) -> tuple[Any, ...]:
    if isinstance(value, Text):
        value = [Text(part.strip()) for part in value.split(",") if part.strip()]
    several = [value] if isinstance(value, (str, os.PathLike)) else value
    try:
        several = list(several)
        texts = folder is not None or any(isinstance(item, Text) for item in several)
        inner = Path if kind == Paths and texts else get_args(kind)[0]
        return tuple(converted(item, inner, folder) for item in several)
    except (TypeError, ValueError):
        raise ValueError(f"it takes {expected(kind)}") from None


def _shapes(value: Text | Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """`image:1x3x224x224` or a mapping: a name may contain colons, the shape of a scalar is empty."""
    if isinstance(value, Mapping):
        return value.items()
    parts = (part.strip().rpartition(":") for part in value.split(","))
    return [
        (n, [int(d) if d.isdigit() else 0 for d in dims.split("x")] if dims else []) for n, _, dims in parts
    ]


def _shape(name: Any, sizes: Any) -> tuple[str, tuple[int, ...]]:
    listed = isinstance(sizes, Iterable) and not isinstance(sizes, str)
    shape = tuple(sizes) if listed else (0,)
    sizes_fit = all(isinstance(n, Integral) and 0 < int(n) < LARGEST for n in shape)
    if not (isinstance(name, str) and name and sizes_fit):
        raise ValueError("a shape is NAME:1x3x224x224, or a list of sizes from 1 in files and in Python")
    return name, tuple(map(int, shape))


def expected(kind: Any) -> str:
    """Returns a type for people: `true or false`, `fp16, bf16 or fp32`, `a list of texts`."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return f"{', '.join(inner[:-1])} or {inner[-1]}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(expected(part) for part in inner if part is not types.NoneType))
    if origin in (Sequence, tuple):
        texts = bool(inner) and (inner[0] is str or str in get_args(inner[0]))
        return "a list of paths" if inner[:1] == (AnyPath,) else "a list of texts" if texts else "a list"
    return WANTED.get(origin) or f"a {getattr(origin, '__name__', 'value')}"


def to_text(value: Any) -> str:
    """Returns the value as written in a file; `-` for none."""
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, Mapping):
        names = [name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name) for name in value]
        pairs = zip(names, value.values(), strict=True)
        return "{ " + ", ".join(f"{name} = {list(sizes)}" for name, sizes in pairs) + " }"
    return json.dumps(value, default=str, ensure_ascii=False)


@cache
def type_hints(kind: Any) -> Mapping[str, Any]:
    from rewriter.hazards import Rule
    from rewriter.passes.base import Pass
    from rewriter.runtime.metrics.tolerances import Tolerance

    later = {"Tolerance": Tolerance, "Pass": Pass, "Rule": Rule, "EllipsisType": types.EllipsisType}
    return get_type_hints(kind, localns=later)


def unknown(word: str, what: str, source: str, names: Iterable[str]) -> UsageError:
    """The error for an option that does not exist, with a suggestion."""
    return UsageError(what, option=word, source=source, hint=instead(word, names))


def instead(word: str, names: Iterable[str]) -> str:
    """A suggestion for an option that does not exist; `names` are names or keys of the options that do."""
    keys, tried = [name.replace("_", "-") for name in names], word.lstrip("-").replace("_", "-")
    close = SCALED if tried in QUANTISED else did_you_mean(tried, keys).replace("'", "`")
    return INSTEAD.get(tried) or close or f"choose from {', '.join(keys)}"
