"""Finds a model's tensors among those between an engine's kernels, which have other names and layouts."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import reads
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.protocol import Kernel
from rewriter.runtime.metrics.pairwise_error import Pair

SAMPLED = 2048
"""Elements by which layouts are told apart: in a wrong one, relative errors are about 1."""

UNLIKE = 0.1
"""Error of these beyond which a value is another tensor, or far from right."""

ALIKE = 0.7
"""Correlation from which a value is the tensor in its own layout, and wrong; in another one it is about 0."""

MOST_WRONG = 16
"""Wrong values after which the search is only for right ones: the first is what is wanted."""

LEAST = 1e-20
"""Squared norm from which the square of an error of 1e-8 is a normal number of FP32."""

MOST_AXES = 5
"""Axes of which all orders are tried: 120."""


@dataclass(frozen=True)
class Written:
    """A tensor that a kernel writes.

    Attributes:
        name: The engine's.
        ends: Tensors of the model that no later kernel computes a part of, and that something outside reads.
        others: Tensors that it may be instead: further results of the kernel's nodes, or a copy of an input.
    """

    name: str
    ends: tuple[str, ...]
    others: tuple[str, ...]


def written(model: Model, kernels: Sequence[Kernel], shared: Collection[str]) -> Iterator[Written]:
    """The tensors that kernels write, with the ones of `shared`, in the main graph, that they may be."""
    graph = model.proto.graph
    names = [*map(_parsed_name, graph.node)]
    once = {name for name, number in Counter(names).items() if number == 1}
    nodes = {name: node for name, node in zip(names, graph.node, strict=True) if name in once}
    last = {name: index for index, kernel in enumerate(kernels) for name in kernel.nodes}
    readers = defaultdict[str, set[str]](set)
    for name, node in zip(names, graph.node, strict=True):
        for tensor in reads(node):
            readers[tensor].add(name)
    for port in graph.output:
        readers[port.name].add("")
    for index, kernel in enumerate(kernels):
        own = [name for name in kernel.nodes if name in nodes]
        results = [(name, t) for name in own for t in nodes[name].output if t in shared]
        ends = tuple(t for name, t in results if last[name] == index and readers[t] - {*kernel.nodes})
        others = dict.fromkeys([t for _, t in results] + [t for name in own for t in reads(nodes[name])])
        for name in kernel.outputs:
            yield Written(name, ends, tuple(t for t in others if t in shared and t not in ends))


def fused_with(model: Model, kernels: Sequence[Kernel], tensor: str) -> tuple[str, ...]:
    """The nodes of the last kernel that computes a tensor of the main graph, or a part of it."""
    made = {_parsed_name(node) for node in model.proto.graph.node if tensor in node.output}
    return next((kernel.nodes for kernel in reversed(kernels) if not made.isdisjoint(kernel.nodes)), ())


def _parsed_name(node: NodeProto) -> str:
    """The name of a node in TensorRT's network."""
    return node.name or f"node_of_{node.output[0]}"


def recognised(
    results: Sequence[Written],
    values: Mapping[str, Array],
    exact: Mapping[str, Array],
    pairs: Mapping[str, str],
    tolerance: float,
) -> tuple[dict[str, Array], set[str]]:
    """Squared errors and norms of the model's tensors that values of the engine are, right or wrong.

    A value within the tolerance of a tensor, in any order of its axes, is that tensor. A value that is far
    from all in any order of its elements is wrong, and is the nearest free end of its kernel. Tensors whose
    elements a value has in an unknown order are the second result: a layout, or what a wrong kernel made.

    Args:
        exact: References, by the original's names; `pairs` has these by the model's.
    """
    found, rearranged = dict[str, Array](), set[str]()
    wrong = list[dict[str, Array]]()
    for result in results:
        value, aligned, alike = np.asarray(values[result.name]), dict[str, Array](), 0.0
        references = {name: exact[pairs[name]] for name in (*result.ends, *result.others)}
        fitting = [name for name in references if references[name].size == value.size]
        for name in fitting:
            aligned[name], estimate, correlation = _aligned(references[name], value)
            if estimate <= max(UNLIKE, 2 * tolerance):
                both = squares(aligned[name], value.reshape(-1))
                if relative(both) <= tolerance:
                    found.setdefault(name, both)
                    break
            alike = max(alike, correlation if name in result.ends else 0.0)
        else:
            ends = [name for name in result.ends if name in fitting]
            if ends and len(wrong) < MOST_WRONG:
                others = fitting if alike < ALIKE else []
                same = {name for name in others if _rearranged(references[name], value, tolerance)}
                rearranged |= same
                wrong += [] if same else [{n: squares(aligned[n], value.reshape(-1)) for n in ends}]
    for errors in wrong:
        if free := [name for name in errors if name not in found]:
            nearest = min(free, key=lambda name: relative(errors[name]))
            found[nearest] = errors[nearest]
    return found, rearranged - found.keys()


def squares(exact: Array, value: Array) -> Array:
    """Squared norms of the difference and of the reference, as in `Pair`, in a fifteenth of its time."""
    if exact.dtype == np.float32 and exact.shape == value.shape:
        with np.errstate(all="ignore"):
            difference, flat = (value.astype(np.float32) - exact).reshape(-1), exact.reshape(-1)
            both = np.array([difference @ difference, flat @ flat], np.float64)
        if np.isfinite(both).all() and both[1] > LEAST:
            return both
    return np.array(Pair(exact, value).squares)


def relative(both: Array) -> float:
    """Relative L2 error from squared norms."""
    error, norm = map(float, both)
    return math.sqrt(error / (norm or 1.0)) if math.isfinite(error) else math.inf


def _aligned(exact: Array, value: Array) -> tuple[Array, float, float]:
    """The reference, flat, its axes in the order that is nearest to the value; and estimates for a part.

    These are the relative error and the correlation, with 0 for elements that are not finite.
    """
    squeezed = exact.reshape([size for size in exact.shape if size > 1])
    axes = range(squeezed.ndim)
    places = np.random.default_rng(0).integers(0, max(1, value.size), min(SAMPLED, value.size))
    sample = value.reshape(-1)[places].astype(np.float32)

    def part(order: tuple[int, ...]) -> Array:
        view = squeezed.transpose(order)
        return np.asarray(view[np.unravel_index(places, view.shape)])

    def distance(expected: Array) -> float:
        with np.errstate(all="ignore"):
            difference = np.where(expected == sample, 0.0, expected - sample)  # infinities of masks, too
            return float(np.linalg.norm(difference) / (np.linalg.norm(_finite(expected)) or 1.0))

    orders = [*itertools.permutations(axes)] if len(axes) <= MOST_AXES else [(*axes,)]
    parts = [*map(part, orders)]
    distances = np.nan_to_num([*map(distance, parts)], nan=np.inf)
    nearest = int(np.argmin(distances))
    centred = [p - p.mean() if p.size else p for p in map(_finite, (parts[nearest], sample))]
    norms = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    correlation = float(centred[0] @ centred[1]) / norms if norms else 0.0
    return squeezed.transpose(orders[nearest]).reshape(-1), float(distances[nearest]), correlation


def _rearranged(exact: Array, value: Array, tolerance: float) -> bool:
    """True if the elements are the same within the tolerance, in whatever order.

    Of all orders, sorted values have the least distance. The difference of norms, or of sums, is a lower
    bound of it, and quicker.
    """
    first, second = (_finite(array.reshape(-1).astype(np.float32)) for array in (exact, value))
    with np.errstate(all="ignore"):
        norms = [float(np.linalg.norm(array)) for array in (first, second)]
        limit = tolerance * (norms[0] or 1.0)
        sums = [float(array.sum()) for array in (first, second)]
        apart = max(abs(norms[0] - norms[1]), abs(sums[0] - sums[1]) / math.sqrt(max(1, first.size)))
        if not apart <= limit:
            return False
        return bool(np.linalg.norm(np.sort(first) - np.sort(second)) <= limit)


def _finite(array: Array) -> Array:
    """The array with 0 for infinities and NaN."""
    return np.where(np.isfinite(array), array, np.float32(0))
