"""Where an engine runs, its figures decide: over the emulation's, and after each remedy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated_engine import use_emulation, use_onnxruntime
from graphs import graph
from onnx import numpy_helper

import rewriter
from rewriter.jobs.fix.attempt import Attempt, Given, attempt
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.other_plans import _best
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Array, Model
from rewriter.verification.verdict import Check

CANCELLING = """
    g (float[4,64] x) => (float[4,64] y) <float offset = {300.0}, float share = {0.37}> {
        a = Add(x, offset) t = Tanh(a) u = Mul(t, share) b = Sub(a, offset) c = Mul(b, share)
        y = Add(c, u) }"""
"""FP16 keeps two digits of x beside 300."""

ROUNDED = """
    g (float[2,8] x) => (float[2,2] y)
    <float[8,2] w = {2049.0, 2049.0, -2000.0, -2000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
                     0.0, 0.0, 0.0, 0.0, 0.0, 0.0}> { y = MatMul(x, w) }"""
"""2049 is 2048 in FP16 as in TF32: an error of 2 % in both."""


def check(result: FixResult, name: str) -> Check:
    assert result.verdict is not None
    return next(check for check in result.verdict.checks if check.name == name)


def samples(shape: tuple[int, ...]) -> list[dict[str, Array]]:
    generator = np.random.default_rng(0)
    return [{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(3)]


def test_an_engine_that_passes_overrules_an_emulation_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's CPU kernels compute FP16 in FP32: it is more accurate than the emulation."""
    source = graph(CANCELLING).whole()
    assert not rewriter.fix(source, inputs=samples((4, 64)), build=False, repair=False).verified
    use_onnxruntime(monkeypatch)
    result = rewriter.fix(source, inputs=samples((4, 64)), repair=False)
    assert result.verified and result.conclusion.ending == "verified"
    assert check(result, "run").passed and check(result, "emulation").passed is None


def test_an_engine_that_fails_is_repaired_though_its_emulation_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's FP16 sums rise and fall again; the emulation that plans are made by sums in FP32."""
    source = graph(
        "g (float[4,2048] x, float[2048,8] w) => (float[8,4] y) { h = MatMul(x, w) y = Transpose(h) }"
    ).whole()
    del source.graph.input[1]
    w = np.abs(np.random.default_rng(2).standard_normal((2048, 8))).astype(np.float32) / 64
    w[1024:] *= -1
    source.graph.initializer.append(numpy_helper.from_array(w, "w"))
    data = [{"x": np.abs(sample["x"])} for sample in samples((4, 2048))]
    given: dict[str, Any] = {"inputs": data, "passes": "mixed-precision", "accumulation": "fp32"}
    emulated = rewriter.fix(source, build=False, **given)
    assert emulated.verified and not emulated.repairs
    use_emulation(monkeypatch)
    alone = rewriter.fix(source, repair=False, **given)
    assert check(alone, "run").passed is False and check(alone, "emulation").passed
    result = rewriter.fix(source, **given)
    assert result.verified and check(result, "run").passed
    assert "NOT within" in result.repairs[0] and "every check passes" in result.repairs[-1]


def test_an_engine_as_accurate_as_the_networks_own_fp32_engine_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulation(monkeypatch)
    data = {"x": np.ones((2, 8), np.float32)}
    result = rewriter.fix(graph(ROUNDED).whole(), inputs=data, repair=False, passes="mixed-precision")
    run = check(result, "run")
    assert run.excuse == "as-fp32" and "the network's own FP32 engine errs by 0.02" in run.summary
    assert result.verified and result.conclusion.ending == "as-fp32"
    strict = rewriter.fix(
        graph(ROUNDED).whole(), inputs=data, repair=False, passes="mixed-precision", tolerance=5e-3
    )
    assert strict.verified is False, "the user's own tolerance is not excused"


def small() -> dict[str, Any]:
    """A MatMul whose weights FP16 and TF32 round alike; its sums in FP16 add to that."""
    w = np.random.default_rng(3).standard_normal((512, 512)).astype(np.float32)
    source = graph(
        "g (float[4,512] x, float[512,512] w) => (float[512,4] y) { h = MatMul(x, w) y = Transpose(h) }"
    )
    proto = source.whole()
    del proto.graph.input[1]
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return {"model": proto, "inputs": samples((4, 512)), "passes": "mixed-precision"}


def test_fp32_that_was_measured_to_be_faster_and_more_accurate_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulation(monkeypatch)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 100.0)
    slower = rewriter.fix(**small())
    assert slower.plan is not None and not slower.conclusion.remarks, "FP32 takes twice the time"
    monkeypatch.setattr("emulated_engine.FP32_US", 5.0)
    result = rewriter.fix(**small())
    assert result.verified and result.plan is None
    (remark,) = result.conclusion.remarks
    assert "faster and more accurate" in remark and "5 us instead of 10 us (measured)" in remark
    assert rewriter.fix(**small(), repair=False).plan is not None, "--no-repair gives the rules' plan alone"


def test_fp32_is_not_built_where_recorded_costs_rule_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulation(monkeypatch)
    monkeypatch.setattr("emulated_engine.FP32_US", 5.0)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.5)
    assert rewriter.fix(**small()).plan is not None


def test_without_an_engine_the_estimate_has_to_be_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    result = rewriter.fix(**small(), build=False)
    assert result.plan is not None and not result.conclusion.remarks
    all_kept = rewriter.fix(**small(), build=False, keep_fp32_op=["MatMul"])
    assert all_kept.conclusion.remarks == ("all of it is FP32: rules and options leave nothing in FP16",)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.CLEAR", 100.0)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.WORTH_US", -1e9)
    result = rewriter.fix(**small(), build=False)
    assert result.plan is None and "estimated, recorded on an H200" in result.conclusion.remarks[0]


def projections() -> dict[str, Any]:
    """Two products of one tensor, which the default plan merges for an epilogue in FP32."""
    generator = np.random.default_rng(4)
    proto = graph(
        "g (float[4,256] x, float[256,64] a, float[256,64] b) => (float[64,4] y, float[64,4] z) {"
        " p = MatMul(x, a) q = MatMul(x, b) y = Transpose(p) z = Transpose(q) }"
    ).whole()
    for name in ("a", "b"):
        del proto.graph.input[1]
        w = generator.standard_normal((256, 64)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(w, name))
    return {"model": proto, "inputs": samples((4, 256))}


def merged(model: Model) -> bool:
    return any(node.op_type == "Split" for node in model.proto.graph.node)


@pytest.mark.parametrize(
    ("merged_us", "why"),
    [
        (9.9, "as fast, and more accurate"),
        (10.1, "slower by noise alone"),
        (20.0, "plain FP16 is faster, but errs more"),
    ],
)
def test_the_default_plan_stays_where_it_is_more_accurate(
    monkeypatch: pytest.MonkeyPatch, merged_us: float, why: str
) -> None:
    use_emulation(monkeypatch)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: merged_us if merged(m) else 10.0)
    result = rewriter.fix(**projections())
    assert merged(result.model), why
    assert not result.conclusion.remarks


def test_plain_fp16_is_handed_out_where_the_rest_of_the_plan_does_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulation(monkeypatch)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: 12.0 if merged(m) else 10.0)
    monkeypatch.setattr("rewriter.jobs.fix.other_plans.AS_FP32", 100.0)  # any error is as accurate
    result = rewriter.fix(**projections())
    assert result.verified and not merged(result.model)
    (remark,) = result.conclusion.remarks
    assert "(as in trt11-migrate): 10 us instead of 12 us on this GPU" in remark
    assert merged(rewriter.fix(**projections(), repair=False).model), "--no-repair gives the rules' plan"
    assert "merge-projections" not in result.pipeline
    monkeypatch.setattr("rewriter.jobs.fix.other_plans.AFFORDED_S", 0.0)
    assert merged(rewriter.fix(**projections()).model), "a second attempt would take too long"


def test_plain_fp16_is_not_tried_where_nothing_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulation(monkeypatch)
    attempts: list[FixJob] = []

    def counted(job: FixJob, given: Given) -> Attempt:
        attempts.append(job)
        return attempt(job, given)

    monkeypatch.setattr("rewriter.jobs.fix.stages.attempt", counted)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.0)
    body = "g (float[4,64] x) => (float[4,64] y) { y = Tanh(x) }"
    assert rewriter.fix(graph(body).whole(), inputs=samples((4, 64))).verified
    assert len(attempts) == 1
    rewriter.fix(**projections())
    assert len(attempts) == 3, "the plan, and plain FP16"


def conv_net() -> dict[str, Any]:
    """A Conv of 256 channels, whose FP16 sums a ConvTranspose spares."""
    proto = graph(
        "g (float[1,256,24,24] x, float[64,256,3,3] w) => (float[1,64,24,24] y) {"
        " c = Conv<pads = [1, 1, 1, 1]>(x, w) y = Relu(c) }"
    ).whole()
    del proto.graph.input[1]
    w = np.random.default_rng(5).standard_normal((64, 256, 3, 3)).astype(np.float32) / 48
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return {"model": proto, "inputs": samples((1, 256, 24, 24)), "target": "tensorrt-rtx"}


def transposed(model: Model) -> bool:
    return any(node.op_type == "ConvTranspose" for node in model.proto.graph.node)


@pytest.mark.parametrize(("transposed_us", "taken"), [(9.0, True), (10.1, True), (10.3, False)])
def test_convs_become_transposed_ones_where_that_is_no_slower(
    monkeypatch: pytest.MonkeyPatch, transposed_us: float, taken: bool
) -> None:
    """They err less than half as much."""
    use_emulation(monkeypatch)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.0)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: transposed_us if transposed(m) else 10.0)
    result = rewriter.fix(**conv_net())
    assert transposed(result.model) == taken
    assert result.verdict is not None
    names = [one.name for one in result.verdict.checks]
    assert ("emulation" in names) is not taken, "an engine alone judges other plans"
    assert [
        f"with transpose-convs, which pays here: {transposed_us:.3g} us instead of 10 us" in remark
        for remark in result.conclusion.remarks
    ] == [True] * taken
    assert not transposed(rewriter.fix(**conv_net(), skip=["transpose-convs"]).model)


def test_what_is_known_of_the_model_takes_none_of_the_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """ConvTransposes follow the same ranges; plain FP16 leaves out passes, so that it needs its own."""

    def slowly_measured(job: FixJob, given: Given) -> Attempt:
        return replace(attempt(job, given), measured_s=1e3)

    use_emulation(monkeypatch)
    monkeypatch.setattr("rewriter.jobs.fix.stages.attempt", slowly_measured)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.0)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: 9.0 if transposed(m) else 10.0)
    assert transposed(rewriter.fix(**conv_net()).model)
    monkeypatch.setattr("emulated_engine.latency_us", lambda m: 12.0 if merged(m) else 10.0)
    monkeypatch.setattr("rewriter.jobs.fix.other_plans.AS_FP32", 100.0)
    assert merged(rewriter.fix(**projections()).model)


def test_the_best_of_several_other_plans_is_handed_out() -> None:
    def tried(error: float) -> Any:
        return SimpleNamespace(relative_l2=error)

    made, fast, accurate = tried(1e-3), tried(1.1e-3), tried(4e-4)
    both = [("fast", fast), ("accurate", accurate)]
    assert _best(made, both, [10.0, 9.0, 9.1])[0] is accurate
    assert _best(made, both, [10.0, 9.0, 9.9])[0] is fast
    assert _best(made, both, [10.0, 9.9, 10.1])[0] is accurate
    assert _best(made, both, [10.0, 9.9, 10.3]) == (made, "")
    assert _best(made, both, [10.0, None, None]) == (made, "")
    assert _best(made, both, [None, 9.0, 9.0]) == (made, "")
    assert _best(made, [], []) == (made, "")
    assert "fast: 9 us instead of 10 us on this GPU, error 0.0011 instead of 0.001" in _best(
        made, both, [10.0, 9.0, 12.0]
    )


def test_ctrl_c_while_other_plans_are_tried_hands_out_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: FixJob, given: Given) -> Attempt:
        if job.repairing:
            raise KeyboardInterrupt
        return attempt(job, given)

    use_emulation(monkeypatch)
    monkeypatch.setattr("rewriter.jobs.fix.stages.attempt", interrupted)
    monkeypatch.setattr("rewriter.jobs.fix.fp32_instead.IN_DOUBT", 0.0)
    result = rewriter.fix(**projections())
    assert merged(result.model) and result.verified
    assert "interrupted while other plans were tried" in result.conclusion.remarks[0]
