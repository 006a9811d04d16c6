"""Replaces an If whose condition is constant by its branch."""

from collections import Counter
from collections.abc import Iterator

from onnx import GraphProto, NodeProto

from rewriter.ir.graph import GraphEditor, attribute, is_op, open_graphs
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import rename_tensors


def take_branches(model: Model, tag: str) -> bool:
    """Replaces every If of constant condition by the nodes of its branch; returns True if there was one.

    A sampling rate that is a constant, or the size of an axis, selects a branch in scripts of torch.
    TensorRT refuses some branches that never run. onnxsim's own pass fails on nested Ifs.
    """
    if not any(node.op_type == "If" for node in walk_nodes(model.proto.graph)):
        return False
    graphs = list(walk_graphs(model.proto.graph))
    tensors = Counter(name for graph in graphs for name in _tensors(graph))
    nodes = Counter(node.name for graph in graphs for node in graph.node if node.name)
    changed = False
    for graph in reversed(open_graphs(model, tag)):
        with graph:
            for owner in graph.holders:
                condition = graph.constant(owner.input[0]) if is_op(owner, "If") else None
                if condition is None:
                    continue
                branch = attribute(owner, "then_branch" if condition.any() else "else_branch")
                _take(graph, owner, branch, {name for name in _tensors(branch) if tensors[name] > 1})
                for node in branch.node:
                    node.name = graph.fresh(node.name) if nodes[node.name] > 1 else node.name
                changed = True
    return changed


def _tensors(graph: GraphProto) -> Iterator[str]:
    """The names of the tensors that a graph defines itself."""
    yield from (name for node in graph.node for name in node.output if name)
    yield from (tensor.name for tensor in graph.initializer)


def _take(graph: GraphEditor, owner: NodeProto, branch: GraphProto, elsewhere: set[str]) -> None:
    """Moves the nodes of a branch before its If, which it removes; names that are `elsewhere` change."""
    renamed = {
        tensor.name: graph.add_constant(tensor.name, graph.model.array(tensor))
        for tensor in branch.initializer
    }
    made = {name for node in branch.node for name in node.output if name}
    renamed |= {name: graph.fresh(name) for name in made & elsewhere}
    copies = []
    for result, value in zip(owner.output, branch.output, strict=True):
        if value.name in made and renamed.get(value.name) not in owner.output and result:
            renamed[value.name] = result
        elif result:
            copies.append(graph.make("Identity", [renamed.get(value.name, value.name)], [result]))
    for node in branch.node:
        rename_tensors(node, renamed)
    graph.insert(*branch.node, *copies, before=owner)
    graph.remove(owner)
