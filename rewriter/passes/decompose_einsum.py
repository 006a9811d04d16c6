"""decompose-einsum: writes an Einsum that is a matrix product as MatMul."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op
from rewriter.ir.graph.weights import Replacement
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal


@dataclass(frozen=True)
class Product:
    """The labels of an Einsum, as a product [*batch, *rows, *summed] x [*batch, *summed, *columns].

    `left`, `right` and `output` are the labels as written, one letter for each axis.
    """

    left: str
    right: str
    output: str
    batch: str
    rows: str
    columns: str
    summed: str

    def fits(self, rows: str, columns: str) -> bool:
        """True if MatMul takes an operand of these axes as it is: a Dense layer's rows need not be merged."""
        is_dense = not self.batch and len(self.summed) == len(self.columns) == 1
        return len(columns) == 1 and (len(rows) == 1 or (is_dense and rows == self.rows))


@dataclass(frozen=True)
class DecomposeEinsum(GraphPass):
    """torch.einsum and Flax write projections and attention as Einsum, which no rule about products knows.

    As MatMul, attention is recognised, it sums in FP32 where that is free, and its weights are rounded like
    all others. Transposes and Reshapes bring the axes into order; a constant operand is reordered in advance
    (docs/accuracy.md#as-flax-writes-it).

    Any other Einsum with capital labels gets small ones, which is all that TensorRT's parser takes.

    Declines:
        - more or fewer than two operands, an ellipsis, a diagonal, a sum over a label of one operand only, an
          outer product
        - a label with two sizes, if one is broadcast
        - axes to be merged, if more than one has an unknown size
    """

    exactness = Exactness(1e-6, "FP32 sums in another order: some ulps")
    example = """
         g (float[1,4,2,8] q, float[1,6,2,8] k) => (float[1,2,4,6] s) {
        -    s = Einsum<equation = "bqhd,bkhd->bhqk">(q, k)
        +    heads = Transpose<perm = [0, 2, 1, 3]>(q)
        +    turned = Transpose<perm = [0, 2, 3, 1]>(k)
        +    s = MatMul(heads, turned)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if is_op(node, "Einsum"):
                equation = attribute(node, "equation", "")
                product = _product_of(equation)
                reason = _decompose(graph, node, product) if product else "it is no product of two matrices"
                small = _with_small_labels(equation)
                if reason and small != equation:
                    ends, name = (node.input, node.output), display_name(node)
                    clone = graph.clone_node(node, *ends, name=node.name, equation=small)
                    graph.replace_producer(node.output[0], clone)
                    yield Change(name, f"{equation} became {small}")
                elif reason:
                    yield Refusal(display_name(node), reason)
                else:
                    yield Change(display_name(node), "became MatMul")


def _with_small_labels(equation: str) -> str:
    """The equation with unused small letters for its capitals, if there are enough of them.

    Without "->" the order of the labels decides the order of the axes, so it is written out.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    capitals = dict.fromkeys(re.findall("[A-Z]", inputs))
    free = [letter for letter in ascii_lowercase if letter not in inputs]
    if not capitals or len(free) < len(capitals) or ("." in inputs and not arrow):
        return equation
    if not arrow:
        output = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    return f"{inputs}->{output}".translate(str.maketrans(dict(zip(capitals, free, strict=False))))


def _product_of(equation: str) -> Product | None:
    """The product that an Einsum's equation describes; None for what `DecomposeEinsum` declines."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2 or "." in equation:
        return None
    left, right = operands
    if "->" not in equation:  # ONNX: the labels that occur once, in alphabetical order
        output = "".join(sorted(letter for letter in set(left + right) if (left + right).count(letter) == 1))
    if any(len(set(labels)) != len(labels) for labels in (left, right, output)):
        return None
    shared = [letter for letter in left if letter in right]
    batch = "".join(letter for letter in output if letter in shared)
    summed = "".join(letter for letter in shared if letter not in output)
    rows = "".join(letter for letter in output if letter not in right)
    columns = "".join(letter for letter in output if letter not in left)
    whole = (set(left), set(right)) == (set(batch + rows + summed), set(batch + summed + columns))
    if not summed or not rows or not columns or not whole:
        return None
    return Product(left, right, output, batch, rows, columns, summed)


def _decompose(graph: GraphEditor, node: NodeProto, product: Product) -> str | None:
    """Replaces the Einsum; returns the reason against it, with the graph unchanged."""
    sizes = _sizes(graph, node, product)
    if sizes is None:
        return "one of its labels has two sizes"
    batch = len(product.batch)
    grouped = (product.rows, product.summed), (product.summed, product.columns)
    orders = [product.batch + "".join(groups) for groups in grouped]
    needed = [not product.fits(*groups) for groups in grouped]
    flat = [_target(sizes, batch, pair) if need else None for pair, need in zip(grouped, needed, strict=True)]
    result = product.batch + product.rows + product.columns
    target = _target(sizes, batch, product.rows + product.columns) if any(needed) else None
    if any(need and to is None for need, to in zip((*needed, any(needed)), (*flat, target), strict=True)):
        return "the sizes of the axes to be merged are not known"
    operands, tensors = list[str](), dict[str, str]()
    for name, labels, order, to in zip(node.input, (product.left, product.right), orders, flat, strict=True):
        perm, operand = _perm(labels, order), f"operand{len(operands)}"
        value = graph.constant(name)
        if value is not None and (perm != sorted(perm) or to is not None):  # reordered in advance
            turned = value.transpose(perm)
            whole = [turned.shape[i] if size == 0 else size for i, size in enumerate(to or turned.shape)]
            tensors[operand] = graph.add_constant(f"{name}/product", turned.reshape(whole), like=name)
            operands.append(operand)
        else:
            tensors[operand] = name
            operands.append(_shaped(_moved(operand, perm), to))
    text = _shaped(f"MatMul({operands[0]}, {operands[1]})", target)
    Replacement(graph, node).replace_by(f"y0 = {_moved(text, _perm(result, product.output))}", **tensors)
    return None


def _target(sizes: dict[str, int], batch: int, groups: Sequence[str]) -> list[int] | None:
    """The target of a Reshape that makes an axis of each group of labels, after `batch` axes that stay.

    None if more than one of them has an unknown size.
    """
    totals = [math.prod(sizes.get(letter, 0) for letter in group) or -1 for group in groups]
    return None if totals.count(-1) > 1 else [0] * batch + totals


def _sizes(graph: GraphEditor, node: NodeProto, product: Product) -> dict[str, int] | None:
    """The sizes of the labels, as far as one of the operands shows them; None if they contradict."""
    by_label: dict[str, int] = {}
    for name, labels in zip(node.input, (product.left, product.right), strict=True):
        for letter, size in zip(labels, graph.shape(name) or (), strict=False):
            if isinstance(size, int) and by_label.setdefault(letter, size) != size:
                return None
    return by_label


def _perm(labels: str, wanted: str) -> list[int]:
    return [labels.index(letter) for letter in wanted]


def _moved(text: str, perm: list[int]) -> str:
    return text if perm == sorted(perm) else f"Transpose<perm = {perm}>({text})"


def _shaped(text: str, target: list[int] | None) -> str:
    return text if target is None else f"Reshape({text}, {target})"
