"""fuse-rms-norm: RMSNormalization where the opset has it, and one named unit everywhere else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, model, ops, random_feeds, run
from onnx.reference import ReferenceEvaluator
from paths import MODELS
from written_norms import RMS_NORMS, build

from rewriter.ir.base import Context
from rewriter.ir.model import Model, load
from rewriter.passes.fuse_rms_norm import FuseRmsNorm

NEW = Context(opset=23)

SINGLE = 1e-6
"""Relative L2 error of one norm of normal data: 2^-24 = 6e-8 for each of some ten roundings."""


def newest(body: str, inputs: str = "float[2,4,8] x, float[8] s", output: str = "float[2,4,8] y") -> Model:
    """The body in opset 23, where reductions take their axes as an input."""
    return build(
        body.replace("<axes = [-1]>(x)", "(x, last)").replace("<axes = [-1]>(q)", "(q, last)"),
        inputs,
        output,
        23,
    )


def assert_close(before: Model, after: Model) -> None:
    feeds = random_feeds(before)
    (a,), (b,) = run(before, feeds), run(after, feeds)
    assert np.linalg.norm(a - b) <= SINGLE * np.linalg.norm(a)


@pytest.mark.parametrize("body", RMS_NORMS)
def test_every_way_to_write_it_becomes_the_operator(body: str) -> None:
    before = newest(body)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert [op for op in ops(result) if op != "Cast"] == ["RMSNormalization"]
    assert not report.refusals
    assert_close(before, result)
    again, second = apply(FuseRmsNorm(), result, NEW)
    assert again.same_as(result)
    assert not second.changes


def test_the_reference_implementation_agrees() -> None:
    before = model(FuseRmsNorm.before)
    result, _ = apply(FuseRmsNorm(), before, NEW)
    feeds = random_feeds(before, scale=100.0)
    (a,), (b,) = run(before, feeds), ReferenceEvaluator(result.whole()).run(None, feeds)
    assert np.linalg.norm(a - b) <= SINGLE * np.linalg.norm(a)


@pytest.mark.parametrize(("case", "count"), [("t5_encoder", 5), ("llama_block", 5), ("if_loop", 1)])
def test_real_exports(case: str, count: int) -> None:
    proto = onnx.version_converter.convert_version(onnx.load(MODELS / f"{case}.onnx"), 23)
    proto.ir_version = 11
    before = load(proto)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert len(report.changes) == count
    with np.load(MODELS / f"{case}.npz") as sample:
        feeds = dict(sample)
    for a, b in zip(run(before, feeds), run(result, feeds), strict=True):
        assert np.linalg.norm(a - b) <= FuseRmsNorm.exactness.tolerance * np.linalg.norm(a)
    _, report = apply(FuseRmsNorm(), before)
    assert len(report.refusals) == count
