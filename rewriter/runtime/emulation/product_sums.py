"""How TensorRT sums and rounds each FP16 product of a model, depending on the nodes around it.

`rewriter.target.fusion` has the rules about kernels; attention is added here
(docs/accuracy.md#how-close-the-emulation-comes).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphView, casts_to, is_op
from rewriter.ir.graph.match import produced, walk_down, walk_up
from rewriter.ir.graph.ops import ELEMENTWISE, PRODUCTS, REDUCING, ROW_NORMS, SCALING
from rewriter.ir.model import Model, walk_graphs
from rewriter.target import fusion


class TypedGraph(GraphView):
    """One graph that has its types: Casts are nodes of it, and FP32 readers are those that read a Cast."""

    def source(self, tensor: str) -> str:
        return tensor

    def is_constant(self, tensor: str) -> bool:
        return self.is_initializer(tensor) or is_op(self.producer(tensor), "Constant")

    def readers(self, tensor: str) -> list[tuple[str, NodeProto]]:
        return [(tensor, node) for node in self.consumers(tensor)]

    def widened(self, node: NodeProto) -> list[str]:
        """The results of Casts to FP32, if nothing else reads the node's result; else none."""
        name = node.output[0]
        casts = [] if self.is_output(name) else self.consumers(name)
        widens = all(casts_to(cast, TensorProto.FLOAT) for cast in casts)
        return [cast.output[0] for cast in casts] if widens else []

    def fp32_readers(self, names: Iterable[str]) -> Iterator[tuple[str, NodeProto]]:
        """The readers of tensors, seen through Split."""
        for name in names:
            for reader in self.consumers(name):
                if reader.op_type == "Split":
                    yield from self.fp32_readers(reader.output)
                else:
                    yield name, reader

    def products_taken_over(self) -> set[str]:
        """Products that sum in FP16 for a norm or Transpose (docs/accuracy.md#norms-and-transposes)."""
        nodes = self.nodes  # a list that is made anew
        results = fusion.kernel_results(nodes, lambda n: n.op_type in PRODUCTS, self._continues_in_fp32)
        taken = set()
        for node in nodes:
            fed = [results[name] for name in node.input if name in results]
            ends = results.keys().isdisjoint(node.output) and self._outputs.isdisjoint(node.input)
            if fed and ends and self._takes(node):
                taken.add(nodes[max(fed)].output[0])
        return taken

    def _takes(self, node: NodeProto) -> bool:
        """True if the node's kernel computes the elementwise operators before it: a norm's, a Transpose's.

        A Transpose does so if it is their only reader and needs no view of the product, which has two axes.
        """
        if node.op_type != "Transpose":
            return node.op_type in REDUCING
        shape = self.shape(node.input[0])
        flat = shape is not None and all(d == 1 for d in shape[:-2])
        return flat and self.only_consumer(node.input[0]) is node

    def _continues_in_fp32(self, node: NodeProto) -> bool:
        """True if no kernel ends at the node: elementwise, a Split, and some Casts.

        These are a Cast to FP32, and a Cast to FP16 that only Casts back read. A Cast to FP16 for a norm or
        Transpose is one, too, if nothing else reads the FP32 tensor.
        """
        if node.op_type == "Split" or node.op_type in ELEMENTWISE:
            return True
        if not casts_to(node, TensorProto.FLOAT16):
            return casts_to(node, TensorProto.FLOAT)
        readers = self.consumers(node.output[0])
        if readers and all(casts_to(reader, TensorProto.FLOAT) for reader in readers):
            return True
        alone = self.only_consumer(node.input[0]) is node
        return alone and all(reader.op_type in ROW_NORMS | {"Transpose"} for reader in readers)


@dataclass
class ProductSums:
    """Results of FP16 products, by how these sum: each as the index of its scope and its name."""

    summed: set[tuple[int, str]] = field(default_factory=set)  # products that sum in FP32
    # tensors that are not rounded: products of these, and the scaled scores of attention
    exact: set[tuple[int, str]] = field(default_factory=set)
    fused: set[tuple[int, str]] = field(default_factory=set)  # the second product of attention


def find_product_sums(model: Model) -> ProductSums:
    """How the products of a model sum; the model has its final types."""
    sums, facts = ProductSums(), model.facts()
    for scope, proto in enumerate(walk_graphs(model.proto.graph)):
        graph = TypedGraph(model, proto, facts.main | facts.scopes[scope])
        taken = graph.products_taken_over()
        for node in graph.nodes:
            name = next(iter(node.output), "")
            if graph.dtype(name) != TensorProto.FLOAT16 or node.op_type not in PRODUCTS:
                continue
            if fusion.multiplies_computed(graph, node) and any(_is_softmax(graph, t) for t in node.input[:2]):
                sums.fused.add((scope, name))
            unrounded = _unrounded_scores(graph, node)
            ends = list(graph.fp32_readers(graph.widened(node)))
            if not unrounded and name not in taken and fusion.has_fp32_epilogue(graph, node, ends):
                unrounded = [name]
            if unrounded or _is_fp32_output(graph, node):
                sums.summed.add((scope, name))
            sums.exact.update((scope, tensor) for tensor in unrounded)
    return sums


def _is_fp32_output(graph: TypedGraph, node: NodeProto) -> bool:
    """True if Casts to FP32 that are outputs are all that reads the product."""
    widened = graph.widened(node)
    last = bool(widened) and all(graph.is_output(name) and not graph.readers(name) for name in widened)
    return last and (fusion.projected(graph, node) is None or fusion.stands_alone(graph, node))


def _is_softmax(graph: TypedGraph, name: str) -> bool:
    """True if a Softmax computes the tensor, with Casts after it or without."""
    _, start = walk_up(graph, name, lambda node: node.op_type == "Cast")
    return produced(graph, start, "Softmax") is not None


def _unrounded_scores(graph: TypedGraph, node: NodeProto) -> list[str]:
    """Attention's first product and what scales it in FP16, if the Softmax is FP32; else nothing."""
    if not fusion.multiplies_computed(graph, node):
        return []
    unrounded = [node.output[0], *_scaled(graph, node.output[0])]
    cast = graph.only_consumer(unrounded[-1])
    if cast is None or not casts_to(cast, TensorProto.FLOAT):
        return []
    softmax = graph.only_consumer([cast.output[0], *_scaled(graph, cast.output[0])][-1])
    return unrounded if softmax is not None and _feeds_second(graph, softmax) else []


def _scaled(graph: TypedGraph, tensor: str) -> list[str]:
    """The results of scaling a tensor by constants, one after the other, if nothing else reads them."""
    chain, _ = walk_down(
        graph, tensor, lambda n: n.op_type in SCALING and any(map(graph.is_constant, n.input))
    )
    return [node.output[0] for node in chain]


def _feeds_second(graph: TypedGraph, node: NodeProto) -> bool:
    """True for a Softmax whose result is cast to FP16 for a product of computed tensors."""
    cast = graph.only_consumer(node.output[0]) if node.op_type == "Softmax" else None
    if cast is None or not casts_to(cast, TensorProto.FLOAT16):
        return False
    second = graph.only_consumer(cast.output[0])
    return second is not None and fusion.multiplies_computed(graph, second)
