"""FP16 accumulators in an emulation: MatMul, Gemm and Conv sum in chunks, and each partial sum is rounded.

A Tensor Core adds 16 products to the accumulator and rounds it to FP16. Here such a node becomes a call of a
local function that does the same in a Loop, so partial sums beyond 65504 overflow, too. A ConvTranspose sums
in FP32 (docs/accuracy.md#emulated-sums)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from itertools import product as product_of
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.graph import attribute
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.model import Model
from rewriter.ir.model.graphs import replace_items
from rewriter.ir.model.tensors import Shape, TensorFacts
from rewriter.runtime.emulation.local_functions import declare, paired
from rewriter.runtime.emulation.product_sums import ProductSums
from rewriter.runtime.engines.onnxruntime import runs_on_cuda
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

_ROUNDED = f"Cast <to = {TensorProto.FLOAT}> (Cast <to = {TensorProto.FLOAT16}>"

_TRUE = f"Cast <to = {TensorProto.BOOL}> (1)"

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
        offsets = Range (0, Max (Gather (Shape (a), -1), 1), chunk)
        count = Size (offsets)
        end = Sub (count, 1)
        y = Loop (count, {_TRUE}, 0.0) <
            body = step (int64 i, bool go, float[] before) => (bool on, float[] after) {{
            on = Identity (go)
            low = Reshape (Gather (offsets, PLACE), [1])
            high = Add (low, chunk)
            part = MatMul (Slice (a, low, high, [-1]), Slice (b, low, high, [-2]))
            after = {_ROUNDED} (Add (before, part)))
        }}>
    }}"""

_TILED_MATMUL = f"""
    <opset_import: ["" : OPSET, "{DOMAIN}" : 1], domain: "{DOMAIN}">
    TiledMatMul <chunk> (a, b) => (y) {{
        start = {_TRUE}
        shape = Shape (a)
        rows = Max (Gather (shape, -2), 1)
        matrix = Mul (Max (Gather (shape, -1), 1), rows)
        batches = Max (Div (Size (a), matrix), 1)
        columns = Max (Gather (Shape (b), -1), 1)
        width = Min (Max (Div ({TILE // LOWEST}, batches), {NARROWEST}), columns)
        height = Max (Div ({TILE}, Mul (width, batches)), {LOWEST})
        bands = Add (Div (Sub (columns, 1), width), 1)
        strips = Add (Div (Sub (rows, 1), height), 1)
        empty = SequenceEmpty ()
        all_bands = Loop (bands, start, empty) <
            body = one_band (int64 n, bool more_bands, seq(float[]) bands_done)
                => (bool next_band, seq(float[]) with_band) {{
            next_band = Identity (more_bands)
            from = Mul (n, width)
            to = Add (from, width)
            b_band = Slice (b, Reshape (from, [1]), Reshape (to, [1]), [-1])
            strips_of_band = Loop (strips, start, empty) <
                body = one_strip (int64 t, bool more, seq(float[]) done)
                    => (bool go_on, seq(float[]) with_strip) {{
                go_on = Identity (more)
                top = Mul (t, height)
                bottom = Add (top, height)
                a_strip = Slice (a, Reshape (top, [1]), Reshape (bottom, [1]), [-2])
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
        field = Pad (x, pads)
        y = Loop (Gather (Shape (w_from), 0), {_TRUE}, 0.0) <
            body = step (int64 i, bool go, float[] before) => (bool on, float[] after) {{
            on = Identity (go)
            left = Slice (field, Gather (x_from, i), Gather (x_to, i), axes)
            right = Slice (w, Gather (w_from, i), Gather (w_to, i), axes)
            part = Conv <strides: ints = @strides, dilations: ints = @dilations, group: int = @group>
                (left, right)
            after = {_ROUNDED} (Add (before, part)))
        }}>
    }}"""

COLUMNS = 2**22  # most elements of the operand that a Conv's input is unfolded to at a time

_UNFOLDED_CONV = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    UnfoldedConv (x, w, pads, axes, strides, span, taps) => (y) {{
        start = {_TRUE}
        is_first = Equal (axes, [1])
        field = Pad (x, pads)
        shape = Shape (field)
        batch = Slice (shape, [0], [1])
        gaps = Div (Sub (Slice (shape, [2], Shape (shape)), span), strides)
        results = Add (gaps, [1])
        lengths = Add (Mul (gaps, strides), [1])
        rows = Slice (results, [0], [1])
        line = Div (ReduceProd (results), rows)
        filters = Slice (Shape (w), [2], [3])
        matrix = Slice (Shape (w), [0], [2])
        fitting = Div ([{TILE}], Mul (line, filters))
        affordable = Div ([{COLUMNS}], Mul (line, ReduceProd (matrix)))
        height = Max (Min (fitting, affordable), [1])
        strips = Add (Div (Sub (rows, [1]), height), [1])
        images = Loop (batch, start) <
            body = one_image (int64 n, bool more_images) => (bool next_image, float[] image) {{
            next_image = Identity (more_images)
            own = Gather (field, n)
            parts = Loop (strips, start, SequenceEmpty ()) <
                body = one_strip (int64 s, bool more, seq(float[]) done)
                    => (bool go_on, seq(float[]) with_strip) {{
                go_on = Identity (more)
                low_row = Mul (s, height)
                height_here = Sub (Min (Add (low_row, height), rows), low_row)
                stride = Slice (strides, [0], [1])
                lines = Add (Mul (Sub (height_here, [1]), stride), [1])
                size = Where (is_first, lines, lengths)
                corner = Where (is_first, Mul (low_row, stride), [0])
                taps_of_strip = Loop (Slice (Shape (taps), [0], [1]), start) <
                    body = one_tap (int64 t, bool go) => (bool on, float[] window) {{
                    on = Identity (go)
                    low = Add (corner, Gather (taps, t))
                    window = Slice (own, low, Add (low, size), axes, strides)
                }}>
                columns = Reshape (taps_of_strip, Concat <axis = 0> (matrix, [-1]))
                width = Slice (Shape (columns), [2], [3])
                zeros = Expand (0.0, Concat <axis = 0> (filters, width))
                part = Scan <
                    num_scan_inputs = 2, scan_input_directions = [BACK, BACK],
                    body = step (float[] before, float[] left, float[] right) => (float[] after) {{
                    after = {_ROUNDED} (Gemm <transA = 1> (left, right, before)))
                }}> (zeros, w, columns)
                with_strip = SequenceInsert (done, part)
            }}>
            image = ConcatFromSequence <axis = 1> (parts)
        }}>
        y = Reshape (images, Concat <axis = 0> (batch, filters, results))
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
        nodes, positions = list[NodeProto](), {position: node for node, position in pairs}
        for position, copy in enumerate(graph.node):
            node = positions.get(position)
            few = len(pairs) < MANY_PRODUCTS
            product = None if node is None else _product(node, scope, tensors, sums, few=few)
            if product is None:
                nodes.append(copy)
                continue
            names = map(f"{copy.output[0]}/sum{{}}".format, count())
            _write(NodeList(names, emulated.opset, nodes), copy, product, backwards)
            nodes[-1].output[0] = copy.output[0]
        replace_items(graph.node, nodes)
    place = "Sub (end, i)" if backwards else "Identity (i)"
    unfolded = _UNFOLDED_CONV.replace("BACK", str(int(backwards)))
    declare(emulated, DOMAIN, _MATMUL.replace("PLACE", place), _TILED_MATMUL, _CONV, unfolded)


class Product(NamedTuple):
    """The second operand's shape, a MatMul's chunk, and whether the result is computed in tiles."""

    right: Shape
    chunk: int
    tiled: bool


def _product(
    node: NodeProto, scope: int, tensors: Mapping[str, TensorFacts], sums: ProductSums, *, few: bool
) -> Product | None:
    """How a node of the original sums in FP16; None if it does not. `few`: open sizes may be tiled."""
    result, key = tensors.get(node.output[0]), (scope, node.output[0])
    left, right = (tensors[n].shape if n in tensors else None for n in node.input[:2])
    low = result is not None and result.dtype == TensorProto.FLOAT16 and key not in sums.summed
    chunk = FUSED_CHUNK if key in sums.fused else CHUNK
    if not low or sums_in_fp32(node, left or (), right or ()) or not _can_split(node, right, chunk):
        return None
    sizes = (result.shape if result is not None else None) or ("",)
    known = math.prod(size for size in sizes if isinstance(size, int))
    open_size = few and not all(isinstance(size, int) for size in sizes)
    return Product(right or (), chunk, (known > TILE or open_size) and not runs_on_cuda())


def _can_split(node: NodeProto, right: Shape | None, chunk: int) -> bool:
    """False for a MatMul of one chunk, too: its result is rounded once, as every FP16 result is."""
    if node.op_type != "Conv":
        plain = all(attribute(node, factor, 1.0) == 1.0 for factor in ("alpha", "beta"))
        depth = right[-2] if node.op_type == "MatMul" and right and len(right) > 1 else None
        one = isinstance(depth, int) and depth <= chunk
        return plain and not one and (right is None or len(right) > 1)
    padded = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return padded and right is not None and all(isinstance(d, int) for d in right)


def _write(emit: NodeList, node: NodeProto, product: Product, backwards: bool) -> None:
    """Adds the products, which accumulate, and a Gemm's or Conv's bias."""
    bias, operands = optional_input(node, 2), {"a": node.input[0], "b": node.input[1]}
    if node.op_type == "Conv":
        text = _conv(emit, node, product, backwards, operands)
        text += f"y = Add(y, Reshape(c, {[-1, *[1] * (len(product.right) - 2)]}))" * bool(bias)
    else:
        flags = (("a", "transA"), ("b", "transB"))
        turned = [f"{n} = Transpose<perm = [1, 0]>({n}) " for n, flag in flags if attribute(node, flag, 0)]
        op = "TiledMatMul" if product.tiled else "MatMul"
        text = "".join([*turned, f"y = {DOMAIN}.{op}<chunk = {product.chunk}>(a, b) "])
        text += "y = Add(y, c)" * bool(bias)
    emit.write(text, **operands, c=bias or "")


def _conv(
    emit: NodeList, node: NodeProto, product: Product, backwards: bool, operands: dict[str, str]
) -> str:
    """The text of a Conv without its bias; tables of chunks become `operands`.

    In one group, where every chunk has one tap, it is a product with the unfolded input, whose channels are
    padded with zeros to a multiple of the chunk. Else chunks are Convs of boxes of its kernel.
    """
    filters, channels, *kernel = sizes = [size for size in product.right if isinstance(size, int)]
    spatial, group = len(kernel), attribute(node, "group", 1)
    dilations = attribute(node, "dilations", [1] * spatial)
    pads, strides = attribute(node, "pads", [0] * 2 * spatial), attribute(node, "strides", [1] * spatial)
    chunk = min(channels, CHUNK)
    one_tap = group == 1 and (filters > FEW_CHANNELS or 2 * channels > CHUNK)
    unfolded = one_tap and product.tiled
    more = -channels % chunk if unfolded else 0
    padded = [0, 0, *pads[:spatial], 0, more, *pads[spatial:]]
    if unfolded:
        span = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        taps = np.array([*product_of(*map(range, kernel))]) * dilations
        operands["taps"] = emit.constant(taps, np.int64)
        text = f"b = Transpose<perm = {[*range(2, spatial + 2), 1, 0]}>(b) "
        text += f"b = Pad(b, {[0] * (2 * spatial + 2) + [more, 0]}) " * bool(more)
        text += f"b = Reshape(b, {[-1, chunk, filters]}) "
        axes = [*range(1, spatial + 1)]
        return f"{text} y = {DOMAIN}.UnfoldedConv(a, b, {padded}, {axes}, {[*strides]}, {span}, taps) "
    chunks = list(boxes(sizes[1:], group, apart=filters > FEW_CHANNELS))[:: -1 if backwards else 1]
    tables = slices(chunks, sizes[1:], dilations, group)
    operands |= {name: emit.constant(table, np.int64) for name, table in tables.items()}
    fields = f"strides = {[*strides]}, dilations = {[*dilations]}, group = {group}"
    axes = [*range(1, spatial + 2)]
    return f"y = {DOMAIN}.Conv<{fields}>(a, b, {padded}, {axes}, {', '.join(tables)}) "
