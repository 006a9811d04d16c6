"""split-products: products that are split, results that stay, and their error in FP16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import apply, ops, random_feeds, random_weights, run, with_constants, with_weights
from onnx import TensorProto, numpy_helper

import rewriter
from rewriter.base import Context, Kept, Target
from rewriter.emulation import emulation
from rewriter.jobs.fix import api
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Array, Model, facts, load
from rewriter.passes.split_products import SplitProducts
from rewriter.patterns.split_parts import RULE, is_made
from rewriter.pipeline.presets import preset_named
from rewriter.planning.free_fp32 import PROBE
from rewriter.rewriting.product_splitting.latency import budget_left

YES = Context(target=Target(answers={PROBE: "fp32"}))
NORM = "n = LayerNormalization<axis = -1>(x, s)"
PARTS = ["Clip", "Cast", "Cast", "Sub", "Where", "Reshape"]
SUMS = ["MatMul", "Add", "Split", "Add", "Split", "Add"]
AFTER_NORM = ["Unsqueeze", "Expand", "LayerNormalization", *PARTS, *SUMS]
BEHIND_PRODUCT = ["Unsqueeze", "Expand", *PARTS, *SUMS]
PLAIN = preset_named("trt-fp16").pipeline
SPLIT = PLAIN.replace("keep-epilogues", "keep-epilogues,split-products")
THREE, WIDE = "float[2,5,8] x", "float[2,5,12] y"


def _model(
    body: str,
    *,
    x: str = THREE,
    y: str = WIDE,
    opset: int = 17,
    size: float = 1.0,
) -> Model:
    """A graph with random weights w [8,12], times `size`, v [12,8] and a scale s [8]."""
    weights = random_weights({"w": (8, 12), "v": (12, 8), "s": (8,)})
    text = f"g ({x}, float[8,12] w, float[12,8] v, float[8] s) => ({y}) {{ {body} }}"
    return with_weights(text, weights | {"w": np.float32(size) * weights["w"]}, opset=opset)


def _distance(found: Array, wanted: Array) -> float:
    return float(
        np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64))
    )


@pytest.mark.parametrize(
    ("body", "ports", "expected"),
    [
        pytest.param(f"{NORM} y = MatMul(n, w)", (THREE, WIDE), AFTER_NORM, id="after a norm"),
        pytest.param(
            f"{NORM} y = MatMul(n, w)",
            ("float[5,8] x", "float[5,12] y"),
            AFTER_NORM,
            id="two axes",
        ),
        pytest.param(
            "m = MatMul(x, w) r = Relu(m) y = MatMul(r, v)",
            (THREE, "float[2,5,8] y"),
            ["MatMul", "Relu", *BEHIND_PRODUCT],
            id="after a product",
        ),
    ],
)
def test_split(body: str, ports: tuple[str, str], expected: list[str]) -> None:
    source = _model(body, x=ports[0], y=ports[1])
    result, report = apply(SplitProducts(), source, YES)
    assert ops(result) == expected
    assert result.signature == source.signature
    onnx.checker.check_model(result.whole(), full_check=True)
    for scale in (1.0, 1e5, 1e-9):  # beyond FP16 at both ends, too
        feeds = random_feeds(source, scale=scale)
        assert _distance(run(result, feeds)[0], run(source, feeds)[0]) < 1e-6
    again, second = apply(SplitProducts(), result, YES)
    assert again is result
    assert not second.changes
    assert len(report.changes) == 1


def test_layers_that_share_a_weight_go_on_sharing_it() -> None:
    source = _model(f"{NORM} m = MatMul(n, w) a = Relu(m) p = MatMul(a, v) r = Relu(p) y = MatMul(r, w)")
    result, _ = apply(SplitProducts(), source, YES)
    read = [n.input[1] for n in result.proto.graph.node if n.op_type == "MatMul"]
    assert read[0] == read[2] != read[1]


@pytest.mark.parametrize(
    ("body", "step", "ports"),
    [
        pytest.param("y = Gemm(x, w)", SplitProducts(), ("float[5,8] x", "float[5,12] y"), id="Gemm"),
        pytest.param(
            "a = Transpose<perm = [0,2,1]>(x) y = MatMul(x, a)",
            SplitProducts(),
            (THREE, "float[2,5,5] y"),
            id="two computed tensors",
        ),
        pytest.param(
            f"{NORM} y = MatMul(n, w)", SplitProducts(tiles=0), (THREE, WIDE), id="more tiles than allowed"
        ),
    ],
)
def test_skipped(body: str, step: SplitProducts, ports: tuple[str, str]) -> None:
    source = _model(body, x=ports[0], y=ports[1])
    result, report = apply(step, source, YES)
    assert result is source
    assert not report.refusals


def test_tiles_are_of_the_larger_product() -> None:
    """128 rows and columns are one tile, and two by two when they are split."""
    body = f"{{ {NORM} y = MatMul(n, w) }}"
    source = with_constants(body, {"w": (8, 128), "s": (8,)}, "float[128,8] x", "float[128,128] y")
    for allowed, changes in ((3, 0), (4, 1)):
        _, report = apply(SplitProducts(tiles=allowed), source, YES)
        assert len(report.changes) == changes


@pytest.mark.parametrize(
    ("source", "kept", "reason"),
    [
        pytest.param(
            _model(f"{NORM} y = MatMul(n, w)"), Kept(nodes=("y",)), "--keep-fp32 y", id="kept by the user"
        ),
        pytest.param(
            _model(f"{NORM} y = MatMul(n, w)", x="float[N,5,8] x", y="float[N,5,12] y"),
            Kept(),
            "the rows of n are unknown",
            id="a free axis",
        ),
        pytest.param(
            _model(f"{NORM} y = MatMul(n, w)", x="float[2,3,5,8] x", y="float[2,3,5,12] y"),
            Kept(),
            "n has 4 axes",
            id="four axes",
        ),
        pytest.param(
            _model(f"{NORM} a = MatMul(n, w) b = MatMul(n, w) y = Add(a, b)"),
            Kept(),
            "merges the 2 products of n",
            id="products of one tensor",
        ),
        pytest.param(
            _model(f"{NORM} y = MatMul(n, w)", size=1e5),
            Kept(),
            "FP16 cannot hold",
            id="a weight beyond FP16",
        ),
        pytest.param(
            _model("m = MatMul(x, w) r = Relu(m) y = MatMul(r, v)", y="float[2,5,8] y", opset=12),
            Kept(),
            "it needs opset 13, the model has 12",
            id="opset",
        ),
    ],
)
def test_declined(source: Model, kept: Kept, reason: str) -> None:
    result, report = apply(SplitProducts(), source, Context(target=YES.target, kept=kept))
    assert result is source
    assert report.refusals
    assert all(reason in refusal.reason for refusal in report.refusals)


@pytest.mark.parametrize("answers", [{}, {PROBE: "fp16"}], ids=["not probed", "FP16 sums"])
def test_targets_not_known_to_sum_in_fp32_are_skipped(answers: dict[str, str]) -> None:
    source = _model(f"{NORM} y = MatMul(n, w)")
    result, report = apply(SplitProducts(), source, Context(target=Target(answers=answers)))
    assert result is source
    assert not report.refusals


def _mlp() -> onnx.ModelProto:
    """64 rows of 48: norm, two products with a Relu between, and the residual sum."""
    body = """{
            n = LayerNormalization<axis = -1>(x, s)
            m = MatMul(n, w)
            a = Add(m, b)
            r = Relu(a)
            p = MatMul(r, v)
            y = Add(p, x)
        }"""
    shapes = {"s": (48,), "w": (48, 96), "b": (96,), "v": (96, 48)}
    return with_constants(body, shapes, "float[1,64,48] x", "float[1,64,48] y").whole()


def _samples() -> list[dict[str, Array]]:
    draws = (np.random.default_rng(seed).standard_normal((1, 64, 48)) for seed in (1, 2))
    return [{"x": draw.astype(np.float32)} for draw in draws]


def _fixed(passes: str, **options: object) -> FixResult:
    return api.fix(_mlp(), passes=passes, inputs=_samples(), target="tensorrt-rtx", **options)  # type: ignore[arg-type]


def _emulated(result: FixResult) -> float:
    feeds = {"x": np.random.default_rng(3).standard_normal((1, 64, 48)).astype(np.float32)}
    model = load(result.proto)
    (found,) = run(emulation(model, facts.infer(model), "fp16"), feeds)
    (wanted,) = run(load(_mlp()), feeds)
    return _distance(found, wanted)


def test_all_but_the_products_is_fp32() -> None:
    """One rounding each of data and weight, twice: sqrt(4) * 2.1e-4 less what the residual sum dilutes."""
    plain, split = _fixed(PLAIN, build=False), _fixed(SPLIT, build=False)
    assert _emulated(plain) > 2e-4
    assert _emulated(split) < 5e-6
    model = load(split.proto)
    known = facts.infer(model).main
    products = [n for n in model.proto.graph.node if n.op_type == "MatMul"]
    assert all(is_made(node) for node in products)
    assert {known[name].dtype for node in products for name in node.input} == {TensorProto.FLOAT16}
    assert split.plan is not None
    made = {n.op_type for n in model.proto.graph.node if is_made(n)}
    kept = {d.op for d in split.plan.decisions if d.rule == RULE}
    assert made - kept == {"MatMul", "Reshape"}


def _splits(result: FixResult) -> int:
    return sum(len(found.changes) for found in result.passes if found.name == SplitProducts.name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, 0, id="what accurate allows by itself"),
        pytest.param({"max_latency_cost": 4.0}, 2, id="a budget that is enough"),
        pytest.param({"tolerance": 1.0}, 0, id="an error is the aim"),
    ],
)
def test_accurate_splits_where_its_budget_allows_it(options: dict[str, float], expected: int) -> None:
    samples = _samples()
    result = api.fix(_mlp(), preset="accurate", inputs=samples, target="tensorrt-rtx", build=False, **options)  # type: ignore[arg-type]
    assert _splits(result) == expected


@pytest.mark.parametrize(("others", "expected"), [(8, 2), (9, 0)])
def test_few_products_of_many_are_not_split(others: int, expected: int) -> None:
    """Two of ten are a fifth."""
    source = _mlp()
    square = np.eye(48, dtype=np.float32)
    source.graph.initializer.append(numpy_helper.from_array(square, "square"))
    source.graph.node[-1].output[0] = "t0"
    for place in range(others):
        out = "y" if place == others - 1 else f"t{place + 1}"
        source.graph.node.add(op_type="Softmax", input=[f"t{place}"], output=[f"u{place}"])
        source.graph.node.add(op_type="MatMul", input=[f"u{place}", "square"], output=[out])
    for budget, count in ((4.0, expected), (None, 2)):
        context = replace(YES, budget=budget)
        after, report = apply(SplitProducts(), load(source), context)
        made = {node.op_type for node in after.proto.graph.node if is_made(node)}
        assert ("Where" in made) == (count > 0)
        told = [
            refusal.reason for refusal in report.refusals if f"2 of {others + 2} products" in refusal.reason
        ]
        assert bool(told) == (count == 0)


def test_a_search_gets_the_rest_of_the_budget() -> None:
    result = api.fix(
        _mlp(), preset="accurate", inputs=_samples(), target="tensorrt-rtx", build=False, max_latency_cost=4.0
    )
    assert result.verdict is not None
    told = next(check.summary for check in result.verdict.checks if check.name == "max-latency-cost")
    assert told.startswith("at most 4 more latency, of which split products left ")
    assert budget_left(0.5, 120.0, 20.0) == pytest.approx(0.25)  # 150 us for 120
    assert budget_left(0.1, 120.0, 20.0) == 0.0


@pytest.mark.parametrize("budget", [0.2, 4.0], ids=["not split", "split"])
def test_a_saved_plan_gives_the_same_again(budget: float, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    samples, target = _samples(), "tensorrt-rtx"
    first = api.fix(
        _mlp(),
        preset="accurate",
        inputs=samples,
        target=target,
        build=False,
        save_plan=plan,
        max_latency_cost=budget,
    )
    again = api.fix(_mlp(), preset="accurate", inputs=samples, target=target, build=False, plan=plan)
    assert _splits(again) == _splits(first)
    assert again.proto.graph == first.proto.graph


def test_scan_reports_no_hazard_in_the_fixed_model() -> None:
    result = rewriter.scan(_fixed(SPLIT, build=False).proto, inputs=_samples(), target="tensorrt-rtx")
    assert not result.reaches("warning")


def test_tensorrt_builds_it() -> None:
    pytest.importorskip("tensorrt_rtx", reason='needs pip install "rewriter[rtx]"')
    result = _fixed(SPLIT)
    assert result.verdict is not None
    assert result.verdict.passed
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert "types as planned" in build.summary
