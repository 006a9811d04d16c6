"""One node from one version of the default operator set to a later one.

onnx.version_converter rewrites whole graphs through its C++ intermediate form, which drops node
metadata and quantisation annotations, leaves subgraphs behind and stops at operators that it does
not know. Here it is given one node at a time: its adapters do the work, everything else in the
model stays as it is, and a node that cannot be carried has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter

from rewriter.facts import TensorFacts
from rewriter.model import DETACH_BYTES, Array, subgraphs
from rewriter.schemas import schema_of


class CannotConvertError(Exception):
    """The operator has no way to the wanted version; the text says why."""


Mend = Callable[[GraphProto, NodeProto], None]


@dataclass(frozen=True)
class Rule:
    """Where onnx.version_converter (1.23) forgets something on the way to `version`.

    `before` sees the node one version earlier, `after` at `version`. Both may raise
    CannotConvertError. An operator in `op_types` that turns into another one counts as that, too.
    """

    op_types: frozenset[str]
    version: int
    before: Mend | None = None
    after: Mend | None = None


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
        if node.domain not in ("", "ai.onnx"):
            return False
        old = schema_of(node.op_type, "", self.source)
        new = schema_of(node.op_type, "", self.target)
        return old is not None and (new is None or new.since_version != old.since_version)

    def convert(
        self, node: NodeProto, facts: Sequence[TensorFacts | None], constants: Sequence[Array | None]
    ) -> GraphProto | None:
        """The node at the target opset as a small graph; None: as it is.

        The graph calls the node's inputs `i0`, `i1`... (of equal ones the first) and its outputs
        `o0`, `o1`...

        Args:
            facts: What is known of each input, in order.
            constants: Values of the inputs that are constant.

        Raises:
            CannotConvertError: onnx has no adapter for it, or the adapter gave up.
        """
        if _keeps_meaning(node, self.source):
            return None
        known = [f or TensorFacts(self.unknown, None) for f in facts]
        draft = _draft(node, known, constants, self.source)
        key = draft.SerializeToString(deterministic=True)
        if key not in self._done:
            self._done[key] = self._run(draft)
        result = self._done[key]
        if isinstance(result, str):
            raise CannotConvertError(result)
        return None if _same(draft.graph.node[0], result) else result

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
        except (RuntimeError, ValueError, IndexError) as error:  # what the C++ code raises
            return _reason(str(error))


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


def _keeps_meaning(node: NodeProto, source: int) -> bool:
    """Operators that only gained types, and carry graphs or data that the library need not see."""
    if node.op_type == "Scan" and source < 9:
        raise CannotConvertError("Scan had a batch axis before opset 9")
    return node.op_type == "Constant" or any(True for _ in subgraphs(node))


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


# -- what the library forgets --------------------------------------------------------------------


def _set_default(node: NodeProto, name: str, value: object) -> None:
    if all(a.name != name for a in node.attribute):
        node.attribute.append(helper.make_attribute(name, value))


def _constant(graph: GraphProto, name: str) -> Array | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] == name:
            return numpy_helper.to_array(node.attribute[0].t)
    return None


def _input(graph: GraphProto, name: str) -> onnx.TypeProto.Tensor:
    return next((v.type.tensor_type for v in graph.input if v.name == name), onnx.TypeProto.Tensor())


def _keep_resize_coordinates(graph: GraphProto, node: NodeProto) -> None:
    """Resize 10 and Upsample map x_out to x_out / scale; Resize 11 would take pixel centres.

    Nearest: the index is rounded down when enlarging (all that Upsample does) and up when reducing,
    as onnx's own test of Resize 10 and ONNX Runtime have it.
    """
    if node.op_type != "Resize":
        return
    _set_default(node, "coordinate_transformation_mode", "asymmetric")
    mode = next((a.s for a in node.attribute if a.name == "mode"), b"nearest")
    if mode == b"nearest" and all(a.name != "nearest_mode" for a in node.attribute):
        node.attribute.append(helper.make_attribute("nearest_mode", _rounding(graph, node)))


def _rounding(graph: GraphProto, node: NodeProto) -> str:
    scales = _constant(graph, node.input[1])
    if scales is None:
        raise CannotConvertError("its scales are computed, and the rounding of Resize 10 depends on them")
    if (scales >= 1).all():
        return "floor"
    if (scales <= 1).all():
        return "ceil"
    raise CannotConvertError("it enlarges one axis and reduces another, with roundings that differ")


def _upsample_enlarges(graph: GraphProto, node: NodeProto) -> None:
    """Upsample 9 takes scales of 1 and above only: once it is a Resize, that is known no more."""
    if node.op_type == "Resize":
        _set_default(node, "nearest_mode", "floor")


def _drop_unread_roi(graph: GraphProto, node: NodeProto) -> None:
    """The roi that the adapter writes for Resize 11 is read in one coordinate mode only."""
    mode = next((a.s for a in node.attribute if a.name == "coordinate_transformation_mode"), b"")
    made = {n.output[0]: n for n in graph.node if n.op_type == "Constant"}
    if node.op_type == "Resize" and mode != b"tf_crop_and_resize" and node.input[1] in made:
        graph.node.remove(made[node.input[1]])
        node.input[1] = ""


def _type_bounds(graph: GraphProto, node: NodeProto) -> None:
    """Clip and Pad take bounds and value in the type of the data; the adapter writes float32."""
    wanted = _input(graph, node.input[0]).elem_type
    for name in node.input[1:]:
        for source in graph.node:
            if source.op_type == "Constant" and source.output[0] == name:
                _retype(source.attribute[0].t, wanted)


def _retype(tensor: TensorProto, wanted: int) -> None:
    if tensor.data_type != TensorProto.FLOAT or wanted == TensorProto.FLOAT:
        return
    if not wanted:
        raise CannotConvertError("the type of its input is not known")
    value = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(wanted))
    tensor.CopyFrom(numpy_helper.from_array(value))


def _refuse_mask(graph: GraphProto, node: NodeProto) -> None:
    if len(node.output) > 1 and node.output[1]:
        raise CannotConvertError("its mask output is read, and means something else since opset 12")


def _flatten_hardmax(graph: GraphProto, node: NodeProto) -> None:
    """Before 13, Hardmax took all axes from `axis` (default 1) on as one; the adapter forgets that."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    shape = _input(graph, node.input[0])
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", -1))
    if shape.HasField("shape") and axis in (-1, len(shape.shape.dim) - 1):
        return
    source, output = node.input[0], node.output[0]
    node.input[0], node.output[0] = "flat", "hard"
    hardmax = NodeProto.FromString(node.SerializeToString())
    graph.node.remove(node)
    graph.node.extend(
        [
            helper.make_node("Shape", [source], ["shape"]),
            helper.make_node("Flatten", [source], ["flat"], axis=axis),
            hardmax,
            helper.make_node("Reshape", ["hard", "shape"], [output]),
        ]
    )


def _keep_roi_offset(graph: GraphProto, node: NodeProto) -> None:
    """RoiAlign 16 shifts by half a pixel unless told otherwise; older versions of onnx forget it."""
    _set_default(node, "coordinate_transformation_mode", "output_half_pixel")


def _spread_groups(graph: GraphProto, node: NodeProto) -> None:
    """GroupNormalization 21 takes scale and bias for each channel; before, it was for each group."""
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    data = _input(graph, node.input[0])
    channels = data.shape.dim[1].dim_value if len(data.shape.dim) > 1 else 0
    if not channels:
        raise CannotConvertError("its number of channels is not known")
    if channels == groups:
        return
    copy = NodeProto.FromString(node.SerializeToString())
    graph.node.remove(node)
    column, wide = np.array([groups, 1]), np.array([groups, channels // groups])
    shapes = {"column": column, "wide": wide, "line": np.array([-1])}
    graph.initializer.extend(numpy_helper.from_array(v.astype(np.int64), k) for k, v in shapes.items())
    for index, name in ((1, "scale"), (2, "bias")):
        steps = [copy.input[index], f"{name}_column", f"{name}_wide", f"{name}_line"]
        for op, (a, b), shape in zip(("Reshape", "Expand", "Reshape"), pairwise(steps), shapes, strict=True):
            graph.node.append(helper.make_node(op, [a, shape], [b]))
        copy.input[index] = steps[-1]
    graph.node.append(copy)


RULES = (
    Rule(frozenset({"Upsample", "Resize"}), 10, after=_upsample_enlarges),
    Rule(frozenset({"Upsample", "Resize"}), 11, before=_keep_resize_coordinates),
    Rule(frozenset({"Clip", "Pad"}), 11, after=_type_bounds),
    Rule(frozenset({"Dropout"}), 12, before=_refuse_mask),
    Rule(frozenset({"Upsample", "Resize"}), 13, after=_drop_unread_roi),
    Rule(frozenset({"Hardmax"}), 13, before=_flatten_hardmax),
    Rule(frozenset({"RoiAlign"}), 16, before=_keep_roi_offset),
    Rule(frozenset({"GroupNormalization"}), 21, before=_spread_groups),
)
"""In the order of their versions."""
