"""The lock file of development: it has hashes, names no host, and follows pyproject.toml."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

LOCK = (ROOT / "requirements-dev.lock").read_text()
PINS = re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE)
"""Names with versions; a package has several where they depend on Python's."""

LOCKED_EXTRAS = ("dev", "rtx", "nightly")


def _wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in LOCKED_EXTRAS for line in extras[extra])]


@pytest.mark.parametrize("line", _wanted())
def test_every_requirement_is_pinned_within_its_bounds(line: str) -> None:
    requirement = Requirement(line)
    versions = [version for name, version in PINS if name == canonicalize_name(requirement.name)]
    assert versions, "run `make lock`"
    assert all(requirement.specifier.contains(version) for version in versions), "run `make lock`"


def test_every_pin_has_a_hash_and_no_host_is_named() -> None:
    pins = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(pins) == len(PINS)
    assert all("--hash=sha256:" in pin for pin in pins)
    assert "://" not in LOCK
