"""Random valid models, as a hypothesis strategy: what exporters write, in orders that nobody thought of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rewriter.ir.model import Array, Model, load

Draw = st.DrawFn

SMOOTH = ("Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "Identity", "Softplus", "HardSigmoid", "LeakyRelu")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
MOST_ELEMENTS = 4096


@dataclass
class Writer:
    """A graph that grows by one step at a time. `shapes` has every FP32 tensor that a step may read."""

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def name(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def weight(self, shape: tuple[int, ...], scale: float = 1.0, *, positive: bool = False) -> str:
        value = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return self.constant(np.abs(value) + np.float32(0.1 * scale) if positive else value)

    def constant(self, value: Array | np.floating[Any]) -> str:
        """An initializer or, for every second one, a Constant node."""
        name = self.name("w")
        tensor = numpy_helper.from_array(np.asarray(value), name)
        if self.count % 2:
            self.initializers.append(tensor)
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        name = self.name()
        self.nodes.append(helper.make_node(operator, inputs, [name], f"n/{name}", **attributes))
        return name

    def keep(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape


Step = Callable[[Draw, Writer, str], None]


def _unary(draw: Draw, graph: Writer, x: str) -> None:
    graph.keep(graph.node(draw(st.sampled_from(SMOOTH)), [x]), graph.shapes[x])


def _with_constant(draw: Draw, graph: Writer, x: str) -> None:
    """A scalar, a vector or a whole tensor on either side."""
    shape = graph.shapes[x]
    cut = draw(st.integers(0, len(shape)))
    scale = draw(st.sampled_from((1e-3, 0.5, 1.0, 30.0)))
    operands = [x, graph.weight(shape[cut:], scale)]
    operator = draw(st.sampled_from(BINARY))
    if operator != "Sub" and draw(st.booleans()):
        operands.reverse()
    graph.keep(graph.node(operator, operands), shape)


def _divided(draw: Draw, graph: Writer, x: str) -> None:
    scale = draw(st.sampled_from((1e-2, 1.0, 64.0)))
    graph.keep(graph.node("Div", [x, graph.weight((), scale, positive=True)]), graph.shapes[x])


def _two(draw: Draw, graph: Writer, x: str) -> None:
    """Two tensors of one shape: a residual, a gate."""
    same = [name for name, shape in graph.shapes.items() if shape == graph.shapes[x]]
    graph.keep(graph.node(draw(st.sampled_from(BINARY)), [x, draw(st.sampled_from(same))]), graph.shapes[x])


def _product(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if not shape:
        return
    width = draw(st.sampled_from((1, 3, 4, 8)))
    made = graph.node("MatMul", [x, graph.weight((shape[-1], width), 1 / math.sqrt(shape[-1]))])
    if draw(st.booleans()):
        made = graph.node("Add", [made, graph.weight((width,))])
    graph.keep(made, (*shape[:-1], width))


def _branches(draw: Draw, graph: Writer, x: str) -> None:
    """Projections of one tensor, as queries, keys and values are."""
    for _ in range(draw(st.integers(2, 3))):
        _product(draw, graph, x)


def _gemm(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if len(shape) != 2:
        return
    turned, width = draw(st.booleans()), draw(st.sampled_from((2, 4)))
    weight = graph.weight((width, shape[1]) if turned else (shape[1], width), 0.5)
    made = graph.node("Gemm", [x, weight, graph.weight((width,))], transB=int(turned))
    graph.keep(made, (shape[0], width))


def _conv(draw: Draw, graph: Writer, x: str) -> None:
    """A convolution, perhaps with a normalisation and an activation."""
    shape = graph.shapes[x]
    if len(shape) != 4:
        return
    kernel, width = draw(st.sampled_from((1, 3))), draw(st.sampled_from((2, 4)))
    weight = graph.weight((width, shape[1], kernel, kernel), 1 / math.sqrt(shape[1] * kernel**2))
    made = graph.node("Conv", [x, weight], pads=[kernel // 2] * 4, kernel_shape=[kernel, kernel])
    if draw(st.booleans()):
        scale, bias, mean = (graph.weight((width,)) for _ in range(3))
        made = graph.node(
            "BatchNormalization", [made, scale, bias, mean, graph.weight((width,), positive=True)]
        )
    if draw(st.booleans()):
        made = graph.node("Mul", [made, graph.node("Sigmoid", [made])])
    graph.keep(made, (shape[0], width, *shape[2:]))


def _normalised(draw: Draw, graph: Writer, x: str) -> None:
    """A LayerNorm or an RMSNorm in single operators."""
    shape = graph.shapes[x]
    if not shape or shape[-1] < 2:
        return
    centred = x
    if draw(st.booleans()):
        centred = graph.node("Sub", [x, graph.node("ReduceMean", [x], axes=[-1])])
    square = (
        graph.node("Pow", [centred, graph.constant(np.float32(2))])
        if draw(st.booleans())
        else graph.node("Mul", [centred, centred])
    )
    variance = graph.node("ReduceMean", [square], axes=[-1])
    eps = graph.constant(np.float32(draw(st.sampled_from((1e-5, 1e-3)))))
    deviation = graph.node("Sqrt", [graph.node("Add", [variance, eps])])
    made = graph.node("Div", [centred, deviation])
    if draw(st.booleans()):
        made = graph.node("Mul", [made, graph.weight((shape[-1],))])
    if draw(st.booleans()):
        made = graph.node("Add", [made, graph.weight((shape[-1],))])
    graph.keep(made, shape)


def _attention(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if len(shape) != 3:
        return
    width = shape[-1]
    query, key, value = (graph.node("MatMul", [x, graph.weight((width, width), 0.5)]) for _ in range(3))
    scores = graph.node("MatMul", [query, graph.node("Transpose", [key], perm=[0, 2, 1])])
    factor = graph.constant(np.float32(1 / math.sqrt(width)))
    scores = graph.node(draw(st.sampled_from(("Mul", "Div"))), [scores, factor])
    if draw(st.booleans()):
        mask = np.triu(np.full((shape[1], shape[1]), draw(st.sampled_from((-1e4, -1e9, -3.4e38)))), 1)
        scores = graph.node("Add", [scores, graph.constant(mask.astype(np.float32))])
    graph.keep(graph.node("MatMul", [graph.node("Softmax", [scores], axis=-1), value]), shape)


def _reduced(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if not shape:
        return
    axis, keep = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 1))
    operator = draw(st.sampled_from(("ReduceMean", "ReduceMax", "ReduceL2")))
    left = (*shape[:axis], *((1,) if keep else ()), *shape[axis + 1 :])
    graph.keep(graph.node(operator, [x], axes=[axis], keepdims=keep), left)


def _moved(draw: Draw, graph: Writer, x: str) -> None:
    """A Transpose, often with its opposite after it."""
    shape = graph.shapes[x]
    order = draw(st.permutations(range(len(shape))))
    if not order:
        return
    made = graph.node("Transpose", [x], perm=list(order))
    graph.keep(made, tuple(shape[i] for i in order))
    if draw(st.booleans()):
        graph.keep(graph.node("Transpose", [made], perm=[order.index(i) for i in range(len(order))]), shape)


def _reshaped(draw: Draw, graph: Writer, x: str) -> None:
    size = math.prod(graph.shapes[x])
    halves = [(size,), (1, size), *(((2, size // 2), (size // 2, 2)) if size % 2 == 0 else ())]
    shape = draw(st.sampled_from(halves))
    graph.keep(graph.node("Reshape", [x, graph.constant(np.array(shape, np.int64))]), shape)


def _joined(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if not shape:
        return
    axis = draw(st.integers(0, len(shape) - 1))
    made = graph.node("Concat", [x, x], axis=axis)
    graph.keep(made, (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]))


def _split(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    axes = [axis for axis, size in enumerate(shape) if size % 2 == 0]
    if not axes:
        return
    axis = draw(st.sampled_from(axes))
    size = shape[axis] // 2
    halves = [graph.name(), graph.name()]
    sizes = graph.constant(np.array([size, size], np.int64))
    graph.nodes.append(helper.make_node("Split", [x, sizes], halves, f"n/{halves[0]}", axis=axis))
    for half in halves:
        graph.keep(half, (*shape[:axis], size, *shape[axis + 1 :]))


def _cast(draw: Draw, graph: Writer, x: str) -> None:
    """There and back: through FP64 it changes nothing, through FP16 it rounds on purpose."""
    kind = draw(st.sampled_from((TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT)))
    there = graph.node("Cast", [x], to=kind)
    graph.keep(graph.node("Cast", [there], to=TensorProto.FLOAT), graph.shapes[x])


def _clipped(draw: Draw, graph: Writer, x: str) -> None:
    low, high = draw(st.sampled_from(((-1.0, 1.0), (0.0, 6.0), (-3.4e38, 5.0))))
    bounds = [graph.constant(np.float32(low)), graph.constant(np.float32(high))]
    graph.keep(graph.node("Clip", [x, *bounds]), graph.shapes[x])


def _resized(draw: Draw, graph: Writer, x: str) -> None:
    shape = graph.shapes[x]
    if len(shape) != 4:
        return
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    mode = draw(st.sampled_from(("nearest", "linear")))
    graph.keep(graph.node("Resize", [x, "", scales], mode=mode), (*shape[:2], 2 * shape[2], 2 * shape[3]))


def _chosen(draw: Draw, graph: Writer, x: str) -> None:
    """An If whose branches read a tensor of the outer graph."""
    condition = graph.constant(np.array(draw(st.booleans())))
    branches = []
    for operator in draw(st.permutations(("Tanh", "Neg"))):
        name = graph.name("b")
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, graph.shapes[x])
        inner = helper.make_node(operator, [x], [name], f"n/{name}")
        branches.append(helper.make_graph([inner], name, [], [out]))
    made = graph.node("If", [condition], then_branch=branches[0], else_branch=branches[1])
    graph.keep(made, graph.shapes[x])


STEPS: tuple[Step, ...] = (
    _unary,
    _with_constant,
    _divided,
    _two,
    _product,
    _branches,
    _gemm,
    _conv,
    _normalised,
    _attention,
    _reduced,
    _moved,
    _reshaped,
    _joined,
    _split,
    _cast,
    _clipped,
    _resized,
    _chosen,
)
FIRST_SHAPES = ((2, 4), (2, 3, 8), (1, 4, 6, 6), (8,))


@st.composite
def models(draw: Draw, most_steps: int = 10) -> Model:
    """A checked FP32 model of one to two inputs with static shapes and opset 17, without random operators.

    Every tensor that nothing reads is an output, so that no node is without effect.
    """
    graph = Writer(draw(st.integers(0, 2**16)))
    inputs = draw(st.lists(st.sampled_from(FIRST_SHAPES), min_size=1, max_size=2))
    ports = []
    for number, shape in enumerate(inputs):
        graph.keep(f"x{number}", shape)
        ports.append(helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, shape))
    for _ in range(draw(st.integers(1, most_steps))):
        small = [name for name, shape in graph.shapes.items() if math.prod(shape) <= MOST_ELEMENTS]
        draw(st.sampled_from(STEPS))(draw, graph, draw(st.sampled_from(small)))
    return load(_finished(graph, ports))


def _finished(graph: Writer, ports: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    read = {name for node in graph.nodes for name in node.input}
    made = [name for name in graph.shapes if not name.startswith("x")]
    ends = [name for name in made if name not in read]
    if not ends:  # every step declined
        graph.keep(graph.node("Relu", ["x0"]), graph.shapes["x0"])
        ends = [list(graph.shapes)[-1]]
    outputs = [helper.make_tensor_value_info(e, TensorProto.FLOAT, graph.shapes[e]) for e in ends]
    whole = helper.make_graph(graph.nodes, "random", ports, outputs, graph.initializers)
    return helper.make_model(whole, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
