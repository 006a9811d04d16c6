"""LSTM, GRU and RNN taken apart into Scans, whose tensors can be rounded and measured like any other's.

TensorRT computes a recurrent operator of FP16 tensors as its steps: states, sums of gates, activations and
products are FP16 (one H200, TensorRT-RTX 1.6.1: bit-equal over 3,000 steps of counters and slow GRUs).
ONNX Runtime keeps them in FP32 inside the operator.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.graph import attribute, display_name
from rewriter.ir.graph.casts import LOWER
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.graph.ops import RECURRENT
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import replace_items
from rewriter.ir.model.schemas import NUMPY_TYPES
from rewriter.ir.model.tensors import TensorFacts

PREFIX = "rewriter/step/"  # prefix of the tensors of recurrences that are taken apart

STEP = f"{PREFIX}body"
"""Name of the bodies, whose products sum in FP32: FP16 sums would need a Loop in each step."""

FIRST_OPSET = 11  # Scan has had no batch axis since 9; Range, which sequence lengths need, is of 11

MOST_STEPS = 20_000
"""Longest sequence that is taken apart, in steps, where the length is known: a step costs 20 to 100 us."""

DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}

PARAMETERS = {
    "Affine": (math.nan, math.nan),
    "LeakyRelu": (0.01,),
    "ThresholdedRelu": (math.nan,),
    "ScaledTanh": (math.nan, math.nan),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0,),
}
"""Defaults of alpha, or of alpha and beta, by activation; NaN where ONNX Runtime's is not ONNX's."""

WRITTEN = {
    "Affine": "{t} = Add(Mul({t}, {a}), {b}) ",
    "ScaledTanh": "{t} = Mul({a}, Tanh(Mul({t}, {b}))) ",
}
"""Activations that are no operators."""

INPUTS = ("x", "w", "r", "b", "lengths", "h", "c", "p")

COUNTED = """at = Cast<to = 6>(Range(0, Gather(Shape(x), 0), 1))  column = Reshape(lengths, [-1, 1]) """
"""The number of each step, and the lengths of the sequences as a column."""

PLAIN = ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")


@dataclass(frozen=True)
class Activation:
    """An activation of a gate; `parameters` are its alpha and beta."""

    name: str
    parameters: tuple[float, ...] = ()


def whole(node: NodeProto, tensors: Mapping[str, TensorFacts], opset: int) -> str | None:
    """The reason why a recurrent operator is not taken apart; None if it can be."""
    x = tensors.get(node.input[0])
    steps = x.shape[attribute(node, "layout", 0)] if x is not None and x.shape else None
    if opset < FIRST_OPSET:
        return f"opset {opset} has no Scan for it (from {FIRST_OPSET} on)"
    if not attribute(node, "hidden_size", 0):
        return "it has no hidden_size"
    if isinstance(steps, int) and steps > MOST_STEPS:
        return f"{steps} steps take too long one by one (more than {MOST_STEPS})"
    for activation in itertools.chain.from_iterable(_activations(node)):
        if activation.name not in {*PARAMETERS, *PLAIN}:
            return f"its activation {activation.name} is not known"
        if any(map(math.isnan, activation.parameters)):
            return f"its activation {activation.name} has no alpha or beta, and defaults differ"
    return None


def kept_whole(model: Model) -> Iterator[str]:
    """The recurrent operators in a lower type that are not taken apart, each with the reason."""
    facts = model.facts()
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        tensors = facts.main | facts.scopes[scope]
        for node in graph.node:
            if _has(node, tensors, LOWER) and (reason := whole(node, tensors, model.opset)):
                yield f"{display_name(node)}: {reason}"


def take_apart(model: Model, types: AbstractSet[int] = LOWER) -> Model:
    """`model` with its recurrent operators of these float types as Scans; itself if it has none."""
    if not any(node.op_type in RECURRENT for node in walk_nodes(model.proto.graph)):
        return model
    facts, result, found = model.facts(), model.copy(), False
    names = map(f"{PREFIX}{{}}".format, itertools.count())
    for scope, graph in enumerate(list(walk_graphs(result.proto.graph))):
        tensors, nodes = facts.main | facts.scopes[scope], list[NodeProto]()
        for node in graph.node:
            if _has(node, tensors, types) and whole(node, tensors, model.opset) is None:
                found = True
                Recurrence(NodeList(names, model.opset, nodes), node, tensors[node.input[0]].dtype).replace()
            else:
                nodes.append(node)
        replace_items(graph.node, nodes)
    result.mark_edited()
    return result if found else model


def _has(node: NodeProto, tensors: Mapping[str, TensorFacts], types: AbstractSet[int]) -> bool:
    x = tensors.get(node.input[0]) if node.op_type in RECURRENT else None
    return x is not None and x.dtype in types


def _activations(node: NodeProto) -> list[list[Activation]]:
    """The activations of each direction; parameters are consumed in order by those that have them."""
    defaults = DEFAULTS[node.op_type]
    stated = [name.decode() for name in attribute(node, "activations", ())]
    both = attribute(node, "direction", "forward") == "bidirectional"
    names = stated or [*defaults] * (1 + both)
    known = {name.lower(): name for name in (*PARAMETERS, *PLAIN)}
    alphas, betas = (iter(attribute(node, f"activation_{p}", ())) for p in ("alpha", "beta"))
    found = []
    for written in names:
        name = str(known.get(written.lower(), written))
        own = zip(PARAMETERS.get(name, ()), (alphas, betas), strict=False)
        found.append(Activation(name, tuple(float(next(values, default)) for default, values in own)))
    return [found[start : start + len(defaults)] for start in range(0, len(found), len(defaults))]


States = list[tuple[str, str]]
"""The states of one direction, h and the c of an LSTM: after each step, and after the last."""


class Recurrence:
    """A recurrent operator of tensors of the float type `dtype`, step by step; `emit` takes its nodes."""

    def __init__(self, emit: NodeList, node: NodeProto, dtype: int) -> None:
        self.emit, self.node, self.dtype = emit, node, dtype
        self.hidden = attribute(node, "hidden_size")
        self.batch_first = bool(attribute(node, "layout", 0))
        self.states = ("h", "c") if node.op_type == "LSTM" else ("h",)
        self.inputs: dict[str, str] = dict(zip(INPUTS, node.input, strict=False))
        clip = attribute(node, "clip", 0.0)
        self.clips = bool(clip)
        self.numbers = {"one": self._number(1.0), "zero": self._number(0.0)}
        self.numbers |= {"low": self._number(-clip), "high": self._number(clip)} if clip else {}

    def replace(self) -> None:
        """Adds the nodes that compute all outputs of the operator under their names."""
        directions = self.directions()
        tensors = [[steps for (steps, _), *_ in directions]]
        tensors += [[last for _, last in states] for states in zip(*directions, strict=True)]
        for index, name in enumerate(self.node.output):
            if name:
                sizes = [0, 1, -1, self.hidden][bool(index) :]
                shape = self.emit.constant(sizes, np.int64)
                parts = [self.emit.add("Reshape", [tensor, shape]) for tensor in tensors[index]]
                out = self.emit.add("Concat", parts, axis=int(index == 0))
                if self.batch_first:
                    out = self.emit.add("Transpose", [out], perm=[1, 0, 2] if index else [2, 0, 1, 3])
                own = next(self.emit.names)
                self.emit.nodes.append(helper.make_node("Identity", [out], [name], name=own))

    def directions(self) -> list[States]:
        backwards = attribute(self.node, "direction", "forward") == "reverse"
        activations = enumerate(_activations(self.node))
        return [self._direction(d, backwards or d == 1, own) for d, own in activations]

    def _direction(self, index: int, backwards: bool, own: Sequence[Activation]) -> States:
        text = "x = Transpose<perm = [1, 0, 2]>(x) " if self.batch_first else ""
        text += """x = MatMul(x, Transpose<perm = [1, 0]>(Gather<axis = 0>(w, i)))
            r = Transpose<perm = [1, 0]>(Gather<axis = 0>(r, i)) """
        if self._has("b"):
            text += f"b = Gather<axis = 0>(b, i)  {self._split('b, rb', 'b', 0)}"
            apart = self.node.op_type == "GRU" and attribute(self.node, "linear_before_reset", 0)
            text += "x = Add(x, b) " if apart else "x = Add(x, Add(b, rb)) "
        if self.node.op_type == "GRU" and not attribute(self.node, "linear_before_reset", 0):
            text += self._split("rz, rr, rh", "r", 1)
        if self._peeps():
            text += f"p = Gather<axis = 0>(p, i)  {self._split('pi, po, pf', 'p', 0)}"
        for state in self.states:
            if self._has(state):
                text += f"{state} = Gather<axis = {int(self.batch_first)}>({state}, i) "
            else:
                text += f"n = Concat<axis = 0>(Gather(Shape(x), [1]), [{self.hidden}]) "
                text += f"{state} = Cast<to = {self.dtype}>(ConstantOfShape(n)) "
        names = self.emit.write(text, i=self.emit.constant(index, np.int64), **self.inputs, **self.numbers)
        return self._scan(names, backwards, own)

    def _scan(self, names: dict[str, str], backwards: bool, own: Sequence[Activation]) -> States:
        """Adds the Scan over the sequence x of [steps, batch, gates]."""
        outer, inner = self.emit, NodeList(self.emit.names, self.emit.opset, [])
        before = {s: next(outer.names) for s in self.states}
        sequences, types = {"x": names["x"]}, [self.dtype]
        if self._has("lengths"):
            names = outer.write(COUNTED, **names)
            sequences["at"] = names["at"]
            types.append(TensorProto.INT32)
        values = {name: next(outer.names) for name in sequences}
        gates = {"LSTM": self._lstm, "GRU": self._gru}.get(self.node.op_type)
        text = gates(own) if gates else f"h = Add(x, MatMul(h, r)) {self._act('h', own[0])}"
        for s in self.states:
            text += f"{s}t = Identity({s}) "
            if self._has("lengths"):
                text += f"on = Less(at, column)  {s}t = Where(on, {s}, zero)  {s} = Where(on, {s}, {s}0) "
            text += f"{s} = Identity({s}) "
        zeroth = {f"{s}0": name for s, name in before.items()}
        inside = inner.write(text, **{**names, **self.numbers, **before, **zeroth, **values})
        ends = [inside[s] for s in (*self.states, *(f"{s}t" for s in self.states))]
        state = partial(helper.make_tensor_value_info, elem_type=self.dtype, shape=[None, self.hidden])
        reads = zip(values.values(), types, strict=True)
        info = [*map(state, before.values()), *(helper.make_tensor_value_info(n, d, None) for n, d in reads)]
        body = helper.make_graph(inner.nodes, STEP, info, [*map(state, ends)])  # the ranks are needed
        inputs, results = [names[s] for s in self.states], [next(outer.names) for _ in ends]
        attributes: dict[str, Any] = {
            "num_scan_inputs": len(values),
            "scan_input_directions": [int(backwards)] * len(values),
            "scan_output_directions": [int(backwards)] * len(inputs),
        }
        inputs += sequences.values()
        node = helper.make_node("Scan", inputs, results, name=results[0], body=body, **attributes)
        outer.nodes.append(node)
        count = len(self.states)
        return list(zip(results[count:], results[:count], strict=True))

    def _lstm(self, own: Sequence[Activation]) -> str:
        text = f"g = Add(x, MatMul(h, r))  {self._split('i, o, f, g', 'g', 1)}"
        if self._peeps():
            text += "i = Add(i, Mul(pi, c))  f = Add(f, Mul(pf, c)) "
        text += self._act("i", own[0]) + self._act("g", own[1])
        text += "f = Sub(one, i) " if attribute(self.node, "input_forget", 0) else self._act("f", own[0])
        text += "c = Add(Mul(f, c), Mul(i, g))  h = Identity(c) "
        text += "o = Add(o, Mul(po, c)) " if self._peeps() else ""
        return text + self._act("o", own[0]) + self._act("h", own[2], clip=False) + "h = Mul(o, h) "

    def _gru(self, own: Sequence[Activation]) -> str:
        text, after_product = self._split("z, q, n", "x", 1), attribute(self.node, "linear_before_reset", 0)
        if after_product:
            text += "g = MatMul(h, r) " + "g = Add(g, rb) " * self._has("b")
            text += self._split("hz, hr, hn", "g", 1)
        else:
            text += "hz = MatMul(h, rz)  hr = MatMul(h, rr) "
        text += f"z = Add(z, hz) {self._act('z', own[0])} q = Add(q, hr) {self._act('q', own[0])}"
        text += f"n = Add(n, {'Mul(q, hn)' if after_product else 'MatMul(Mul(q, h), rh)'}) "
        return text + self._act("n", own[1]) + "h = Add(Mul(Sub(one, z), n), Mul(z, h)) "

    def _act(self, tensor: str, activation: Activation, *, clip: bool = True) -> str:
        t, name, values = tensor, activation.name, activation.parameters
        text = f"{t} = Min(Max({t}, low), high) " if self.clips and clip else ""
        if name in WRITTEN:
            a, b = (f"number{len(self.numbers) + n}" for n in range(2))
            self.numbers |= {a: self._number(values[0]), b: self._number(values[1])}
            return text + WRITTEN[name].format(t=t, a=a, b=b)
        fields = ", ".join(f"{n} = {v:.9e}" for n, v in zip(("alpha", "beta"), values, strict=False))
        return f"{text} {t} = {name}{f'<{fields}>' if fields else ''}({t}) "

    def _has(self, name: str) -> bool:
        return bool(self.inputs.get(name))

    def _peeps(self) -> bool:
        """True for an LSTM whose gates read the cell, too."""
        return self.node.op_type == "LSTM" and self._has("p")

    def _split(self, parts: str, tensor: str, axis: int) -> str:
        count = f", num_outputs = {parts.count(',') + 1}" if self.emit.opset >= 18 else ""
        return f"{parts} = Split<axis = {axis}{count}>({tensor}) "

    def _number(self, value: float) -> str:
        return self.emit.constant(value, NUMPY_TYPES[self.dtype].type)
