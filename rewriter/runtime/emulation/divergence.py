"""The error that every node of a reduced-precision model adds, in one run.

One session holds three computations side by side: the original in FP32, the emulated model, and each node of
the emulated model on its own, with the original's values as operands. The graph reduces their distances as
soon as the tensors exist, so memory is a small multiple of the largest activation.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.graph import casts_to, display_name, reads
from rewriter.ir.graph.casts import LOWER
from rewriter.ir.graph.node_list import BLOCK, NodeList
from rewriter.ir.graph.ops import SUMS
from rewriter.ir.model import Array, Model, replace_items
from rewriter.ir.model.graphs import import_opsets, rename_reads
from rewriter.ir.model.tensors import TensorFacts
from rewriter.ir.plan import logical_name, node_key
from rewriter.runtime.emulation import Accumulation, emulation, import_float64, reference
from rewriter.runtime.engines.onnxruntime import Session

REFERENCE, EMULATED, LOCAL, DISTANCE, SCALED = (f"rewriter/{c}/" for c in "relds")
"""Prefixes of the tensors of the three computations, of the distances, and of original tensors times 2^k."""

UNSCALED: Mapping[str, int] = {}


@dataclass(frozen=True)
class NodeError:
    """The errors of one node's result: relative L2, infinite where NaN or infinity appeared."""

    # node, op, key: the node of the original, with its key in a plan. `op` is Cast for the rounding of an
    # FP32 result that FP16 nodes read, and Input for the rounding of an input of the model
    node: str
    op: str
    key: str
    tensor: str  # its output
    # by the node itself, on the original's exact values: from weights, arithmetic and its result's rounding
    added: float = 0.0
    total: float = 0.0  # error of the tensor in the emulated model, with the errors of all nodes before it
    norm: float = 0.0  # L2 norm of the original's tensor


Norms = tuple[str, str, str]
"""Scalars: the L2 norms of a tensor, of its error, and of the node's own error ("": none)."""


class SideBySide:
    """Builds the model of the three computations, whose outputs are the `norms` of all rows, `BLOCK` in each.

    `known` has the position of the node that makes each tensor of the original, -1 for its inputs; `narrowed`
    has the FP16 and BF16 tensors of roundings, each with the tensor that is rounded. The emulated model has
    the tensors of `exponents` times 2^exponent.
    """

    def __init__(
        self,
        original: Model,
        emulated: Model,
        exponents: Mapping[str, int] = UNSCALED,
        made: Mapping[str, TensorFacts] | None = None,  # facts of tensors of the other model
    ) -> None:
        self.original, self.emulated = original, emulated
        self.facts, self.made = original.facts().main, made or {}
        self.nodes: list[NodeProto] = []
        self.emit = NodeList(map(f"{DISTANCE}{{}}".format, itertools.count()), original.opset, self.nodes)
        self.finite: dict[str, str] = {}
        self.rows: list[tuple[NodeError, Norms]] = []
        graph, other = original.proto.graph, emulated.proto.graph
        self.exact = list(graph.node)
        self.known = {port.name: -1 for port in original.signature.inputs}
        self.known |= {name: i for i, node in enumerate(self.exact) for name in node.output if name}
        self.exponents = {name: k for name, k in exponents.items() if self.known.get(name, -1) >= 0}
        self.narrowed = {n.output[0]: n.input[0] for n in other.node if any(casts_to(n, t) for t in LOWER)}
        self.constants = {t.name for t in other.initializer}
        for node in other.node:  # what the emulation makes of weights
            own = not any(self.known.get(name, -1) >= 0 for name in node.output)
            fixed = own and reads(node) and self.constants.issuperset(reads(node))
            if node.op_type == "Constant" or fixed:
                self.constants.update(node.output)
        for port in emulated.signature.inputs:  # `--io` may have changed their types
            out = EMULATED + port.name
            self.nodes.append(helper.make_node("Cast", [port.name], [out], to=port.dtype))
            if self._dtype(port.name) in LOWER:  # exact, and without a counterpart in FP32
                self.constants.add(port.name)
        done = 0
        for node in other.node:
            done = self._advance(done, node)
            self._emulate(node)
        self.norms = [name for _, names in self.rows for name in names if name]
        blocks = range(0, len(self.norms), BLOCK)
        self.outputs = [self.emit.stack(self.norms[first : first + BLOCK]) for first in blocks]
        self.results = {port.name: EMULATED + port.name for port in emulated.signature.outputs}
        self.model = self._assembled()

    def _advance(self, done: int, node: NodeProto) -> int:
        """Add the nodes of the original up to the tensors that an emulated node reads and computes."""
        names = (*reads(node), *node.output)
        needed = max((self.known.get(self._match(name), -1) for name in names), default=-1) + 1
        for exact in self.exact[done:needed]:
            self.nodes.append(_renamed(exact, self._reference, self._reference))
            for name in exact.output:
                if name in self.exponents:  # as the emulated model has it; that is exact
                    inputs = [
                        self._reference(name),
                        self.emit.constant(2.0 ** self.exponents[name], np.float32),
                    ]
                    self.nodes.append(helper.make_node("Mul", inputs, [SCALED + name]))
        return max(done, needed)

    def _emulate(self, node: NodeProto) -> None:
        """Add an emulated node, its distances and, if it may add an error, a copy on exact operands."""
        self.nodes.append(_renamed(node, EMULATED.__add__, EMULATED.__add__))
        if node.output[0] in self.constants:
            return
        # the node may differ from the original's on exact operands
        constant = any(name in self.constants for name in reads(node))
        errs = constant or not all(self._match(name) for name in (*reads(node), *node.output) if name)
        if errs:
            self.nodes.append(_renamed(node, self._local, LOCAL.__add__))
        for name in node.output:
            match = self._match(name)
            if match and self._dtype(match) == TensorProto.FLOAT and (errs or node.op_type != "Cast"):
                source = self.narrowed.get(node.input[0], "") if node.input else ""
                # the end of the rounding of a tensor that also exists unrounded
                self._compare(match, name, errs, op="Cast" if source and self._match(source) else "")

    def _match(self, name: str) -> str:
        """The original's name of an emulated tensor; "" if it has none, or rounds or reshapes the tensor."""
        if name in self.narrowed or self._dtype(name) in LOWER:
            return ""
        base = name if name in self.known else logical_name(name)
        ranks = {
            len(f[n].shape or ()) for f, n in ((self.facts, base), (self.made, name)) if n in f and f[n].shape
        }
        return base if base in self.known and len(ranks) < 2 else ""

    def _reference(self, name: str) -> str:
        return name if self.known.get(name) == -1 or not name else REFERENCE + name

    def _expected(self, name: str) -> str:
        """The value that the emulated model should have for a tensor of the original."""
        return SCALED + name if name in self.exponents else self._reference(name)

    def _local(self, name: str) -> str:
        if name in self.constants:
            return EMULATED + name
        match = self._match(name)
        return self._expected(match) if match else LOCAL + name

    def _dtype(self, name: str) -> int:
        """Element type of a tensor of the original; 0 if it is not known."""
        return self.facts[name].dtype if name in self.facts else 0

    def _compare(self, match: str, name: str, errs: bool, op: str) -> None:
        exact = self._expected(match)
        own = self._distance(LOCAL + name, exact) if errs else ""
        norms = (self._norm(exact), self._distance(EMULATED + name, exact), own)
        position = self.known[match]
        row = NodeError(match, "Input", "", match)
        if position >= 0:
            node = self.exact[position]
            row = NodeError(display_name(node), op or node.op_type, node_key(0, node), match)
        self.rows.append((row, norms))

    def _distance(self, tensor: str, exact: str) -> str:
        """L2 norm of the difference; equal infinities have no difference."""
        for name in {tensor, exact} - self.finite.keys():
            self.finite[name] = self.emit.add("Clip", [name])  # by default to the largest FP32 numbers
        return self._norm(self.emit.add("Sub", [self.finite[tensor], self.finite[exact]]))

    def _norm(self, tensor: str) -> str:
        return self.emit.add("ReduceL2", [tensor], keepdims=0)

    def _assembled(self) -> Model:
        model = self.original.copy()
        graph, other = model.proto.graph, self.emulated.proto
        both = ((graph, REFERENCE, self.original.weights), (other.graph, EMULATED, self.emulated.weights))
        tensors = [(deepcopy(tensor), prefix) for g, prefix, _ in both for tensor in g.initializer]
        for tensor, prefix in tensors:
            tensor.name = prefix + tensor.name
        model.weights = {prefix + name: a for _, prefix, weights in both for name, a in weights.items()}
        inputs = {port.name for port in self.original.signature.inputs}
        del graph.value_info[:]
        replace_items(graph.input, [v for v in graph.input if v.name in inputs])
        replace_items(graph.initializer, (tensor for tensor, _ in tensors))
        replace_items(graph.node, self.nodes)
        types = dict.fromkeys(self.outputs, int(TensorProto.FLOAT))
        types |= {self.results[port.name]: port.dtype for port in self.emulated.signature.outputs}
        replace_items(
            graph.output, (helper.make_tensor_value_info(n, dtype, None) for n, dtype in types.items())
        )
        # the local functions and operator sets that only the emulated model has
        proto = model.proto
        import_opsets(proto, other)
        functions = {(f.domain, f.name) for f in proto.functions}
        proto.functions.extend(f for f in other.functions if (f.domain, f.name) not in functions)
        proto.ir_version = max(proto.ir_version, other.ir_version)
        model.mark_edited()
        return model


def _renamed(node: NodeProto, read: Callable[[str], str], written: Callable[[str], str]) -> NodeProto:
    """A copy of the node with other names; tensors of its subgraphs keep theirs."""
    copy = deepcopy(node)
    copy.name = written(node.name) if node.name else ""
    rename_reads(copy, {name: read(name) for name in reads(node)})
    for index, name in enumerate(node.output):
        copy.output[index] = written(name) if name else ""
    return copy


def diverge(
    original: Model,  # the model before `mixed-precision`, with inputs of the samples' types
    fixed: Model,  # the same nodes in reduced precision
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp16",
    # tensors of `original` that `fixed` has multiplied by 2^exponent (pass `rescale`)
    exponents: Mapping[str, int] = UNSCALED,
    *,
    backwards: bool = False,  # as of `emulation`
    results: list[dict[str, Array]] | None = None,  # gets the emulated model's outputs for each sample
) -> tuple[NodeError, ...]:
    """The errors of all float tensors of the main graph over all samples, in the order of computation.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run one of the two.
    """
    pair = SideBySide(
        reference(import_float64(original)),
        emulation(fixed, accumulation, tf32=True, backwards=backwards),
        exponents,
        fixed.facts().main,
    )
    if not pair.rows:
        return ()  # ONNX Runtime refuses a model without outputs
    squares = np.zeros((len(pair.rows), 3))
    with Session(pair.model) as session:
        for sample in samples:
            values = session.run(sample)
            if results is not None:
                results.append({name: values[own] for name, own in pair.results.items()})
            errors = dict(zip(pair.norms, np.concatenate([values[n] for n in pair.outputs]), strict=True))
            norms = [[errors.get(name, 0.0) for name in names] for _, names in pair.rows]
            squares += np.square(np.asarray(norms, np.float64).reshape(-1, 3))
    figures = zip(pair.rows, np.sqrt(squares).tolist(), strict=True)
    return tuple(
        replace(row, added=_ratio(added, scale), total=_ratio(total, scale), norm=scale)
        for (row, _), (scale, total, added) in figures
    )


def _ratio(error: float, scale: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / (scale or 1.0) if math.isfinite(scale) else 0.0


_KEEP_SCALE = SUMS | {"Concat", "Max", "Mean", "Min", "Where"}
"""Operators whose operands hand on their absolute errors; others, such as products, hand on relative ones."""


def contributions(model: Model, rows: Sequence[NodeError], errors: Mapping[str, float]) -> dict[str, float]:
    """The squared error of the outputs that each node causes, relative to them, by its key in a plan.

    The squared error of an output flows back through the graph. A node keeps the part of its result's error
    that it adds itself. The rest goes on to its operands by their errors: an error at the start of a network
    that all later nodes amplify is found at its start. Errors of two nodes are taken to be independent.

    Args:
        model: The original, as for `diverge`.
        rows: Its result, with the total errors.
        errors: The error that each node of the main graph adds by itself, relative L2, by its key.

    Returns:
        Its own squared error where it is infinite; for all, where the outputs are not finite.
    """
    squares = {key: error * error for key, error in errors.items()}
    totals = {row.tensor: row.total**2 for row in rows}
    added = {row.tensor: row.added**2 for row in rows}
    norms = {row.tensor: row.norm**2 for row in rows}
    flows = defaultdict(float, {port.name: totals.get(port.name, 0.0) for port in model.signature.outputs})
    if not 0.0 < math.fsum(flows.values()) < math.inf:
        return squares
    shares = {key: square for key, square in squares.items() if square == math.inf}
    for node in reversed(model.proto.graph.node):
        flow, key = sum(flows.get(name, 0.0) for name in node.output), node_key(0, node)
        if not flow or key in shares:
            continue
        total, result = max((totals.get(name, 0.0), name) for name in node.output)
        own, inherited = squares.get(key, 0.0), max(total - added.get(result, 0.0), 0.0)
        scaled = node.op_type in _KEEP_SCALE
        weights = {n: totals[n] * (norms[n] if scaled else 1.0) for n in reads(node) if totals.get(n)}
        infinite = [name for name in weights if totals[name] == math.inf]
        if infinite or not any(weights.values()):  # tensors of zeros have absolute errors
            weights = dict.fromkeys(infinite or weights, 1.0)
        whole = math.fsum(weights.values())
        part = own / (own + inherited) if weights and own + inherited else 1.0
        shares[key] = flow * part
        for name, weight in weights.items():
            flows[name] += flow * (1.0 - part) * weight / whole
    return {key: shares.get(key, 0.0) for key in squares}
