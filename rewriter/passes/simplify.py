"""simplify: folds constants and removes nodes without effect, by onnxsim."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from rewriter.base import sandbox
from rewriter.base.errors import NativeError
from rewriter.ir.graph import TAG, GraphEditor, attribute, casts_to, open_graphs, reads
from rewriter.ir.graph.ops import QUANTISING
from rewriter.ir.model import STANDARD_DOMAINS, Array, Model, replace_items, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import UNKNOWN_DOMAIN, holders, schema_of, subgraphs
from rewriter.ir.model.model import without_weights
from rewriter.ir.model.normalization import lift_large_constants
from rewriter.ir.patterns.values import repeats_reshape, selected
from rewriter.passes.algorithms.constant_branches import take_branches
from rewriter.passes.base import Change, Context, Event, Exactness, ModelPass, Refusal

OPTIMIZERS = frozenset(
    """
    nop eliminate_common_subexpression eliminate_consecutive_idempotent_ops eliminate_deadend
    eliminate_identity eliminate_nop_cast eliminate_nop_concat
    eliminate_nop_dropout eliminate_nop_expand eliminate_nop_flatten eliminate_nop_pad
    eliminate_nop_reduce eliminate_nop_reshape eliminate_nop_split eliminate_nop_transpose
    eliminate_nop_with_unit eliminate_optional_get_element eliminate_optional_has_element
    eliminate_reshape_family_on_constant eliminate_sequence_at_construct
    eliminate_sequence_length_construct eliminate_shape_gather eliminate_shape_op
    eliminate_slice_after_shape eliminate_unused_initializer extract_constant_to_initializer
    fuse_bn_into_conv fuse_concat_into_reshape fuse_consecutive_concats fuse_consecutive_reduce_unsqueeze
    fuse_consecutive_reshapes fuse_consecutive_slices fuse_consecutive_squeeze_unsqueeze
    fuse_consecutive_squeezes fuse_consecutive_transposes fuse_consecutive_unsqueezes fuse_pad_into_conv
    """.split()
)
"""The optimizers of onnxsim (0.8.1) that keep the arithmetic, and the folding of BatchNormalization.

The others make Gemm, LayerNormalization, attention and rotary operators from what looks like their parts,
break ties of ArgMax differently, move factors into weights, or let unrelated nodes share a constant of the
same value. Passes that look closer do such things, and report them."""

LARGEST_FOLD = "64MB"
"""Larger results stay computed: the Transpose of a tied embedding would double the file."""

MOST_ROUNDS = 4
"""onnxsim's own fixed point is not always one: folding can leave a node that the next run removes."""

_UNLOCKS_NOTHING = frozenset({"Cast", "Constant", "Dropout", "Identity"})
"""Operators whose removal lets another run find nothing new."""

_CONSTANT = frozenset({"Constant", "Shape", "Size", "SequenceLength", "OptionalHasElement"})
"""Operators that onnxsim may fold. Without any, its search for constants wastes a third of its time."""

_WITH_UNIT = frozenset("Add Sub Mul Div Pow And Or Concat".split())
"""onnxsim removes them where a constant has no effect. At 50,000 nodes it needs half of its time for that."""

_OPTIONAL = frozenset({"MaxPool", "Dropout", "LayerNormalization", "Attention"})
"""Operators all of whose outputs but the first are optional."""

_KEPT_COMPUTED = QUANTISING | {"DynamicQuantizeLinear"}
"""TensorRT runs on their constants. onnxsim keeps these nodes, so it does not need the data."""


@dataclass(frozen=True)
class Simplify(ModelPass):
    """Exporters write shape arithmetic, Identity and Cast nodes that only depend on constants.

    onnxsim computes what is constant, folds BatchNormalization into the Conv before it, and removes nodes
    without effect. Nodes that it keeps keep names and metadata, weights that it keeps keep their arrays,
    and dynamic axes stay dynamic. Quantised weights stay quantised, and rounding detours (float32 - float16 -
    float32) of computed tensors stay. In a model that is mixed already, an Add of zeros stays, too: TensorRT
    may sum the product before it in FP32 because of it.

    Removed, too, are Expands to the target of the Reshape before them (TensorFlow's BroadcastTo), Wheres with
    a constant condition (JAX), and optional outputs that nothing reads. An If with a constant condition
    becomes its branch. Weights that a BatchNormalization standardises become constants.

    Declines:
        - an install without onnxsim, such as the light one
        - a model that onnxsim cannot read, or on which it crashes or takes over a minute
    """

    refittable = False
    exactness = Exactness(1e-5, "folded norms and Einsum round differently: 9e-7 measured on an RT-DETR")
    imported = True
    example = """
         g (float[N,6] x) => (float[N,2,3] y)
        -<int64[1] head = {2}, int64[1] tail = {3}, int64[1] zero = {0}> {
        -    s = Concat<axis = 0>(zero, head, tail)
        -    i = Identity(x)
        -    y = Reshape(i, s)
        +<int64[3] s = {0, 2, 3}> {
        +    y = Reshape(x, s)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        first = _operators(model)
        changed = _drop_unread(model) | _drop_idle(model, self.name) | take_branches(model, self.name)
        rounds = MOST_ROUNDS
        while rounds:
            before = _operators(model, inner=True)
            outcome = _round(model, self.name)
            if isinstance(outcome, Refusal) and not changed:
                yield outcome
            taken = take_branches(model, self.name)
            rounds -= not taken  # each level of nested Ifs needs a round, which computes its conditions
            advanced = _drop_idle(model, self.name) or outcome is True or taken
            changed = changed or advanced
            if not advanced or (before - _operators(model, inner=True)).keys() <= _UNLOCKS_NOTHING:
                break
        if changed:
            yield Change("model", _summary(first, _operators(model)))


def _drop_unread(model: Model) -> bool:
    """Removes optional outputs that nothing reads: TensorRT's parser refuses a MaxPool with indices."""
    changed = False
    for graph in walk_graphs(model.proto.graph):
        several = [node for node in graph.node if node.op_type in _OPTIONAL and len(node.output) > 1]
        if not several:
            continue  # what all nodes read is needed for these only
        read = {value.name for value in graph.output}.union(*map(reads, graph.node))
        for node in several:
            while len(node.output) > 1 and node.output[-1] not in read:
                del node.output[-1]
                changed = True
    if changed:
        model.mark_edited()
    return changed


def _drop_idle(model: Model, tag: str) -> bool:
    """Removes Expands and Wheres without effect, and norms of weights; returns True if there were some."""
    idle = ("Expand", "Where", "BatchNormalization")
    if not any(node.op_type in idle for node in walk_nodes(model.proto.graph)):
        return False
    changed = False
    for graph in open_graphs(model, tag=tag):
        with graph:
            for node in graph.nodes:
                index = 0 if node.op_type == "Expand" and repeats_reshape(graph, node) else None
                if node.op_type == "Where":
                    index = selected(graph, node)
                source = node.input[index] if index is not None else _standardised(graph, node)
                if source and not graph.is_output(node.output[0]):
                    graph.replace_all_uses_with(node.output[0], source)
                    graph.remove(node)
                    changed = True
    return changed


def _standardised(graph: GraphEditor, node: NodeProto) -> str | None:
    """The result of a BatchNormalization in training mode as a constant, if its input is one; else None.

    So PyTorch exports weights that a Conv standardises (`timm`: nfnet, BiT). onnxsim leaves it, and TensorRT
    refuses the mode.
    """
    if node.op_type != "BatchNormalization" or not attribute(node, "training_mode", 0):
        return None
    values = [value for name in node.input[:3] if (value := graph.constant(name)) is not None]
    if len(values) < 3 or any(map(graph.is_read, node.output[1:])):
        return None
    weight, scale, bias = (value.astype(np.float64) for value in values)
    axes, row = (0, *range(2, weight.ndim)), (-1, *[1] * (weight.ndim - 2))
    deviation = np.sqrt(weight.var(axes, keepdims=True) + attribute(node, "epsilon", 1e-5))
    weight = (weight - weight.mean(axes, keepdims=True)) / deviation * scale.reshape(row) + bias.reshape(row)
    return graph.add_constant(node.output[0], weight, like=node.input[0])


def _operators(model: Model, *, inner: bool = False) -> Counter[str]:
    """Numbers of nodes of the main graph, and of its subgraphs if `inner`, by operator."""
    return Counter(n.op_type for n in (walk_nodes(model.proto.graph) if inner else model.proto.graph.node))


def _round(model: Model, tag: str) -> Refusal | bool:
    """Runs onnxsim once and adopts its result; returns True if the nodes changed, or the reason why not."""
    needed, graph = _needed(model), model.proto.graph
    data = {name: array for name, array in model.weights.items() if name in needed}
    folds = bool(needed) or not _CONSTANT.isdisjoint(node.op_type for node in walk_nodes(graph))
    try:
        mixed = any(casts_to(node, TensorProto.FLOAT16) for node in walk_nodes(graph))
        units = not mixed and (folds or _has_unit(graph))
        result = sandbox.call(_run_onnxsim, model.serialized(), data, folds, units, doing="onnxsim")
    except NativeError as error:
        return Refusal("model", error.what)
    except ModuleNotFoundError:
        return Refusal("model", "onnxsim is not installed, as in the light install")
    except Exception as error:  # a library: whatever it raises is a reason to go on without it
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Refusal("model", f"onnxsim cannot simplify the model: {first}")
    return _adopt(model, result, tag)


def _run_onnxsim(written: bytes, data: Mapping[str, Array], folds: bool, units: bool) -> ModelProto:
    """Runs in a child process; `folds` looks for constants, `units` removes Adds of zeros and their like."""
    proto = without_weights(ModelProto.FromString(written), data)
    skipped = [*skipped_always(), *([] if units else ["eliminate_nop_with_unit"])]
    # without folding no shape becomes known: one inference serves, where onnxsim needs three or more. Unlike
    # onnxsim's, it writes types into subgraphs
    once = not (folds or holders(proto.graph))
    proto = shape_inference.infer_shapes(proto) if once else proto
    skips = {"skip_constant_folding": not folds, "skip_shape_inference": once}
    fields = {"skipped_optimizers": skipped, "tensor_size_threshold": LARGEST_FOLD}
    result, _ = _onnxsim().simplify(proto, **skips, **fields)
    assert isinstance(result, ModelProto)
    return result


@lru_cache(maxsize=1)
def skipped_always() -> tuple[str, ...]:
    """Returns the optimizers that onnxsim must skip: all but `OPTIMIZERS`, and one that no list names."""
    library = _onnxsim()
    library.simplify(helper.make_model(helper.make_graph([], "g", [], [])))  # registers its own optimizers
    names = library.onnxsim_cpp2py_export._list_optimizers()
    return (*(name for name in names if name not in OPTIMIZERS), "fuse_matmul_add_bias_into_gemm_batched")


def _onnxsim() -> Any:
    """Imports onnxsim without torch and sympy: it needs neither, and they cost 3 s and 230 MB."""
    if "onnxsim" not in sys.modules:
        absent = [name for name in ("torch", "sympy") if name not in sys.modules]
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: an import of it fails
        try:
            importlib.import_module("onnxsim")
        finally:
            for name in absent:
                del sys.modules[name]
    return sys.modules["onnxsim"]


def _needed(model: Model) -> set[str]:
    """Returns the tensors whose data onnxsim needs to fold constants, or a BatchNormalization into a Conv."""
    constants = {t.name for t in model.proto.graph.initializer}
    convs: dict[str, NodeProto] = {}
    needed: set[str] = set()
    for node in model.proto.graph.node:
        if node.op_type == "Conv":
            convs[node.output[0]] = node
        if node.op_type == "BatchNormalization" and node.input[0] in convs:
            needed.update((*convs[node.input[0]].input, *node.input))
        elif _is_foldable(node, constants, model.opset):
            constants.update(node.output)
            needed.update(node.input)
    return needed


def _has_unit(graph: GraphProto) -> bool:
    """True if a constant operand may have no effect: zeros, ones, or nothing."""
    read = {name for node in walk_nodes(graph) if node.op_type in _WITH_UNIT for name in node.input}
    tensors = (t for inner in walk_graphs(graph) for t in inner.initializer if t.name in read)
    held = (numpy_helper.to_array(t) for t in tensors if t.data_location != TensorProto.EXTERNAL)
    return any(((array == 0) | (array == 1)).all() for array in held)


def _is_foldable(node: NodeProto, constants: set[str], opset: int) -> bool:
    if node.op_type == "Constant":
        return True
    if not node.input or node.op_type in _KEPT_COMPUTED or not constants.issuperset(reads(node)):
        return False
    return schema_of(node.op_type, node.domain, opset) is not None


def _adopt(model: Model, result: ModelProto, tag: str) -> bool:
    """Adopts the result's nodes and constants; returns False, without a change, if the nodes are the same."""
    for node in walk_nodes(result.graph):
        if node.domain == UNKNOWN_DOMAIN:
            node.ClearField("domain")
    old = [_bare(node) for node in model.proto.graph.node]
    new = [_bare(node) for node in result.graph.node]
    if Counter(old) == Counter(new):
        return False
    nodes = _with_notes(list(zip(model.proto.graph.node, old, strict=True)), result.graph, new, tag)
    _replace_graph(model, nodes, {t.name: t for t in result.graph.initializer})
    lift_large_constants(model)  # onnxsim leaves 100 MB of them in an MViT
    return True


def _bare(node: NodeProto) -> bytes:
    """Serialises what a node computes: without names and notes, its own and its subgraphs'."""
    copy = NodeProto()
    copy.CopyFrom(node)
    _strip(copy)
    return bytes(copy.SerializeToString(deterministic=True))


def _strip(node: NodeProto) -> None:
    for name in ("name", "doc_string", "metadata_props"):
        node.ClearField(name)
    if node.domain in STANDARD_DOMAINS:
        node.ClearField("domain")
    if len(node.attribute) > 1:
        replace_items(node.attribute, sorted(node.attribute, key=lambda a: a.name))
    for item in node.attribute:
        item.ClearField("doc_string")
    for graph in subgraphs(node):
        graph.ClearField("name")
        del graph.value_info[:]
        for inner in graph.node:
            _strip(inner)


def _with_notes(
    before: list[tuple[NodeProto, bytes]], after: GraphProto, bare: list[bytes], tag: str
) -> list[NodeProto]:
    """Returns the new nodes, named and noted as the old nodes they stem from, and tagged if they changed."""
    by_name = {n.name: (n, content) for n, content in before if n.name}
    by_output = {name: (n, content) for n, content in before for name in n.output if name}
    nodes = []
    for node, content in zip(after.node, bare, strict=True):
        outputs = (by_output[o] for o in node.output if o in by_output)
        origin, before_it = by_name.get(node.name) or next(outputs, (None, b""))
        if origin is not None and before_it == content:
            nodes.append(origin)
            continue
        if origin is not None and origin.op_type == node.op_type:
            node.name = origin.name or node.name
            if origin.doc_string:
                node.doc_string = origin.doc_string
            node.metadata_props.extend(p for p in origin.metadata_props if p.key != TAG)
        node.metadata_props.add(key=TAG, value=tag)
        nodes.append(node)
    return nodes


def _replace_graph(model: Model, nodes: list[NodeProto], computed: dict[str, TensorProto]) -> None:
    graph = model.proto.graph
    own = {t.name: t for t in graph.initializer}
    constants = own.keys() | computed.keys()
    read = {name for node in nodes for name in reads(node)} | {v.name for v in graph.output}
    names = [*(n for n in own if n in read), *(n for n in computed if n in read and n not in own)]
    tensors = [_tensor(model, name, own.get(name), computed.get(name)) for name in names]
    written = {name for node in nodes for name in node.output}
    replace_items(graph.node, nodes)
    replace_items(graph.initializer, tensors)
    replace_items(graph.value_info, [v for v in graph.value_info if v.name in written])
    replace_items(graph.input, [v for v in graph.input if v.name not in constants or v.name in read])
    for name in model.weights.keys() - set(names):
        del model.weights[name]
    model.proto.ir_version = max(model.proto.ir_version, 4)  # new initializers are no inputs


def _tensor(model: Model, name: str, own: TensorProto | None, computed: TensorProto | None) -> TensorProto:
    """Returns an initializer: the model's own one unless onnxsim changed it."""
    if computed is None:
        assert own is not None
        return own
    array = numpy_helper.to_array(computed)
    alike = own is not None and (own.data_type, own.dims) == (computed.data_type, computed.dims)
    if own is not None and alike and model.array(own).tobytes() == array.tobytes():
        return own
    return model.detached_tensor(name, array)


def _summary(before: Counter[str], after: Counter[str]) -> str:
    gone = ", ".join(f"{count} {op}" for op, count in sorted((before - after).items()))
    new = ", ".join(f"{count} {op}" for op, count in sorted((after - before).items()))
    text = f"{before.total()} nodes became {after.total()}"
    return text + (f"; gone: {gone}" if gone else "") + (f"; new: {new}" if new else "")
