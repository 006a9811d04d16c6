"""Compares the results of a whole network with weights rounded in two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from onnx import TensorProto, helper

from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model, refill
from rewriter.rewriting.rounding.segments import emitter

Weights = Mapping[str, Array]

LEAST_ERROR = 1e-12
"""Relative error below which a result counts as equal: far below one rounding of FP32."""


@dataclass(frozen=True)
class Compared:
    """Errors of a network's results, the geometric mean of its outputs' relative L2 errors.

    Attributes:
        together: With weights rounded together; infinite if a result is not finite where it should be.
        nearest: With the same weights rounded to nearest.
    """

    together: float
    nearest: float

    @property
    def gains(self) -> bool:
        """True unless the network errs more with weights rounded together."""
        return self.together <= self.nearest


def compared(model: Model, feeds: Mapping[str, Array], together: Weights, nearest: Weights) -> Compared:
    """Runs a network with its own weights and with both roundings: nothing else is rounded.

    Args:
        model: Computes in FP32; see `emulation.reference`.
        feeds: A sample that the weights were not fitted to.
        together, nearest: Rounded weights by name, of the same shapes as the model's, in their lower type.

    Raises:
        NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
    """
    with Session(model) as session:
        own = session.run(feeds)
    given, names = _with_inputs(model, together)
    with Session(given) as session:
        errors = [
            _error(own, session.run({**feeds, **{names[name]: value for name, value in weights.items()}}))
            for weights in (together, nearest)
        ]
    return Compared(*errors)


def _with_inputs(model: Model, weights: Weights) -> tuple[Model, Mapping[str, str]]:
    """The model with some weights as inputs of another type, and the names of these.

    A Cast widens each weight when it is needed, so that the wide ones are not in memory together.
    """
    result = model.copy()
    graph, emit = result.proto.graph, emitter(result)
    names = {name: emit.names.fresh() for name in weights}
    casts = [helper.make_node("Cast", [names[n]], [n], to=TensorProto.FLOAT, name=names[n]) for n in weights]
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in weights])
    refill(graph.input, [value for value in graph.input if value.name not in weights])
    refill(graph.node, [*casts, *graph.node])
    for name, value in weights.items():
        result.weights.pop(name, None)
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(helper.make_tensor_value_info(names[name], dtype, value.shape))
    return result, names


def _error(own: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    errors = [_distance(own[name], found[name]) for name in own if own[name].dtype.kind == "f"]
    return prod(errors) ** (1 / len(errors)) if errors else 0.0


def _distance(own: Array, found: Array) -> float:
    """The relative L2 error where the network's own results are finite."""
    if own.shape != found.shape:  # detections may differ in number
        return 1.0
    finite = np.isfinite(own)
    exact, other = own[finite].astype(np.float64), found[finite]
    if not np.isfinite(other).all():
        return inf
    scale = float(np.linalg.norm(exact))
    return max(LEAST_ERROR, float(np.linalg.norm(other - exact)) / scale if scale else 0.0)
