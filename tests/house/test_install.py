"""docs/install.md: its extras are those of pyproject.toml, and the light one is enough to fix a model."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import DOCS, MODELS, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (DOCS / "install.md").read_text(encoding="utf-8")
LIGHT = re.findall(r"^[^#\n].*$", (ROOT / "requirements-light.txt").read_text(encoding="utf-8"), re.MULTILINE)
INTERNAL = {"dev", "hooks-test", "nightly"}  # extras for work on the project itself
HEAVY = {"onnxruntime-gpu", "onnxsim", "tensorrt", "tensorrt-rtx", "cuda-bindings", "scipy", "lapx", "torch"}


def names(lines: list[str]) -> set[str]:
    """Distributions that requirements name, and all that those need here."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if applies and name not in found:
            found.add(name)
            try:
                waiting += map(Requirement, metadata.requires(name) or ())
            except metadata.PackageNotFoundError:  # onnxruntime: another build of it is here
                continue
    return found


def test_the_page_names_every_extra() -> None:
    shown = {extra for group in re.findall(r"\[([\w,-]+)\]\"", PAGE) for extra in group.split(",")}
    assert shown == PROJECT["optional-dependencies"].keys() - INTERNAL


def test_the_light_list_has_a_smaller_onnx_runtime_and_no_onnxsim() -> None:
    usual = set(PROJECT["dependencies"])
    heavy = {line for line in usual if re.match("onnxruntime|onnxsim", line)}
    assert set(LIGHT) - usual == {"onnxruntime>=1.28"}
    assert usual - set(LIGHT) == heavy


def test_the_conda_recipe_is_the_light_install() -> None:
    recipe = (ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8")
    needed = re.findall(r"    - (\S+) (>=.+)", recipe.partition("  run:")[2])
    assert needed.pop(0) == ("python", ">=${{ python_min }}")
    assert {name + least for name, least in needed} == set(LIGHT) - {"onnx-graphsurgeon>=0.6"}
    assert f'version: "{PROJECT["version"]}"' in recipe


SCRIPT = """
import sys
from importlib.metadata import packages_distributions

owners = packages_distributions()

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in owners and set(owners[name]) <= ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
import rewriter

source, data = MODEL, DATA
assert rewriter.fix(source, "quick.onnx", inputs=data, verify=False).proto.graph.node
result = rewriter.fix(source, "fixed.onnx", inputs=data)
print(result.verdict.passed, [r.reason for p in result.passes if p.name == "simplify" for r in p.refusals])
print(rewriter.verify(source, "fixed.onnx", inputs=data).passed)
print(len(rewriter.scan(source, inputs=data).findings) > 0)
print(not rewriter.compare_inputs(data, data).differ)
"""


def test_the_light_install_is_enough(tmp_path: Path) -> None:
    """What is not in the light list cannot be imported; only its ONNX Runtime may be another build."""
    light = names(LIGHT)
    assert not light & HEAVY
    here = {canonicalize_name(one.metadata["Name"]): one.metadata["Name"] for one in metadata.distributions()}
    absent = {name for key, name in here.items() if key not in {*light, "rewriter", "onnxruntime-gpu"}}
    values = {"ABSENT": absent, "MODEL": str(MODELS / "nafnet.onnx"), "DATA": str(MODELS / "nafnet.npz")}
    script = SCRIPT
    for name, value in values.items():
        script = script.replace(name, repr(value))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "True ['onnxsim is not installed, as in the light install']",
        "True",
        "True",
        "True",
    ], done.stderr


def test_an_install_without_onnx_runtime_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewriter.base.errors import EngineError
    from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match="ONNX Runtime is not installed") as caught:
        import_onnxruntime()
    assert "pip install onnxruntime" in str(caught.value.hint)


LOCK = (ROOT / "requirements-dev.lock").read_text()
PINS = re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE)
"""Names with versions; a package has several where they depend on Python's."""

LOCKED_EXTRAS = ("dev", "rtx", "nightly")

EXTRAS = PROJECT["optional-dependencies"]
WANTED = [*PROJECT["dependencies"], *(line for extra in LOCKED_EXTRAS for line in EXTRAS[extra])]


@pytest.mark.parametrize("line", WANTED)
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
