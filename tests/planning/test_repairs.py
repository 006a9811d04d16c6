"""A model for each rule of `scan`: found, repaired by `fix`, and then, emulated, within 2e-3 of FP32."""

from collections.abc import Mapping
from dataclasses import dataclass

import graphs
import numpy as np
import pytest
from nightly import some
from paths import MODELS

import rewriter
from rewriter.base.errors import PassError
from rewriter.hazards import SCAN_RULES, GraphAnalysis, PrecisionRequest
from rewriter.ir.graph import open_graphs
from rewriter.ir.graph.casts import retype
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Plan
from rewriter.passes.mixed_precision import request
from rewriter.runtime.emulation import emulation, reference
from rewriter.runtime.metrics.outputs import compare
from rewriter.runtime.ranges import measure
from rewriter.verification.expected import run_all

REPAIRED = 2e-3  # relative L2 error of every output, or the share of elements that differ
RULES = {rule.__name__: rule for rule in SCAN_RULES}


def span(low: float, high: float, *shape: int) -> Array:
    """Values from `low` to `high`, evenly spaced."""
    return np.linspace(low, high, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def normal(scale: float, *shape: int) -> Array:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model that shows what a rule is about."""

    text: str
    feeds: Mapping[str, Array]
    # whether an emulation of it with everything in FP16 errs by more than `REPAIRED`; where it does not,
    # TensorRT computes right, or emulation, which rounds tensors, cannot see it
    wrong: bool = True
    opset: int = 17  # operator set of the text


RNG = np.random.default_rng(1)
SIGNS = np.where(np.arange(4096) < 2048, 10.0, -10.0).astype(np.float32)[:, None]
BANK = np.kron(np.eye(4, dtype=np.float32), np.full((4, 1), 0.3, np.float32)) * [1, 1, 1, 3e-7]
"""Four bands of four bins each; no other bin counts."""

CASES = {
    "unfused_norm": Case(
        """g (float[4,64] x) => (float[4,64] y) <float two = {2.0}, float e = {1e-3}> {
            s = Pow(x, two) m = ReduceMean<axes = [1], keepdims = 1>(s) a = Add(m, e) r = Sqrt(a)
            y = Div(x, r) }""",
        {"x": normal(1e3, 4, 64)},
    ),
    "overflow": Case(
        "g (float[64] x) => (float[64] y) <float c = {1e-5}> { e = Mul(x, x) f = Mul(e, c) y = Tanh(f) }",
        {"x": span(1, 600, 64)},
    ),
    "hidden_sums": Case(
        "g (float[4,256] x) => (float[4,1] y) { y = ReduceLogSumExp<axes = [1]>(x) }",
        {"x": span(5, 8, 4, 256)},
        wrong=False,
    ),
    "long_softmax": Case(
        """g (float[1,65600] x, float[65600,2] v) => (float[1,2] y) {
            p = Softmax<axis = -1>(x) y = MatMul(p, v) }""",
        {"x": span(0, 14, 1, 65600), "v": np.abs(normal(1, 65600, 2))},
        wrong=False,
    ),
    "partial_sums": Case(
        "g (float[4,4096] a, float[4096,2] b) => (float[4,2] y) { m = MatMul(a, b) y = Relu(m) }",
        {
            "a": np.full((4, 4096), 10, np.float32) + span(0, 3, 4, 1).round(),
            "b": np.repeat(SIGNS + (SIGNS > 0), 2, axis=1),
        },
    ),
    "accumulation: a running sum": Case(
        "g (float[4096] x) => (float[4096] y) <int64 axis = {0}> { s = CumSum(x, axis)\n y = Sin(s) }",
        {"x": span(0.01, 0.02, 4096)},
    ),
    "slow_state: a Loop": Case(
        """g (float[64] x) => (float[64] y) <int64 n = {200}, bool go = {1}, float k = {1.001}> {
            y = Loop(n, go, x) <body = step (int64 i, bool c, float[64] s) => (bool d, float[64] t) {
                d = Identity(c) t = Mul(s, k)
            }>
        }""",
        {"x": span(0.1, 1, 64)},
    ),
    "slow_state": Case(
        """g (float[64] x) => (float[64] y) <int64 n = {200}, bool go = {1}, float k = {0.003}> {
            y = Loop(n, go, x) <body = step (int64 i, bool c, float[64] s) => (bool d, float[64] t) {
                d = Identity(c) u = Mul(s, k) t = Add(s, u)
            }>
        }""",
        {"x": span(0.1, 1, 64)},
    ),
    "lost_epsilon": Case(
        """g (float[4,64] x) => (float[4,64] y) <float two = {2.0}, float e = {1e-12}> {
            s = ReduceSumSquare<axes = [1]>(x) a = Add(s, e) r = Sqrt(a) y = Div(x, r) }""",
        {"x": np.concatenate([np.zeros((1, 64), np.float32), normal(1e-3, 3, 64)])},
    ),
    "small_operands": Case(
        "g (float[64] x) => (float[64] y) { s = Mul(x, x)\n y = Log(s) }", {"x": span(1e-4, 1, 64)}
    ),
    "steep_functions": Case(
        """g (float[1,1,1024] x) => (float[1,8,1017] y) <float e = {1e-8}, float two = {2.0},
            float[8,1,8] w = {FILTERS}> {
            c = Conv(x, w) s = Pow(c, two) a = Add(s, e) y = Log(a) }""".replace(
            "FILTERS", ", ".join(f"{v:.6f}" for v in normal(0.5, 64))
        ),
        {"x": normal(1, 1, 1, 1024) * np.geomspace(1e-3, 30, 1024, dtype=np.float32)},
    ),
    "differences": Case(
        """g (float[4,64] x) => (float[4,1] y) {
            m = ReduceMean<axes = [1]>(x) p = Mul(m, m) q = Mul(x, x) a = ReduceMean<axes = [1]>(q)
            v = Sub(a, p) y = Sqrt(v) }""",
        {"x": 30 + normal(1, 4, 64)},
    ),
    "differences: views of one input": Case(
        """g (float[1,64,3] p) => (float[1,64,3] y) <int64[3] first = {0, 0, 0}, int64[3] end = {1, 1, 3}> {
            c = Slice(p, first, end) d = Sub(p, c) y = Tanh(d) }""",
        {"p": 40 + normal(1, 1, 64, 3)},
    ),
    "differences: distances": Case(
        """g (float[1,64,3] p) => (float[1,64,64] y)
        <float two = {2.0}, float half = {-0.5}, int64[1] last = {2}> {
            s = Mul(p, p) n = ReduceSum<keepdims = 1>(s, last) t = Transpose<perm = [0, 2, 1]>(n)
            q = Transpose<perm = [0, 2, 1]>(p) m = MatMul(p, q) k = Mul(m, two) d = Sub(n, k)
            e = Add(d, t) h = Mul(e, half) y = Exp(h) }""",
        {"p": np.round((10 + normal(1, 1, 64, 3)) * 64) / 64},  # which TF32 holds
    ),
    "exponential_differences": Case(
        """g (float[64] x) => (float[64] y) <float one = {1.0}, float k = {100.0}> {
            e = Exp(x) d = Sub(e, one) y = Mul(d, k) }""",
        {"x": span(-1e-2, 1e-2, 64)},
    ),
    "filter_banks": Case(
        """g (float[4,16] x) => (float[4,3] y, float[4,1] z)
            <float[16,4] w = {BANK}, int64[2] parts = {3, 1}> {
            b = MatMul(x, w) y, z = Split<axis = 1>(b, parts) }""".replace(
            "BANK", ", ".join(str(v) for v in BANK.reshape(-1))
        ),
        {"x": span(100, 400, 4, 16)},
    ),
    "batch_statistics": Case(
        """g (float[2,4,8] x) => (float[2,4,8] y) <float[4] s = {1, 2, 3, 4}, float[4] b = {1, 0, 1, 0},
            float[4] m = {10, 0, 5, 1}, float[4] v = {9.8e7, 1e-6, 2e7, 1}> {
            y = BatchNormalization(x, s, b, m, v) }""",
        {"x": normal(1e3, 2, 4, 8)},
    ),
    "underflow": Case(
        """g (float[64] x) => (float[64] y) <float c = {1e-7}, float d = {1e7}> {
            s = Mul(x, c) t = Abs(s) y = Mul(t, d) }""",
        {"x": normal(1, 64)},
    ),
    "underflow: a divisor": Case(
        "g (float[64] x) => (float[64] y) <float c = {1e-9}> { e = Exp(x)\n y = Div(e, c) }",
        {"x": span(-9, 1, 64)},
    ),
    "weights": Case(
        """g (float[4,8] x) => (float[4,2] y) <float[8,2] w = {1e5, 0.5, 2e5, 0.5, 3e5, 0.5, 1e5, 0.5,
            1e5, 0.5, 1e5, 0.5, 1e5, 0.5, 1e5, 0.5}> { y = MatMul(x, w) }""",
        {"x": np.abs(normal(1e-2, 4, 8))},
    ),
    "masks": Case(
        """g (float[2,4,4] s, bool[2,4,4] m) => (float[2,4,4] y) <float c = {-3.4e38}, float zero = {0.0}> {
            b = Where(m, zero, c) a = Add(s, b) y = Softmax<axis = -1>(a) }""",
        {"s": normal(1, 2, 4, 4), "m": np.arange(32).reshape(2, 4, 4) % 4 < 3},
    ),
    "phase": Case(
        "g (float[64] x) => (float[64] y) <float k = {0.7}> { a = Mul(x, k)\n y = Sin(a) }",
        {"x": span(100, 900, 64)},
    ),
    "positions": Case(
        "g (int64[64] i) => (float[64] y) <float k = {0.001}> { f = Cast<to = 1>(i) y = Mul(f, k) }",
        {"i": np.arange(64) * 37 + 4001},
        wrong=False,
    ),
    "integers": Case(
        "g (float[64] x) => (int64[64] y) <float k = {100.0}> { a = Mul(x, k)\n y = Cast<to = 7>(a) }",
        {"x": span(0.018, 8, 64)},
    ),
    "coordinates": Case(
        """g (float[1,1,256,256] x, float[1,16,16,2] grid) => (float[1,1,16,16] y) {
            h = Tanh(grid) y = GridSample(x, h) }""",
        {"x": normal(1, 1, 1, 256, 256), "grid": normal(0.5, 1, 16, 16, 2)},
    ),
    "order": Case(
        """g (float[1,512] x) => (int64[1,9] i) <int64[1] k = {9}> { a = Neg(x)\n v, i = TopK(a, k) }""",
        {"x": (1.0 + RNG.permutation(512).reshape(1, 512) * 1e-5).astype(np.float32)},
    ),
    "quantized": Case(
        """g (float[64] x) => (float[64] y) <float s = {2e-8}, int8 z = {0}, float k = {1e3}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = Mul(d, k) y = Mul(e, k)
        }""",
        {"x": span(-2e-6, 2e-6, 64)},
    ),
}

NO_REPAIR = {
    "float64_differences": "no type of TensorRT's is enough: test_float64.py has models",
    "cast_pairs": "the model's own arithmetic: fix keeps it, bit by bit",
    "known_defects": "about TensorRT's code: each row of the table names its workaround",
    "refused_operators": "about the target's parser: test_quirks.py has the types of each release",
    "norm_operators": "silent without answers of `rewriter probe`: test_probe.py has the plan after one",
    "unmeasured": "about missing samples: what was not seen stays in FP32, and nothing can be compared",
}
"""Rules that no rewriting can answer, and why."""


def test_no_rule_is_forgotten() -> None:
    repaired = {case.partition(":")[0] for case in CASES}
    assert repaired | NO_REPAIR.keys() == RULES.keys(), (
        "each rule has a model in CASES or a reason in NO_REPAIR"
    )
    assert not repaired & NO_REPAIR.keys()


def found(rule: str, source: Model, feeds: Mapping[str, Array]) -> set[str]:
    """Operators that the rule names in any graph of the model, with ranges measured on the data."""
    measured = measure(source, [feeds])
    settings = PrecisionRequest("fp16")
    named: set[str] = set()
    made: dict[int, GraphAnalysis] = {}
    for scope, graph in enumerate(open_graphs(source)):
        parent = made.get(id(graph.parent))
        made[id(graph)] = analysis = GraphAnalysis(
            graph, source.opsets, settings.low, scope, measured, settings, False, parent
        )
        named |= {hazard.node.op_type for hazard in RULES[rule.partition(":")[0]](analysis)}
    return named


def error(expected: Mapping[str, Array], model: Model, feeds: Mapping[str, Array]) -> float:
    """Of a model in mixed precision, emulated with FP16 accumulators; infinite if it is not finite."""
    (actual,) = run_all(emulation(model, "fp16"), [feeds])
    return max(c.relative_l2 if c.finite else np.inf for c, _ in compare(expected, actual, REPAIRED))


def error_in_fp16(expected: Mapping[str, Array], source: Model, feeds: Mapping[str, Array]) -> float:
    """With every node in FP16; infinite if a constant does not fit."""
    try:
        return error(expected, retype(source, request(source, Plan("fp16"), "")), feeds)
    except PassError:
        return np.inf


@pytest.mark.parametrize("rule", CASES)
def test_found_and_repaired(rule: str) -> None:
    case = CASES[rule]
    source = graphs.graph(case.text, opset=case.opset, ir=10 if case.opset > 17 else 8)
    (expected,) = run_all(reference(source), [case.feeds])
    assert found(rule, source, case.feeds), "the rule says nothing"
    naive = error_in_fp16(expected, source, case.feeds)
    assert (naive > REPAIRED) == case.wrong, f"everything in FP16 gives {naive:.2g}"
    result = rewriter.fix(
        source.whole(), inputs=case.feeds, accumulation="fp16", build=False, opset=case.opset
    )
    assert result.verdict is not None and result.verdict.passed, result.verdict
    repaired = error(expected, result.model, case.feeds)
    assert repaired <= REPAIRED, f"{repaired:.2g}, kept {result.plan}"


# -- masks: the data has no padding, and then a row is masked whole --------------------------------
MASKED = "g (float[2,4,4] s, TYPE[2,1,4] m) => (float[2,4,4] y) <VALUES> { BODY y = Softmax<axis = -1>(a) }"
CHOSEN = MASKED.replace("TYPE", "bool").replace("BODY", "b = Where(m, zero, c)\n a = Add(s, b)")
FILLED = MASKED.replace("TYPE", "bool").replace("BODY", "a = Where(m, s, c)")
TIMES = MASKED.replace("TYPE", "float").replace("BODY", "i = Sub(one, m)\n b = Mul(i, c)\n a = Add(s, b)")
TWICE = MASKED.replace("TYPE", "bool").replace(
    "BODY", "b = Where(m, zero, c)\n t = Add(s, b)\n d = Where(m, zero, c)\n a = Add(t, d)"
)


@pytest.mark.parametrize("value", some("-1e9", "-3.4028235e38", "-65504.0", "-1e4"))
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(CHOSEN, id="added, selected"),
        pytest.param(FILLED, id="filled in"),
        pytest.param(TIMES, id="added, multiplied"),
        pytest.param(TWICE, id="added twice"),
    ],
)
def test_a_row_masked_whole_is_finite_though_no_data_had_padding(text: str, value: str) -> None:
    values = f"float c = {{{value}}}, float zero = {{0.0}}, float one = {{1.0}}"
    source = graphs.graph(text.replace("VALUES", values))
    kind = np.float32 if "float[2,1,4] m" in text else np.bool_
    scores = normal(2, 2, 4, 4)
    feeds = {"s": scores, "m": np.ones((2, 1, 4), kind)}
    result = rewriter.fix(source.whole(), inputs=feeds, accumulation="fp16", build=False)
    assert result.verdict is not None and result.verdict.passed
    for open_entries in (0, 1, 3):
        mask: Array = (np.arange(8).reshape(2, 1, 4) % 4 < open_entries).astype(kind)
        fed = {"s": scores, "m": mask}
        (actual,) = run_all(emulation(result.model, "fp16"), [fed])
        assert np.isfinite(actual["y"]).all()
        if open_entries:
            (expected,) = run_all(source, [fed])
            assert np.abs(actual["y"] - expected["y"]).max() < 2e-3


def test_bert_with_a_row_masked_whole_is_finite_though_no_data_had_padding() -> None:
    path = MODELS / "bert"
    with np.load(path.with_suffix(".npz")) as archive:
        feeds = {k: np.ones_like(v) if "mask" in k else v for k, v in archive.items()}
    result = rewriter.fix(path.with_suffix(".onnx"), inputs=feeds, build=False)
    blank = {k: np.zeros_like(v) if "mask" in k else v for k, v in feeds.items()}
    (actual,) = run_all(emulation(result.model), [blank])
    assert all(np.isfinite(array).all() for array in actual.values())


# -- the same again ----------------------------------------------------------------------------------
