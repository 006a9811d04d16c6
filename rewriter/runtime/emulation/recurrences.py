"""LSTM, GRU and RNN taken apart into Scans, whose tensors can be rounded and measured like any other's.

TensorRT computes a recurrent operator of FP16 tensors as its steps: states, sums of gates, activations and
products are FP16 (one H200, TensorRT-RTX 1.6.1: bit-equal over 3,000 steps of counters and slow GRUs).
ONNX Runtime keeps them in FP32 inside the operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.graph import attribute, display_name
from rewriter.ir.graph.casts import LOWER
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.graph.ops import RECURRENT
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import replace_items
from rewriter.ir.model.schemas import NUMPY_TYPES
from rewriter.ir.model.tensors import TensorFacts

PREFIX = "rewriter/step/"
"""Prefix of the tensors of recurrences that are taken apart."""

STEP = f"{PREFIX}body"
"""Name of the bodies, whose products sum in FP32: FP16 sums would need a Loop in each step."""

FIRST_OPSET = 11
"""Scan has had no batch axis since 9; Range, which sequence lengths need, is of 11."""

MOST_STEPS = 20_000
"""Longest sequence that is taken apart, in steps, where the length is known: a step costs 20 to 100 us."""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
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

PLAIN = ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")


@dataclass(frozen=True)
class Activation:
    """An activation of a gate; `parameters` are its alpha and beta."""

    name: str
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class StateOfSteps:
    """One state of one direction: before the first step [batch, hidden], after each, and after the last."""

    initial: str
    steps: str
    last: str


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
    """True for a recurrent operator of one of the types."""
    x = tensors.get(node.input[0]) if node.op_type in RECURRENT else None
    return x is not None and x.dtype in types


def _activations(node: NodeProto) -> list[list[Activation]]:
    """The activations of each direction; parameters are consumed in order by those that have them."""
    defaults = DEFAULTS[node.op_type]
    stated = [name.decode() for name in attribute(node, "activations", ())]
    names = stated or [*defaults] * _directions(node)
    known = {name.lower(): name for name in (*PARAMETERS, *PLAIN)}
    alphas, betas = (iter(attribute(node, f"activation_{p}", ())) for p in ("alpha", "beta"))
    found = []
    for written in names:
        name = str(known.get(written.lower(), written))
        own = zip(PARAMETERS.get(name, ()), (alphas, betas), strict=False)
        found.append(Activation(name, tuple(float(next(values, default)) for default, values in own)))
    return [found[start : start + len(defaults)] for start in range(0, len(found), len(defaults))]


def _directions(node: NodeProto) -> int:
    return 2 if attribute(node, "direction", "forward") == "bidirectional" else 1


class Recurrence:
    """A recurrent operator, step by step.

    Args:
        emit: Takes the nodes. `dtype`: the float type of the operator's tensors.
    """

    def __init__(self, emit: NodeList, node: NodeProto, dtype: int) -> None:
        self.emit, self.node, self.dtype = emit, node, dtype
        self.hidden = attribute(node, "hidden_size")
        self.batch_first = bool(attribute(node, "layout", 0))
        self.lengths = optional_input(node, 4)
        self.x = self._turned(node.input[0], [1, 0, 2])

    def replace(self) -> None:
        """Adds the nodes that compute all outputs of the operator under their names."""
        directions = self.directions()
        sizes = [0, 1, -1, self.hidden]
        parts = [[self._shaped(d[0].steps, sizes) for d in directions]]
        parts += [
            [self._shaped(s.last, sizes[1:]) for s in states] for states in zip(*directions, strict=True)
        ]
        for index, name in enumerate(self.node.output):
            if name:
                order = [2, 0, 1, 3] if index == 0 else [1, 0, 2]
                out = self.emit.add("Concat", parts[index], axis=int(index == 0))
                last = self._turned(out, order)
                self.emit.nodes.append(helper.make_node("Identity", [last], [name], name=f"{PREFIX}{name}"))

    def directions(self) -> list[tuple[StateOfSteps, ...]]:
        """The states of each direction, in the order of its steps: h, and c of an LSTM."""
        backwards = attribute(self.node, "direction", "forward") == "reverse"
        activations = _activations(self.node)
        return [
            self._direction(d, backwards or d == 1, activations[d]) for d in range(_directions(self.node))
        ]

    def _direction(
        self, index: int, backwards: bool, activations: Sequence[Activation]
    ) -> tuple[StateOfSteps, ...]:
        op, emit = self.node.op_type, self.emit
        w, r = (emit.add("Transpose", [self._own(n, index)], perm=[1, 0]) for n in (1, 2))
        bias = self._bias(index)
        x = emit.add("MatMul", [self.x, w])
        if bias and not (op == "GRU" and attribute(self.node, "linear_before_reset", 0)):
            x = emit.add("Add", [x, emit.add("Add", bias)])
        elif bias:
            x = emit.add("Add", [x, bias[0]])
        states = [self._initial(5 + n, index) for n in range(1 + (op == "LSTM"))]
        step = _Step(self, r, bias, self._peepholes(index), activations)
        return step.scan(x, states, backwards)

    def _own(self, number: int, index: int) -> str:
        return self.emit.add("Gather", [self.node.input[number], self.emit.constant(index, np.int64)], axis=0)

    def _bias(self, index: int) -> list[str]:
        """The biases of the input's and of the state's products."""
        return self._parts(self._own(3, index), 2, 0) if optional_input(self.node, 3) else []

    def _peepholes(self, index: int) -> list[str]:
        """The peephole weights of the gates i, o and f."""
        lstm = self.node.op_type == "LSTM" and optional_input(self.node, 7)
        return self._parts(self._own(7, index), 3, 0) if lstm else []

    def _initial(self, number: int, index: int) -> str:
        if name := optional_input(self.node, number):
            axis = int(self.batch_first)
            return self.emit.add("Gather", [name, self.emit.constant(index, np.int64)], axis=axis)
        batch = self.emit.add("Gather", [self.emit.add("Shape", [self.x]), self.emit.constant([1], np.int64)])
        sizes = self.emit.add("Concat", [batch, self.emit.constant([self.hidden], np.int64)], axis=0)
        zero = helper.make_tensor("zero", self.dtype, [1], [0.0])
        return self.emit.add("ConstantOfShape", [sizes], value=zero)

    def _parts(self, tensor: str, count: int, axis: int, emit: NodeList | None = None) -> list[str]:
        """The equal parts of a tensor along an axis."""
        emit = emit or self.emit
        extra: dict[str, Any] = {"num_outputs": count} if emit.opset >= 18 else {}
        names = [next(emit.names) for _ in range(count)]
        emit.nodes.append(helper.make_node("Split", [tensor], names, name=names[0], axis=axis, **extra))
        return names

    def _turned(self, tensor: str, order: Sequence[int]) -> str:
        return self.emit.add("Transpose", [tensor], perm=order) if self.batch_first else tensor

    def _shaped(self, tensor: str, sizes: Sequence[int]) -> str:
        return self.emit.add("Reshape", [tensor, self.emit.constant(sizes, np.int64)])

    def number(self, value: float) -> str:
        """A constant of the operator's type."""
        return self.emit.constant(value, NUMPY_TYPES[self.dtype].type)


class _Step:
    """One step of one direction, as the body of a Scan; `r` is the transposed matrix of the state."""

    def __init__(
        self,
        recurrence: Recurrence,
        r: str,
        bias: Sequence[str],
        peepholes: Sequence[str],
        activations: Sequence[Activation],
    ) -> None:
        self.owner, self.node = recurrence, recurrence.node
        self.r, self.bias, self.peepholes, self.activations = r, bias, peepholes, activations
        self.emit = NodeList(recurrence.emit.names, recurrence.emit.opset, [])
        clip = attribute(self.node, "clip", 0.0)
        self.clip = [recurrence.number(-clip), recurrence.number(clip)] if clip else []
        self.one = recurrence.number(1.0)

    def scan(self, x: str, states: Sequence[str], backwards: bool) -> tuple[StateOfSteps, ...]:
        """Adds the Scan over the sequence [steps, batch, gates]."""
        emit, outer, dtype = self.emit, self.owner.emit, self.owner.dtype
        before = [next(emit.names) for _ in states]
        inputs, values = [x], [next(emit.names)]
        step: dict[str, Callable[..., list[str]]] = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}
        after = step[self.node.op_type](values[0], *before)
        steps = list(after)
        types = [dtype]
        if self.owner.lengths:
            start, delta = outer.constant(0, np.int32), outer.constant(1, np.int32)
            shape = outer.add("Shape", [x])
            count = outer.add("Gather", [shape, outer.constant(0, np.int64)])
            end = outer.add("Cast", [count], to=TensorProto.INT32)
            inputs.append(outer.add("Range", [start, end, delta]))
            values.append(next(emit.names))
            types.append(TensorProto.INT32)
            column = outer.add("Reshape", [self.owner.lengths, outer.constant([-1, 1], np.int64)])
            goes_on, zero = emit.add("Less", [values[1], column]), self.owner.number(0.0)
            steps = [emit.add("Where", [goes_on, new, zero]) for new in after]
            after = [emit.add("Where", [goes_on, *pair]) for pair in zip(after, before, strict=True)]
        steps, after = ([emit.add("Identity", [name]) for name in names] for names in (steps, after))
        state = partial(helper.make_tensor_value_info, elem_type=dtype, shape=[None, self.owner.hidden])
        info = [*map(state, before)]
        info += [helper.make_tensor_value_info(n, t, None) for n, t in zip(values, types, strict=True)]
        out = [*map(state, (*after, *steps))]  # ONNX Runtime needs a rank of each
        body = helper.make_graph(list(emit.nodes), STEP, info, out)
        results = [next(emit.names) for _ in out]
        outer.nodes.append(
            helper.make_node(
                "Scan",
                [*states, *inputs],
                results,
                name=results[0],
                body=body,
                num_scan_inputs=len(inputs),
                scan_input_directions=[int(backwards)] * len(inputs),
                scan_output_directions=[int(backwards)] * len(steps),
            )
        )
        last, every = results[: len(states)], results[len(states) :]
        return tuple(itertools.starmap(StateOfSteps, zip(states, every, last, strict=True)))

    def _lstm(self, x: str, h: str, c: str) -> list[str]:
        add = self.emit.add
        gates = add("Add", [x, add("MatMul", [h, self.r])])
        i, o, f, g = self.owner._parts(gates, 4, 1, self.emit)
        if self.peepholes:
            i = add("Add", [i, add("Mul", [self.peepholes[0], c])])
            f = add("Add", [f, add("Mul", [self.peepholes[2], c])])
        i, g = self._act(i, 0), self._act(g, 1)
        coupled = attribute(self.node, "input_forget", 0)
        f = add("Sub", [self.one, i]) if coupled else self._act(f, 0)
        cell = add("Add", [add("Mul", [f, c]), add("Mul", [i, g])])
        if self.peepholes:
            o = add("Add", [o, add("Mul", [self.peepholes[1], cell])])
        return [add("Mul", [self._act(o, 0), self._act(cell, 2, clip=False)]), cell]

    def _gru(self, x: str, h: str) -> list[str]:
        add = self.emit.add
        after_product = attribute(self.node, "linear_before_reset", 0)
        xz, xr, xh = self.owner._parts(x, 3, 1, self.emit)
        hh = rh = ""
        if after_product:
            product = add("MatMul", [h, self.r])
            product = add("Add", [product, self.bias[1]]) if self.bias else product
            hz, hr, hh = self.owner._parts(product, 3, 1, self.emit)
        else:
            rz, rr, rh = self.owner._parts(self.r, 3, 1)
            hz, hr = (add("MatMul", [h, r]) for r in (rz, rr))
        z, r = self._act(add("Add", [xz, hz]), 0), self._act(add("Add", [xr, hr]), 0)
        through = add("Mul", [r, hh]) if after_product else add("MatMul", [add("Mul", [r, h]), rh])
        new = self._act(add("Add", [xh, through]), 1)
        return [add("Add", [add("Mul", [add("Sub", [self.one, z]), new]), add("Mul", [z, h])])]

    def _rnn(self, x: str, h: str) -> list[str]:
        return [self._act(self.emit.add("Add", [x, self.emit.add("MatMul", [h, self.r])]), 0)]

    def _act(self, tensor: str, index: int, *, clip: bool = True) -> str:
        """An activation of a clipped tensor."""
        add, activation = self.emit.add, self.activations[index]
        if self.clip and clip:
            tensor = add("Min", [add("Max", [tensor, self.clip[0]]), self.clip[1]])
        if activation.name == "Affine":
            alpha, beta = map(self.owner.number, activation.parameters)
            return add("Add", [add("Mul", [tensor, alpha]), beta])
        if activation.name == "ScaledTanh":
            alpha, beta = map(self.owner.number, activation.parameters)
            return add("Mul", [alpha, add("Tanh", [add("Mul", [tensor, beta])])])
        given = dict(zip(("alpha", "beta"), activation.parameters, strict=False))
        return add(activation.name, [tensor], **given)
