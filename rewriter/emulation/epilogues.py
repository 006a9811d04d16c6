"""How TensorRT sums an FP16 product, by what stands around it.

Measured on one H200 with TensorRT-RTX 1.6.1, strongly typed, and compared with this emulation:

- A MatMul by a constant weight whose result goes through a Cast to FP32 into an elementwise operator, or into
  a Split with such readers, erred by 2.07e-4 after the final rounding at all depths from 384 to 4096: FP32
  sums, and a product that was never FP16. A Cast up and down again at once is folded: FP16 sums.
- Where a LayerNormalization in FP32, or the reductions of one that is written out, read what the operators
  behind the product compute, it was FP16 sums: the norm's kernel takes the operators. With a Cast to FP16
  before the norm it was FP32 sums where something else reads the FP32 result, too, and FP16 sums where
  nothing does (BERT: 1.74e-3 for three layers, as with a norm in FP32, 1.62e-3). FP32 sums, too, where what
  the norm reads is an output of the graph as well, or a view (7.4e-4 for the same BERT): the product's kernel
  writes it, and the norm has its own. The names of the kernels say the same, and that a Transpose which alone
  reads them takes the operators as well, unless the product, which has two axes there, needs a view first.
- Projections of one tensor by several weights (Q, K and V) gave 7.6e-4 to 1.05e-3 with and without it, and
  Conv 7.3e-4 and 1.73e-3 (depths 576 and 4096): FP16 sums. Merged into one product it is FP32 sums, whether
  a Split of columns stands behind the Cast to FP16, or a Reshape to heads and a Split of those.
- A ConvTranspose of stride 1 with a bias rounds its sum, adds the bias and rounds again: four layers of 3x3
  and 256 channels at 14x14 with Relu erred by 5.6e-4, without biases by 4.1e-4. With the activations in FP32
  it was 4.4e-4: one rounding in the first three layers, each of them one kernel (`DecoCastReluCast`), and two
  in the last, which was two kernels as nothing but an output was behind it. With two Casts and nothing
  between it was 5.8e-4 (no activation), with a view before an FP32 bias 5.6e-4; with residual sums in FP32
  three bottlenecks erred by 5.1e-4 instead of 5.6e-4.
- Where the Cast is the output, sums beyond 65504 did not overflow; whether it is rounded was not asked.
- Attention with its Softmax in FP32 erred by 4.64e-4 (128 tokens), 4.95e-4 (197) and 9.11e-4 (1500), with
  FP16 by 7.43e-4, 7.92e-4 and 1.14e-3. The difference is what summing and rounding the scores in FP16 costs
  (5.8e-4 to 6.9e-4): they stay FP32. The second product errs less than a MatMul of its depth: partial sums
  that are rounded after every 32 products fit the six figures within a factor of 0.84 to 1.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, TensorProto

from rewriter.graph import casts_to
from rewriter.graph.fusion import is_plain_transpose, reduces
from rewriter.graph.ops import ELEMENTWISE, LAYOUTS, PRODUCTS, ROW_NORMS, SCALING
from rewriter.model import Model, walk_graphs
from rewriter.model.facts import Facts, TensorFacts

Names = AbstractSet[tuple[int, str]]
"""Tensors, each as the index of its scope and its name."""


@dataclass(frozen=True)
class Epilogues:
    """Results of FP16 nodes.

    Attributes:
        summed: Products with FP32 sums.
        exact: What is not rounded: products of these, and the scaled scores of attention.
        fused: The second product of attention.
        twice: ConvTransposes whose sum is rounded before the bias is added.
    """

    summed: Names = field(default_factory=frozenset)
    exact: Names = field(default_factory=frozenset)
    fused: Names = field(default_factory=frozenset)
    twice: Names = field(default_factory=frozenset)


def find_epilogues(model: Model, facts: Facts) -> Epilogues:
    """The products of a model that has its types already."""
    summed: set[tuple[int, str]] = set()
    exact: set[tuple[int, str]] = set()
    fused: set[tuple[int, str]] = set()
    twice: set[tuple[int, str]] = set()
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        known = facts.main | facts.scopes[scope]
        view = _Graph(graph, known)
        for node in graph.node:
            result = known.get(node.output[0]) if node.output else None
            if result is None or result.dtype != TensorProto.FLOAT16:
                continue
            name = node.output[0]
            if is_plain_transpose(node):
                (exact if view.is_kept(node) else twice).add((scope, name))
            if node.op_type not in PRODUCTS:
                continue
            if view.is_second(node):
                fused.add((scope, name))
            unrounded = view.scores(node) or view.epilogue(node)
            if unrounded or view.ends_in_fp32(node):
                summed.add((scope, name))
            exact.update((scope, tensor) for tensor in unrounded)
    return Epilogues(summed, exact, fused, twice)


class _Graph:
    """One graph with what reads and what writes each tensor."""

    def __init__(self, graph: GraphProto, known: Mapping[str, TensorFacts]) -> None:
        self.known = known
        self.readers: dict[str, list[NodeProto]] = {}
        self.producers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in graph.output}
        self.weights = {tensor.name for tensor in graph.initializer}
        self.weights |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
        self.taken = self._taken(graph)

    def is_second(self, node: NodeProto) -> bool:
        """Whether the node multiplies what a Softmax computed by another computed tensor."""
        return self._of_activations(node) and any(map(self._is_softmax, node.input[:2]))

    def _is_softmax(self, name: str) -> bool:
        node = self.producers.get(name)
        while node is not None and node.op_type == "Cast":
            node = self.producers.get(node.input[0])
        return node is not None and node.op_type == "Softmax"

    def scores(self, node: NodeProto) -> list[str]:
        """The product and what scales it in FP16, if the Softmax of their attention is FP32."""
        if not self._of_activations(node):
            return []
        unrounded, reader = [node.output[0]], self._only_reader(node.output[0])
        while reader is not None and self._scales(reader):
            unrounded.append(reader.output[0])
            reader = self._only_reader(reader.output[0])
        if reader is None or not casts_to(reader, TensorProto.FLOAT):
            return []
        reader = self._only_reader(reader.output[0])
        while reader is not None and self._scales(reader):
            reader = self._only_reader(reader.output[0])
        return unrounded if reader is not None and self._feeds_second(reader) else []

    def _feeds_second(self, node: NodeProto) -> bool:
        """Whether it is a Softmax whose result is cast to FP16 for a product of computed tensors."""
        cast = self._only_reader(node.output[0]) if node.op_type == "Softmax" else None
        if cast is None or not casts_to(cast, TensorProto.FLOAT16):
            return False
        second = self._only_reader(cast.output[0])
        return second is not None and self._of_activations(second)

    def _scales(self, node: NodeProto) -> bool:
        return node.op_type in SCALING and any(name in self.weights for name in node.input)

    def _only_reader(self, name: str) -> NodeProto | None:
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def epilogue(self, node: NodeProto) -> list[str]:
        """The product, if all that reads it is an FP32 epilogue and its data has no other projection."""
        ends = list(self._behind(self._widened(node)))
        named = {name for name, _ in ends}
        reached = bool(ends) and named.isdisjoint(self.outputs)
        meant = reached and all(self._may_end(reader) for _, reader in ends)
        free = meant and node.output[0] not in self.taken and self._stands_alone(node)
        return [node.output[0]] if free else []

    def is_kept(self, node: NodeProto) -> bool:
        """Whether a ConvTranspose is left unrounded for what alone reads it, elementwise and in FP32."""
        widened = self._widened(node)
        readers = [reader for name in widened for reader in self.readers.get(name, ())]
        inside = self.outputs.isdisjoint(widened)
        return bool(readers) and inside and all(reader.op_type in ELEMENTWISE for reader in readers)

    def _may_end(self, reader: NodeProto) -> bool:
        """Whether a product sums in FP32 for this reader in FP32: an elementwise one, or a norm's view."""
        if reader.op_type in ELEMENTWISE:
            return True
        read = self.readers.get(reader.output[0], []) if reader.op_type in LAYOUTS else []
        return bool(read) and all(node.op_type in ROW_NORMS for node in read)

    def _taken(self, graph: GraphProto) -> set[str]:
        """The products whose FP32 operators another kernel takes, and that are no outputs of the graph.

        An operator belongs to the last product that it needs: before that it cannot run.
        """
        last: dict[str, tuple[int, str]] = {}
        taken: set[str] = set()
        for place, node in enumerate(graph.node):
            needed = max((last[name] for name in node.input if name in last), default=None)
            if node.op_type in PRODUCTS:
                last[node.output[0]] = (place, node.output[0])
            elif needed is None:
                continue
            elif node.op_type == "Split" or node.op_type in ELEMENTWISE or self._keeps_fp32(node):
                last.update((name, needed) for name in node.output)
            elif self._takes(node) and self.outputs.isdisjoint(node.input):
                taken.add(needed[1])
        return taken

    def _takes(self, node: NodeProto) -> bool:
        """Whether the kernel of the node computes what is elementwise before it: a norm's, a Transpose's.

        A Transpose alone does that where it needs no view of the product, which has two axes in TensorRT.
        """
        if node.op_type != "Transpose":
            return reduces(node)
        found = self.known.get(node.input[0])
        flat = found is not None and found.shape is not None and all(d == 1 for d in found.shape[:-2])
        return flat and self._only_reader(node.input[0]) is node

    def _keeps_fp32(self, node: NodeProto) -> bool:
        """Whether it is a Cast at which no kernel ends.

        That is one up, one down that Casts up alone read, or one down for a norm or a Transpose that alone
        reads the result.
        """
        if not casts_to(node, TensorProto.FLOAT16):
            return casts_to(node, TensorProto.FLOAT)
        readers = self.readers.get(node.output[0], [])
        if readers and all(casts_to(reader, TensorProto.FLOAT) for reader in readers):
            return True
        alone = self._only_reader(node.input[0]) is node
        return alone and all(reader.op_type in ROW_NORMS | {"Transpose"} for reader in readers)

    def ends_in_fp32(self, node: NodeProto) -> bool:
        """Whether Casts to FP32 that are outputs are all that reads the product."""
        widened = self._widened(node)
        last = [name in self.outputs and not self.readers.get(name) for name in widened]
        shared = self._projects(node) and not self._stands_alone(node)
        return bool(last) and all(last) and not shared

    def _widened(self, node: NodeProto) -> Sequence[str]:
        """What Casts to FP32 make of the product; empty if anything else reads it."""
        name = node.output[0]
        casts = [] if name in self.outputs else self.readers.get(name, [])
        widens = all(casts_to(cast, TensorProto.FLOAT) for cast in casts)
        return [cast.output[0] for cast in casts] if widens else []

    def _behind(self, names: Sequence[str]) -> Iterator[tuple[str, NodeProto]]:
        """The readers of tensors, seen through Split."""
        for name in names:
            for reader in self.readers.get(name, ()):
                if reader.op_type == "Split":
                    yield from self._behind(reader.output)
                else:
                    yield name, reader

    def _stands_alone(self, node: NodeProto) -> bool:
        """Whether it is the only product of what it reads with a constant weight."""
        data = [name for name in node.input[:2] if name not in self.weights]
        return len(data) == 1 and sum(map(self._projects, self.readers[data[0]])) == 1

    def _projects(self, node: NodeProto) -> bool:
        return node.op_type in PRODUCTS and any(name in self.weights for name in node.input[:2])

    def _of_activations(self, node: NodeProto) -> bool:
        return node.op_type == "MatMul" and self.weights.isdisjoint(node.input)
