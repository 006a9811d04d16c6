"""Large networks in parts: the same bits, the same errors, and one piece where a cut cannot be."""

from __future__ import annotations

import graphs
import numpy as np
import onnx
import pytest

from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Model
from rewriter.runtime.engines import parts
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.onnxruntime_library import NoKernelError
from rewriter.runtime.engines.parts import PartedSession, opened


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_NODES", 4)


def chain(nodes: int = 24) -> str:
    """A body in which one tensor leads from node to node."""
    steps = [f"t{i} = {('Tanh', 'Neg', 'Sigmoid')[i % 3]}(t{i - 1})" for i in range(1, nodes - 1)]
    return " ".join(["t0 = Relu(x)", *steps, f"y = Neg(t{nodes - 2})"])


SAME = [
    pytest.param(f"g (float[3] x) => (float[3] y) {{ {chain()} }}", id="a chain"),
    pytest.param(
        f"g (float[3] x) => (float[3] y, float[3] t3, float[3] t9) {{ {chain()} }}",
        id="outputs within, one of them read later",
    ),
    pytest.param(
        f"g (float[3] x) => (float[3] z) {{ c = Constant <value_floats = [1.0, 2.0, 3.0]> () "
        f"a = Add(x, c) {chain()} b = Mul(y, c) d = Add(b, a) z = Add(d, x) }}",
        id="a constant, a tensor and the input are read at both ends",
    ),
    pytest.param(
        f"g (float[3] x, bool p) => (float[3] z) {{ {chain()} "
        "z = If (p) <then_branch = yes () => (float[3] v) { v = Add(y, t1) },"
        " else_branch = no () => (float[3] v) { v = Sub(x, t2) }> }",
        id="a branch reads tensors of earlier parts",
    ),
    pytest.param(
        f"g (float[3] x, int64[1] n) => (float[3] y, int64[1] k) {{ {chain(12)} m = Neg(n) s = Abs(m)"
        " q = Neg(s) r = Abs(q) u = Neg(r) w = Abs(u) k = Neg(w) }",
        id="integers",
    ),
]


@pytest.mark.parametrize("body", SAME)
def test_parts_compute_the_same_bits(body: str) -> None:
    model = graphs.graph(body)
    feeds = graphs.random_feeds(model)
    session = opened(model, optimize=False, threads=1)
    assert isinstance(session, PartedSession)
    whole, found = LocalSession(model, threads=1).run(feeds), session.run(feeds)
    assert list(found) == [value.name for value in model.proto.graph.output] == list(session.named())
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)


def test_weights_reach_the_parts_that_read_them() -> None:
    array = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    body = f"g (float[2,64] x, float[64,64] w) => (float[2,64] z) {{ a = MatMul(x, w) b = Add(a, x) {chain()}"
    model = graphs.with_weights(f"{body} c = MatMul(y, w) z = Add(c, b) }}", {"w": array})
    assert "w" in model.weights
    feeds = graphs.random_feeds(model)
    session = opened(model, optimize=False, threads=1)
    assert isinstance(session, PartedSession)
    np.testing.assert_array_equal(session.run(feeds)["z"], LocalSession(model, threads=1).run(feeds)["z"])


def test_outputs_can_be_chosen() -> None:
    model = graphs.graph(f"g (float[3] x) => (float[3] y, float[3] t3) {{ {chain()} }}")
    with Session(model) as session:
        assert list(session.run(graphs.random_feeds(model), ["t3"])) == ["t3"]


def test_a_feed_that_is_no_input_is_refused() -> None:
    model = graphs.graph(f"g (float[3] x) => (float[3] y) {{ {chain()} }}")
    with Session(model) as session, pytest.raises(ArithmeticRunError, match="other"):
        session.run({**graphs.random_feeds(model), "other": np.zeros(3, np.float32)})


def test_an_operator_without_a_kernel_in_a_later_part_is_named() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>\n'
    body = f"g (float[3] x) => (float[3] z) {{ {chain()} z = acme.MyPlugin(y) }}"
    with pytest.raises(NoKernelError) as caught:
        Session(Model(onnx.parser.parse_model(text + body)))
    assert caught.value.op == "acme.MyPlugin"


WHOLE = [
    pytest.param(f"g (float[3] x) => (float[3] y) {{ {chain(7)} }}", id="few nodes"),
    pytest.param(f"g (float[3] x) => (float[3] y, float[3] x) {{ {chain()} }}", id="an input is an output"),
    pytest.param(
        f"g (float16[3] x) => (float16[3] y) {{ {chain()} }}", id="FP16, which ONNX Runtime computes in FP32"
    ),
]


@pytest.mark.parametrize("body", WHOLE)
def test_one_piece(body: str) -> None:
    assert isinstance(opened(graphs.graph(body), optimize=False, threads=1), LocalSession)


def test_optimisations_see_the_whole_network() -> None:
    model = graphs.graph(f"g (float[3] x) => (float[3] y) {{ {chain()} }}")
    assert isinstance(opened(model, optimize=True, threads=1), LocalSession)


def test_a_cut_avoids_sequences_and_half_precision() -> None:
    half = onnx.TensorProto.FLOAT16
    rounds = " ".join(
        f"h{i} = Cast <to = {half}> (t{i - 1}) t{i} = Cast <to = 1> (h{i})" if i else "t0 = Relu(x)"
        for i in range(12)
    )
    tail = "s = SequenceConstruct(t11, t11) y = ConcatFromSequence <axis = 0> (s)"
    found = parts.parts(graphs.graph(f"g (float[3] x) => (float[6] y) {{ {rounds} {tail} }}"))
    assert len(found) > 2
    assert all(name.startswith("t") for part in found[1:] for name in part.given)
