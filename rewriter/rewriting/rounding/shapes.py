"""The shapes that tensors have for one sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from onnx import NodeProto, helper

from rewriter.data.ranges.binades import leading_to
from rewriter.data.ranges.instrument import unused_prefix
from rewriter.data.ranges.reductions import Emitter, Names
from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model
from rewriter.model.facts import infer

Shapes = Mapping[str, tuple[int, ...]]


def inferred_shapes(model: Model, feeds: Mapping[str, Array]) -> Shapes:
    """The shapes of the main graph's tensors, as far as they follow from the sample's."""
    model = model.copy()
    del model.proto.graph.value_info[:]  # what is named there would stay a name
    for value in model.proto.graph.input:
        if value.name in feeds:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, np.shape(feeds[value.name]), strict=False):
                dim.dim_value = size
    found: dict[str, tuple[int, ...]] = {}
    for name, known in infer(model).main.items():
        sizes = tuple(size for size in known.shape or () if isinstance(size, int))
        if known.shape is not None and len(sizes) == len(known.shape):
            found[name] = sizes
    return found


def shapes(model: Model, tensors: Collection[str], feeds: Mapping[str, Array]) -> Shapes:
    """The shapes of those tensors of the main graph: inferred, or by a run where values decide on them.

    Raises:
        NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
    """
    known = inferred_shapes(model, feeds)
    missing = [name for name in tensors if name not in known]
    if not missing:
        return known
    probe = model.copy()
    emit = emitter(probe)
    emit.nodes.extend(leading_to(probe.proto.graph, missing))
    names = [emit.add("Shape", [name]) for name in missing]
    keep_only(probe, emit.nodes, names)
    with Session(probe) as session:
        computed = session.run(feeds)
    return {**known, **{t: tuple(computed[name].tolist()) for t, name in zip(missing, names, strict=True)}}


def emitter(model: Model) -> Emitter:
    """For new nodes of the main graph."""
    return Emitter(Names(unused_prefix(model.proto, "rows:"), model.opset), [])


def keep_only(model: Model, nodes: Iterable[NodeProto], outputs: Iterable[str]) -> None:
    """Let the main graph hold those nodes and outputs and nothing else; their types follow from the nodes."""
    graph, kept = model.proto.graph, [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend(kept)
    for name in outputs:
        graph.output.append(helper.make_empty_tensor_value_info(name))
