"""Compares the results of a whole network with weights rounded in two ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf, prod

import numpy as np
from onnx import TensorProto, helper

from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model, refill
from rewriter.rewriting.rounding.segments import emitter

Weights = Mapping[str, Array]

LEAST_ERROR = 1e-12
"""Relative error below which a result counts as equal: far below one rounding of FP32."""


FED_BYTES = 2**26
"""Rounded weights, 64 MiB, up to which one session serves all runs and gets copies of the weights.
A session of 20,000 nodes costs 5 % of `fix` (benchmarks/README.md#what-fix-costs)."""


ErrorOf = Callable[[Collection[str]], float]
"""The error of a network's results, the geometric mean of its outputs' relative L2 errors, if the weights of
these names are rounded together and the others to nearest; infinite if a result is not finite where it should
be."""


@contextmanager
def network(
    model: Model, feeds: Mapping[str, Array], own: Mapping[str, Array], together: Weights, given: Weights
) -> Iterator[ErrorOf]:
    """Makes a function that runs a network with weights rounded in either way: nothing else is rounded.

    Args:
        model: Computes in FP32; see `emulation.reference`.
        feeds: A sample that the weights were not fitted to.
        own: Its results with the network's own weights.
        together: Rounded weights by name, in their lower type.
        given: The same weights in FP32, which the network rounds to nearest; rounded already if no lower
            type is stored (TF32).

    Raises:
        NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
    """
    if sum(value.nbytes for value in together.values()) <= FED_BYTES:
        with _fed(model, feeds, own, together, given) as error:
            yield error
        return
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in together.items()}

    def error_of(names: Collection[str]) -> float:
        weights = {name: together[name] if name in names else value for name, value in given.items()}
        return _error(own, _run(_with(model, weights, types), feeds))

    yield error_of


def _run(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    with Session(model) as session:
        return session.run(feeds)


@contextmanager
def _fed(
    model: Model, feeds: Mapping[str, Array], own: Mapping[str, Array], together: Weights, given: Weights
) -> Iterator[ErrorOf]:
    """Runs a network in one session: the weights are inputs of it."""
    opened = model.copy()
    graph = opened.proto.graph
    nearest = {name: given[name].astype(value.dtype) for name, value in together.items()}
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in together])
    refill(graph.input, [value for value in graph.input if value.name not in together])
    for name, value in together.items():
        opened.weights.pop(name, None)
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
    with Session(opened) as session:

        def error_of(names: Collection[str]) -> float:
            weights = {name: (together if name in names else nearest)[name] for name in together}
            return _error(
                own, session.run({**feeds, **{n: value.astype(np.float32) for n, value in weights.items()}})
            )

        yield error_of


def _with(model: Model, weights: Weights, types: Mapping[str, int]) -> Model:
    """The model with other weights, rounded to `types` by Casts.

    A Cast widens each weight when it is needed, so that the wide ones are not in memory together.
    """
    result = model.copy()
    graph, emit = result.proto.graph, emitter(result)
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in weights])
    refill(graph.input, [value for value in graph.input if value.name not in weights])
    for name, value in weights.items():
        result.weights.pop(name, None)
        stored = emit.names.fresh()
        graph.initializer.append(result.detached_tensor(stored, value))
        lower = emit.add("Cast", [stored], to=types[name])
        wide = emit.names.fresh()
        emit.nodes.append(helper.make_node("Cast", [lower], [name], name=wide, to=TensorProto.FLOAT))
    refill(graph.node, [*emit.nodes, *graph.node])
    return result


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
