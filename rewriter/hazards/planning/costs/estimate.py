"""Estimates the prices of a model from its graph: what is fused, and who reads what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from onnx import NodeProto

from rewriter.hazards.planning.costs.node_times import (
    BYTES_PER_US,
    LOW_US,
    Shapes,
    base_us,
    elements,
    is_attention,
    more_us,
    products,
    terms,
)
from rewriter.hazards.planning.costs.prices import Attention, ConvEpilogue, Prices, SharedResult
from rewriter.ir.base import Target
from rewriter.ir.graph.fusion import is_plain_transpose, kernel_results
from rewriter.ir.graph.ops import CHEAP, CONVOLUTIONS, SCALING, SOFTMAX, VIEWS
from rewriter.ir.model import Model
from rewriter.ir.model.facts import Facts
from rewriter.ir.plan import node_key

BROKEN_ATTENTION_US = 16.0
"""Least extra time of an attention that is several kernels: 13 us for each of the 12 in a T5 encoder with
FP32 products, 18.5 us in a ViT with FP32 biases of Q, K and V (source: `node_times`)."""

BROKEN_US = 2.55e-8
"""Its extra time for each multiply-add of the two products: 332 us for 8 x 12 x 1024 x 1024 x 64."""

PROBED_PRODUCTS = 2.0 * 12 * 1024 * 1024 * 64
"""Multiply-adds of the attention of probe `attention-islands`."""

CAST_BYTES = 6.0
"""Bytes that a Cast between FP16 and FP32 reads and writes for each element. An FP32 epilogue after an FP16
Conv moves about as much, and so does that of a ConvTranspose on top of its FP16 traffic."""

_FUSED = CHEAP - VIEWS
"""Parts of a product's kernel, as the recorded times were fitted; `ELEMENTWISE` is narrower."""


def priced(model: Model, facts: Facts, target: Target | None = None) -> Prices:
    """The prices of a model; the attention figures of `rewriter probe` for the target are used."""
    return _Pricing(model, facts, target or Target()).prices()


def all_terms(model: Model, facts: Facts) -> Iterator[dict[str, float]]:
    """The input of a fit: `node_times.terms` of every node of the main graph that can be a kernel."""
    return _Pricing(model, facts, Target()).terms()


class _Pricing:
    """Looks at the main graph once."""

    def __init__(self, model: Model, facts: Facts, target: Target) -> None:
        graph = model.proto.graph
        self._target = target
        self._products: set[str] = set()  # of attentions
        self._shapes: Shapes = {name: found.shape for name, found in facts.main.items()}
        self._constants = {t.name for t in graph.initializer}
        self._constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
        self._nodes = {node_key(0, n): n for n in graph.node if n.op_type != "Constant" and any(n.output)}
        weighted = (n for n in self._nodes.values() if self._weighted(n))
        self._projections = Counter(tensor for n in weighted for tensor in self._computed(n))
        self._keys = {tensor: key for key, n in self._nodes.items() for tensor in n.output if tensor}

        self._fused = self._find_fused()
        self._attentions = [self._attention(*parts) for parts in self._attention_parts()]
        self._inside = {key for attention in self._attentions for key in attention.inside}

    def terms(self) -> Iterator[dict[str, float]]:
        for key, node in self._nodes.items():
            if key not in self._inside:
                yield terms(node, self._shapes, self._constants, attention=key in self._products)

    def prices(self) -> Prices:
        found, inside = self._attentions, self._inside
        base = {
            key: 0.0
            if key in inside
            else base_us(node, self._shapes, self._constants, attention=key in self._products)
            for key, node in self._nodes.items()
        }
        free = inside | self._products | self._fused
        own = {
            key: 0.0 if key in free else more_us(node, self._shapes, self._constants)
            for key, node in self._nodes.items()
        }
        casts = {key: tuple(self._casts(node)) for key, node in self._nodes.items() if self._weighted(node)}
        shared = dict(self._shared())
        return Prices(base, own, tuple(found), casts, dict(self._conv_epilogues()), shared)

    def _producer(self, tensor: str) -> NodeProto | None:
        key = self._keys.get(tensor)
        return self._nodes[key] if key is not None else None

    def _key(self, node: NodeProto) -> str:
        return node_key(0, node)

    def _weighted(self, node: NodeProto) -> bool:
        return bool(products(node, self._shapes)[0]) and not is_attention(node, self._constants)

    def _computed(self, node: NodeProto) -> list[str]:
        return [name for name in node.input if name and name not in self._constants]

    def _casts(self, node: NodeProto) -> Iterator[tuple[str, str, float]]:
        for tensor in self._computed(node):
            yield tensor, self._keys.get(tensor, ""), self._kernel_us(tensor)

    def _find_fused(self) -> set[str]:
        """Keys of the nodes that the kernel of a product computes."""
        results = kernel_results(self._nodes.values(), self._weighted, lambda n: n.op_type in _FUSED)
        return {
            key
            for key, node in self._nodes.items()
            if node.op_type in _FUSED and not results.keys().isdisjoint(node.output)
        }

    def _conv_epilogues(self) -> Iterator[tuple[str, ConvEpilogue]]:
        """The fused nodes that follow a Conv, with nothing but such nodes between."""
        found: set[str] = set()
        for key, node in self._nodes.items():
            if key not in self._fused:
                continue
            producers = [p for p in map(self._producer, self._computed(node)) if p is not None]
            convs = frozenset(self._key(p) for p in producers if p.op_type in CONVOLUTIONS)
            nodes = frozenset(map(self._key, producers)) & found
            if convs or nodes:
                found.add(key)
                transposes = [p for p in producers if is_plain_transpose(p)]
                fused = bool(transposes) and len(transposes) == len(convs)
                us = self._moving_us(node.output[0]) if fused else self._kernel_us(node.output[0])
                yield key, ConvEpilogue(convs, nodes, us)

    def _shared(self) -> Iterator[tuple[str, SharedResult]]:
        """The results with several consumers."""
        readers: dict[str, set[str]] = {}
        for key, node in self._nodes.items():
            for producer in map(self._keys.get, self._computed(node)):
                if producer is not None:
                    readers.setdefault(producer, set()).add(key)
        for key, found in readers.items():
            if len(found) > 1:
                yield key, SharedResult(frozenset(found), self._kernel_us(self._nodes[key].output[0]))

    def _kernel_us(self, tensor: str) -> float:
        """Time of a kernel that reads a tensor and writes it in another type."""
        return LOW_US["kernel"] + self._moving_us(tensor)

    def _moving_us(self, tensor: str) -> float:
        return CAST_BYTES * elements(tensor, self._shapes) / BYTES_PER_US

    # -- attention ------------------------------------------------------------------------------

    def _attention_parts(self) -> Iterator[tuple[NodeProto, NodeProto, list[NodeProto]]]:
        """Each product PV with its QK^T and the nodes between, one of which is a Softmax."""
        for node in self._nodes.values():
            if is_attention(node, self._constants):
                between = list(self._walk(node.input[0], CHEAP))
                if any(n.op_type in SOFTMAX for n in between):
                    before = [p for n in between for p in map(self._producer, n.input) if p is not None]
                    scores = next((p for p in before if is_attention(p, self._constants)), None)
                    if scores is not None:
                        yield node, scores, between

    def _attention(self, values: NodeProto, scores: NodeProto, between: list[NodeProto]) -> Attention:
        scaling = VIEWS | SCALING | {"Add"}
        fed = [n for t in (*scores.input, values.input[1]) for n in self._walk(t, scaling)]
        breaking = [values, scores]
        breaking += [n for n in fed if self._unfused_scale(n) or self._merged_bias(n)]
        if self._target.answers.get("attention-islands") == "none":
            breaking += [n for n in between if n.op_type in SOFTMAX]
        self._products |= {self._key(values), self._key(scores)}
        count = sum(products(node, self._shapes)[1] for node in (values, scores))
        keys = frozenset(map(self._key, breaking))
        return Attention(keys, frozenset(map(self._key, between)), self._broken_us(count))

    def _broken_us(self, count: float) -> float:
        """Extra time of an attention of so many multiply-adds that is several kernels."""
        if self._target.answers.get("attention-islands") == "any":
            return 0.0
        seen = self._target.figures.get("attention-islands", {})
        fused, broken = seen.get("FP16", 0.0), seen.get("FP32 QK^T and Softmax", 0.0)
        rate = (broken - fused) / PROBED_PRODUCTS if fused and broken > fused else BROKEN_US
        return max(BROKEN_ATTENTION_US, rate * count)

    def _unfused_scale(self, node: NodeProto) -> bool:
        """True for a scaling that is not a part of a product's kernel."""
        return node.op_type in SCALING and self._key(node) not in self._fused

    def _merged_bias(self, node: NodeProto) -> bool:
        """True for the bias of one of several projections of one tensor, which TensorRT merges."""
        product = next((p for p in map(self._producer, node.input) if p is not None), None)
        if node.op_type != "Add" or product is None or not self._weighted(product):
            return False
        return any(self._projections[tensor] > 1 for tensor in self._computed(product))

    def _walk(self, tensor: str, through: AbstractSet[str]) -> Iterator[NodeProto]:
        """The nodes that lead to a tensor, as long as their operators are in `through`."""
        stack, seen = [tensor], set[str]()
        while stack:
            node = self._producer(stack.pop())
            if node is not None and node.op_type in through and (key := self._key(node)) not in seen:
                seen.add(key)
                yield node
                stack.extend(self._computed(node))
