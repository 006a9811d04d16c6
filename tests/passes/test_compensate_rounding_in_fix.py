"""compensate-rounding as a stage of `fix`: with plans, dry runs, presets and a real build."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from weighted import MATMUL, compensated, related, weighted, weights

import rewriter
from rewriter.model import load
from rewriter.pipeline.presets import PRESETS

FP16 = 10


def test_fix_rounds_together_converts_exactly_and_builds() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    plain = rewriter.fix(source, inputs=feeds, skip=["compensate-rounding"], build=False)
    result = rewriter.fix(source, inputs=feeds)
    assert result.verdict is not None
    assert result.verdict.passed
    assert "build" in {check.name for check in result.verdict.checks}
    (stored,) = (t for t in result.proto.graph.initializer if t.data_type == FP16)
    (other,) = (t for t in plain.proto.graph.initializer if t.data_type == FP16)
    value, nearest = numpy_helper.to_array(stored), numpy_helper.to_array(other)
    assert not np.array_equal(value, nearest)
    pass_alone, _ = compensated(load(source), *feeds)
    np.testing.assert_array_equal(value.astype(np.float32), weights(pass_alone)["w"])


@pytest.mark.parametrize("preset", ["structure-only", "weak-typing"])
def test_presets_that_keep_fp32_do_without(preset: str) -> None:
    assert "compensate-rounding" not in PRESETS[preset].pipeline


def test_a_plan_that_is_given_takes_the_data_too() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    first = rewriter.fix(source, inputs=feeds, build=False)
    second = rewriter.fix(source, inputs=feeds, build=False, plan=first.plan)
    assert second.proto == first.proto


def test_a_dry_run_rounds_and_writes_nothing_but_the_plan(tmp_path: Path) -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    written = rewriter.fix(source, inputs=feeds, verify=False)
    saved = tmp_path / "plan.json"
    dry = rewriter.fix(
        source, tmp_path / "out.onnx", inputs=feeds, verify=False, dry_run=True, save_plan=saved
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert dry.proto == written.proto
    assert "compensate-rounding" in {result.name for result in dry.passes if result.changes}
    again = rewriter.fix(source, inputs=feeds, verify=False, plan=saved)
    assert again.proto == written.proto


def test_a_plan_without_data_rounds_to_nearest_and_says_so() -> None:
    source = weighted(MATMUL, w=(48, 24)).whole()
    plan = rewriter.fix(source, inputs={"x": related(1, 96, 48)}, verify=False).plan
    result = rewriter.fix(source, verify=False, plan=plan)
    (refusal,) = (r for p in result.passes if p.name == "compensate-rounding" for r in p.refusals)
    assert "give --inputs" in refusal.reason
    value = numpy_helper.to_array(next(t for t in result.proto.graph.initializer if t.data_type == FP16))
    stored = numpy_helper.to_array(next(t for t in source.graph.initializer if t.name == "w"))
    np.testing.assert_array_equal(value, stored.astype(np.float16))
