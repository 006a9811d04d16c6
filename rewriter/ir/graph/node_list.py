"""Appends nodes with new names to a list."""

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, helper, numpy_helper, parser

BLOCK = 128
"""Tensors that are packed together: the fastest of 10, 32, 128 and 512 on a graph of 8,000. ONNX Runtime
loads slower than linearly in the nodes and outputs of a graph, and in the inputs of one node (1.31)."""

SEQUENCE_OPSET = 11
_AXES_INPUT_OPSET = 18
"""From this operator set on, axes of a reduction are an input; for ReduceSum, from 13 on."""


@dataclass(frozen=True)
class NodeList:
    """Appends nodes to a list; `names` are free in the model, and `opset` is its operator set."""

    names: Iterator[str]
    opset: int
    nodes: MutableSequence[NodeProto]

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Appends a node and returns its output."""
        out = next(self.names)
        self.nodes.append(helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    def write(self, text: str, **names: str) -> dict[str, str]:
        """Appends the nodes of a text in the syntax of onnx.parser, whose later lines may write a name again.

        It reads the tensors of `names`; returns these and its own tensors, by its names.
        """
        function = f'<domain: "d", opset_import: ["" : {self.opset}]> f () => () {{ {text} }}'
        for node in parser.parse_function(function).node:
            node.input[:] = [names[name] for name in node.input]
            names |= {name: next(self.names) for name in node.output}
            node.output[:] = [names[name] for name in node.output]
            node.name = node.output[0]
            self.nodes.append(node)
        return names

    def constant(self, value: object, dtype: type[np.generic]) -> str:
        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(value, dtype)))

    def over(self, op: str, source: str, *axes: int) -> str:
        if self.opset >= (13 if op == "ReduceSum" else _AXES_INPUT_OPSET):
            return self.add(op, [source, self.constant(axes, np.int64)], keepdims=0)
        return self.add(op, [source], axes=axes, keepdims=0)

    def stack(self, tensors: Sequence[str]) -> str:
        """Stacks tensors of one shape along a new first axis."""
        if self.opset >= SEQUENCE_OPSET:
            sequence = self.add("SequenceConstruct", tensors)
            return self.add("ConcatFromSequence", [sequence], axis=0, new_axis=1)
        one = self.constant([1], np.int64)  # below opset 11 only scalars are stacked
        return self.add("Concat", [self.add("Reshape", [t, one]) for t in tensors], axis=0)
