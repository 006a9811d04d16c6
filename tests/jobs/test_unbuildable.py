"""A model that TensorRT does not build as it came is told from one that a pass of ours broke."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph
from needs import needs_rtx
from typer.testing import CliRunner

import rewriter
from rewriter.base import Change, Context, Event
from rewriter.cli import app
from rewriter.jobs.fix import stages
from rewriter.jobs.fix.job import FixJob
from rewriter.model import Model
from rewriter.passes.simplify import Simplify

LARGE_TOPK = """
    g (float[2,9000] x) => (float[2,5000] y, int64[2,5000] i) <int64[1] k = {5000}> {
        a = Sqrt(x) y, i = TopK(a, k) }"""
"""TensorRT takes 3840 at most."""

IMAGE = "g (float[1,2,9,9] x) => (float[1,2,9,9] y) { a = Relu(x) y = Sqrt(a) }"


@needs_rtx
def test_a_model_that_does_not_build_as_it_came_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    path, out, report = (tmp_path / name for name in ("model.onnx", "out.onnx", "report.json"))
    onnx.save(graph(LARGE_TOPK).whole(), path)
    command = ["fix", str(path), "-o", str(out), "--report", str(report)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 3, shown.output
    assert f"Does not build as it came: {out}" in shown.output and "Next" not in shown.output
    found = json.loads(report.read_text())
    assert found["conclusion"]["ending"] == "unbuildable" and found["next_command"] is None
    assert "K exceeds the maximum value allowed (3840)" in found["conclusion"]["limit"]
    assert found["conclusion"]["remedy"]


class Dilating(Simplify):
    """simplify, with a defect: a pooling that changes nothing, and that TensorRT refuses."""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        node = model.proto.graph.node[-1]
        if node.op_type != "MaxPool":
            last, node.output[0] = node.output[0], "before"
            pool = onnx.helper.make_node("MaxPool", ["before"], [last], kernel_shape=[1, 1], dilations=[2, 2])
            model.proto.graph.node.append(pool)
            yield Change("y", "pooled")


@needs_rtx
def test_a_model_that_we_broke_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_defect(job: FixJob) -> FixJob:
        return replace(job, steps=tuple(Dilating() if isinstance(s, Simplify) else s for s in job.steps))

    original = stages.run
    monkeypatch.setattr("rewriter.jobs.fix.api.run", lambda job: original(with_defect(job)))
    result = rewriter.fix(graph(IMAGE).whole(), inputs={"x": np.ones((1, 2, 9, 9), np.float32)})
    found = result.conclusion
    assert found.ending == "failed" and not found.usable
    assert found.limit == "TensorRT builds the original, but not the fixed file: a pass of ours broke it"
    assert "(simplify, mixed-precision) with skip=" in found.remedy
    assert result.verdict is not None
    assert [(c.name, c.passed) for c in result.verdict.checks][-2:] == [
        ("build", False),
        ("original build", True),
    ]
