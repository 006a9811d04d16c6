"""The first diverging tensor and the error that each node adds, checked against numpy and whole runs."""

import math
from dataclasses import replace

import graphs
import numpy as np
import pytest
from tables import values

import rewriter
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Decision, InputsOutputs, Plan
from rewriter.passes.base import Context
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.mixed_precision import lowered as all_lowered
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.emulation.divergence import NodeError, contributions, diverge
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.verification.expected import run_all


def lowered(source: Model, *fp32: str, io: InputsOutputs = "keep") -> Model:
    """In FP16, but for the nodes of the main graph with these outputs."""
    decisions = tuple(Decision(name, "", f"0:{name}", "user", "") for name in fp32)
    return graphs.apply(MixedPrecision(), source, Context(plan=Plan("fp16", io, decisions)))[0]


def diverged(source: Model, *fp32: str, accumulation: Accumulation = "fp32") -> tuple[NodeError, ...]:
    return diverge(source, lowered(source, *fp32), [graphs.random_feeds(source)], accumulation)


def rows(found: tuple[NodeError, ...]) -> dict[tuple[str, str], NodeError]:
    return {(n.tensor, n.op): n for n in found}


def half(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float32)


CHAIN = """
    g (float[64] x) => (float[64] y) <float k = {3.1}> {
        [scale] a = Mul(x, k) [turn] b = Neg(a) [bend] y = Tanh(b) }"""


@pytest.mark.parametrize("opset", [9, 10, 17])
def test_every_nodes_own_error_is_that_of_its_arithmetic_on_exact_inputs(opset: int) -> None:
    source = graphs.graph(CHAIN, opset=opset)
    x = graphs.random_feeds(source)["x"]
    found = rows(diverged(source))
    exact = x * np.float32(3.1)
    assert found["x", "Input"].added == pytest.approx(relative_l2(x, half(x)), rel=1e-4)
    own = relative_l2(exact, half(x * np.float32(np.float16(3.1))))
    assert found["a", "Mul"].added == pytest.approx(own, rel=1e-4)
    assert found["b", "Neg"].added == 0.0, "a value that is only moved is not rounded again"
    bent = np.tanh(-exact)
    assert found["y", "Tanh"].added == pytest.approx(relative_l2(bent, half(bent)), rel=1e-3)


def test_an_island_adds_nothing_and_its_border_is_reported() -> None:
    found = rows(diverged(graphs.graph(CHAIN), "a"))
    assert found["a", "Mul"].added == found["a", "Mul"].total == 0.0
    assert found["a", "Cast"].added > 1e-4
    assert ("x", "Input") not in found


def test_a_tensor_that_another_rank_replaces_is_no_counterpart() -> None:
    text = "g (float[4,8] x) => (float[1,8] y) <int64[1] first = {0}> {"
    source = graphs.graph(
        f"{text} m = ReduceMax<axes = [0], keepdims = 0>(x) u = Unsqueeze(m, first) y = Tanh(u) }}"
    )
    merged = graphs.graph(f"{text} m = ReduceMax<axes = [0], keepdims = 1>(x) y = Tanh(m) }}")
    found = rows(diverge(source, lowered(merged), [graphs.random_feeds(source)], "fp32"))
    assert ("m", "ReduceMax") not in found and found["y", "Tanh"].total < 1e-3


NORM = """
    g (float[2,8] x) => (float[2,8] y) <float k = {300.0}, int64[1] last = {1}> {
        s = Mul(x, k) q = Mul(s, s) m = ReduceMean<axes = [1]>(q) d = Sqrt(m) y = Div(s, d) }"""


def test_the_first_tensor_that_diverges_is_named() -> None:
    found = diverged(graphs.graph(NORM))
    first = next(node for node in found if not node.total <= 1e-2)
    assert (first.tensor, first.op, first.total, first.added) == ("q", "Mul", math.inf, math.inf)
    assert rows(found)["d", "Sqrt"].added < 1e-3, "on exact inputs it is in order"
    assert found[-1].total == pytest.approx(1.0, abs=0.2), "some rows are x / inf = 0"
    assert all(node.total <= 1e-2 for node in diverged(graphs.graph(NORM), "q", "m", "d"))


@pytest.mark.parametrize(("accumulation", "least", "most"), [("fp32", 1e-4, 5e-4), ("fp16", 1.5e-3, 3e-3)])
def test_accumulators_count_as_the_nodes_own(accumulation: Accumulation, least: float, most: float) -> None:
    source = graphs.graph("""
        g (float[8,3072] x, float[3072,8] w) => (float[8,8] y) { m = MatMul(x, w)\n y = Relu(m) }""")
    found = rows(diverged(source, accumulation=accumulation))
    assert least < found["m", "MatMul"].added < most


def test_equal_infinities_are_no_error() -> None:
    source = graphs.graph("""
        g (float[4] x) => (float[4] y) <float k = {-1e9}, float one = {1.0}> {
            h = Abs(x) l = Log(h) e = Exp(l) y = Add(e, one) }""")
    feeds = {"x": np.asarray([0.0, 1.0, 2.0, 0.5], np.float32)}
    found = diverge(source, lowered(source), [feeds])
    assert all(math.isfinite(n.total) for n in found)


BRANCHES = """
    g (float[8] x, bool c) => (float[8] y) <float k = {3.1}> {
        a = Mul(x, k)
        b = If(c) <
            then_branch = t () => (float[8] p) { h = Sin(a)\n p = Add(h, k) },
            else_branch = e () => (float[8] p) { p = Identity(a) }
        >
        y = Neg(b)
    }"""


@pytest.mark.parametrize("condition", [True, False])
def test_a_node_with_subgraphs_is_one_node(condition: bool) -> None:
    source = graphs.graph(BRANCHES)
    feeds: dict[str, Array] = {"x": graphs.random_feeds(source)["x"], "c": np.asarray(condition)}
    fixed = lowered(source)
    found = diverge(source, fixed, [feeds], "fp32")
    (exact,) = run_all(reference(source), [feeds])
    (rounded,) = run_all(emulation(fixed), [feeds])
    assert found[-1].total == pytest.approx(relative_l2(exact["y"], rounded["y"]), rel=1e-4)
    assert (rows(found)["b", "If"].added > 0.0) is condition


@pytest.mark.parametrize("io", ["keep", "fp32", "fp16"])
def test_any_type_of_inputs_and_outputs(io: InputsOutputs) -> None:
    source = graphs.graph(CHAIN)
    found = diverge(source, lowered(source, io=io), [graphs.random_feeds(source)], "fp32")
    assert 1e-5 < rows(found)["y", "Tanh"].total < 1e-3
    assert found[0].added > 0.0, "the input's rounding, or its Cast"


def test_an_fp16_input_has_no_error() -> None:
    source = graphs.graph("g (float16[64] x) => (float[64] y) { a = Cast<to = 1>(x) y = Tanh(a) }")
    assert [(row.tensor, row.total > 0) for row in diverged(source)] == [("x/fp32", False), ("y", True)]


def test_samples_count_together() -> None:
    source = graphs.graph(CHAIN)
    feeds = [graphs.random_feeds(source, seed, 10.0**seed) for seed in range(3)]
    together = rows(diverge(source, lowered(source), feeds, "fp32"))["a", "Mul"].added
    x = np.concatenate([f["x"] for f in feeds])
    own = relative_l2(x * np.float32(3.1), half(x * np.float32(np.float16(3.1))))
    assert together == pytest.approx(own, rel=1e-4)


def test_a_failed_emulation_says_where_it_went_wrong() -> None:
    source = graphs.graph(NORM)
    feeds = graphs.random_feeds(source)
    bare = Plan("fp16")
    result = rewriter.fix(source.whole(), inputs=feeds, plan=bare, build=False, skip=("simplify",))
    check = next(c for c in result.checks if c.name == "emulation")
    assert check.passed is False
    assert check.details[0] == "first beyond 0.005: q of Mul(q) (Mul), inf"
    assert check.details[1].startswith("adds inf: q of")


def test_deliberate_rounding_is_compared_with_the_same_rounding() -> None:
    """The rounded tensor is FP16 in the original and FP32 in the emulation, and a Where takes one type."""
    source = graphs.graph(
        """
        g (float[2,32] x) => (float[2,32] y) <bool[2,1] c = {0, 1}> {
            a = Exp(x) h = Cast<to = 10>(a) r = Cast<to = 1>(h) d = Sub(a, r) y = Where(c, d, r)
        }"""
    )
    found = rows(diverged(source, "a", "d", "y"))
    assert found["y", "Where"].total == 0.0 and found["d", "Sub"].total == 0.0


WEIGHTED = """
    g (float[4,64] x) => (float[4,64] y) {
        [product] a = MatMul(x, w) [bend] b = Tanh(a) [again] y = MatMul(b, w) }"""


def test_large_weights_are_widened_in_the_graph_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    source = graphs.weighted(WEIGHTED, w=(64, 64))
    low, feeds = lowered(source), graphs.random_feeds(source)
    copied, before = emulation(low, tf32=True), diverged(source)
    monkeypatch.setattr("rewriter.runtime.emulation.LARGE_WEIGHTS", 0)
    monkeypatch.setattr("rewriter.runtime.emulation.CAST_BYTES", 0)
    shared = emulation(low, tf32=True)
    assert copied.weights["w"].dtype == np.float32
    assert shared.weights["w"] is low.weights["w"]
    (one,), (other,) = run_all(copied, [feeds]), run_all(shared, [feeds])
    np.testing.assert_array_equal(one["y"], other["y"])
    assert diverged(source) == before


@pytest.mark.parametrize("backwards", [False, True])
def test_the_outputs_of_the_emulated_model_come_with_its_errors(backwards: bool) -> None:
    """To the bit as by itself: a search need not emulate the rules' plan again."""
    source = graphs.graph("""
        g (float[8,64] x, float[64,8] w) => (float[8,8] y, int64[2] s) {
            m = MatMul(x, w) y = Relu(m) s = Shape(y) }""")
    fixed, feeds, results = lowered(source), graphs.random_feeds(source), list[dict[str, Array]]()
    diverge(source, fixed, [feeds], backwards=backwards, results=results)
    (expected,) = run_all(emulation(fixed, "fp16", tf32=True, backwards=backwards), [feeds])
    assert results[0].keys() == {"y", "s"}
    for name, array in expected.items():
        np.testing.assert_array_equal(results[0][name], array)


def measured(source: Model, feeds: dict[str, Array]) -> tuple[dict[str, float], dict[str, float]]:
    """The error that each node adds by itself in FP16, and the shares of all nodes."""
    rows = diverge(source, all_lowered(source, Plan("fp16")), [feeds])
    errors = {row.key: row.added for row in rows if row.added}
    return errors, contributions(source, rows, errors)


def whole_error(source: Model, feeds: dict[str, Array], *exact_nodes: str) -> float:
    """The error of the first output in FP16 where some nodes are not rounded."""
    decisions = tuple(Decision(name, "", f"0:{name}", "user", "") for name in exact_nodes)
    low = emulation(all_lowered(source, Plan("fp16", "keep", decisions)))
    ((name, exact),) = run_all(source, [feeds])[0].items()
    return relative_l2(exact, run_all(low, [feeds])[0][name])


def test_what_is_amplified_has_the_share_that_a_whole_emulation_shows() -> None:
    """Every node adds as much error; that of the first is 100 times larger after a difference."""
    rest = " ".join(f"t{n} = Mul(t{n - 1}, k)" for n in range(1, 22))
    source = graphs.graph(f"""
        g (float[256] x) => (float[256] t21) <float k = {{1.01}}> {{a = Mul(x, k) t0 = Sub(a, x) {rest}}}""")
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)  # its own rounding is no node's
    errors, shares = measured(source, feeds)
    assert max(errors.values()) < 2.0 * min(errors.values())
    assert shares["0:a"] > 50.0 * max(share for key, share in shares.items() if key != "0:a")
    assert math.sqrt(sum(shares.values())) == pytest.approx(whole_error(source, feeds), rel=0.1)


SMALL_BRANCH = """
    g (float[64,64] x) => (float[64,64] y) <float small = {{0.0625}}> {{
        a = Sin(x) b = Cos(x) c = Mul(b, small)
        y = {op}(a, c) }}"""


@values
def test_a_small_branch_counts_by_what_it_adds(op: str, least: float, most: float) -> None:
    source = graphs.graph(SMALL_BRANCH.format(op=op))
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)
    _, shares = measured(source, feeds)
    ratio = (shares["0:b"] + shares["0:c"]) / shares["0:a"]
    assert least <= ratio <= most


def test_a_share_is_what_the_node_in_fp32_takes_from_the_squared_error() -> None:
    """Two blocks with a residual connection, of which the second amplifies by 3."""
    source = graphs.graph("""
        g (float[64,64] x) => (float[64,64] y) <float three = {3.0}, float half = {0.5}> {
            a = Sin(x) b = Mul(a, half) c = Add(x, b) d = Sin(c) e = Mul(d, three) y = Add(c, e)
        }""")
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)
    _, shares = measured(source, feeds)
    assert math.sqrt(sum(shares.values())) == pytest.approx(whole_error(source, feeds), rel=0.1)
    without = whole_error(source, feeds) ** 2 - whole_error(source, feeds, "d", "e", "y") ** 2
    assert shares["0:d"] + shares["0:e"] + shares["0:y"] == pytest.approx(without, rel=0.3)


def test_without_finite_outputs_the_nodes_own_errors_decide() -> None:
    source = graphs.graph("g (float[8] x) => (float[8] y) { a = Sin(x) b = Exp(a) y = Add(b, a) }")
    errors = {"0:a": 3e-4, "0:b": math.inf, "0:y": 2e-4}

    def rows(total: float) -> list[NodeError]:
        keys = {"a": "0:a", "b": "0:b", "y": "0:y"}
        return [NodeError(n, "", key, n, errors[key], total, 1.0) for n, key in keys.items()]

    own = {"0:a": pytest.approx(9e-8), "0:b": math.inf, "0:y": pytest.approx(4e-8)}
    assert contributions(source, rows(math.inf), errors) == own
    assert contributions(source, rows(0.0), errors) == own
    assert contributions(source, rows(1e-3), errors)["0:b"] == math.inf


def test_an_error_that_is_infinite_on_the_way_is_followed_to_where_it_began() -> None:
    """Exp overflows, and the quotient by it is 0 in both."""
    source = graphs.graph("""
        g (float[8] x) => (float[8] y) <float one = {1.0}> {
            a = Sin(x) b = Exp(a) c = Mul(b, b) d = Add(c, a) e = Div(one, d) y = Add(e, a)
        }""")
    totals = {"a": 2e-4, "b": 3e-4, "c": math.inf, "d": math.inf, "e": 1e-3, "y": 5e-4}
    rows = [NodeError(n, "", f"0:{n}", n, 2e-4, total, 0.0) for n, total in totals.items()]
    errors = {row.key: row.added for row in rows}
    shares = contributions(source, [replace(row, norm=1.0) for row in rows], errors)
    assert all(map(math.isfinite, shares.values()))
    assert sum(shares.values()) == pytest.approx(5e-4**2)
    assert shares["0:c"] == shares["0:d"] == 0.0 < min(shares["0:a"], shares["0:b"])
    assert all(map(math.isfinite, contributions(source, rows, errors).values())), "a tensor of zeros"
