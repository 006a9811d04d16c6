"""What the target's ONNX parser takes, operator by operator, from the table `operators.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from onnx import NodeProto

from rewriter.hazards.kinds import Hazard
from rewriter.hazards.survey import Survey
from rewriter.ir.base import Target
from rewriter.ir.plan import plugin_types

TYPES = ("FP32", "FP16", "BF16")

RECENT = ((10,), (11,))
"""Releases that an unknown one is expected to be."""

FALLBACK = "allow the GPU as the fallback (--allowGPUFallback); each change of device copies tensors"


@dataclass(frozen=True)
class _Row:
    """From release `first` on, the types that the parser takes the operator in; none: it refuses it."""

    first: tuple[int, ...]
    types: tuple[str, ...]


@functools.cache
def _table() -> dict[tuple[str, str], list[_Row]]:
    """The rows by device ("" for the GPU) and operator, oldest release first."""
    text = files("rewriter.hazards").joinpath("operators.toml").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[_Row]] = {}
    for row in tomllib.loads(text)["row"]:
        first = tuple(int(part) for part in row["first"].split(".") if part)
        for operator in row["operators"].split():
            found.setdefault((row.get("device", ""), operator), []).append(_Row(first, tuple(row["types"])))
    return found


def types_of(operator: str, target: Target, device: str = "") -> Sequence[str]:
    """The float types in which the target takes an operator of ONNX; none if it refuses it.

    Where the release is not known to the minor number, every one that it may be has to take a type, as far
    as it takes the operator. TensorRT-RTX has no such table; benchmarks/node_builds.py asks its parser.
    """
    if target.library != "tensorrt":
        return TYPES
    rows = _table().get((device, operator)) or _table()[device, "*"]
    releases = [target.version] if target.version else RECENT
    taking = [row.types for release in releases for row in _holding(rows, release) if row.types]
    return [name for name in TYPES if taking and all(name in types for types in taking)]


def _holding(rows: Sequence[_Row], release: tuple[int, ...]) -> Sequence[_Row]:
    """The row of a release, and those that begin with a later release of which it is a prefix."""
    before = [row for row in rows if row.first <= release]
    return [
        *before[-1:],
        *(row for row in rows if row not in before and row.first[: len(release)] == release),
    ]


def refused_by_parser(node: NodeProto, low: str, target: Target) -> str:
    """Sentence on why a node keeps FP32: the target takes it, and not in `low`; "" otherwise."""
    taken = types_of(node.op_type, target)
    if node.domain not in ("", "ai.onnx") or low in taken or not taken:
        return ""
    return f"{target} takes {node.op_type} in {' and '.join(taken)}, not in {low} (NVIDIA's operator table)"


def refused_operators(survey: Survey) -> Iterator[Hazard]:
    """Nodes that the target's parser refuses, and those that a DLA leaves to the GPU."""
    target, plugins = survey.request.target, plugin_types(survey.request.plugin_types)
    for node in survey.graph.nodes:
        if node.domain not in ("", "ai.onnx") or node.op_type in plugins:
            continue
        if not types_of(node.op_type, target):
            reason = f"{target} has no {node.op_type} (NVIDIA's operator table)"
            yield Hazard(node, "refused-operator", reason)
        elif target.device and not types_of(node.op_type, target, target.device):
            reason = f"the {target.device.upper()} has no {node.op_type}: it runs on the GPU"
            yield Hazard(node, "refused-operator", reason, severity="note", repair=FALLBACK)
