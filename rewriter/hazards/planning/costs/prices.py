"""The price of a plan: the costs of its nodes, and of what their types do to the kernels around them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import fsum

from rewriter.hazards.planning.planner import SEARCHED
from rewriter.ir.plan import Plan


@dataclass(frozen=True)
class Attention:
    """Two products of computed tensors with a Softmax between: one kernel, if types allow it.

    Attributes:
        nodes: Keys of the nodes that break it in FP32: its products, the scaling of Q and K, and the biases
            of projections that TensorRT merges into one product.
        inside: Keys of the nodes between the products, which are parts of the kernel.
        us: The extra time of the broken attention.
    """

    nodes: frozenset[str]
    inside: frozenset[str]
    us: float


@dataclass(frozen=True)
class ConvEpilogue:
    """An elementwise node in the kernel of a Conv.

    Attributes:
        convs: Keys of the Convs that it reads.
        nodes: Keys of the nodes that it reads which are epilogues of Convs, too.
        us: The cost of FP32 after an FP16 Conv: a kernel of its own, or the larger tensors of a
            ConvTranspose's kernel.
    """

    convs: frozenset[str]
    nodes: frozenset[str]
    us: float

    def split_from(self, key: str, fp32: AbstractSet[str]) -> str | None:
        """The node whose kernel loses this one, the FP32 node `key`; None if that costs no kernel."""
        if self.convs:
            return min(self.convs - fp32, default=None)
        return None if self.nodes & fp32 else key


@dataclass(frozen=True)
class SharedResult:
    """A result with several consumers.

    Attributes:
        readers: Keys of the consumers.
        us: The time of a Cast: a kernel of its own if some consumers are FP32 and others FP16.
    """

    readers: frozenset[str]
    us: float


@dataclass(frozen=True)
class Prices:
    """The estimated time of every node of the main graph, by key, in microseconds.

    Attributes:
        base: In FP16.
        own: Extra time in FP32 of the node's own kernel.
        attentions: Charged once each, if one of their nodes is FP32.
        casts: The computed inputs of each matrix operator: name, key of the producer ("" for an input of
            the model) and time of a Cast to FP32. TensorRT fuses no Cast before a product.
        conv_epilogues: FP32 after an FP16 Conv is a kernel of its own, with all FP32 nodes that follow.
            After a ConvTranspose of stride 1 it stays in the kernel.
        shared: Results with several consumers, by the key of their producer.
        extra: Extra time in FP32 if the node is the only FP32 node: all of the above, together with the Cast
            of a shared result, which a Conv's epilogue nearly always needs.
    """

    base: Mapping[str, float]
    own: Mapping[str, float]
    attentions: tuple[Attention, ...] = ()
    casts: Mapping[str, tuple[tuple[str, str, float], ...]] = field(default_factory=dict)
    conv_epilogues: Mapping[str, ConvEpilogue] = field(default_factory=dict)
    shared: Mapping[str, SharedResult] = field(default_factory=dict)
    extra: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        extra = {key: us + sum(cast[2] for cast in self.casts.get(key, ())) for key, us in self.own.items()}
        for attention in self.attentions:
            for key in attention.nodes & extra.keys():
                extra[key] += attention.us
        for key, epilogue in self.conv_epilogues.items():
            extra[key] += epilogue.us + (self.shared[key].us if key in self.shared else 0.0)
        object.__setattr__(self, "extra", extra)

    def total_us(self, plan: Plan) -> float:
        """The time of one inference under `plan`, bit for bit the same in any order of the plan's nodes.

        FP32 nodes of the rules after Convs, such as norms, begin kernels anyway: they cost nothing extra.
        """
        kept = plan.fp32
        total = fsum(self.base.values()) + fsum(self.own.get(key, 0.0) for key in kept)
        total += fsum(attention.us for attention in self.attentions if attention.nodes & kept)
        cast = {
            tensor: us
            for key in kept & self.casts.keys()
            for tensor, producer, us in self.casts[key]
            if producer not in kept
        }
        searched = {d.key for d in plan.decisions if d.rule == SEARCHED} & kept
        return total + fsum(cast.values()) + self._split_us(searched, kept) + self._cast_us(searched, kept)

    def _split_us(self, searched: AbstractSet[str], kept: AbstractSet[str]) -> float:
        """Time of the kernels that exist only because nodes of a search are FP32."""
        split: dict[str, float] = {}
        for key in searched & self.conv_epilogues.keys():
            first = self.conv_epilogues[key].split_from(key, kept)
            if first is not None:
                split[first] = max(split.get(first, 0.0), self.conv_epilogues[key].us)
        return fsum(split.values())

    def _cast_us(self, searched: AbstractSet[str], kept: AbstractSet[str]) -> float:
        """Time of the Casts that are kernels because nodes of a search are FP32, or read FP32."""
        casts = []
        for key in kept & self.shared.keys():
            wide = self.shared[key].readers & kept
            if wide and wide != self.shared[key].readers and not searched.isdisjoint({key, *wide}):
                casts.append(self.shared[key].us)
        return fsum(casts)
