"""How much of the error of the outputs each node causes, from a few runs for all nodes.

A run perturbs the results of a part of the graph, each by as much as its node's own error; what the outputs
deviate by is the part's share. The largest share is halved next: errors at the start of a network are
amplified, or damped, by all nodes after them, which the error that a node adds does not show.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from rewriter.base.errors import ArithmeticRunError
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.model import Array, Model, replace_items
from rewriter.ir.plan import node_key
from rewriter.runtime.emulation import import_float64, reference
from rewriter.runtime.emulation.accumulate import FIRST_OPSET, ONE_ROUNDING
from rewriter.runtime.engines.onnxruntime import Session

RUNS = 16
"""Runs of the original in FP32; an emulation with FP16 sums takes up to 8 times as long as one."""

BF16_ROUNDING = 8.0 * ONE_ROUNDING
"""Relative L2 error of one rounding to BF16, which has 3 bits less than FP16."""

LEAST_SHARE = 0.01
"""Least part of a share that a half is taken to have: the shares of two halves are not quite their sum."""

SCALE = "rewriter/scale/"
"""The input with the scales of all perturbations, and the prefix of tensors on the way to them."""


def contributions(
    model: Model, errors: Mapping[str, float], sample: Mapping[str, Array], until: float = math.inf
) -> dict[str, float]:
    """The squared error of the outputs that each node causes, relative to them, by its key in a plan.

    Args:
        model: The original, as for `diverge`.
        errors: The error that each node of the main graph adds by itself, relative L2, by its key.
        until: When no part is halved any more, by `time.monotonic`.

    Returns:
        Its own squared error where it is infinite; for all, where the outputs of the runs are not finite.
    """
    wide, squares = reference(import_float64(model)), {key: error * error for key, error in errors.items()}
    keys = [
        key
        for node in wide.proto.graph.node
        if math.isfinite(squares.get(key := node_key(0, node), math.inf))
    ]
    if len(keys) < 2 or wide.opset < FIRST_OPSET:
        return squares
    perturbed, scales = _perturbed(wide, {key: errors[key] for key in keys})
    if not scales:
        return squares

    def deviation(low: int, high: int) -> float:
        part = {*keys[low:high]}
        scaled = [scale if key in part else 0.0 for key, scale in scales.items()]
        return _squared_error(exact, session.run({**sample, SCALE: np.array(scaled, "f4")}))

    try:
        with Session(perturbed) as session:
            exact = session.run({**sample, SCALE: np.zeros(len(scales), "f4")})
            return squares | _by_parts(keys, squares, deviation, until)
    except ArithmeticRunError:
        return squares


def _perturbed(wide: Model, errors: Mapping[str, float]) -> tuple[Model, dict[str, float]]:
    """The model with an input [nodes] that scales the perturbations of their results, and the scales.

    A result is perturbed by what BF16 rounds off, with a random sign, so that the errors of two nodes in a
    row do not add up.
    """
    result, facts, scales = wide.copy(), wide.facts().main, dict[str, float]()
    graph, nodes, rng = result.proto.graph, list[Any](), np.random.default_rng(0)
    emit = NodeList(map(f"{SCALE}{{}}".format, itertools.count()), wide.opset, nodes)
    for node in list(graph.node):
        nodes.append(node)
        key, written = node_key(0, node), list(node.output)
        for index, name in enumerate(written if key in errors else ()):
            if name not in facts or facts[name].dtype != TensorProto.FLOAT:
                continue
            scales[key] = float(rng.choice([-1.0, 1.0])) * errors[key] / BF16_ROUNDING
            exact = node.output[index] = f"{SCALE}{name}/exact"
            coarse = emit.add(
                "Cast", [emit.add("Cast", [exact], to=TensorProto.BFLOAT16)], to=TensorProto.FLOAT
            )
            scale = SCALE + key if facts[name].shape else emit.add("Squeeze", [SCALE + key])
            lost = emit.add("Mul", [emit.add("Sub", [exact, coarse]), scale])
            nodes.append(helper.make_node("Add", [exact, lost], [name], name=f"{SCALE}{name}/add"))
    sizes = numpy_helper.from_array(np.ones(len(scales), np.int64), f"{SCALE}sizes")
    graph.initializer.append(sizes)
    split = helper.make_node("Split", [SCALE, sizes.name], [SCALE + key for key in scales])
    replace_items(graph.node, [split, *nodes])
    graph.input.append(helper.make_tensor_value_info(SCALE, TensorProto.FLOAT, [len(scales)]))
    result.mark_edited()
    return result, scales


def _by_parts(
    keys: Sequence[str],
    squares: Mapping[str, float],
    deviation: Callable[[int, int], float],
    until: float,
) -> dict[str, float]:
    """The share of each node, by its own squared error within the part of the graph that it is in."""
    whole = deviation(0, len(keys))
    if not 0.0 < whole < math.inf:
        return {}
    parts, single = [(-whole, 0, len(keys))], list[tuple[float, int, int]]()
    for _ in range(RUNS):
        while parts and parts[0][2] - parts[0][1] == 1:
            single.append(heapq.heappop(parts))
        if not parts or time.monotonic() > until:
            break
        share, low, high = heapq.heappop(parts)
        middle, most = (low + high) // 2, (1.0 - LEAST_SHARE) * -share
        first = min(max(deviation(low, middle), LEAST_SHARE * -share), most)
        heapq.heappush(parts, (-first, low, middle))
        heapq.heappush(parts, (share + first, middle, high))
    shares = dict[str, float]()
    for share, low, high in (*single, *parts):
        total = math.fsum(squares[key] for key in keys[low:high])
        shares.update((key, -share * squares[key] / total) for key in keys[low:high])
    return shares


def _squared_error(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
    """Sum of the squared relative L2 errors of the float outputs."""
    total = 0.0
    for name, exact in expected.items():
        size = float(np.linalg.norm(exact.astype(np.float64))) if exact.dtype.kind == "f" else 0.0
        if size:
            total += (float(np.linalg.norm(actual[name] - exact.astype(np.float64))) / size) ** 2
    return total
