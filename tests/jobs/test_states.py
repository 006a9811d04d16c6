"""Slow states of recurrences are found and kept in FP32; ordinary ones stay in FP16 and are verified."""

from typing import Any

import graphs
import numpy as np
import pytest
from onnx import helper
from tables import values

import rewriter
from rewriter.ir.model import Array, Model
from rewriter.ir.plan.plan_file import from_text, to_text

OPTIONS: dict[str, Any] = {"build": False, "passes": "mixed-precision"}


def recurrent(op: str, hidden: int, w: Array, r: Array, b: Array, output: int = 0) -> Model:
    """One recurrent operator over a sequence of any length; `output` is the one that is read."""
    names = [*([""] * output), "y"]
    node = helper.make_node(op, ["x", "W", "R", "B"], names, hidden_size=hidden)
    return graphs.model_of([node], {"x": ["T", 1, w.shape[2]]}, "y", {"W": w, "R": r, "B": b})


def counter(hidden: int = 2) -> Model:
    """An LSTM whose cells add up what they read: gates are open."""
    w, b = np.zeros((1, 4 * hidden, 1)), np.zeros((1, 8 * hidden))
    w[:, 3 * hidden :], b[:, : 3 * hidden] = 0.3, 12
    return recurrent("LSTM", hidden, w, np.zeros((1, 4 * hidden, hidden)), b, output=2)


def slow(hidden: int = 2) -> Model:
    """A GRU whose update gate is 0.999."""
    w, b = np.zeros((1, 3 * hidden, 1)), np.zeros((1, 6 * hidden))
    w[:, 2 * hidden :], b[:, :hidden] = 1, 6.9
    return recurrent("GRU", hidden, w, np.zeros((1, 3 * hidden, hidden)), b)


def drift(hidden: int = 2) -> Model:
    """An RNN that keeps its state and adds a little."""
    w = np.full((1, hidden, 1), 2e-5)
    return recurrent("RNN", hidden, w, np.eye(hidden)[None], np.zeros((1, 2 * hidden)))


def positive(steps: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [{"x": (1 + 0.1 * rng.standard_normal((steps, 1, 1))).astype("f")} for _ in range(2)]


@pytest.mark.parametrize(
    "model", [counter(), slow(), drift()], ids=["a counter", "a slow GRU", "a drifting RNN"]
)
def test_a_slow_state_is_repaired(model: Model) -> None:
    data = positive(1000)
    found = {one.kind: one for one in rewriter.scan(model, inputs=data).findings}
    assert found.keys() == {"slow-state", "wrong-outputs"}
    finding = found["slow-state"]
    assert finding.kind == "slow-state"
    result = rewriter.fix(model, inputs=data, **OPTIONS)
    assert result.verified and {d.rule for d in result.decisions} == {"slow-state"}
    assert result.plan is not None and from_text(to_text(result.plan)).fp32 == result.plan.fp32


@values
def test_an_ordinary_one_stays_in_fp16(op: str, steps: int, hidden: int) -> None:
    rng = np.random.default_rng(steps)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * hidden
    shapes = (1, gates, 8), (1, gates, hidden), (1, 2 * gates)
    weights = (rng.uniform(-1, 1, shape) / hidden**0.5 for shape in shapes)
    data = [{"x": rng.standard_normal((steps, 1, 8)).astype("f")} for _ in range(2)]
    result = rewriter.fix(recurrent(op, hidden, *weights), inputs=data, **OPTIONS)
    assert result.verified and not result.decisions


def loops(update: str) -> Model:
    """Two loops, one after the other."""
    loop = """{y} = Loop(n, go, {x}) <body = {y}step (int64 i, bool c{y}, float[1,8] s{y}) =>
        (bool d{y}, float[1,8] t{y}) {{
            d{y} = Identity(c{y}) {update}
        }}>"""
    update = update.replace("@", "{y}")
    body = [loop.format(x=x, y=y, update=update.format(y=y)) for x, y in ("xa", "ab")]
    return graphs.graph(f"""g (float[1,8] x, float[8,8] w) => (float[1,8] b)
        <int64 n = {{100}}, bool go = {{1}}, float k = {{0.002}}> {{ {body[0]} {body[1]} }}""")


@values
def test_loops(update: str, rules: set[str]) -> None:
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    data = [{"x": rng.standard_normal((1, 8)).astype("f"), "w": (0.5 * turn).astype("f")}]
    result = rewriter.fix(loops(update), inputs=data, **OPTIONS)
    assert result.verified and {d.rule for d in result.decisions} == rules


def test_a_search_sees_a_state_that_nothing_reads() -> None:
    """The state of a Scan turns by angles of up to 200, and its outputs feed a network that needs no FP32."""
    model = graphs.graph("""g (float[200,1,4] x, float[4,64] w, float[64,64] v) => (float[200,1,64] y)
        <float[1,4] s = {0,0,0,0}, float gain = {13.2}, float half = {0.5}> {
            last, turned = Scan <num_scan_inputs = 1, body = step (float[1,4] h, float[1,4] a) =>
                (float[1,4] n, float[1,4] o) {
                    z = Mul(a, gain) p = Sin(z) q = Mul(h, half) n = Add(p, q) o = Tanh(a)
                }>(s, x)
            a = MatMul(turned, w) b = Relu(a) c = MatMul(b, v) d = Relu(c) y = MatMul(d, v)
        }""")
    rng = np.random.default_rng(0)
    sizes = {"x": (4.0, (200, 1, 4)), "w": (0.5, (4, 64)), "v": (0.125, (64, 64))}
    data = [{n: (s * rng.standard_normal(shape)).astype("f") for n, (s, shape) in sizes.items()}]
    result = rewriter.fix(model, inputs=data, build=False)
    assert result.plan is not None and result.verified
    assert "tolerance" in {decision.rule for decision in result.decisions}
    assert len(result.plan.fp32) < result.plan.float_nodes
