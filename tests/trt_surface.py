"""The recorded interfaces of TensorRT's releases (tests/engines/surface/record.py writes them)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paths import ROOT

FOLDER = ROOT / "tests/engines/surface"
LIBRARIES = ("tensorrt", "tensorrt_rtx")
MODULE = ""  # the class under which the module's own members are recorded


@dataclass(frozen=True)
class Release:
    """The interface of one release."""

    library: str
    version: str
    # for each class the description of each member; see `record.described`
    members: Mapping[str, Mapping[str, str]]

    def __str__(self) -> str:
        return f"{self.library} {self.version}"

    def find(self, owner: str, name: str) -> str | None:
        """The description of a member of a class or of its bases; None if there is none."""
        while owner in self.members:
            if name in self.members[owner]:
                return self.members[owner][name]
            owner = self.base(owner) if owner != MODULE else "object"
        return None

    def base(self, owner: str) -> str:
        """The base of a class."""
        outer, _, name = owner.rpartition(".")
        return self.members[outer][name].removeprefix("class ")


@dataclass(frozen=True)
class Overload:
    """One signature of a function."""

    names: tuple[str, ...]
    required: int
    returns: str

    def takes(self, positional: int, keywords: Sequence[str]) -> bool:
        """True if a call with so many positional arguments and these keywords fits."""
        rest = self.names[positional:]
        needed = self.names[positional : self.required]
        return positional <= len(self.names) and set(keywords) <= set(rest) and set(needed) <= set(keywords)


def overloads(description: str) -> list[Overload]:
    """The signatures in a description; empty if it has none."""
    found = []
    for text in description.split(" | "):
        if match := re.match(r"\((.*)\) -> (.+)$", text):
            names = [name.strip() for name in match[1].split(",") if name.strip()]
            required = sum(not name.endswith("=") for name in names)
            found.append(Overload(tuple(name.rstrip("=") for name in names), required, match[2]))
    return found


@cache
def releases() -> tuple[Release, ...]:
    """All recorded releases, the libraries in the order of `LIBRARIES`, oldest first."""
    return tuple(release for library in LIBRARIES for release in _read(library))


def _read(library: str) -> list[Release]:
    data = json.loads((FOLDER / f"{library}.json").read_text(encoding="utf-8"))
    names: list[str] = data["releases"]
    return [
        Release(library, version, _members(data["classes"], names, place))
        for place, version in enumerate(names)
    ]


def _members(classes: Mapping[str, Any], names: list[str], place: int) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for owner, members in classes.items():
        here = {key: what for key, runs in members.items() if (what := _at(runs, names, place))}
        if here:
            found[owner] = here
    for owner, members in list(found.items()):
        for key, what in members.items():
            if what.startswith("class "):
                found.setdefault(f"{owner}.{key}".lstrip("."), {})  # a class without members of its own
    return found


def _at(runs: str | list[list[str]], names: list[str], place: int) -> str | None:
    if isinstance(runs, str):
        return runs
    return next((what for what, a, b in runs if names.index(a) <= place <= names.index(b)), None)
