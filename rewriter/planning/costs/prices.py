"""What a plan costs: the costs of its nodes, and of what they do to the kernels round them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import fsum

from rewriter.plan import Plan
from rewriter.planning.planner import SEARCHED


@dataclass(frozen=True)
class Attention:
    """Two products of computed tensors with a Softmax between: one kernel, if it is let.

    Attributes:
        nodes: Keys of what breaks it in FP32: the products, what scales Q and K, and the biases of
            projections that are merged into one product.
        inside: Keys of what lies between the products, parts of the kernel.
        us: What it takes longer when it is broken.
    """

    nodes: frozenset[str]
    inside: frozenset[str]
    us: float


@dataclass(frozen=True)
class Behind:
    """What is elementwise behind a Conv: a part of its kernel.

    Attributes:
        convs: Keys of the Convs that it reads.
        nodes: Keys of what it reads that is behind Convs itself.
        us: What it takes in FP32 behind one in FP16: the time of a kernel of its own, or of what a
            ConvTranspose's kernel then has to read and write.
    """

    convs: frozenset[str]
    nodes: frozenset[str]
    us: float

    def split_from(self, key: str, fp32: AbstractSet[str]) -> str | None:
        """Whose kernel it is no part of any more, as an FP32 node with that key; None: it costs no kernel."""
        if self.convs:
            return min(self.convs - fp32, default=None)
        return None if self.nodes & fp32 else key


@dataclass(frozen=True)
class Shared:
    """A result that several nodes read.

    Attributes:
        readers: Keys of the nodes.
        us: The time of a Cast, a kernel of its own where some of them want FP32 and others FP16.
    """

    readers: frozenset[str]
    us: float


@dataclass(frozen=True)
class Prices:
    """The estimated time of every node of the main graph, by key, in microseconds.

    Attributes:
        base: In FP16.
        own: On top in FP32, of the node's kernel alone.
        attentions: What FP32 in their nodes costs, once for each.
        casts: For each matrix operator its computed inputs, with the keys of the nodes that make them (""
            for inputs of the model) and the time of a Cast to FP32: TensorRT fuses none before a product.
        behind: What is elementwise behind Convs. In FP32 behind one in FP16 it is a kernel, with all that
            follows it there; behind a ConvTranspose of stride 1 it is not.
        shared: What several nodes read, by the key of the node that makes it.
        extra: On top in FP32 when the node is the only one: all of these; with what is behind Convs, a Cast
            of a shared result, which it is seldom without.
    """

    base: Mapping[str, float]
    own: Mapping[str, float]
    attentions: tuple[Attention, ...] = ()
    casts: Mapping[str, tuple[tuple[str, str, float], ...]] = field(default_factory=dict)
    behind: Mapping[str, Behind] = field(default_factory=dict)
    shared: Mapping[str, Shared] = field(default_factory=dict)
    extra: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        extra = {key: us + sum(cast[2] for cast in self.casts.get(key, ())) for key, us in self.own.items()}
        for attention in self.attentions:
            for key in attention.nodes & extra.keys():
                extra[key] += attention.us
        for key, behind in self.behind.items():
            extra[key] += behind.us + (self.shared[key].us if key in self.shared else 0.0)
        object.__setattr__(self, "extra", extra)

    def total_us(self, plan: Plan) -> float:
        """One inference under `plan`, to the last bit whatever the order of its nodes.

        What the rules keep in FP32 behind Convs begins kernels, such as norms: it costs no more.
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
        """Of kernels that nodes of a search begin because they alone are FP32."""
        split: dict[str, float] = {}
        for key in searched & self.behind.keys():
            first = self.behind[key].split_from(key, kept)
            if first is not None:
                split[first] = max(split.get(first, 0.0), self.behind[key].us)
        return fsum(split.values())

    def _cast_us(self, searched: AbstractSet[str], kept: AbstractSet[str]) -> float:
        """Of Casts that are kernels because nodes of a search are FP32, or read FP32."""
        casts = []
        for key in kept & self.shared.keys():
            wide = self.shared[key].readers & kept
            if wide and wide != self.shared[key].readers and not searched.isdisjoint({key, *wide}):
                casts.append(self.shared[key].us)
        return fsum(casts)
