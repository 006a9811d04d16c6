"""unflatten-products: a matrix product between two Reshapes computes on all axes instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal, Requires
from rewriter.graph import GraphEditor, attribute, constant_row, is_own, label
from rewriter.model.facts import Shape
from rewriter.graph.stored import EXCHANGEABLE

@dataclass(frozen=True)
class UnflattenProducts(GraphPass):
    """A Reshape between a product and what is elementwise behind it keeps the product from summing in FP32.

    Gemm has two axes, and so has the MatMul that Keras writes for a Dense layer: exporters join the leading
    axes of [batch, length, depth] before and split them again behind it. A MatMul takes any number of axes:
    the Reshape behind it goes, and the C of a Gemm becomes an Add. The Reshape before goes, too, where all
    that it did was to join those axes; else it joins fewer. What is elementwise then stands right behind the
    product, and mixed-precision{epilogues=true} can keep it in FP32. The products are the same. Emulated with
    FP16 sums, a GPT-2 as PyTorch exports it (77 tokens, random weights) errs by 4.6e-4 with this pass and by
    2.9e-3 without; its engine was not run.

    Left alone without a word: products between other nodes, a Reshape behind that splits the last axis, too,
    empty tensors, products that anything else reads, computed weights.

    Declines:
        - a result of which more than one size is not known: export the model with a fixed length
        - a product that --keep-fp32, --keep-fp32-op or an edited plan names
        - Gemm with alpha or beta other than 1, a transposed A, or a C that is computed or no row
        - a transposed weight that belongs to a graph around this one, or that is a table of a Gather, too
        - a model below opset 7
    """

    name = "unflatten-products"
    requires = Requires(opset=7)  # from there on Add broadcasts a row over any number of axes
    exactness = Exactness(1e-5, "ONNX Runtime may block the same sums otherwise, and adds C behind them")
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3,2] x) => (float[1,3,2] y)
        <int64[2] flat = {3, 2}, float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2] b = {0.5, 0.25},
         int64[3] back = {1, 3, 2}> {
            rows = Reshape(x, flat)
            product = Gemm(rows, w, b)
            y = Reshape(product, back)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3,2] x) => (float[1,3,2] y)
        <float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2] b = {0.5, 0.25}> {
            product = MatMul(x, w)
            y = Add(product, b)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        made: dict[object, str] = {}
        for node in graph.nodes:
            found = _flattened(graph, node)
            if found is None:
                continue
            reason = _reason_against(graph, found, context.kept)
            if reason is not None:
                yield Refusal(label(node), f"it stays between Reshapes: {reason}")
            else:
                yield _write(graph, found, made)


@dataclass(frozen=True)
class _Flattened:
    """A product whose leading axes are joined before and split again behind it.

    Attributes:
        before, behind: The Reshapes.
        target: What the product is to read, -1 for a size that is not known; None: what `before` reads.
        columns: Size of its last axis.
        vague: Whether more than one size is not known.
    """

    node: NodeProto
    before: NodeProto
    behind: NodeProto
    target: tuple[int, ...] | None
    columns: int
    vague: bool = False

    @property
    def transposed(self) -> bool:
        return _is_transposed(self.node)

    @property
    def c(self) -> str:
        """The third input of a Gemm; "" if there is none."""
        return self.node.input[2] if len(self.node.input) > 2 else ""


def _is_transposed(node: NodeProto) -> bool:
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))


def _flattened(graph: GraphEditor, node: NodeProto) -> _Flattened | None:
    if node.op_type not in {"MatMul", "Gemm"} or node.domain not in {"", "ai.onnx"}:
        return None
    before, behind = graph.producer(node.input[0]), graph.only_consumer(node.output[0])
    if before is None or before.op_type not in {"Reshape", "Flatten"} or graph.rank(node.input[0]) != 2:
        return None
    if behind is None or behind.op_type != "Reshape" or behind.input[0] != node.output[0]:
        return None
    weight = graph.constant(node.input[1])
    if (
        weight is None
        or weight.ndim != 2
        or helper.np_dtype_to_tensor_dtype(weight.dtype) not in EXCHANGEABLE
    ):
        return None
    depth, columns = weight.shape[::-1] if _is_transposed(node) else weight.shape
    split = graph.shape(behind.output[0])
    if split is None or len(split) < 3 or split[-1] != columns:
        return None
    given, wanted = graph.shape(before.input[0]), (*split[:-1], depth)
    if 0 in wanted or 0 in (given or ()):
        return None
    if _says_as_much(given, wanted):
        return _Flattened(node, before, behind, None, columns)
    target = tuple(size if isinstance(size, int) else -1 for size in wanted)
    return _Flattened(node, before, behind, target, columns, vague=target.count(-1) > 1)


def _says_as_much(given: Shape | None, wanted: Shape) -> bool:
    """Whether a tensor of as many elements has the wanted shape, and none of its sizes is less known.

    One size may be unknown on both sides: the others tell it.
    """
    if given is None or len(given) != len(wanted):
        return False
    differing = [pair for pair in zip(given, wanted, strict=True) if None in pair or pair[0] != pair[1]]
    return not differing or (len(differing) == 1 and not isinstance(differing[0][1], int))


def _reason_against(graph: GraphEditor, found: _Flattened, kept: Kept) -> str | None:
    node = found.node
    around = (found.before, node, found.behind)
    option = next((option for n in around for option in kept.options(n)), None)
    if option is not None:
        return f"it is kept in FP32 by {option}"
    if found.vague:
        return "more than one size of its result is not known: export the model with a fixed length"
    if node.op_type == "MatMul":
        return None
    if attribute(node, "alpha", 1.0) != 1 or (found.c and attribute(node, "beta", 1.0) != 1):
        return "its alpha or beta is not 1"
    if attribute(node, "transA", 0):
        return "it transposes what it multiplies"
    if found.c and constant_row(graph, found.c, found.columns, rank=2) is None:
        return f"its C, {found.c}, is no constant row"
    if found.transposed and not is_own(graph, node.input[1]):
        return "its weight belongs to a graph around it, and would be copied"
    if found.transposed and any(reader.op_type == "Gather" for reader in graph.consumers(node.input[1])):
        return "its weight is the table of a Gather, too, and would be held twice"
    return None


def _write(graph: GraphEditor, found: _Flattened, made: dict[object, str]) -> Change:
    """`made`: weights and data that other products may share, by what they are made of."""
    node, result = found.node, found.behind.output[0]
    data = found.before.input[0] if found.target is None else _joined(graph, found, found.target, made)
    weight = _upright(graph, node.input[1], made) if found.transposed else node.input[1]
    name = f"{label(node)}/unflattened"
    product = graph.tensor(f"{node.output[0]}/unflattened", like=result) if found.c else result
    nodes = [graph.make("MatMul", [data, weight], [product], name=name)]
    if found.c:
        nodes.append(graph.make("Add", [product, found.c], [result], name=f"{name}/Add"))
    graph.substitute(result, *nodes)
    return Change(
        label(node), f"a product of {graph.rank(result)} axes in place of one of 2 between Reshapes"
    )


def _joined(graph: GraphEditor, found: _Flattened, target: tuple[int, ...], made: dict[object, str]) -> str:
    """What the product reads, in the shape that its result is split to."""
    source = found.before.input[0]
    if (source, target) not in made:
        base = found.node.input[0]
        wanted = graph.add_constant(f"{base}/unflattened/shape", np.asarray(target, np.int64))
        shape = tuple(None if size < 0 else size for size in target)
        tensor = made[source, target] = graph.tensor(f"{base}/unflattened", like=base, shape=shape)
        graph.insert(graph.make("Reshape", [source, wanted], [tensor]), before=found.node)
    return made[source, target]


def _upright(graph: GraphEditor, weight: str, made: dict[object, str]) -> str:
    """The transposed constant."""
    if weight not in made:
        value = graph.constant(weight)
        assert value is not None  # `_flattened` asked
        made[weight] = graph.add_constant(f"{weight}/transposed", value.T.copy())
    return made[weight]
