"""Distribution of tensors' values over powers of two, counted inside the graph.

Elements are sampled evenly, and `Unique` counts their binary exponents, so that only a few dozen numbers
per tensor leave ONNX Runtime. The count is a run of its own, with only the nodes that compute the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log

import numpy as np
from onnx import GraphProto, NodeProto, helper

from rewriter.data.ranges.instrument import unused_prefix
from rewriter.data.ranges.reductions import Emitter, Names
from rewriter.engines.onnxruntime import Session
from rewriter.graph import reads
from rewriter.model import Array, Model, refill

SAMPLED = 2**14
"""Elements that are sampled, evenly spaced: shares are then known to 0.4 %, the standard error of one half,
0.5 / sqrt(SAMPLED)."""

OPSET = 11
"""The operator set that introduced `Unique`. Nothing is counted in older models."""

PACKED = 128
"""Tensors whose counts share one output."""


@dataclass(frozen=True)
class Binades:
    """Distribution of the nonzero absolute values of a tensor over powers of two.

    Attributes:
        first: The lowest binade with a value; it covers [2^first, 2^(first + 1)).
        shares: The share of the values in each binade from there on; they sum to 1.
    """

    first: int
    shares: tuple[float, ...]

    def quantile(self, share: float) -> int:
        """The largest exponent with at most `share` of the values below its power of two."""
        below = 0.0
        for index, part in enumerate(self.shares):
            below += part
            if below > share:
                return self.first + index
        return self.first + len(self.shares)


def measure_binades(
    model: Model, samples: Iterable[Mapping[str, Array]], tensors: Collection[str]
) -> dict[str, Binades]:
    """The binades of float tensors of the main graph, over all samples.

    Args:
        model: Computes in FP32; see `emulation.reference`.
        tensors: Names; tensors that are not computed there, or hold only 0 or no finite number, are left out.

    Raises:
        ArithmeticRunError: a sample fails to run; the message names the node.
    """
    computed = {name for node in model.proto.graph.node for name in node.output}
    wanted = [name for name in dict.fromkeys(tensors) if name in computed]
    if not wanted or model.opset < OPSET:
        return {}
    probe, packs = _instrumented(model, wanted)
    counts: dict[str, Counter[int]] = {name: Counter() for name in wanted}
    with Session(probe) as session:
        for feeds in samples:
            outputs = session.run(feeds)
            for pack in packs:
                for name, exponent, number in pack.read(outputs):
                    counts[name][exponent] += number
    return {name: _binades(count) for name, count in counts.items() if count}


@dataclass(frozen=True)
class _Pack:
    """Three outputs: exponents and their counts, tensor after tensor, and the number of them per tensor."""

    tensors: list[str]
    exponents: str
    numbers: str
    lengths: str

    def read(self, outputs: Mapping[str, Array]) -> Iterator[tuple[str, int, int]]:
        """Tensor, binary exponent and count, for finite values other than 0."""
        names = np.repeat(np.arange(len(self.tensors)), outputs[self.lengths])
        rows = zip(
            names.tolist(), outputs[self.exponents].tolist(), outputs[self.numbers].tolist(), strict=True
        )
        for index, exponent, number in rows:
            if isfinite(exponent):
                yield self.tensors[index], int(exponent), number


def _binades(count: Counter[int]) -> Binades:
    first, total = min(count), count.total()
    return Binades(first, tuple(count[e] / total for e in range(first, max(count) + 1)))


def _instrumented(model: Model, wanted: Sequence[str]) -> tuple[Model, list[_Pack]]:
    """A copy of the model whose only outputs are counts."""
    result = model.copy()
    graph = result.proto.graph
    nodes: list[NodeProto] = []
    emit = Emitter(Names(unused_prefix(result.proto, "binades:"), model.opset), nodes)
    counted: dict[str, tuple[str, str]] = {}
    missing = set(wanted)
    for node in _leading_to(graph, wanted):
        nodes.append(node)
        counted.update((name, _count(emit, name)) for name in node.output if name in missing)
    packs = [_pack(emit, wanted[i : i + PACKED], counted) for i in range(0, len(wanted), PACKED)]
    _keep_only(result, nodes, [name for p in packs for name in (p.exponents, p.numbers, p.lengths)])
    return result, packs


def _pack(emit: Emitter, tensors: Sequence[str], counted: Mapping[str, tuple[str, str]]) -> _Pack:
    exponents, numbers = zip(*(counted[name] for name in tensors), strict=True)
    lengths = [emit.add("Shape", [name]) for name in numbers]
    joined = (emit.add("Concat", names, axis=0) for names in (exponents, numbers, lengths))
    return _Pack(list(tensors), *joined)


def _leading_to(graph: GraphProto, wanted: Collection[str]) -> list[NodeProto]:
    """The nodes that some tensors depend on, in graph order."""
    missing, found = set(wanted), []
    for node in reversed(graph.node):
        if not missing.isdisjoint(node.output):
            missing.update(reads(node))
            found.append(node)
    return found[::-1]


def _keep_only(model: Model, nodes: Iterable[NodeProto], outputs: Iterable[str]) -> None:
    """Reduce the main graph to these nodes and outputs; the outputs' types follow from the nodes."""
    graph = model.proto.graph
    refill(graph.node, nodes)
    refill(graph.output, map(helper.make_empty_tensor_value_info, outputs))
    del graph.value_info[:]


def _count(emit: Emitter, tensor: str) -> tuple[str, str]:
    """The binary exponents of a tensor's values, -inf for zeros, and their counts."""
    flat = emit.add("Reshape", [tensor, emit.constant([-1], np.int64)])
    size = emit.add("Size", [flat])
    step = emit.add("Div", [size, emit.constant(SAMPLED, np.int64)])
    # an odd step visits all channels even where their number is a power of two
    odd = emit.add(
        "Add", [emit.add("Mul", [step, emit.constant([2], np.int64)]), emit.constant([1], np.int64)]
    )
    bounds = [emit.constant([value], np.int64) for value in (0, 2**62, 0)]
    sampled = emit.add("Slice", [flat, *bounds, odd])
    logarithm = emit.add("Log", [emit.add("Abs", [sampled])])
    exponent = emit.add("Floor", [emit.add("Mul", [logarithm, emit.constant(1 / log(2), np.float32)])])
    found, numbers = emit.names.fresh(), emit.names.fresh()
    emit.nodes.append(helper.make_node("Unique", [exponent], [found, "", "", numbers], name=found))
    return found, numbers
