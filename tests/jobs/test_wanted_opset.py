"""The operator set follows a model's RMSNorms where the target maps RMSNormalization."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from paths import MODELS

import rewriter
from rewriter.ir.base import Target
from rewriter.ir.model import load
from rewriter.passes.fuse_rms_norm import FuseRmsNorm


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tensorrt", 0),
        ("tensorrt 10.14", 0),
        ("tensorrt 10.15", 23),
        ("11", 23),
        ("tensorrt-rtx", 23),
        ("tensorrt-rtx 1.4", 0),
        ("tensorrt-rtx 1.6.1", 23),
    ],
)
def test_which_targets_raise_it(target: str, expected: int) -> None:
    assert FuseRmsNorm().opset_for(load(MODELS / "t5_encoder.onnx"), Target.parse(target)) == expected


def test_other_norms_do_not() -> None:
    assert FuseRmsNorm().opset_for(load(MODELS / "vit.onnx"), Target("tensorrt-rtx")) == 0


@pytest.mark.parametrize(("asked", "expected"), [(None, 23), (17, 17)], ids=["free", "asked for"])
def test_fix(asked: int | None, expected: int, tmp_path: Path) -> None:
    out = tmp_path / "fixed.onnx"
    result = rewriter.fix(
        MODELS / "t5_encoder.onnx",
        out,
        inputs=MODELS / "t5_encoder.npz",
        target="tensorrt-rtx 1.6.1",
        opset=asked,
    )
    assert result.verdict is not None and result.verdict.passed
    fixed = onnx.load(out)
    assert [o.version for o in fixed.opset_import if o.domain == ""] == [expected]
    assert ("RMSNormalization" in {n.op_type for n in fixed.graph.node}) == (expected == 23)
