"""The reference of `verify` if ONNX Runtime lacks an operator of the original that a plugin has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import graph

import rewriter
from rewriter.ir.errors import ArithmeticRunError, EngineError
from rewriter.ir.model import load, save
from rewriter.judge.run_check import Execution, run_on_engine
from rewriter.judge.workspace import Workspace
from rewriter.runtime.engines.protocol import MeasureSettings
from rewriter.runtime.figures.tolerances import Tolerance
from rewriter.runtime.inputs import load_samples

CUSTOM = "g (float[2,4] x) => (float[2,4] y) { a = Relu(x) y = Acme(a) }"
PLAIN = "g (float[2,4] x) => (float[2,4] y) <float k = {K}> { a = Mul(x, k) y = Relu(a) }"
HELD = Tolerance(5e-3, "relative-l2", "a test")


def executed(folder: Path, original: str, fixed: str) -> Execution:
    """Runs with the engine of ONNX Runtime in place of TensorRT: the outputs are handled in the same way."""
    models = [
        load(save(graph(text), folder / f"{name}.onnx"))
        for name, text in (("original", original), ("fixed", fixed))
    ]
    samples = load_samples([{"x": np.ones((2, 4), np.float32)}], models[0])
    workspace = Workspace(models[0], models[1], samples, folder)
    return run_on_engine(workspace, MeasureSettings("onnxruntime", timing=None), HELD, "no kernel for Acme")


@pytest.mark.parametrize(("factor", "passed"), [("2.0", True), ("2.1", False)], ids=["equal", "5 % off"])
def test_the_original_s_engine_replaces_the_reference(tmp_path: Path, factor: str, passed: bool) -> None:
    done = executed(tmp_path, PLAIN.replace("K", "2.0"), PLAIN.replace("K", factor))
    assert [(check.name, check.passed) for check in done.checks] == [("reference", None), ("run", passed)]
    words = "not checked: no kernel for Acme; the fixed model is compared with the original's FP32 engine"
    assert done.checks[0].summary == words
    assert done.judged.error == pytest.approx(float(factor) / 2.0 - 1.0, abs=1e-6)


def test_nothing_is_compared_if_the_original_s_engine_fails_too(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing can be compared: no kernel for Acme, and the original"):
        executed(tmp_path, CUSTOM, CUSTOM)


def test_without_a_gpu_a_plugin_operator_is_an_error_with_a_hint(tmp_path: Path) -> None:
    model = save(graph(CUSTOM), tmp_path / "custom.onnx")
    with pytest.raises(ArithmeticRunError, match="no kernel for Acme") as caught:
        rewriter.verify(model, model, engine="onnxruntime")
    assert "`plugin-lib`" in (caught.value.hint or "")
