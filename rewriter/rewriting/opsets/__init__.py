"""One node from one version of the default operator set to a later one.

onnx.version_converter rewrites whole graphs through its C++ intermediate form, which drops node
metadata and quantisation annotations, leaves subgraphs behind and stops at operators that it does
not know. Here it is given one node at a time: its adapters do the work, everything else in the
model stays as it is, and a node that cannot be carried has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper, version_converter

from rewriter.model import DETACH_BYTES, STANDARD_DOMAINS, Array, holds_graphs
from rewriter.model.facts import TensorFacts
from rewriter.model.schemas import schema_of
from rewriter.rewriting.opsets.rules import RULES, CannotConvertError, Mend, Rule


@dataclass(frozen=True)
class Request:
    """A node, and for each of its inputs in order what is known of it and its value if constant."""

    node: NodeProto
    facts: Sequence[TensorFacts | None]
    constants: Sequence[Array | None]


@dataclass
class NodeConverter:
    """Converts nodes from opset `source` to `target`; equal ones (types and shapes too) only once.

    `unknown` is the TensorProto.DataType of inputs that nothing is known of; 0 if that is not sure.
    """

    source: int
    target: int
    unknown: int = 0
    _done: dict[bytes, GraphProto | str] = field(default_factory=dict)

    def concerns(self, node: NodeProto) -> bool:
        """Whether the operator has another definition at the target. Unknown operators do not."""
        if node.domain not in STANDARD_DOMAINS:
            return False
        old = schema_of(node.op_type, "", self.source)
        new = schema_of(node.op_type, "", self.target)
        return old is not None and (new is None or new.since_version != old.since_version)

    def learn(self, requests: Iterable[Request]) -> None:
        """Convert many nodes at once: a call of the library costs 7 ms whatever it is given.

        Nodes with a rule, and all of them if one cannot be carried, are left to `convert`.
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
            converted = version_converter.convert_version(_joined(drafts.values(), self.source), self.target)
        except CPP_ERRORS:
            return
        self._done.update(zip(drafts, _parted(converted.graph, len(drafts)), strict=True))

    def convert(self, request: Request) -> GraphProto | None:
        """The node at the target opset as a small graph; None: as it is.

        The graph calls the node's inputs `i0`, `i1`... (of equal ones the first) and its outputs
        `o0`, `o1`...

        Raises:
            CannotConvertError: onnx has no adapter for it, or the adapter gave up.
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
        known = [f or TensorFacts(self.unknown, None) for f in request.facts]
        return _draft(request.node, known, request.constants, self.source)

    def _run(self, draft: ModelProto) -> GraphProto | str:
        op_type = draft.graph.node[0].op_type
        rules = [r for r in RULES if op_type in r.op_types and self.source < r.version <= self.target]
        proto = draft
        try:
            for rule in rules:
                proto = _mended(_to(proto, rule.version - 1), rule, rule.before)
                proto = _mended(_to(proto, rule.version), rule, rule.after)
            return _to(proto, self.target).graph
        except CannotConvertError as error:
            return str(error)
        except CPP_ERRORS as error:
            return _reason(str(error))


CPP_ERRORS = (RuntimeError, ValueError, IndexError)
"""What the library's C++ code raises."""


def _key(draft: ModelProto) -> bytes:
    key: bytes = draft.SerializeToString(deterministic=True)
    return key


def _joined(drafts: Iterable[ModelProto], opset: int) -> ModelProto:
    """The drafts side by side in one graph; tensors of draft n start with `n/`."""
    whole = helper.make_graph([], "nodes", [], [])
    for index, draft in enumerate(drafts):
        copy = GraphProto()
        copy.CopyFrom(draft.graph)
        for value in (*copy.input, *copy.output):
            value.name = f"{index}/{value.name}"
        for names in (copy.node[0].input, copy.node[0].output):
            names[:] = [f"{index}/{name}" if name else "" for name in names]
        whole.node.extend(copy.node)
        whole.input.extend(copy.input)
        whole.output.extend(copy.output)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", opset)])


def _parted(whole: GraphProto, count: int) -> list[GraphProto]:
    """The graphs that were joined: a node belongs where its outputs go."""
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
        copy = ModelProto()
        copy.CopyFrom(proto)
        return copy
    return version_converter.convert_version(proto, version)


def _mended(proto: ModelProto, rule: Rule, mend: Mend | None) -> ModelProto:
    if mend is not None:
        for node in list(proto.graph.node):
            if node.op_type in rule.op_types:
                mend(proto.graph, node)
    return proto


def _reason(text: str) -> str:
    """The sentence in a message such as `convert.h:70: adapter: Assertion 'x' failed: sentence`."""
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[0].rsplit("failed: ", 1)[-1].strip()


def _keeps_meaning(node: NodeProto) -> bool:
    """Operators that only gained types, and carry graphs or data that the library need not see."""
    return node.op_type == "Constant" or holds_graphs(node)


def _draft(
    node: NodeProto,
    facts: Sequence[TensorFacts],
    constants: Sequence[Array | None],
    opset: int,
) -> ModelProto:
    names = {name: f"i{index}" for index, name in reversed(list(enumerate(node.input))) if name}
    copy = NodeProto(op_type=node.op_type)
    copy.input.extend(names.get(name, "") for name in node.input)
    copy.output.extend(f"o{index}" if name else "" for index, name in enumerate(node.output))
    copy.attribute.extend(sorted(node.attribute, key=lambda a: a.name))
    known = dict(zip(copy.input, facts, strict=True))
    inputs = [
        helper.make_tensor_value_info(name, known[name].dtype, known[name].shape)
        for name in dict.fromkeys(copy.input)
        if name
    ]
    outputs = [helper.make_tensor_value_info(name, 0, None) for name in copy.output if name]
    graph = helper.make_graph([copy], "node", inputs, outputs)
    if node.op_type == "Resize":  # the one operator whose meaning hangs on the value of an input
        graph.initializer.extend(
            numpy_helper.from_array(value, name)
            for name, value in dict(zip(copy.input, constants, strict=True)).items()
            if name and value is not None and value.nbytes < DETACH_BYTES
        )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


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
