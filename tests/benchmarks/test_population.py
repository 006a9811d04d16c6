"""The benchmark of drawn networks: all of it that needs no GPU, on a tiny network."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from benchmarks.population import (
    Work,
    _verified,
    expect,
    measure_network,
    read_json,
    score,
    table,
    write_json,
)

NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 4] x) => (float[1, 4] y) <float[4, 4] w> { a = MatMul(x, w) y = Relu(a) }
"""


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
    measure_network(folder, "measure", "fp32", "plain", "not built", engine="onnxruntime")
    rows = read_json(folder / "measure.rows")
    assert set(rows) == {"fp32", "plain"}
    assert all(row["us"] > 0 for row in rows.values())
    assert rows["fp32"]["error"] < 1e-6
    assert rows["plain"]["error"] == pytest.approx(0.5, rel=1e-3)


def test_the_table_compares_with_the_faster_rival(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "fp32": {"us": 200.0, "error": 1e-4},
        "autocast": {"us": 90.0, "error": 1.0},
        "plain": {"us": 100.0, "error": 2e-3},
        "fix": {"us": 110.0, "error": 1e-3},
    }
    write_json(tmp_path / "net.json", {"name": "net", "stages": [], "variants": rows})
    table(argparse.Namespace(folders=[tmp_path], half="judging"))
    text = capsys.readouterr().out
    assert "| 90.0, 1.0e+00 WRONG | 100.0, 2.0e-03 |" in text
    assert "1.100 of plain's latency, 0.500 of its error, on 1 where both are valid" in text
    assert "within 1.05x on 0 of 1; not on net" in text
    write_json(tmp_path / "all", {"net": read_json(tmp_path / "net.json")})
    table(argparse.Namespace(folders=[tmp_path / "all"], half="judging"))
    assert capsys.readouterr().out == text
    table(argparse.Namespace(folders=[tmp_path], half="development"))
    assert "net" not in capsys.readouterr().out.splitlines()[2:]


def test_without_a_gpu_networks_are_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "plain": {"held": None, "held_passed": False},
        "fix": {"held": 2e-3, "held_passed": True, "float_nodes": 9, "fp32": {"Mul": 3, "Add": 1}},
    }
    measures = {"tf32_error": 1e-3, "largest": 3000.0}
    write_json(tmp_path / "net.json", {"name": "net", "stages": [], "variants": rows, **measures})
    failed = {"name": "other", "stages": ["failed"], "note": "no export"}
    write_json(tmp_path / "other.json", failed)
    score(argparse.Namespace(folders=[tmp_path], half=None))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| net | 3e+03 | 1.0e-03 | not finite (no) | 2.0e-03 | 4 of 9: 3 Mul, 1 Add |"
    assert lines[3].endswith("| no export |")


def test_a_part_counts_in_units_of_its_outputs_tolerance(tmp_path: Path) -> None:
    outputs = [
        {"name": "y", "of": "", "relative_l2": 1e-3, "tolerance": 5e-3},
        {"name": "y (row 0)", "of": "y", "relative_l2": 1e-2, "tolerance": 0.1},
    ]
    checks = [{"name": "emulation", "outputs": outputs}]
    write_json(tmp_path / "fix.held.json", {"passed": True, "checks": checks})
    write_json(tmp_path / "fix.report.json", {"passes": [], "plan": None})
    assert _verified(tmp_path, "fix")["held"] == 1e-3


def _steps(work: Work, folder: Path) -> Iterator[str]:
    """The steps of a network, each done at once."""
    while jobs := work.jobs(folder.name):
        yield jobs[0].step
        write_json(jobs[0].marker, {"exit_code": 0})
        if jobs[0].step == "tool fix-gpu":
            (folder / "fix-gpu.onnx").touch()


@pytest.mark.parametrize(
    ("gpu", "last"),
    [(False, ["verify plain"]), (True, ["measure", "tool fix-gpu", "build fix-gpu", "again"])],
)
def test_a_network_is_exported_made_built_and_judged(folder: Path, gpu: bool, last: list[str]) -> None:
    work = Work(folder.parent, fix_gpu=gpu, gpu=gpu, variants=("plain",))
    assert list(_steps(work, folder)) == ["export", "tool plain", "build plain", *last]
