"""compensate-rounding: weights on the grid of a lower type, and products that err less on data held out."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx.parser
import pytest
from graphs import apply, graph, run
from onnx import numpy_helper

import rewriter
from rewriter.base import Calibration, Context
from rewriter.driver import PassResult
from rewriter.facts import infer
from rewriter.model import Array, Model, load
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.plan import Decision, Plan
from rewriter.planner import SEARCHED
from rewriter.presets import PRESETS

FP16, BF16 = 10, 16
Feeds = dict[str, Array]


def related(*shape: int, seed: int = 0, axis: int = -1) -> Array:
    """Activations whose channels go together, as those of networks do: four causes and a little noise."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).standard_normal((4, shape[axis]))
    size = list(np.delete(shape, axis))
    values = rng.standard_normal((*size, 4)) @ mixing + 0.1 * rng.standard_normal((*size, shape[axis])) + 0.5
    return np.moveaxis(values, -1, axis).astype(np.float32)


def smooth(*shape: int, seed: int = 0, axis: int = 1) -> Array:
    """Images whose neighbouring points go together: a level for each channel, and a little noise."""
    rng = np.random.default_rng(seed)
    level = rng.standard_normal((*shape[: axis + 1], *(1 for _ in shape[axis + 1 :])))
    return (level + 0.1 * rng.standard_normal(shape)).astype(np.float32)


def weighted(text: str, **shapes: tuple[int, ...]) -> Model:
    """A graph with random initializers of those shapes."""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return load(proto)


def compensated(
    source: Model, *samples: Feeds, real: bool = True, **context: object
) -> tuple[Model, PassResult]:
    given_ = Calibration(list(samples), real)
    return apply(CompensateRounding(), source, Context(calibration=given_, **context))  # type: ignore[arg-type]


def weights(source: Model) -> dict[str, Array]:
    return {t.name: source.array(t) for t in source.proto.graph.initializer}


def on_grid(value: Array, kind: type = np.float16) -> bool:
    return bool(np.array_equal(value.astype(kind).astype(np.float32), value))


def error(source: Model, other: Model, feeds: Feeds) -> float:
    return float(
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(run(source, feeds), run(other, feeds), strict=True)))
    )


def to_nearest(source: Model) -> Model:
    rounded = source.copy()
    for stored in rounded.proto.graph.initializer:
        value = source.array(stored).astype(np.float16).astype(np.float32)
        stored.CopyFrom(rounded.detached_tensor(stored.name, value))
    return rounded


MATMUL = "g (float[1,96,48] x) => (float[1,96,24] y) { y = MatMul(x, w) }"
CASES = [
    pytest.param(weighted(MATMUL, w=(48, 24)), (1, 96, 48), -1, id="MatMul"),
    pytest.param(
        weighted("g (float[1,48,96] x) => (float[1,24,96] y) { y = MatMul(w, x) }", w=(24, 48)),
        (1, 48, 96),
        1,
        id="MatMul, the weight on the left",
    ),
    pytest.param(
        weighted(
            "g (float[96,48] x) => (float[96,24] y) { y = Gemm<alpha = 0.5, transB = 1>(x, w, b) }",
            w=(24, 48),
            b=(24,),
        ),
        (96, 48),
        -1,
        id="Gemm with transB and alpha",
    ),
    pytest.param(
        weighted("g (float[48,96] x) => (float[96,24] y) { y = Gemm<transA = 1>(x, w) }", w=(48, 24)),
        (48, 96),
        0,
        id="Gemm with transA",
    ),
    pytest.param(
        weighted("g (float[48,96] x) => (float[24,96] y) { y = Gemm<transA = 1>(w, x) }", w=(48, 24)),
        (48, 96),
        0,
        id="Gemm, the weight on the left",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,19,17] x) => (float[2,16,9,8] y)"
            " { y = Conv<strides = [2, 2], pads = [1, 0, 2, 1], dilations = [2, 2]>(x, w) }",
            w=(16, 8, 3, 3),
        ),
        (2, 8, 19, 17),
        1,
        id="Conv with strides, pads and dilations",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,12,12] x) => (float[2,16,12,12] y)"
            ' { y = Conv<auto_pad = "SAME_UPPER", group = 4>(x, w) }',
            w=(16, 2, 3, 3),
        ),
        (2, 8, 12, 12),
        1,
        id="grouped Conv that pads by itself",
    ),
    pytest.param(
        weighted(
            "g (float[2,8,16,16] x) => (float[2,8,14,14] y) { y = Conv<group = 8>(x, w) }", w=(8, 1, 3, 3)
        ),
        (2, 8, 16, 16),
        1,
        id="depthwise Conv",
    ),
    pytest.param(
        weighted(
            "g (float[2,12,80] x) => (float[2,16,80] y) { y = Conv<pads = [1, 1]>(x, w) }", w=(16, 12, 3)
        ),
        (2, 12, 80),
        1,
        id="Conv of one axis",
    ),
    pytest.param(
        weighted("g (float[1,6,6,7,8] x) => (float[1,16,5,6,7] y) { y = Conv(x, w) }", w=(16, 6, 2, 2, 2)),
        (1, 6, 6, 7, 8),
        1,
        id="Conv of three axes",
    ),
]


@pytest.mark.parametrize(("source", "shape", "axis"), CASES)
def test_products_err_less_on_data_never_seen(source: Model, shape: tuple[int, ...], axis: int) -> None:
    made = smooth if any(a.name == "group" for a in source.proto.graph.node[0].attribute) else related
    feeds = [{"x": made(*shape, seed=seed, axis=axis)} for seed in range(4)]
    result, report = compensated(source, *feeds[:3])
    assert [change.node for change in report.changes] == ["model"]
    assert not report.refusals
    assert on_grid(weights(result)["w"])
    assert error(source, result, feeds[3]) < 0.8 * error(source, to_nearest(source), feeds[3])


def test_a_weight_that_several_nodes_read_alike() -> None:
    source = weighted(
        "g (float[96,48] x, float[96,48] z) => (float[96,24] y, float[96,24] v)"
        " { y = MatMul(x, w)  v = MatMul(z, w) }",
        w=(48, 24),
    )
    feeds = [
        {"x": related(96, 48, seed=s), "z": 3 * related(96, 48, seed=s + 50)[:, ::-1].copy()}
        for s in range(4)
    ]
    result, report = compensated(source, *feeds[:3])
    assert report.changes
    assert error(source, result, feeds[3]) < error(source, to_nearest(source), feeds[3])


def test_bf16_has_its_own_grid() -> None:
    source = weighted(MATMUL, w=(48, 24))
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    result, _ = compensated(source, *feeds, plan=Plan("bf16"))
    assert on_grid(weights(result)["w"], ml_dtypes.bfloat16)


def test_one_sample_holds_out_some_of_its_rows() -> None:
    result, report = compensated(weighted(MATMUL, w=(48, 24)), {"x": related(1, 96, 48)})
    assert report.changes
    assert on_grid(weights(result)["w"])


def test_it_is_the_same_every_time() -> None:
    source = weighted(MATMUL, w=(48, 24))
    feeds = [{"x": related(1, 96, 48, seed=s)} for s in range(3)]
    first, second = (weights(compensated(source, *feeds)[0])["w"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_what_the_plan_keeps_stays() -> None:
    source = weighted(MATMUL, w=(48, 24))
    kept = Plan("fp16", decisions=(Decision("m", "MatMul", "0:y", "user", "because"),))
    result, report = compensated(source, {"x": related(1, 96, 48)}, plan=kept)
    assert result is source
    assert not report.refusals


def test_what_a_search_put_in_fp32_is_rounded_all_the_same() -> None:
    """Such products are TF32: a plan that is saved and applied again gives the weights that were judged."""
    source, feeds = weighted(MATMUL, w=(48, 24)), {"x": related(1, 96, 48)}
    found = Plan("fp16", decisions=(Decision("m", "MatMul", "0:y", SEARCHED, "because"),))
    apart, together = (compensated(source, feeds, plan=plan)[0] for plan in (found, Plan("fp16")))
    assert on_grid(weights(apart)["w"])
    np.testing.assert_array_equal(weights(apart)["w"], weights(together)["w"])


def _with(source: Model, change: Callable[[Array], None]) -> Model:
    stored = source.proto.graph.initializer[0]
    value = source.array(stored).copy()
    change(value)
    stored.CopyFrom(source.detached_tensor(stored.name, value))
    return source


def _put(index: tuple[int, ...], number: float) -> Callable[[Array], None]:
    def change(value: Array) -> None:
        value[index] = number

    return change


X = related(1, 96, 48)
BRANCH = """g (float[1,96,48] x, bool c) => (float[1,96,24] y) {
    y = If (c) <then_branch = t () => (float[1,96,24] u) { u = MatMul(x, w) },
                else_branch = e () => (float[1,96,24] v) { v = MatMul(x, w) }> }"""


@pytest.mark.parametrize(
    ("source", "feeds", "reason"),
    [
        pytest.param(
            _with(weighted(MATMUL, w=(48, 24)), _put((0, 0), 1e5)),
            {"x": X},
            "cannot hold 1e+05",
            id="out of range",
        ),
        pytest.param(
            _with(weighted(MATMUL, w=(48, 24)), _put((0, 0), np.nan)),
            {"x": X},
            "not finite",
            id="NaN in a weight",
        ),
        pytest.param(weighted(MATMUL, w=(48, 24)), {"x": 0 * X}, "is zero", id="activations of zeros"),
        pytest.param(
            weighted(MATMUL, w=(48, 24)), {"x": X * np.float32(np.nan)}, "not finite", id="NaN in activations"
        ),
        pytest.param(
            weighted(
                "g (float[1,96,48] x) => (float[1,96,24] y, float[48,24] v)"
                " { y = MatMul(x, w)  v = Relu(w) }",
                w=(48, 24),
            ),
            {"x": X},
            "in different ways",
            id="read in another way",
        ),
        pytest.param(
            weighted("g (float[2,96,48] x) => (float[2,96,24] y) { y = MatMul(x, w) }", w=(2, 48, 24)),
            {"x": np.concatenate([X, X])},
            "3 axes",
            id="batched weight",
        ),
        pytest.param(weighted(MATMUL, w=(48, 24)), {"x": X[:, :1]}, "too few rows", id="one row"),
    ],
)
def test_what_is_left_alone_and_why(source: Model, feeds: Feeds, reason: str) -> None:
    if feeds["x"].shape[1] == 1:
        source = weighted("g (float[1,1,48] x) => (float[1,1,24] y) { y = MatMul(x, w) }", w=(48, 24))
    result, report = compensated(source, feeds)
    assert result is source
    assert [refusal for refusal in report.refusals if reason in refusal.reason]


def test_weights_in_branches_are_left() -> None:
    source = weighted(BRANCH, w=(48, 24))
    result, _ = compensated(source, {"x": X, "c": np.array(True)})
    assert result is source


def test_unrelated_activations_gain_nothing_and_lose_nothing() -> None:
    """With no more rows than channels all is noise: the judgement on rows held out speaks against it."""
    source = weighted("g (float[4,64] x) => (float[4,8] y) { y = MatMul(x, w) }", w=(64, 8))
    rng = np.random.default_rng(0)
    feeds = [
        {"x": (rng.standard_normal((4, 64)) * (np.arange(64) % 4 == s)).astype(np.float32)} for s in range(3)
    ]
    result, report = compensated(source, *feeds)
    assert result is source
    assert "held out" in report.refusals[0].reason


def test_dead_channels_are_rounded_to_nearest() -> None:
    source = weighted(MATMUL, w=(48, 24))
    alive = (np.arange(48) % 3 > 0).astype(np.float32)
    result, report = compensated(source, *({"x": related(1, 96, 48, seed=s) * alive} for s in range(3)))
    assert report.changes
    given_, found = weights(source)["w"], weights(result)["w"]
    np.testing.assert_array_equal(found[alive == 0], given_[alive == 0].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("real", "told"), [(True, None), (False, "the data is random")])
def test_random_data_is_no_data(real: bool, told: str | None) -> None:
    source = weighted(MATMUL, w=(48, 24))
    result, report = compensated(source, {"x": X}, real=real)
    assert (result is source) == (not real)
    assert [r.reason.split(":")[0] for r in report.refusals] == ([told] if told else [])


def test_a_model_in_fp16_has_nothing_to_round() -> None:
    source = graph(
        "g (float16[4,2] x) => (float16[4,2] y) <float16[2,2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
    )
    result, report = apply(CompensateRounding(), source)
    assert result is source
    assert not report.refusals
    assert infer(source).main["y"].dtype == FP16


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
