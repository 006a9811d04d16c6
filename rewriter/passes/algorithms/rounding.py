"""Rounds weights so that the outputs of their products keep their mean.

Over data with the means m, rounding to nearest adds (W - round(W)) m + b - round(b) to each output, in every
row, pixel and sample. Here a few weights of each output are rounded the other way, so that it vanishes: bias
correction (Nagel et al. 2019, https://arxiv.org/abs/1906.04721) that changes only weights.
"""

import itertools
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial

import numpy as np
from onnx import NodeProto

from rewriter.hazards.analysis import LOW_TYPES
from rewriter.hazards.magnitude import FP16_MIN_NORMAL
from rewriter.ir.graph import GraphView, attribute
from rewriter.ir.graph.match import is_only_divisor, optional_input, other_operand
from rewriter.ir.graph.weights import constant_row, gemm_obstacle, is_transposed, summed_axes
from rewriter.ir.model import Array
from rewriter.ir.model.schemas import convert
from rewriter.ir.plan import Plan, node_key
from rewriter.passes.base import Context, Shared

CANDIDATES = 128
"""Weights of an output that may be rounded the other way, where the data have the largest means. About
sqrt(depth / 12) are. With all weights as candidates, the errors were the same and the time doubled."""

MEAN_BITS = 8
"""Bits to which means are rounded, so that another order of summation gives the same weights."""

BLOCK = 2**17  # most weights that are compared at a time: 1 MiB of float64, which stays in a core's cache

Refine = Callable[[Array, Callable[[], Array]], Array]
"""Returns the weights to store, from the given ones and a function that rounds these to nearest."""


def unbiased_weights(graph: GraphView, plan: Plan, context: Context) -> dict[str, Refine]:
    """The rounding of each weight of the main graph's products in the plan's lower type, by name.

    Weights that two nodes read, or whose data have no measured mean, are rounded to nearest.
    """
    higher, refined = plan.fp32 | plan.bf16, dict[str, Refine]()
    for node, axis in summed_axes(graph.graph):
        data, weight = node.input[:2]
        mean, data_range = context.means.get((data, axis)), (context.ranges or {}).get((0, data))
        if mean is None or data_range is None or not np.isfinite(mean).all():
            continue
        if graph.only_consumer(weight) and node_key(0, node) not in higher and not gemm_obstacle(node):
            variance = 2 * data_range.mean_abs**2  # 1.6 for normal data, 2.1 for their Relu
            low = LOW_TYPES[plan.precision]
            lost = _lost(graph, node, higher, low)
            refined[weight] = partial(_refined, node, mean, variance, lost)
            if (shared := context.rounded) is not None:
                refined[weight] = partial(_once, shared, (weight, low, lost.tobytes()), refined[weight])
    return refined


def _once(
    shared: Shared, key: tuple[str, int, bytes], refine: Refine, given: Array, nearest: Callable[[], Array]
) -> Array:
    """The rounded weights of a context, from the first plan that needs them."""
    if key not in shared:
        shared[key] = refine(given, nearest)
    return shared[key]


def raised_bounds(graph: GraphView, plan: Plan) -> dict[str, Refine]:
    """FP16's smallest normal number for smaller lower bounds of divisors that the plan has in FP16.

    Rounded to nearest, the epsilon of an L2 norm, 1e-12, is 0, and a row of zeros becomes 0 / 0.
    """
    if plan.precision != "fp16":
        return {}
    higher, bounds, others = plan.fp32 | plan.bf16, set[str](), set[str]()
    for node in graph.nodes:
        if node_key(0, node) not in higher:
            bound = node.op_type in {"Clip", "Max"} and is_only_divisor(graph, node.output[0])
            (bounds if bound else others).update(node.input)
    raised = (name for name in bounds - others if 0 < (graph.scalar(name) or 0) < FP16_MIN_NORMAL)
    return dict.fromkeys(raised, lambda _, nearest: np.maximum(nearest(), np.float16(FP16_MIN_NORMAL)))


def _lost(graph: GraphView, node: NodeProto, higher: AbstractSet[str], low: int) -> Array:
    """Rounding errors of the bias of a product, [outputs]; [0] if it has no bias that is rounded."""
    add = graph.only_consumer(node.output[0]) if node.op_type == "MatMul" else None
    bias = optional_input(node, 2)
    if add is not None and add.op_type == "Add" and node_key(0, add) not in higher:
        bias = other_operand(add, node.output[0]) or ""
    across = node.op_type == "Conv" or is_transposed(node)
    outputs = graph.value(node.input[1]).shape[0 if across else 1]
    row = constant_row(graph, bias, outputs, graph.rank(node.output[0])) if bias else None
    return np.zeros(1) if row is None else row.astype(np.float64) - convert(row, low, bias).astype(np.float64)


def _refined(
    node: NodeProto, mean: Array, variance: float, lost: Array, given: Array, rounded: Callable[[], Array]
) -> Array:
    """The weights of a Conv, MatMul or Gemm, rounded by `unbiased`, which has a row for each output."""
    nearest = rounded()
    if is_transposed(node):
        return unbiased(given, nearest, mean[None], variance, lost)
    if node.op_type != "Conv":
        return np.ascontiguousarray(unbiased(given.T, nearest.T, mean[None], variance, lost).T)
    outputs, channels, *kernel = given.shape
    groups = attribute(node, "group", 1)
    means = np.repeat(mean.reshape(groups, channels), math.prod(kernel), axis=1)
    means = np.repeat(means, outputs // groups, axis=0) if groups > 1 else means
    rows = unbiased(given.reshape(outputs, -1), nearest.reshape(outputs, -1), means, variance, lost)
    return rows.reshape(given.shape)


@np.errstate(invalid="ignore")  # weights of infinity stay
def unbiased(given: Array, nearest: Array, means: Array, variance: float, lost: Array) -> Array:
    """Rounds weights so that the mean of each output is kept.

    An output's mean square error is the square of its constant plus, if the data are uncorrelated, their
    variance times the sum of the squared errors of its weights. Weights that move the constant towards zero
    are sorted by how much rounding the other way adds to the second term per reduction of the first. As many
    are rounded so as minimise the sum.

    Args:
        given: [outputs, depth], FP32.
        nearest: The same, rounded to FP16 or BF16.
        means: Of the data: [outputs or 1, depth].
        variance: Of the data.
        lost: Rounding errors of the bias, [outputs or 1].
    """
    mantissas, exponents = np.frexp(means)
    means = np.ldexp(np.round(mantissas * 2**MEAN_BITS), exponents - MEAN_BITS).astype(np.float64)
    columns = np.argsort(-np.abs(means), axis=1, kind="stable")[:, :CANDIDATES]
    result, blocks = nearest.copy(order="K"), min(len(given), math.ceil(given.size / BLOCK))
    edges = [len(given) * block // blocks for block in range(blocks + 1)] if blocks else []
    for rows in itertools.starmap(slice, itertools.pairwise(edges)):
        mean, column, bias = (a if len(a) == 1 else a[rows] for a in (means, columns, lost))
        constant = bias + ((given[rows] - nearest[rows].astype(np.float32)) * mean).sum(axis=1)
        _correct(result[rows], given[rows], mean, column, variance, constant)
    return result


def _correct(
    result: Array, given: Array, means: Array, columns: Array, variance: float, constant: Array
) -> None:
    """Corrects rows of `unbiased` in place; `columns` are the candidates, [outputs or 1, candidates]."""
    low, error, mean = (_taken(array, columns) for array in (result, given, means))
    exact = low.astype(np.float64)
    error = error - exact
    other = np.nextafter(low, np.where(error > 0, *np.array([np.inf, -np.inf], low.dtype)))
    unit = other.astype(np.float64) - exact
    change, cost = -unit * mean, variance * unit * (unit - 2 * error)
    useful = (error != 0) & np.isfinite(unit) & (change * constant[:, None] < 0)
    price = np.divide(cost, np.abs(change), out=np.full_like(cost, np.inf), where=useful)
    order = np.argsort(price, axis=1, kind="stable")[:, : useful.sum(axis=1).max(initial=0)]
    every = np.arange(len(given))[:, None]
    useful, change, cost = useful[every, order], change[every, order], cost[every, order]
    left = constant[:, None] + np.cumsum(np.where(useful, change, 0), axis=1)
    error_after = left**2 + np.cumsum(np.where(useful, cost, np.inf), axis=1)
    best = np.argmin(np.concatenate([constant[:, None] ** 2, error_after], axis=1), axis=1)
    rows, places = np.nonzero(np.arange(order.shape[1]) < best[:, None])
    taken = order[rows, places]
    result[rows, np.broadcast_to(columns, low.shape)[rows, taken]] = other[rows, taken]


def _taken(array: Array, columns: Array) -> Array:
    """Columns of each row; a row of columns holds for all rows, which is far faster."""
    if len(columns) == 1:
        return array[:, columns[0]]
    return np.take_along_axis(array, columns, axis=1)
