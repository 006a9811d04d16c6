"""Round trips to FP16 after products: `fix` writes none in any model, `scan` reports given ones."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

import rewriter
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model, facts, load
from rewriter.ir.patterns.round_trips import lost_round_trips

FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16
SIZE = 4
STEPS = ("bias", "relu", "gelu", "residual", "norm", "softmax", "reshape", "transpose")
"""Beside products and round trips, which are likelier than each of them."""


def trips(source: Model) -> list[str]:
    """Inputs of the first Casts."""
    opened = open_graphs(source, facts.infer(source))
    return [trip.down.input[0] for view in opened for trip in lost_round_trips(view)]


@st.composite
def random_networks(draw: st.DrawFn) -> Model:
    """Products, elementwise operators, norms and views over FP32 [4,4]; some results go to FP16 and back."""
    weights = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    constants = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(weights[0], "b")]
    sizes = {"flat": [SIZE * SIZE], "square": [SIZE, SIZE]}
    constants += [numpy_helper.from_array(np.asarray(v, np.int64), n) for n, v in sizes.items()]
    nodes: list[NodeProto] = []
    tensors = ["x"]
    for index in range(draw(st.integers(2, 7))):
        step = draw(st.sampled_from(["product", "round", "one of the others"]))
        step, out = step if step in ("product", "round") else draw(st.sampled_from(STEPS)), f"t{index}"
        read = draw(st.sampled_from([*tensors, *tensors[-1:] * 2 * index]))
        nodes += _nodes(step, read, draw(st.sampled_from(tensors)), out)
        tensors.append(out)
    names = {tensors[-1], draw(st.sampled_from(tensors[1:]))}
    ports = {n: helper.make_tensor_value_info(n, FP32, [SIZE, SIZE]) for n in tensors}
    made = helper.make_graph(nodes, "g", [ports["x"]], [ports[n] for n in sorted(names)], constants)
    return load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def _nodes(step: str, read: str, other: str, out: str) -> list[NodeProto]:
    inner = f"{out}/inner"
    make = helper.make_node
    made = {
        "product": [make("MatMul", [read, "w"], [out])],
        "bias": [make("Add", [read, "b"], [out])],
        "relu": [make("Relu", [read], [out])],
        "gelu": [make("Sigmoid", [read], [inner]), make("Mul", [read, inner], [out])],
        "residual": [make("Add", [read, other], [out])],
        "norm": [make("LayerNormalization", [read, "b"], [out])],
        "softmax": [make("Softmax", [read], [out])],
        "reshape": [make("Reshape", [read, "flat"], [inner]), make("Reshape", [inner, "square"], [out])],
        "transpose": [make("Transpose", [read], [out], perm=[1, 0])],
        "round": [make("Cast", [read], [inner], to=FP16), make("Cast", [inner], [out], to=FP32)],
    }
    return made[step]


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
        m = MatMul(x, w)
        a = Add(m, b)
        h = Cast<to = 10>(a)
        y = Cast<to = 1>(h)
    }"""


@pytest.mark.parametrize(
    ("target", "severity"),
    [
        pytest.param("tensorrt-rtx 1.6", "error", id="seen there"),
        pytest.param("tensorrt-rtx", "error", id="recorded of some release"),
        pytest.param("tensorrt-rtx 1.7", "error", id="the same kernels"),
        pytest.param("tensorrt-rtx 1.5", None, id="not tried"),
        pytest.param("tensorrt", None, id="another library"),
    ],
)
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
