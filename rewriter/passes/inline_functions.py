"""inline-functions: replaces calls of model-local functions by the nodes of their bodies."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from onnx import FunctionProto, ModelProto, NodeProto
from onnx.inliner import inline_local_functions

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, NativeError
from rewriter.base.text import count
from rewriter.ir.graph import TAG
from rewriter.ir.model import STANDARD_DOMAINS, Model, check, replace_items, walk_nodes
from rewriter.passes.base import Change, Context, Event, ModelPass, Refusal


@dataclass(frozen=True)
class InlineFunctions(ModelPass):
    """Patterns, ranges and TensorRT's parser see plain nodes; a function hides them.

    The dynamo exporter and onnxscript keep torch modules as model-local functions. onnx.inliner replaces
    every call by the function's body, including nested calls and calls in subgraphs. TensorRT-RTX 1.6.1
    reads 0 for attributes that calls omit.

    Declines:
        - functions that grow beyond all limits when they are expanded
        - models that are invalid with the bodies in place, such as a call with too few inputs
    """

    example = """
        -<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        +<ir_version: 8, opset_import: ["" : 17]>
         g (float[2,3] x) => (float[2,3] y) {
        -    y = local.gate(x)
        +    s = Sigmoid(x)
        +    y = Mul(x, s)
         }
        -<domain: "local", opset_import: ["" : 17]>
        -gate (a) => (b) {
        -    s = Sigmoid(a)
        -    b = Mul(a, s)
        -}"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        yield from inline(model, self.name)


_Key = tuple[str, str, str]  # domain, name and overload of a function


def inline(model: Model, tag: str) -> list[Event]:
    """Inlines every model-local function in place, if the result is valid; new nodes are tagged."""
    functions = {(f.domain, f.name, f.overload): f for f in model.proto.functions}
    if not functions:
        return []
    calls = Counter(map(_key, walk_nodes(model.proto.graph)))
    before = set(map(_node_key, walk_nodes(model.proto.graph)))
    try:
        result = model.restore(_inlined(model, functions))
        check(result)
    except NativeError as error:
        return [Refusal("model", error.what)]
    except (ModelError, RuntimeError) as error:  # a call with other inputs than its function has
        why = error.what if isinstance(error, ModelError) else str(error)
        name = next(iter(functions.values())).name
        return [Refusal(name, f"the model is invalid with the bodies in place: {why}")]
    model.adopt(result)
    proto = model.proto
    # TensorRT has no operator sets of the domains that only functions used
    used = {node.domain for node in walk_nodes(proto.graph)} | STANDARD_DOMAINS
    domains = {domain for domain, *_ in functions} - used
    replace_items(proto.opset_import, [o for o in proto.opset_import if o.domain not in domains])
    for node in walk_nodes(model.proto.graph):
        if _node_key(node) not in before:
            node.metadata_props.add(key=TAG, value=tag)
    model.mark_edited()
    unused = "function removed: nothing in the graph calls it directly"
    counts = ((name, calls[domain, name, overload]) for domain, name, overload in functions)
    return [Change(name, f"function inlined at {count(n, 'call')}" if n else unused) for name, n in counts]


def _inlined(model: Model, functions: dict[_Key, FunctionProto]) -> ModelProto:
    proto = model.weightless()
    for function in proto.functions:
        for opset in function.opset_import:
            if opset.domain in STANDARD_DOMAINS:
                opset.version = model.opset  # the checker found every operator unchanged between the two
    _fill_defaults(proto, functions)
    return sandbox.call(inline_local_functions, proto, doing="onnx.inliner")


def _fill_defaults(proto: ModelProto, functions: dict[_Key, FunctionProto]) -> None:
    """Writes a function's attribute defaults into its calls: onnx.inliner (1.23) does not read them."""
    for node in chain(walk_nodes(proto.graph), *map(walk_nodes, proto.functions)):
        called = functions.get(_key(node))
        if called is not None:
            names = {a.name for a in node.attribute}
            node.attribute.extend(a for a in called.attribute_proto if a.name not in names)


def _key(node: NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _node_key(node: NodeProto) -> tuple[str, str, str]:
    return node.name, node.op_type, node.output[0] if node.output else ""
