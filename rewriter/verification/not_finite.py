"""Finds NaN that a model makes by itself, from finite inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rewriter.data.ranges import Ranges, measure
from rewriter.emulation import reference
from rewriter.figures.pair import is_float
from rewriter.graph import label
from rewriter.model import Array, Model, walk_graphs
from rewriter.model import facts as tensor_facts
from rewriter.verification.expected import Outputs


def nan_outputs(outputs: Iterable[Outputs]) -> dict[str, float]:
    """Returns the outputs that hold NaN, with the largest share of their elements over the samples."""
    shares: dict[str, float] = {}
    for sample in outputs:
        for name, array in sample.items():
            floats = is_float(array) and array.size
            share = float(np.mean(np.isnan(array.astype(np.float64)))) if floats else 0.0
            if share:
                shares[name] = max(share, shares.get(name, 0.0))
    return shares


def first_nan(model: Model, samples: Sequence[Mapping[str, Array]]) -> str:
    """Returns the first node, in the order of computation, whose result holds NaN; "" if none was found."""
    wide = reference(model, tensor_facts.infer(model))
    ranges = measure(wide, samples, tensor_facts.infer(wide))
    for scope, graph in enumerate(walk_graphs(wide.proto.graph)):
        for node in graph.node:
            if any(_has_nan(ranges, scope, name) for name in node.output):
                return f"{label(node)} ({node.op_type})"
    return ""


def _has_nan(ranges: Ranges, scope: int, tensor: str) -> bool:
    known = ranges.get((scope, tensor))
    return known is not None and math.isnan(known.mean_abs)
