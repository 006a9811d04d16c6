"""transpose-convs in `fix`: types, weights, plans, emulation and a build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, run
from needs import needs_rtx
from nightly import some
from onnx import numpy_helper
from paths import MODELS

from rewriter.hazards.planning.planner import SEARCHED
from rewriter.ir.base import Context, Target
from rewriter.ir.model import facts, load
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix import api
from rewriter.jobs.search.trials import Problem
from rewriter.judge.expected import run_all
from rewriter.passes.transpose_convs import NEEDED_ANSWERS, TransposeConvs
from rewriter.pipeline.driver import Driver
from rewriter.runtime.emulation import emulation

PIPELINE = "transpose-convs{depth=1 work=0},mixed-precision,clean-casts"


def _fixed(source: Any, data: Any, **options: Any) -> Any:
    keywords: dict[str, Any] = {"passes": PIPELINE, **options}
    return api.fix(source, inputs=data, target="tensorrt-rtx", **keywords)


def _case(name: str, **options: Any) -> Any:
    return _fixed(MODELS / f"{name}.onnx", MODELS / f"{name}.npz", **options)


def test_the_emulation_sums_it_in_fp32() -> None:
    """4608 products: 2.46e-3 was measured of a Conv, 2.93e-4 of a ConvTranspose and the bias behind it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 512, 6, 6)).astype(np.float16)
    w = (rng.standard_normal((8, 512, 3, 3)) * 0.05).astype(np.float16)
    source = graph(
        "g (float16[1,512,6,6] x, float16[8,512,3,3] w) => (float16[1,8,4,4] y) { y = Conv(x, w) }"
    ).proto
    del source.graph.input[1:]
    source.graph.initializer.append(numpy_helper.from_array(w, "w"))
    before = load(source)
    after, _ = apply(TransposeConvs(depth=1, work=0), before, Context(target=Target(answers=NEEDED_ANSWERS)))
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    exact = np.einsum("nchwij,ocij->nohw", windows, w.astype(np.float64))
    errors = []
    for model in (before, after):
        (found,) = run(emulation(model, facts.infer(model), "fp16"), {"x": x})
        errors.append(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    assert 2e-3 < errors[0] < 4e-3
    assert errors[1] == pytest.approx(2.07e-4, rel=0.2)


def _deep() -> onnx.ModelProto:
    """Two Convs, the second without padding."""
    rng = np.random.default_rng(0)
    weights = {"w": (40, 3, 3, 2), "b": (40,), "v": (3, 40, 3, 2)}
    source = graph(
        """
        g (float[N,3,6,8] x, float[40,3,3,2] w, float[40] b, float[3,40,3,2] v) => (float[N,3,4,7] y) {
            c = Conv<pads = [1, 1, 1, 0]>(x, w, b)
            r = Relu(c)
            y = Conv(r, v)
        }"""
    ).proto
    del source.graph.input[1:]
    values = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in weights.items()}
    source.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in values.items())
    return source


def _samples(scale: float = 1.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": (rng.standard_normal((2, 3, 6, 8)) * scale).astype(np.float32)} for _ in range(2)]


@pytest.mark.parametrize("option", [{"keep_fp32": ["c"]}, {"keep_fp32_op": ["Conv"]}], ids=str)
def test_a_kept_conv_stays_by_the_saved_plan_too(option: dict[str, Any], tmp_path: Path) -> None:
    source, plan = _deep(), tmp_path / "plan.json"
    first = _fixed(source, _samples(), build=False, save_plan=plan, **option)
    kept = [n for n in first.proto.graph.node if n.output[0].startswith("c")]
    assert "Conv" in {n.op_type for n in kept}
    told = next(found for found in first.passes if found.name == "transpose-convs").refusals
    assert "Conv(c)" in {refusal.node for refusal in told}
    assert all("kept in FP32 by" in refusal.reason for refusal in told)
    again = _fixed(source, _samples(), build=False, plan=plan)
    assert again.proto.SerializeToString() == first.proto.SerializeToString()


def test_a_conv_whose_partial_sums_overflow_stays_a_conv_in_fp32() -> None:
    """The rules judge it as the Conv that it is; what they keep is not turned."""
    source = graph("g (float[N,3,6,8] x, float[5,3,3,2] w) => (float[N,5,4,7] y) { y = Conv(x, w) }").proto
    del source.graph.input[1:]
    large = np.tile(np.asarray([300.0, -300.0], np.float32), 45).reshape(5, 3, 3, 2)
    source.graph.initializer.append(numpy_helper.from_array(large, "w"))
    samples = [{"x": np.full((1, 3, 6, 8), 60.0, np.float32)}]
    result = _fixed(source, samples, build=False)
    assert result.plan is not None
    assert [d.rule for d in result.plan.decisions] == ["partial-sums"]
    assert ops(load(result.proto)) == ["Conv"]


@needs_rtx
@pytest.mark.parametrize("name", some("nafnet", "resnet", "rtdetr"))
def test_tensorrt_builds_the_transposed_model(name: str) -> None:
    result = _case(name)
    assert "ConvTranspose" in ops(load(result.proto))
    assert result.verdict is not None
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert build.passed
    assert "types as planned" in build.summary


def test_nodes_that_a_search_puts_in_fp32_are_convs_in_the_model_and_in_its_trials() -> None:
    source = load(_deep())
    step, target = TransposeConvs(depth=1, work=0), Target(answers=NEEDED_ANSWERS)
    structured, _ = apply(step, source, Context(target=target))
    assert ops(structured).count("ConvTranspose") == 2
    samples = _samples()
    plan = Plan("fp16", decisions=(Decision("", "ConvTranspose", "0:c", SEARCHED, ""),))
    problem = Problem(
        structured,
        facts.infer(structured),
        samples,
        run_all(source, samples),
        adapted=lambda plan: Driver.run_unchecked(source, [step], Context(target=target, plan=plan)),
    )
    tried = problem.lowered(plan)
    assert {n.output[0]: n.op_type for n in tried.proto.graph.node}["c"] == "Conv"
    assert ops(tried).count("ConvTranspose") == 1
    (wanted,) = (source.array(t) for t in source.proto.graph.initializer if t.name == "w")
    conv = next(n for n in tried.proto.graph.node if n.op_type == "Conv")
    (found,) = (tried.array(t) for t in tried.proto.graph.initializer if t.name == conv.input[1])
    np.testing.assert_array_equal(found, wanted)
    result = _fixed(_deep(), samples, verify=False, tolerance=4.4e-4)
    assert result.plan is not None
    searched = {d.key for d in result.plan.decisions if d.rule == SEARCHED and d.op == "Conv"}
    assert searched
    made = {f"0:{n.output[0]}": n.op_type for n in result.proto.graph.node}
    assert {made[key] for key in searched} == {"Conv"}
