"""Ranges: the numbers are right, nothing is left out, nothing is kept in memory."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import graphs
import ml_dtypes
import numpy as np
import onnx
import pytest
from command_lines import python
from nightly import NIGHTLY
from paths import ROOT
from tables import values

from rewriter.base.errors import ArithmeticRunError
from rewriter.ir.graph.node_list import BLOCK
from rewriter.ir.model import Array, Model, load
from rewriter.ir.model.tensors import TensorFacts
from rewriter.ir.plan import Range
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.ranges import Ranges, along_depth, measure, range_of
from rewriter.runtime.ranges.instrument import instrument
from rewriter.runtime.ranges.reductions import SMALL

MODELS = ROOT / "models"
FP32_MAX = float(np.finfo(np.float32).max)
LARGE = float(np.float32(3e38))


def ranges(body: str, *samples: Mapping[str, Any], opset: int = 17) -> Ranges:
    return measured(graphs.graph(body, opset=opset), *samples)


def measured(model: Model, *samples: Mapping[str, Any]) -> Ranges:
    feeds = [
        {k: np.asarray(v, None if hasattr(v, "dtype") else np.float32) for k, v in s.items()} for s in samples
    ]
    return measure(model, feeds)


def expected(array: Array) -> Range:
    wide = array.astype(np.float64)
    return Range(
        float(wide.min()), float(wide.max()), float(np.abs(wide).mean()), bool(np.isfinite(wide).all())
    )


def close(actual: Range, wanted: Range, rel: float = 0.0) -> None:
    """Compares ranges; `rel` is what another order of sums may change, of the largest value."""
    ends = pytest.approx((wanted.low, wanted.high), rel=rel, abs=rel * wanted.absmax)
    assert (actual.low, actual.high) == ends
    assert actual.finite == wanted.finite
    assert actual.mean_abs == pytest.approx(wanted.mean_abs, rel=1e-4) or (
        wanted.absmax == actual.mean_abs > FP32_MAX / 100  # the sum of such values is infinite
    )


# -- against the tensors themselves ----------------------------------------------------------
CASES = "nafnet convnext bert llama_block rtdetr t5_encoder qdq mixed_casts mismatch".split()


@pytest.mark.parametrize("name", CASES if NIGHTLY else CASES[2::3])
def test_every_tensor_of_a_case_has_its_range(name: str) -> None:
    model = load(MODELS / f"{name}.onnx")
    model = reference(model)
    facts = model.facts()
    feeds = dict(np.load(MODELS / f"{name}.npz"))
    found = measure(model, [feeds])
    floats = [
        out
        for node in model.proto.graph.node
        for out in node.output
        if out in facts.main and facts.main[out].dtype == onnx.TensorProto.FLOAT
    ]
    assert floats
    exposed = model.copy()
    del exposed.proto.graph.output[:]
    exposed.proto.graph.output.extend(onnx.helper.make_tensor_value_info(n, 1, None) for n in floats)
    with Session(exposed) as session:
        for tensor, array in session.run(feeds).items():
            if np.isfinite(array).all():
                close(found[0, tensor], expected(array), rel=1e-5)
            else:
                assert not found[0, tensor].finite
    for weight in model.proto.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            close(found[0, weight.name], expected(model.array(weight)))


def test_many_tensors_are_packed_in_blocks() -> None:
    """More tensors than a block holds, small and large, of several shapes."""
    count, wide = 2 * BLOCK + 7, SMALL + 1
    lines = [f"t{i} = Add(t{i - 1}, one)" for i in range(1, count)]
    body = f"""g (float[3,2] t0, float[{wide}] v0) => (float[3,2] t{count - 1}, float[{wide}] v{count - 1})
        <float one = {{1}}> {{ {" ".join(lines)} {" ".join(lines).replace("t", "v")} }}"""
    small = np.array([[-1, 0], [2, 3], [0.5, 0]], np.float32)
    large = np.linspace(-4, 4, SMALL + 1, dtype=np.float32)
    found = ranges(body, {"t0": small, "v0": large})
    for i in (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, count - 1):
        close(found[0, f"t{i}"], expected(small + i))
        assert (found[0, f"v{i}"].low, found[0, f"v{i}"].high) == (i - 4, i + 4)


@pytest.mark.parametrize("opset", [pytest.param(n, id=f"opset {n}") for n in (7, 9, 11, 13, 17, 18, 21)])
@pytest.mark.parametrize("shape", ["2,3", "N,3", "?,?"], ids=["static", "named", "unknown"])
def test_every_operator_set_and_kind_of_shape(opset: int, shape: str) -> None:
    x = np.array([[-1, 2, 3], [4, -5, 6]], np.float32)
    found = ranges(f"g (float[{shape}] x) => (float[{shape}] y) {{ y = Neg(x) }}", {"x": x}, opset=opset)
    close(found[0, "x"], expected(x))
    close(found[0, "y"], expected(-x))


def test_a_tensor_of_unknown_rank() -> None:
    model = graphs.graph("g (float[2,3] x) => (float y) { [relu] t = Relu(x) y = ReduceMax<keepdims=0>(t) }")
    facts = model.facts()
    facts.main["t"] = TensorFacts(onnx.TensorProto.FLOAT, None)
    model.set_facts(facts)
    x = np.array([[-1, 2, 3], [4, -5, 6]], np.float32)
    close(measure(model, [{"x": x}])[0, "t"], expected(np.maximum(x, 0)))


# -- what is not a number --------------------------------------------------------------------
PLACES = [pytest.param(0, id="first"), pytest.param(4, id="in the middle"), pytest.param(9, id="last")]
SHAPES = [
    pytest.param("10", 10, id="stacked"),
    pytest.param(str(SMALL + 6), SMALL + 6, id="alone"),
    pytest.param("N", 10, id="dynamic"),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dim", "size"), SHAPES)
def test_one_nan_is_never_in_range(dim: str, size: int, place: int) -> None:
    """ONNX Runtime's ReduceMax and ReduceMin lose it."""
    x = np.ones(size, np.float32)
    x[place] = -1
    lines = " ".join(f"t{i} = Sqrt(x)" for i in range(4))
    found = ranges(f"g (float[{dim}] x) => (float[{dim}] t0) {{ {lines} }}", {"x": x})
    assert found[0, "x"].finite and not found[0, "t0"].finite
    assert math.isnan(found[0, "t0"].mean_abs)
    assert found[0, "t0"].absmax == math.inf


UNUSUAL = [
    pytest.param("N", "Relu", [[]], Range(0, 0, 0, True), id="no elements, dynamic"),
    pytest.param("0", "Relu", [[]], Range(0, 0, 0, True), id="no elements, static"),
    pytest.param("N", "Neg", [[], [1, 2]], Range(-2, -1, 0.75, True), id="an empty sample among others"),
    pytest.param("N", "Sqrt", [[1, 4], [1, -4], [9, 4]], Range(1, 3, math.nan, False), id="NaN in one"),
    pytest.param("N", "Log", [[-1, -2]], Range(math.nan, math.nan, math.nan, False), id="nothing but NaN"),
    pytest.param("N", "Neg", [[1, np.inf]], Range(-math.inf, -1, math.inf, False), id="a mask of -inf"),
    pytest.param("N", "Neg", [[LARGE, LARGE]], Range(-LARGE, -LARGE, LARGE, True), id="the sum overflows"),
]


@pytest.mark.parametrize(("dim", "op", "samples", "wanted"), UNUSUAL)
def test_values_that_are_unusual(dim: str, op: str, samples: list[list[float]], wanted: Range) -> None:
    body = f"g (float[{dim}] x) => (float[{dim}] y) {{ y = {op}(x) }}"
    found = ranges(body, *({"x": values} for values in samples))[0, "y"]
    np.testing.assert_equal(
        (found.low, found.high, found.mean_abs, found.finite),
        (wanted.low, wanted.high, wanted.mean_abs, wanted.finite),
    )


# -- constants and copies --------------------------------------------------------------------
def test_constants_are_read_without_running() -> None:
    body = """g (float[2] x) => (float[2] y) <float[2] w = {-3, 5}, int64[1] i = {7}> {
        c = Constant<value = float {70000}>() f = Constant<value_floats = [1.0, -8.0]>()
        a = Add(x, w) b = Add(a, c) y = Add(b, f) }"""
    found = ranges(body)
    assert found[0, "w"] == Range(-3, 5, 4, True)
    assert found[0, "c"].high == 70000
    assert found[0, "f"].low == -8
    assert found.keys() == {(0, "w"), (0, "c"), (0, "f")}, "nothing was run, so nothing else is known"


LONG = np.ones(2**20 + 5, np.float32)
LONG[[3, -1]] = -2, 9
ARRAYS = [
    pytest.param(np.array([1, -3], np.float16), Range(-3, 1, 2, True), id="float16"),
    pytest.param(np.array([1, -3], ml_dtypes.bfloat16), Range(-3, 1, 2, True), id="bfloat16"),
    pytest.param(np.array(-2.0), Range(-2, -2, 2, True), id="a float64 scalar"),
    pytest.param(np.zeros((0, 3), np.float32), Range(0, 0, 0, True), id="no elements"),
    pytest.param(np.full(3, LARGE, np.float32), Range(LARGE, LARGE, LARGE, True), id="a large sum"),
    pytest.param(LONG, expected(LONG), id="longer than a block"),
    pytest.param(np.array([1.0, np.nan]), Range(1.0, 1.0, math.nan, False), id="one NaN"),
    pytest.param(np.array([1.0, 1e300]), Range(1.0, math.inf, math.inf, False), id="beyond FP32"),
]


@pytest.mark.parametrize(("array", "wanted"), ARRAYS)
def test_range_of_an_array(array: Array, wanted: Range) -> None:
    found = range_of(array)
    assert (found.low, found.high, found.finite) == (wanted.low, wanted.high, wanted.finite)
    assert found.mean_abs == pytest.approx(wanted.mean_abs, nan_ok=True)


@values
def test_views_share_the_range_of_their_source(line: str, dtype: str, shared: bool) -> None:
    constants = "int64[2] two = {2, 2}, int64[1] one = {1}, int64[1] two1 = {2}"
    model = graphs.graph(f"g (float[2,2] x) => ({dtype}[M,N] y) <{constants}> {{ t = Neg(x) {line} }}")
    keys = instrument(model, lambda node, scope: False).keys
    assert ((0, "y") in keys) is not shared
    found = measured(model, {"x": [[1, 2], [3, 4]]})
    assert (found[0, "y"] == Range(-4, -1, 2.5, True)) or not shared


def test_a_view_of_a_constant() -> None:
    found = ranges("g (float[2] x) => (float[2] y) <float[1,2] w = {3, -4}> { v = Squeeze(w) y = Add(x, v) }")
    assert found[0, "v"] == found[0, "w"]


def test_other_float_types_are_measured() -> None:
    body = """g (float16[2] h, double[2] d, bfloat16[2] b) => (float16[2] x, double[2] y, bfloat16[2] z) {
        x = Neg(h) y = Neg(d) z = Transpose(b) }"""
    feeds = {
        "h": np.array([1, 65504], np.float16),
        "d": np.array([1e5, -1e300]),
        "b": np.array([3e38, 1], ml_dtypes.bfloat16),
    }
    found = ranges(body, feeds)
    assert found[0, "x"].low == -65504
    assert not found[0, "y"].finite, "beyond FP32"
    assert found[0, "z"].high == pytest.approx(3e38, rel=1e-2)


# -- samples ---------------------------------------------------------------------------------
NEG = "g (float[2] x) => (float[2] y) { y = Neg(x) }"


def test_samples_are_taken_one_at_a_time() -> None:
    made: list[int] = []
    done: list[int] = []

    def samples() -> Iterator[dict[str, Array]]:
        for i in range(3):
            assert done == list(range(1, i + 1)), "the sample before is measured"
            made.append(i)
            yield {"x": np.full(2, i, np.float32)}

    model = graphs.graph(NEG)
    found = measure(model, samples(), progress=done.append)
    assert (made, done) == ([0, 1, 2], [1, 2, 3])
    assert found[0, "y"] == Range(-2, 0, 1, True)


def test_outputs_of_some_samples_come_with_the_ranges() -> None:
    samples = [{"x": np.array([k, 1], np.float32)} for k in range(3)]
    found = measure(graphs.graph(NEG), iter(samples), outputs_of=(2, 0))
    assert {place: values["y"].tolist() for place, values in found.outputs.items()} == {
        0: [0, -1],
        2: [-2, -1],
    }
    lacking = graphs.graph("g (float[2] x) => (float[2] y) { a = Neg(x) y = Plugin(a) }")
    assert not measure(lacking, samples, outputs_of=(0,)).outputs, "a part of it cannot run"


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ArithmeticRunError, match="Expected: 2"):
        ranges(NEG, {"x": [1, 2, 3]})


# -- operators without a kernel --------------------------------------------------------------


@values
def test_tensors_that_do_not_depend_on_it_are_measured(line: str, op: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[2] x) => (float[2] y, float[2] z) {{
            a = Neg(x) f = Sigmoid(a) {line} y = Relu(p) z = Abs(a) }}"""
    model = Model(onnx.parser.parse_model(text))
    facts = model.facts()
    for name in "py":
        facts.main[name] = TensorFacts(onnx.TensorProto.FLOAT, (2,))
    model.set_facts(facts)
    found = measure(model, [{"x": np.array([1, 2], np.float32)}])
    assert found.unsupported == (op,)
    assert {name for _, name in found} >= {"x", "a", "f", "z"}
    assert {name for _, name in found}.isdisjoint({"p", "y"})


def test_what_hides_no_tensor_and_what_hides_all() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "f" : 1]>'
    function = '<domain: "f", opset_import: ["" : 17]> Twice (a) => (b) { b = Add(a, a) }'
    local = graphs.model(f"{text} g (float[2] x) => (float[2] y) {{ y = f.Twice(x) }} {function}")
    assert measured(local, {"x": [1, 2]}).unsupported == (), "a local function is no missing operator"
    body = "g (int64[2] x) => (float[2] y) <float[1] w = {4}> { y = Plugin(x, w) }"
    found = measured(Model(onnx.parser.parse_model(f"{text} {body}")), {"x": np.ones(2, np.int64)})
    assert (dict(found), found.unsupported) == ({(0, "w"): Range(4, 4, 4, True)}, ("Plugin",))


# -- subgraphs -------------------------------------------------------------------------------
BRANCHES = """g (float[2] x, bool c) => (float[2] y) {
    a = Neg(x)
    y = If(c) <
        then_branch = yes () => (float[2] r) { s = Add(a, a) r = Mul(s, s) },
        else_branch = no () => (float[2] r) { r = Abs(a) }
    >
    z = Neg(y)
}"""
TRUE, FALSE = np.array(True), np.array(False)


def test_only_branches_that_ran_have_ranges() -> None:
    found = ranges(BRANCHES, {"x": [1, 2], "c": TRUE})
    assert (found[1, "s"].low, found[1, "s"].high, found[1, "r"].high) == (-4, -2, 16)
    assert (2, "r") not in found
    assert (found[0, "y"].high, found[0, "z"].low) == (16, -16)
    both = ranges(BRANCHES, {"x": [1, 2], "c": TRUE}, {"x": [3, 5], "c": FALSE}, {"x": [1, 1], "c": FALSE})
    assert both[1, "r"] == Range(4, 16, 10, True)
    assert both[2, "r"] == Range(1, 5, 2.5, True), "the mean is over the two samples that ran it"


def test_what_a_branch_hands_on_has_the_range_from_outside() -> None:
    body = BRANCHES.replace(
        "r = Abs(a)",
        "n = Constant<value_ints = [1, 2]>() u = Reshape(a, n) k = Neg(u)"
        " v = Identity(w) t = Constant<value_ints = [2]>() m = Reshape(k, t) r = Add(m, v)",
    )
    body = body.replace("z = Neg(y)", "z = Neg(y)").replace(
        "(float[2] y) {", "(float[2] y) <float[2] w = {7, 8}> {"
    )
    found = ranges(body, {"x": [1, 2], "c": TRUE})
    assert (found[2, "u"], found[2, "v"]) == (found[0, "a"], found[0, "w"])
    assert not {(2, "k"), (2, "m"), (2, "r")} & found.keys()


def test_a_branch_that_holds_no_float() -> None:
    body = """g (float[2] x, bool c) => (int64[1] y) {
        y = If(c) <
            then_branch = yes () => (int64[1] r) {
                s = Neg(x) t = Cast<to=7>(s) z = Constant<value_ints=[0]>() r = Gather(t, z) },
            else_branch = no () => (int64[1] r) { r = Constant<value_ints=[1]>() }
        >
    }"""
    assert ranges(body, {"x": [1, 2], "c": FALSE}).keys() == {(0, "x")}
    assert ranges(body, {"x": [1, 2], "c": TRUE})[1, "s"].low == -2


LOOP = """g (float[2] x, int64 n) => (float[2] y) {
    go = Constant<value = bool {1}>()
    y = Loop(n, go, x) <
        body = step (int64 i, bool on, float[2] v) => (bool on_out, float[2] w) {
            on_out = Identity(on) d = Add(v, v) w = Neg(d) }
    >
}"""


@pytest.mark.parametrize("opset", [pytest.param(n, id=f"opset {n}") for n in (11, 13, 17, 18, 21)])
def test_a_loop_is_measured_over_its_iterations(opset: int) -> None:
    body = LOOP.replace("w = Neg(d)", "r = Sqrt(d) w = Neg(d)")
    found = ranges(body, {"x": [1, 2], "n": np.array(3)}, opset=opset)
    close(found[1, "v"], Range(-4, 8, (1.5 + 3 + 6) / 3, True))
    assert (found[1, "w"].low, found[1, "w"].high, found[0, "y"].low) == (-16, 8, -16)
    assert (found[1, "r"].finite, found[1, "r"].high) == (False, 4), "NaN in one iteration"
    none = ranges(body, {"x": [1, 2], "n": np.array(0)}, opset=opset)
    assert ({scope for scope, _ in none}, none[0, "y"].high) == ({0}, 2)


SCAN = """g (float[2] s0, float[3,2] x) => (float[2] s, float[2,3] y) {
    s, y = Scan <num_scan_inputs = 1, scan_output_axes = [1], scan_output_directions = [0],
        body = step (float[2] a, float[2] e) => (float[2] b, float[2] o) { b = Add(a, e) o = Mul(b, e) }
    > (s0, x)
}"""


def test_a_scan_with_output_axes() -> None:
    found = ranges(SCAN, {"s0": [0, 0], "x": [[1, 2], [3, 4], [5, -6]]})
    assert (found[1, "b"].low, found[1, "b"].high) == (0, 9)
    assert (found[1, "o"].low, found[1, "o"].high) == (0, 45)
    assert found[0, "y"].high == 45


def test_branches_inside_a_loop() -> None:
    body = """g (float[2] x, int64 n) => (float[2] y) {
        go = Constant<value = bool {1}>() two = Constant<value = int64 {2}>()
        y = Loop(n, go, x) <
            body = step (int64 i, bool on, float[2] v) => (bool on_out, float[2] w) {
                on_out = Identity(on) late = Less(two, i)
                w = If(late) <
                    then_branch = yes () => (float[2] r) { r = Mul(v, x) },
                    else_branch = no () => (float[2] r) { r = Add(v, x) }
                >
            }
        >
        t = Neg(y)
    }"""
    found = ranges(body, {"x": [1, 2], "n": np.array(3)})
    assert found[3, "r"].high == 8, "2 + 2 three times"
    assert (2, "r") not in found
    assert ranges(body, {"x": [1, 2], "n": np.array(5)})[2, "r"].high == 32


def test_a_loop_that_hides_one_of_its_outputs() -> None:
    body = """g (float[2] x, int64 n) => (float[2] y) {
        go = Constant<value = bool {1}>()
        y, gathered = Loop(n, go, x) <
            body = step (int64 i, bool on, float[2] v) => (bool on_out, float[2] w, float[2] o) {
                on_out = Identity(on) w = Add(v, v) o = Neg(v) }
        >
    }"""
    model = graphs.graph(body)
    loop = model.proto.graph.node[1]
    del loop.output[1]
    found = measured(model, {"x": [1, 2], "n": np.array(2)})
    assert found[1, "o"].low == -4
    assert found[0, "y"].high == 8


def test_an_unknown_operator_in_a_subgraph_hides_the_whole_node_and_scopes_are_counted_past_it() -> None:
    head, lost = '<ir_version: 8, opset_import: ["" : 17]>', BRANCHES.replace("r = Abs(a)", "r = Plugin(a)")
    found = measured(Model(onnx.parser.parse_model(f"{head} {lost}")), {"x": [1, 2], "c": TRUE})
    assert (set(found), found.unsupported) == ({(0, "x"), (0, "a")}, ("Plugin",))
    before = """q = If(c) <
        then_branch = p () => (float[2] r) { r = Plugin(x) },
        else_branch = o () => (float[2] r) { r = Abs(x) }
    >"""
    text = head + BRANCHES.replace("a = Neg(x)", f"{before} a = Neg(x)")
    found = measured(Model(onnx.parser.parse_model(text)), {"x": [1, 2], "c": TRUE})
    assert found[3, "s"].low == -4
    assert not any(scope in (1, 2) for scope, _ in found)


# -- memory ----------------------------------------------------------------------------------
CHAIN = """
import resource, sys, numpy as np
from graphs import graph
from rewriter.runtime.ranges import measure
import onnxruntime
side, nodes = 1448, 60  # 8 MiB each
lines = " ".join(f"t{i} = {('Sigmoid', 'Neg', 'Exp')[i % 3]}(t{i - 1})" for i in range(1, nodes))
model = graph(f"g (float[{side},{side}] t0) => (float[{side},{side}] t{nodes - 1}) {{ {lines} }}")
x = np.zeros((side, side), np.float32)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
found = measure(model, ({"t0": x} for _ in range(3)))
assert len(found) == nodes
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB is Linux's")
def test_memory_grows_neither_with_tensors_nor_with_samples() -> None:
    run = python("-c", CHAIN, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 100, "MiB; all tensors together are 480"


def test_means_of_channels_are_averaged_over_the_samples() -> None:
    text = """
        g (float[2,3,4] x, float[N,4] free) => (float[2,5,2] c, float[2,4] m, float[N,2] n) {
            c = Conv(x, cw) f = Flatten(x) m = MatMul(f, mw) n = Gemm(free, nw) }"""
    rng = np.random.default_rng(0)
    samples = [
        {"x": rng.random((2, 3, 4), np.float32), "free": rng.random((n, 4), np.float32)} for n in (2, 5)
    ]
    model = graphs.weighted(text, cw=(5, 3, 3), mw=(12, 4), nw=(4, 2))
    found = measure(model, samples, channels=True).means
    wanted = {
        ("x", 1): np.mean([s["x"].mean(axis=(0, 2)) for s in samples], axis=0),
        ("f", -1): np.mean([s["x"].reshape(2, 12).mean(axis=0) for s in samples], axis=0),
        ("free", -1): np.mean([s["free"].mean(axis=0) for s in samples], axis=0),
    }
    assert found.keys() == wanted.keys()
    for key, mean in wanted.items():
        assert found[key] == pytest.approx(mean, rel=1e-5)


RANGE = Range(0.0, 1.0, 0.5, True)

SOURCE = """
    g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
        k = Constant <value = float {3.0}> () a = Mul(x, w) n = Shape(a) b = Add(a, w) d = Mul(b, k)
        y = If(c) <
            then_branch = t () => (float[2] u) <float[2] v = {3, 4}> { u = Mul(d, v) },
            else_branch = e () => (float[2] z) { z = Neg(d) }
        >
    }"""


def test_nodes_with_ranges_count_and_constants_stand_at_their_first_reader() -> None:
    names = [(0, name) for name in "wkabdy"] + [(1, "u"), (1, "v")]
    rows = along_depth(graphs.graph(SOURCE), dict.fromkeys(names, RANGE))
    assert [(t.depth, t.tensor, t.op, t.constant) for t in rows] == [
        (0, "a", "Mul", False),
        (0, "w", "Mul", True),
        (1, "b", "Add", False),
        (2, "d", "Mul", False),
        (2, "k", "Mul", True),
        (3, "y", "If", False),
        (4, "u", "Mul", False),
        (4, "v", "Mul", True),
    ]
    assert {t.key for t in rows if t.tensor in "wau"} == {"0:a", "1:u"}


def test_a_node_without_a_range_does_not_count() -> None:
    rows = along_depth(graphs.graph(SOURCE), dict.fromkeys([(0, "w"), (0, "b"), (0, "d")], RANGE))
    assert [(t.depth, t.tensor) for t in rows] == [(0, "w"), (0, "b"), (1, "d")]
