"""Applies exponents: constants and epsilons are multiplied by powers of two, nothing else changes.

They are noted in the model's metadata, so that comparisons with the original can undo them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from rewriter.base.errors import UsageError
from rewriter.ir.graph import GraphEditor
from rewriter.ir.model import Model, set_metadata
from rewriter.ir.plan.plan_file import Exponent
from rewriter.ir.reading import from_json
from rewriter.passes.algorithms.rescaling.exponents import Constraints

DEFAULT_EPSILON = 1e-5
"""Default in ONNX of LayerNormalization, RMSNormalization, InstanceNormalization and GroupNormalization."""

HINT = (
    'correct "rescaled" in the plan, or save a new one with `save-plan`: a plan fits only the model, '
    "`passes` and `skip` that it was saved with"
)

EXPONENTS = "rewriter.exponents"
"""Metadata key of a JSON object: exponent of two by tensor of the main graph."""


def apply(graph: GraphEditor, constraints: Constraints, free: Mapping[int, int]) -> int:
    """Scales every use of a constant and every epsilon by its exponent.

    Uses of one constant with equal exponents share one new constant, and unused constants are removed. Free
    exponents that are missing are 0. Returns the number of constants and epsilons with a new value.
    """
    names: dict[tuple[str, int], str] = {}
    for use in constraints.constants:
        k = constraints.exponent(use.number, free)
        value = graph.constant(use.tensor) if k else None
        if value is None or not np.any(np.isfinite(value) & (value != 0)):
            continue
        if (use.tensor, k) not in names:
            names[use.tensor, k] = graph.add_constant(f"{use.tensor}/scaled", np.ldexp(value, k))
        graph.set_input(use.node, use.index, names[use.tensor, k])
    for tensor in dict.fromkeys(name for name, _ in names):
        graph.erase_if_dead(tensor)
    moved = [(node, k) for node, number in constraints.epsilons if (k := constraints.exponent(number, free))]
    for node, k in moved:
        stored = next((item for item in node.attribute if item.name == "epsilon"), None)
        if stored is None:
            stored = node.attribute.add(name="epsilon", type=1, f=DEFAULT_EPSILON)
        stored.f = float(np.ldexp(np.float32(stored.f), 2 * k))
        graph.edited = True
    return len(names) + len(moved)


def apply_planned(graph: GraphEditor, exponents: Mapping[str, int]) -> int:
    """Applies the exponents of a saved plan, as `apply` does; tensors that it does not name keep their scale.

    Raises:
        UsageError: the graph does not compute a tensor, or does not allow these exponents together.
    """
    constraints = Constraints(graph)
    for tensor in exponents:
        if tensor not in constraints.tensors:
            text = f"it scales {tensor}, which the model does not compute"
            raise UsageError(text, where="the plan", hint=HINT)
    free = {number: exponents.get(tensor, 0) for tensor, number in constraints.tensors.items()}
    for tensor, number in constraints.tensors.items():
        if (k := constraints.exponent(number, free)) != free[number]:
            text = f"it scales {tensor} by 2^{free[number]}, but the tensors beside it require 2^{k}"
            raise UsageError(text, where="the plan", hint=HINT)
    return apply(graph, constraints, free)


def record(model: Model, exponents: Mapping[str, int]) -> None:
    """Add exponents of tensors of the main graph to those already noted."""
    noted = recorded(model)
    for tensor, exponent in exponents.items():
        noted[tensor] = noted.get(tensor, 0) + exponent
    text = json.dumps({tensor: k for tensor, k in sorted(noted.items()) if k})
    set_metadata(model.proto, {EXPONENTS: text})


def recorded(model: Model) -> dict[str, int]:
    """The noted exponents by tensor; empty if another program wrote something else under this key."""
    text = next((e.value for e in model.proto.metadata_props if e.key == EXPONENTS), "{}")
    with suppress(UsageError):
        return dict(from_json(text, dict[str, Exponent], EXPONENTS, ""))
    return {}


def between(original: Model, other: Model) -> dict[str, int]:
    """The exponents by which tensors of `other` differ from the tensors of `original`."""
    before, after = recorded(original), recorded(other)
    steps = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return {name: k for name, k in steps.items() if k}
