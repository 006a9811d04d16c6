"""Writes the nodes that replace another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from rewriter.ir.graph.editor import GraphEditor
from rewriter.ir.graph.nodes import label
from rewriter.ir.model.facts import Shape


@dataclass(frozen=True)
class Replacement:
    """Adds nodes before a product or Conv that they replace; their names begin with its name and `suffix`."""

    graph: GraphEditor
    node: NodeProto
    suffix: str = ""

    @property
    def name(self) -> str:
        """Name of the node that does the work of the replaced one."""
        return f"{label(self.node)}/{self.suffix}" if self.suffix else label(self.node)

    def tensor(self, what: str, shape: Shape | None = None) -> str:
        """A fresh tensor of the weight's type, named after the result."""
        dtype = self.graph.dtype(self.node.input[1])
        return self.graph.tensor(f"{self.node.output[0]}/{what}", dtype=dtype, shape=shape)

    def add(self, op: str, inputs: Sequence[str], out: str, name: str = "", **attributes: Any) -> str:
        """Adds a node that writes `out`, and returns `out`."""
        node = self.graph.make(op, inputs, [out], name=name or f"{self.name}/{op}", **attributes)
        self.graph.insert(node, before=self.node)
        return out

    def reshape(self, tensor: str, sizes: Sequence[int], out: str) -> str:
        """Adds a Reshape of all axes after the batch, whose size is copied (0)."""
        return self.add("Reshape", [tensor, self.graph.add_ints(f"{out}/shape", 0, *sizes)], out)
