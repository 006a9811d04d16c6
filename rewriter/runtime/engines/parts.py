"""A large network as parts that run one after another, each in a session of its own.

ONNX Runtime's load time grows with the square of the size: it looks for the operands of each node among all
inputs and outputs of the graph, by name (1.31, benchmarks/README.md#what-fix-costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import onnx

from rewriter.ir.graph import attribute, reads
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.local_session import LocalSession

PART_NODES = 2000
"""Nodes of a part, about. A network of 50,000 nodes loads in 1.8 s in parts of 1000, in 2.0 s in parts of
2500 or 4000, and in 21 s as a whole."""

WINDOW = 0.25
"""Share of a part within which a cut is moved to where the fewest tensors pass it."""

_CUTTABLE = frozenset({"float", "double", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"}) | {
    "int64",
    "uint64",
}
"""Types of tensors that pass a cut. FP16 and BF16 do not: where ONNX Runtime computes such nodes in FP32, it
leaves out the Casts between them, and a cut would bring these back."""

_UNCUTTABLE = 10**6
"""Weight of a tensor at a cut that cannot pass it: a sequence, or one of 16-bit floats."""

_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class _CannotPassError(Exception):
    """A tensor at a cut has a type that cannot pass it."""


@dataclass(frozen=True)
class Part:
    """Consecutive nodes of the main graph.

    Attributes:
        given: Inputs of the graph, and tensors of earlier parts, that the nodes read.
        results: Outputs of the graph, and tensors that later parts read, that the nodes compute.
    """

    nodes: tuple[onnx.NodeProto, ...]
    given: tuple[str, ...]
    results: tuple[str, ...]


class PartedSession:
    """A model as sessions of its parts; use `opened`. It runs like a `LocalSession` without optimisations.

    Each node computes what it computes in one piece, bit by bit.

    Raises:
        NoKernelError, ArithmeticRunError: as `LocalSession`.
    """

    def __init__(self, model: Model, found: Sequence[Part], threads: int | None, *, gpu: bool) -> None:
        graph, shell = model.proto.graph, onnx.ModelProto()
        shell.CopyFrom(model.proto)
        shell.ClearField("graph")
        self.outputs = tuple(value.name for value in graph.output)
        self._parts, self._sessions = list(found), list[LocalSession]()
        self._last = {name: i for i, part in enumerate(found) for name in part.given}
        types = {value.name: value for value in graph.input}
        for part in self._parts:
            session = LocalSession(_model_of(part, model, shell, types), threads=threads, gpu=gpu, tf32=False)
            self._sessions.append(session)
            types.update((n, _passed(n, kind)) for n, kind in session.types().items() if n in self._last)
        self.version = self._sessions[0].version

    def named(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self.outputs

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """As `LocalSession.run`. A tensor between parts is in memory until the last part that reads it."""
        names = self.outputs if outputs is None else tuple(outputs)
        known = dict(feeds)
        first = {name: array for name, array in feeds.items() if name not in self._last}  # it refuses them
        for index, (part, session) in enumerate(zip(self._parts, self._sessions, strict=True)):
            given = {name: known[name] for name in part.given if name in known}
            wanted = [n for n in part.results if n in names or self._last.get(n, -1) > index]
            if wanted:  # ONNX Runtime takes an empty list for all outputs
                known.update(session.run({**given, **first}, wanted))
                first = {}
            for name in part.given:
                if self._last[name] == index and name not in names:
                    known.pop(name, None)
        return {name: known[name] for name in names}

    def close(self) -> None:
        """Free the sessions; the weights stay with the model."""
        for session in self._sessions:
            session.close()


def opened(
    model: Model, *, optimize: bool, threads: int | None, gpu: bool = False
) -> LocalSession | PartedSession:
    """A session of the model, without TF32: in parts if it is large, and nothing is fused across them.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model.
    """
    found = [] if optimize else parts(model)
    if found and all(part.results for part in found):
        with suppress(_CannotPassError):
            return PartedSession(model, found, threads, gpu=gpu)
    return LocalSession(model, optimize=optimize, threads=threads, gpu=gpu, tf32=False)


def parts(model: Model) -> list[Part]:
    """The parts of a model, in order; none if it is small, or hands an input on as an output."""
    graph = model.proto.graph
    nodes, outputs = list(graph.node), {value.name for value in graph.output}
    if len(nodes) < 2 * PART_NODES or graph.sparse_initializer:
        return []
    made = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    if not made.keys() >= outputs:
        return []
    operands = [reads(node) for node in nodes]
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    last = {name: i for i, names in enumerate(operands) for name in names}
    ends = [*_cuts(nodes, made, {n: i for n, i in last.items() if n not in constants}), len(nodes)]
    inputs = {v.name for v in graph.input}
    unread = tuple(name for name in inputs if name not in last)
    found: list[Part] = []
    for start, end in zip([0, *ends], ends, strict=False):
        read = dict.fromkeys(name for names in operands[start:end] for name in names)
        copied = [constants[n] for n in read if n in constants and not start <= made[n] < end]
        passed = (n for n in read if n in inputs or (n not in constants and made.get(n, start) < start))
        results = [
            name
            for node in nodes[start:end]
            for name in node.output
            if name in outputs or (name not in constants and last.get(name, -1) >= end)
        ]
        given = (*passed, *(() if found else unread))
        found.append(Part((*copied, *nodes[start:end]), given, tuple(results)))
    return found


def _cuts(nodes: Sequence[onnx.NodeProto], made: Mapping[str, int], last: Mapping[str, int]) -> Iterator[int]:
    """Positions before which a part ends, where few tensors pass."""
    change = [0] * (len(nodes) + 1)
    for name, position in made.items():
        if last.get(name, -1) > position:
            weight = _UNCUTTABLE if _is_bound(nodes[position]) else 1
            change[position + 1] += weight
            change[last[name] + 1] -= weight
    passing = list(accumulate(change))
    count = len(nodes) // PART_NODES
    size = len(nodes) / count
    for index in range(1, count):
        first, end = round(size * (index - WINDOW)), round(size * (index + WINDOW))
        yield min(range(first, end), key=passing.__getitem__)


def _is_bound(node: onnx.NodeProto) -> bool:
    """True if the results of a node cannot pass a cut, as far as can be told without types."""
    return "Sequence" in node.op_type or (node.op_type == "Cast" and attribute(node, "to") in _HALVES)


def _passed(name: str, kind: str) -> onnx.ValueInfoProto:
    """An input for a tensor of ONNX Runtime's type `kind`, such as tensor(float), in any shape."""
    element = kind.removeprefix("tensor(").removesuffix(")")
    if element not in _CUTTABLE:
        raise _CannotPassError(name)
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(element.upper()), None)


def _model_of(
    part: Part, model: Model, shell: onnx.ModelProto, types: Mapping[str, onnx.ValueInfoProto]
) -> Model:
    """A model of one part.

    Args:
        shell: The whole model without its graph.
        types: Inputs of the part, and others.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(shell)
    graph, source = proto.graph, model.proto.graph
    graph.name = source.name
    read = {name for node in part.nodes for name in reads(node)}
    graph.node.extend(part.nodes)
    graph.initializer.extend(tensor for tensor in source.initializer if tensor.name in read)
    graph.input.extend(types[name] for name in part.given)
    graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, part.results))
    weights = {
        tensor.name: model.weights[tensor.name]
        for tensor in graph.initializer
        if tensor.name in model.weights
    }
    return Model(proto, weights, model.path)
