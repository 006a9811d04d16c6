"""Records the Python interface of TensorRT releases as data.

    python tests/engines/surface/record.py tests/engines/surface/tensorrt.json FOLDER...

Each folder holds one importable `tensorrt` or `tensorrt_rtx`. It goes on PYTHONPATH and LD_LIBRARY_PATH of a
process of its own. The native libraries may be stand-ins: nothing is built. Classes, enum members and
properties are those of the module. Parameters, and the names of methods to override, come from docstrings.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsInt, cast

MODULES = ("tensorrt", "tensorrt_rtx")

OPERATORS = ("__init__", "__int__", "__le__", "__len__", "__getitem__", "__iter__")
"""Special methods that are recorded."""

SPELLINGS = {
    "capsule": "CapsuleType",
    "buffer": "Buffer",
    "IParserError": "ParserError",
    "IBuilder": "Builder",
    "Severity": "ILogger.Severity",
}
"""Types that docstrings name in several ways, or by the class of C++."""

ROOT = ""  # name under which the module's own members are recorded

Surface = dict[str, dict[str, str]]
"""The members of each class of one release, and what each is; see `described`."""


def surface(module: Any) -> Surface:
    """The public members of a module and of its classes."""
    found: Surface = {ROOT: {}}
    _collect(module, ROOT, found)
    return found


def _collect(owner: Any, name: str, found: Surface) -> None:
    members = found.setdefault(name, {})
    for key, value in sorted(vars(owner).items()):
        if key.startswith("_") and (key not in OPERATORS or type(value).__name__ == "wrapper_descriptor"):
            continue  # object's own
        if what := described(owner, value):
            members[key] = what
        if isinstance(value, type) and _is_native(value):
            _collect(value, f"{name}.{key}".lstrip("."), found)
    for callback, parameters in re.findall(r"def ([a-z]\w*)\(self,? ?(.*?)\)", owner.__doc__ or ""):
        members.setdefault(callback, f"({', '.join(map(_parameter, _split(parameters)))}) -> object")


def _is_native(value: type) -> bool:
    return "tensorrt" in value.__module__ and value.__module__ != "tensorrt_bindings.plugin"


def described(owner: Any, value: Any) -> str | None:
    """What a member is, in words that `tests/trt_surface.py` reads; None if it is no part of the interface.

    `class Base`, `enum 3`, `property -> type` (`property= -> type` if it can be set), and a function as its
    overloads, `(first, second=) -> type | (...) -> type`; `(*)` is a function without a signature.
    """
    if isinstance(value, type):
        return f"class {value.__mro__[1].__name__}" if _is_native(value) else None
    if isinstance(owner, type) and isinstance(value, owner) and hasattr(value, "__int__"):
        return f"enum {int(cast(SupportsInt, value))}"
    if isinstance(value, property):
        text = getattr(value.fget, "__doc__", "") or ""
        kind = re.search(r"-> (.+)", text)
        return f"property{'=' if value.fset else ''} -> {_short(kind[1]) if kind else 'object'}"
    if callable(value) and type(value).__name__ != "type":
        return " | ".join(dict.fromkeys(_signatures(value.__doc__ or ""))) or "(*)"
    member = "tensorrt" in type(value).__module__ and hasattr(value, "__int__")
    return f"enum {int(cast(SupportsInt, value))}" if member else None


def _signatures(doc: str) -> Iterator[str]:
    for line in doc.splitlines():
        if match := re.match(r"(?:\d+\. )?\w+\((.*)\) -> (.+)$", line.strip()):
            parameters = [p for p in _split(match[1]) if p != "/" and not re.match(r"self\b", p)]
            yield f"({', '.join(map(_parameter, parameters))}) -> {_short(match[2])}"


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> str:
    """A parameter's name, with `=` if it has a default."""
    name = text.split(":")[0].strip()
    default = " = " in text.replace("->", "")
    return f"{name}=" if default else name


def _short(kind: str) -> str:
    """A type without its module."""
    plain = re.sub(r"\b\w+(?:\.|::)(?=\w)", "", kind.strip())
    return SPELLINGS.get(plain, plain.replace("List[", "list["))


def record(folder: Path) -> tuple[str, Surface]:
    """The version and the interface of the module in a folder, read in a process of its own."""
    path = str(folder.resolve())
    env = {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--print"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    version, found = json.loads(done.stdout)
    return version, found


def merged(recorded: list[tuple[str, Surface]]) -> dict[str, Any]:
    """The interfaces of several releases: a member that is the same in all of them is its description alone.

    Any other is a list of descriptions, each with the first and the last release that has it so.
    """
    recorded.sort(key=lambda one: version_key(one[0]))
    releases = [version for version, _ in recorded]
    classes: dict[str, dict[str, list[list[str]]]] = {}
    for version, found in recorded:
        for name, members in found.items():
            for key, what in members.items():
                runs = classes.setdefault(name, {}).setdefault(key, [])
                before = releases[releases.index(version) - 1]
                if runs and runs[-1][0] == what and runs[-1][2] == before:
                    runs[-1][2] = version
                else:
                    runs.append([what, version, version])
    always = [releases[0], releases[-1]]
    short = {
        name: {key: runs[0][0] if runs[0][1:] == always else runs for key, runs in members.items()}
        for name, members in classes.items()
    }
    return {"releases": releases, "classes": short}


def version_key(version: str) -> tuple[int, ...]:
    """Sorts releases."""
    return tuple(map(int, re.findall(r"\d+", version)))


def written(data: dict[str, Any]) -> str:
    """The data as JSON with one member a line."""
    classes = ",\n".join(
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(runs)}" for key, runs in sorted(members.items()))
        + "\n }"
        for name, members in sorted(data["classes"].items())
    )
    return f'{{"releases": {json.dumps(data["releases"])},\n"classes": {{\n{classes}\n}}}}\n'


def _print_own() -> None:
    for name in MODULES:
        try:
            module = __import__(name)
        except ImportError:
            continue
        sys.stdout.write(json.dumps([module.__version__, surface(module)]))
        return
    sys.exit(f"no module of {MODULES}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.path.pop(0)  # this folder
        _print_own()
    else:
        target, *folders = map(Path, sys.argv[1:])
        target.write_text(written(merged([record(folder) for folder in folders])), encoding="utf-8")
