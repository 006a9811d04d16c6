"""Known defects of TensorRT releases, from the table `quirks.toml`, and where a graph meets them."""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from onnx import NodeProto, TensorProto

from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import Survey
from rewriter.ir.base import Target
from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.patterns.round_trips import lost_round_trips
from rewriter.runtime.engines.probe import question
from rewriter.runtime.engines.probe.question import UNKNOWN, Case, Probe

PATCH = 8
"""Smallest kernel of `kernel-is-stride`: patches of vision transformers have 8 to 32."""

BOUND = 5e-3
"""Relative L2 error of a right result in FP16, accumulators included; lost bounds and coordinates cost more
(docs/engines.md#thresholds-of-probes)."""

_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_TYPES: dict[int, str] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_FLOAT8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)

Version = tuple[int, ...]


@dataclass(frozen=True)
class Quirk:
    """One row of `quirks.toml`, whose head explains the fields."""

    id: str
    title: str
    chain: tuple[str, ...]
    first: str
    last: str
    severity: Severity
    remedy: str
    source: str
    where: Literal["any", "kernel-is-stride", "shared-axis", "shared-input", "float8", "round-trip"] = "any"
    types: tuple[str, ...] = ()
    library: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt"
    min_opset: int = 1
    good: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    symptom: Literal["wrong", "does not build", "does not load", "crashes", "slow"] = "wrong"
    smallest: str = ""
    bound: float = BOUND
    case: tuple[Case, ...] = ()
    probe: str = ""

    @property
    def releases(self) -> str:
        """`TensorRT 10.12 to 10.13 on L4; right in 10.5`."""
        if not (self.first or self.last):
            span = "all releases known"
        elif self.first == self.last:
            span = self.first
        else:
            span = f"{self.first} to {self.last}" if self.last else f"from {self.first} on"
        place = f" on {' and '.join(self.gpus)}" if self.gpus else ""
        good = f"; right in {' and '.join(self.good)}" if self.good else ""
        return f"{_TITLES[self.library]} {span}{place}{good}"

    @property
    def answer(self) -> str:
        """The name of its answer in `Target.answers`."""
        return self.probe or self.id

    @property
    def link(self) -> str:
        return self.source if self.source.startswith("https:") and " " not in self.source else ""

    def concerns(self, target: Target) -> bool | None:
        """True if the target has the defect; None if its version is not known.

        An answer of `rewriter probe` decides first. A row is about either TensorRT or TensorRT-RTX, which
        have separate releases.
        """
        seen = target.answers.get(self.answer)
        if seen == "wrong" or (seen == "right" and self.probe):
            return seen == "wrong"
        if target.library != self.library:
            return False
        if not (self.first or self.last):
            return True
        if not target.version:
            return None
        first, last = _version(self.first), _version(self.last)
        after = target.version >= first or target.version == first[: len(target.version)]
        return after and (not last or target.version[: len(last)] <= last)

    def meets(self, low: int) -> bool:
        """True if its operators may have one of its types where the lower precision is `low`."""
        return not self.types or bool({_TYPES[low], "fp32", "fp8"} & set(self.types))

    @property
    def question(self) -> Probe | None:
        """What `rewriter probe` asks; None without a case."""
        if not self.case:
            return None
        answers = (
            {"value": "wrong", "meaning": self.symptom, "above": {"*": self.bound}},
            {"value": "right", "meaning": "right"},
        )
        used = f"scan names it where it is wrong; {self.remedy}"
        asked = f"Is this right here: {', '.join(step.removesuffix('?') for step in self.chain)} ({self.id})?"
        failing = UNKNOWN if self.symptom in ("wrong", "slow") else "wrong"
        return Probe(self.answer, asked, self.case, answers, used, failing)


@functools.cache
def table() -> tuple[Quirk, ...]:
    """The whole table, in its order."""
    text = files("rewriter.hazards").joinpath("quirks.toml").read_text(encoding="utf-8")
    return tuple(map(_quirk, tomllib.loads(text)["quirk"]))


def _quirk(row: dict[str, Any]) -> Quirk:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Quirk(**{**row, **lists, "case": tuple(question.cases(row.get("case", ())))})


@functools.cache
def every_probe() -> tuple[Probe, ...]:
    """The probes, and the questions of the defects."""
    return (*question.probes(), *(asked for quirk in table() if (asked := quirk.question)))


def known_defects(survey: Survey) -> Iterator[Hazard]:
    """Nodes that meet a defect of the target's release, or of a release that the target may be."""
    opset = survey.opsets.get("", 1)
    for quirk in table():
        concerned = quirk.concerns(survey.request.target)
        if concerned is False or opset < quirk.min_opset or not quirk.meets(survey.request.low):
            continue
        probed = survey.request.target.answers.get(quirk.answer) == "wrong"
        where = f"seen by `rewriter probe` on {survey.request.target}" if probed else quirk.releases
        reason = f"{quirk.title} ({where})"
        severity = quirk.severity if concerned else "note"
        for node in places(survey.graph, quirk):
            yield Hazard(node, "known-defect", reason, None, None, severity, quirk.remedy, quirk.link)


def places(graph: GraphEditor, quirk: Quirk) -> list[NodeProto]:
    """The last node of each chain that matches the quirk, once each; for round trips the first Cast."""
    if quirk.where == "round-trip":
        return [trip.down for trip in lost_round_trips(graph)]
    ends: dict[int, NodeProto] = {}
    for node in graph.nodes:
        if node.op_type in _operators(quirk.chain[0]) and _is_meant(graph, node, quirk):
            end = _end(graph, node, quirk.chain[1:])
            if end is not None:
                ends[id(end)] = end
    if quirk.where in ("shared-axis", "shared-input"):
        return _sharing(graph, quirk, list(ends.values()))
    return list(ends.values())


def _end(graph: GraphEditor, node: NodeProto, rest: Sequence[str]) -> NodeProto | None:
    """The last node of the chain `rest` that follows `node`."""
    if not rest:
        return node
    for reader in graph.consumers(node.output[0]):
        found = _end(graph, reader, rest[1:]) if reader.op_type in _operators(rest[0]) else None
        if found is not None:
            return found
    return _end(graph, node, rest[1:]) if rest[0].endswith("?") else None


def _operators(step: str) -> list[str]:
    return step.removesuffix("?").split("|")


def _is_meant(graph: GraphEditor, node: NodeProto, quirk: Quirk) -> bool:
    if quirk.where == "float8":
        return graph.dtype(node.input[0]) in _FLOAT8
    if quirk.where != "kernel-is-stride":
        return True
    kernel = attribute(node, "kernel_shape", [])
    return bool(kernel) and min(kernel) >= PATCH and list(kernel) == list(attribute(node, "strides", []))


def _sharing(graph: GraphEditor, quirk: Quirk, nodes: list[NodeProto]) -> list[NodeProto]:
    """The nodes that have the axis and direction, or the first input, of another one."""
    groups: dict[Hashable, list[NodeProto]] = defaultdict(list)
    for node in nodes:
        flags = attribute(node, "reverse", 0), attribute(node, "exclusive", 0)
        axis = quirk.where == "shared-axis"
        groups[(graph.scalar(node.input[1]), *flags) if axis else node.input[0]].append(node)
    return [node for group in groups.values() if len(group) > 1 for node in group]


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".") if part)
