"""Known defects of TensorRT releases, from the table `quirks.toml`, and where a graph meets them."""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from onnx import NodeProto

from rewriter.base import Target
from rewriter.graph import GraphEditor, attribute
from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import Survey
from rewriter.patterns.round_trips import lost_round_trips

PATCH = 8
"""Smallest kernel of `kernel-is-stride`: patches of vision transformers have 8 to 32."""

_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}

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
    workaround: str
    link: str
    where: Literal["any", "kernel-is-stride", "shared-axis", "round-trip"] = "any"
    library: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt"
    min_opset: int = 1
    gpu: str = ""
    probe: str = ""

    @property
    def releases(self) -> str:
        """`TensorRT 10.12 to 10.13 on L4`."""
        if not (self.first or self.last):
            span = "all releases known"
        elif self.first == self.last:
            span = self.first
        else:
            span = f"{self.first} to {self.last}" if self.last else f"from {self.first} on"
        return f"{_TITLES[self.library]} {span}" + (f" on {self.gpu}" if self.gpu else "")

    def concerns(self, target: Target) -> bool | None:
        """True if the target has the defect; None if its version is not known.

        An answer of `rewriter probe` decides first. A row is about either TensorRT or TensorRT-RTX, which
        have separate releases.
        """
        seen = target.answers.get(self.probe)
        if seen in ("right", "wrong"):
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


@functools.cache
def table() -> tuple[Quirk, ...]:
    """The whole table, in its order."""
    text = files("rewriter.hazards").joinpath("quirks.toml").read_text(encoding="utf-8")
    return tuple(Quirk(**{**row, "chain": tuple(row["chain"])}) for row in tomllib.loads(text)["quirk"])


def known_defects(survey: Survey) -> Iterator[Hazard]:
    """Nodes that meet a defect of the target's release, or of a release that the target may be."""
    opset = survey.opsets.get("", 1)
    for quirk in table():
        concerned = quirk.concerns(survey.request.target)
        if concerned is False or opset < quirk.min_opset:
            continue
        probed = quirk.probe in survey.request.target.answers
        where = f"seen by `rewriter probe` on {survey.request.target}" if probed else quirk.releases
        reason = f"{quirk.title} ({where})"
        severity = quirk.severity if concerned else "note"
        for node in places(survey.graph, quirk):
            yield Hazard(node, "known-defect", reason, None, None, severity, quirk.workaround, quirk.link)


def places(graph: GraphEditor, quirk: Quirk) -> list[NodeProto]:
    """The last node of each chain that matches the quirk, once each; for round trips the first Cast."""
    if quirk.where == "round-trip":
        return [trip.down for trip in lost_round_trips(graph)]
    ends: dict[int, NodeProto] = {}
    for node in graph.nodes:
        if node.op_type in _operators(quirk.chain[0]) and _is_meant(node, quirk):
            end = _end(graph, node, quirk.chain[1:])
            if end is not None:
                ends[id(end)] = end
    return list(ends.values()) if quirk.where != "shared-axis" else _sharing(graph, list(ends.values()))


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


def _is_meant(node: NodeProto, quirk: Quirk) -> bool:
    if quirk.where != "kernel-is-stride":
        return True
    kernel = attribute(node, "kernel_shape", [])
    return bool(kernel) and min(kernel) >= PATCH and list(kernel) == list(attribute(node, "strides", []))


def _sharing(graph: GraphEditor, nodes: list[NodeProto]) -> list[NodeProto]:
    """The nodes that have the axis and direction of another one."""
    groups: dict[tuple[float | None, int, int], list[NodeProto]] = defaultdict(list)
    for node in nodes:
        flags = attribute(node, "reverse", 0), attribute(node, "exclusive", 0)
        groups[(graph.scalar(node.input[1]), *flags)].append(node)
    return [node for group in groups.values() if len(group) > 1 for node in group]


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".") if part)
