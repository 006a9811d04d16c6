"""How the values of some tensors spread over powers of two: counted inside the graph.

A tensor is sampled evenly, and `Unique` counts the binary exponents, so that a few dozen numbers of it
leave ONNX Runtime. It takes a run of its own, with nothing in it but what leads to those tensors: who
asks for no tensor pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isfinite, log

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from rewriter.data.ranges.instrument import unused_prefix
from rewriter.data.ranges.statistics import Emitter, Names
from rewriter.engines.onnxruntime import Session
from rewriter.graph import reads
from rewriter.model import Array, Model

SAMPLED = 2**14
"""Elements of a tensor that are looked at, evenly spaced: shares are then known to 0.4 % (the
standard error of one half is 0.5 / sqrt(SAMPLED))."""

OPSET = 11
"""`Unique` came with it. Of older models nothing is counted."""

PACKED = 128
"""Tensors whose counts leave as one output."""


@dataclass(frozen=True)
class Binades:
    """How the nonzero absolute values of a tensor spread over powers of two.

    Attributes:
        first: The lowest binade that holds a value: its values are in [2^first, 2^(first + 1)).
        shares: What share of the values lies in each binade from there on; they sum to 1.
    """

    first: int
    shares: tuple[float, ...]

    def quantile(self, share: float) -> int:
        """The largest exponent below whose power of two no more than `share` of the values lie."""
        below = 0.0
        for index, part in enumerate(self.shares):
            below += part
            if below > share:
                return self.first + index
        return self.first + len(self.shares)


def measure_binades(
    model: Model, samples: Iterable[Mapping[str, Array]], tensors: Collection[str]
) -> dict[str, Binades]:
    """How the values of float tensors of the main graph spread, over all samples.

    Args:
        model: Computes in FP32; see `emulation.reference`.
        tensors: What is not computed there is left out, and so is what holds no finite number but 0.

    Raises:
        ArithmeticRunError: a sample does not run; the message names the node.
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
    """Three outputs of a probe: exponents and their numbers, of one tensor after the other, and how many."""

    tensors: list[str]
    exponents: str
    numbers: str
    lengths: str

    def read(self, outputs: Mapping[str, Array]) -> Iterator[tuple[str, int, int]]:
        """Tensor, binary exponent and number of values, without zeros and what is not finite."""
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
    """A copy of the model that counts, and nothing else."""
    result = model.copy()
    graph = result.proto.graph
    nodes: list[NodeProto] = []
    emit = Emitter(Names(unused_prefix(result.proto, "binades:"), model.opset), nodes)
    counted: dict[str, tuple[str, str]] = {}
    missing = set(wanted)
    for node in leading_to(graph, wanted):
        nodes.append(NodeProto.FromString(node.SerializeToString()))
        counted.update((name, _count(emit, name)) for name in node.output if name in missing)
    packs = [_pack(emit, wanted[i : i + PACKED], counted) for i in range(0, len(wanted), PACKED)]
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    for pack in packs:
        for name in (pack.exponents, pack.numbers, pack.lengths):
            dtype = TensorProto.FLOAT if name == pack.exponents else TensorProto.INT64
            graph.output.append(helper.make_tensor_value_info(name, dtype, [None]))
    return result, packs


def _pack(emit: Emitter, tensors: Sequence[str], counted: Mapping[str, tuple[str, str]]) -> _Pack:
    exponents, numbers = zip(*(counted[name] for name in tensors), strict=True)
    lengths = [emit.add("Shape", [name]) for name in numbers]
    joined = (emit.add("Concat", names, axis=0) for names in (exponents, numbers, lengths))
    return _Pack(list(tensors), *joined)


def leading_to(
    graph: GraphProto, wanted: Collection[str], held: AbstractSet[str] = frozenset()
) -> list[NodeProto]:
    """The nodes that some tensors depend on, in the graph's order; nothing leads to those that are `held`."""
    missing, found = set(wanted) - held, []
    for node in reversed(graph.node):
        if not missing.isdisjoint(node.output):
            missing.update(name for name in reads(node) if name not in held)
            found.append(node)
    return found[::-1]


def _count(emit: Emitter, tensor: str) -> tuple[str, str]:
    """The binary exponents of a tensor's values, -inf for zeros, and how often each occurs."""
    flat = emit.add("Reshape", [tensor, emit.constant([-1], np.int64)])
    size = emit.add("Size", [flat])
    step = emit.add("Div", [size, emit.constant(SAMPLED, np.int64)])
    # an odd step beyond 1 goes through all channels of a size that is a power of two
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
