"""Decomposed normalisations: every way of writing them is one unit, and what only looks like one is none."""

import numpy as np
import pytest
from graphs import graph, matrix, model
from hypothesis import given
from hypothesis import strategies as st
from tables import values
from written_norms import (
    AFFINE,
    BLOCKED,
    CHANNEL,
    CONSTANTS,
    CORE,
    INPUTS,
    LAYER_NORMS,
    MEAN,
    NORMALIZE,
    NOT_NORMS,
    POWER,
    RMS_NORMS,
    build,
    units,
)

import rewriter
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model
from rewriter.target.quirks import lost_round_trips


@pytest.mark.parametrize(("body", "opset"), LAYER_NORMS)
def test_every_way_to_write_a_layer_norm(body: str, opset: int) -> None:
    (norm,) = units(build(body, opset=opset))
    assert (norm.kind, norm.input, norm.output, norm.axes) == ("layer-norm", "x", "y", (2,))
    assert (norm.epsilon, norm.scale, norm.bias) == (float(np.float32(1e-5)), "s", "b")
    assert norm.blocked is None
    constants = ("Constant", "Identity")
    text = [n for n in build(body, opset=opset).proto.graph.node if n.op_type not in constants]
    assert [n.op_type for n in norm.nodes if n.op_type not in constants] == [n.op_type for n in text]


@pytest.mark.parametrize("body", RMS_NORMS)
def test_every_way_to_write_an_rms_norm(body: str) -> None:
    (norm,) = units(build(body))
    assert (norm.kind, norm.output, norm.axes) == ("rms-norm", "y", (2,))
    assert (norm.epsilon, norm.scale, norm.bias) == (float(np.float32(1e-5)), "s", None)
    assert norm.blocked is None


@pytest.mark.parametrize(("body", "size"), NORMALIZE)
def test_every_way_to_write_an_l2_normalisation(body: str, size: int) -> None:
    (norm,) = units(build(body))
    assert (norm.kind, norm.input, norm.output, norm.axes) == ("l2-normalize", "x", "y", (2,))
    assert norm.epsilon == float(np.float32(1e-12))
    assert len(norm.nodes) == size


@pytest.mark.parametrize(("body", "output", "reason"), BLOCKED)
def test_a_unit_that_must_not_be_fused_is_still_a_unit(body: str, output: str, reason: str) -> None:
    (norm,) = units(build(body, output=output))
    assert norm.kind == "layer-norm" and norm.blocked is not None
    assert reason in norm.blocked
    assert {"Sub", "Sqrt", "Div"} <= {n.op_type for n in norm.nodes}


@pytest.mark.parametrize(("body", "more"), NOT_NORMS)
def test_what_only_looks_like_a_norm(body: str, more: list[str]) -> None:
    opset, inputs, output = [*more, *["17", INPUTS, "float[2,4,8] y"][len(more) :]]
    assert units(build(body, inputs, output, int(opset))) == []


RESHAPED = (
    "q = Pow(x, two) v = ReduceMean<axes = [-1], keepdims = 0>(q) g = Shape<start = 0, end = 1>(z)"
    " t = Concat<axis = 0>({target}) h = Reshape(v, t) r = Sqrt(h) y = Div(x, r)"
)


def test_a_reshape_keeps_the_number_of_elements_whatever_its_sizes_are_called() -> None:
    body = "k = Constant<value_ints = [1]>() " + RESHAPED.format(target="g, k")
    (norm,) = units(build(body, "float[n,8] x, float[m,8] z", "float[n,8] y"))
    assert (norm.kind, norm.axes) == ("rms-norm", (1,))


@values
def test_an_expand_after_a_reshape(size: str, expanded: bool) -> None:
    body = RESHAPED.format(target="g, k").replace("r = Sqrt(h)", f"o = Expand(h, {size}) r = Sqrt(o)")
    body = f"k = Constant<value_ints = [1]>() i = Shape<start = 1>(z) c = Concat<axis = 0>(i, k) {body}"
    (norm,) = units(build(body, "float[n,8] x, float[m,l] z", "float[n,8] y"))
    assert ("expanded" in (norm.blocked or "")) == expanded


def test_an_expand_to_the_shape_of_the_input() -> None:
    body = f"w = Shape(x) {POWER} o = Expand(r, w) y = Div(x, o)"
    (norm,) = units(build(body, "float[n,8] x", "float[n,8] y"))
    assert norm.blocked is None


def test_a_statistic_turned_to_another_axis_meets_other_elements() -> None:
    body = "k = Constant<value_ints = [1]>() " + RESHAPED.format(target="k, g")
    assert units(build(body, "float[n,n] x, float[n,8] z", "float[n,n] y")) == []


def test_a_variance_that_cancels_is_noted() -> None:
    found = {str(p.id): units(build(str(p.values[0]), opset=int(str(p.values[1])))) for p in LAYER_NORMS}
    cancels = {name for name, (norm,) in found.items() if norm.cancels}
    assert cancels == {"a variance as E[x^2] - E[x]^2", "Flax", "Flax, operands swapped", "Keras 3"}


def test_axes_of_a_tensor_of_unknown_rank_stay_as_written() -> None:
    body = f"x = Reshape(z, t) {CORE} {AFFINE}"
    (norm,) = units(build(body, "float[64] z, int64[k] t, float[8] s, float[8] b", "float[a,c,d] y"))
    assert (norm.axes, norm.blocked) == ((-1,), None)


def test_computed_axes_make_a_unit_that_cannot_be_fused() -> None:
    body = "q = Pow(x, two) v = ReduceMean(q, a) r = Sqrt(v) y = Div(x, r)"
    (norm,) = units(build(body, "float[2,8] x, int64[1] a", "float[2,8] y", opset=18))
    assert (norm.axes, norm.blocked) == ((), "its axes are computed")


def test_float64_is_not_what_the_operator_computes() -> None:
    body = f"{MEAN} d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes = [-1]>(q) r = Sqrt(v)"
    (norm,) = units(build(f"{body} y = Div(d, r)", "double[2,8] x", "double[2,8] y"))
    assert norm.blocked is not None and "float64" in norm.blocked


@values
def test_layer_norm_2d_takes_its_weights_in(weights: str, shape: str) -> None:
    source = graph(
        f"""g (float[2,4,8,8] x) => (float[2,4,8,8] y)
        <float two = {{2.0}}, float eps = {{0.00001}}, {weights}> {{
            {shape} {CHANNEL} c = Sub(x, m) e = Add(v, eps) r = Sqrt(e) n = Div(c, r)
            w = Mul(s, n) y = Add(w, b) }}"""
    )
    (norm,) = units(source)
    assert (norm.axes, norm.scale, norm.bias, norm.blocked) == ((1,), "s", "b", None)
    assert len(norm.nodes) == len(source.proto.graph.node)


def test_a_reshaped_weight_that_others_read_stays_outside() -> None:
    source = graph(
        f"""g (float[2,4,8,8] x) => (float[2,4,8,8] y, float[1,4,1,1] z)
        <float two = {{2.0}}, float eps = {{0.00001}}, float[4] sw = {{1, 2, 3, 4}},
        int64[4] to = {{1, -1, 1, 1}}> {{
            s = Reshape(sw, to) z = Relu(s) {CHANNEL} e = Add(v, eps) r = Sqrt(e) n = Div(d, r) y = Mul(s, n)
        }}"""
    )
    (norm,) = units(source)
    assert (norm.scale, norm.blocked) == ("s", None)
    assert not {"Reshape", "Relu"} & {n.op_type for n in norm.nodes}


HALF = "float16[2,4,8] x, float16[8] s"
MIXED = [
    pytest.param(
        f"c = Cast<to = 1>(x) {POWER.replace('(x', '(c')} i = Reciprocal(r) n = Mul(c, i)"
        " h = Cast<to = 10>(n) y = Mul(s, h)",
        9,
        id="one Cast up, one down before the scale",
    ),
    pytest.param(
        f"c = Cast<to = 1>(x) k = Cast<to = 1>(x) {POWER.replace('(x', '(c')} i = Reciprocal(r) n = Mul(k, i)"
        " h = Cast<to = 10>(n) y = Mul(s, h)",
        10,
        id="a Cast up for each reader",
    ),
]


@pytest.mark.parametrize(("body", "size"), MIXED)
def test_casts_round_the_statistics_of_a_mixed_model(body: str, size: int) -> None:
    (norm,) = units(build(body, HALF, "float16[2,4,8] y"))
    assert (norm.input, norm.output, norm.scale, norm.blocked) == ("x", "y", "s", None)
    assert len(norm.nodes) == size


def test_without_a_cast_back_the_unit_begins_after_the_cast() -> None:
    body = f"c = Cast<to = 1>(x) {POWER.replace('(x', '(c')} y = Div(c, r)"
    (norm,) = units(build(body, HALF, "float[2,4,8] y"))
    assert (norm.input, norm.output, norm.blocked) == ("c", "y", None)


def test_norms_of_subgraphs_with_constants_of_the_outer_graph() -> None:
    source = model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool t, float[2,4,8] x, float[8] s, float[8] b) => (float[2,4,8] y) {CONSTANTS} {{
            y = If (t) <
                then_branch = yes () => (float[2,4,8] y1) {{ {CORE} w = Mul(n, s) y1 = Add(w, b) }},
                else_branch = no () => (float[2,4,8] y2) {{ {CORE} y2 = Identity(n) }}
            >
        }}""")
    first, second = units(source)
    assert (first.output, first.scale, first.bias, first.axes) == ("y1", "s", "b", (2,))
    assert (second.output, second.scale, second.bias, second.axes) == ("n", None, None, (2,))


def test_an_inner_tensor_that_a_subgraph_reads_blocks_the_unit() -> None:
    source = model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool t, float[2,4,8] x, float[8] s, float[8] b) => (float[2,4,8] y, float[2,4,8] z) {CONSTANTS} {{
            {CORE} {AFFINE}
            z = If (t) <
                then_branch = yes () => (float[2,4,8] z1) {{ z1 = Identity(d) }},
                else_branch = no () => (float[2,4,8] z2) {{ z2 = Identity(x) }}
            >
        }}""")
    (norm,) = units(source)
    assert norm.blocked == "d inside it is also used by If(z)"


STEPS = {
    "bias": "{out} = Add({read}, b)",
    "relu": "{out} = Relu({read})",
    "gelu": "{out}i = Sigmoid({read}) {out} = Mul({read}, {out}i)",
    "residual": "{out} = Add({read}, {other})",
    "norm": "{out} = LayerNormalization({read}, b)",
    "softmax": "{out} = Softmax({read})",
    "reshape": "{out}i = Reshape({read}, flat) {out} = Reshape({out}i, square)",
    "transpose": "{out} = Transpose<perm = [1, 0]>({read})",
}
PRODUCT, ROUND = "{out} = MatMul({read}, w)", "{out}i = Cast<to = 10>({read}) {out} = Cast<to = 1>({out}i)"


def trips(source: Model) -> list[str]:
    """Inputs of the first Casts."""
    opened = open_graphs(source)
    return [trip.down.input[0] for view in opened for trip in lost_round_trips(view)]


@st.composite
def random_networks(draw: st.DrawFn) -> Model:
    """Products, elementwise operators, norms and views over FP32 [4,4]; some results go to FP16 and back."""
    tensors, lines = ["x"], []
    for index in range(draw(st.integers(2, 7))):
        step = draw(st.sampled_from([PRODUCT, ROUND, ""])) or STEPS[draw(st.sampled_from(sorted(STEPS)))]
        read = draw(st.sampled_from([*tensors, *tensors[-1:] * 2 * index]))
        lines.append(step.format(out=f"t{index}", read=read, other=draw(st.sampled_from(tensors))))
        tensors.append(f"t{index}")
    outputs = ", ".join(f"float[4,4] {n}" for n in sorted({tensors[-1], draw(st.sampled_from(tensors[1:]))}))
    constants = f"{matrix('w', 1.0)}, float[4] b = {{0.1, -1, 0.6, 2}}, int64[1] flat = {{16}}"
    body = f"<{constants}, int64[2] square = {{4, 4}}> {{ {' '.join(lines)} }}"
    return graph(f"g (float[4,4] x) => ({outputs}) {body}")


@given(source=random_networks(), data=st.data())
def test_fix_writes_none(source: Model, data: st.DataObject) -> None:
    computed = [node.output[0] for node in source.proto.graph.node]
    result = rewriter.fix(
        source.whole(),
        io=data.draw(st.sampled_from(["keep", "fp16"])),
        keep_fp32=data.draw(st.lists(st.sampled_from([*computed, "*"]), max_size=3, unique=True)),
        preset=data.draw(st.sampled_from(["trt-fp16", "trt11-migrate"])),
        target=data.draw(st.sampled_from(["tensorrt", "tensorrt-rtx"])),
        verify=False,
    )
    assert not trips(result.model)


ROUNDED = """
    g (float[2,4] x, float[4,4] w, float[4] b) => (float[2,4] y) {
        m = MatMul(x, w) a = Add(m, b) h = Cast<to = 10>(a) y = Cast<to = 1>(h) }"""


@values
def test_scan_reports_a_user_s(target: str, severity: str | None) -> None:
    sample = {"x": np.ones((2, 4), np.float32), "w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    result = rewriter.scan(graph(ROUNDED).whole(), inputs=sample, target=target)
    found = [f for f in result.findings if f.kind == "known-defect"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all("drop-round-trips" in f.repair for f in found)


def test_fix_takes_a_user_s_out_and_says_so() -> None:
    source = graph(ROUNDED)
    result = rewriter.fix(source.whole(), target="tensorrt-rtx", build=False)
    assert result.verdict is not None and result.verdict.passed
    assert [len(r.changes) for r in result.passes if r.name == "drop-round-trips"] == [1]
    assert not trips(result.model)
    assert trips(source) == ["a"]
    kept = rewriter.fix(source.whole(), target="10.13", verify=False)
    assert trips(kept.model) == ["a"]
