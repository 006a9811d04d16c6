"""What the target's ONNX parser takes, operator by operator, from the table `operators.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from onnx import NodeProto

from rewriter.ir.model import STANDARD_DOMAINS, Model, walk_nodes
from rewriter.ir.plan import plugin_types
from rewriter.target import Target

TYPES = ("FP32", "FP16", "BF16")

RECENT = ((10,), (11,))
"""Releases that an unknown one is expected to be."""

Row = tuple[tuple[int, ...], tuple[str, ...]]
"""From a release on, the types that the parser takes the operator in; none: it refuses it."""


@functools.cache
def _table() -> dict[tuple[str, str], list[Row]]:
    """The rows by device ("" for the GPU) and operator, oldest release first."""
    text = files("rewriter.target").joinpath("operators.toml").read_text(encoding="utf-8")
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in tomllib.loads(text)["row"]:
        first = tuple(int(part) for part in row["first"].split(".") if part)
        for operator in row["operators"].split():
            rows.setdefault((row.get("device", ""), operator), []).append((first, tuple(row["types"])))
    return rows


def types_of(operator: str, target: Target, device: str = "") -> Sequence[str]:
    """The float types in which the target takes an operator of ONNX; none if it refuses it.

    Where the release is not known to the minor number, every one that it may be has to take a type, as far
    as it takes the operator. TensorRT-RTX has no such table: 1.7.1 was asked, and refuses what every release
    of TensorRT refuses (`supports_operator`).
    """
    rows = _table().get((device, operator)) or _table()[device, "*"]
    if target.library != "tensorrt":
        return TYPES if rows[-1][1] else ()
    taking: list[tuple[str, ...]] = []
    for release in [target.version] if target.version else RECENT:
        before = [types for first, types in rows if first <= release]
        within = [types for first, types in rows if first > release and first[: len(release)] == release]
        taking += [types for types in (*before[-1:], *within) if types]
    return [name for name in TYPES if taking and all(name in types for types in taking)]


def refused_by_parser(node: NodeProto, low: str, target: Target) -> str | None:
    """Sentence on why a node keeps FP32: the target takes it, and not in `low`; None otherwise."""
    taken = types_of(node.op_type, target)
    if node.domain not in STANDARD_DOMAINS or low in taken or not taken:
        return None
    return f"{target} takes {node.op_type} in {' and '.join(taken)}, not in {low} (NVIDIA's operator table)"


def refusal(model: Model, target: Target, plugins: Iterable[str]) -> Iterator[str]:
    """One sentence on the operators that the target's parser refuses, if there are any."""
    nodes = (node for node in walk_nodes(model.proto.graph) if node.domain in STANDARD_DOMAINS)
    operators = {node.op_type for node in nodes} - plugin_types(plugins).keys()
    if refused := sorted(name for name in operators if not types_of(name, target)):
        yield f"{target} has no {' and no '.join(refused)}: it builds no engine without a plugin"
