"""Corrects the adapters of onnx.version_converter (1.23) that change results.

Each rule was found by running operators before and after the conversion on ONNX Runtime: without it, the
results differ or the model is invalid (tests/passes/test_upgrade_opset.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.graph.ops import RESIZES
from rewriter.ir.model import Array


class CannotConvertError(Exception):
    """The operator cannot be converted; the text says why."""


Correction = Callable[[GraphProto, NodeProto], None]


@dataclass(frozen=True)
class Rule:
    """Correction of the conversion of some operators to `version`.

    `before` gets the node one version earlier, `after` at `version`. Both may raise CannotConvertError.
    """

    op_types: frozenset[str]
    version: int
    before: Correction | None = None
    after: Correction | None = None


def _set_default(node: NodeProto, name: str, value: object) -> None:
    if all(a.name != name for a in node.attribute):
        node.attribute.append(helper.make_attribute(name, value))


def _constant(graph: GraphProto, name: str) -> Array | None:
    held = {tensor.name: tensor for tensor in graph.initializer}
    held |= {output: node.attribute[0].t for output, node in _made(graph).items()}
    return numpy_helper.to_array(held[name]) if name in held else None


def _made(graph: GraphProto) -> dict[str, NodeProto]:
    """The Constant nodes by their output."""
    return {node.output[0]: node for node in graph.node if node.op_type == "Constant"}


def _input(graph: GraphProto, name: str) -> onnx.TypeProto.Tensor:
    return next((v.type.tensor_type for v in graph.input if v.name == name), onnx.TypeProto.Tensor())


def _keep_resize_coordinates(graph: GraphProto, node: NodeProto) -> None:
    """Resize 10 and Upsample map x_out to x_out / scale; Resize 11 uses pixel centres by default.

    Mode nearest rounds the index down when enlarging, as Upsample always does, and up when reducing: so do
    onnx's test of Resize 10 and ONNX Runtime.
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
        raise CannotConvertError("its scales are computed, but the rounding of Resize 10 depends on them")
    if (scales >= 1).all():
        return "floor"
    if (scales <= 1).all():
        return "ceil"
    raise CannotConvertError("it enlarges one axis and reduces another, which are rounded differently")


def _upsample_enlarges(graph: GraphProto, node: NodeProto) -> None:
    """Upsample 9 only enlarges, which is no longer known after its conversion to Resize."""
    if node.op_type == "Resize":
        _set_default(node, "nearest_mode", "floor")


def _drop_unread_roi(graph: GraphProto, node: NodeProto) -> None:
    """The adapter writes a roi for Resize 11, which only one coordinate mode reads."""
    mode = next((a.s for a in node.attribute if a.name == "coordinate_transformation_mode"), b"")
    made = _made(graph)
    if node.op_type == "Resize" and mode != b"tf_crop_and_resize" and node.input[1] in made:
        graph.node.remove(made[node.input[1]])
        node.input[1] = ""


def _type_bounds(graph: GraphProto, node: NodeProto) -> None:
    """Clip and Pad need bounds and value in the type of the data; the adapter writes float32."""
    wanted = _input(graph, node.input[0]).elem_type
    for name in _made(graph).keys() & set(node.input[1:]):
        _retype(_made(graph)[name].attribute[0].t, wanted)


def _retype(tensor: TensorProto, wanted: int) -> None:
    if tensor.data_type != TensorProto.FLOAT or wanted == TensorProto.FLOAT:
        return
    if not wanted:
        raise CannotConvertError("the type of its input is unknown")
    value = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(wanted))
    tensor.CopyFrom(numpy_helper.from_array(value))


def _refuse_mask(graph: GraphProto, node: NodeProto) -> None:
    if len(node.output) > 1 and node.output[1]:
        raise CannotConvertError("its mask output is used, and its meaning changes in opset 12")


def _flatten_hardmax(graph: GraphProto, node: NodeProto) -> None:
    """Before 13, Hardmax flattened all axes from `axis` (default 1) on; the adapter omits that."""
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
    """RoiAlign 16 shifts by half a pixel by default; older versions of onnx omit the attribute."""
    _set_default(node, "coordinate_transformation_mode", "output_half_pixel")


def _spread_groups(graph: GraphProto, node: NodeProto) -> None:
    """GroupNormalization 21 has scale and bias per channel, earlier versions per group."""
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    data = _input(graph, node.input[0])
    channels = data.shape.dim[1].dim_value if len(data.shape.dim) > 1 else 0
    if not channels:
        raise CannotConvertError("its number of channels is unknown")
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
    Rule(RESIZES, 10, after=_upsample_enlarges),
    Rule(RESIZES, 11, before=_keep_resize_coordinates),
    Rule(frozenset({"Clip", "Pad"}), 11, after=_type_bounds),
    Rule(frozenset({"Dropout"}), 12, before=_refuse_mask),
    Rule(RESIZES, 13, after=_drop_unread_roi),
    Rule(frozenset({"Hardmax"}), 13, before=_flatten_hardmax),
    Rule(frozenset({"RoiAlign"}), 16, before=_keep_roi_offset),
    Rule(frozenset({"GroupNormalization"}), 21, before=_spread_groups),
)
"""By version."""
