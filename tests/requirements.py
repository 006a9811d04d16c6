"""What pyproject.toml installs."""

from __future__ import annotations

import tomllib
from typing import Any

from paths import ROOT


def project() -> dict[str, Any]:
    """The table `[project]`."""
    read: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return read


def light_requirements() -> list[str]:
    """The lines of the light install."""
    lines = (ROOT / "requirements-light.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]
