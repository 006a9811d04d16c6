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
    wrong: list[tuple[Written, dict[str, Array]]] = []
    for result in results:
        value = np.asarray(values[result.name])
        references = {name: exact[pairs[name]] for name in (*result.ends, *result.others)}
        fitting = [name for name in references if references[name].size == value.size]
        errors = dict[str, Array]()
        for name in fitting:
            errors[name] = squares(*_aligned(references[name], value))
            if relative(errors[name]) <= tolerance:
                found.setdefault(name, errors[name])
                break
        else:
            same = [name for name in fitting if _rearranged(references[name], value, tolerance)]
            rearranged.update(same)
            if not same:
                wrong.append((result, {name: errors[name] for name in result.ends if name in errors}))
    for _, errors in wrong:
        free = [name for name in errors if name not in found]
        if free:
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


def _aligned(exact: Array, value: Array) -> tuple[Array, Array]:
    """Both arrays flat, the first with its axes in the order in which it is nearest to the second."""
    flat = value.reshape(-1)
    squeezed = exact.reshape([size for size in exact.shape if size > 1])
    if squeezed.ndim < 2 or squeezed.ndim > MOST_AXES:
        return exact.reshape(-1), flat
    places = np.random.default_rng(0).integers(0, flat.size, SAMPLED)
    sample = flat[places].astype(np.float32)

    def distance(order: tuple[int, ...]) -> float:
        view = squeezed.transpose(order)
        with np.errstate(all="ignore"):
            return float(np.abs(view[np.unravel_index(places, view.shape)] - sample).sum())

    orders = [*itertools.permutations(range(squeezed.ndim))]
    distances = np.nan_to_num(np.array([*map(distance, orders)]), nan=np.inf)
    return squeezed.transpose(orders[int(np.argmin(distances))]).reshape(-1), flat


def _rearranged(exact: Array, value: Array, tolerance: float) -> bool:
    """True if the elements are the same within the tolerance, in whatever order.

    Of all orders, sorted values have the least distance. The difference of norms, or of sums, is a lower
    bound of it, and quicker.
    """
    first, second = (np.asarray(array).reshape(-1).astype(np.float32) for array in (exact, value))
    with np.errstate(all="ignore"):
        norms = [float(np.linalg.norm(array)) for array in (first, second)]
        limit = tolerance * (norms[0] or 1.0)
        sums = [float(array.sum()) for array in (first, second)]
        apart = max(abs(norms[0] - norms[1]), abs(sums[0] - sums[1]) / math.sqrt(max(1, first.size)))
        if not apart <= limit:
            return False
        return bool(np.linalg.norm(np.sort(first) - np.sort(second)) <= limit)
