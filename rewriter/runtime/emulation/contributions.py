"""How much of the error of the outputs each node causes, from one run of all nodes (`diverge`).

The squared error of an output flows back through the graph. A node keeps the part of its result's error that
it adds itself. The rest goes on to its operands by their errors: an error at the start of a network
that all later nodes amplify is found at its start. Errors of two nodes are taken to be independent.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rewriter.ir.graph import reads
from rewriter.ir.graph.ops import SUMS
from rewriter.ir.model import Model
from rewriter.ir.plan import node_key
from rewriter.runtime.emulation.divergence import NodeError

_KEEP_SCALE = SUMS | {"Concat", "Max", "Mean", "Min", "Where"}
"""Operators whose operands hand on their absolute errors; others, such as products, hand on relative ones."""


def contributions(model: Model, rows: Sequence[NodeError], errors: Mapping[str, float]) -> dict[str, float]:
    """The squared error of the outputs that each node causes, relative to them, by its key in a plan.

    Args:
        model: The original, as for `diverge`.
        rows: Its result, with the total errors.
        errors: The error that each node of the main graph adds by itself, relative L2, by its key.

    Returns:
        Its own squared error where it is infinite; for all, where the outputs are not finite.
    """
    squares = {key: error * error for key, error in errors.items()}
    totals = {row.tensor: row.total**2 for row in rows}
    added = {row.tensor: row.added**2 for row in rows}
    norms = {row.tensor: row.norm**2 for row in rows}
    flows = defaultdict(float, {port.name: totals.get(port.name, 0.0) for port in model.signature.outputs})
    if not 0.0 < math.fsum(flows.values()) < math.inf:
        return squares
    shares = {key: square for key, square in squares.items() if square == math.inf}
    for node in reversed(model.proto.graph.node):
        flow, key = sum(flows.get(name, 0.0) for name in node.output), node_key(0, node)
        if not flow or key in shares:
            continue
        total, result = max((totals.get(name, 0.0), name) for name in node.output)
        own, inherited = squares.get(key, 0.0), max(total - added.get(result, 0.0), 0.0)
        scaled = node.op_type in _KEEP_SCALE
        weights = {n: totals[n] * (norms[n] if scaled else 1.0) for n in reads(node) if totals.get(n)}
        infinite = [name for name in weights if totals[name] == math.inf]
        if infinite or not any(weights.values()):  # tensors of zeros have absolute errors
            weights = dict.fromkeys(infinite or weights, 1.0)
        whole = math.fsum(weights.values())
        part = own / (own + inherited) if weights and own + inherited else 1.0
        shares[key] = flow * part
        for name, weight in weights.items():
            flows[name] += flow * (1.0 - part) * weight / whole
    return {key: shares.get(key, 0.0) for key in squares}
