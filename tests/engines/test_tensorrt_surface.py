"""Our code uses what each release of TensorRT has: checked against the recorded interfaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import DOCS, ROOT
from trt_calls import problems
from trt_surface import Release, releases

from rewriter.hazards.planning.weak_typing import Constraint, python_code

ENGINES = ROOT / "rewriter/runtime/engines"
USES = re.compile(r"\btrt\b")


def sources() -> Iterator[pytest.ParameterSet]:
    for path in sorted(ENGINES.rglob("*.py")):
        if USES.search(path.read_text(encoding="utf-8")):
            yield pytest.param(path, id=str(path.relative_to(ENGINES)))


def listed(release: Release, source: str) -> list[str]:
    return [f"{release}, line {line}: {problem}" for line, problem in problems(source, release)]


@pytest.mark.parametrize("path", list(sources()))
def test_every_release_has_what_the_engines_use(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not [line for release in releases() for line in listed(release, source)]


def test_tensorrt_10_has_what_the_printed_constraints_use() -> None:
    wanted = [Constraint("a", "fp32", True, 1), Constraint("b", "bf16", True, 2)]
    source = python_code(wanted, "model.onnx")
    tens = [one for one in releases() if one.library == "tensorrt" and one.version.startswith("10.")]
    assert len(tens) > 10
    assert not [line for release in tens for line in listed(release, source)]


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name) for p in (*sorted(DOCS.glob("*.md")), ROOT / "README.md")]
)
def test_every_release_has_what_the_pages_show(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    code = [block for block in blocks if USES.search(block)]
    assert not [line for block in code for release in releases() for line in listed(release, block)]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        pytest.param("trt.Bilder(log)", "no tensorrt.Bilder", id="a class that is not there"),
        pytest.param("network.get_layers()", "no INetworkDefinition.get_layers", id="a method"),
        pytest.param("trt.BuilderFlag.NO", "no BuilderFlag.NO", id="a member of an enumeration"),
        pytest.param("builder.create_network(1, 2)", "does not fit", id="an argument too many"),
        pytest.param("network.get_layer(number=1)", "does not fit", id="a keyword"),
        pytest.param("trt.OnnxParser(network)", "does not fit", id="an argument of a constructor missing"),
        pytest.param(
            "p = trt.OnnxParser(network, 0)\np.num_eror", "no OnnxParser.num_eror", id="a local name"
        ),
        pytest.param("network.get_layer(0).get_output(0).nam", "no ITensor.nam", id="a chain of calls"),
        pytest.param("network.num_layers = 2", "cannot be set", id="a property that is read-only"),
        pytest.param("config.num_compute_capabilities = 1", "no IBuilderConfig.num_c", id="RTX alone has it"),
        pytest.param("class L(trt.ILogger):\n def log(self, text): pass", "with 1 param", id="an override"),
    ],
)
def test_the_check_finds(code: str, problem: str) -> None:
    first = releases()[0]
    assert [text for _, text in problems(code, first) if problem in text]


def test_a_feature_check_excuses_what_a_release_lacks() -> None:
    checked = "if hasattr(config, 'num_compute_capabilities'):\n  config.num_compute_capabilities = 1"
    code = f"def f(config):\n {checked}"
    assert not problems(code, releases()[0])
    assert problems(code.replace("num_compute_capabilities'", "flags'"), releases()[0])
