"""Defines a pass: a frozen dataclass whose fields are its options, and the events that it reports."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, display_name
from rewriter.ir.graph.weights import ChannelKey
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import NodePatterns, Plan, Precision, Range
from rewriter.target import Target


@dataclass(frozen=True)
class Change:
    """Something that a pass did. `node` is the node (or tensor) as the user knows it."""

    node: str
    what: str


@dataclass(frozen=True)
class Rescaled(Change):
    """A change after which tensors hold their values times a power of two, and nothing else is new."""

    exponents: tuple[tuple[int, str, int], ...] = ()
    """Index of the scope (the order of `Facts.scopes`), tensor and exponent."""


@dataclass(frozen=True)
class Clamped(Change):
    """A constant that came into range: its largest entry before and after."""

    before: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """Something that a pass recognised and did not change, with the reason."""

    node: str
    reason: str


Event = Change | Refusal


def refused(node: NodeProto, kept: str, reason: str | None) -> Refusal | None:
    """Returns the refusal to change a node, with what stays as it is; None if there is no reason."""
    return Refusal(display_name(node), f"{kept}: {reason}") if reason else None


@dataclass(frozen=True)
class Exactness:
    """How closely a pass keeps the model's FP32 results on ONNX Runtime, optimisations off."""

    tolerance: float  # largest relative L2 difference of an output; 0 means bit-equal
    source: str  # where the figure comes from


EXACT = Exactness(0.0, "the arithmetic is the same, operation for operation")


class Stage(IntEnum):
    """When a pass runs, and the data that it reads. A pipeline goes through the stages in this order.

    Passes of `STRUCTURE` need nothing but the graph and may run anywhere.
    """

    STRUCTURE = 0  # reads only the graph
    RANGES = 1  # reads `Context.ranges`: `fix` measures before the first such pass
    LOWERING = 2  # carries the plan out: `mixed-precision`


@dataclass(frozen=True)
class Requires:
    """Conditions for a pass to run.

    Attributes:
        opset: Lowest default operator set of the model. Below it the driver reports what the pass would
            have changed as refusals.
        precisions: Precisions that a preset's pipeline runs the pass for.
    """

    opset: int = 0
    precisions: frozenset[Precision] = frozenset({"fp32", "fp16", "bf16"})

    def refusal(self, opset: int) -> str | None:
        """Reason why a model of that operator set stays unchanged; None if its operator set will do."""
        if opset >= self.opset:
            return None
        return f"it needs opset {self.opset}, the model has {opset}: run upgrade-opset"


Shared = dict[tuple[str, int, bytes], Array]
"""Rounded weights by name, type and rounding errors of the bias."""


@dataclass(frozen=True)
class Context:
    """The settings that all passes of a run share; a pass's own options are its fields."""

    opset: int = 17  # the highest default operator set of the result
    target: Target = field(default_factory=Target)
    plan: Plan | None = None  # types of nodes and tensors; None until ranges were measured
    ranges: Mapping[tuple[int, str], Range] | None = None  # None until a pass needs them
    means: Mapping[ChannelKey, Array] = field(default_factory=dict)  # of channels, by tensor and axis
    kept: NodePatterns = field(default_factory=NodePatterns)  # in FP32, by option or in a plan
    sample: Mapping[str, Array] = field(default_factory=dict)  # its shapes are dynamic sizes
    rounded: Shared | None = None  # weights rounded by means, which plans share; None: each its own


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite with a name. The class docstring says why it exists; its fields are its options.

    `example` is a small graph in the syntax of onnx.parser, with a minus before lines that the pass removes
    and a plus before new ones (`sides`). The catalogue shows it, and the tests run it: the operators of the
    new graph come out.
    What an `imported` pass breaks of the contract is rolled back and reported as a refusal, instead of being
    raised as a defect of ours. `refittable` is False for a pass that merges, folds, scales or rearranges
    weights, which TensorRT then cannot refit by their names.
    """

    name: ClassVar[str]  # as in a pipeline's text; by default `my-pass` for a class MyPass
    exactness: ClassVar[Exactness] = EXACT  # the tests and `fix` hold it to that
    example: ClassVar[str]
    example_options: ClassVar[Mapping[str, Any]] = {}
    imported: ClassVar[bool] = False  # True when a library rewrites the graph
    stage: ClassVar[Stage] = Stage.STRUCTURE
    requires: ClassVar[Requires] = Requires()
    keeps_signature: ClassVar[bool] = True  # False: it changes types of inputs or outputs
    stands_alone: ClassVar[bool] = False  # True for a pass that no preset runs: users name it
    refittable: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


class GraphPass(Pass):
    """A pass that works on one graph at a time; the driver calls it for every subgraph, too."""

    @abstractmethod
    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        """Edit `graph` through the editor and yield what was done and what was declined."""


class WeightPass(GraphPass):
    """A pass that replaces weights, but no quantised ones, and none of nodes that the user keeps in FP32.

    Its page in the catalogue says so, and that the new weights stay in memory until they are lowered.
    """

    refittable = False


class ModelPass(Pass):
    """A pass that needs the whole model."""

    @abstractmethod
    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        """Change `model` in place and yield what was done and what was declined.

        After edits of `model.proto` without a GraphEditor, call `model.mark_edited()`: its facts are old.
        """
