"""Recurrent operators, step by step: equal to ONNX Runtime's in FP32, and rounded at every step in FP16."""

from itertools import product
from typing import Any

import graphs
import numpy as np
import pytest
from onnx import TensorProto, helper

from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model
from rewriter.report.remarks import worded
from rewriter.runtime.emulation import emulation
from rewriter.runtime.emulation.recurrences import kept_whole, take_apart
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.verification.arithmetic_checks import check_emulation
from rewriter.verification.expected import expected_outputs

STEPS, BATCH, INPUTS, HIDDEN = 7, 3, 5, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
WEIGHTS = "W R Bias Lengths H C P".split()


def recurrent(op: str, *absent: str, opset: int = 17, steps: int = STEPS, **attributes: Any) -> Model:
    """A recurrent operator of random weights, with all inputs but those named."""
    rng = np.random.default_rng(0)
    d, gates = 1 + (attributes.get("direction") == "bidirectional"), GATES[op] * HIDDEN
    batch = (BATCH, d, HIDDEN) if attributes.get("layout") else (d, BATCH, HIDDEN)
    shapes = ((d, gates, INPUTS), (d, gates, HIDDEN), (d, 2 * gates), (BATCH,), batch, batch, (d, 3 * HIDDEN))
    values = {n: (rng.standard_normal(s) * 0.6).astype("f") for n, s in zip(WEIGHTS, shapes, strict=True)}
    values["Lengths"] = rng.integers(1, STEPS + 1, BATCH).astype("i")
    names = [n * (n not in absent) for n in (WEIGHTS if op == "LSTM" else WEIGHTS[:5])]
    outputs = ["y", "yh", "yc"][: 2 + (op == "LSTM")]
    node = helper.make_node(op, ["x", *names], outputs, hidden_size=HIDDEN, **attributes)
    sequence = (BATCH, steps) if attributes.get("layout") else (steps, BATCH)
    held = {name: values[name] for name in names if name}
    return graphs.model_of([node], {"x": (*sequence, INPUTS)}, outputs, held, opset=opset)


def ran(model: Model, x: Array) -> list[Array]:
    with Session(model) as session:
        return list(session.run({"x": x}).values())


def x() -> Array:
    return np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)


ACTIVATIONS = (
    "HardSigmoid Affine LeakyRelu ThresholdedRelu ScaledTanh Elu Softsign Softplus Relu Sigmoid".split()
)
PARAMETERS: dict[str, Any] = {"activation_alpha": [0.7, 0.2], "activation_beta": [0.3, 0.1]}
DIRECTIONS = ("forward", "reverse", "bidirectional")
VARIANTS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    *((op, (), {"direction": d, "opset": o}) for op, d, o in product(GATES, DIRECTIONS, (11, 14, 21))),
    *((op, ("Bias", "H", "C"), {"direction": d}) for op, d in product(GATES, DIRECTIONS)),
    *((op, ("Lengths", "P"), {"clip": 0.3}) for op in GATES),
    ("LSTM", ("Lengths",), {"clip": 0.3}),
    ("LSTM", ("C",), {"input_forget": 1, "direction": "bidirectional"}),
    *(
        ("GRU", n, {"linear_before_reset": 1, "direction": "bidirectional"})
        for n in ((), ("Bias", "Lengths"))
    ),
    *(
        ("RNN", (), {"activations": [a, b], "direction": "bidirectional"} | PARAMETERS)
        for a, b in zip(ACTIVATIONS, ACTIVATIONS[::-1], strict=True)
    ),
    ("LSTM", (), {"activations": ["HardSigmoid", "Softsign", "ScaledTanh"]} | PARAMETERS),
    ("GRU", (), {"activations": ["HardSigmoid", "LeakyRelu"]}),
]


@pytest.mark.parametrize(("op", "absent", "attributes"), VARIANTS)
def test_it_is_the_operator_itself(op: str, absent: tuple[str, ...], attributes: dict[str, Any]) -> None:
    model = recurrent(op, *absent, **attributes)
    apart = take_apart(model, {TensorProto.FLOAT})
    assert not {op} & {node.op_type for node in apart.proto.graph.node}
    for value, expected in zip(ran(apart, x()), ran(model, x()), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_outputs_may_have_numbers_for_names() -> None:
    """As older exporters of PyTorch write them: ONNX Runtime takes no two nodes of one name."""
    for number in range(40):
        model = recurrent("GRU", "H")
        node = model.proto.graph.node[0]
        node.output[0] = model.proto.graph.output[0].name = str(number)
        model.mark_edited()
        apart = take_apart(model, {TensorProto.FLOAT})
        names = [node.name for node in apart.proto.graph.node]
        assert len({*names}) == len(names)


@pytest.mark.parametrize("op", GATES)
def test_batch_first(op: str) -> None:
    """ONNX Runtime has no kernel for it: the same with axes exchanged."""
    last, first = (recurrent(op, "H", "C", layout=layout, direction="bidirectional") for layout in (0, 1))
    y, *states = ran(take_apart(first, {TensorProto.FLOAT}), x().transpose(1, 0, 2))
    expected, *ends = ran(last, x())
    np.testing.assert_allclose(y.transpose(1, 2, 0, 3), expected, rtol=1e-5, atol=1e-6)
    for state, end in zip(states, ends, strict=True):
        np.testing.assert_allclose(state.transpose(1, 0, 2), end, rtol=1e-5, atol=1e-6)


def in_fp16(model: Model) -> Model:
    return retype(model, TypeRequest(lambda _scope, _node: TensorProto.FLOAT16))


def test_every_step_rounds() -> None:
    """An RNN that adds up what it reads stops where FP16 does, at 2048 or before."""
    text = """g (float[3000,1,1] x) => (float[3000,1,1,1] y)
        <float[1,1,1] W = {1}, float[1,1,1] R = {1}> {
            y = RNN<hidden_size = 1, activations = ["Affine"], activation_alpha = [1.0],
                activation_beta = [0.0]>(x, W, R) }"""
    (y,) = ran(emulation(in_fp16(graphs.graph(text))), np.ones((3000, 1, 1), np.float32))
    assert y.max() == 2048


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(recurrent("RNN", "Lengths", activations=["Affine"]), "defaults differ", id="parameters"),
        pytest.param(recurrent("GRU", "Lengths", steps=30_000), "30000 steps", id="a long sequence"),
    ],
)
def test_what_stays_whole_is_named(model: Model, reason: str) -> None:
    low = in_fp16(model)
    assert take_apart(low) is low
    assert reason in next(kept_whole(low))
    samples = [{"x": x()}] if reason != "30000 steps" else []
    check = check_emulation(expected_outputs(model, samples), low, "fp16", samples)
    assert reason in worded(check).summary


def test_a_state_that_nothing_reads_counts() -> None:
    """The cell of an LSTM adds up; its gate to the output is shut, and what is read stays 0."""
    bias = [12.0, -30.0, 12.0, 0.0, 0, 0, 0, 0]
    text = f"""g (float[3000,1,1] x) => (float[3000,1,1,1] y)
        <float[1,4,1] W = {{0, 0, 0, 1}}, float[1,4,1] R = {{0, 0, 0, 0}},
         float[1,8] B = {{{", ".join(map(str, bias))}}}> {{ y = LSTM<hidden_size = 1>(x, W, R, B) }}"""
    source, samples = graphs.graph(text), [{"x": np.ones((3000, 1, 1), np.float32)}]
    expected = expected_outputs(source, samples)
    check = check_emulation(expected, in_fp16(source), "fp16", samples)
    assert check.passed is False and "y/state2, which no node reads, has an error of" in worded(check).summary
    assert check_emulation(expected, source, "fp32", samples).passed
