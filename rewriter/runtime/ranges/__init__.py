"""Measured ranges: statistics computed inside the graph, streamed over the samples.

ONNX Runtime returns one value per tensor and statistic, never a tensor, so memory grows neither with the
samples nor with the number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from onnx import NodeProto, helper

from rewriter.ir.graph import constant_value, display_name, reads
from rewriter.ir.graph.weights import ChannelKey
from rewriter.ir.model import Array, Model, walk_graphs
from rewriter.ir.model.graphs import RUNTIME_OPERATORS, schema_of
from rewriter.ir.model.tensors import FLOATS, release
from rewriter.ir.plan import HEADROOM, Range, node_key
from rewriter.runtime.engines.onnxruntime import Session, qualified
from rewriter.runtime.engines.onnxruntime_library import NoKernelError
from rewriter.runtime.ranges.instrument import Instrumented, instrument
from rewriter.runtime.ranges.reductions import Key, Moves, with_steps

BLOCK = 2**20
"""Elements of a constant that are reduced together: 4 MiB of FP32, about the size of a cache."""


class Ranges(dict[Key, Range]):
    """Ranges by scope index (the order of `Facts.scopes`) and tensor name.

    Tensors without a range were never computed: they depend on an operator that ONNX Runtime cannot run,
    or lie in a branch or loop body that no sample reached.

    Attributes:
        unsupported: Operators without a kernel, sorted.
        real: False for random samples: on the user's data, a tensor may be far smaller.
        outputs: The model's outputs for some samples, by index; none if part of it cannot run.
        means: Means of channels, if requested, averaged over the samples.
    """

    unsupported: tuple[str, ...] = ()
    real: bool = True

    def __init__(self, ranges: Mapping[Key, Range] | Iterable[tuple[Key, Range]] = ()) -> None:
        super().__init__(ranges)
        self.outputs: dict[int, Mapping[str, Array]] = {}
        self.means: dict[ChannelKey, Array] = {}


def measure(
    model: Model,  # computes in FP32; see `emulation.reference`
    samples: Iterable[Mapping[str, Array]],  # feeds; one is in memory at a time
    *,
    # places of samples for which the outputs are kept, too, as without statistics
    outputs_of: Collection[int] = (),
    channels: bool = False,  # also measure the means of the channels that products by initializers sum over
    # median steps of outputs that become inputs of the next call, where they were recorded
    steps: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda done: None,  # called with the number of samples done
) -> Ranges:
    """Ranges of all float tensors, subgraphs included, over all samples.

    Raises:
        ArithmeticRunError: a sample fails to run; the message names the node.
    """
    ranges = Ranges(constant_ranges(model))
    unsupported = _Unsupported(model)
    probe, session = _open(model, unsupported, channels)
    ranges.unsupported = tuple(sorted(unsupported.ops))
    vectors = {name: None for pack in probe.packs for name in pack.vectors} | dict.fromkeys(probe.means)
    start = np.array([-np.inf, np.inf, 0.0, 0.0, 0.0])
    highs, lows, logs, means, runs = np.repeat(start[:, None], len(probe.keys), axis=1)
    number = 0
    if session is not None:
        with session:
            for number, feeds in enumerate(samples, 1):
                index = number - 1
                values = session.run(feeds, None if index in outputs_of else list(vectors))
                if own := {name: value for name, value in values.items() if name not in vectors}:
                    ranges.outputs[index] = own
                high, low, mean, ran = probe.read(values)
                highs, lows = np.fmax(highs, high), np.fmin(lows, low)
                with np.errstate(divide="ignore", invalid="ignore"):  # 0 in one sample, infinite in another
                    logs += np.log(np.fmax(np.abs(high), np.abs(low)))  # infinite where it did not run
                means, runs = means + mean, runs + ran
                for channels_of, means_of in probe.read_means(values):
                    before = ranges.means.get(channels_of, np.zeros_like(means_of))
                    ranges.means[channels_of] = before + (means_of - before) / number
                progress(number)
    room = headroom(np.fmax(np.abs(highs), np.abs(lows)), logs / max(1, number), number)
    rows = zip(probe.keys, *(column.tolist() for column in (highs, lows, means, runs)), strict=True)
    counts = dict[Moves, float]()
    for key, high, low, mean, ran in rows:
        if isinstance(key, Moves):
            counts[key] = mean
        elif ran:
            ranges[key] = _range(high, low, mean / ran, room)
    ranges.update((key, ranges[source]) for key, source in probe.copies if source in ranges)
    ranges.update(with_steps(ranges, counts))
    recorded = {(0, name): step for name, step in (steps or {}).items() if (0, name) in ranges}
    ranges.update((key, replace(ranges[key], step=step)) for key, step in recorded.items())
    return ranges


def _open(model: Model, unsupported: _Unsupported, channels: bool) -> tuple[Instrumented, Session | None]:
    """The instrumented model without operators that have no kernel; no session if nothing is left."""
    while True:
        probe = instrument(model, unsupported, channels)
        if not probe.keys:
            return probe, None
        try:
            return probe, Session(probe.model)
        except NoKernelError as error:
            if not unsupported.learn(error):
                raise


def constant_ranges(model: Model) -> Iterator[tuple[Key, Range]]:
    """Ranges of initializers and Constant nodes, computed by numpy."""
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        for tensor in graph.initializer:
            if tensor.data_type in FLOATS:
                array = model.array(tensor)
                yield (scope, tensor.name), range_of(array)
                release(array)
        for node in graph.node:
            value = constant_value(node) if node.op_type == "Constant" else None
            if value is not None and helper.np_dtype_to_tensor_dtype(value.dtype) in FLOATS:
                yield (scope, node.output[0]), range_of(value)


def range_of(array: Array) -> Range:
    """The range of one array of floats; 0 to 0 if it is empty."""
    flat = array.reshape(-1)
    low, high, total = math.inf, -math.inf, 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # float64 beyond FP32 becomes infinite
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK].astype(np.float32, copy=False)
            low = float(np.fmin(low, np.fmin.reduce(block)))
            high = float(np.fmax(high, np.fmax.reduce(block)))
            total += float(np.abs(block).sum(dtype=np.float64))
    return _range(high, low, total / max(1, flat.size))


def _range(high: float, low: float, mean: float, room: float = HEADROOM) -> Range:
    """The range from extremes that skip NaN and start at -inf and inf; a NaN makes `mean` NaN."""
    if low > high:  # empty, or only NaN
        low = high = mean
    finite = math.isfinite(low) and math.isfinite(high) and not math.isnan(mean)
    largest = max(abs(low), abs(high))
    if finite and math.isinf(mean):  # the sum overflowed FP32, the values did not
        mean = largest
    return Range(low, high, mean, finite, room)


def headroom(largest: Array, logarithms: Array, samples: int) -> float:
    """Growth over the samples that has to fit, from what these differ by: 2 to 128.

    If the logarithms of a tensor's largest values are normally distributed, the largest of n samples is e
    standard deviations above the mean (Blom 1958), and one at 3 is 3 - e further up. In few samples a tensor
    may agree by chance, and one overflow spoils all outputs: what 99 of 100 tensors stay below counts.
    AutoCast keeps in FP32 what comes within a factor of 128 of FP16's largest number.

    Args:
        largest: Absolute value of each tensor over all samples.
        logarithms: Of the largest absolute value in each sample, averaged.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        growth = largest / np.exp(logarithms)
    growth = growth[np.isfinite(growth) & (growth > 0.0)]
    if samples < 2 or not growth.size:
        return HEADROOM
    e = NormalDist().inv_cdf((samples - 0.375) / (samples + 0.25))
    return float(np.clip(np.quantile(growth, 0.99) ** ((3.0 - e) / e), HEADROOM, 128.0))


class _Unsupported:
    """Operators that ONNX Runtime cannot run: unknown to onnx, or refused at load; `ops`: that occurred."""

    def __init__(self, model: Model) -> None:
        self.ops: set[str] = set()
        self._model = model
        self._facts = model.facts()
        self._functions = {(f.domain, f.name) for f in model.proto.functions}
        self._refused: set[tuple[str, tuple[int, ...] | None]] = set()

    def __call__(self, node: NodeProto, scope: int) -> bool:
        op = qualified(node)
        foreign = op != node.op_type or (node.domain, op) in self._functions
        refused = self._refused and {(op, None), self._kind(node, scope)} & self._refused
        if refused or not (foreign or op in RUNTIME_OPERATORS or schema_of(op, "", self._model.opset)):
            self.ops.add(op)
            return True
        return False

    def learn(self, error: NoKernelError) -> bool:
        """Refuses the operator that `error` names, for its node's input types; False if it was already."""
        kinds = {
            self._kind(node, scope)
            for scope, graph in enumerate(walk_graphs(self._model.proto.graph))
            for node in graph.node
            if display_name(node) == error.node and qualified(node) == error.op
        }
        new = (kinds or {(error.op, None)}) - self._refused
        self._refused |= new
        return bool(new)

    def _kind(self, node: NodeProto, scope: int) -> tuple[str, tuple[int, ...] | None]:
        facts = self._facts.scopes[scope]
        return qualified(node), tuple(facts[n].dtype if n in facts else 0 for n in node.input)


@dataclass(frozen=True, slots=True)
class TensorAtDepth:
    """One measured tensor and its place in the network."""

    # index among the nodes with measured results, in graph order; bodies of branches and loops follow their
    # graph. A constant has the depth of the first node that reads it
    depth: int
    tensor: str  # its name; `node`, `op`: its producer, or the reader of a constant
    node: str
    op: str
    key: str
    range: Range
    constant: bool = False


def along_depth(model: Model, ranges: Mapping[Key, Range]) -> tuple[TensorAtDepth, ...]:
    """Returns every tensor of the model that has a range, in the order of its graphs and nodes."""
    found: list[TensorAtDepth] = []
    depth = 0
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        constants = {tensor.name for tensor in graph.initializer}
        constants.update(node.output[0] for node in graph.node if node.op_type == "Constant")
        for node in graph.node:
            if node.op_type != "Constant":
                tensors = list(_of_node(scope, node, depth, constants, ranges))
                found.extend(tensors)
                depth += any(not tensor.constant for tensor in tensors)
    return tuple(found)


def _of_node(
    scope: int, node: NodeProto, depth: int, constants: set[str], ranges: Mapping[Key, Range]
) -> Iterator[TensorAtDepth]:
    """The node's results, and the constants that no earlier node reads, which leave `constants`."""
    name, key = display_name(node), node_key(scope, node)
    for output in node.output:
        if (scope, output) in ranges:
            yield TensorAtDepth(depth, output, name, node.op_type, key, ranges[scope, output])
    for tensor in dict.fromkeys(reads(node)):
        if tensor in constants and (scope, tensor) in ranges:
            constants.discard(tensor)
            yield TensorAtDepth(depth, tensor, name, node.op_type, key, ranges[scope, tensor], constant=True)
