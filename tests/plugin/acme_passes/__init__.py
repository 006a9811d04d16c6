"""drop-double-neg: Neg after Neg goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, GraphPass, Refusal
from rewriter.ir.graph import GraphEditor, label


@dataclass(frozen=True)
class DropDoubleNeg(GraphPass):
    """Two Negs in a row are no work at all, but each costs a kernel.

    Options:
        keep: Names of nodes to leave alone.
    """

    name = "drop-double-neg"
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y) {
            a = Neg(x)
            b = Neg(a)
            y = Relu(b)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y) { y = Relu(x) }"""

    keep: tuple[str, ...] = ()

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for second in list(graph.nodes):
            first = graph.producer(second.input[0]) if second.op_type == "Neg" else None
            if first is not None and first.op_type == "Neg":
                yield self._dropped(graph, first, second)

    def _dropped(self, graph: GraphEditor, first: NodeProto, second: NodeProto) -> Event:
        if second.name in self.keep:
            return Refusal(label(second), "it is to be kept")
        if graph.is_output(second.output[0]):
            return Refusal(label(second), "it makes an output, whose name has to stay")
        graph.redirect(second.output[0], first.input[0])
        graph.sweep(second.output[0])
        return Change(label(second), "gone with the Neg before it")
