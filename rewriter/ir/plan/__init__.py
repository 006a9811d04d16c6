"""A plan is data: which nodes stay in FP32, why, and on what evidence; `plan_file` has its file.

`NodePatterns` are nodes that the user names.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rewriter.base.errors import nearest
from rewriter.base.text import Row, Summary, count, rows_of

if TYPE_CHECKING:
    from onnx import NodeProto

Precision = Literal["fp32", "fp16", "bf16"]
Epilogues = Literal["none", "own", "all"]
InputsOutputs = str
"""Types of inputs and outputs: a type for all (`fp16`), types by pattern of the name (`past_*=fp16`), or both
(`fp16,logits=fp32`). `keep` is the model's own."""

SEARCHED = "tolerance"  # rule of a node that a search keeps in FP32

IO_TYPES = ("keep", "fp32", "fp16", "bf16")
PORT_TYPES = ("fp32", "fp16", "bf16", "int64", "int32", "int8", "uint8", "bool")
Repair = Literal["fp32", "bf16"]


def io_parts(io: InputsOutputs) -> tuple[tuple[str, str], ...]:
    """The patterns of `io`, each with its type, "" where no pattern fits; ValueError: an unknown type."""
    parts = [part.strip().rpartition("=") for part in io.split(",")]
    for _, _, name in parts:
        if name not in IO_TYPES:
            raise ValueError(f"{name!r} is no type: {nearest(name, IO_TYPES)} (by name: NAME=fp16,NAME=fp32)")
    return tuple((pattern, name) for pattern, _, name in parts)


def io_type(io: InputsOutputs, tensor: str) -> str:
    """The type of an input or output: the type of the first pattern that fits, or else the one for all."""
    parts = io_parts(io)
    fitting = (name for pattern, name in parts if pattern and fnmatchcase(tensor, pattern))
    return next(fitting, next((name for pattern, name in parts if not pattern), "keep"))


_APPENDED = ("/fp32", "/fp16", "/bf16", "/fp64")  # as a change of types names new tensors


def logical_name(name: str) -> str:
    """The name of a tensor without the type that is appended where a Cast writes a graph output."""
    return name.rpartition("/")[0] if name.endswith(_APPENDED) else name


def node_key(scope: int, node: NodeProto) -> str:
    """The identity of a node in a plan: index of its scope, and logical name of its first output."""
    return f"{scope}:{logical_name(next(filter(None, node.output), ''))}"


class PortTypes(NamedTuple):
    """Types of the inputs and outputs of an operator, in order; the last one holds for all that follow."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def plugin_types(texts: Iterable[str]) -> dict[str, PortTypes]:
    """The types of custom operators: `OP:fp16`, or `OP:fp16,int32:fp16` by port; ValueError: no types."""
    types = {}
    for text in texts:
        op, *ports = text.split(":")
        kinds = [tuple(kind.strip() for kind in part.strip().strip("[]").split(",")) for part in ports]
        wrong = sorted({kind for part in kinds for kind in part} - set(PORT_TYPES))
        if wrong or not op.strip() or len(kinds) not in (1, 2):
            what = f"{wrong[0]!r} is no type" if wrong else f"{text!r} names no types of inputs and outputs"
            hint = f"write OP:fp16 or OP:fp16,int32:fp32, with types of {', '.join(PORT_TYPES)}"
            raise ValueError(f"{what}: {hint}")
        types[op.strip()] = PortTypes(kinds[0], kinds[-1])
    return types


@dataclass(frozen=True)
class NodePatterns:
    """Nodes that the user names: those to keep in FP32, or to lower."""

    nodes: tuple[str, ...] = ()  # patterns (fnmatch) of node or output names
    ops: tuple[str, ...] = ()
    # names of nodes or outputs, each with its operator in a given plan. Passes keep the names of tensors, so
    # a name without an operator may mean the node that computed it before
    planned: frozenset[tuple[str, str]] = frozenset()

    def requests(self, node: NodeProto) -> Iterator[str]:
        """The user's requests that a node fits, in words for the command line and Python alike."""
        names = (node.name, *node.output)
        for pattern in self.nodes:
            if any(fnmatchcase(name, pattern) for name in names):
                yield f"your pattern {pattern!r}"
        if node.op_type in self.ops:
            yield f"your request for every {node.op_type}"
        yield from (f"the plan, as {name}" for name in names if (name, node.op_type) in self.planned)

    def reason(self, *nodes: NodeProto) -> str | None:
        """Returns why nodes stay unchanged: a request keeps one of them in FP32; None if none does."""
        from rewriter.ir.graph.nodes import display_name

        for node in nodes:
            for request in self.requests(node):
                return f"{'it' if len(nodes) == 1 else display_name(node)} is kept in FP32 by {request}"
        return None


HEADROOM = 2.0  # growth of a value over the samples that still has to fit: a factor 2 is one binade


@dataclass(frozen=True)
class Range:
    """The measured range of one tensor over all samples."""

    # low, high: smallest and largest value (of the finite run of FP32 arithmetic)
    low: float
    high: float
    mean_abs: float  # mean of the absolute values, averaged over the samples
    finite: bool  # False as soon as one NaN or infinity was seen; such a tensor is never in range
    # how many times as large a value of other samples has to fit
    headroom: float = field(default=HEADROOM, compare=False)
    # median move of a state, or of a node's slowest, from one step of a recurrence to the next, in FP16's
    # last places: half of its way it goes in smaller ones. None if nothing moves
    step: float | None = field(default=None, compare=False)

    @property
    def absmax(self) -> float:
        """Largest absolute value; infinity if anything was not finite."""
        return max(abs(self.low), abs(self.high)) if self.finite else math.inf

    @property
    def reach(self) -> float:
        """Largest absolute value that has to fit."""
        return self.absmax * self.headroom

    def scaled(self, exponent: int) -> Range:
        """The range of the same tensor times 2^exponent."""
        factor = 2.0**exponent
        low, high, mean = self.low * factor, self.high * factor, self.mean_abs * factor
        return replace(self, low=low, high=high, mean_abs=mean)

    def __str__(self) -> str:
        return f"[{self.low:.4g}, {self.high:.4g}]" + ("" if self.finite else ", NaN or infinity seen")


Evidence = Literal["squares", "values", "epsilon", "unknown"]


@dataclass(frozen=True)
class NormHazard:
    """A decomposed norm that goes wrong in the lower precision, and why."""

    kind: str  # `layer-norm`, `rms-norm` or `l2-normalize`; `output` is the result of its last node
    output: str
    # the inner values that leave the range, or come near its end; an epsilon below the normal range; or
    # `unknown` where nothing was measured
    evidence: Evidence


@dataclass(frozen=True)
class Decision:
    """A node that does not compute in the plan's precision."""

    node: str  # the node as the user knows it; `op` is its operator
    op: str
    key: str  # identifies it in the model: scope of its graph and first output
    rule: str  # short name of the rule, e.g. `overflow`, `unfused-norm`, `epsilon`, `user`
    reason: str  # one sentence for the user, with the measured range where there is one
    tensor: str | None = None
    range: Range | None = None
    # the type it computes in instead: FP32, which around a MatMul only means FP32 accumulation; or BF16,
    # which has FP32's range and accumulation at FP16's speed, and 8 bits
    repair: Repair = "fp32"
    # the hazard of the decomposed norm that the node is part of; a plan's file does not have it
    norm: NormHazard | None = field(default=None, compare=False)
    # the node that goes wrong, if this one feeds it; a plan's file does not have it
    about: str = field(default="", compare=False)


@dataclass(frozen=True, repr=False)
class Plan(Summary):
    """The precision of every node: `precision`, except for the nodes in `decisions`.

    Attributes:
        float_nodes: How many nodes compute on floating-point tensors.
        norms_in_range: Results of reductions, where decomposed norms among them were measured to fit the
            lower precision inside; empty where none was.
        exponents: Scope, tensor and k of each tensor that `rescale` multiplied by 2^k.
        plugin_types: Types of custom operators, in the form of `plugin_types`.
        fp32, bf16: Keys of the nodes in FP32, and of the nodes in BF16.
    """

    precision: Precision
    io: InputsOutputs = "keep"
    decisions: tuple[Decision, ...] = ()
    float_nodes: int = 0
    norms_in_range: frozenset[str] = frozenset()
    exponents: tuple[tuple[int, str, int], ...] = ()
    plugin_types: tuple[str, ...] = ()
    fp32: frozenset[str] = field(init=False)
    bf16: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for repair in ("fp32", "bf16"):
            keys = frozenset(d.key for d in self.decisions if d.repair == repair)
            object.__setattr__(self, repair, keys)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` or `save_plan=` wrote, edited or not.

        Raises:
            UsageError: the file cannot be read, or is not a plan.
        """
        from rewriter.ir.plan import plan_file

        return plan_file.read(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, to edit it and to give it to `fix(plan=...)`.

        Raises:
            OutputError: the file cannot be written.
        """
        from rewriter.ir.model import write_text
        from rewriter.ir.plan.plan_file import to_text

        write_text(to_text(self), Path(path), "the plan")

    def summary(self) -> Iterator[Row]:
        text = f"{len(self.fp32)} in FP32" + (f", {len(self.bf16)} in BF16" if self.bf16 else "")
        yield "precision", f"{self.precision}, inputs and outputs: {self.io}"
        yield "nodes", f"{count(self.float_nodes, 'float node')}: {text}"
        rules = Counter(decision.rule for decision in self.decisions).most_common()
        yield from rows_of("why", (f"{rule}: {count(number, 'node')}" for rule, number in rules))
