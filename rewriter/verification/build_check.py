"""Checks that TensorRT builds a file, and compares the parsed network with the model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from rewriter.base.errors import EngineError, NativeError
from rewriter.base.text import figure
from rewriter.ir.graph import display_name, is_op, reachable, reads
from rewriter.ir.graph.ops import NORMS
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.model.tensors import FLOATS
from rewriter.ir.plan import logical_name
from rewriter.runtime.engines.build import (
    NORM_IN_FP16,
    BuildOptions,
    BuildReport,
    ParserError,
    build,
    warnings_for_users,
)
from rewriter.target import Target, numbers
from rewriter.target.operators import RefusedNode, refused_in_model
from rewriter.verification.verdict import Check, Remark, log_lines, remark

NORMALIZATIONS = NORMS - {"RMSNormalization", "SimplifiedLayerNormalization"}
"""Operators that become one NORMALIZATION layer each (docs/engines.md#what-releases-do)."""

NETWORK_TYPES = {
    int(TensorProto.FLOAT): "FLOAT",
    int(TensorProto.FLOAT16): "HALF",
    int(TensorProto.BFLOAT16): "BF16",
}
"""TensorRT's `DataType` for each float type that a plan gives."""

LACKING = (
    "dtype == myelinTypeBF16 || dtype == myelinTypeFP8E4M3) failed",  # of a Conv in INT8: 1.6.1
    "plugin was not found",
    "Plugin not found",
    "plugin creator version",
    "has no runners",
    "No importer registered",
    "is not supported in TensorRT",
    "Error Code 1: Cuda Runtime",
)
"""Parts of the messages of TensorRT-RTX 1.4 to 1.7 for a plugin, for an operator that its builder lacks
(NonMaxSuppression), or for a network that it cannot build without a GPU (1.4, quantised networks)."""

NEEDS_GPU = "isInFlight(p.second.symbolicRep)"
"""Part of the message of a parser that has to compute a shape from floats, and finds no GPU for it."""

LISTED = 10
"""Most findings of one kind that are listed."""

REMEDIES = 3
"""Remedies that are named."""


@dataclass(frozen=True)
class BuildExpectation:
    """Requirements on the parsed network.

    Attributes:
        layer_normalizations: Smallest number of NORMALIZATION layers.
        tensor_types: TensorProto.DataType of float tensors by ONNX name, without names that have different
            types in different graphs.
        norms_in_range: As in the plan: a warning about these reductions is no finding.
        target: The TensorRT that the model is for.
        refused: The nodes that a target refuses by the table of operators.
    """

    layer_normalizations: int = 0
    tensor_types: Mapping[str, int] = field(default_factory=dict)
    norms_in_range: frozenset[str] = frozenset()
    target: Target = field(default_factory=Target)
    refused: Callable[[Target], Sequence[RefusedNode]] = field(default=lambda _: (), compare=False)


def expectation(
    model: Model,
    norms_in_range: frozenset[str] = frozenset(),
    target: Target | None = None,
    plugins: Iterable[str] | None = (),
) -> BuildExpectation:
    """Returns the norms, tensor types and operators that the network of a model must have.

    Args:
        plugins: Types of plugins; None if there are libraries of plugins, which may have any operator.
    """
    nodes = [node for graph in walk_graphs(model.proto.graph) for node in graph.node]
    norms = sum(is_op(n, *NORMALIZATIONS) for n in nodes)
    types: dict[str, set[int]] = {}
    for scope in model.facts().scopes:
        for name, facts in scope.items():
            types.setdefault(name, set()).add(facts.dtype)
    in_functions = {name for f in model.proto.functions for node in f.node for name in node.output}
    return BuildExpectation(
        norms,
        {
            name: dtype
            for name, (dtype, *others) in types.items()
            if not others and dtype in NETWORK_TYPES and name not in in_functions
        },
        norms_in_range,
        target or Target(),
        lambda asked: () if plugins is None else refused_in_model(model, asked, plugins),
    )


def check_build(path: Path, expected: BuildExpectation, options: BuildOptions, timeout_s: float) -> Check:
    """Builds the file at `path` and compares the parsed network with `expected`.

    Args:
        timeout_s: Limit after which the builder is killed and the check fails.

    Returns:
        A check whose `passed` is None if no library is installed, it lacks an operator, or the shape of an
        input is not known. A plugin that does not load is a failure, and so is a node that no parser has
        taken and that the target refuses by the table.
    """
    start = time.perf_counter()
    try:
        check = judged_report(build(path, options, timeout_s=timeout_s), expected)
    except NativeError as error:  # a crash or a hang; an exception in the child's Python is no failure
        built = False if error.cause else None
        failed = remark("reason" if error.cause else "not-built", reason=error.what)
        check = Check("build", built, failed, details=log_lines(error.log), built=built)
    except EngineError as error:
        named = error.where in [str(plugin) for plugin in options.plugins]  # a plugin that was to be used
        failed = remark("not-built", reason=error.what, where=error.where)
        details, advice = _advice(error.hint), error.hint
        check = Check("build", False if named else None, failed, details=details, advice=advice)
    if check.passed is None and check.built is None:  # no parser was asked
        check = check_operators(expected) or check
    return replace(check, seconds=time.perf_counter() - start)


def check_operators(expected: BuildExpectation) -> Check | None:
    """A failed check of the nodes that the target refuses by the table; None if it refuses none."""
    refusals = [_Refusal.of(row) for row in expected.refused(expected.target)]
    if not refusals:
        return None
    fields = _fields(refusals)
    details = (*(refusal.sentence for refusal in refusals[:LISTED]), *_advice(fields["advice"]))
    refused = remark("refused-by-table", target=expected.target)
    return Check("build", False, refused, details=details, built=False, **fields)


def switch(model: Model) -> tuple[str, str] | None:
    """An integer or boolean input that selects a branch of an If by itself, and the If; None if none does."""
    graph = model.proto.graph
    producers = {name: node for node in graph.node for name in node.output}
    inputs = {port.name: port.dtype not in FLOATS for port in model.signature.inputs}
    for owner in (node for node in graph.node if is_op(node, "If")):
        above = reachable([owner.input[0]], lambda name: reads(producers[name]) if name in producers else ())
        selecting = [name for name in above if name in inputs]
        if len(selecting) == 1 and inputs[selecting[0]]:
            return selecting[0], display_name(owner)
    return None


def _advice(hint: str | None) -> tuple[str, ...]:
    return (f"what to do: {hint}",) if hint else ()


def judged_report(report: BuildReport, expected: BuildExpectation) -> Check:
    """Judges a finished build by its report."""
    refusals, lacking = _refusals(report, expected)
    faults = [*_reasons(report, refusals, lacking), *_network_faults(report, expected)]
    fields: dict[str, Any] = _fields(refusals) | ({"advice": report.hint} if report.hint else {})
    details = (*faults, *_advice(fields["advice"]), *warnings_for_users(report.warnings)[:LISTED])
    passed = None if not faults and report.obstacle else not faults
    lacks = None if refusals else _lacks(report, lacking)
    if lacks is not None:
        passed, details = None, (*details, "another TensorRT, or this one on a GPU, may build it")
    built = report.engine_bytes is not None and not refusals
    if passed is None:
        how = remark("not-built", reason=report.obstacle) if report.obstacle or lacks is None else lacks
    elif not report.parsed or refusals:
        own = f"{report.library} {report.version}"
        how = remark("refused", parser=expected.target if report.parsed else own)
    elif report.engine_bytes is None:
        how = remark("no-engine", report=report, findings=len(faults))
    else:
        layers, norms = len(report.layers), report.count("NORMALIZATION") or None
        mib = figure(report.engine_bytes / 2**20)
        how = remark("built", report=report, layers=layers, norms=norms, mib=mib, findings=len(faults))
    return Check("build", passed, how, details=details, built=built, **fields)


@dataclass(frozen=True)
class _Refusal:
    """A node that a parser or the table refuses; `node` and `op` may be ""."""

    node: str
    op: str
    sentence: str
    remedy: str = ""

    @classmethod
    def of(cls, row: RefusedNode, message: str = "") -> _Refusal:
        """A refusal by the table, with the words of an assertion: `a == "b" && "Only b " "is taken"`."""
        said = re.search(r'(?:.*&& )?"(.*)"', message)
        words = f" ({said[1]})".replace('" "', "") if said else ""
        return cls(row.node.name, row.node.op_type, f"{row}{words}", row.row.remedy)


def _refusals(report: BuildReport, expected: BuildExpectation) -> tuple[list[_Refusal], list[_Refusal]]:
    """The nodes that the parser refuses, or the table if none has parsed them; and faults of this library.

    A parser is right about its own release. It is right about another one, too, unless the table knows that
    the two differ in the node. Its errors that name no node, such as of a constant's type, come last.
    """
    own, target = Target(report.library.replace("_", "-"), numbers(report.version)[:3]), expected.target
    fits = own.library == target.library and own.version[: len(target.version)] == target.version
    there = {} if fits and report.parsed else {row.name: row for row in expected.refused(target)}
    here = {row.name: row for row in expected.refused(own)} if there or report.parser_errors else {}
    there = here if fits else there
    refusals, lacking, known = list[_Refusal](), list[_Refusal](), set(here if report.parsed else ())
    named = set[str]()
    for error in report.parser_errors:
        row = next((row for row in here.values() if _is_about(error, row)), None)
        if row is not None and row.name in named:
            continue  # a second error of one node, which may have no words
        named |= {row.name} if row else set()
        plugin = not onnx.defs.has(error.op) and any(part in error.message for part in LACKING)
        refusal = _Refusal(error.node, error.op, str(error))
        if row is not None:
            refusal = _Refusal.of(row, error.message)
        elsewhere = row.name not in there if row else plugin and bool(error.op)
        if NEEDS_GPU in error.message or elsewhere:
            lacking.append(refusal)
        else:
            refusals.append(refusal)
    refusals += (_Refusal.of(row) for name, row in there.items() if name not in known | named)
    return sorted(refusals, key=lambda refusal: not refusal.op), lacking


def _is_about(error: ParserError, row: RefusedNode) -> bool:
    """True if a row is of the node of an error; the parser calls one without a name by its output."""
    node = row.node
    return node.op_type == error.op and error.node in (node.name, row.name, f"node_of_{node.output[0]}", "")


def _fields(refusals: Sequence[_Refusal]) -> dict[str, Any]:
    """The fields of a check: what is refused, and what to do, each thing once."""
    remedies = list(dict.fromkeys(r.remedy for r in refusals if r.remedy))
    refused = tuple((refusal.node, refusal.op) for refusal in refusals if refusal.op)
    return {"refused": refused, "advice": "; ".join(remedies[:REMEDIES])}


def _reasons(report: BuildReport, refusals: Sequence[_Refusal], lacking: Sequence[_Refusal]) -> Iterator[str]:
    """Yields the reasons of the parser, the table or the builder for building no engine."""
    yield from (refusal.sentence for refusal in (*refusals, *lacking))
    if report.parsed and report.engine_bytes is None and not report.obstacle:
        yield from report.errors[-LISTED:] or ["no engine, and no error message"]


def _lacks(report: BuildReport, lacking: Sequence[_Refusal]) -> tuple[Remark] | None:
    """The ability that this library lacks, if that is the only fault; None otherwise."""
    if error := next((error for error in report.parser_errors if NEEDS_GPU in error.message), None):
        name = error.node or f"a {error.op}"
        return remark("needs-gpu", report=report, node=name)
    errors = report.errors if report.parsed and report.engine_bytes is None else ()
    foreign = bool(errors) and all(any(part in message for part in LACKING) for message in errors)
    if not foreign and not lacking:
        return None
    in_errors = {layer.node for layer in report.layers if any(f" {layer.node}_" in text for text in errors)}
    names = ", ".join([*(r.node or r.op for r in lacking), *sorted(in_errors - {""})][:LISTED])
    return remark("lacking", report=report, nodes=names or "this model")


def _network_faults(report: BuildReport, expected: BuildExpectation) -> Iterator[str]:
    """Yields the differences between the parsed network and the model."""
    if not report.parsed:
        return
    norms, wanted = report.count("NORMALIZATION"), expected.layer_normalizations
    if norms < wanted:
        yield f"the model has {wanted} normalisation operators, the network {norms} NORMALIZATION layers"
    mismatches = [
        f"tensor {name} of {node} is {dtype}, planned {planned}"
        for name, dtype, node in report.types()
        if (planned := NETWORK_TYPES.get(expected.tensor_types.get(name, 0))) not in (None, dtype)
    ]
    yield from mismatches[:LISTED]
    if len(mismatches) > LISTED:
        yield f"and {len(mismatches) - LISTED} more tensors of another type than planned"
    halves = [  # the warning names no nodes
        layer.node or layer.name
        for layer in report.layers
        if layer.type == "REDUCE"
        and any(d == "HALF" and logical_name(t) not in expected.norms_in_range for t, d in layer.outputs)
    ]
    warned = any(NORM_IN_FP16 in warning for warning in report.warnings)
    if warned and (halves or not expected.norms_in_range):
        listed = ", ".join(halves[:LISTED]) or "none"
        yield (
            "TensorRT warns of a decomposed norm in FP16, whose squares may overflow; "
            f"reductions in FP16: {listed}"
        )
