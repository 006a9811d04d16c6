"""A plan that takes more on this GPU than its budget is searched again, or is not handed out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated_engine import use_emulation
from graphs import graph
from onnx import numpy_helper

import rewriter
from rewriter.jobs.fix.attempt import Attempt, Given, attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.model import Model
from rewriter.model.facts import infer
from rewriter.search.goal import Budget

ALLOWED = 0.6

CONVS = 6


def convs() -> dict[str, Any]:
    """Pointwise Convs in a row, which FP32 makes more accurate and hardly slower, by the recorded costs."""
    rng = np.random.default_rng(0)
    body = " ".join(f"h{i} = Conv({f'h{i - 1}' if i else 'x'}, w{i})" for i in range(CONVS))
    weights = "".join(f", float[256,256,1,1] w{i}" for i in range(CONVS))
    text = f"g (float[1,256,8,8] x{weights}) => (float[1,256,8,8] y) {{ {body} y = Tanh(h5) }}"
    proto = graph(text).whole()
    del proto.graph.input[1:]
    for i in range(CONVS):
        value = rng.standard_normal((256, 256, 1, 1)).astype(np.float32) / 16
        proto.graph.initializer.append(numpy_helper.from_array(value, f"w{i}"))
    samples = [{"x": rng.standard_normal((1, 256, 8, 8)).astype(np.float32)} for _ in range(3)]
    return {
        "model": proto,
        "inputs": samples,
        "max_latency_cost": ALLOWED,
        "target": "tensorrt-rtx",
    }


def in_fp32(model: Model) -> int:
    """Convs in FP32."""
    types = infer(model).main
    return sum(n.op_type == "Conv" and types[n.output[0]].dtype == 1 for n in model.proto.graph.node)


def costing(monkeypatch: pytest.MonkeyPatch, each: float) -> None:
    """The engine takes 10 us, and `each` for every Conv in FP32."""
    use_emulation(monkeypatch)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: 10.0 + each * in_fp32(m))


def test_a_plan_within_its_budget_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(monkeypatch, 0.0)
    result = rewriter.fix(**convs())
    assert in_fp32(result.model) == CONVS
    assert not any("latency" in remark for remark in result.conclusion.remarks)


def test_a_cheaper_plan_is_searched_where_the_first_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    goals: list[float] = []

    def counted(job: FixJob, given: Given) -> Attempt:
        goals.append(job.goal.share if isinstance(job.goal, Budget) else 0.0)
        return attempt(job, given)

    each = 2.0
    costing(monkeypatch, each)
    monkeypatch.setattr("rewriter.jobs.fix.stages.attempt", counted)
    result = rewriter.fix(**convs())
    assert goals[:3] == [ALLOWED, 0.0, pytest.approx(ALLOWED * ALLOWED / (CONVS * each / 10.0))]
    assert in_fp32(result.model) * each <= 10.0 * ALLOWED
    assert result.verified
    (remark,) = result.conclusion.remarks
    assert "the plan for 60% more latency takes 120% more" in remark


def test_the_rules_plan_is_handed_out_where_every_plan_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulation(monkeypatch)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: 10.0 if in_fp32(m) == 0 else 600.0)
    monkeypatch.setattr("rewriter.jobs.fix.measured_budget.SEARCHES", 1)
    monkeypatch.setattr("rewriter.jobs.fix.measured_budget.NOISE", -1.0)  # nothing is within the budget
    result = rewriter.fix(**convs())
    assert in_fp32(result.model) == 0
    assert result.verified
    (remark,) = result.conclusion.remarks
    assert "the plan for 60% more latency takes 5900% more: this is the rules' plan" in remark


def test_ctrl_c_hands_out_the_last_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: FixJob, given: Given) -> Attempt:
        if job.goal is None:
            raise KeyboardInterrupt
        return attempt(job, given)

    costing(monkeypatch, 100.0)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.0)
    monkeypatch.setattr("rewriter.jobs.fix.stages.attempt", interrupted)
    result = rewriter.fix(**convs())
    assert in_fp32(result.model) == CONVS
    assert "interrupted" in result.conclusion.remarks[0]
