"""Recurrent networks of 500 to 1,500 steps, each as its operator, as a Scan and as a Loop.

    python benchmarks/recurrent_forms.py --networks 21 > forms.json

Draws LSTMs, GRUs and RNNs: ordinary ones, ones with slow states, and counters. `fix` has to end alike on the
three forms, and to repair what plain FP16 gets wrong: NumPy computes that, with each operation rounded.
Prints a table on stderr.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from rewriter.ir.model import Array

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Network:
    """Weights in ONNX's layout: w [1, gates * hidden, inputs], r [1, gates * hidden, hidden], b [1, 2 * ...]."""

    op: str
    kind: str
    w: Array
    r: Array
    b: Array
    reset_first: bool
    x: Array
    head: Array

    @property
    def hidden(self) -> int:
        return int(self.r.shape[2])


@dataclass
class Form:
    name: str
    verified: bool
    error: float
    fp32: int
    nodes: int
    seconds: float


@dataclass
class Result:
    seed: int
    op: str
    kind: str
    steps: int
    plain: float
    forms: list[Form] = field(default_factory=list)


def drawn(seed: int) -> Network:
    rng = np.random.default_rng(seed)
    op, kind = list(GATES)[seed % 3], ("plain", "slow", "count", "plain")[rng.integers(4)]
    inputs, hidden, steps = (int(rng.integers(*ends)) for ends in ((2, 24), (4, 48), (500, 1500)))
    rows = GATES[op] * hidden
    w = rng.normal(0, 1 / np.sqrt(inputs), (1, rows, inputs)).astype(np.float32)
    r = rng.normal(0, 0.6 / np.sqrt(hidden), (1, rows, hidden)).astype(np.float32)
    b = rng.normal(0, 0.1, (1, 2 * rows)).astype(np.float32)
    x = rng.normal(0, 1, (steps, 1, inputs)).astype(np.float32)
    if op == "LSTM":
        b[0, 2 * hidden : 3 * hidden] += {"plain": 1.0, "slow": rng.uniform(5, 9), "count": 11.0}[kind]
        r *= {"plain": 1.0, "slow": 0.2, "count": 0.0}[kind]
        if kind == "count":
            b[0, :hidden] += 6
            b[0, 3 * hidden : 4 * hidden] += rng.uniform(0.3, 1)
    elif kind != "plain" and op == "GRU":
        b[0, :hidden] += rng.uniform(4, 7)
        w[:, :hidden] *= 0.1
        r *= 0.2
    elif kind != "plain":
        r = (np.eye(hidden) * rng.uniform(0.99, 1.0))[None].astype(np.float32)
        w, b = w * np.float32(0.01), b * np.float32(0.001)
    if kind == "count":
        x = np.abs(x)
    head = rng.normal(0, 1 / np.sqrt(hidden), (hidden, 5)).astype(np.float32)
    return Network(op, kind, w, r, b, op == "GRU" and bool(rng.integers(2)), x, head)


def plain_error(net: Network) -> float:
    """Relative L2 error of y where each operation is rounded to FP16; products are summed exactly."""

    def run(q: Callable[[Array], Array]) -> Array:
        def sigmoid(v: Array) -> Array:
            return q(1 / (1 + np.exp(-v.astype(np.float64))))

        def tanh(v: Array) -> Array:
            return q(np.tanh(v.astype(np.float64)))

        rows, n = net.r.shape[1], net.hidden
        w, r, bw, br = q(net.w[0].T), q(net.r[0].T), q(net.b[0, :rows]), q(net.b[0, rows:])
        h, c, outputs = np.zeros((1, n)), np.zeros((1, n)), []
        for frame in net.x:
            given = q(q(q(frame) @ w) + bw)
            if net.op == "RNN":
                h = tanh(q(given + q(q(h @ r) + br)))
            elif net.op == "LSTM":
                i, o, f, g = np.split(q(given + q(q(h @ r) + br)), 4, 1)
                c = q(q(sigmoid(f) * c) + q(sigmoid(i) * tanh(g)))
                h = q(sigmoid(o) * tanh(c))
            else:
                xz, xr, xh = np.split(given, 3, 1)
                kept = q(q(h @ r[:, : 2 * n]) + br[: 2 * n])
                z, reset = sigmoid(q(xz + kept[:, :n])), sigmoid(q(xr + kept[:, n:]))
                inner = h if net.reset_first else q(reset * h)
                new = q(q(inner @ r[:, 2 * n :]) + br[2 * n :])
                g = tanh(q(xh + (q(reset * new) if net.reset_first else new)))
                h = q(q(q(1 - z) * g) + q(z * h))
            outputs.append(h)
        return np.concatenate(outputs) @ net.head.astype(np.float64)

    exact = run(lambda v: v.astype(np.float64))
    low = run(lambda v: v.astype(np.float16).astype(np.float64))
    return float(np.linalg.norm(low - exact) / np.linalg.norm(exact))


def operator(net: Network) -> onnx.ModelProto:
    """The network as one LSTM, GRU or RNN."""
    states = ["h_last", "c_last"] if net.op == "LSTM" else ["h_last"]
    reset: dict[str, Any] = {"linear_before_reset": 1} if net.reset_first else {}
    nodes = [
        helper.make_node(
            net.op, ["x", "w", "r", "b"], ["Y", *states], "rec", hidden_size=net.hidden, **reset
        ),
        helper.make_node("Squeeze", ["Y", "one"], ["rows"]),
        helper.make_node("MatMul", ["rows", "head"], ["y"], "head"),
    ]
    weights = {"w": net.w, "r": net.r, "b": net.b, "one": np.array([1]), "head": net.head}
    return _model(net, nodes, weights, states)


def _step(net: Network) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """One step: from `frame`, `h` and `c` to `h_new`, `c_new` and `row`."""
    nodes, n, rows = list[onnx.NodeProto](), net.hidden, net.r.shape[1]
    weights: dict[str, Array] = {
        "wt": net.w[0].T.copy(),
        "bw": net.b[0, :rows],
        "parts": np.array([n] * GATES[net.op]),
    }

    def add(op: str, inputs: str, outputs: str, **attributes: Any) -> None:
        names = outputs.split()
        nodes.append(helper.make_node(op, inputs.split(), names, f"step_{names[0]}", **attributes))

    add("MatMul", "frame wt", "xw")
    add("Add", "xw bw", "given")
    if net.op == "GRU":
        weights |= {"rz": net.r[0].T[:, : 2 * n].copy(), "rh": net.r[0].T[:, 2 * n :].copy()}
        weights |= {"bz": net.b[0, rows : rows + 2 * n], "bh": net.b[0, rows + 2 * n :]}
        weights |= {"halves": np.array([n, n]), "all": np.ones((), np.float32)}
        add("Split", "given parts", "xz xr xh", axis=1)
        add("MatMul", "h rz", "hz0")
        add("Add", "hz0 bz", "hz1")
        add("Split", "hz1 halves", "hz hr", axis=1)
        add("Add", "xz hz", "z0")
        add("Sigmoid", "z0", "z")
        add("Add", "xr hr", "r0")
        add("Sigmoid", "r0", "reset")
        if net.reset_first:
            add("MatMul", "h rh", "n0")
            add("Add", "n0 bh", "n1")
            add("Mul", "reset n1", "n2")
        else:
            add("Mul", "reset h", "n0")
            add("MatMul", "n0 rh", "n1")
            add("Add", "n1 bh", "n2")
        add("Add", "xh n2", "g0")
        add("Tanh", "g0", "g")
        add("Sub", "all z", "share")
        add("Mul", "share g", "new")
        add("Mul", "z h", "old")
        add("Add", "new old", "h_new")
    else:
        weights |= {"rt": net.r[0].T.copy(), "br": net.b[0, rows:]}
        add("MatMul", "h rt", "hr0")
        add("Add", "hr0 br", "hr")
        add("Add", "given hr", "s")
        if net.op == "RNN":
            add("Tanh", "s", "h_new")
        else:
            add("Split", "s parts", "i o f g", axis=1)
            for gate in "iof":
                add("Sigmoid", gate, f"{gate}_s")
            add("Tanh", "g", "g_t")
            add("Mul", "f_s c", "kept")
            add("Mul", "i_s g_t", "new")
            add("Add", "kept new", "c_new")
            add("Tanh", "c_new", "c_t")
            add("Mul", "o_s c_t", "h_new")
    add("Identity", "h_new", "row")
    return nodes, weights


def looped(net: Network, op: str) -> onnx.ModelProto:
    """The network as a Scan or a Loop."""
    nodes, weights = _step(net)
    states = ["h", "c"] if net.op == "LSTM" else ["h"]
    carried = [_float(name, [1, net.hidden]) for name in states]
    results = [_float(f"{name}_new", [1, net.hidden]) for name in states]
    row, frame = _float("row", [1, net.hidden]), _float("frame", [1, net.x.shape[2]])
    first, last = [f"{name}_first" for name in states], [f"{name}_end" for name in states]
    if op == "Scan":
        body = helper.make_graph(nodes, "step", [*carried, frame], [*results, row])
        outer = [
            helper.make_node("Scan", [*first, "x"], [*last, "rows"], "scan", num_scan_inputs=1, body=body)
        ]
    else:
        index = helper.make_tensor_value_info("index", TensorProto.INT64, [])
        go, on = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on"))
        taking = [
            helper.make_node("Gather", ["x", "index"], ["frame"], "step_frame", axis=0),
            helper.make_node("Identity", ["go"], ["on"]),
        ]
        body = helper.make_graph([*taking, *nodes], "step", [index, go, *carried], [on, *results, row])
        weights |= {"zero": np.array(0), "true": np.array(True)}
        outer = [
            helper.make_node("Shape", ["x"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "zero"], ["length"]),
            helper.make_node("Loop", ["length", "true", *first], [*last, "rows"], "loop", body=body),
        ]
    outer.append(helper.make_node("MatMul", ["rows", "head"], ["y"], "head"))
    outer += [helper.make_node("Unsqueeze", [f"{n}_end", "axis"], [f"{n}_last"]) for n in states]
    weights |= {name: np.zeros((1, net.hidden), np.float32) for name in first}
    weights |= {"head": net.head, "axis": np.array([0])}
    return _model(net, outer, weights, [f"{name}_last" for name in states])


def _float(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _model(
    net: Network, nodes: list[onnx.NodeProto], weights: dict[str, Array], states: list[str]
) -> onnx.ModelProto:
    outputs = [_float("y", ["steps", 1, 5]), *(_float(name, [1, 1, net.hidden]) for name in states)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", [_float("x", ["steps", 1, net.x.shape[2]])], outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", type=int, default=21)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    request, results = parser.parse_args(), []
    for seed in range(request.first, request.first + request.networks):
        net = drawn(seed)
        result = Result(seed, net.op, net.kind, len(net.x), plain_error(net))
        results.append(result)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(data := Path(folder) / "x.npz", x=net.x)
            for model in (operator(net), looped(net, "Scan"), looped(net, "Loop")):
                onnx.save(model, path := Path(folder) / "net.onnx")
                start = time.perf_counter()
                fixed = rewriter.fix(path, Path(folder) / "fixed.onnx", inputs=data, build=False)
                name = next(n.op_type for n in model.graph.node if n.op_type in (*GATES, "Scan", "Loop"))
                plan, took = fixed.plan, time.perf_counter() - start
                outputs = next((c.outputs for c in reversed(fixed.checks) if c.outputs), ())
                error = max((o.relative_l2 for o in outputs if not o.of), default=0.0)
                nodes = plan.float_nodes if plan is not None else 0
                kept = len(plan.fp32) if plan is not None else -1
                result.forms.append(Form(name, bool(fixed.verified), error, kept, nodes, took))
        forms = "; ".join(f"{f.name} {f.error:.1e} {f.fp32}/{f.nodes} {f.verified}" for f in result.forms)
        print(f"{seed:3d} {net.op:4s} {net.kind:5s} {result.plain:.1e}  {forms}", file=sys.stderr, flush=True)
    json.dump([asdict(result) for result in results], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
