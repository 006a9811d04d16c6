"""Exponents into a graph: constants and epsilons are multiplied by powers of two, nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.graph import GraphEditor
from rewriter.model import Array
from rewriter.rewriting.rescaling.freedom import Freedom


def apply(graph: GraphEditor, freedom: Freedom, exponents: Mapping[int, int]) -> int:
    """Scale every constant use and epsilon by its exponent.

    Uses of one constant that want the same exponent share one new constant; a constant that all
    uses have left goes.

    Args:
        exponents: By class; those missing are 0.

    Returns:
        How many constants and epsilons have a new value.
    """
    made: dict[tuple[str, int], str] = {}
    for use in freedom.constants:
        k = exponents.get(freedom.classes.root(use.number), 0)
        value = graph.constant(use.tensor) if k else None
        if value is None or not _matters(value):
            continue
        if (use.tensor, k) not in made:
            made[use.tensor, k] = graph.add_constant(f"{use.tensor}/scaled", scaled(value, k))
        graph.set_input(use.node, use.index, made[use.tensor, k])
    for tensor in dict.fromkeys(name for name, _ in made):
        graph.sweep(tensor)
    return len(made) + _scale_epsilons(graph, freedom, exponents)


def scaled(value: Array, k: int) -> Array:
    """`value` * 2^k in its own type; exact as long as it leaves the normal range nowhere."""
    return np.ldexp(value, k).astype(value.dtype)


def _matters(value: Array) -> bool:
    """Whether anything but zeros and infinities is there to be scaled."""
    return bool(np.any(np.isfinite(value) & (value != 0)))


def _scale_epsilons(graph: GraphEditor, freedom: Freedom, exponents: Mapping[int, int]) -> int:
    count = 0
    for use in freedom.epsilons:
        k = exponents.get(freedom.classes.root(use.number), 0)
        if not k:
            continue
        stored = next((item for item in use.node.attribute if item.name == "epsilon"), None)
        epsilon = stored.f if stored is not None else DEFAULT_EPSILON
        if stored is None:
            stored = use.node.attribute.add(name="epsilon", type=1)
        stored.f = float(np.ldexp(np.float32(epsilon), 2 * k))
        graph.edited = True
        count += 1
    return count


DEFAULT_EPSILON = 1e-5
"""Of LayerNormalization, RMSNormalization, InstanceNormalization and GroupNormalization in ONNX."""
