"""The benchmark of drawn networks: all of it that needs no GPU, on a tiny network."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from benchmarks.comparison import read_json, write_json
from benchmarks.population import (
    ALL_FREE,
    LONG,
    Work,
    ablations,
    expect,
    file_name,
    measure_network,
    options,
    table,
    without,
)

NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 4] x) => (float[1, 4] y) <float[4, 4] w> { a = MatMul(x, w) y = Relu(a) }
"""

FP32 = [
    {"node": "a", "rule": "epilogue", "op": "Add"},
    {"node": "b", "rule": "softmax", "op": "Softmax"},
    {"node": "c", "rule": "overflow", "op": "Exp"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A network with two samples that judge, as `export` leaves it, and `plain`, whose weight is another."""
    draw = np.random.default_rng(0)
    for name in ("model", "fp32", "plain"):
        model = parser.parse_model(NET)
        weight = np.eye(4, dtype=np.float32) * (1.5 if name == "plain" else 1.0)
        del model.graph.initializer[:]
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(model, tmp_path / f"{name}.onnx")
    (tmp_path / "held").mkdir()
    for number in range(2):
        x = draw.uniform(1.0, 2.0, (1, 4)).astype(np.float32)
        np.savez(tmp_path / "held" / f"{number}.npz", x=x, unused=x)
    return tmp_path


def test_engines_are_timed_and_compared_with_the_original(folder: Path) -> None:
    expect(folder)
    for name in ("fp32", "plain"):  # an engine of ONNX Runtime is the file itself
        (folder / f"{name}.onnx").rename(folder / f"{name}.engine")
    measure_network(folder, "measure", ["fp32", "plain", "not built"], engine="onnxruntime")
    rows = read_json(folder / "measure.rows")
    assert set(rows) == {"fp32", "plain"}
    assert all(row["us"] > 0 for row in rows.values())
    assert rows["fp32"]["error"] < 1e-6
    assert rows["plain"]["error"] == pytest.approx(0.5, rel=1e-3)


def test_the_table_compares_with_the_faster_valid_rival(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "fp32": {"us": 200.0, "error": 1e-4},
        "autocast": {"us": 90.0, "error": 1.0},
        "plain": {"us": 100.0, "error": 2e-3},
        "fix": {"us": 110.0, "error": 1e-3},
        "rules": {"us": 99.0, "error": 1e-3, "exit": 0},
        "no-pass rescale": {"us": 50.0, "error": 1e-3, "exit": 0},
    }
    write_json(tmp_path / "net.json", {"name": "net", "stages": [], "variants": rows})
    table(argparse.Namespace(folders=[tmp_path], half="judging"))
    text = capsys.readouterr().out
    assert "| 90.0, 1.0e+00 WRONG | 100.0, 2.0e-03 |" in text
    assert "1.100 of plain's latency, 0.500 of its error, on 1 where both are valid" in text
    assert "within 1.05x on 0 of 1; not on net" in text
    assert "| pass rescale | 1 | 1 | 1.980, 1.980, 1.980 |" in text
    write_json(tmp_path / "all", {"net": read_json(tmp_path / "net.json")})
    table(argparse.Namespace(folders=[tmp_path / "all"], half="judging"))
    assert capsys.readouterr().out == text
    table(argparse.Namespace(folders=[tmp_path], half="development"))
    assert "net" not in capsys.readouterr().out.splitlines()[2:]


def test_names_of_files_are_short_and_distinct() -> None:
    longest = ["--skip " + " ".join([*["a-pass"] * 40, end]) for end in "ab"]
    names = {file_name(text) for text in longest}
    assert len(names) == 2
    assert max(map(len, names)) < LONG + 10
    assert file_name("--skip a/b") == "--skip a_b"


def test_the_default_plan_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "rules.onnx").touch()
    write_json(tmp_path / "rules.plan", {"fp32": FP32})
    passes = [{"name": name, "changes": n} for name, n in (("rescale", 2), ("simplify", 3), ("fuse-gelu", 0))]
    write_json(tmp_path / "rules.report.json", {"passes": passes})
    groups = ["no-fp32 epilogue elementwise", "no-fp32 overflow", "no-fp32 softmax Softmax"]
    assert ablations(tmp_path) == ["no-pass rescale", *groups, ALL_FREE]
    left = {name: "".join(one["node"] for one in without({"fp32": FP32}, name)["fp32"]) for name in groups}
    assert list(left.values()) == ["bc", "ab", "ac"]
    assert [one["node"] for one in without({"fp32": FP32}, ALL_FREE)["fp32"]] == ["c"]
    plan = Path(options(tmp_path, groups[1])[-1])
    assert [one["node"] for one in read_json(plan)["fp32"]] == ["a", "b"]


def test_a_network_is_exported_first_and_then_made_and_built(folder: Path) -> None:
    work = Work(
        folder.parent, Path.cwd(), ablate=False, fix_gpu=False, gpu=False, done={}, variants=("plain",)
    )
    name = folder.name
    assert [job.step for job in work.jobs(name)] == ["export"]
    write_json(folder / "export.json", {"exit_code": 0})
    assert [job.step for job in work.jobs(name)] == ["tool plain"]
    write_json(folder / "tool plain.json", {"exit_code": 0})
    assert [job.step for job in work.jobs(name)] == ["build plain"]
    write_json(folder / "build plain.json", {"exit_code": 0})
    assert work.jobs(name) == []
