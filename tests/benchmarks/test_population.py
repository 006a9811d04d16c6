"""The benchmark of drawn networks: all of it that needs no GPU, on a tiny network."""

import argparse
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph
from needs import needs_rtx, without_gpu
from onnx import parser

from benchmarks import strangers_judge as judge
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
from benchmarks.surroundings import Suite, arrays, build_engine, emulate, make, run_engine
from benchmarks.surroundings_graphs import PRIMES, Draw, build, drawn, examples, quirk
from rewriter.base.errors import EngineError
from rewriter.ir.model import load
from rewriter.passes import ALL
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.target.probes import cases

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


RULES = {name for name in examples() if name.startswith("fp32-")}


def operators(draw: Draw) -> Counter[str]:
    return Counter(node.op_type for node in build(draw).graph.node)


def test_every_pass_with_examples_has_surroundings() -> None:
    named = {step.name for step in ALL}
    assert examples().keys() - RULES <= named
    assert named - examples().keys() <= {"rescale"}  # its examples depend on measured ranges


@pytest.mark.parametrize("pattern", ["merge-projections", "clean-casts", "fp32-softmax"])
def test_a_draw_is_a_model_of_realistic_scale(pattern: str, tmp_path: Path) -> None:
    draws = [drawn(pattern, 3, 0, attempt) for attempt in range(12)]
    draw = next(one for one in draws if _makes(one, tmp_path))
    proto = onnx.load(tmp_path / "fp32.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert build(draw).SerializeToString() == build(draw).SerializeToString()
    assert len(proto.graph.node) > operators(Draw(pattern, 0, draw.example, draw.sizes, ())).total()
    assert all(1e-3 < np.abs(value).max() < 1e3 for value in arrays(tmp_path / "expected.npz").values())
    assert 0 < emulate(tmp_path, "plain") < 5e-3


def _makes(draw: Draw, folder: Path) -> bool:
    try:
        return bool(make(draw, folder) == "")
    except Exception:
        return False


@needs_rtx
@without_gpu
def test_an_engine_is_loaded_as_built_and_no_gpu_is_no_invalid_draw(tmp_path: Path) -> None:
    assert make(Draw("fp32-softmax", 0, 0, PRIMES, ()), tmp_path) == ""
    assert build_engine(tmp_path, "fp32") == ""
    with pytest.raises(EngineError):
        run_engine(tmp_path, "fp32")


def test_what_does_not_build_is_made_smaller(tmp_path: Path) -> None:
    """TensorRT takes no bias in INT32, which the pass folds."""
    suite = Suite(tmp_path, 0, time.monotonic() + 600, gpu=False)
    suite.run(["fold-quantized-bias"], 1, 1)
    (row,) = suite.found["fold-quantized-bias"].values()
    assert row["ours"] == {"built": True}
    assert row["plain"]["symptom"] == "does not build"
    (found,) = tomllib.loads(row["plain"]["quirk"])["quirk"]
    assert "DequantizeLinear" in found["chain"]
    assert set(found["chain"]) <= {
        *"QuantizeLinear DequantizeLinear Conv ConvTranspose MatMul Gemm Add".split()
    }


def test_a_row_of_the_quirk_table_has_the_graph(tmp_path: Path) -> None:
    draw = Draw("fp32-norm", 7, 0, PRIMES, ((0, 5), (~0, 9)))
    assert make(draw, tmp_path) == ""
    (row,) = tomllib.loads(quirk(tmp_path / "ours.onnx", draw, "wrong"))["quirk"]
    assert "LayerNormalization" in row["chain"]
    (case,) = cases(row["case"])
    again, file = case.proto(), onnx.load(tmp_path / "ours.onnx")
    assert [node.op_type for node in again.graph.node] == [node.op_type for node in file.graph.node]
    model = load(again)
    values = LocalSession(reference(model)).run(case.feeds())
    assert all(0.01 < np.std(value) < 100 for value in values.values())


def test_every_tensor_of_plain_fp16_is_rounded() -> None:
    model = graph(
        "g (float[4] x) => (float[4] y) <float k = {0.1}> { a = Mul(x, k) b = Exp(a) y = Sub(b, a) }"
    )
    x = np.array([0.3, 7.7, 40.0, 90.0], np.float32)
    low = x.astype(np.float16) * np.float16(0.1)
    wide = np.exp(low.astype(np.float32)).astype(np.float16)
    expected = (wide.astype(np.float32) - low.astype(np.float32)).astype(np.float16)
    (found,) = judge.run(model.proto, {"x": x}, plain=True)
    assert found.tolist() == expected.astype(np.float32).tolist()
    (exact,) = judge.run(model.proto, {"x": x}, emulate=False)
    assert judge.errors([exact], [found], {})[0] == pytest.approx(1e-3, rel=3.0)


def test_states_of_an_lstm_are_rounded_at_each_step() -> None:
    """A cell that adds 0.46 at each step stays at 1024 in FP16: half of its last place is 0.5."""
    model = graph("""g (float[50,1,1] x) => (float[1,1,1] c)
        <float[1,4,1] w = {0,0,0,0}, float[1,4,1] r = {0,0,0,0}, float[1,8] b = {20,20,20,0.5,0,0,0,0},
         float[1,1,1] zero = {0}, float[1,1,1] start = {1024}> {
            y, h, c = LSTM<hidden_size = 1>(x, w, r, b, "", zero, start) }""")
    feeds = {"x": np.zeros((50, 1, 1), np.float32)}
    (exact,), (low,) = judge.run(model.proto, feeds, emulate=False), judge.run(model.proto, feeds, plain=True)
    assert exact.item() == pytest.approx(1024 + 50 * np.tanh(0.5), rel=1e-3) and low.item() == 1024


def test_masks_have_to_be_masks_in_both() -> None:
    exact = np.array([1.0, -3e38, -np.inf], np.float32)
    assert judge.errors([exact], [np.array([1.0, -np.inf, -65504.0])], {}) == [0.0]
    assert judge.errors([exact], [np.array([1.0, 3.0, -np.inf])], {}) == [judge.WRONG]
    parts = judge.errors([np.array([100.0, 1e-3])], [np.array([100.0, 2e-3])], {0: [(0, 1, 2)]})
    assert parts == pytest.approx([1e-5, 1.0], rel=0.01)
