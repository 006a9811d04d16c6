"""The reference of `verify` if ONNX Runtime lacks an operator of the original that a plugin has."""

from pathlib import Path

import numpy as np
import pytest
from graphs import graph

import rewriter
from rewriter.base.errors import ArithmeticRunError, EngineError
from rewriter.ir.model import save

CUSTOM = "g (float[2,4] x) => (float[2,4] y) { y = Acme(x) }"
PLAIN = "g (float[2,4] x) => (float[2,4] y) <float k = {K}> { a = Mul(x, k) y = Relu(a) }"


def verified(folder: Path, original: str, fixed: str) -> rewriter.VerifyResult:
    """Runs with the engine of ONNX Runtime in place of TensorRT: the outputs are handled in the same way."""
    files = [
        save(graph(text), folder / f"{n}.onnx") for n, text in (("original", original), ("fixed", fixed))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewriter.jobs.verify._without_reference", lambda *_: "no kernel for Acme")
        sample = {"x": np.ones((2, 4), np.float32)}
        return rewriter.verify(files[0], files[1], inputs=[sample], engine="onnxruntime", timing=False)


@pytest.mark.parametrize(("factor", "passed"), [("2.0", True), ("2.1", False)], ids=["equal", "5 % off"])
def test_the_original_s_engine_replaces_the_reference(tmp_path: Path, factor: str, passed: bool) -> None:
    found = verified(tmp_path, PLAIN.replace("K", "2.0"), PLAIN.replace("K", factor))
    assert [(check.name, check.passed) for check in found.checks] == [("reference", None), ("run", passed)]
    words = "not checked: no kernel for Acme; the fixed model is compared with the original's FP32 engine"
    assert found.checks[0].summary == words
    assert found.outputs[0].relative_l2 == pytest.approx(float(factor) / 2.0 - 1.0, abs=1e-6)


def test_nothing_is_compared_if_the_original_s_engine_fails_too(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing can be compared: no kernel for Acme, and the original"):
        verified(tmp_path, CUSTOM, CUSTOM)


def test_without_a_gpu_a_plugin_operator_is_an_error_with_a_hint(tmp_path: Path) -> None:
    model = save(graph(CUSTOM), tmp_path / "custom.onnx")
    with pytest.raises(ArithmeticRunError, match="no kernel for Acme") as caught:
        rewriter.verify(model, model, engine="onnxruntime")
    assert "`plugin-lib`" in caught.value.hint
