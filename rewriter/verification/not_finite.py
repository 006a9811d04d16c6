"""Finds NaN that a model makes by itself, from finite inputs."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from rewriter.base.errors import ModelError
from rewriter.ir.graph import display_name
from rewriter.ir.model import Array, Model, walk_graphs
from rewriter.runtime.emulation import reference
from rewriter.runtime.metrics.pairwise_error import is_float
from rewriter.runtime.ranges import measure
from rewriter.verification.expected import Outputs


def nan_warnings(
    model: Model, samples: Iterable[Mapping[str, Array]], outputs: Iterable[Outputs]
) -> list[str]:
    """Returns the warnings about an original that gives NaN on finite inputs.

    Args:
        outputs: Of the model in FP32 for `samples`.

    Raises:
        ModelError: an output is NaN throughout, so that nothing can be verified.
    """
    shares = nan_outputs(outputs)
    if not shares:
        return []
    started = first_nan(model, samples)
    where = f", first in {started}" if started else ""
    named = ", ".join(f"{name} ({share:.3g} of it)" for name, share in shares.items())
    text = f"the original itself gives NaN or infinity on these inputs: {named}{where}"
    if any(share == 1.0 for share in shares.values()):
        raise ModelError(
            text,
            where=str(model.path) if model.path else "the model",
            hint="there is nothing to verify against: is the data prepared as in training, or `input-values` "
            "set where it is random, and is the export right? ONNX Runtime shows the same",
        )
    return [f"{text}; only the other elements are verified"]


def nan_outputs(outputs: Iterable[Outputs]) -> dict[str, float]:
    """Returns the outputs that hold NaN, with the largest share of their elements over the samples.

    It is 1 for an output without a finite element. Single infinities are results, such as masked scores.
    """
    shares: dict[str, float] = {}
    for sample in outputs:
        for name, array in sample.items():
            floats = is_float(array) and array.size
            wide = array.astype(np.float64) if floats else np.zeros(1)
            share = float(np.mean(np.isnan(wide))) if np.isfinite(wide).any() else 1.0
            if share:
                shares[name] = max(share, shares.get(name, 0.0))
    return shares


def first_nan(model: Model, samples: Iterable[Mapping[str, Array]]) -> str:
    """Returns the first node, in order of computation, whose result holds NaN, or else infinity; or ""."""
    wide = reference(model)
    ranges = measure(wide, samples)
    for is_wrong in (math.isnan, math.isinf):
        for scope, graph in enumerate(walk_graphs(wide.proto.graph)):
            for node in graph.node:
                measured = (ranges.get((scope, name)) for name in node.output)
                if any(range_ is not None and is_wrong(range_.mean_abs) for range_ in measured):
                    return f"{display_name(node)} ({node.op_type})"
    return ""
