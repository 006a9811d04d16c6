"""Compares the user's data with what the model's first layers expect.

The commonest cause of "TensorRT lost accuracy" is data that was prepared differently than in training.
None of this is certain, so all findings are warnings, and no warning proves nothing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, open_graphs, reached
from rewriter.ir.graph.ops import RECURRENT, VIEWS
from rewriter.ir.model import Array, Model, Port, walk_nodes
from rewriter.ir.model import facts as tensor_facts
from rewriter.runtime.expectations.first_layers import FirstLayers, first_layers
from rewriter.runtime.inputs import Samples
from rewriter.runtime.inputs.random_samples import table_sizes

__all__ = ["Expectation", "Unexpected", "data_warnings", "input_expectations", "unexpected"]

SPREAD = 20.0
"""Accepted distance from mean 0 in deviations, and from deviation 1 as a factor. Dark or flat images have a
deviation of 0.2; a forgotten or doubled division by 255 gives 255 or 0.004, so both sides have room."""

WIDE = 20.0
"""Larger values are pixels of 0..255: neither of 0..1, nor normalised."""

INITIAL_STATES = slice(5, 7)
"""Places of the initial states among the inputs of LSTM, GRU and RNN."""

SAMPLES = 8
"""The number of samples that are examined."""


@dataclass(frozen=True)
class Expectation:
    """What the model shows about one input.

    Attributes:
        rows: Size of the table that the input indexes; None if it indexes none.
        mask: True if the input's name contains "mask", or it is boolean.
        state: True if it carries what an earlier call left; a stream starts with zeros.
        layers: The first operations on it; None for inputs other than floats and bytes.
    """

    input: str
    dtype: int
    rows: int | None
    mask: bool
    state: bool
    layers: FirstLayers | None


@dataclass(frozen=True)
class Unexpected:
    """A conflict between the data of one input and the model's first layers."""

    input: str
    text: str
    hint: str

    def __str__(self) -> str:
        return f"input {self.input!r}: {self.text}; {self.hint}"


def input_expectations(model: Model) -> tuple[Expectation, ...]:
    """Expectations for each input of the model, without running it."""
    graph = open_graphs(model, tensor_facts.infer(model))[0]
    rows, states = table_sizes(model), _states(model)
    return tuple(
        Expectation(
            port.name,
            port.dtype,
            rows.get(port.name),
            "mask" in port.name.lower() or port.dtype == TensorProto.BOOL,
            port.name in states,
            _layers(graph, port.name, port.dtype),
        )
        for port in model.signature.inputs
    )


def unexpected(model: Model, samples: Iterable[Mapping[str, Array]]) -> tuple[Unexpected, ...]:
    """Conflicts between the data and the model's first layers; () if there are none.

    Args:
        samples: Feeds by input name; the first `SAMPLES` are examined, one in memory at a time.
    """
    expectations = input_expectations(model)
    found: dict[str, list[Summary]] = {e.input: [] for e in expectations}
    for _, sample in zip(range(SAMPLES), samples, strict=False):
        for expectation in expectations:
            if expectation.input in sample:
                layers = expectation.layers
                axis = layers.channel_axis if layers else None
                found[expectation.input].append(summarize(np.asarray(sample[expectation.input]), axis))
    return tuple(u for e in expectations if found[e.input] for u in _gravest(e, found[e.input]))


def data_warnings(model: Model, samples: Samples) -> tuple[str, ...]:
    """What was done to the user's data, and its conflicts with the model; () for random data."""
    found = unexpected(model, samples) if samples.source.real else ()
    conflicts = (f"the data may be prepared in another way than the model expects: {item}" for item in found)
    return (*(f"inputs: {note}" for note in samples.notes), *conflicts)


def _layers(graph: GraphEditor, name: str, dtype: int) -> FirstLayers | None:
    return first_layers(graph, name) if dtype in tensor_facts.FLOATS | {TensorProto.UINT8} else None


def _states(model: Model) -> set[str]:
    """The inputs that a recurrent operator starts from, or that an output of their shape replaces later.

    The second kind are the states of unrolled cells and the caches of streams. No state is the only input.
    """
    inputs, outputs = model.signature.inputs, model.signature.outputs
    if len(inputs) < 2:
        return set()
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in walk_nodes(model.proto.graph):
        for name in filter(None, node.input):
            readers[name].append(node)

    def onward(name: str) -> list[str]:
        return [out for n in readers[name] if n.op_type in VIEWS | {"Cast", "Identity"} for out in n.output]

    starts = {
        port.name
        for port in inputs
        for name in reached([port.name], onward)
        if any(n.op_type in RECURRENT and name in n.input[INITIAL_STATES] for n in readers[name])
    }
    return starts | {a.name for a in inputs for b in outputs if _same_shape(a, b)}


def _same_shape(one: Port, other: Port) -> bool:
    """True if two tensors have one type and rank, and no size that differs."""
    if one.dtype != other.dtype or not one.shape or not other.shape or len(one.shape) != len(other.shape):
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in sizes)


def _gravest(expected: Expectation, seen: Sequence[Summary]) -> Iterator[Unexpected]:
    """Only the gravest conflict: others often follow from it and would distract."""
    if expected.state and all(s.low == s.high == 0.0 and not s.not_finite for s in seen):
        return
    rules = (_not_finite, _out_of_table, _no_mask, _constant, _repeated, _transposed, _scaled)
    for rule in rules:
        found = rule(expected, seen)
        if found is not None:
            yield Unexpected(expected.input, *found)
            return


Conflict = tuple[str, str] | None
"""What is wrong, and what to do."""


def _not_finite(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    bad = [s for s in seen if s.not_finite > s.negative_infinite * expected.mask]
    if not bad:
        return None
    return f"{bad[0].not_finite} values are NaN or infinite", "check the program that wrote the data"


def _out_of_table(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    if expected.rows is None or expected.rows <= 1:
        return None
    low, high = min(s.low for s in seen), max(s.high for s in seen)
    if -expected.rows <= low and high < expected.rows:
        return None
    return (
        f"ids go from {low:g} to {high:g}, but the table that they index has {expected.rows} rows",
        "the tokenizer is another model's, or ids of labels (-100) were saved",
    )


def _no_mask(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    if not expected.mask:
        return None
    if all(s.low == s.high == 0.0 for s in seen) and expected.dtype != TensorProto.FLOAT:
        return "the mask is 0 everywhere: everything is masked", "1 is for tokens, 0 for padding"
    binary = all(s.levels is not None and set(s.levels) <= {0.0, 1.0} for s in seen)
    additive = all(s.high <= 0.0 for s in seen)
    if binary or additive:
        return None
    return (
        f"the mask has values from {min(s.low for s in seen):g} to {max(s.high for s in seen):g}",
        "masks are 0 and 1, or 0 and a large negative number",
    )


def _constant(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    if expected.mask or not all(s.low == s.high and s.size > 16 for s in seen):
        return None
    return f"all values are {seen[0].low:g}", "measure on real data: constants hide faults and cause others"


def _repeated(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    if expected.mask or len(seen) < 2 or seen[0].size <= 16 or len({s.digest for s in seen}) > 1:
        return None
    return f"all {len(seen)} samples are the same", "give different ones, or one alone"


def _transposed(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    layers = expected.layers
    if layers is None or layers.channels is None or layers.channel_axis is None:
        return None
    shape, axis = seen[0].shape, layers.channel_axis
    if len(shape) != 4 or shape[axis] == layers.channels or shape[4 - axis] != layers.channels:
        return None
    have, want = ("NHWC", "NCHW") if axis == 1 else ("NCHW", "NHWC")
    return f"the data is {have} {list(shape)}, the first Conv reads {want}", "transpose the data"


def _scaled(expected: Expectation, seen: Sequence[Summary]) -> Conflict:
    layers = expected.layers
    if layers is None or not (layers.normalizes or layers.mean is not None):
        return None
    means, deviations = (np.mean([getattr(s, n) for s in seen], axis=0) for n in ("mean", "deviation"))
    low, high = min(s.low for s in seen), max(s.high for s in seen)
    shape = np.broadcast(means, layers.factor)
    if means.size not in (1, shape.size) or layers.factor.size not in (1, means.size):
        return None
    centre = means * layers.factor + layers.offset
    width = deviations * np.abs(layers.factor)
    if layers.mean is not None and layers.deviation is not None:
        if layers.mean.size not in (1, centre.size):
            return None
        centre, width = (centre - layers.mean) / layers.deviation, width / layers.deviation
    if np.max(np.abs(centre)) <= SPREAD and 1.0 / SPREAD <= np.median(width) <= SPREAD:
        return None
    span = (
        f"values {low:.3g}..{high:.3g} give mean {np.median(centre):.3g} and deviation {np.median(width):.3g}"
    )
    return f"{layers.text}; {span} after it", _scale_hint(low, high, float(np.median(width)))


def _scale_hint(low: float, high: float, width: float) -> str:
    if width < 1.0 and low >= -WIDE and high <= WIDE:
        return "was the data divided by 255, or normalised, already?"
    if high > WIDE:
        return "must the data be divided by 255 first?"
    return "prepare the data as for training"


@dataclass(frozen=True)
class Summary:
    """Statistics of the finite values of an array; 0 if there are none.

    Attributes:
        mean, deviation: Per channel, or of all values (size 1) without a channel axis.
        levels: The distinct values if there are at most three.
        negative_infinite: The number of values that are -infinity, which masks use.
        digest: A hash of the array.
    """

    shape: tuple[int, ...]
    size: int
    low: float
    high: float
    mean: Array
    deviation: Array
    levels: tuple[float, ...] | None
    not_finite: int
    negative_infinite: int
    digest: str


def summarize(array: Array, channel_axis: int | None) -> Summary:
    """Summarizes an array of any real element type."""
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    usable = values[finite]
    axis = channel_axis if channel_axis is not None and channel_axis < values.ndim else None
    channels = values[np.newaxis] if axis is None else np.moveaxis(values, axis, 0)
    rows = channels.reshape(len(channels), -1)
    clean = np.where(np.isfinite(rows), rows, 0.0)
    few = np.unique(usable[:4096])
    levels = tuple(np.unique(usable).tolist()) if few.size <= 3 else None
    return Summary(
        values.shape,
        values.size,
        float(usable.min()) if usable.size else 0.0,
        float(usable.max()) if usable.size else 0.0,
        clean.mean(axis=1) if clean.size else np.zeros(1),
        clean.std(axis=1) if clean.size else np.zeros(1),
        levels if levels is not None and len(levels) <= 3 else None,
        int(values.size - usable.size),
        int(np.isneginf(values).sum()),
        hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
    )
