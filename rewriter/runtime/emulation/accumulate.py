"""FP16 accumulators in an emulation: MatMul, Gemm and Conv sum in chunks, and each partial sum is rounded.

A Tensor Core adds 16 products to the accumulator and rounds it to FP16. Here such a node becomes a call of a
local function that does the same in a Loop, so partial sums beyond 65504 overflow, too. A ConvTranspose sums
in FP32 (docs/accuracy.md#emulated-sums)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product as product_of
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.graph import attribute
from rewriter.ir.graph.match import optional_input
from rewriter.ir.model import Model
from rewriter.ir.model.graphs import replace_items
from rewriter.ir.model.tensors import Shape
from rewriter.runtime.emulation.local_functions import declare, paired
from rewriter.runtime.emulation.product_sums import ProductSums
from rewriter.runtime.engines.onnxruntime import runs_on_cuda
from rewriter.target.fusion import FEW_CHANNELS, sums_in_fp32

CHUNK = 16  # products that a Tensor Core adds before it rounds the accumulator; see `accumulate`

_END = 2**63 - 1  # end of a Slice that goes to the end of the axis

Geometry = tuple[list[int], list[int], list[int]]
"""Strides, dilations and pads of a Conv."""

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
    for taps in product_of(*map(range, outer)):
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

TILE, LOWEST, NARROWEST = 2**17, 64, 32
"""Elements of a result that are computed at a time, and fewest rows and columns of a MatMul's: sums that stay
in the processor's cache take 0.35 to 0.8 of the time (2,048 to 8,192 rows, 320 to 5,120 columns). A GPU
starts a kernel for each step of each tile: a BERT-base of batch 32 took over 60 s on an H200, and 20 s on the
processors beside it."""

MANY_PRODUCTS = 256  # from which only results known to be larger than `TILE` are tiled: each loads for 5 ms

_MATMUL = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    MatMul <chunk> (a, b) => (y) {{
        chunk = Constant <value_int: int = @chunk> ()
        none = Constant <value_int = 0> ()
        single = Constant <value_int = 1> ()
        last = Constant <value_ints = [-1]> ()
        last_but_one = Constant <value_ints = [-2]> ()
        one = Constant <value_ints = [1]> ()
        scalar = Constant <value_int = -1> ()
        shape = Shape (a)
        terms = Gather (shape, scalar)
        depth = Max (terms, single)
        offsets = Range (none, depth, chunk)
        count = Size (offsets)
        end = Sub (count, single)
        start = Cast <to = {TensorProto.BOOL}> (chunk)
        zero = Constant <value_float = 0.0> ()
        y = Loop (count, start, zero) <
            body = step (int64 i, bool go, float[] before) => (bool on, float[] after) {{
            place = PLACE
            offset = Gather (offsets, place)
            low = Reshape (offset, one)
            high = Add (low, chunk)
            left = Slice (a, low, high, last)
            right = Slice (b, low, high, last_but_one)
            part = MatMul (left, right)
            {_SUM}
        }}>
    }}"""

_TILED_MATMUL = f"""
    <opset_import: ["" : OPSET, "{DOMAIN}" : 1], domain: "{DOMAIN}">
    TiledMatMul <chunk> (a, b) => (y) {{
        single = Constant <value_int = 1> ()
        tile = Constant <value_int = {TILE}> ()
        flat = Constant <value_int = {TILE // LOWEST}> ()
        lowest = Constant <value_int = {LOWEST}> ()
        narrowest = Constant <value_int = {NARROWEST}> ()
        last = Constant <value_ints = [-1]> ()
        last_but_one = Constant <value_ints = [-2]> ()
        one = Constant <value_ints = [1]> ()
        scalar = Constant <value_int = -1> ()
        scalar_before = Constant <value_int = -2> ()
        start = Cast <to = {TensorProto.BOOL}> (single)
        shape = Shape (a)
        terms = Gather (shape, scalar)
        depth = Max (terms, single)
        lines = Gather (shape, scalar_before)
        rows = Max (lines, single)
        size = Size (a)
        matrix = Mul (depth, rows)
        batch = Div (size, matrix)
        batches = Max (batch, single)
        shape_b = Shape (b)
        wide = Gather (shape_b, scalar)
        columns = Max (wide, single)
        fitting = Div (flat, batches)
        at_least = Max (fitting, narrowest)
        width = Min (at_least, columns)
        row = Mul (width, batches)
        fitting_rows = Div (tile, row)
        height = Max (fitting_rows, lowest)
        before_end = Sub (columns, single)
        full = Div (before_end, width)
        bands = Add (full, single)
        before_last = Sub (rows, single)
        full_rows = Div (before_last, height)
        strips = Add (full_rows, single)
        empty = SequenceEmpty ()
        all_bands = Loop (bands, start, empty) <
            body = one_band (int64 n, bool more_bands, seq(float[]) bands_done)
                => (bool next_band, seq(float[]) with_band) {{
            next_band = Identity (more_bands)
            from_column = Mul (n, width)
            to_column = Add (from_column, width)
            from = Reshape (from_column, one)
            to = Reshape (to_column, one)
            b_band = Slice (b, from, to, last)
            strips_of_band = Loop (strips, start, empty) <
                body = one_strip (int64 t, bool more, seq(float[]) done)
                    => (bool go_on, seq(float[]) with_strip) {{
                go_on = Identity (more)
                from_row = Mul (t, height)
                to_row = Add (from_row, height)
                top = Reshape (from_row, one)
                bottom = Reshape (to_row, one)
                a_strip = Slice (a, top, bottom, last_but_one)
                result = {DOMAIN}.MatMul <chunk: int = @chunk> (a_strip, b_band)
                with_strip = SequenceInsert (done, result)
            }}>
            band = ConcatFromSequence <axis = -2> (strips_of_band)
            with_band = SequenceInsert (bands_done, band)
        }}>
        y = ConcatFromSequence <axis = -1> (all_bands)
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

COLUMNS = 2**22  # most elements of the operand that a Conv's input is unfolded to at a time

_UNFOLDED_CONV = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    UnfoldedConv (x, w, pads, axes, strides, span, taps) => (y) {{
        zero = Constant <value_float = 0.0> ()
        first = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        two = Constant <value_ints = [2]> ()
        three = Constant <value_ints = [3]> ()
        rest = Constant <value_ints = [-1]> ()
        tile = Constant <value_ints = [{TILE}]> ()
        most = Constant <value_ints = [{COLUMNS}]> ()
        scalar = Constant <value_int = 1> ()
        start = Cast <to = {TensorProto.BOOL}> (scalar)
        is_first = Equal (axes, one)
        field = Pad (x, pads)
        shape = Shape (field)
        batch = Slice (shape, first, one)
        end = Shape (shape)
        sizes = Slice (shape, two, end)
        free = Sub (sizes, span)
        gaps = Div (free, strides)
        results = Add (gaps, one)
        reach = Mul (gaps, strides)
        lengths = Add (reach, one)
        rows = Slice (results, first, one)
        pixels = ReduceProd (results)
        line = Div (pixels, rows)
        shape_w = Shape (w)
        filters = Slice (shape_w, two, three)
        matrix = Slice (shape_w, first, two)
        terms = ReduceProd (matrix)
        line_of_result = Mul (line, filters)
        fitting = Div (tile, line_of_result)
        line_of_columns = Mul (line, terms)
        affordable = Div (most, line_of_columns)
        fewer = Min (fitting, affordable)
        height = Max (fewer, one)
        before_end = Sub (rows, one)
        full = Div (before_end, height)
        strips = Add (full, one)
        shape_taps = Shape (taps)
        number = Slice (shape_taps, first, one)
        shape_columns = Concat <axis = 0> (matrix, rest)
        images = Loop (batch, start) <
            body = one_image (int64 n, bool more_images) => (bool next_image, float[] image) {{
            next_image = Identity (more_images)
            own = Gather (field, n)
            empty = SequenceEmpty ()
            parts = Loop (strips, start, empty) <
                body = one_strip (int64 s, bool more, seq(float[]) done)
                    => (bool go_on, seq(float[]) with_strip) {{
                go_on = Identity (more)
                low_row = Mul (s, height)
                beyond = Add (low_row, height)
                high_row = Min (beyond, rows)
                height_here = Sub (high_row, low_row)
                gaps_here = Sub (height_here, one)
                stride = Slice (strides, first, one)
                reach_here = Mul (gaps_here, stride)
                lines = Add (reach_here, one)
                top = Mul (low_row, stride)
                size = Where (is_first, lines, lengths)
                corner = Where (is_first, top, first)
                taps_of_strip = Loop (number, start) <
                    body = one_tap (int64 t, bool go) => (bool on, float[] window) {{
                    on = Identity (go)
                    tap = Gather (taps, t)
                    low = Add (corner, tap)
                    high = Add (low, size)
                    window = Slice (own, low, high, axes, strides)
                }}>
                columns = Reshape (taps_of_strip, shape_columns)
                shape_c = Shape (columns)
                width = Slice (shape_c, two, three)
                shape_y = Concat <axis = 0> (filters, width)
                zeros = Expand (zero, shape_y)
                part = Scan <
                    num_scan_inputs = 2, scan_input_directions = [BACK, BACK],
                    body = step (float[] before, float[] left, float[] right) => (float[] after) {{
                    total = Gemm <transA = 1> (left, right, before)
                    half = Cast <to = {TensorProto.FLOAT16}> (total)
                    after = Cast <to = {TensorProto.FLOAT}> (half)
                }}> (zeros, w, columns)
                with_strip = SequenceInsert (done, part)
            }}>
            image = ConcatFromSequence <axis = 1> (parts)
        }}>
        whole = Concat <axis = 0> (batch, filters, results)
        y = Reshape (images, whole)
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
        chosen: dict[int, Product] = {}
        for node, position in pairs:
            result, key = tensors.get(node.output[0]), (scope, node.output[0])
            shapes = tuple(tensors[n].shape if n in tensors else None for n in node.input)
            low = result is not None and result.dtype == TensorProto.FLOAT16 and key not in sums.summed
            exact = sums_in_fp32(node, *(shape or () for shape in shapes[:2]))
            chunk = FUSED_CHUNK if key in sums.fused else CHUNK
            if low and not exact and _can_split(node, shapes) and not _is_one_chunk(node, shapes[1], chunk):
                sizes = (result.shape if result is not None else None) or ("",)
                known = math.prod(size for size in sizes if isinstance(size, int))
                open_size = len(pairs) < MANY_PRODUCTS and not all(isinstance(size, int) for size in sizes)
                tiled = (known > TILE or open_size) and not runs_on_cuda()
                chosen[position] = Product(shapes[1] or (), chunk, tiled)
        if chosen:
            _Writer(backwards).rewrite(graph, chosen)
    place = "Sub (end, i)" if backwards else "Identity (i)"
    unfolded = _UNFOLDED_CONV.replace("BACK", str(int(backwards)))
    declare(emulated, DOMAIN, _MATMUL.replace("PLACE", place), _TILED_MATMUL, _CONV, unfolded)


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


class Product(NamedTuple):
    """The second operand's shape, a MatMul's chunk, and whether the result is computed in tiles."""

    right: Shape
    chunk: int
    tiled: bool

    @property
    def matmul(self) -> str:
        return "TiledMatMul" if self.tiled else "MatMul"


@dataclass
class _Writer:
    backwards: bool
    nodes: list[NodeProto] = field(default_factory=list)

    def rewrite(self, graph: GraphProto, chosen: Mapping[int, Product]) -> None:
        split = {"MatMul": self._matmul, "Gemm": self._gemm, "Conv": self._conv}
        for index, node in enumerate(graph.node):
            if index in chosen:
                split[node.op_type](node, chosen[index])
            else:
                self.nodes.append(node)
        replace_items(graph.node, self.nodes)

    def _matmul(self, node: NodeProto, product: Product) -> None:
        self._add(product.matmul, node.input, node.output[0], domain=DOMAIN, chunk=product.chunk)

    def _gemm(self, node: NodeProto, product: Product) -> None:
        """A * B + C; the products are what accumulates."""
        out = node.output[0]
        sides = [
            self._add("Transpose", [name], f"{out}/{flag}", perm=[1, 0]) if attribute(node, flag, 0) else name
            for name, flag in zip(node.input[:2], ("transA", "transB"), strict=True)
        ]
        bias = optional_input(node, 2)
        summed = f"{out}/product" if bias else out
        self._add(product.matmul, sides, summed, domain=DOMAIN, chunk=product.chunk)
        if bias:
            self._add("Add", [summed, bias], out)

    def _conv(self, node: NodeProto, product: Product) -> None:
        out, sizes = node.output[0], [d for d in product.right if isinstance(d, int)]
        spatial = len(sizes) - 2
        dilations = attribute(node, "dilations", [1] * spatial)
        pads = attribute(node, "pads", [0] * 2 * spatial)
        strides = attribute(node, "strides", [1] * spatial)
        bias = optional_input(node, 2)
        summed = f"{out}/product" if bias else out
        one_tap = attribute(node, "group", 1) == 1 and (sizes[0] > FEW_CHANNELS or 2 * sizes[1] > CHUNK)
        write = self._unfolded if one_tap and product.tiled else self._in_boxes
        write(node, sizes, (strides, dilations, pads), summed)
        if bias:
            shape = self._constant([-1, *[1] * spatial], f"{out}/shape")
            self._add("Add", [summed, self._add("Reshape", [bias, shape], f"{out}/bias")], out)

    def _unfolded(self, node: NodeProto, sizes: Sequence[int], geometry: Geometry, summed: str) -> None:
        """A Conv of one group in which every chunk has one tap: a product with the unfolded input.

        Channels are padded with zeros to a multiple of the chunk.
        """
        filters, channels, *kernel = sizes
        strides, dilations, pads = geometry
        out, spatial, chunk = node.output[0], len(kernel), min(channels, CHUNK)
        more = -channels % chunk
        perm = [*range(2, spatial + 2), 1, 0]
        right = self._add("Transpose", [node.input[1]], f"{out}/transposed", perm=perm)
        if more:
            beyond = self._constant([0] * (2 * spatial + 2) + [more, 0], f"{out}/more")
            right = self._add("Pad", [right, beyond], f"{out}/padded")
        shape = self._constant([-1, chunk, filters], f"{out}/chunks")
        tables = {
            "pads": [0, 0, *pads[:spatial], 0, more, *pads[spatial:]],
            "axes": list(range(1, spatial + 1)),
            "strides": strides,
            "span": [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)],
            "taps": np.array([*product_of(*map(range, kernel))]) * dilations,
        }
        operands = [node.input[0], self._add("Reshape", [right, shape], f"{out}/right")]
        self._add("UnfoldedConv", operands + self._constants(tables, out), summed, domain=DOMAIN)

    def _in_boxes(self, node: NodeProto, sizes: Sequence[int], geometry: Geometry, summed: str) -> None:
        """A Conv whose chunks are Convs of boxes of its kernel."""
        strides, dilations, pads = geometry
        out, spatial, group = node.output[0], len(sizes) - 2, attribute(node, "group", 1)
        chunks = list(boxes(sizes[1:], group, apart=sizes[0] > FEW_CHANNELS))[:: -1 if self.backwards else 1]
        tables = {
            "pads": [0, 0, *pads[:spatial], 0, 0, *pads[spatial:]],
            "axes": list(range(1, spatial + 2)),
            **slices(chunks, sizes[1:], dilations, group),
        }
        attributes = {"strides": strides, "dilations": dilations, "group": group}
        operands = [*node.input[:2], *self._constants(tables, out)]
        self._add("Conv", operands, summed, domain=DOMAIN, **attributes)

    def _add(self, op: str, inputs: Sequence[str], out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"{out}/{op}", **attributes))
        return out

    def _constants(self, tables: Mapping[str, object], out: str) -> list[str]:
        return [self._constant(value, f"{out}/{name}") for name, value in tables.items()]

    def _constant(self, value: object, out: str) -> str:
        return self._add("Constant", [], out, value=numpy_helper.from_array(np.asarray(value, np.int64), out))
