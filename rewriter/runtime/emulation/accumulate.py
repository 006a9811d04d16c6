"""FP16 accumulators in an emulation: MatMul, Gemm and Conv sum in chunks, and each partial sum is rounded.

A Tensor Core adds 16 products to the accumulator and rounds it to FP16. Here such a node becomes a call of a
local function that does the same in a Loop, so partial sums beyond 65504 overflow, too. A ConvTranspose sums
in FP32 (docs/accuracy.md#emulated-sums)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.graph import attribute
from rewriter.ir.graph.match import optional_input
from rewriter.ir.model import Model
from rewriter.ir.model.graphs import replace_items
from rewriter.ir.model.tensors import Shape
from rewriter.runtime.emulation.local_functions import declare, paired
from rewriter.runtime.emulation.product_sums import ProductSums
from rewriter.target.fusion import FEW_CHANNELS, sums_in_fp32

CHUNK = 16  # products that a Tensor Core adds before it rounds the accumulator; see `accumulate`

_END = 2**63 - 1  # end of a Slice that goes to the end of the axis

Box = tuple[tuple[int, int], ...]
"""Start and end of a chunk along the channels of a group and along every axis of the kernel."""


def boxes(sizes: Sequence[int], group: int, *, apart: bool = False) -> Iterator[Box]:
    """The chunks of a kernel [channels, *spatial]: up to 16 channels of one tap, or fewer of several taps.

    The channels of a grouped kernel stay together. If `apart`, each chunk has one tap.
    """
    channels, *spatial = sizes
    *outer, inner = spatial
    deep = channels if group > 1 else min(channels, CHUNK)
    wide = 1 if apart else max(1, CHUNK // deep)
    for taps in product(*map(range, outer)):
        for tap in range(0, inner, wide):
            for channel in range(0, channels, deep):
                last = (min(tap + wide, inner), min(channel + deep, channels))
                yield ((channel, last[1]), *((t, t + 1) for t in taps), (tap, last[0]))


def slices(
    chunks: Sequence[Box], sizes: Sequence[int], dilations: Sequence[int], group: int
) -> dict[str, list[list[int]]]:
    """Positions of the chunks in the padded input and in the kernel, as starts and ends of Slice."""
    tables: dict[str, list[list[int]]] = {"x_from": [], "x_to": [], "w_from": [], "w_to": []}
    for (low, high), *taps in chunks:
        whole = group > 1  # the input holds the channels of all groups
        tables["w_from"].append([low, *(first for first, _ in taps)])
        tables["w_to"].append([high, *(last for _, last in taps)])
        steps = list(zip(taps, sizes[1:], dilations, strict=True))
        tables["x_from"].append([0 if whole else low, *(first * d for (first, _), _, d in steps)])
        ends = [(last - size) * d or _END for (_, last), size, d in steps]
        tables["x_to"].append([_END if whole else high, *ends])
    return tables


ONE_ROUNDING = 2.1e-4  # relative L2 error of one rounding to FP16, as measured

DOMAIN = "rewriter.fp16_accumulators"

FIRST_OPSET = 13  # the operators as the functions use them

SPLIT = frozenset({"MatMul", "Gemm", "Conv"})

FUSED_CHUNK = 32
"""Products that attention's second product sums before it rounds (docs/accuracy.md#emulated-sums)."""

_SUM = f"""
    on = Identity (go)
    total = Add (before, part)
    half = Cast <to = {TensorProto.FLOAT16}> (total)
    after = Cast <to = {TensorProto.FLOAT}> (half)
"""

TILE, NARROWEST = 2**17, 32
"""Elements of a result that a MatMul computes at a time, and its fewest columns: partial sums that stay in
the processor's cache take 0.6 to 0.8 of the time (512 to 4,096 rows, 768 to 3,072 columns)."""

_MATMUL = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    MatMul <chunk> (a, b) => (y) {{
        chunk = Constant <value_int: int = @chunk> ()
        single = Constant <value_int = 1> ()
        tile = Constant <value_int = {TILE}> ()
        narrowest = Constant <value_int = {NARROWEST}> ()
        rest = Sub (chunk, single)
        last = Constant <value_ints = [-1]> ()
        last_but_one = Constant <value_ints = [-2]> ()
        one = Constant <value_ints = [1]> ()
        scalar = Constant <value_int = -1> ()
        shape = Shape (a)
        terms = Gather (shape, scalar)
        depth = Max (terms, single)
        padded = Add (depth, rest)
        count = Div (padded, chunk)
        end = Sub (count, single)
        start = Cast <to = {TensorProto.BOOL}> (chunk)
        zero = Constant <value_float = 0.0> ()
        size = Size (a)
        lines = Div (size, depth)
        rows = Max (lines, single)
        fitting = Div (tile, rows)
        width = Max (fitting, narrowest)
        shape_b = Shape (b)
        columns = Gather (shape_b, scalar)
        before_end = Sub (columns, single)
        full = Div (before_end, width)
        tiles = Add (full, single)
        none = SequenceEmpty ()
        parts = Loop (tiles, start, none) <
            body = one_tile (int64 t, bool more, seq(float[]) done) => (bool go_on, seq(float[]) with_tile) {{
            go_on = Identity (more)
            first = Mul (t, width)
            beyond = Add (first, width)
            from = Reshape (first, one)
            to = Reshape (beyond, one)
            strip = Slice (b, from, to, last)
            result = Loop (count, start, zero) <
                body = step (int64 i, bool go, float[] before) => (bool on, float[] after) {{
                place = PLACE
                offset = Mul (place, chunk)
                low = Reshape (offset, one)
                high = Add (low, chunk)
                left = Slice (a, low, high, last)
                right = Slice (strip, low, high, last_but_one)
                part = MatMul (left, right)
                {_SUM}
            }}>
            with_tile = SequenceInsert (done, result)
        }}>
        y = ConcatFromSequence <axis = -1> (parts)
    }}"""

_CONV = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    Conv <strides, dilations, group> (x, w, pads, axes, x_from, x_to, w_from, w_to) => (y) {{
        first = Constant <value_int = 0> ()
        boxes = Shape (w_from)
        count = Gather (boxes, first)
        start = Cast <to = {TensorProto.BOOL}> (count)
        zero = Constant <value_float = 0.0> ()
        field = Pad (x, pads)
        y = Loop (count, start, zero) <
            body = step (int64 i, bool go, float[] before) => (bool on, float[] after) {{
            x_low = Gather (x_from, i)
            x_high = Gather (x_to, i)
            w_low = Gather (w_from, i)
            w_high = Gather (w_to, i)
            left = Slice (field, x_low, x_high, axes)
            right = Slice (w, w_low, w_high, axes)
            part = Conv <strides: ints = @strides, dilations: ints = @dilations, group: int = @group>
                (left, right)
            {_SUM}
        }}>
    }}"""


def sum_error(depth: int) -> float:
    """Relative L2 error of an FP16 sum of `depth` random products (docs/accuracy.md#emulated-sums)."""
    return ONE_ROUNDING * math.sqrt(depth / CHUNK / 2)


def accumulate_in_fp16(emulated: Model, original: Model, sums: ProductSums, backwards: bool) -> None:
    """Give the FP16 MatMul, Gemm and Conv nodes of an emulation, which is changed, FP16 accumulators.

    The accumulators stay FP32 in products of `sums.summed`, in those that run without Tensor Cores
    (`sums_in_fp32`), in BF16, below `FIRST_OPSET`, in a Gemm with factors, and in a Conv with an unknown
    kernel size or with `auto_pad`. If `backwards`, the last chunk comes first.
    """
    if emulated.opset < FIRST_OPSET:
        return
    facts = original.facts()
    for scope, graph, pairs in paired(original, emulated, SPLIT):
        tensors = facts.main | facts.scopes[scope]
        chosen: dict[int, tuple[Shape, int]] = {}  # the second operand's shape, and a MatMul's chunk
        for node, position in pairs:
            result, key = tensors.get(node.output[0]), (scope, node.output[0])
            shapes = tuple(tensors[n].shape if n in tensors else None for n in node.input)
            low = result is not None and result.dtype == TensorProto.FLOAT16 and key not in sums.summed
            exact = sums_in_fp32(node, *(shape or () for shape in shapes[:2]))
            chunk = FUSED_CHUNK if key in sums.fused else CHUNK
            if low and not exact and _can_split(node, shapes) and not _is_one_chunk(node, shapes[1], chunk):
                chosen[position] = shapes[1] or (), chunk
        if chosen:
            _Writer(backwards).rewrite(graph, chosen)
    place = "Sub (end, i)" if backwards else "Identity (i)"
    declare(emulated, DOMAIN, _MATMUL.replace("PLACE", place), _CONV)


def _is_one_chunk(node: NodeProto, right: Shape | None, chunk: int) -> bool:
    """True for a MatMul of so few products that its result is rounded once, as every FP16 result is."""
    depth = right[-2] if node.op_type == "MatMul" and right else None
    return isinstance(depth, int) and depth <= chunk


def _can_split(node: NodeProto, shapes: Sequence[Shape | None]) -> bool:
    right = shapes[1]
    if node.op_type != "Conv":
        plain = all(attribute(node, factor, 1.0) == 1.0 for factor in ("alpha", "beta"))
        return plain and (right is None or len(right) > 1)
    padded = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return padded and right is not None and all(isinstance(d, int) for d in right)


@dataclass
class _Writer:
    backwards: bool
    nodes: list[NodeProto] = field(default_factory=list)

    def rewrite(self, graph: GraphProto, chosen: Mapping[int, tuple[Shape, int]]) -> None:
        split = {"MatMul": self._matmul, "Gemm": self._gemm, "Conv": self._conv}
        for index, node in enumerate(graph.node):
            if index in chosen:
                split[node.op_type](node, *chosen[index])
            else:
                self.nodes.append(node)
        replace_items(graph.node, self.nodes)

    def _matmul(self, node: NodeProto, kernel: Shape, chunk: int) -> None:
        self._add("MatMul", node.input, node.output[0], domain=DOMAIN, chunk=chunk)

    def _gemm(self, node: NodeProto, kernel: Shape, chunk: int) -> None:
        """A * B + C; the products are what accumulates."""
        out = node.output[0]
        sides = [
            self._add("Transpose", [name], f"{out}/{flag}", perm=[1, 0]) if attribute(node, flag, 0) else name
            for name, flag in zip(node.input[:2], ("transA", "transB"), strict=True)
        ]
        bias = optional_input(node, 2)
        product = f"{out}/product" if bias else out
        self._add("MatMul", sides, product, domain=DOMAIN, chunk=chunk)
        if bias:
            self._add("Add", [product, bias], out)

    def _conv(self, node: NodeProto, kernel: Shape, chunk: int) -> None:
        out, sizes = node.output[0], [d for d in kernel if isinstance(d, int)]
        spatial = len(sizes) - 2
        dilations = attribute(node, "dilations", [1] * spatial)
        pads = attribute(node, "pads", [0] * 2 * spatial)
        group = attribute(node, "group", 1)
        chunks = list(boxes(sizes[1:], group, apart=sizes[0] > FEW_CHANNELS))[:: -1 if self.backwards else 1]
        tables = {
            "pads": [0, 0, *pads[:spatial], 0, 0, *pads[spatial:]],
            "axes": list(range(1, spatial + 2)),
            **slices(chunks, sizes[1:], dilations, group),
        }
        operands = [*node.input[:2], *(self._constant(v, f"{out}/{n}") for n, v in tables.items())]
        bias = optional_input(node, 2)
        self._add(
            "Conv",
            operands,
            f"{out}/product" if bias else out,
            domain=DOMAIN,
            strides=attribute(node, "strides", [1] * spatial),
            dilations=dilations,
            group=group,
        )
        if bias:
            shape = self._constant([-1, *[1] * spatial], f"{out}/shape")
            self._add("Add", [f"{out}/product", self._add("Reshape", [bias, shape], f"{out}/bias")], out)

    def _add(self, op: str, inputs: Sequence[str], out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"{out}/{op}", **attributes))
        return out

    def _constant(self, value: object, out: str) -> str:
        return self._add("Constant", [], out, value=numpy_helper.from_array(np.asarray(value, np.int64), out))
