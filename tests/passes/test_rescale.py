"""rescale: overflow goes into the weights as a power of two, and not one bit of an FP32 result changes."""

import cProfile
import re

import numpy as np
import onnx
import pytest
from graphs import apply, assert_bit_equal, cases, graph, matrix, model_of, random_feeds, run
from hypothesis import assume, event, given
from hypothesis import strategies as st
from nightly import small
from onnx import helper
from paths import MODELS

from rewriter.ir.model import Array, Model, load
from rewriter.ir.plan import Range
from rewriter.passes.algorithms.rescaling.exponents import RULES
from rewriter.passes.base import Context, Rescaled
from rewriter.passes.rescale import Rescale
from rewriter.pipeline.driver import PassResult
from rewriter.runtime.ranges import Ranges, measure

FP16_LARGEST = 65504.0
LIMIT = FP16_LARGEST / 2
Feeds = dict[str, Array]


def rescaled(source: Model, feeds: Feeds) -> tuple[Model, PassResult, Ranges]:
    """The model after the pass with ranges of `feeds`, and the ranges that hold then by calculation."""
    ranges = measure(source, [feeds])
    result, report = apply(Rescale(), source, Context(ranges=ranges))
    for scope, name, exponent in (e for c in report.changes if isinstance(c, Rescaled) for e in c.exponents):
        if (scope, name) in ranges:
            ranges[scope, name] = ranges[scope, name].scaled(exponent)
    return result, report, ranges


def constant(source: Model, node: str, index: int) -> Array:
    """The constant that an input of the node that writes `node` reads."""
    inner = source.proto.graph
    producer = next(n for n in inner.node if node in n.output)
    found = next(t for t in inner.initializer if t.name == producer.input[index])
    return np.asarray(source.array(found))


@pytest.mark.parametrize(("body", "tensor"), cases("passes/rescaled.txt"))
def test_overflowing_tensors_come_into_range(body: str, tensor: str) -> None:
    source = graph(
        f"""
        g (float[4,4] x) => (float[m,n] y)
        <{matrix("big", 1e5)}, {matrix("w", 0.001)}, float[4] row = {{1, 0.5, 2, -1}},
         float[4] bias = {{1000, 1, -3, 70000}}, float low = {{-30000}}, float high = {{300000}},
         float[1,4] low1 = {{1, 2, 3, 4}}, float step = {{2500}}, int8 zero = {{3}}> {{
            {body} }}"""
    )
    feeds = random_feeds(source)
    result, report, ranges = rescaled(source, feeds)
    assert measure(source, [feeds])[0, tensor].absmax > FP16_LARGEST
    assert ranges[0, tensor].absmax <= LIMIT
    assert not report.refusals
    assert [n.op_type for n in result.proto.graph.node] == [n.op_type for n in source.proto.graph.node]
    assert_bit_equal(source, result, feeds)
    measured = measure(result, [feeds])
    computed = {t for n in result.proto.graph.node if n.op_type != "Constant" for t in n.output}
    assert {t: measured.get((0, t)) for t in computed} == {t: ranges.get((0, t)) for t in computed}
    again, second = apply(Rescale(), result, Context(ranges=ranges))
    assert again is result
    assert not second.changes


def test_weights_that_fp16_would_round_away_are_raised() -> None:
    """The stream before them takes the factor back, and the report has their range before and after."""
    source = graph(
        f"""
        g (float[4,4] x) => (float[4,4] y) <{matrix("into", 1000.0)}, {matrix("out", 5e-6)}> {{
            a = MatMul(x, into) b = Relu(a) y = MatMul(b, out) }}"""
    )
    feeds = random_feeds(source)
    result, report, _ = rescaled(source, feeds)
    assert _fp16_error(constant(source, "y", 1)) > 1e-3
    assert _fp16_error(constant(result, "y", 1)) < 3e-4
    assert "out [" in report.changes[0].what
    assert_bit_equal(source, result, feeds)
    again, _, _ = rescaled(result, feeds)
    assert again is result


def _fp16_error(weights: Array) -> float:
    return float(np.linalg.norm(weights - weights.astype(np.float16)) / np.linalg.norm(weights))


def test_a_tensor_deep_among_the_subnormal_numbers_is_raised() -> None:
    source = graph(
        f"""
        g (float[4,4] x) => (float[4,4] y) <{matrix("into", 1e-6)}, {matrix("out", 1e4)}> {{
            a = MatMul(x, into) b = Relu(a) y = MatMul(b, out) }}"""
    )
    feeds = random_feeds(source)
    result, report, ranges = rescaled(source, feeds)
    assert report.changes
    assert ranges[0, "a"].mean_abs > 2**-14
    assert_bit_equal(source, result, feeds)


def test_the_mean_decides_who_gives_way() -> None:
    """a * b overflows; one of them has one huge value and is tiny else: the other has room to give."""
    source = graph(
        f"""
        g (float[4,4] x) => (float[4,4] y) <{matrix("left", 1.0)}, {matrix("right", 1.0)}> {{
            a = Mul(x, left) b = Mul(x, right) c = Mul(a, b) y = LpNormalization(c) }}"""
    )
    for one, other in (("a", "b"), ("b", "a")):
        ranges = Ranges(
            {
                (0, "x"): Range(-1, 1, 0.5, True),
                (0, one): Range(-1000, 1000, 2.0**-13, True),
                (0, other): Range(-1000, 1000, 1.0, True),
                (0, "c"): Range(-1e6, 1e6, 1.0, True),
            }
        )
        _, report = apply(Rescale(), source, Context(ranges=ranges))
        (change,) = report.changes
        assert isinstance(change, Rescaled)
        exponents = {t: k for _, t, k in change.exponents}
        assert exponents["c"] == -5
        assert exponents[other] <= -5
        assert exponents.get(one, 0) >= 0


def test_many_groups_of_one_exponent_are_one_line() -> None:
    body = "".join(f"a{i} = MatMul(x, big)  y{i} = LpNormalization(a{i})  " for i in range(5))
    outputs = ", ".join(f"float[4,4] y{i}" for i in range(5))
    source = graph(f"g (float[4,4] x) => ({outputs}) <{matrix('big', 1e5)}> {{ {body} }}")
    _, report, _ = rescaled(source, random_feeds(source))
    (change,) = report.changes
    assert "more like these" in change.what


@pytest.mark.parametrize(("body", "reason"), cases("passes/not_rescaled.txt"))
def test_tensors_that_cannot_be_scaled_are_reported(body: str, reason: str) -> None:
    source = graph(
        f"""
        g (float[4,4] x) => (float[4,4] y) <{matrix("big", 1e5)}, {matrix("w", 0.1)}> {{
            {body} }}"""
    )
    result, report, _ = rescaled(source, random_feeds(source))
    assert result is source
    assert reason in report.refusals[0].reason


RESIDUAL = f"""
    g (float[4,4] x) => (float[4,4] y)
    <{matrix("into", 3e4)}, {matrix("up", 2.0)}, {matrix("down", 3e4)}, {matrix("out", 1.0)},
     float[4] gain = {{1, 2, 0.5, 1.5}}, float two = {{2}}, float eps = {{0.000001}}> {{
        r0 = MatMul(x, into) m0 = ReduceMean<axes = [-1]>(r0) d0 = Sub(r0, m0) q0 = Pow(d0, two)
        v0 = ReduceMean<axes = [-1]>(q0) e0 = Add(v0, eps) s0 = Sqrt(e0) n0 = Div(d0, s0)
        g0 = Mul(n0, gain) u0 = MatMul(g0, up) h0 = Sigmoid(u0) b0 = MatMul(h0, down)
        r1 = Add(r0, b0) l1 = LayerNormalization<axis = -1, epsilon = 0.00001>(r1, gain)
        y = MatMul(l1, out) }}"""
"""A residual stream of 1e5 with a decomposed norm on it and a fused one."""


def test_a_residual_stream_is_scaled_with_the_epsilons_of_its_norms() -> None:
    source = graph(RESIDUAL)
    feeds = random_feeds(source)
    result, report, ranges = rescaled(source, feeds)
    exponents = {t: k for c in report.changes if isinstance(c, Rescaled) for _, t, k in c.exponents}
    k = exponents["r0"]
    assert k < 0
    assert {t: exponents[t] for t in ("r0", "m0", "d0", "s0", "b0", "r1")} == dict.fromkeys(
        ("r0", "m0", "d0", "s0", "b0", "r1"), k
    )
    assert {exponents[t] for t in ("q0", "v0", "e0")} == {2 * k}
    assert exponents.keys().isdisjoint({"n0", "g0", "u0", "h0", "l1", "y"})
    np.testing.assert_array_equal(constant(result, "r0", 1), constant(source, "r0", 1) * np.float32(2.0**k))
    np.testing.assert_array_equal(constant(result, "b0", 1), constant(source, "b0", 1) * np.float32(2.0**k))
    assert constant(result, "e0", 1) == constant(source, "e0", 1) * np.float32(4.0**k)
    epsilon = next(a.f for n in result.proto.graph.node for a in n.attribute if a.name == "epsilon")
    assert epsilon == np.float32(1e-5) * np.float32(4.0**k)
    assert all(ranges[0, t].absmax <= LIMIT for t in ("r0", "b0", "r1"))  # the norm computes in FP32
    assert_bit_equal(source, result, feeds)


def test_a_shared_weight_is_copied_for_those_who_want_another_scale() -> None:
    source = graph(
        f"""
        g (float[4,4] x) => (float[4,4] y, float[4,4] z) <{matrix("big", 1e5)}> {{
            a = MatMul(x, big) b = Sigmoid(x) y = LpNormalization(a) z = MatMul(b, big) }}"""
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)}
    result, _, _ = rescaled(source, feeds)
    assert np.abs(constant(result, "a", 1)).max() < np.abs(constant(source, "a", 1)).max()
    np.testing.assert_array_equal(constant(result, "z", 1), constant(source, "z", 1))
    assert_bit_equal(source, result, feeds)


def test_a_default_epsilon_is_written_down() -> None:
    source = graph(
        f"g (float[4,4] x) => (float[4,4] y) <{matrix('big', 1e5)}, float[4] s = {{1, 1, 1, 1}}> "
        "{ a = MatMul(x, big)  y = LayerNormalization(a, s) }"
    )
    result, report, _ = rescaled(source, random_feeds(source))
    (change,) = report.changes
    assert isinstance(change, Rescaled)
    ((_, _, k),) = change.exponents
    node = result.proto.graph.node[1]
    assert next(a.f for a in node.attribute if a.name == "epsilon") == np.float32(1e-5) * np.float32(4.0**k)


def test_the_inside_of_a_branch_is_scaled_between_its_borders() -> None:
    source = graph(
        f"""
        g (float[4,4] x, bool c) => (float[4,4] y) <{matrix("big", 1e5)}, {matrix("w", 1.0)}> {{
            y = If (c) <
                then_branch = t () => (float[4,4] u) {{ a = MatMul(x, big)  b = Relu(a)  u = MatMul(b, w) }},
                else_branch = e () => (float[4,4] v) {{ v = MatMul(x, w) }}
            >
        }}"""
    )
    feeds = random_feeds(source)
    result, report, ranges = rescaled(source, feeds)
    assert report.changes
    assert ranges[1, "b"].absmax <= LIMIT
    assert_bit_equal(source, result, feeds)


@pytest.mark.parametrize("name", small(path.stem for path in sorted(MODELS.glob("*.onnx"))))
def test_every_case_is_bit_equal_with_its_measured_ranges(name: str) -> None:
    source = load(path := MODELS / f"{name}.onnx")
    samples = path.with_suffix(".npz")
    feeds = dict(np.load(samples)) if samples.exists() else random_feeds(source)
    result, _, _ = rescaled(source, feeds)
    for wanted, found in zip(run(source, feeds), run(result, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)


# -- random graphs -----------------------------------------------------------------------------
UNARY = "Relu Neg Abs Transpose LeakyRelu Identity Sign Tanh".split()
BINARY = "Add Sub Max Min Mul MatMul Div".split()
CONSTANT = "Mul Add MatMul Div".split()
NORMS = "LayerNormalization LpNormalization square mean root".split()


@st.composite
def networks(draw: st.DrawFn) -> Model:
    """Branching graphs over [4,4] tensors that start beyond FP16, with constants from 0.01 to 1e5."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes: list[onnx.NodeProto] = []
    constants = dict[str, Array]()
    tensors = ["x"]
    grown = 0  # products of tensors: their exponents add up, and so do those of what is subnormal

    def weight(shape: tuple[int, ...], size: float) -> str:
        constants[f"c{len(constants)}"] = rng.standard_normal(shape) * size
        return f"c{len(constants) - 1}"

    nodes.append(helper.make_node("MatMul", ["x", weight((4, 4), 1e5)], ["t"]))
    tensors.append("t")
    for index in range(draw(st.integers(3, 9))):
        out = f"t{index}"
        source = draw(st.sampled_from(tensors[-3:]))
        kind = draw(st.sampled_from([*UNARY, *BINARY, *CONSTANT, *CONSTANT, *CONSTANT, *NORMS]))
        size = 10.0 ** draw(st.integers(-2, 5))
        grows = kind in {"square", "Mul", "MatMul", "Div"}
        if kind in CONSTANT and (draw(st.booleans()) or grown >= 2):
            nodes.append(helper.make_node(kind, [source, weight((4, 4), size)], [out]))
        elif kind in BINARY and not (grows and grown >= 2):
            nodes.append(helper.make_node(kind, [source, draw(st.sampled_from(tensors))], [out]))
            grown += grows
        elif kind in UNARY:
            nodes.append(helper.make_node(kind, [source], [out]))
        elif kind == "LayerNormalization":
            nodes.append(helper.make_node(kind, [source, weight((4,), 1.0), weight((4,), 1.0)], [out]))
        elif kind == "square" and grown < 2:
            nodes.append(helper.make_node("Mul", [source, source], [out]))
            grown += 1
        elif kind == "mean":
            nodes.append(helper.make_node("ReduceMean", [source], [f"{out}m"], axes=[-1]))
            nodes.append(helper.make_node("Sub", [source, f"{out}m"], [out]))
        elif kind == "root":
            nodes.append(helper.make_node("Abs", [source], [f"{out}a"]))
            nodes.append(helper.make_node("Sqrt", [f"{out}a"], [out]))
        else:
            nodes.append(helper.make_node("LpNormalization", [source], [out]))
        tensors.append(out)
    nodes.append(helper.make_node("LpNormalization", [tensors[-1]], ["z"]))
    nodes.append(helper.make_node("MatMul", ["z", weight((4, 4), 1.0)], ["y"]))
    return model_of(nodes, {"x": [4, 4]}, "y", constants)


@given(source=networks())
def test_random_graphs_are_bit_equal(source: Model) -> None:
    feeds = {"x": np.random.default_rng(0).integers(-8, 9, (4, 4)).astype(np.float32)}
    ranges = measure(source, [feeds])
    assume(all(r.absmax < 1e16 for r in ranges.values()))  # far within FP32, whatever the exponent
    result, report, after = rescaled(source, feeds)
    event("changed" if report.changes else "left alone")
    assert_bit_equal(source, result, feeds)
    overflows = {key for key, r in ranges.items() if r.absmax > LIMIT}
    assert {key for key, r in after.items() if r.absmax > LIMIT} <= overflows


OPERATOR = re.compile(r"`([A-Z][A-Za-z0-9]+)`")


def calls_for(blocks: int) -> int:
    """Calls of functions by the pass on a residual network that overflows in its stream and each block."""
    body = " ".join(
        f"n{i} = LayerNormalization(r{i}, gain) u{i} = MatMul(n{i}, big) a{i} = Relu(u{i})"
        f" p{i} = MatMul(n{i}, w) m{i} = Mul(a{i}, p{i}) d{i} = MatMul(m{i}, w)"
        f" h{i} = Tanh(p{i}) r{i + 1} = Add(r{i}, d{i})"
        for i in range(blocks)
    )
    weights = f"{matrix('big', 4e4)}, {matrix('w', 0.5)}, float[4] gain = {{1, 1, 1, 1}}"
    source = graph(
        f"g (float[4,4] x) => (float[4,4] y) <{weights}> "
        f"{{ r0 = MatMul(x, big) {body} y = LayerNormalization(r{blocks}, gain) }}"
    )
    feeds = random_feeds(source)
    ranges = measure(source, [feeds])
    with cProfile.Profile() as profile:
        result, report = apply(Rescale(), source, Context(ranges=ranges))
    assert report.changes
    assert_bit_equal(source, result, feeds)
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_grows_with_the_number_of_nodes_and_not_with_its_square() -> None:
    """Twice the nodes; with a square it would be up to four times the calls."""
    assert calls_for(300) < 2.2 * calls_for(150)


def test_the_documentation_has_every_rule() -> None:
    page = (MODELS.parent / "docs" / "rescaling.md").read_text(encoding="utf-8")
    table = page.split("## The rules")[1].split("\n## ")[0]
    named = {op for line in table.splitlines() if line.startswith("|") for op in OPERATOR.findall(line)}
    assert named >= RULES.keys()
    assert all(onnx.defs.has(op) for op in named)
