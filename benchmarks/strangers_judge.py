"""Emulates a model in the types of its tensors, by an emulation that shares nothing with the tool's.

Every float16 tensor is rounded, in loops and recurrences at each step, and float64 is float32, as TensorRT has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

Array = np.ndarray[Any, Any]
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}
RECURRENT = ("LSTM", "GRU", "RNN")
WRONG = 9.0
"""Error of an output of another shape, or with NaN or infinities in other places."""


def run(
    model: ModelProto, sample: Mapping[str, Array], *, plain: bool = False, emulate: bool = True
) -> list[Array]:
    """The outputs of one sample.

    Args:
        plain: Round every float tensor to FP16, whatever its type.
        emulate: Round at all; else the model runs as it is.
    """
    model = ModelProto.FromString(model.SerializeToString())
    model = inliner.inline_local_functions(model) if model.functions else model
    for value in model.graph.input:
        for axis, size in zip(value.type.tensor_type.shape.dim, sample[value.name].shape, strict=True):
            axis.dim_value = size
    if emulate:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        values = [*model.graph.value_info, *model.graph.input]
        halves = plain or any(v.type.tensor_type.elem_type == TensorProto.FLOAT16 for v in values)
        if halves and any(node.op_type in RECURRENT for node in model.graph.node):
            sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
            _unroll(model.graph, sizes)
            del model.graph.value_info[:]
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        _round(model.graph, {}, plain)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
    feeds = {}
    for port in session.get_inputs():
        array = sample[port.name.removesuffix("__wide")]
        feeds[port.name] = array.astype(types[port.type]) if port.type in types else array
    results: list[Array] = session.run(None, feeds)
    return results


def _round(graph: GraphProto, types: Mapping[str, int], plain: bool) -> None:
    """Makes every float tensor float32, and adds a Cast to float16 and back after each that is to be rounded."""
    for tensor in graph.initializer:
        _round_constant(tensor, plain)
    known = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    types = {**types, **known}
    rounded = FLOATS if plain else {TensorProto.FLOAT16}
    nodes = list[NodeProto]()

    def casts(name: str) -> list[NodeProto]:
        low = helper.make_node("Cast", [f"{name}__wide"], [f"{name}__half"], to=TensorProto.FLOAT16)
        return [low, helper.make_node("Cast", [f"{name}__half"], [name], to=TensorProto.FLOAT)]

    for value in graph.input:
        if value.type.tensor_type.elem_type in rounded:
            nodes += casts(value.name)
            value.name += "__wide"
    for node in graph.node:
        for item in node.attribute:
            if item.type == AttributeProto.GRAPH:
                _round(item.g, types, plain)
            elif item.type == AttributeProto.TENSOR:
                _round_constant(item.t, plain)
            elif item.name in ("to", "dtype") and item.i in FLOATS:
                item.i = TensorProto.FLOAT
        outputs = [name for name in node.output if types.get(name) in rounded and node.op_type != "Constant"]
        for index, name in enumerate(node.output):
            node.output[index] = f"{name}__wide" if name in outputs else name
        nodes += [node, *(cast for name in outputs for cast in casts(name))]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _round_constant(tensor: TensorProto, plain: bool) -> None:
    if tensor.data_type in FLOATS:
        wide = numpy_helper.to_array(tensor).astype(np.float32)
        with np.errstate(over="ignore"):
            low = wide.astype(np.float16).astype(np.float32)
        half = plain or tensor.data_type == TensorProto.FLOAT16
        tensor.CopyFrom(numpy_helper.from_array(low if half else wide, tensor.name))


def _unroll(graph: GraphProto, sizes: Mapping[str, Sequence[int]]) -> None:
    """Writes recurrent operators as one node for each step and direction, whose states are tensors."""
    nodes = list[NodeProto]()

    def sliced(name: str, start: int, out: str) -> str:
        if not name:
            return ""
        for part, value in (("a", start), ("b", start + 1), ("c", 0)):
            graph.initializer.append(numpy_helper.from_array(np.array([value]), f"{out}/{part}"))
        nodes.append(helper.make_node("Slice", [name, f"{out}/a", f"{out}/b", f"{out}/c"], [out]))
        return out

    for place, node in enumerate(list(graph.node)):
        if node.op_type not in RECURRENT:
            nodes.append(node)
            continue
        fields = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        way, steps = fields.pop("direction", b"forward").decode(), sizes[node.input[0]][0]
        ports = [*node.input, *[""] * 8]
        sequences, states = list[str](), dict[str, list[str]]({"h": [], "c": []})
        for number in range(1 + (way == "bidirectional")):
            base = f"unrolled{place}/{number}"
            weights = [sliced(ports[index], number, f"{base}/w{index}") for index in (1, 2, 3)]
            before = {"h": sliced(ports[5], number, f"{base}/h"), "c": sliced(ports[6], number, f"{base}/c")}
            order = range(steps) if way != "reverse" and number == 0 else range(steps - 1, -1, -1)
            for step in order:
                at = f"{base}/{step}"
                inputs = [sliced(node.input[0], step, f"{at}/x"), *weights, "", before["h"]]
                inputs += [before["c"]] if node.op_type == "LSTM" else []
                outputs = [f"{at}/{part}" for part in ("yhc" if node.op_type == "LSTM" else "yh")]
                nodes.append(helper.make_node(node.op_type, inputs, outputs, **fields))
                before = {"h": f"{at}/h", "c": f"{at}/c"}
            sequences.append(f"{base}/Y")
            nodes.append(
                helper.make_node(
                    "Concat", [f"{base}/{step}/y" for step in range(steps)], [f"{base}/Y"], axis=0
                )
            )
            for part, name in before.items():
                states[part].append(name)
        for names, output, axis in zip(
            (sequences, states["h"], states["c"]), node.output, (1, 0, 0), strict=False
        ):
            nodes += [helper.make_node("Concat", names, [output], axis=axis)] if output else []
    del graph.node[:]
    graph.node.extend(nodes)


def errors(
    exact: Sequence[Array], other: Sequence[Array], parts: Mapping[int, Sequence[Sequence[int]]]
) -> list[float]:
    """The relative L2 error of each output and part; of whole numbers, the share that differs."""
    found = []
    for index, (a, b) in enumerate(zip(exact, other, strict=True)):
        if a.shape == b.shape and a.dtype.kind in "biu":
            found.append(float(np.mean(a != b)) if a.size else 0.0)
            continue
        found.append(_error(a, b))
        for axis, start, end in parts.get(index, ()):
            found.append(_error(*(np.take(array, np.arange(start, end), axis) for array in (a, b))))
    return found


def _error(a: Array, b: Array) -> float:
    """Masks, which are infinite or beyond 1e30, have to be masks in both, and are left out."""
    if a.shape != b.shape:
        return WRONG
    a, b = a.astype(np.float64), b.astype(np.float64)
    masks, others = ~np.isfinite(a) | (np.abs(a) > 1e30), ~np.isfinite(b)
    if np.any(others & ~masks) or np.any(masks & ~others & (np.abs(b) < np.finfo(np.float16).max)):
        return WRONG
    a, b = a[~masks], b[~masks]
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / size if size else float(np.max(np.abs(b), initial=0.0))
