"""Latency of nodes and plans estimated without a GPU, from recorded costs.

Source: 14 networks on one H200 with TensorRT-RTX 1.6.1, strongly typed, batch 1, medians, as `fix` made them
and in FP32 (TF32). The constants are a non-negative least squares fit of the relative error, which
benchmarks/latency_estimate.py made (last in commit 3a19a1f). Another GPU or release gives other figures.
A small kernel costs a fixed time, and the time of a product with few tiles grows with the depth of its sum:
nothing else runs in parallel.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import ceil, fsum, prod

from onnx import NodeProto

from rewriter.ir.float_graph import FloatGraph
from rewriter.ir.graph import attribute
from rewriter.ir.graph.ops import (
    CHEAP,
    CONVOLUTIONS,
    NORMS,
    PRODUCTS,
    RECURRENT,
    SCALING,
    SHUFFLES,
    SOFTMAX,
    VIEWS,
)
from rewriter.ir.model import Model
from rewriter.ir.model.tensors import Shape
from rewriter.ir.plan import SEARCHED, Plan, node_key
from rewriter.target import Target
from rewriter.target.fusion import conv_depth, is_depthwise, kernel_results

ORIGIN = "recorded on an H200, not measured here"

KERNEL_US, NORM_US = 3.28, 5.21
"""Microseconds for the kernel of a product, and for a kernel with two passes over its data."""

WAVE_US = 3.10e-3
"""Microseconds for each term of a sum and each wave of tiles of the result over all multiprocessors."""

MOVED_US = 5.55e-7
"""Microseconds for each FP16 element that a kernel reads or writes: the least time of a product, too."""

MEAN_US = 6e-6
"""Microseconds for each element of an image whose mean is taken, in FP16 and FP32: 4.2e-6 to 8e-6 in chains
of squeeze and excitation (docs/accuracy.md#means-of-images)."""

PRODUCTS_PER_US = {"MatMul": 3.4e8, "Conv": 2.2e8}
"""Highest rate of multiply-adds in FP16: MatMul 4096^3 took 200 us, Conv of 512 channels on 56 x 56 33 us."""

ATTENTION_US = 1.08e-8
"""Microseconds for each multiply-add of an attention that is one kernel: 139 us for both products of
8 x 12 x 1024 x 1024 x 64."""

FP32_MATMUL_US, FP32_PRODUCT_US = 4.77, 1.0e-8
"""Extra time of a MatMul in FP32, and for each of its multiply-adds, which large networks decide
(benchmarks/README.md#deployed-sizes)."""

FP32_CONV_US, FP32_DEPTH_US, FP32_CHANNEL_US = 3.42e-9, 6.10e-3, 2.61e-3
"""Extra time of a Conv in FP32 for each multiply-add, and for each term of a sum: of wide windows, and of
windows of one element."""

BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, 4.8 TB/s (NVIDIA's data sheet)."""

CAST_BYTES = 6.0
"""Bytes that a Cast between FP16 and FP32 reads and writes for each element. An FP32 epilogue after an FP16
Conv moves about as much."""

BROKEN_US, BROKEN_PRODUCT_US = 16.0, 2.55e-8
"""Extra time of an attention that is several kernels: at least the first (13 us for each of the 12 in a T5
encoder with FP32 products, 18.5 us in a ViT with FP32 biases of Q, K and V), and the second for each
multiply-add of its products (332 us for 8 x 12 x 1024 x 1024 x 64)."""

SUM_SHARE = 0.08
"""Share of a MatMul's time that FP32 sums add where arithmetic decides: 4 % to 10 % (4096 x 4096 x 4096, and
8192 x 768 x 3072). Smaller ones wait for launches and memory, and lose nothing."""

UNALIGNED = {16: 1.0, 8: 1.35, 1: 2.6}
"""Times that a Conv needs, by what divides its channels, read and written, above `FEW_CHANNELS`: 1.2 to 1.9
and 2.2 to 4.5 in chains of Convs (benchmarks/conv_kernels.json)."""

FEW_CHANNELS = 32
"""Up to so many channels, 16 do not pay."""

IMAGE_US, IMAGE_CHANNELS = 6.5e-8, 4
"""Extra microseconds for each multiply-add of a wide window over at most so many channels: ResNet's stem, 32
images."""

WINDOWS_PER_US, WINDOW_CHANNELS = {1: 2e7, 2: 2e7, 3: 2.5e6}, 64
"""Rate of multiply-adds of a strided ConvTranspose by its axes, and the fewest channels of its kernel.

With them the estimate is 0.4 to 2.7 times the latency of 38 kernels, and 0.01 to 0.3 at the rate of a Conv
(benchmarks/convtranspose_kernels.json)."""

FP32_STEP = 0.3
"""Share of the time of a recurrent step that FP32 adds. A step is a kernel that waits for the last: 480 of a
speaker's LSTM took 1848 us, and 2253 us in FP32 (benchmarks/population_judging.json)."""

NARROW, NARROW_TIMES = 48, 1.8
"""Channels of a group, and the times that a Conv of narrower ones needs (docs/accuracy.md#grouped-convs)."""

TILE, PROCESSORS = 128, 132
"""Rows and columns of a result that one multiprocessor computes at a time, in large FP16 kernels, and the
multiprocessors of an H200 (NVIDIA's data sheet). More tiles than multiprocessors are computed in waves."""

TYPICAL = 64
"""Size of an unknown dimension."""

_FUSED = CHEAP - VIEWS
"""Parts of a product's kernel, as the recorded times were fitted; `ELEMENTWISE` is narrower."""

Shapes = Mapping[str, Shape | None]


@dataclass(frozen=True)
class Attention:
    """Two products of computed tensors with a Softmax between: one kernel, if types allow it.

    Attributes:
        nodes: Keys of the nodes that break it in FP32: its products, the scaling of Q and K, and the biases
            of projections that TensorRT merges into one product. Written-out norms of Q and K do not:
            TensorRT-RTX 1.7.1 builds the same kernels for them in FP16 and FP32.
        inside: Keys of the nodes between the products, which are parts of the kernel.
        us: The extra time of the broken attention.
    """

    nodes: frozenset[str]
    inside: frozenset[str]
    us: float


@dataclass(frozen=True)
class Result:
    """A tensor that nodes read.

    Attributes:
        producer: Key of the node that computes it; "" for an input of the model.
        readers: Keys of the nodes that read it; `products` of the matrix operators among them.
        us: The time of a Cast that is a kernel of its own.
    """

    producer: str
    readers: frozenset[str]
    products: frozenset[str]
    us: float

    def is_cast(self, fp32: AbstractSet[str], searched: AbstractSet[str]) -> bool:
        """True if a kernel casts it: for a product in FP32, or an FP32 result for readers of both types.

        Nodes that only the rules keep in FP32, such as norms, begin kernels anyway.
        """
        wide = self.readers & fp32
        if self.producer not in fp32:
            return bool(wide & self.products)
        return 0 < len(wide) < len(self.readers) and not searched.isdisjoint({self.producer, *wide})


@dataclass(frozen=True)
class Prices:
    """The estimated time of every float node of the main graph, by key, in microseconds.

    Attributes:
        base: In FP16.
        own: Extra time in FP32 of the node's own kernel.
        attentions: Charged once each, if one of their nodes is FP32.
        epilogues: Elementwise nodes in the kernels of Convs, with the Convs. In FP32 after an FP16 Conv they
            are a kernel of their own, all that follow one Conv together.
    """

    base: Mapping[str, float]
    own: Mapping[str, float]
    attentions: tuple[Attention, ...]
    results: tuple[Result, ...]
    epilogues: Mapping[str, tuple[frozenset[str], float]]

    @cached_property
    def extra(self) -> Mapping[str, float]:
        """Extra time of each node if it is the only one in FP32: all of the above, together with the Cast of
        a result with several readers, which a Conv's epilogue nearly always needs."""
        extra = dict(self.own)
        charged = [(key, attention.us) for attention in self.attentions for key in attention.nodes]
        charged += [(key, result.us) for result in self.results for key in result.products]
        charged += [(key, us) for key, (_, us) in self.epilogues.items()]
        shared = (result for result in self.results if len(result.readers) > 1)
        charged += [(result.producer, result.us) for result in shared if result.producer in self.epilogues]
        for key, us in charged:
            extra[key] += us
        return extra

    def total_us(self, plan: Plan) -> float:
        """The time of one inference under `plan`, bit for bit the same in any order of the plan's nodes."""
        fp32 = plan.fp32
        searched = {d.key for d in plan.decisions if d.rule == SEARCHED} & fp32
        split: dict[str, float] = {}  # kernels that exist only because nodes of a search are FP32
        for key in searched & self.epilogues.keys():
            convs, us = self.epilogues[key]
            for conv in sorted(convs - fp32)[:1]:
                split[conv] = max(split.get(conv, us), us)
        total = fsum(self.base.values()) + fsum(self.own.get(key, 0.0) for key in fp32)
        total += fsum(attention.us for attention in self.attentions if attention.nodes & fp32)
        casts = fsum(result.us for result in self.results if result.is_cast(fp32, searched))
        return total + casts + fsum(split.values())


def products(node: NodeProto, shapes: Shapes) -> tuple[str, float, int]:
    """The kind of a matrix operator, its multiply-adds and the length of its sums; ("", 0, 0) for others.

    A depthwise Conv counts as another: it is bound by memory.
    """
    if node.op_type in PRODUCTS:
        depth = (_sizes(shapes.get(node.input[0])) or (TYPICAL,))[-1]
        return "MatMul", float(_elements(node.output[0], shapes) * depth), depth
    if node.op_type in CONVOLUTIONS:
        kernel = _sizes(shapes.get(node.input[1]))
        depth = 0 if is_depthwise(node, kernel) else conv_depth(node, kernel)
        return "Conv", float(_elements(node.output[0], shapes) * depth), depth
    return "", 0.0, 0


def fp16_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated microseconds of a node in FP16; `constants` are names of tensors that are not moved."""
    kind, count, depth = products(node, shapes)
    if kind:
        us = max(count / PRODUCTS_PER_US[kind], _launched_us(node, shapes, kind, depth))
        us = max(us, _windows_us(node, shapes, count), _moved_us(node, shapes))
        return us if kind == "MatMul" else us * _conv_factor(node, shapes) + _image_us(node, shapes, count)
    if node.op_type in RECURRENT:
        return KERNEL_US * _steps(node, shapes)
    # the prices were fitted to networks that have shuffles; who reads a part of a Split reads it in place
    if node.op_type in (VIEWS - SHUFFLES) | {"Split"}:
        return 0.0
    # a ReduceMean is counted as the norm that it is a part of
    norm = NORM_US if node.op_type in NORMS | {"ReduceMean"} else 0.0
    norm += MEAN_US * _elements(node.input[0], shapes) if _is_mean_of_images(node, shapes) else 0.0
    return norm + MOVED_US * _moved_elements(node, shapes, constants)


def bound_by_arithmetic(node: NodeProto, shapes: Shapes) -> bool:
    """True if a matrix operator is so large that its multiply-adds decide its time in FP16."""
    kind, count, depth = products(node, shapes)
    return bool(kind) and count / PRODUCTS_PER_US[kind] > _launched_us(node, shapes, kind, depth)


def _launched_us(node: NodeProto, shapes: Shapes, kind: str, depth: int) -> float:
    """The least time of a product: its launch, and the sums of its waves of tiles."""
    return KERNEL_US + WAVE_US * _waves(node, shapes, channels=1 if kind == "Conv" else -1) * depth


def _conv_factor(node: NodeProto, shapes: Shapes) -> float:
    """The times that a dense or grouped Conv needs for channels without a fast kernel."""
    weight, groups = _sizes(shapes.get(node.input[1])), attribute(node, "group", 1)
    pixel = prod(_sizes(shapes.get(node.output[0]))[2:]) == 1
    if node.op_type != "Conv" or len(weight) < 3 or pixel or is_depthwise(node, weight):
        return 1.0
    if groups > 1:
        return NARROW_TIMES if min(weight[1], weight[0] // groups) < NARROW else 1.0
    wide = [size for size in weight[:2] if size > FEW_CHANNELS]
    return max((next(us for step, us in UNALIGNED.items() if size % step == 0) for size in wide), default=1.0)


def _windows_us(node: NodeProto, shapes: Shapes, count: float) -> float:
    """The time of a ConvTranspose whose stride is more than 1; 0.0 for others."""
    weight, steps = _sizes(shapes.get(node.input[1])), attribute(node, "strides", [1])
    if node.op_type != "ConvTranspose" or max(steps) == 1 or len(weight) < 3:
        return 0.0
    tiles = ceil(weight[1] / WINDOW_CHANNELS) * WINDOW_CHANNELS / max(1, weight[1])
    return count * tiles / WINDOWS_PER_US.get(len(weight) - 2, PRODUCTS_PER_US["Conv"])


def _steps(node: NodeProto, shapes: Shapes) -> int:
    """Number of steps of a recurrent node, in all directions."""
    data, weight = (_sizes(shapes.get(name)) or (TYPICAL, TYPICAL) for name in node.input[:2])
    return int(data[attribute(node, "layout", 0)] * weight[0])


def _image_us(node: NodeProto, shapes: Shapes, count: float) -> float:
    """The extra time of a Conv that reads an image through windows that overlap."""
    weight, steps = _sizes(shapes.get(node.input[1])), attribute(node, "strides", [1])
    image = node.op_type == "Conv" and len(weight) == 4 and weight[1] <= IMAGE_CHANNELS
    overlap = image and min(steps) > 1 and max(weight[2:]) > max(steps)
    return IMAGE_US * count if overlap and attribute(node, "group", 1) == 1 else 0.0


def more_us(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> float:
    """Estimated extra microseconds of the node's own kernel in FP32; arguments as for `fp16_us`."""
    kind, count, depth = products(node, shapes)
    if kind:
        more = FP32_MATMUL_US + FP32_PRODUCT_US * count
        if kind == "Conv":
            one = prod(_sizes(shapes.get(node.input[1]))[2:]) == 1
            more = FP32_CONV_US * count + (FP32_CHANNEL_US if one else FP32_DEPTH_US) * depth
        return max(more, 2.0 * _moved_us(node, shapes) - fp16_us(node, shapes, constants))
    steps = _steps(node, shapes) if node.op_type in RECURRENT else 0
    return FP32_STEP * KERNEL_US * steps + 2.0 * _moved_elements(node, shapes, constants) / BYTES_PER_US


def _moved_us(node: NodeProto, shapes: Shapes) -> float:
    """The time to read the operands of a node in FP16, weights among them, and to write its result."""
    return MOVED_US * _moved_elements(node, shapes, frozenset())


def _is_mean_of_images(node: NodeProto, shapes: Shapes) -> bool:
    """True for the mean over height and width, which TensorRT sums slowly."""
    if node.op_type not in ("GlobalAveragePool", "ReduceMean"):
        return False
    image, mean = (_sizes(shapes.get(name)) for name in (node.input[0], node.output[0]))
    return len(image) == 4 and prod(mean) == prod(image[:2]) < prod(image)


def _waves(node: NodeProto, shapes: Shapes, *, channels: int) -> float:
    """Tiles of a product's result for each multiprocessor, at least one; `channels`: the axis of columns."""
    sizes = _sizes(shapes.get(node.output[0]))
    if len(sizes) < 2:
        return 1.0
    columns = sizes[channels]
    rows = prod(sizes) // max(1, columns)
    return max(1.0, ceil(rows / TILE) * ceil(columns / TILE) / PROCESSORS)


def _moved_elements(node: NodeProto, shapes: Shapes, constants: AbstractSet[str]) -> int:
    """Elements of the node's inputs and outputs, without constants."""
    names = (name for name in (*node.input, *node.output) if name and name not in constants)
    return sum(_elements(name, shapes) for name in names)


def _elements(tensor: str, shapes: Shapes) -> int:
    return prod(_sizes(shapes.get(tensor)))


def _sizes(shape: Shape | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else TYPICAL for d in shape or ())


def priced(model: Model, target: Target | None = None) -> Prices:
    """The prices of a model; the target decides which types attention is one kernel with."""
    graph = FloatGraph.main(model)
    shapes = {name: tensor.shape for name, tensor in model.facts().main.items()}
    return _Pricing(graph, shapes, target or Target()).prices()


class _Pricing:
    """Looks at the main graph once: what is fused, and who reads what."""

    def __init__(self, float_graph: FloatGraph, shapes: Shapes, target: Target) -> None:
        graph = float_graph.graph.graph
        self._graph, self._shapes, self._target = float_graph, shapes, target
        self._constants = {t.name for t in graph.initializer}
        self._constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
        self._nodes = {node_key(0, n): n for n in float_graph.nodes if any(n.output)}
        nodes = float_graph.nodes
        self._projections = Counter(t for n in nodes if self._weighted(n) for t in self._computed(n))
        results = kernel_results(nodes, self._weighted, lambda n: n.op_type in _FUSED, float_graph.source)
        fused = (n for n in nodes if n.op_type in _FUSED)
        self._fused = {self._key(n) for n in fused if not results.keys().isdisjoint(n.output)}

    def prices(self) -> Prices:
        attentions, fused_products = [], dict[str, float]()
        for parts in self._attention_parts():
            attentions.append(self._attention(*parts))
            fused_products |= {self._key(n): ATTENTION_US * products(n, self._shapes)[1] for n in parts[:2]}
        inside = {key for attention in attentions for key in attention.inside}
        base = {key: fp16_us(node, self._shapes, self._constants) for key, node in self._nodes.items()}
        base |= fused_products | dict.fromkeys(inside, 0.0)
        for key, node in self._nodes.items():  # TensorRT merges the products of one tensor: one launch
            data = self._computed(node) if self._weighted(node) else ()
            merged = max((self._projections[t] for t in data), default=1)
            if merged > 1 and not bound_by_arithmetic(node, self._shapes):
                base[key] -= KERNEL_US * (1.0 - 1.0 / merged)
        own = {key: more_us(node, self._shapes, self._constants) for key, node in self._nodes.items()}
        own |= dict.fromkeys(inside | fused_products.keys() | self._fused, 0.0)
        own |= {key: own[key] + us for key, us in self._fp32_sums()}
        return Prices(base, own, tuple(attentions), tuple(self._results()), self._epilogues())

    def _fp32_sums(self) -> Iterator[tuple[str, float]]:
        """The nodes for which a large FP16 product sums in FP32 if they are FP32, with the extra time."""
        for node in self._nodes.values():
            for product in self._producers(node) if self._key(node) in self._fused else ():
                large = product.op_type in PRODUCTS and self._weighted(product)
                if large and bound_by_arithmetic(product, self._shapes):
                    yield self._key(node), SUM_SHARE * fp16_us(product, self._shapes, self._constants)

    @cached_property
    def _normed(self) -> frozenset[int]:
        return frozenset(id(node) for norm in self._graph.norms for node in norm.nodes)

    def _key(self, node: NodeProto) -> str:
        return node_key(0, node)

    def _computed(self, node: NodeProto) -> list[str]:
        sources = (self._graph.source(name) for name in node.input if name)
        return [name for name in sources if name not in self._constants]

    def _multiplies_computed(self, node: NodeProto) -> bool:
        return node.op_type == "MatMul" and len(self._computed(node)) == 2

    def _weighted(self, node: NodeProto) -> bool:
        """True for a matrix operator that is no part of attention."""
        return node.op_type in PRODUCTS | CONVOLUTIONS and not self._multiplies_computed(node)

    def _producers(self, node: NodeProto) -> Iterator[NodeProto]:
        yield from (p for p in map(self._graph.producer, self._computed(node)) if p is not None)

    def _results(self) -> Iterator[Result]:
        readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes.values():
            for tensor in filter(self._graph.is_float, self._computed(node)):
                readers.setdefault(tensor, []).append(node)
        for tensor, nodes in readers.items():
            producer = self._graph.producer(tensor)
            key = self._key(producer) if producer is not None else ""
            multiplying = frozenset(map(self._key, filter(self._weighted, nodes)))
            yield Result(key, frozenset(map(self._key, nodes)), multiplying, self._kernel_us(tensor))

    def _epilogues(self) -> dict[str, tuple[frozenset[str], float]]:
        """The fused nodes that follow a Conv, with nothing but such nodes between."""
        epilogues: dict[str, tuple[frozenset[str], float]] = {}
        for key, node in self._nodes.items():
            producers = list(self._producers(node)) if key in self._fused else []
            convs = {self._key(p) for p in producers if p.op_type in CONVOLUTIONS}
            before = (epilogues[k][0] for k in map(self._key, producers) if k in epilogues)
            if convs or (convs := set().union(*before)):
                epilogues[key] = frozenset(convs), self._kernel_us(node.output[0])
        return epilogues

    def _kernel_us(self, tensor: str) -> float:
        """Time of a kernel that reads a tensor and writes it in another type."""
        return KERNEL_US + CAST_BYTES * _elements(tensor, self._shapes) / BYTES_PER_US

    def _attention_parts(self) -> Iterator[tuple[NodeProto, NodeProto, list[NodeProto]]]:
        """Each product PV with its QK^T and the nodes between them, including a Softmax."""
        for node in filter(self._multiplies_computed, self._nodes.values()):
            between = list(self._graph.upstream(node.input[0], lambda n: n.op_type in CHEAP))
            if any(n.op_type in SOFTMAX for n in between):
                before = (p for n in between for p in self._producers(n))
                scores = next(filter(self._multiplies_computed, before), None)
                if scores is not None:
                    yield node, scores, between

    def _attention(self, values: NodeProto, scores: NodeProto, between: list[NodeProto]) -> Attention:
        answer = self._target.answers.get("attention-islands")
        scaling = VIEWS | SCALING | {"Add"}
        read = (*scores.input, values.input[1])
        fed = [n for t in read for n in self._graph.upstream(t, lambda n: n.op_type in scaling)]
        # a scaling that is no part of a product's kernel, or of a norm's
        alone = [n for n in fed if n.op_type in SCALING and self._key(n) not in self._fused]
        breaking = [values, scores, *filter(self._merged_bias, fed)]
        breaking += [n for n in alone if id(n) not in self._normed]
        if answer == "none":
            breaking += [n for n in between if n.op_type in SOFTMAX]
        count = sum(products(node, self._shapes)[1] for node in (values, scores))
        us = 0.0 if answer == "any" else max(BROKEN_US, BROKEN_PRODUCT_US * count)
        return Attention(frozenset(map(self._key, breaking)), frozenset(map(self._key, between)), us)

    def _merged_bias(self, node: NodeProto) -> bool:
        """True for the bias of one of several projections of one tensor, which TensorRT merges."""
        product = next(self._producers(node), None)
        if node.op_type != "Add" or product is None or not self._weighted(product):
            return False
        return any(self._projections[tensor] > 1 for tensor in self._computed(product))
