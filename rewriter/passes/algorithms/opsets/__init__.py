"""Converts single nodes to a later version of the default operator set.

onnx.version_converter converts whole graphs through its C++ intermediate form. That drops node metadata and
quantisation annotations, skips subgraphs, and stops at unknown operators. Here it converts single nodes: the
rest of the model is unchanged, and errors name the node. `rules` corrects its adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper, version_converter

from rewriter.ir import children
from rewriter.ir.errors import NativeError
from rewriter.ir.model import DETACH_BYTES, STANDARD_DOMAINS, Array, holds_graphs
from rewriter.ir.model.facts import TensorFacts
from rewriter.ir.model.schemas import schema_of
from rewriter.passes.algorithms.opsets.rules import RULES, CannotConvertError, Correction, Rule


@dataclass(frozen=True)
class Request:
    """A node, with the facts and, if constant, the value of each input."""

    node: NodeProto
    facts: Sequence[TensorFacts | None]
    constants: Sequence[Array | None]


@dataclass
class NodeConverter:
    """Converts nodes from opset `source` to `target`, nodes with equal types and shapes only once.

    `unknown` is the TensorProto.DataType assumed for inputs without facts; 0 if there is none.
    """

    source: int
    target: int
    unknown: int = 0
    _done: dict[bytes, GraphProto | str] = field(default_factory=dict)

    def concerns(self, node: NodeProto) -> bool:
        """True if the operator's definition changes until the target; False for unknown operators."""
        if node.domain not in STANDARD_DOMAINS:
            return False
        old = schema_of(node.op_type, "", self.source)
        new = schema_of(node.op_type, "", self.target)
        return old is not None and (new is None or new.since_version != old.since_version)

    def learn(self, requests: Iterable[Request]) -> None:
        """Convert many nodes at once, since a call of the library costs 7 ms for any number of nodes.

        Nodes with a rule, and all nodes if one cannot be converted, are left to `convert`.
        """
        drafts: dict[bytes, ModelProto] = {}
        for request in requests:
            op_type = request.node.op_type
            if not any(op_type in r.op_types for r in RULES) and not _keeps_meaning(request.node):
                draft = self._draft(request)
                drafts[_key(draft)] = draft
        if not drafts:
            return
        try:
            converted = _converted(_joined(drafts.values(), self.source), self.target)
        except CPP_ERRORS:
            return
        self._done.update(zip(drafts, _separated(converted.graph, len(drafts)), strict=True))

    def convert(self, request: Request) -> GraphProto | None:
        """Returns the node at the target opset as a small graph; None if it is unchanged.

        In the graph, inputs are named `i0`, `i1`... (equal inputs like the first) and outputs `o0`, `o1`...

        Raises:
            CannotConvertError: onnx has no adapter for the node, or the adapter failed.
        """
        if _keeps_meaning(request.node):
            if request.node.op_type == "Scan" and self.source < 9:
                raise CannotConvertError("Scan had a batch axis before opset 9")
            return None
        draft = self._draft(request)
        key = _key(draft)
        if key not in self._done:
            self._done[key] = self._run(draft)
        result = self._done[key]
        if isinstance(result, str):
            raise CannotConvertError(result)
        return None if _same(draft.graph.node[0], result) else result

    def _draft(self, request: Request) -> ModelProto:
        """The node as a model of its own, with the types and shapes of what it reads."""
        node = request.node
        names = {name: f"i{index}" for index, name in reversed(list(enumerate(node.input))) if name}
        copy = NodeProto(op_type=node.op_type)
        copy.input.extend(names.get(name, "") for name in node.input)
        copy.output.extend(f"o{index}" if name else "" for index, name in enumerate(node.output))
        copy.attribute.extend(sorted(node.attribute, key=lambda a: a.name))
        facts = dict(zip(copy.input, request.facts, strict=True))
        known = {name: facts[name] or TensorFacts(self.unknown, None) for name in facts if name}
        inputs = [helper.make_tensor_value_info(name, f.dtype, f.shape) for name, f in known.items()]
        outputs = [helper.make_tensor_value_info(name, 0, None) for name in copy.output if name]
        graph = helper.make_graph([copy], "node", inputs, outputs)
        if node.op_type == "Resize":  # the only operator whose conversion depends on the value of an input
            values = dict(zip(copy.input, request.constants, strict=True)).items()
            small = ((name, v) for name, v in values if name and v is not None and v.nbytes < DETACH_BYTES)
            graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in small)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.source)])

    def _run(self, draft: ModelProto) -> GraphProto | str:
        op_type = draft.graph.node[0].op_type
        rules = [r for r in RULES if op_type in r.op_types and self.source < r.version <= self.target]
        proto = draft
        try:
            for rule in rules:
                proto = _corrected(_to(proto, rule.version - 1), rule, rule.before)
                proto = _corrected(_to(proto, rule.version), rule, rule.after)
            return _to(proto, self.target).graph
        except CannotConvertError as error:
            return str(error)
        except CPP_ERRORS as error:
            return _reason(str(error))


CPP_ERRORS = (RuntimeError, ValueError, IndexError, NativeError)
"""Exceptions of the library's C++ code, and its end in a crash."""


def _key(draft: ModelProto) -> bytes:
    key: bytes = draft.SerializeToString(deterministic=True)
    return key


def _joined(drafts: Iterable[ModelProto], opset: int) -> ModelProto:
    """Joins drafts in one graph; the names of draft n get the prefix `n/`."""
    whole = helper.make_graph([], "nodes", [], [])
    for index, draft in enumerate(drafts):
        copy = deepcopy(draft.graph)
        for value in (*copy.input, *copy.output):
            value.name = f"{index}/{value.name}"
        for names in (copy.node[0].input, copy.node[0].output):
            names[:] = [f"{index}/{name}" if name else "" for name in names]
        whole.node.extend(copy.node)
        whole.input.extend(copy.input)
        whole.output.extend(copy.output)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", opset)])


def _separated(whole: GraphProto, count: int) -> list[GraphProto]:
    """Separates joined graphs again: a node belongs to the draft that uses its outputs."""
    parts = [GraphProto() for _ in range(count)]
    owner: dict[str, int] = {}
    kept: list[tuple[int, NodeProto]] = []
    for node in reversed(whole.node):
        index = next(i for name in node.output if name and (i := _index(name, owner)) is not None)
        owner.update((name, index) for name in node.input if name and _index(name, owner) is None)
        kept.append((index, node))
    for index, node in reversed(kept):
        for names in (node.input, node.output):
            names[:] = [name.removeprefix(f"{index}/") for name in names]
        parts[index].node.append(node)
    for tensor in whole.initializer:
        if tensor.name in owner:
            parts[owner[tensor.name]].initializer.append(tensor)
    return parts


def _index(name: str, owner: dict[str, int]) -> int | None:
    head = name.split("/", 1)[0]
    return int(head) if "/" in name and head.isdigit() else owner.get(name)


def _to(proto: ModelProto, version: int) -> ModelProto:
    if proto.opset_import[0].version == version:
        return deepcopy(proto)
    return _converted(proto, version)


def _converted(proto: ModelProto, version: int) -> ModelProto:
    return children.call(version_converter.convert_version, proto, version, doing="onnx.version_converter")


def _corrected(proto: ModelProto, rule: Rule, correct: Correction | None) -> ModelProto:
    if correct is not None:
        for node in list(proto.graph.node):
            if node.op_type in rule.op_types:
                correct(proto.graph, node)
    return proto


def _reason(text: str) -> str:
    """The last part of a message such as `convert.h:70: adapter: Assertion 'x' failed: sentence`."""
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[0].rsplit("failed: ", 1)[-1].strip()


def _keeps_meaning(node: NodeProto) -> bool:
    """True for nodes that hold graphs or data: their operators only gained types over the versions."""
    return node.op_type == "Constant" or holds_graphs(node)


def _same(node: NodeProto, graph: GraphProto) -> bool:
    new = graph.node[0]
    return (
        len(graph.node) == 1
        and new.op_type == node.op_type
        and list(new.input) == list(node.input)
        and list(new.output) == list(node.output)
        and _attributes(new) == _attributes(node)
    )


def _attributes(node: NodeProto) -> dict[str, bytes]:
    return {a.name: a.SerializeToString(deterministic=True) for a in node.attribute}
