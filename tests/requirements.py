"""What pyproject.toml installs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement
from paths import ROOT


def project() -> dict[str, Any]:
    """The table `[project]`."""
    read: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return read


def requirements(extra: str) -> Iterator[str]:
    """The lines of an extra; in place of an extra that it names, that one's lines."""
    for line in project()["optional-dependencies"][extra]:
        named = Requirement(line)
        if named.name == project()["name"]:
            for other in sorted(named.extras):
                yield from requirements(other)
        else:
            yield line
