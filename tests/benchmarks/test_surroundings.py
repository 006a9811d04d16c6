"""Passes and rules in random surroundings: draws, builds without a GPU, and the way to the smallest graph."""

import time
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from needs import needs_rtx, without_gpu

from benchmarks.surroundings import Suite, arrays, build_engine, emulate, make, run_engine
from benchmarks.surroundings_graphs import PRIMES, Draw, build, drawn, examples, quirk
from rewriter.base.errors import EngineError
from rewriter.ir.model import load
from rewriter.passes import ALL
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.target.probes import cases

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
    suite = Suite(tmp_path, 0, time.monotonic() + 120, gpu=False)
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
