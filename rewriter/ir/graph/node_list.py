"""Appends nodes with new names to a list, and lets their texts nest calls."""

import re
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


_CALL = re.compile(r"([\w.]+)\s*(<[^<>{}]*>)?\s*\(([^()]*)\)")
_PLACE = re.compile(r"\?\d+\?")
_NUMBER = re.compile(r"-?\d+(\.\d+(e[-+]?\d+)?)?|\[-?\d+(, -?\d+)*\]")


def spelled_out(text: str) -> str:
    """A text of nodes as onnx.parser takes it, from one with calls and numbers as operands.

    `y = Max (Size (x), 1)` becomes three nodes. Numbers are scalars of int64 or float, or lists of int64.
    Their constants come first, or after the first brace, so that loops do not compute them again.
    """
    calls, constants = list[re.Match[str]](), dict[str, str]()

    def taken(match: re.Match[str]) -> str:
        calls.append(match)
        return f"?{len(calls) - 1}?"

    def operand(argument: str, before: list[str]) -> str:
        if argument.startswith("?") and argument.endswith("?"):
            before.append(f"nested_{argument[1:-1]} = {call(argument, before)}\n")
            return f"nested_{argument[1:-1]}"
        if not _NUMBER.fullmatch(argument):
            return _PLACE.sub(lambda match: call(match[0], before), argument)  # `seq(float[]) name`
        values = argument.strip("[]").split(", ")
        kind = "float" if "." in argument else f"int64[{len(values)}]" if argument[0] == "[" else "int64"
        constants[argument] = f"Constant <value = {kind} {{{', '.join(values)}}}> ()\n"
        return f"number_{list(constants).index(argument)}"

    def call(placeholder: str, before: list[str]) -> str:
        op, attributes, arguments = calls[int(placeholder[1:-1])].groups("")
        parts = re.findall(r"\[[^]]*\]|[^,\s][^,]*", arguments)
        return f"{op} {attributes} ({', '.join([operand(part.strip(), before) for part in parts])})"

    def statement(match: re.Match[str]) -> str:
        before = list[str]()
        whole = (match[1] or "") + call(match[2], before)
        return "".join(before) + whole

    while (shorter := _CALL.sub(taken, text)) != text:
        text = shorter
    text = re.sub(rf"((?:\w+, )*\w+ = )?({_PLACE.pattern})", statement, text)
    numbers = "".join(f"number_{index} = {value}" for index, value in enumerate(constants.values()))
    head, brace, rest = text.partition("{")
    return f"{head}{{\n{numbers}{rest}" if brace else numbers + text


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
        """Appends the nodes of a text, as of `spelled_out`, whose later lines may write a name again.

        It reads the tensors of `names`; returns these and its own tensors, by its names.
        """
        function = f'<domain: "d", opset_import: ["" : {self.opset}]> f () => () {{ {spelled_out(text)} }}'
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
