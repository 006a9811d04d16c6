"""Outputs that are probabilities, found by the last operators of the graph, and how far they are apart.

A relative L2 error of such an output says little about its use: classes are compared with each other, and
scores with a threshold. Both are decided by differences of probabilities.

Some are maps, such as the outputs of segmentation and of text detectors. At the edge of an object, a
probability goes from 0 to 1 over a pixel or two. An edge that moves by a tenth of a pixel is invisible, but
changes values by a tenth. So maps are compared as areas.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.graph import attribute, display_name, is_op
from rewriter.ir.graph.ops import RESHAPES
from rewriter.ir.model import Array, Model
from rewriter.ir.model.tensors import FLOATS, TensorFacts
from rewriter.runtime.metrics.pairwise_error import Pair, is_float
from rewriter.runtime.metrics.tolerances import USABLE

LEAST_SIDE = 16
"""Pixels of the shorter side below which an output is no map: edges would be most of it."""


@dataclass(frozen=True)
class MapError:
    """How far a map is from the original's."""

    # share of the area that differs: 1 - sum(min(a, b)) / sum(max(a, b)) (Jaccard); 0 where both are empty
    distance: float
    # largest distance of a value from the original's 3 x 3 pixels around it: 0 if edges moved by less than 1
    beyond: float

    def excess(self, allowed: float) -> float:
        """The error in units of what is allowed: of `distance` this much, of `beyond` `USABLE`."""
        return max(self.distance / allowed, self.beyond / USABLE)


def map_error(expected: Array, actual: Array) -> MapError | None:
    """Compares two arrays of probabilities [N, C, H, W]; None if they do not look like maps."""
    if expected.ndim != 4 or min(expected.shape[-2:]) < LEAST_SIDE:
        return None
    larger = float(np.maximum(expected, actual).sum(dtype=np.float64))
    common = float(np.minimum(expected, actual).sum(dtype=np.float64))
    padded = np.pad(expected, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(-2, -1))
    lowest, highest = around.min(axis=(-2, -1)), around.max(axis=(-2, -1))
    beyond = np.maximum(lowest - actual, actual - highest).max(initial=0.0)
    return MapError(1.0 - common / larger if larger > 0 else 0.0, float(max(beyond, 0.0)))


PER_TOLERANCE = 2.0
"""Largest difference of an independent probability, largest mean distance of rows of them, and largest
distance of two maps, over the tolerance of relative L2: 0.01 for FP16. Thresholds on probabilities are set in
steps of 0.05."""

TIE = 0.1
"""Two classes of the original whose probabilities are this close, as a share of the larger one, are a tie
(0.52 and 0.48): either may win. The mean distance of the rows limits how many do."""

SAME_BEST = 0.25
"""Largest difference of a probability in a single row where every row keeps its best class, ties aside: a row
of a text recogniser (PP-OCRv4) differed by 0.22, and all 80 lines of text were equal."""

NOTHING = 0.01
"""Probability below which nothing was found: thresholds on probabilities are set in steps of 0.05."""

GRAIN = 1e-6
"""Insignificant differences of probabilities: 6 times the error of ONNX Runtime's FP32 Sigmoid on a CPU
(1.7e-7 between -20 and 20), also where the probability itself is smaller."""

FIRST_PLAIN_AXIS = 13
"""Operator set from which on a Softmax is along one axis; before, it joined all axes from that one on."""

PLAIN = RESHAPES | {"Cast", "Slice", "Gather", "Concat", "Split", "Transpose"}
"""Operators between a Softmax or Sigmoid and an output that leave each probability as it is."""

COPIES = {"Tile", "Expand", "Pad"}
"""Operators that repeat, or surround with one number, the whole numbers that floats were rounded to."""

ROUNDED = {"Round", "Floor", "Ceil", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "Clip", "Min", "Max"}
"""Operators around the Cast that makes whole numbers of floats."""


@dataclass(frozen=True)
class Probabilities:
    """An output of probabilities, or of rounded numbers."""

    reason: str  # the operator that makes it one, for the report
    # axis from the end along which the classes of a row lie; None if the values are independent
    classes: int | None = None
    logarithms: bool = False  # True for the logarithms of probabilities
    # True for the result of a product: scores before a Softmax, or features. The graph does not show which,
    # so its best classes are reported, and not judged by
    raw: bool = False
    partly: bool = False  # True if only some of its parts are probabilities: those from 0 to 1
    # True for whole numbers that floats were rounded to, and for no probabilities: samples of sound, pixels,
    # a quantised cache. They differ by little, and labels, ranks and places by any number
    rounded: bool = False


@dataclass(frozen=True)
class ProbabilityError:
    """The distance of probabilities from the original's."""

    reason: str
    difference: float  # largest difference of a probability
    # total variation distance of a row's distributions, mean over rows; None for independent values
    mean: float | None
    # largest `mean` that passes; for independent values, largest `difference`, or distance of maps
    allowed: float
    top_1: float | None  # share of rows with the same best class; None if the values are independent
    decided: bool  # True if no row has another best class, ties aside (`TIE`)
    areas: MapError | None = None  # the comparison as maps, where independent values look like one
    of_fp32: float = 0.0  # largest difference of a single row that the network's own FP32 engine excuses
    empty: bool = False  # True for a part, such as a class, in which the original finds nothing (`NOTHING`)

    @property
    def excess(self) -> float:
        """The error in units of what is allowed; a single row may differ by `row_limit`."""
        if self.mean is None:
            alone = self.difference / self.allowed
            return alone if self.areas is None else min(alone, self.areas.excess(self.allowed))
        return max(self.mean / self.allowed, self.difference / self.row_limit)

    @property
    def row_limit(self) -> float:
        """Largest difference of a probability in a single row."""
        return max(SAME_BEST if self.decided else USABLE, self.of_fp32)

    @property
    def fair(self) -> bool:
        """True if every row keeps its best class, ties aside, or FP32 moves single rows as far."""
        return self.decided or self.difference <= self.of_fp32

    @property
    def passed(self) -> bool:
        return self.fair and self.excess <= 1.0


def probabilities(model: Model) -> dict[str, Probabilities]:
    """Returns the outputs that end in a Softmax, LogSoftmax or Sigmoid, with nothing but views after it.

    An output is `partly` probabilities if only a part of it does. It is `raw` if it has two or more axes and
    ends in a product and its bias. Whole numbers that floats were rounded to are `rounded`.
    """
    made_by = {name: node for node in model.proto.graph.node for name in node.output if name}
    constants = {tensor.name for tensor in model.proto.graph.initializer}
    by_name = {}
    for port in model.signature.outputs:
        if port.dtype not in {*FLOATS, TensorProto.BOOL}:
            if _is_rounded(port.name, made_by, constants, model.facts().main):
                by_name[port.name] = Probabilities("", rounded=True)
            continue
        ends, moved = _ends(port.name, made_by)
        operators = {node.op_type if node is not None else "" for node in ends}
        node = ends[0]
        if node is not None and operators in ({"Softmax"}, {"LogSoftmax"}, {"Sigmoid"}):
            rank, alone = len(port.shape or ()), moved or node.op_type == "Sigmoid"
            old = model.opset < FIRST_PLAIN_AXIS  # such sets join axes, unless it is the last one
            axis = attribute(node, "axis", 1 if old else -1)
            axis = axis if axis < 0 else axis - rank if rank else None
            classes = None if alone or (old and axis != -1) else axis
            reason = f"{display_name(node)} ({node.op_type}) makes it"
            by_name[port.name] = Probabilities(reason, classes, node.op_type == "LogSoftmax")
        elif scores := next(filter(None, (_scores(end, made_by, constants) for end in ends)), None):
            reason = f"{display_name(scores)} ({scores.op_type}) makes a part of it"
            by_name[port.name] = Probabilities(reason, partly=True)
        elif not moved and len(port.shape or ()) > 1 and (product := _product(node, made_by)) is not None:
            reason = f"{display_name(product)} ({product.op_type}) makes it"
            by_name[port.name] = Probabilities(reason, classes=-1, raw=True)
    return by_name


def _is_rounded(
    tensor: str, made_by: Mapping[str, NodeProto], constants: Container[str], facts: Mapping[str, TensorFacts]
) -> bool:
    """True if a tensor of whole numbers is made of computed floats, and of no other whole numbers."""
    computed, stack, seen = False, [tensor], set[str]()
    while stack:
        name = stack.pop()
        node = made_by.get(name)
        if name in seen or name in constants or is_op(node, "Constant", "Shape", "Size"):
            continue
        seen.add(name)
        if is_op(node, *PLAIN, *ROUNDED, *COPIES):
            stack.extend(node.input if node.op_type in {"Concat", *ROUNDED} else node.input[:1])
        elif (
            name
            and not is_op(node, "QuantizeLinear")
            and (name not in facts or facts[name].dtype not in FLOATS)
        ):
            return False
        else:
            computed = computed or bool(name)
    return computed


def _scores(
    node: NodeProto | None, made_by: Mapping[str, NodeProto], constants: Container[str]
) -> NodeProto | None:
    """The Softmax or Sigmoid that a node is, or the first that it multiplies, as objectness by class."""
    if is_op(node, "Softmax", "Sigmoid"):
        return node
    factors = (name for name in (node.input if is_op(node, "Mul") else ()) if name not in constants)
    ends = [end for name in factors for end in _ends(name, made_by)[0] if not is_op(end, "Constant")]
    scores = [_scores(end, made_by, constants) for end in ends]
    return scores[0] if scores and all(scores) else None


def _product(node: NodeProto | None, made_by: Mapping[str, NodeProto]) -> NodeProto | None:
    """The MatMul or Gemm that a node is, or adds a bias to."""
    if is_op(node, "Add"):
        node = next((made_by[name] for name in node.input if name in made_by), None)
    return node if is_op(node, "MatMul", "Gemm") else None


def finds_nothing(outputs: Mapping[str, Array], kinds: Mapping[str, Probabilities]) -> bool:
    """True if all float outputs are scores or maps without a probability that a threshold would pass."""
    floats = {name: value for name, value in outputs.items() if is_float(value)}
    kinds_of = [kinds[name] for name in floats if name in kinds]
    alone = len(kinds_of) == len(floats) and all(
        k.classes is None and not (k.logarithms or k.partly) for k in kinds_of
    )
    return bool(floats) and alone and all(np.max(v, initial=0.0) < NOTHING for v in floats.values())


def _ends(tensor: str, made_by: Mapping[str, NodeProto]) -> tuple[list[NodeProto | None], bool]:
    """The nodes before the views that make a tensor, None for inputs; True if a view moved elements."""
    moved, ends, stack, seen = False, list[NodeProto | None](), [tensor], set[str]()
    while stack:
        name = stack.pop()
        node = made_by.get(name)
        if name in seen:
            continue
        seen.add(name)
        if is_op(node, *PLAIN):
            moved = moved or not is_op(node, "Identity", "Cast")
            stack.extend(node.input if node.op_type == "Concat" else node.input[:1])
        else:
            ends.append(node)
    return ends, moved


def probability_error(kind: Probabilities, pair: Pair, tolerance: float) -> ProbabilityError:
    """Compares finite probabilities of one shape; `tolerance` is of relative L2, for the precision."""
    expected, actual = pair.wide
    if kind.logarithms:
        expected, actual = np.exp(expected), np.exp(actual)
    difference = float(np.max(np.abs(actual - expected), initial=0.0))
    top_1, mean, decided, areas = None, None, True, None
    if kind.classes is not None and expected.size and expected.shape[kind.classes] > 1:
        rows, other = (np.moveaxis(array, kind.classes, -1) for array in (expected, actual))
        top_1, decided = _top_1(rows, other)
        mean = float(np.mean(np.sum(np.abs(other - rows), axis=-1))) / 2.0
    elif kind.classes is None:
        areas = map_error(expected, actual)
    return ProbabilityError(kind.reason, difference, mean, PER_TOLERANCE * tolerance, top_1, decided, areas)


def same_best(pair: Pair) -> float | None:
    """Share of rows whose largest element is at the same place; None for rows of one element, or none."""
    rows = pair.expected.size and pair.expected.shape[-1] > 1
    return _top_1(*pair.wide)[0] if rows else None


def _top_1(expected: Array, actual: Array) -> tuple[float, bool]:
    """Share of rows with the same best class, and True if the others are ties."""
    best, other = (np.argmax(array, axis=-1)[..., None] for array in (expected, actual))
    first, second = (np.take_along_axis(expected, at, axis=-1) for at in (best, other))
    return float(np.mean(best == other)), bool(np.all(first - second <= TIE * first))
