"""Finds sizes of dynamic axes: those a model runs with, and those an optimisation profile needs."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice, product

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import ArithmeticRunError, EngineError, InputsError
from rewriter.ir.graph import GraphEditor, attribute, open_graphs, reachable
from rewriter.ir.graph.ops import COMPUTE_BOUND, CONVOLUTIONS, PRODUCTS, RECURRENT
from rewriter.ir.model import Array, Model
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.tensor_files import Shape
from rewriter.runtime.inputs.samples import SHAPE_TYPES, Room, Samples

USUAL = (48, 64, 128, 256, 512, 320, 640, 32, 16, 1024, 4096, 16000)
"""Sizes of images, windows and sequences that networks are trained with, to try where nothing says more."""

MOST_TRIED = 120  # runs of the model until its first sizes are taken after all

MOST_TRIED_ELEMENTS = 2**25
"""Elements of the largest input that is tried: a video of 16 images of 640 x 640 has 2e7."""

MOST_NAN = 12
"""Runs that give NaN, as a window that is too short may, until the first one is taken after all."""


def fitting(model: Model, draw: Callable[..., Samples]) -> Samples:
    """The first random samples of `draw` that the model runs with, and gives no NaN if it can.

    Args:
        draw: Makes random samples from sizes of free dimensions, with `most` elements in an input.
    """
    samples = draw({})
    free = [name for name, size in samples.source.drawn.items() if size > 1]
    if not free:
        return samples
    ran = list[Samples]()
    most = max(MOST_TRIED_ELEMENTS, *(math.prod(shape) for _, shape, _ in samples.source.spans.values()))
    with suppress(ArithmeticRunError, EngineError), Session(reference(model)) as session:
        ports = model.signature.inputs
        second = {p.shape[1] or f"{p.name} axis 1" for p in ports if p.shape and len(p.shape) > 1}
        for sizes in islice(_candidates(free, second, *_asked_sizes(model)), MOST_TRIED):
            with suppress(ArithmeticRunError, InputsError):  # it does not run, or its inputs are too large
                drawn = draw(sizes, most=most)
                outputs = session.run(next(iter(drawn))).values()
                ran.append(drawn)
                if len(ran) == MOST_NAN or all(np.isfinite(o).all() for o in outputs):
                    return ran[0] if len(ran) == MOST_NAN else drawn
    return next(iter(ran), samples)


def _candidates(
    free: list[str], second: Container[object], channels: list[int], asked: list[int]
) -> Iterator[dict[str, int]]:
    """The default, then other sizes for one dimension, for all of them alike, and for two; weights' first.

    Several inputs, such as a real and an imaginary image, may have the same channels.

    Args:
        second: Names of second axes, which may have the channels that convolutions ask for.
    """
    yield {}
    places = [name for name in free if name in second]
    yield from ({name: size} for size, name in product(channels, places))
    yield from (dict.fromkeys(places, size) for size in channels)
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


SHAPE_OPERANDS: Mapping[str, range] = {
    **dict.fromkeys("Reshape Expand Tile TopK OneHot CenterCropPad AffineGrid".split(), range(1, 2)),
    **dict.fromkeys("ConstantOfShape Loop".split(), range(1)),
    **dict.fromkeys("Resize Upsample".split(), range(1, 4)),
    **dict.fromkeys("Slice Pad Split Squeeze Unsqueeze".split(), range(1, 5)),
    "Range": range(3),
}
"""Operands by which TensorRT computes shapes or counts steps: their values must be known on the host."""


def shape_inputs(model: Model) -> list[str]:
    """The integer inputs of one axis at most whose values decide shapes, or how often a loop runs."""
    ports = [p for p in model.signature.inputs if p.dtype in SHAPE_TYPES and len(p.shape or ()) <= 1]
    if not ports:
        return []
    graph = open_graphs(model)[0]

    def onward(tensor: str) -> list[str]:
        results = [name for node in graph.consumers(tensor) for name in node.output]
        return [name for name in results if (shape := graph.shape(name)) is not None and len(shape) <= 1]

    def decides(tensor: str) -> bool:
        return any(
            name == tensor and index in SHAPE_OPERANDS.get(node.op_type, ())
            for node in graph.consumers(tensor)
            for index, name in enumerate(node.input)
        )

    return [p.name for p in ports if any(map(decides, reachable([p.name], onward)))]


def room(model: Model, feeds: Mapping[str, Array]) -> Room:
    """Tries which sizes an FP32 model takes along its dynamic axes, with data cut from a sample, or repeated.

    For the smallest shapes, one size is tried for all axes: 1 and then powers of two, first with a batch of
    1. From these shapes, each dynamic dimension by itself is made twice as long as in the sample. If one
    cannot be, all are together, or it is one shorter: as a mask that covers a cache and one new token.
    """
    axes: dict[str, list[tuple[str, int]]] = {}
    for port in model.signature.inputs:
        for axis, size in enumerate(feeds[port.name].shape):
            named = port.shape[axis] if port.shape is not None else None
            if size > 1 and not isinstance(named, int):
                axes.setdefault(named or f"{port.name}:{axis}", []).append((port.name, axis))
    free = [axis for several in axes.values() for axis in several]
    longest = max((feeds[name].shape[axis] for name, axis in free), default=0)
    tried = [2**power for power in range(longest.bit_length()) if 2**power < longest]
    with suppress(ArithmeticRunError), Session(model) as session:
        for one_batch, size in product((True, False), (*tried, longest) if free else ()):
            batch = {axis for axis in free if one_batch and axis[1] == 0 and feeds[axis[0]].ndim > 1}
            sizes = {axis: 1 if axis in batch else min(size, feeds[axis[0]].shape[axis[1]]) for axis in free}
            if not _runs(session, feeds, sizes):
                continue
            longer = {
                name: {(n, axis): 2 * feeds[n].shape[axis] for n, axis in several}
                for name, several in axes.items()
            }
            apart = (more for more in longer.values() if not _runs(session, feeds, sizes | more))
            rigid = frozenset(axis for more in apart for axis in more)
            least = {name: _sized(feeds[name], name, sizes).shape for name, _ in free}
            together = {axis: size for more in longer.values() for axis, size in more.items()}
            for fewer in (0, 1) if rigid else ():
                if _runs(session, feeds, together | {axis: together[axis] - fewer for axis in rigid}):
                    return Room(least, one_less=rigid if fewer else frozenset())
            return Room(least, rigid)
    return Room()


def _runs(session: Session, feeds: Mapping[str, Array], sizes: Mapping[tuple[str, int], int]) -> bool:
    """True if the model gives outputs that are not empty."""
    with suppress(ArithmeticRunError):
        outputs = session.run({name: _sized(array, name, sizes) for name, array in feeds.items()})
        return all(output.size for output in outputs.values())
    return False


def _sized(array: Array, name: str, sizes: Mapping[tuple[str, int], int]) -> Array:
    """The array with other sizes of some axes: its beginning, or it and again its beginning."""
    for axis in range(array.ndim):
        if (name, axis) in sizes:
            array = np.take(array, np.arange(sizes[name, axis]) % array.shape[axis], axis)
    return np.ascontiguousarray(array)


def at_shapes(samples: Sequence[Mapping[str, Array]], shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """The data of samples at other shapes.

    The rows of all samples follow each other along the first axis, and start anew until there are enough.
    Along other axes the data are repeated or cut.
    """
    feeds = dict(samples[0])
    for name, shape in shapes.items():
        inner = {(name, axis): size for axis, size in enumerate(shape) if axis}
        several = [_sized(sample[name], name, inner) for sample in samples]
        if shape and shape[0] != len(several[0]):
            several = [_sized(np.concatenate(several), name, {(name, 0): shape[0]})]
        feeds[name] = several[0]
    return feeds
