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
LIGHT = [
    line
    for line in (ROOT / "requirements-light.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
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
