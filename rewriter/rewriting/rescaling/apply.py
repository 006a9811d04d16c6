"""Applies exponents: constants and epsilons are multiplied by powers of two, nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.errors import UsageError
from rewriter.graph import GraphEditor
from rewriter.model import Array
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.constraints import Constraints, collect

DEFAULT_EPSILON = 1e-5
"""Default in ONNX of LayerNormalization, RMSNormalization, InstanceNormalization and GroupNormalization."""

HINT = (
    'correct "rescaled" in the plan, or save a new one with `save-plan`: a plan fits only the model, '
    "`passes` and `skip` that it was saved with"
)


def apply(graph: GraphEditor, constraints: Constraints, exponents: Mapping[int, int]) -> int:
    """Scale every use of a constant and every epsilon by its exponent.

    Uses of one constant with equal exponents share one new constant. A constant without remaining uses is
    removed.

    Args:
        exponents: By class; missing ones are 0.

    Returns:
        The number of constants and epsilons with a new value.
    """
    made: dict[tuple[str, int], str] = {}
    for use in constraints.constants:
        k = exponents.get(constraints.classes.root(use.number), 0)
        value = graph.constant(use.tensor) if k else None
        if value is None or not np.any(np.isfinite(value) & (value != 0)):
            continue
        if (use.tensor, k) not in made:
            made[use.tensor, k] = graph.add_constant(f"{use.tensor}/scaled", scaled(value, k))
        graph.set_input(use.node, use.index, made[use.tensor, k])
    for tensor in dict.fromkeys(name for name, _ in made):
        graph.sweep(tensor)
    return len(made) + _scale_epsilons(graph, constraints, exponents)


def scaled(value: Array, k: int) -> Array:
    """Returns `value` * 2^k in its own type, exactly if no value leaves the normal range."""
    return np.ldexp(value, k).astype(value.dtype)


def _scale_epsilons(graph: GraphEditor, constraints: Constraints, exponents: Mapping[int, int]) -> int:
    count = 0
    for use in constraints.epsilons:
        k = exponents.get(constraints.classes.root(use.number), 0)
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


def apply_planned(graph: GraphEditor, exponents: Mapping[str, int]) -> int:
    """Apply the exponents of a saved plan; tensors that it does not name keep their scale.

    Returns:
        The number of constants and epsilons with a new value.

    Raises:
        UsageError: the graph does not compute a tensor, or its operators do not allow these exponents
            together; the message names the tensors.
    """
    constraints = collect(graph)
    for tensor in exponents:
        if tensor not in constraints.tensors:
            raise UsageError(
                f"it scales {tensor}, which the model does not compute", where="the plan", hint=HINT
            )
    return apply(graph, constraints, _by_class(constraints, exponents))


def _by_class(constraints: Constraints, exponents: Mapping[str, int]) -> dict[int, int]:
    """Exponents of all classes; those of constants follow from the equations."""
    found, names = {ZERO: 0}, {ZERO: "a tensor that cannot be scaled"}
    for tensor, number in constraints.tensors.items():
        root, k = constraints.classes.root(number), exponents.get(tensor, 0)
        names.setdefault(root, tensor)
        if found.setdefault(root, k) != k:
            text = (
                f"it scales {tensor} by 2^{k} and {names[root]} by 2^{found[root]}: they must scale together"
            )
            raise UsageError(text, where="the plan", hint=HINT)
    for terms in constraints.classes.equations():
        rest = -sum(c * found[root] for root, c in terms.items() if root in found)
        unknown = next((root for root in terms if root not in found), None)
        if unknown is not None and not rest % terms[unknown]:
            found[unknown] = rest // terms[unknown]
        elif rest:
            named = ", ".join(names[root] for root in terms if root in names)
            raise UsageError(f"the exponents of {named} contradict each other", where="the plan", hint=HINT)
    return {root: k for root, k in found.items() if k}
