"""docs/report.schema.json holds what the commands write, and the page for scripts says what they end with."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import graphs
import numpy as np
import pytest
from paths import DOCS
from tables import values
from typer.testing import CliRunner

from rewriter.cli import app, exits
from rewriter.ir.model import save
from rewriter.jobs.fix.result import Kind

SCHEMA = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def violations(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Where a value departs from a schema, in the words of JSON Schema that ours uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    number = isinstance(value, bool) and not {"boolean"} & set(kinds)
    if kinds and (number or not any(isinstance(value, KINDS[kind]) for kind in kinds)):
        yield f"{where}: {value!r} is no {kinds}"
        return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{where}: {value!r} is another word"
    if "anyOf" in schema and all(list(violations(value, one, where)) for one in schema["anyOf"]):
        yield from violations(value, schema["anyOf"][0], where)
    if isinstance(value, dict):
        yield from (f"{where}: no {name}" for name in schema.get("required", ()) if name not in value)
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            yield from violations(part, inner, f"{where}.{name}")
    for index, part in enumerate(value if isinstance(value, list) else ()):
        yield from violations(part, schema.get("items", {}), f"{where}[{index}]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that overflows, its samples, and the fixed model."""
    where = tmp_path_factory.mktemp("json")
    body = "g (float[2,3] x, float[3,4] w) => (float[2,4] y) { m = MatMul(x, w) y = Relu(m) }"
    save(graphs.with_weights(body, graphs.random_weights({"w": (3, 4)})), where / "m.onnx")
    np.savez(where / "d.npz", x=np.full((2, 3), 60000.0, np.float32))
    assert not run(where, "fix", "m.onnx", "-o", "f.onnx", "--no-build").exit_code
    return where


def run(folder: Path, *arguments: str) -> Any:
    words = [str(folder / word) if word.endswith((".onnx", ".json")) else word for word in arguments]
    return CliRunner().invoke(app, [*words, "--inputs", str(folder / "d.npz")])


@values
def test_reports_are_as_the_schema_says(folder: Path, arguments: list[str]) -> None:
    run(folder, *arguments, "--json", "out.json")
    report = json.loads((folder / "out.json").read_text())
    assert list(violations(report, SCHEMA["$defs"][arguments[0]])) == []
    broken = {**report, "warnings": [1], "schema_version": 2}
    assert len(list(violations(broken, SCHEMA["$defs"][arguments[0]]))) == 2


def test_every_ending_and_exit_code_has_a_row_of_what_to_do() -> None:
    page = (DOCS / "machines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \| (.+?) \|", page, re.MULTILINE)
    endings = {word for _, cell in rows for word in re.findall(r"`([a-z0-9-]+)`", cell)}
    codes = {int(code) for cell, _ in rows for code in cell.split(",")}
    assert endings == set(get_args(Kind))
    assert set(SCHEMA["$defs"]["conclusion"]["properties"]["kind"]["enum"]) == endings
    assert codes == {
        0,
        exits.FAILED,
        exits.BAD_INPUT,
        exits.UNBUILDABLE,
        exits.DEFECT,
        exits.INTERRUPTED,
        143,
    }
    assert len(page.splitlines()) <= 50


def test_llms_txt_names_pages_that_exist() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert targets
    assert [t for t in targets if not (DOCS / t.replace(".html", ".md")).exists()] == []
