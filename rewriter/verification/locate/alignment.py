"""Tensors of two exports of a network, matched by what computes them where their names say something else."""

import hashlib
from collections import defaultdict

from rewriter.ir.model import Model
from rewriter.ir.model.graphs import rename_tensors

SAME_VALUE = ("Cast", "Identity")
LISTED = 3


def aligned(original: Model, other: Model) -> tuple[Model, str]:
    """`other` with the original's names for the tensors that are computed alike, and a note about it.

    Exporters number tensors, so that one more node gives each later tensor the name of another one. Nothing
    changes where no name is misleading.
    """
    ours, theirs = _by_computation(original), _by_computation(other)
    pairs = {
        name: mine
        for key, names in theirs.items()
        if len(names) == len(ours.get(key, ()))
        for name, mine in zip(names, ours[key], strict=True)
    }
    known = {name for node in original.proto.graph.node for name in node.output if name}
    ports = {port.name for model in (original, other) for port in model.signature.outputs}
    misleading = [n for n, mine in pairs.items() if n != mine and n in known and not {n, mine} & ports]
    operators = [
        {n: node.op_type for node in m.proto.graph.node for n in node.output} for m in (original, other)
    ]
    shared = [name for name in operators[0] if name in operators[1] and name not in ports]
    unlike = [name for name in shared if operators[0][name] != operators[1][name]]
    if 2 * len(unlike) > len(shared):  # the first node is another one: nothing after it is computed alike
        misleading = misleading or unlike
    if not misleading:
        return other, ""
    result, names = other.copy(), dict[str, str]()
    fixed = ports | {tensor.name for tensor in result.proto.graph.initializer}
    for name in (name for node in result.proto.graph.node for name in node.output if name):
        mine = pairs.get(name, "")
        if name not in ports and mine != name:
            names[name] = mine if mine and mine not in fixed else f"other/{name}"
    for node in result.proto.graph.node:
        rename_tensors(node, names)
    del result.proto.graph.value_info[:]
    result.mark_edited()
    some = ", ".join(misleading[:LISTED]) + " ..." * (len(misleading) > LISTED)
    return result, f"both files use names for different tensors ({some}): they are matched by operators"


def _by_computation(model: Model) -> dict[bytes, list[str]]:
    """The tensors that nodes compute, by operator, attributes and operands, where constants are shapes."""
    graph, facts = model.proto.graph, model.facts().main
    keys = {port.name: port.name.encode() for port in model.signature.inputs}
    keys |= {tensor.name: repr(tuple(tensor.dims)).encode() for tensor in graph.initializer}
    found = defaultdict[bytes, list[str]](list)
    for node in graph.node:
        operands = [keys.get(name, b"") for name in node.input]
        for index, name in enumerate(node.output):
            if node.op_type in SAME_VALUE:
                keys[name] = operands[0]
            elif node.op_type == "Constant":
                keys[name] = repr(tuple(facts[name].shape or ())).encode() if name in facts else b""
            else:
                attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
                words = (node.op_type, attributes, operands, index)
                keys[name] = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
                found[keys[name]].append(name)
    return found
