"""decompose-operators: writes operators that TensorRT has no importer or kernel for as their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, parser

from rewriter.base.text import count as counted
from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op, open_graphs
from rewriter.ir.graph.weights import Replacement
from rewriter.ir.model import Array, Model, load, walk_graphs
from rewriter.ir.model.tensors import FLOATS
from rewriter.ir.patterns.masks import FP16_MAX
from rewriter.passes.base import Change, Context, Event, Exactness, ModelPass, Refusal, Requires
from rewriter.runtime.engines.onnxruntime import Session


@dataclass(frozen=True)
class DecomposeOperators(ModelPass):
    """ONNX Runtime's optimizer and Olive write com.microsoft operators, which TensorRT's parser refuses.

    Each is written as ONNX Runtime documents it, with the scale of an attention before its first product,
    where FP16 has room for it. A DFT of constant length is a product by a matrix of cosines and sines. ONNX's
    Attention is written out where it caps its scores, has past keys, several outputs, a causal mask beside
    another, or sizes without a kernel. A Resize with antialias or half_pixel_symmetric, of constant size, is
    a product by a constant matrix along each axis, and so is one that cuts out a part or keeps the ratio. A
    Softmax or an ArgMax of a vector gets a second axis. A Col2Im (torch's fold) of constant sizes is a
    ConvTranspose that puts every entry at its place.

    Declines:
        - ONNX's Attention, of heads of unknown number or width, with a window, or with lengths of a cache
        - a contributed attention with past keys, several outputs, packed or unknown inputs, or a causal mask
        - a mask of an attention that is no [batch, keys]
        - the mean and deviation of a norm; batches that are transposed
        - a Resize of computed sizes or corners, or of other axes than the last two
        - a DFT of unknown length or more than 2048 points, and a one-sided one of complex numbers
        - a Col2Im of computed sizes or unknown channels, or of other than two axes
    """

    requires = Requires(opset=17)
    exactness = Exactness(1e-5, "FP32 sums in another order, and ONNX Runtime's own Tanh")
    example = """
        -<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        -g (float[2,3] x) => (float[2,3] y) {
        -    y = com.microsoft.QuickGelu(x)
        +<ir_version: 8, opset_import: ["" : 17]>
        +g (float[2,3] x) => (float[2,3] y) <float slope = {1.702}> {
        +    scaled = Mul(x, slope)
        +    gate = Sigmoid(scaled)
        +    y = Mul(x, gate)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        refusals: list[Event] = []
        while any(_definition(node) for graph in walk_graphs(model.proto.graph) for node in graph.node):
            events = [event for graph in reversed(open_graphs(model, self.name)) for event in _round(graph)]
            changes, refusals = ([e for e in events if isinstance(e, kind)] for kind in (Change, Refusal))
            yield from changes
            if not changes:  # the types of what reads a definition are known in the next round
                break
        yield from refusals


def _round(graph: GraphEditor) -> Iterator[Event]:
    with graph:
        for node in graph.nodes:
            if (definition := _definition(node)) is None or not graph.dtype(node.input[0]):
                continue
            text = definition(call := _Call(graph, node))
            if isinstance(text, Refusal):
                yield text
            elif text:
                number = counted(call.replace_by(text, **call.names), "node")
                yield Change(display_name(node), f"{node.op_type} became {number}")


@dataclass(frozen=True)
class _Call(Replacement):
    """A node that a definition replaces: its inputs and attributes, as the text names them."""

    names: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, index: int) -> str:
        return self.named(self.node.input[index])

    def has(self, *indices: int) -> bool:
        return any(any(self.node.input[i : i + 1]) for i in indices)

    def hands_out(self, *indices: int) -> bool:
        return any(self.graph.is_read(name) for i in indices for name in self.node.output[i : i + 1])

    def get(self, name: str, default: Any = None) -> Any:
        return attribute(self.node, name, default)

    def named(self, tensor: str) -> str:
        """A name for a tensor that no text has."""
        name = f"given{len(self.names)}"
        self.names[name] = tensor
        return name

    def whole(self, index: int, default: int) -> int:
        """A constant of one integer, such as an axis; `UNKNOWN` if it is computed."""
        value = self.graph.constant(self.node.input[index]) if self.has(index) else np.array(default)
        return UNKNOWN if value is None else int(value.reshape(-1)[0])

    def width(self, index: int) -> int:
        """Last size of an input; 0 if it is not known."""
        last = (self.graph.shape(self.node.input[index]) or (0,))[-1]
        return last if isinstance(last, int) else 0

    def refusal(self, reason: str) -> Refusal:
        return Refusal(display_name(self.node), f"{self.node.op_type} stays: {reason}")


HEADS = (16, 256)
"""Widths of heads with a kernel for ONNX's Attention in FP16, which one head of a batch of 1 lacks: built
with TensorRT-RTX 1.7.1, without a GPU."""

OF_TWO_AXES = ("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin")
"""Operators that the parser refuses for a vector: built with TensorRT-RTX 1.7.1."""

LOWEST = float(np.finfo(np.float32).min)

CROP = "tf_crop_and_resize"
"""Mode of a Resize that cuts out a part first, of axes that change their size: ONNX Runtime does no more."""

UNKNOWN = -(2**31)
"""No axis, and no length."""

LONGEST = 2048
"""Most points of a DFT that is written as a product: its matrix of cosines and sines has 32 MiB."""

_Definition = Callable[[_Call], str | Refusal]


def _definition(node: NodeProto) -> _Definition | None:
    if is_op(node, "DFT", "Attention"):
        return _dft if node.op_type == "DFT" else _onnx_attention
    if is_op(node, "Resize"):
        odd = attribute(node, "coordinate_transformation_mode") in ("half_pixel_symmetric", CROP)
        keeps = attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch"
        return _resize if odd or keeps or attribute(node, "antialias", 0) else None
    if is_op(node, "Col2Im"):
        return _col2im
    if node.op_type == "SimplifiedLayerNormalization":
        return _simplified_norm
    if is_op(node, *OF_TWO_AXES):
        return _of_one_axis
    return DEFINITIONS.get(node.op_type) if node.domain == "com.microsoft" else None


def _of_one_axis(call: _Call) -> str:
    """The operator on a row of two axes, if its input has one; "" for others."""
    if call.graph.rank(call.node.input[0]) != 1:
        return ""
    names = [name for name in ("keepdims", "select_last_index") if call.get(name) is not None]
    fields = ", ".join(["axis = 1", *(f"{name} = {call.get(name)}" for name in names)])
    return f"y0 = Squeeze({call.node.op_type}<{fields}>(Unsqueeze({call[0]}, [0])), [0])"


def _bias_gelu(call: _Call) -> str:
    return f"""x = Add({call[0]}, {call[1]})
        y0 = Mul(Mul(x, 0.5), Add(Erf(Mul(x, {math.sqrt(0.5)})), 1.0))"""


def _fast_gelu(call: _Call) -> str:
    x, biased = (call[0], "") if not call.has(1) else ("x", f"x = Add({call[0]}, {call[1]}) ")
    inner = f"Mul(Mul({x}, Add(Mul(Mul({x}, {x}), 0.044715), 1.0)), {math.sqrt(2 / math.pi)})"
    return f"{biased} y0 = Mul(Mul({x}, 0.5), Add(Tanh({inner}), 1.0))"


def _quick_gelu(call: _Call) -> str:
    return f"y0 = Mul({call[0]}, Sigmoid(Mul({call[0]}, {call.get('alpha', 1.702)})))"


def _skip_norm(call: _Call) -> str | Refusal:
    """A norm of the sum of an input, its skip and a bias; the sum may be the output 3."""
    if call.hands_out(1, 2):
        return call.refusal("its mean or deviation is an output")
    rms, epsilon = call.node.op_type == "SkipSimplifiedLayerNormalization", call.get("epsilon", 1e-12)
    x, bias = "y3" if call.hands_out(3) else "x", 3 if rms else 4
    total = f"Add({call[0]}, {call[1]})"
    text = f"{x} = Add({total}, {call[bias]}) " if call.has(bias) else f"{x} = {total} "
    if not rms:
        beta = f", {call[3]}" if call.has(3) else ""
        return f"{text} y0 = LayerNormalization<axis = -1, epsilon = {epsilon:.9e}>({x}, {call[2]}{beta})"
    return f"{text} y0 = {_rms_norm(call, x, call[2], epsilon)}"


def _simplified_norm(call: _Call) -> str | Refusal:
    """ONNX Runtime's RMSNormalization, which has no domain and no schema; its output 1 is a deviation."""
    rank = call.graph.rank(call.node.input[0]) or 0
    if call.hands_out(1) or call.get("axis", -1) not in (-1, rank - 1):
        return call.refusal("its deviation is an output, or it is of other axes than the last")
    return f"y0 = {_rms_norm(call, call[0], call[1], call.get('epsilon', 1e-5))}"


def _rms_norm(call: _Call, x: str, scale: str, epsilon: float) -> str:
    squares = f"ReduceMean(Mul({x}, {x}), [-1])"
    if call.graph.model.opset < 18:
        squares = f"ReduceMean<axes = [-1]>(Mul({x}, {x}))"
    return f"Mul(Div({x}, Sqrt(Add({squares}, {epsilon:.9e}))), {scale})"


def _fused_matmul(call: _Call) -> str | Refusal:
    if call.get("transBatchA", 0) or call.get("transBatchB", 0):
        return call.refusal("it transposes a batch")
    sides, alpha = [call[0], call[1]], call.get("alpha", 1.0)
    for index, side in enumerate("AB"):
        if call.get(f"trans{side}", 0):
            rank = call.graph.rank(call.node.input[index])
            if rank is None or rank < 2:
                return call.refusal(f"the axes of {call.node.input[index]} are not known")
            sides[index] = f"Transpose<perm = {[*range(rank - 2), rank - 1, rank - 2]}>({sides[index]})"
    product = f"MatMul({sides[0]}, {sides[1]})"
    return f"y0 = {product}" if alpha == 1 else f"y0 = Mul({product}, {float(alpha)})"


def _multi_head_attention(call: _Call) -> str | Refusal:
    ranks = [call.graph.rank(call.node.input[i]) if call.has(i) else None for i in range(3)]
    if ranks != [3, 3, 3]:
        return call.refusal("its queries, keys and values are no three tensors of three axes")
    if call.has(6, 7, 8, 9):
        return call.refusal("it reads past keys")
    text, heads = "", [call[0], call[1], call[2]]
    if call.has(3):
        widths = [call.width(0), call.width(1), call.width(2)]
        if not all(widths):
            return call.refusal("the widths of its bias are not known")
        text = f"b0, b1, b2 = Split<axis = 0>({call[3]}, {widths}) "
        heads = [f"Add({tensor}, b{n})" for n, tensor in enumerate(heads)]
    return _attention(call, text, heads, call.width(0), mask=4, bias=5)


def _packed_attention(call: _Call) -> str | Refusal:
    width = call.width(1) // 3
    if not width or call.get("qkv_hidden_sizes") or call.get("do_rotary", 0) or call.has(4):
        return call.refusal("its weight is not one of three equal parts, or it reads past keys")
    product = f"MatMul({call[0]}, {call[1]})"
    product = f"Add({product}, {call[2]})" if call.has(2) else product
    text = f"i0, i1, i2 = Split<axis = -1>({product}, {[width] * 3}) "
    return _attention(call, text, ["i0", "i1", "i2"], width, mask=3, bias=5)


def _dft(call: _Call) -> str | Refusal:
    """A product by a matrix, [points x parts of the input, frequencies x 2], of cosines and sines."""
    graph, shape = call.graph, call.graph.shape(call.node.input[0]) or (0,)
    axis = call.whole(2, -2 if graph.model.opset >= 20 else call.get("axis", 1))
    points = shape[axis] if -len(shape) <= axis < len(shape) - 1 else 0
    one, inverse = call.get("onesided", 0), call.get("inverse", 0)
    to_real = bool(one and inverse)
    usual = 2 * (points - 1) if to_real and isinstance(points, int) else points
    count = call.whole(1, usual) if isinstance(usual, int) else UNKNOWN
    if not isinstance(points, int) or not 0 < min(points, count) <= max(points, count) <= LONGEST:
        return call.refusal(f"its length is not known, or above {LONGEST}")
    if shape[-1] not in ((2 if inverse else 1,) if one else (1, 2)):
        return call.refusal("it is one-sided, of complex numbers, or its inverse of real ones")
    if to_real and points != count // 2 + 1:
        return call.refusal("the number of its frequencies does not fit its length")
    rank, at = len(shape), axis % len(shape)
    frequencies = np.arange(count // 2 + 1 if one and not inverse else count)
    turns = np.outer(np.arange(points), frequencies) % count / count
    wave = np.exp((2j if inverse else -2j) * np.pi * turns) / (count if inverse else 1)
    wave[count:] = 0  # points beyond the length are cut off, and those that lack are 0
    wave[1 : (count + 1) // 2] *= 2 if to_real else 1  # each frequency with its conjugate
    parts = np.stack([wave, 1j * wave][: 1 if shape[-1] == 1 else 2], axis=1).reshape(-1, len(frequencies))
    sides = [np.real(parts), np.imag(parts)][: 1 if to_real else 2]
    matrix = np.stack(sides, axis=-1).reshape(len(parts), -1)
    weight = call.named(graph.add_constant(f"{call.node.output[0]}/waves", matrix, call.node.input[0]))
    zeros, perm = [0] * (rank - 2), list(range(rank))
    perm.insert(rank - 2, perm.pop(at))
    back = [perm.index(axis) for axis in range(rank)]
    rows = f"Reshape(Transpose<perm = {perm}>({call[0]}), {[*zeros, len(parts)]})"
    product = f"Reshape(MatMul({rows}, {weight}), {[*zeros, len(frequencies), len(sides)]})"
    return f"y0 = Transpose<perm = {back}>({product})"


def _col2im(call: _Call) -> str | Refusal:
    """A ConvTranspose of [batch x channels, entries, blocks...], with a filter for each entry of a block."""
    graph, node = call.graph, call.node
    image, block = (graph.constant(name) for name in node.input[1:3])
    channels = (*(graph.shape(node.input[0]) or ()), 0, 0)[1]
    if image is None or block is None or len(block) != 2 or not isinstance(channels, int) or not channels:
        return call.refusal("its sizes or channels are not constant, or it has other than two axes")
    strides, dilations = ([*map(int, call.get(name, [1, 1]))] for name in ("strides", "dilations"))
    pads, entries = [*map(int, call.get("pads", [0] * 4))], int(np.prod(block))
    free = [int(image[n] + pads[n] + pads[n + 2] - dilations[n] * (block[n] - 1) - 1) for n in range(2)]
    blocks = [room // stride + 1 for room, stride in zip(free, strides, strict=True)]
    rest = [room % stride for room, stride in zip(free, strides, strict=True)]
    filters = np.eye(entries).reshape(entries, 1, *block)
    weight = call.named(graph.add_constant(f"{node.output[0]}/places", filters, node.input[0]))
    fields = f"strides = {strides}, dilations = {dilations}, pads = {pads}, output_padding = {rest}"
    columns = f"Reshape({call[0]}, {[-1, entries, *blocks]})"
    sizes = [-1, channels // entries, *map(int, image)]
    return f"y0 = Reshape(ConvTranspose<{fields}>({columns}, {weight}), {sizes})"


def _resize(call: _Call) -> str | Refusal:
    """A product by a constant matrix on either side."""
    graph, node = call.graph, call.node
    before, after = (graph.shape(name) or () for name in (node.input[0], node.output[0]))
    rank, crops = len(before), call.get("coordinate_transformation_mode") == CROP
    axes = [axis % rank for axis in call.get("axes", range(rank))]
    corners = graph.constant(node.input[1]) if crops else np.repeat([0.0, 1.0], len(axes))
    if corners is None or (crops and (call.has(2) or call.get("extrapolation_value", 0.0))):
        return call.refusal("it cuts out a part by computed corners or a scale, or surrounds it with a value")
    cuts = dict(zip(axes, corners.reshape(2, -1).T.tolist(), strict=True))
    resized = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    if not resized or min(resized) < rank - 2 or rank < 2:
        return call.refusal("it resizes other axes than the last two")
    last = call[0]
    for axis in resized:
        size, out = before[axis], after[axis]
        scale = _scale(call, axes, axis, before, after)
        if scale is None or not isinstance(size, int) or not isinstance(out, int):
            return call.refusal("its sizes or scales are not constant, or its ratio gives a part of a pixel")
        columns = _resizing_matrix(call, size, out, scale, cuts[axis])
        left, base = axis == rank - 2, f"{node.output[0]}/axis{axis}"
        name = call.named(graph.add_constant(base, columns.T if left else columns, node.input[0]))
        last = f"MatMul({name}, {last})" if left else f"MatMul({last}, {name})"
    return f"y0 = {last}"


def _scale(
    call: _Call, axes: list[int], axis: int, before: Sequence[Any], after: Sequence[Any]
) -> float | None:
    """The scale of an axis that changes its size; None if a size that it depends on is not constant.

    Without sizes, ONNX Runtime rounds a size down, but one that keeps the ratio to the nearest.
    """
    scales, sizes = (call.graph.constant(call.node.input[i]) if call.has(i) else None for i in (2, 3))
    policy = {"not_larger": min, "not_smaller": max}.get(call.get("keep_aspect_ratio_policy", ""))
    seen = [before[a] for a in (axes if policy else [axis])]
    if not all(isinstance(size, int) for size in (*seen, after[axis])):
        return None
    if call.has(2):
        return None if scales is None else float(scales[axes.index(axis)])
    if policy is None:
        return float(after[axis] / before[axis])
    ratio = 0.0 if sizes is None else float(policy(sizes / seen))
    return ratio if int(ratio * before[axis]) == after[axis] else None


def _resizing_matrix(call: _Call, size: int, out: int, scale: float, cut: Sequence[float]) -> Array:
    """Resizes every unit vector of an axis, as ONNX Runtime does: float32 [size, out]."""
    crops = cut if call.get("coordinate_transformation_mode") == CROP else ()
    given = "x, corners, , sizes" if crops else "x, , scales"
    start, end = cut
    text = f"""<ir_version: 8, opset_import: ["" : {call.graph.model.opset}]>
        g (float[1, 1, {size}, {size}] x) => (float[1, 1, {size}, {out}] y)
        <float[4] scales = {{1, 1, 1, {scale:.9e}}}, int64[4] sizes = {{1, 1, {size}, {out}}},
         float[8] corners = {{0, 0, 0, {start:.9e}, 1, 1, 1, {end:.9e}}}> {{ y = Resize({given}) }}"""
    model = load(parser.parse_model(text))
    (resize,) = (node for node in model.proto.graph.node if node.op_type == "Resize")
    dropped = ("axes", "keep_aspect_ratio_policy")
    resize.attribute.extend(a for a in call.node.attribute if a.name not in dropped)
    with Session(model) as session:
        columns: Array = session.run({"x": np.eye(size, dtype=np.float32)[None, None]})["y"][0, 0]
    return columns


@dataclass(frozen=True)
class _Heads:
    """Heads of queries, of keys and values, and their widths in ONNX's Attention; 0 is unknown."""

    flat: bool
    queries: int
    shared: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, call: _Call) -> _Heads:
        shapes = [call.graph.shape(name) or () for name in call.node.input[:3]]
        counts: list[Any] = [(*shape, 0, 0)[1] for shape in shapes[:2]]
        if flat := {len(shape) for shape in shapes} == {3}:
            counts = [call.get("q_num_heads", 0), call.get("kv_num_heads", 0)]
        heads, shared = (count if isinstance(count, int) else 0 for count in counts)
        if not heads or not shared or not (flat or {len(shape) for shape in shapes} == {4}):
            return cls(flat, 0, 0, (0, 0, 0))
        parts = (heads, shared, shared) if flat else (1, 1, 1)
        return cls(flat, heads, shared, tuple(call.width(i) // part for i, part in enumerate(parts)))

    @property
    def known(self) -> bool:
        return bool(self.shared) and all(self.widths) and not self.queries % self.shared

    def lack_a_kernel(self, batch: object) -> bool:
        odd = not HEADS[0] <= self.widths[0] <= HEADS[1] or self.widths[1] != self.widths[2]
        return self.known and (odd or (batch, self.queries) == (1, 1))


def _onnx_attention(call: _Call) -> str | Refusal:
    """ONNX's own, where the parser or a kernel lacks what it needs; "" for others."""
    heads, batch = _Heads.of(call), (call.graph.shape(call.node.input[0]) or (0,))[0]
    several = call.has(4, 5) or call.hands_out(1, 2, 3) or (call.has(3) and call.get("is_causal", 0))
    refused = several or call.get("softcap", 0.0) or call.get("softmax_precision")
    if not refused and not heads.lack_a_kernel(batch):
        return ""
    if reason := _stays(call, heads):
        return call.refusal(reason)
    text, (query, key, value) = _operands(call, heads)
    scale = call.get("scale", 0.0) or heads.widths[0] ** -0.5
    text += f"s = MatMul(Mul({query}, {scale}), Transpose<perm = [0, 1, 3, 2]>({key})) w = {_weights(call)} "
    if call.hands_out(3):
        text += f"y3 = Identity({'w' if call.get('qk_matmul_output_mode', 0) else 's'}) "
    result = f"MatMul(w, {value})"
    return f"{text} y0 = {_merged(result) if heads.flat else result}"


def _merged(heads: str) -> str:
    """Heads of [batch, heads, length, size] beside each other."""
    return f"Reshape(Transpose<perm = [0, 2, 1, 3]>({heads}), [0, 0, -1])"


def _cut(tensor: str, heads: int, *perm: int) -> str:
    """Heads of [batch, length, width], whose axes are then in the order `perm`."""
    return f"Transpose<perm = {[*perm]}>(Reshape({tensor}, {[0, 0, heads, -1]}))"


def _stays(call: _Call, heads: _Heads) -> str:
    """Returns why ONNX's Attention is not written out; "" if it is."""
    if not heads.known:
        return "its heads, or their widths, are not known"
    if max(call.get("left_window_size", -1), call.get("right_window_size", -1)) >= 0 or call.has(6):
        return "it looks at a window of keys, or at the lengths of a cache"
    if call.hands_out(3) and call.get("qk_matmul_output_mode", 0) in (1, 2):
        return "releases of ONNX differ in which of its scores are an output"
    kind = call.graph.dtype(call.node.input[0])
    mask = call.graph.dtype(call.node.input[3]) if call.has(3) else TensorProto.BOOL
    if mask not in (kind, TensorProto.BOOL) or call.get("softmax_precision", kind) != kind:
        return "its mask or its Softmax is of another type than its queries"
    shapes = [call.graph.shape(name) or () for name in call.node.input[:2]]
    lengths = [(*shape, 0, 0)[1 if heads.flat else 2] for shape in shapes]
    if call.has(4):
        late = call.get("is_causal", 0) and lengths[0] != lengths[1]
        return "it is causal, with other numbers of queries and new keys" if late else ""
    return "its mask ends before its keys" if call.has(3) and call.width(3) not in (0, 1, lengths[1]) else ""


def _operands(call: _Call, heads: _Heads) -> tuple[str, list[str]]:
    """Text that adds past keys and gives all operands as many heads, and the names of the three."""
    text, names = "", [call[0], call[1], call[2]]
    if heads.flat:
        for index, count in enumerate((heads.queries, heads.shared, heads.shared)):
            text += f"h{index} = {_cut(names[index], count, 0, 2, 1, 3)} "
            names[index] = f"h{index}"
    for index in (1, 2):
        if call.has(4, 5) or call.hands_out(1, 2):
            join = f"Concat<axis = 2>({call[index + 3]}, " if call.has(4, 5) else "Identity("
            text, names[index] = f"{text} y{index} = {join}{names[index]}) ", f"y{index}"
        if index == 1 and call.get("is_causal", 0):
            text += _causal(call, names[0], names[1])
        if (times := heads.queries // heads.shared) > 1:
            repeated = f"Expand(Unsqueeze({names[index]}, [2]), {[1, 1, times, 1, 1]})"
            names[index] = f"Reshape({repeated}, {[0, heads.queries, -1, heads.widths[index]]})"
    return text, names


def _causal(call: _Call, query: str, key: str) -> str:
    """Text that computes which keys each query may read, all past ones included: bool [queries, keys]."""
    query, key = (f"Range(0, Squeeze(Shape<start = 2, end = 3>({name})), 1)" for name in (query, key))
    last = f"Add({query}, Shape<start = 2, end = 3>({call[4]}))" if call.has(4) else query
    causal = f"LessOrEqual({key}, Unsqueeze({last}, [1]))"
    return f"allowed = And({causal}, {call[3]}) " if _boolean(call) else f"allowed = {causal} "


def _boolean(call: _Call) -> bool:
    return call.has(3) and call.graph.dtype(call.node.input[3]) == TensorProto.BOOL


def _weights(call: _Call) -> str:
    """The Softmax of the scores: the cap comes before the masks."""
    scores, masked = "s", _boolean(call)
    if cap := call.get("softcap", 0.0):
        scores = f"Mul(Tanh(Div(s, {cap})), {cap})"
    if call.has(3) and not masked:
        scores = f"Add({scores}, {call[3]})"
    allowed = "allowed" if call.get("is_causal", 0) else call[3] if masked else ""
    if allowed:
        half = call.graph.dtype(call.node.input[0]) == TensorProto.FLOAT16
        scores = f"Where({allowed}, {scores}, {-FP16_MAX if half else LOWEST})"
    weights = f"Softmax<axis = -1>({scores})"
    # the weights of a row that is masked as a whole are 0
    return f"Where({allowed}, {weights}, 0.0)" if masked else weights


def _attention(call: _Call, text: str, heads: list[str], width: int, mask: int, bias: int) -> str | Refusal:
    """Queries times keys, scaled, masked and normalised, times the values, [batch, length, width]."""
    count = call.get("num_heads", 0)
    if not width or not count or width % count:
        return call.refusal("the width of its heads is not known")
    if call.get("unidirectional", 0):
        return call.refusal("it is causal")
    if call.hands_out(1, 2, 3):
        return call.refusal("its keys and values are outputs")
    scale = call.get("scale", 0.0) or (width // count) ** -0.5
    query, key, value = heads
    scores = f"MatMul(Mul({_cut(query, count, 0, 2, 1, 3)}, {scale}), {_cut(key, count, 0, 2, 3, 1)})"
    if call.has(bias):
        scores = f"Add({scores}, {call[bias]})"
    if call.has(mask):
        if call.graph.rank(call.node.input[mask]) != 2 or call.graph.dtype(call.node.input[mask]) in FLOATS:
            return call.refusal("its mask is no [batch, keys]")
        shut = float(call.get("mask_filter_value", -10000.0))
        scores = f"Add({scores}, Unsqueeze(Where(Cast<to = 9>({call[mask]}), 0.0, {shut}), [1, 2]))"
    weighted = f"MatMul(Softmax<axis = -1>({scores}), {_cut(value, count, 0, 2, 1, 3)})"
    return f"{text} y0 = {_merged(weighted)}"


DEFINITIONS: dict[str, _Definition] = {
    "BiasGelu": _bias_gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "FusedMatMul": _fused_matmul,
    "MultiHeadAttention": _multi_head_attention,
    "Attention": _packed_attention,
}
"""The text of each com.microsoft operator, or why it stays."""
