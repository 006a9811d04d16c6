"""Counts the nodes that a mixed-precision model keeps in FP32, for every tool alike: from the file that it wrote.

    python benchmarks/census.py MODEL.onnx ...

- A tensor is *fixed* if it is an initializer, or computed from fixed tensors, shapes and sizes only. These are
  constants and shape arithmetic, which an engine computes when it is built.
- An *FP32 node* reads or writes an FP32 tensor that is not fixed. Casts and nodes that write only fixed tensors are not
  counted. So a MatMul with FP32 data counts, and a Resize with FP16 data and FP32 scales does not.
- A *Cast* is one between two floating-point types whose result is not fixed. Casts of a mask or an index, which every
  tool keeps, are not counted.

Local functions are inlined first. Nodes inside If, Loop and Scan count like all others. The node that holds such graphs
counts by its own inputs and outputs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, inliner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.model import facts, load, subgraphs, walk_graphs

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
SHAPES = frozenset({"Shape", "Size"})
GENERATORS = ("Random", "Bernoulli", "Multinomial")


@dataclass(frozen=True)
class Census:
    """Counts of one file. `nodes` excludes Casts and fixed nodes; `fp32_ops` counts FP32 nodes by operator.

    `untyped` counts nodes with a tensor whose type shape inference could not find. They count as FP32 nodes only if
    another of their tensors is known to be FP32.
    """

    nodes: int
    fp32_nodes: int
    casts: int
    untyped: int
    fp32_ops: dict[str, int]


def census(proto: onnx.ModelProto) -> Census:
    """Counts the nodes of one model by the rules in the module's docstring."""
    model = load(inliner.inline_local_functions(proto) if proto.functions else proto)
    types = facts.infer(model)
    fixed_outside: dict[int, set[str]] = {}
    known_outside: dict[int, dict[str, int]] = {}
    total = casts = untyped = 0
    fp32: Counter[str] = Counter()
    graphs = list(walk_graphs(model.proto.graph))  # they keep their identity as long as someone holds them
    for scope, graph in enumerate(graphs):
        fixed = set(fixed_outside.get(id(graph), ())) | {t.name for t in graph.initializer}
        dtypes = known_outside.get(id(graph), {}) | {n: t.dtype for n, t in types.scopes[scope].items()}
        dtypes |= {t.name: t.data_type for t in graph.initializer}
        for node in graph.node:
            if _is_fixed(node, fixed):
                fixed.update(node.output)
                continue
            moving = [t for t in (*node.input, *node.output) if t and t not in fixed]
            found = [dtypes.get(t, 0) for t in moving]
            if node.op_type == "Cast":
                casts += all(d in FLOATS for d in found)
                continue
            total += 1
            untyped += 0 in found
            if TensorProto.FLOAT in found:
                fp32[node.op_type] += 1
        for inner in _inner(graph):
            fixed_outside[id(inner)], known_outside[id(inner)] = fixed, dtypes
    return Census(total, fp32.total(), casts, untyped, dict(sorted(fp32.items())))


def _is_fixed(node: NodeProto, fixed: set[str]) -> bool:
    """True if a node computes constants or shape arithmetic."""
    if node.op_type in SHAPES:
        return True
    if node.op_type.startswith(GENERATORS) or any(subgraphs(node)):
        return False
    return all(t in fixed for t in node.input if t)


def _inner(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    return (inner for node in graph.node for inner in subgraphs(node))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, census(onnx.load(argument)))
