"""Constants that replace weights, nodes that replace products, and the reasons why one cannot be replaced."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper, parser

from rewriter.ir.graph.editor import GraphEditor
from rewriter.ir.graph.match import optional_input, produced, walk_up
from rewriter.ir.graph.node_list import spelled_out
from rewriter.ir.graph.nodes import attribute, constant_value, display_name
from rewriter.ir.graph.view import GraphView
from rewriter.ir.model import Array
from rewriter.ir.model.schemas import EXCHANGEABLE
from rewriter.ir.model.tensors import Shape

ChannelKey = tuple[str, int]
"""A tensor of the main graph, and the axis of its channels as `summed_axes` gives it."""


def is_quantised(graph: GraphView, tensor: str) -> bool:
    """True if `tensor` is a quantised constant, brought back to floats."""
    source = produced(graph, tensor, "DequantizeLinear")
    return source is not None and graph.constant(source.input[0]) is not None


def constant_row(graph: GraphView, tensor: str, columns: int, rank: int | None) -> Array | None:
    """A constant that is added to every row of a product of that rank, as [columns]; None for others."""
    value = graph.constant(tensor)
    if value is None or value.size not in (1, columns) or any(size != 1 for size in value.shape[:-1]):
        return None
    if value.ndim > 1 and (rank is None or value.ndim > rank):
        return None  # it would add axes to the product
    return np.broadcast_to(value.reshape(-1), (columns,))


@dataclass(frozen=True)
class NewWeights:
    """New constants of one graph, by what they are made of: nodes that share a weight go on sharing it."""

    graph: GraphEditor
    names: dict[Hashable, str] = field(default_factory=dict)

    def made(self, key: Hashable, base: str, make: Callable[[], Array]) -> str:
        """Returns the name of the constant of `key`; `make` makes a new one, and `base` its name."""
        if key not in self.names:
            self.names[key] = self.graph.add_constant(base, np.ascontiguousarray(make()))
        return self.names[key]

    def changed(self, weight: str, suffix: str, change: Callable[[Array], Array]) -> str:
        """Returns the name of the constant `weight` after `change`."""
        return self.made(weight, f"{weight}/{suffix}", lambda: change(self.graph.value(weight)))


def layout_obstacle(graph: GraphView, weight: str) -> str | None:
    """Returns why a weight cannot be written in another layout; None if it can."""
    if is_quantised(graph, weight):
        return "its weight is quantised: TensorRT runs it so"
    _, name = walk_up(graph, weight, lambda node: node.op_type == "Identity")
    if graph.producer(name) is None and not graph.is_initializer(name):
        return "its weight belongs to an enclosing graph, and would be copied"
    if graph.dtype(weight) not in EXCHANGEABLE:
        return "its weight is of a type that TensorRT has no product for"
    return None


def summed_axes(graph: GraphProto) -> Iterator[tuple[NodeProto, int]]:
    """Products of a graph by an initializer, matrix or kernel, with the axis of the data that is summed."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Conv" and node.input[1] in ranks:
            yield node, 1
        elif node.op_type in ("MatMul", "Gemm") and ranks.get(node.input[1]) == 2:
            yield node, -1


def is_transposed(node: NodeProto) -> bool:
    """True for a product by a weight [columns, depth]."""
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))


def gemm_obstacle(node: NodeProto) -> str | None:
    """Returns why a Gemm is no MatMul and Add of its C; None if it is, and for a MatMul."""
    if node.op_type == "MatMul":
        return None
    beta = attribute(node, "beta", 1.0) if optional_input(node, 2) else 1.0
    if attribute(node, "alpha", 1.0) != 1 or beta != 1:
        return "its alpha or beta is not 1"
    return "it transposes its data" if attribute(node, "transA", 0) else None


@dataclass(frozen=True)
class Replacement:
    """Adds nodes before a product or Conv that they replace; their names begin with its name and `suffix`."""

    graph: GraphEditor
    node: NodeProto
    suffix: str = ""

    @property
    def name(self) -> str:
        """Name of the node that does the work of the replaced one."""
        return f"{display_name(self.node)}/{self.suffix}" if self.suffix else display_name(self.node)

    def tensor(self, what: str, shape: Shape | None = None) -> str:
        """A fresh tensor of the weight's type, or of the only input's, named after the result."""
        dtype = self.graph.dtype(self.node.input[:2][-1])
        return self.graph.tensor(f"{self.node.output[0]}/{what}", dtype=dtype, shape=shape)

    def add(self, op: str, inputs: Sequence[str], out: str, name: str = "", **attributes: Any) -> str:
        """Adds a node that writes `out`, and returns `out`."""
        node = self.graph.make(op, inputs, [out], name=name or f"{self.name}/{op}", **attributes)
        self.graph.insert(node, before=self.node)
        return out

    def finish(self, op: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> None:
        """Adds the node that writes the result, in place of the replaced one and of what only that needed."""
        self.add(op, inputs, self.node.output[0], name, **attributes)
        self.graph.remove(self.node, keep=self.node.output)

    def reshape(self, tensor: str, sizes: Sequence[int], out: str) -> str:
        """Adds a Reshape of all axes after the batch, whose size is copied (0)."""
        return self.add("Reshape", [tensor, self.graph.add_ints(f"{out}/shape", 0, *sizes)], out)

    def replace_by(self, text: str, **tensors: str) -> int:
        """Replaces the node by the nodes of a text (`spelled_out`), and returns their number.

        It reads `tensors`, and writes the outputs `y0`, `y1`... Its floats have the type of the first input.
        The node that writes `product`, or else `y0`, takes over the name.
        """
        function = f'<domain: "d", opset_import: ["" : 17]> f () => (y0) {{ {spelled_out(text)} }}'
        out, number, titled = self.node.output, 0, "product" if "product = " in text else "y0"
        tensors |= {f"y{index}": name for index, name in enumerate(out) if name}
        for new in parser.parse_function(function).node:
            value = constant_value(new) if new.op_type == "Constant" else None
            if value is not None:
                floats = value.dtype == np.float32
                base = f"{out[0]}/{f'{float(value):.4g}' if floats else 'sizes'}"
                like = self.node.input[0] if floats else ""
                tensors[new.output[0]] = self.graph.add_constant(base, value, like)
                continue
            for name in new.output:
                base = new.op_type if name.startswith("nested_") else name
                tensors.setdefault(name, self.graph.fresh(f"{out[0]}/{base}"))
            fields = {item.name: helper.get_attribute_value(item) for item in new.attribute}
            ends = ([tensors[n] for n in names] for names in (new.input, new.output))
            title = self.name if new.output[0] == titled else ""
            self.graph.insert(self.graph.make(new.op_type, *ends, name=title, **fields), before=self.node)
            number += 1
        self.graph.remove(self.node, keep=out)
        return number
