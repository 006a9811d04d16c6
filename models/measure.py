"""The naive baseline: a model's outputs when every FP32 tensor is rounded to FP16, weights included.

`python models/measure.py models/vit.onnx [models/vit.npz] [--keep Pow,ReduceMean,...]`

Arithmetic stays FP32 (ONNX Runtime CPU, graph optimisations off), with explicit Casts f32 -> f16 -> f32 after every
tensor. ONNX Runtime's own FP16 kernels would hide overflow between fused nodes.
Needs onnx, onnxruntime and numpy only.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference

# The largest finite FP16 number.
HALF_MAX = np.float32(65504)

# Operators of decomposed LayerNorm and RMSNorm; an Add or Mul between two of them (epsilon, 1/std) belongs to them.
NORM_OPS = frozenset({"Sub", "Pow", "ReduceMean", "ReduceSum", "ReduceL2", "Sqrt", "Reciprocal", "Div"})
# Operators that pass a value from one kept node to the next unchanged, or add the epsilon to it.
BETWEEN = frozenset({"Add", "Mul", "Clip", "Expand", "Cast", "Reshape", "Unsqueeze"})


def naive_fp16(model: onnx.ModelProto, keep: Collection[str] = ()) -> onnx.ModelProto:
    """A copy of `model` in which every FP32 tensor passes through FP16, except inside `keep` islands.

    Local functions are inlined first. Inner graphs of If, Loop and Scan are rounded, too. Raises ValueError if shape
    inference cannot find the type of a tensor.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    inferred = shape_inference.infer_shapes(copy)
    _round_graph(copy.graph, inferred.graph, frozenset(keep), itertools.count(), top=True)
    return copy


def _round_graph(graph, inferred, keep: frozenset[str], counter, top: bool) -> None:
    """Rounds initializers in place, and the value of every FP32 node output (and top-level input) with two Casts."""
    kept, types = _kept_tensors(graph, keep), _types(inferred)
    _round_initializers(graph, kept)
    outputs, renamed = {v.name for v in graph.output}, {}
    nodes = _round_inputs(graph, renamed, counter) if top else []
    for node, twin in zip(list(graph.node), inferred.node, strict=True):
        for attribute, other in zip(node.attribute, twin.attribute, strict=True):
            if attribute.type == onnx.AttributeProto.GRAPH:
                _round_graph(attribute.g, other.g, keep, counter, top=False)
                _rename_uses(attribute.g, renamed)
        node.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(node)
        for position, name in _float_outputs(node, types):
            if name in kept:
                continue
            if name in outputs:  # the graph's output keeps its name: rename the exact value instead
                node.output[position] = f"{name}__exact"
                nodes += _detour(f"{name}__exact", name, counter)
            else:
                nodes += _detour(name, renamed.setdefault(name, f"{name}__half"), counter)
    del graph.node[:]
    graph.node.extend(nodes)


def _round_initializers(graph, kept: set[str]) -> None:
    """Rounds every FP32 initializer to FP16's values, in place, except the kept ones."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
            tensor.CopyFrom(numpy_helper.from_array(_to_half(numpy_helper.to_array(tensor)), tensor.name))


def _round_inputs(graph, renamed: dict[str, str], counter) -> list[onnx.NodeProto]:
    """Casts that round FP32 graph inputs; adds the new names to `renamed`."""
    weights = {tensor.name for tensor in graph.initializer}
    floats = [
        v.name
        for v in graph.input
        if v.type.tensor_type.elem_type == TensorProto.FLOAT and v.name not in weights
    ]
    return [c for name in floats for c in _detour(name, renamed.setdefault(name, f"{name}__half"), counter)]


def _float_outputs(node, types: Mapping[str, int]) -> list[tuple[int, str]]:
    """Position and name of each FP32 output of `node`; `types` are those of its graph."""
    unknown = [name for name in node.output if name and name not in types]
    if unknown:
        raise ValueError(f"type of {unknown[0]!r} (output of {node.op_type}) is unknown")
    return [(i, name) for i, name in enumerate(node.output) if name and types[name] == TensorProto.FLOAT]


def _types(inferred) -> dict[str, int]:
    """Element type of every value of a graph after shape inference."""
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    return {v.name: v.type.tensor_type.elem_type for v in values if v.type.HasField("tensor_type")}


def _rename_uses(graph, renamed: Mapping[str, str]) -> None:
    """Makes an inner graph read the rounded form of the outer tensors that it captures."""
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_uses(attribute.g, renamed)


def _kept_tensors(graph, keep: frozenset[str]) -> set[str]:
    """Outputs and constants whose consumers are all kept ops; so an island's last tensor is rounded."""
    if not keep:
        return set()
    makers = {name: node for node in graph.node for name in node.output}
    users: dict[str, list] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    inside = {id(node) for node in graph.node if node.op_type in keep}
    for node in graph.node:  # in topological order, so one sweep finds a whole chain of nodes in between
        from_inside = any(id(makers.get(name)) in inside for name in node.input)
        if node.op_type in BETWEEN and from_inside and _reaches(node, users, keep):
            inside.add(id(node))
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    constants |= {tensor.name for tensor in graph.initializer}
    made = {name for node in graph.node if id(node) in inside for name in node.output}
    return {
        name
        for name in constants | made
        if users.get(name) and all(id(user) in inside for user in users[name])
    }


def _reaches(node, users: Mapping[str, list], keep: frozenset[str], steps: int = 4) -> bool:
    """True if a kept op is within `steps` nodes downstream, with only `BETWEEN` ops on the way."""
    ahead = [node]
    for _ in range(steps):
        ahead = [user for n in ahead for name in n.output for user in users.get(name, ())]
        if any(user.op_type in keep for user in ahead):
            return True
        ahead = [n for n in ahead if n.op_type in BETWEEN]
    return False


def _detour(source: str, target: str, counter) -> list[onnx.NodeProto]:
    """Two Casts that round `source` to FP16 and write it back as `target`."""
    number = next(counter)
    return [
        helper.make_node("Cast", [source], [f"__f16_{number}"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", [f"__f16_{number}"], [target], to=TensorProto.FLOAT),
    ]


def _to_half(array: np.ndarray) -> np.ndarray:
    """Rounds a float32 array to FP16's values; larger ones than 65504 become inf, as in a Cast."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)


def clamped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with float32 constants clamped to FP16's range: a lowest-float mask becomes -65504, which Softmax ignores."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    values = [
        a.t
        for node in copy.graph.node
        if node.op_type == "Constant"
        for a in node.attribute
        if a.HasField("t")
    ]
    for tensor in [*values, *copy.graph.initializer]:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            if np.abs(array).max(initial=0) > HALF_MAX:
                tensor.CopyFrom(numpy_helper.from_array(array.clip(-HALF_MAX, HALF_MAX), tensor.name))
    return copy


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a model on ONNX Runtime's CPU, with graph optimisations off and two threads."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 2, 3
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want|| in float64; NaN if `got` has a NaN or an inf."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return float("nan")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def errors(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], keep: Collection[str] = ()
) -> dict[str, float]:
    """Relative L2 error of each float output of the naive form, against the original in FP32."""
    want, got = run(model, feeds), run(naive_fp16(model, keep), feeds)
    return {name: relative_error(got[name], want[name]) for name in want if want[name].dtype.kind == "f"}


def detections_error(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """Error of detections as a set: relative L2 of the distances from each wanted one to the nearest one found.

    `logits` [1, N, C] and `boxes` [1, N, 4] of one detection are compared together. Boxes are weighted by 10 so that
    both parts have similar sizes. A TopK that swaps near-equal queries only changes the order, which is ignored here.
    """
    a, b = (
        np.concatenate([r["logits"][0], 10 * r["boxes"][0]], axis=1).astype(np.float64) for r in (got, want)
    )
    if not np.isfinite(a).all():
        return float("nan")
    nearest = np.linalg.norm(b[:, None] - a[None], axis=-1).min(axis=1)
    return float(np.linalg.norm(nearest) / np.linalg.norm(b))


def main() -> None:
    """Prints the errors of one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("sample", type=Path, nargs="?", help="default: the model's path with .npz")
    parser.add_argument(
        "--keep", default="", help="op types kept in FP32, separated by commas; 'norms' for those of norms"
    )
    args = parser.parse_args()
    model = onnx.load(args.model)
    feeds = dict(np.load(args.sample or args.model.with_suffix(".npz")))
    keep = NORM_OPS if args.keep == "norms" else frozenset(filter(None, args.keep.split(",")))
    for name, error in errors(model, feeds, keep).items():
        print(f"{name}: {error:.2e}")


if __name__ == "__main__":
    main()
