"""The build step of verification: TensorRT parses and builds the file, and its network is read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import TensorProto

from rewriter.engines.tensorrt import BuildOptions, BuildReport, Shape, Span, build
from rewriter.engines.worker import ChildResult
from rewriter.errors import EngineError
from rewriter.facts import Facts
from rewriter.model import Model, walk_graphs
from rewriter.result import Check

NORMALIZATIONS = frozenset({"LayerNormalization", "GroupNormalization", "InstanceNormalization"})
"""Operators that the parser maps to one NORMALIZATION layer each, whose kernel computes in FP32."""

NETWORK_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
}
"""TensorRT's `DataType` for each float type that a plan gives."""

HAZARDOUS_WARNINGS = ("layernorm nodes in FP16",)
"""Parts of builder warnings that mean wrong results: a norm whose squares overflow FP16."""

LISTED = 10
"""Findings of one kind that are listed one by one."""

LOG_LINES = 15
"""Lines of a dead child's log that are shown."""


@dataclass(frozen=True)
class BuildExpectation:
    """What the parsed network must have.

    Attributes:
        layer_normalizations: Smallest number of NORMALIZATION layers.
        tensor_types: TensorProto.DataType of float tensors by ONNX name. Names that different
            graphs of the model give to tensors of different types are left out.
    """

    layer_normalizations: int = 0
    tensor_types: Mapping[str, int] = field(default_factory=dict)


def expectation(model: Model, facts: Facts) -> BuildExpectation:
    """What a model's own nodes and tensor types promise of its network."""
    nodes = [node for graph in walk_graphs(model.proto.graph) for node in graph.node]
    norms = sum(n.op_type in NORMALIZATIONS and n.domain in ("", "ai.onnx") for n in nodes)
    types: dict[str, set[int]] = {}
    for scope in facts.scopes:
        for name, known in scope.items():
            types.setdefault(name, set()).add(known.dtype)
    in_functions = {name for f in model.proto.functions for node in f.node for name in node.output}
    return BuildExpectation(
        norms,
        {
            name: dtype
            for name, (dtype, *others) in types.items()
            if not others and dtype in NETWORK_TYPES and name not in in_functions
        },
    )


def check_build(
    path: Path,
    expected: BuildExpectation,
    *,
    shapes: Mapping[str, Shape | Span] | None = None,
    values: Mapping[str, Sequence[int]] | None = None,
    timeout_s: float,
) -> Check:
    """Build the file at `path` and hold the parsed network to `expected`.

    Args:
        shapes: Shape, or smallest, usual and largest shape, of inputs with dynamic axes.
        values: Values of integer inputs that are shapes or trip counts.
        timeout_s: After this the builder is killed, and the check has failed.

    Returns:
        `passed` is None when there is nothing to build with, or inputs' shapes are missing.
    """
    spans = {name: _span(shape) for name, shape in (shapes or {}).items()}
    try:
        outcome = build(path, BuildOptions(shapes=spans, values=values or {}), timeout_s=timeout_s)
    except EngineError as error:
        hint = (f"what to do: {error.hint}",) if error.hint else ()
        return Check("build", None, f"not built: {error.what}", details=hint)
    if isinstance(outcome, ChildResult):
        return _of_accident(outcome)
    return _of_report(outcome, expected)


def _span(shape: Shape | Span) -> Span:
    if shape and isinstance(shape[0], tuple):
        low, usual, high = (tuple(s) for s in shape)  # type: ignore[arg-type]
        return low, usual, high
    fixed = tuple(int(d) for d in shape)  # type: ignore[arg-type]
    return fixed, fixed, fixed


def _of_accident(child: ChildResult) -> Check:
    tail = child.log.strip().splitlines()[-LOG_LINES:]
    return Check(
        "build",
        False,
        f"the TensorRT build {'hung' if child.status == 'timeout' else 'crashed'}: {child.summary}",
        details=tuple(f"log: {line}" for line in tail),
        seconds=child.seconds,
    )


def _of_report(report: BuildReport, expected: BuildExpectation) -> Check:
    faults = [*_parse_faults(report), *_network_faults(report, expected)]
    warnings = [f"warning: {w}" for w in report.warnings if not is_routine(w)]
    summary = _summary(report, faults)
    seconds = report.parse_s + report.build_s
    return Check("build", not faults, summary, details=(*faults, *warnings[:LISTED]), seconds=seconds)


def _summary(report: BuildReport, faults: Sequence[str]) -> str:
    library = f"{report.library} {report.version}"
    if not report.parsed:
        return f"{library} refuses the model"
    if report.engine_bytes is None:
        return f"{library} parses the model, but cannot build it"
    norms = report.count("NORMALIZATION")
    built = (
        f"{library} built {report.engine_bytes / 2**20:.1f} MiB in {report.build_s:.1f} s: "
        f"{len(report.layers)} layers" + (f", {norms} normalisations" if norms else "")
    )
    return built + (f"; {len(faults)} findings" if faults else ", types as planned")


def _parse_faults(report: BuildReport) -> Iterator[str]:
    for error in report.parser_errors:
        where = f"node {error.node or '(unnamed)'} ({error.op}): " if error.op else ""
        yield f"{where}{error.message}"
    if report.parsed and report.engine_bytes is None:
        yield from (f"builder: {w}" for w in report.warnings[-LISTED:])


def _network_faults(report: BuildReport, expected: BuildExpectation) -> Iterator[str]:
    if not report.parsed:
        return
    norms = report.count("NORMALIZATION")
    if norms < expected.layer_normalizations:
        yield (
            f"{expected.layer_normalizations} normalisations went in, but the network has {norms} "
            "NORMALIZATION layers"
        )
    yield from _shortened(list(_mismatches(report, expected.tensor_types)), "tensors of another type")
    for part in HAZARDOUS_WARNINGS:
        yield from (f"TensorRT warns: {w}" for w in report.warnings if part in w)


def _mismatches(report: BuildReport, planned: Mapping[str, int]) -> Iterator[str]:
    for name, dtype, node in report.types():
        wanted = NETWORK_TYPES.get(planned.get(name, 0))
        if wanted is not None and dtype != wanted:
            yield f"tensor {name} of {node} is {dtype}, planned {wanted}"


def _shortened(findings: list[str], what: str) -> Iterator[str]:
    yield from findings[:LISTED]
    if len(findings) > LISTED:
        yield f"and {len(findings) - LISTED} more {what}"


ROUTINE = ("Int64 binding", "will not be queryable", "catchCudaError")
"""Parts of warnings that say nothing about the result: integer bindings, names of function nodes,
and the missing GPU of a build that needs none."""


def is_routine(warning: str) -> bool:
    """Whether a builder's warning says nothing that a user could act on."""
    return any(part in warning for part in (*ROUTINE, *HAZARDOUS_WARNINGS))
