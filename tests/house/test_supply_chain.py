"""Packages are built from the lock, and published as they were built; the image names its base."""

import re
from typing import Any

import pytest
from paths import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit")
    content: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    return dict(content["jobs"])


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_every_action_is_named_by_its_commit(name: str) -> None:
    used = [step["uses"] for job in jobs(name).values() for step in job["steps"] if "uses" in step]
    assert used and [one for one in used if not re.search(r"@[0-9a-f]{40}$", one)] == []


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_a_job_that_may_sign_runs_no_command(name: str) -> None:
    for job in jobs(name).values():
        if "id-token" in job.get("permissions", {}):
            steps = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
            assert steps == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
            assert job["steps"][-1]["with"] == {"attestations": True}, "uploaded as they are"


def test_packages_are_built_from_the_lock_alone() -> None:
    publishing = jobs("publish.yml")
    assert {*publishing["publish"]["needs"]} == {"test", "build"}
    commands = [step["run"] for step in publishing["build"]["steps"] if "run" in step]
    assert commands == [
        "python -m pip install --require-hashes --requirement requirements-dev.lock",
        "python -m build --no-isolation",
    ]


def test_the_image_names_its_base_and_runs_without_rights() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases)
    users = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert users and "0" not in users[-1]
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", text)
    assert f"install -d -m 1777 {cache}" in text, "every user may write it"
