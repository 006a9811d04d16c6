"""The SARIF log against the structure that OASIS published for version 2.1.0 (JSON schema of errata 01)."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph

import rewriter
from rewriter.base.errors import ModelError
from rewriter.hazards.analysis import KINDS
from rewriter.ir.plan import Range
from rewriter.jobs.scan import Finding, ScanResult
from rewriter.report import sarif

STRUCTURE: dict[str, dict[str, str]] = {}
for line in """\
sarifLog: $schema str, version! 2.1.0, runs! [run]
run: tool! tool, invocations [invocation], artifacts [artifact], results [result], \
columnKind utf16CodeUnits/unicodeCodePoints, properties dict
tool: driver! toolComponent
toolComponent: name! str, semanticVersion str, rules [rule]
rule: id! str, shortDescription text, help text, defaultConfiguration configuration, properties dict
configuration: level none/note/warning/error
text: text! str
invocation: executionSuccessful! bool, toolExecutionNotifications [notification]
notification: message! text, level none/note/warning/error
artifact: location artifactLocation, properties dict
artifactLocation: uri str, index int
result: ruleId str, ruleIndex int, level none/note/warning/error, message! text, locations [location], \
partialFingerprints dict, properties dict
location: physicalLocation physicalLocation, logicalLocations [logicalLocation]
physicalLocation: artifactLocation artifactLocation
logicalLocation: fullyQualifiedName str, name str, kind str""".splitlines():
    kind, _, parts = line.partition(": ")
    STRUCTURE[kind] = {name: what for name, _, what in (part.partition(" ") for part in parts.split(", "))}
"""Of each object the properties that we use, `!` behind those that are required. None allows others."""


def faults(value: Any, kind: str, where: str = "log") -> Iterator[str]:
    """Where a value departs from the structure."""
    if kind in STRUCTURE:
        names = {name.rstrip("!"): part for name, part in STRUCTURE[kind].items()}
        yield from (f"{where}.{name} is unknown" for name in value.keys() - names.keys())
        required = {name[:-1] for name in STRUCTURE[kind] if name.endswith("!")}
        yield from (f"{where}.{name} is missing" for name in required - value.keys())
        for name in names.keys() & value.keys():
            yield from faults(value[name], names[name], f"{where}.{name}")
    elif kind.startswith("["):
        for index, part in enumerate(value):
            yield from faults(part, kind[1:-1], f"{where}[{index}]")
    elif type(value).__name__ != kind and value not in kind.split("/"):
        yield f"{where} is {value!r}, not {kind}"


@pytest.fixture(scope="module")
def result() -> ScanResult:
    """One finding of each kind, and those of a model in which two nodes overflow."""
    source = graph("g (float[2] x) => (float[2] y) <float k = {1e5}> { a = Mul(x, k)\n y = Neg(a) }")
    found = rewriter.scan(source.proto, inputs={"x": np.ones(2, np.float32)})
    odd = Range(float("-inf"), 1.0, float("nan"), False)
    each = [
        Finding(name, kind.severity, "it is so", kind.repair, ("/a/b c", "n[1]"), ("Add", "Mul"), "t", odd)
        for name, kind in KINDS.items()
    ]
    bare = Finding("random-data", "note", "random inputs.", "take real ones", (), ())
    return replace(found, path=Path("a folder/model.onnx"), findings=(*found.findings, *each, bare))


def test_every_kind_of_finding_has_the_published_structure(result: ScanResult) -> None:
    log = sarif.as_sarif([result])
    assert list(faults(log, "sarifLog")) == []
    assert json.loads(json.dumps(log, allow_nan=False)) == log


def test_indices_point_at_the_rules_and_the_file(result: ScanResult) -> None:
    (run,) = sarif.as_sarif([result])["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert [a["location"]["uri"] for a in run["artifacts"]] == ["a%20folder/model.onnx"]


def test_a_result_names_level_nodes_and_what_to_do(result: ScanResult) -> None:
    found = next(r for r in sarif.as_sarif([result])["runs"][0]["results"] if r["ruleId"] == "overflow")
    assert found["level"] == "error"
    assert "What to do: " in found["message"]["text"] and found["message"]["text"].endswith(".")
    logical = found["locations"][0]["logicalLocations"]
    assert [place["kind"] for place in logical] == ["Mul", "Neg"]


def test_a_model_without_a_file_has_no_physical_location(result: ScanResult) -> None:
    (run,) = sarif.as_sarif([replace(result, path=None)])["runs"]
    assert run["artifacts"] == []
    assert not any("physicalLocation" in place for r in run["results"] for place in r["locations"])


def test_an_absolute_path_is_a_file_uri(result: ScanResult, tmp_path: Path) -> None:
    (run,) = sarif.as_sarif([replace(result, path=tmp_path / "m.onnx")])["runs"]
    assert run["artifacts"][0]["location"]["uri"] == (tmp_path / "m.onnx").as_uri()


def test_many_models_share_one_run(result: ScanResult) -> None:
    other = replace(result, path=Path("b.onnx"), findings=result.findings[:1])
    broken = ModelError("it is no model", where="c.onnx", hint="export it again")
    log = sarif.as_sarif([result, other], [broken])
    assert list(faults(log, "sarifLog")) == []
    (run,) = log["runs"]
    assert [a["location"]["uri"] for a in run["artifacts"]] == ["a%20folder/model.onnx", "b.onnx"]
    last = run["results"][-1]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert last == {"uri": "b.onnx", "index": 1}
    assert run["invocations"][0] == {
        "executionSuccessful": False,
        "toolExecutionNotifications": [
            {"level": "error", "message": {"text": "c.onnx: it is no model; what to do: export it again"}}
        ],
    }
