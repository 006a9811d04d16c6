"""Checks Python source against the recorded interface of a TensorRT release, without running it.

The type of an expression follows from names (`NAMES`), members of known types and what calls return. A member
that the release lacks is excused in a function that asks, by `hasattr` or `getattr`, for something that the
release lacks too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from trt_surface import MODULE, Release, overloads

NAMES = {
    "trt": MODULE,
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "layer": "ILayer",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "registry": "IPluginRegistry",
    "runtime": "Runtime",
    "severity": "ILogger.Severity",
    "tensor": "ITensor",
}
"""Variables, and attributes with `_` in front, that hold an object of TensorRT unless an annotation says
otherwise."""

FOREIGN = frozenset(
    {
        "addr",
        "capabilities",
        "kind",
        "location",
        "memory",
        "mode",
        "pointer",
        "shape",
        "sink",
        "stream",
        "table",
        "type",
    }
)
"""Variables without a type of their own whose members are not TensorRT's, or too many to say."""


@dataclass(frozen=True)
class Value:
    """What an expression is: an instance of a class, the class itself, or a method of it.

    Attributes:
        method: The description of a function; "" for an object.
        is_class: True if it is the class, whose methods take the instance.
    """

    owner: str
    method: str = ""
    is_class: bool = False


@dataclass
class Reading:
    """A walk through one function (or the statements outside of functions) for one release."""

    release: Release
    problems: list[tuple[int, str]] = field(default_factory=list)
    lacking: bool = False
    """True if the code asks for something that this release lacks."""
    local: dict[str, Value | None] = field(default_factory=dict)

    def value(self, node: ast.expr) -> Value | None:
        """The type of an expression, which is checked on the way; None if it is none of TensorRT's."""
        match node:
            case ast.Name(id=name):
                return self.local[name] if name in self.local else _named(name)
            case ast.Attribute(value=inner, attr=name):
                return self._member(node, self.value(inner), name)
            case ast.Call():
                return self._call(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.comprehension):
                for part in (child.iter, *child.ifs):
                    self.value(part)
        return None

    def _member(self, node: ast.expr, owner: Value | None, name: str) -> Value | None:
        if owner is None:
            return _named(name) if name.startswith("_") else None
        if owner.method or (name.startswith("__") and name != "__init__"):
            return None
        found = self.release.find(owner.owner, name)
        if found is None:
            self.problems.append((node.lineno, f"no {owner.owner or self.release.library}.{name}"))
            return None
        return self._described(owner, name, found)

    def _described(self, owner: Value, name: str, found: str) -> Value | None:
        kind, _, rest = found.partition(" ")
        if kind == "class":
            return Value(f"{owner.owner}.{name}".lstrip("."), is_class=True)
        if kind == "enum":
            return Value(owner.owner) if owner.is_class else None
        if kind.startswith("property"):
            return self._instance(rest.removeprefix("-> "))
        return Value(owner.owner, found, owner.is_class)

    def _instance(self, kind: str) -> Value | None:
        return Value(kind) if kind in self.release.members else None

    def _call(self, node: ast.Call) -> Value | None:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.value(argument.value if isinstance(argument, ast.Starred) else argument)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            return self._asked(node)
        target = self.value(node.func)
        if target is None:
            return None
        made = target.is_class and not target.method
        description = self.release.find(target.owner, "__init__") if made else target.method
        self._check(node, description or "(*)", unbound=target.is_class and not made)
        if made:
            return Value(target.owner)
        found = overloads(description or "")
        return self._instance(found[0].returns) if found else None

    def _asked(self, node: ast.Call) -> Value | None:
        """`hasattr` and `getattr` with a literal: a feature check, unless there is no default."""
        owner = self.value(node.args[0])
        name = node.args[1]
        if owner is None or not isinstance(name, ast.Constant):
            return None
        found = self.release.find(owner.owner, str(name.value))
        if found is None:
            self.lacking = True
            return None
        return self._described(owner, str(name.value), found)

    def _check(self, node: ast.Call, description: str, *, unbound: bool) -> None:
        known = overloads(description)
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        positional = len(node.args) - unbound
        keywords = [keyword.arg or "" for keyword in node.keywords]
        if known and not starred and not any(one.takes(positional, keywords) for one in known):
            self.problems.append((node.lineno, f"{ast.unparse(node)} does not fit {description}"))


def _named(name: str) -> Value | None:
    owner = NAMES.get(name.removeprefix("_"))
    return None if owner is None else Value(owner)


def problems(source: str, release: Release) -> list[tuple[int, str]]:
    """Line and text of each use of TensorRT in a Python source that the release does not have."""
    tree = ast.parse(source)
    found = [problem for part in _parts(tree) for problem in _read(part, release)]
    for item in ast.walk(tree):
        if isinstance(item, ast.ClassDef):
            found += _overridden(item, release)
    return sorted(set(found))


def _parts(tree: ast.Module) -> Iterator[ast.Module | ast.FunctionDef]:
    yield tree
    yield from (item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef))


def _read(part: ast.Module | ast.FunctionDef, release: Release) -> list[tuple[int, str]]:
    reading = Reading(release)
    unknown = []
    if isinstance(part, ast.FunctionDef):
        unknown = [(part.lineno, f"{name}: Any is in no table") for name in _untyped(part)]
        reading.local |= dict.fromkeys(_typed(part))
    for statement in _statements(part.body):
        _take(reading, statement)
    return unknown + ([] if reading.lacking else reading.problems)


def _typed(function: ast.FunctionDef) -> Iterator[str]:
    """Names in a function that hold something else than an object of TensorRT."""
    for argument in (*function.args.args, *function.args.kwonlyargs):
        if argument.annotation is not None and ast.unparse(argument.annotation) != "Any":
            yield argument.arg
    for item in ast.walk(function):
        if isinstance(item, ast.ExceptHandler) and item.name:
            yield item.name


def _untyped(function: ast.FunctionDef) -> Iterator[str]:
    for argument in (*function.args.args, *function.args.kwonlyargs):
        is_any = argument.annotation is not None and ast.unparse(argument.annotation) == "Any"
        if is_any and argument.arg not in NAMES and argument.arg not in FOREIGN:
            yield argument.arg


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a function in order, those of functions inside it left out."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _take(reading: Reading, statement: ast.stmt) -> None:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.withitem):
            reading.value(child.context_expr)
    if isinstance(statement, ast.Assign):
        value = reading.value(statement.value)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                reading.local[target.id] = value or _named(target.id)
            else:
                _set(reading, target)
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            reading.value(child)


def _set(reading: Reading, target: ast.expr) -> None:
    """An attribute that is set must be one that can be set."""
    before = len(reading.problems)
    reading.value(target)
    if isinstance(target, ast.Attribute) and len(reading.problems) == before:
        owner = reading.value(target.value)
        found = reading.release.find(owner.owner, target.attr) if owner else None
        if found and not found.startswith("property="):
            reading.problems.append((target.lineno, f"{ast.unparse(target)} cannot be set"))


def _overridden(item: ast.ClassDef, release: Release) -> Iterator[tuple[int, str]]:
    """Methods that override one of TensorRT's must have its parameters."""
    for base in item.bases:
        if (
            not isinstance(base, ast.Attribute)
            or not isinstance(base.value, ast.Name)
            or base.value.id != "trt"
        ):
            continue
        for method in item.body:
            if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                continue
            found = release.find(base.attr, method.name)
            count = len(method.args.args) - 1
            if found is None or not any(one.takes(count, ()) for one in overloads(found)):
                yield method.lineno, f"{base.attr}.{method.name} with {count} parameters is {found}"
