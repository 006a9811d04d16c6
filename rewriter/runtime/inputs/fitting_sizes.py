"""Finds sizes of free dimensions with which a model runs, where nobody gave data or shapes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from itertools import combinations, islice, product

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import ArithmeticRunError, EngineError
from rewriter.ir.graph import GraphEditor, attribute, open_graphs, reachable
from rewriter.ir.graph.ops import COMPUTE_BOUND, CONVOLUTIONS, PRODUCTS, RECURRENT
from rewriter.ir.model import Model
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.inputs.samples import Samples

USUAL = (48, 64, 128, 256, 512, 320, 640, 32, 16, 1024, 4096, 16000)
"""Sizes of images, windows and sequences that networks are trained with, to try where nothing says more."""

MOST_TRIED = 120
"""Runs of the model until its first sizes are taken after all."""

MOST_NAN = 12
"""Runs that give NaN, as a window that is too short may, until the first one is taken after all."""


def fitting(model: Model, draw: Callable[[Mapping[str, int]], Samples]) -> Samples:
    """The first random samples that the model runs with, and gives no NaN if it can.

    Args:
        draw: Draws samples with other sizes for some of the dimensions that `DataSource.drawn` lists.
    """
    samples = draw({})
    free = [name for name, size in samples.source.drawn.items() if size > 1]
    if not free:
        return samples
    ran = list[Samples]()
    with suppress(ArithmeticRunError, EngineError), Session(reference(model)) as session:
        ports = model.signature.inputs
        second = {p.shape[1] or f"{p.name} axis 1" for p in ports if p.shape and len(p.shape) > 1}
        for sizes in islice(_candidates(free, second, *_asked_sizes(model)), MOST_TRIED):
            drawn = draw(sizes)
            with suppress(ArithmeticRunError):
                outputs = session.run(next(iter(drawn))).values()
                ran.append(drawn)
                if len(ran) == MOST_NAN or all(np.isfinite(o).all() for o in outputs):
                    return ran[0] if len(ran) == MOST_NAN else drawn
    return next(iter(ran), samples)


def _candidates(
    free: list[str], second: Container[object], channels: list[int], asked: list[int]
) -> Iterator[dict[str, int]]:
    """The default, then other sizes for one dimension, for all of them alike, and for two; weights' first.

    Args:
        second: Names of second axes, which may have the channels that convolutions ask for.
    """
    yield {}
    yield from ({name: size} for size, name in product(channels, free) if name in second)
    sizes = list(dict.fromkeys([*asked, 1, *USUAL]))  # 1: a batch without a name
    yield from ({name: size} for size, name in product(asked, free))
    yield from (dict.fromkeys(free, size) for size in USUAL)
    yield from ({name: size} for size, name in product(sizes[len(asked) :], free))
    pairs = sorted(product(enumerate(sizes), repeat=2), key=lambda pair: pair[0][0] + pair[1][0])
    for (_, one), (_, other) in pairs:
        yield from ({a: one, b: other} for a, b in combinations(free, 2))


def _asked_sizes(model: Model) -> tuple[list[int], list[int]]:
    """The sizes that the weights ask for which inputs meet first: by convolutions, and by others."""
    graph = open_graphs(model)[0]

    def onward(tensor: str) -> list[str]:
        passing = (node for node in graph.consumers(tensor) if node.op_type not in COMPUTE_BOUND)
        return [name for node in passing for name in node.output]

    ports = [port.name for port in model.signature.inputs]
    varying = reachable(ports, lambda tensor: [n for node in graph.consumers(tensor) for n in node.output])
    asked = dict[int, None](), dict[int, None]()
    for tensor in reachable(ports, onward):
        for node in graph.consumers(tensor):
            sizes = _asked_by(graph, node, tensor, varying)
            asked[node.op_type not in CONVOLUTIONS].update(dict.fromkeys(sizes))
    return list(asked[0]), list(asked[1])


def _asked_by(graph: GraphEditor, node: NodeProto, tensor: str, varying: Container[str]) -> list[int]:
    """The sizes that the constants of a node have along the axes that they share with the tensor."""
    shapes = [shape for n in node.input if n and n not in varying and (shape := graph.sizes(n))]
    if not shapes:
        return []
    first = shapes[0]
    if node.op_type in CONVOLUTIONS:
        return [first[1 if node.op_type == "Conv" else 0] * attribute(node, "group", 1)]
    if node.op_type in RECURRENT:
        return [first[-1]]
    if node.op_type in PRODUCTS:
        turned = attribute(node, "transB", 0) if node.op_type == "Gemm" else node.input[1] == tensor
        return [first[-1 if turned or len(first) == 1 else -2]]
    return [size for shape in shapes for size in shape if size > 1]
