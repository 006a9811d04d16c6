"""From hazards to a plan: precedence, Q/DQ, scopes, and islands that grow together."""

import math
from dataclasses import replace

import graphs
import numpy as np
import pytest
from plans import kept, planned
from tables import values

from rewriter.base.text import figure
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.free_fp32 import FREE, PROBE, SOFTMAX_PROBE, refusals
from rewriter.hazards.planning.planner import extend_plan, make_plan, unscaled_overflows
from rewriter.ir.model import walk_graphs
from rewriter.ir.plan import SEARCHED, Epilogues, NodePatterns, Plan, Range, node_key
from rewriter.runtime.ranges import measure
from rewriter.target import Target

CONVERTED = """
    g (float16[1,2,4,4] x) => (float16[1,2,8,8] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> {
        a = Relu(x) f = Cast<to = 1>(a) b = Exp(f) r = Resize(b, , s) h = Cast<to = 10>(r)
        y = Neg(h) }"""
"""As onnxconverter_common writes it: it cannot convert Resize, and keeps what the user blocks."""

CHAIN = """
    g (float[2] x) => (float[2] y) {
        a = MatMul(x, x) b = Exp(a) c = Neg(b) d = Abs(c) y = MatMul(d, d) }"""


@values
def test_an_island_of_the_file_stays_where_a_hazard_is(largest: float, expected: dict[str, str]) -> None:
    ranges = {(0, "b"): Range(0, largest, 1, True)}
    assert kept(planned(graphs.graph(CONVERTED), ranges=ranges)) == expected


NORM = """
    g (float[2,8] x) => (float[2,8] y) <float two = {2.0}, float e = {0.00001}> {
        h = Exp(x) s = Pow(h, two) m = ReduceMean<axes = [1]>(s) a = Add(m, e) r = Sqrt(a)
        n = Div(h, r) y = Neg(n) }"""


@values
def test_squares_of_real_data_decide_about_a_norm(real: bool, largest: float, expected: set[str]) -> None:
    source = graphs.graph(NORM)
    ranges = {(0, name): Range(0.5, 9.0, 3.0, True) for name in "xhmarny"} | {
        (0, "s"): Range(0.0, largest, 3.0, True)
    }
    plan = make_plan(source, ranges, PrecisionRequest(), real=real)
    assert {name for name, rule in kept(plan).items() if rule == "unfused-norm"} == expected
    assert plan.norms_in_range == ({"m"} if "m" not in expected else frozenset())


def test_a_branch_reads_ranges_of_the_graph_around_it() -> None:
    source = graphs.graph("""
        g (bool c, float[2] x) => (float[2] y) {
            a = Exp(x)
            y = If <then_branch = t () => (float[2] p) { p = Neg(a) },
                    else_branch = e () => (float[2] q) { q = Abs(a) }> (c)
        }""")
    plan = planned(source, ranges={(0, "a"): Range(0, 1e5, 10, True)})
    assert {d.key for d in plan.decisions if d.rule == "overflow"} == {"0:a", "1:p", "2:q"}


def test_fp32_is_no_plan() -> None:
    assert planned(graphs.graph(CHAIN), PrecisionRequest("fp32", keep_ops=("Exp",))) == Plan("fp32")


def test_a_decision_tells_node_rule_and_evidence() -> None:
    plan = planned(graphs.graph(CHAIN), ranges={(0, "d"): Range(0, 1e5, 10, True)})
    decision = next(d for d in plan.decisions if d.key == "0:d")
    assert (decision.op, decision.rule, decision.tensor) == ("Abs", "overflow", "d")
    assert decision.range == Range(0, 1e5, 10, True)
    assert decision.reason == "d exceeds 65504"
    assert (plan.precision, plan.float_nodes) == ("fp16", 5)
    assert planned(graphs.graph(CONVERTED)).float_nodes == 4, "a Cast between floats is no node of the plan"


ENDS = "g (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(a) y = Abs(b) }"


def test_the_users_word_comes_first() -> None:
    ranges = {(0, "d"): Range(0, 1e5, 10, True)}
    plan = planned(graphs.graph(CHAIN), PrecisionRequest(keep_ops=("Abs",)), ranges)
    assert kept(plan) == {"d": "user", "y": "overflow"}


def test_what_lay_between_islands_goes_with_one_of_them() -> None:
    source = graphs.graph(CHAIN)
    both = planned(source, PrecisionRequest(keep_nodes=("b", "d")))
    left = extend_plan(source, both, {}, frozenset({"0:b"}))
    assert kept(left) == {"d": "user"}
    again = extend_plan(source, left, {"0:b": "it is wrong"})
    assert kept(again) == {"b": SEARCHED, "c": "between-islands", "d": "user"}


@pytest.mark.parametrize(
    ("opset", "scale", "wanted", "expected"),
    [
        pytest.param(17, "0.1", PrecisionRequest(), "a q d t y", id="FP32 operators below opset 19"),
        pytest.param(19, "0.1", PrecisionRequest(), "", id="FP16 from opset 19 on"),
        pytest.param(19, "1e-5", PrecisionRequest(), "a q d t y", id="a scale that FP16 would flush"),
        pytest.param(19, "0.1", PrecisionRequest(keep_ops=("Abs",)), "d t y", id="what reads DQ by a view"),
        pytest.param(19, "0.1", PrecisionRequest(keep_ops=("Relu",)), "a q", id="what Q reads"),
    ],
)
def test_q_dq_have_one_type(opset: int, scale: str, wanted: PrecisionRequest, expected: str) -> None:
    source = graphs.graph(
        f"""g (float[2,2] x, float[2,2] w) => (float[2,2] y)
        <float s = {{{scale}}}, int8 z = {{0}}, int64[2] shape = {{2, 2}}> {{
            m = MatMul(x, w) a = Relu(m) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z)
            t = Reshape(d, shape) y = Abs(t) }}""",
        opset=opset,
        ir=9 if opset > 17 else 8,
    )
    names = kept(planned(source, wanted)).keys()
    assert names == set(expected.split())


def test_scopes_have_decisions_of_their_own() -> None:
    source = graphs.graph("""
        g (float[2] x, bool c) => (float[2] y) {
            y = If(c) <
                then_branch = t () => (float[2] p) { h = Exp(x)\n p = Neg(h) },
                else_branch = e () => (float[2] p) { h = Exp(x)\n p = Neg(h) }
            >
        }""")
    plan = planned(source, ranges={(2, "h"): Range(0, 1e5, 10, True)})
    assert plan.fp32 == {"2:h", "2:p"}


def test_missing_ranges_count_as_unmeasured() -> None:
    source = graphs.graph(ENDS)
    plan = make_plan(source, {}, PrecisionRequest())
    assert kept(plan) == dict.fromkeys("aby", "unmeasured")


def test_a_key_survives_a_change_of_types() -> None:
    source = graphs.graph(ENDS)
    nodes = [n for g in walk_graphs(source.proto.graph) for n in g.node]
    before = [node_key(0, n) for n in nodes]
    nodes[-1].output[0] = "y/fp16"
    assert [node_key(0, n) for n in nodes] == before == ["0:a", "0:b", "0:y"]


PLAN = Plan("fp16", exponents=((0, "m", -2),))


@pytest.mark.parametrize(
    ("plan", "after", "before"),
    [
        pytest.param(PLAN, 8189.0, 32756.0, id="four times 8189 is beyond the head-room"),
        pytest.param(PLAN, 8188.0, None, id="four times 8188 is just in range"),
        pytest.param(replace(PLAN, precision="bf16"), 8189.0, None, id="BF16 reaches farther"),
        pytest.param(replace(PLAN, precision="fp32"), 8189.0, None, id="FP32 rescales nothing"),
        pytest.param(replace(PLAN, exponents=((0, "m", 2),)), 32752.0, None, id="it was raised"),
        pytest.param(replace(PLAN, exponents=((1, "m", -2),)), 8189.0, None, id="of another graph"),
    ],
)
def test_the_range_before_rescaling_shows_an_overflow(plan: Plan, after: float, before: float | None) -> None:
    ranges = {(0, "m"): Range(-after, after, after / 2, True)}
    overflows = {place: one.absmax for place, one in unscaled_overflows(plan, ranges).items()}
    assert overflows == ({(0, "m"): before} if before else {})


@pytest.mark.parametrize(
    ("values", "headroom"),
    [
        pytest.param((5000.0, 20000.0), 17.02, id="two samples differ"),
        pytest.param((20000.0, 12000.0, 9000.0), 2.914, id="three by less"),
        pytest.param((20000.0, *(9000.0,) * 19), 2.0, id="many show what there is"),
        pytest.param((20000.0, 19000.0), 2.0, id="they agree"),
        pytest.param((20000.0, 2.0), 128.0, id="never more than 128"),
        pytest.param((20000.0, 0.0), 4.126, id="nothing in one: what follows differs"),
        pytest.param((20000.0,), 2.0, id="there is one"),
    ],
)
def test_what_samples_differ_by_is_kept_free(values: tuple[float, ...], headroom: float) -> None:
    source = graphs.graph("g (float[2] x) => (float[2] y) { a = Abs(x) y = Sigmoid(a) }")
    ranges = measure(source, [{"x": np.full(2, -value, np.float32)} for value in values])
    assert ranges[0, "a"].headroom == pytest.approx(headroom, rel=1e-3)
    plan = make_plan(source, ranges, PrecisionRequest())
    factor = f"x comes within a factor of {figure(headroom)} of 65504"
    assert [d.reason for d in plan.decisions if d.op == "Abs"] == [factor] * (20000 * headroom > 65504)


def test_a_tensor_that_is_zero_in_one_sample_and_infinite_in_another_does_not_count() -> None:
    source = graphs.graph("g (float[1] x) => (float[1] y) { y = Abs(x) }")
    ranges = measure(source, [{"x": np.array([value], np.float32)} for value in (0.0, math.inf, 1.0)])
    assert ranges[0, "y"].headroom == 2.0


@pytest.mark.parametrize(("text", "words", "expected"), graphs.cases("planning/islands.txt"))
def test_islands_grow_together(text: str, words: str, expected: str) -> None:
    options = dict(word.split("=") for word in words.split())
    nodes, ops, lower = (
        tuple(filter(None, options.pop(key, "").split(","))) for key in ("nodes", "ops", "lower")
    )
    wanted = PrecisionRequest(keep_nodes=nodes, keep_ops=ops, lower=NodePatterns(nodes=lower), **options)  # type: ignore[arg-type]
    plan = kept(planned(graphs.graph(text), wanted))
    assert ", ".join(f"{rule} {name}" for name, rule in plan.items()) == expected


WISH = PrecisionRequest(epilogues="all")

HEAD = """
    g (float[2,4] x, float[2,4] r, float[4,4] v) => (float[2,4] y)
    <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4] b = {1,2,3,4}> {
"""
BIAS = f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, v) }}"
NORMED = f"""{HEAD} m = MatMul(x, w)
    a = Add(m, r)
    u = Unsqueeze(a, first)
    n = LayerNormalization(u, b)
    l = Squeeze(n, first)
    y = MatMul(l, v) }}""".replace("> {", ", int64[1] first = {0}> {")


def epilogues(text: str, wanted: PrecisionRequest = WISH) -> str:
    """First outputs of the nodes that the rule keeps."""
    return " ".join(
        name for name, rule in kept(planned(graphs.graph(text), wanted)).items() if rule == "epilogue"
    )


@pytest.mark.parametrize(("text", "option", "expected"), graphs.cases("planning/free_fp32.txt"))
def test_what_is_free_in_a_graph(text: str, option: Epilogues, expected: str) -> None:
    found = kept(planned(graphs.graph(text), replace(WISH, epilogues=option)))
    assert ", ".join(f"{rule} {name}" for name, rule in found.items()) == expected


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(PrecisionRequest(), id="nobody asked"),
        pytest.param(replace(WISH, precision="bf16"), id="BF16 sums in FP32 anyway"),
        pytest.param(replace(WISH, target=Target(answers={PROBE: "fp16"})), id="the GPU says no"),
    ],
)
def test_requests_without_epilogues_and_fp32_norms(wanted: PrecisionRequest) -> None:
    assert epilogues(BIAS, wanted) == ""
    assert epilogues(BIAS, replace(wanted, precision="fp16", epilogues="all", target=Target())) == "a"
    assert "norm" not in kept(planned(graphs.graph(NORMED), wanted)).values()


def test_a_product_in_fp32_has_no_epilogue() -> None:
    assert epilogues(BIAS, replace(WISH, keep_nodes=("m",))) == ""


def test_the_evidence_is_the_product() -> None:
    (decision,) = planned(graphs.graph(BIAS), WISH).decisions
    assert (decision.rule, decision.tensor) == ("epilogue", "m")


@values
def test_a_product_has_an_own_epilogue_up_to_a_size(rows: int, nodes: str, expected: str) -> None:
    text = f"g (float[N,768] x) => (float[N,768] y) {{ {nodes} }}"
    shapes = {"w": (768, 3072), "b": (3072,), "v": (3072, 768)}
    sample = {"x": np.broadcast_to(np.float32(), (rows, 768))}
    found = planned(graphs.weighted(text, **shapes), PrecisionRequest(epilogues="own", sample=sample))
    assert " ".join(kept(found)) == expected


@values
def test_a_large_result_that_a_view_and_a_transpose_move_stays_fp16(rows: int, expected: str) -> None:
    text = """
        g (float[N,768] x) => (float[12,N,192] y) <int64[3] heads = {-1, 12, 192}> {
            m = MatMul(x, w) a = Add(m, b) h = Reshape(a, heads) t = Transpose<perm = [1, 0, 2]>(h)
            y = MatMul(t, v) }"""
    sample = {"x": np.broadcast_to(np.float32(), (rows, 768))}
    source = graphs.weighted(text, w=(768, 2304), b=(2304,), v=(192, 192))
    assert " ".join(kept(planned(source, PrecisionRequest(epilogues="own", sample=sample)))) == expected


SCALED = """
    g (float[1,2,4,4] x, float[1,1,4,4] mask) => (float[1,2,4,4] y)
    <float s = {0.5}, float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        q = Neg(x) k = Transpose<perm = [0,1,3,2]>(q) m = MatMul(q, k) t = Mul(m, s)
        p = Softmax<axis = -1>(t) o = MatMul(p, q) l = MatMul(o, w) y = Add(l, x) }"""


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param({}, {"softmax", "epilogue"}, id="not asked"),
        pytest.param({SOFTMAX_PROBE: "softmax", PROBE: "fp32"}, {"softmax", "epilogue"}, id="yes"),
        pytest.param({SOFTMAX_PROBE: "none"}, {"epilogue"}, id="no FP32 in attention"),
        pytest.param({PROBE: "fp16"}, {"softmax"}, id="no FP32 sums"),
    ],
)
def test_answers_of_probes_switch_rules_off(answers: dict[str, str], expected: set[str]) -> None:
    target = Target(answers=answers)
    found = planned(graphs.graph(SCALED), replace(WISH, target=target))
    assert {d.rule for d in found.decisions} & FREE == expected
    assert len(list(refusals(target))) == len({"softmax", "epilogue"} - expected)
