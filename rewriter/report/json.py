"""The result of `fix` as JSON, for programs.

Paths stand as the user wrote them, times are wall seconds. JSON has no NaN or infinity: such
numbers become the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rewriter.jobs.fix.result import FixResult
from rewriter.plan import Decision, Plan
from rewriter.report.next_step import next_command
from rewriter.search.result import Frontier, Searched
from rewriter.verification.verdict import Check

SCHEMA_VERSION = 1
"""Rises when a field changes its meaning or goes away; a new field leaves it."""

LIBRARIES = (
    "rewriter",
    "onnx",
    "onnx-graphsurgeon",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxsim",
    "numpy",
    "tensorrt",
    "tensorrt-rtx",
)


def as_dict(result: FixResult) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes, in a fixed order."""
    model, data = result.model, result.data
    fields = {
        "schema_version": SCHEMA_VERSION,
        "versions": installed_versions(),
        "input": str(model.path) if model.path else None,
        "output": str(result.output) if result.output else None,
        "target": str(result.target),
        "probe": result.target.known_from or None,
        "opset": model.opset,
        "pipeline": result.pipeline,
        "passes": [asdict(step) for step in result.passes],
        "plan": _plan(result.plan) if result.plan else None,
        "data": {"text": data.text, "samples": data.samples, "real": data.real} if data else None,
        "verified": result.verified,
        "checks": [check_dict(check) for check in result.verdict.checks] if result.verdict else [],
        "frontier": _frontier(result.frontier) if result.frontier else None,
        "searched": _searched(result.searched) if result.searched else None,
        "warnings": result.warnings,
        "seconds": result.seconds,
        "next_command": next_command(result),
    }
    return {name: plain(value) for name, value in fields.items()}


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that a result depends on, of those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "precision": plan.precision,
        "io": plan.io,
        "float_nodes": plan.float_nodes,
        "fp32": [_decision(decision) for decision in plan.decisions if decision.repair == "fp32"],
        "bf16": [_decision(decision) for decision in plan.decisions if decision.repair == "bf16"],
    }


def _frontier(found: Frontier) -> dict[str, Any]:
    points = [
        {
            "latency_us": point.latency_us,
            "value": point.value,
            "fp32": len(point.plan.fp32),
            "bf16": len(point.plan.bf16),
            "applied": point.plan == found.chosen,
        }
        for point in found.points
    ]
    return {"metric": found.metric, "least": found.least, "latency": found.origin, "points": points}


def _searched(found: Searched) -> dict[str, Any]:
    tried = [
        {
            "plan": one.words,
            "value": one.value,
            "latency_us": one.latency_us,
            "spread_us": one.spread_us,
            "fp32": len(one.plan.fp32),
            "bf16": len(one.plan.bf16),
            "problem": one.problem,
            "applied": one.applied,
            "untried": one.untried,
        }
        for one in found.tried
    ]
    return {"metric": found.metric, "measured": found.origin, "tried": tried}


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "node": decision.node,
        "op": decision.op,
        "rule": decision.rule,
        "reason": decision.reason,
        "tensor": decision.tensor,
        "range": asdict(decision.range) if decision.range else None,
    }


def check_dict(check: Check) -> dict[str, Any]:
    """A check with the verdict on each output."""
    outputs = [{**asdict(output), "passed": output.passed} for output in check.outputs]
    return {**asdict(check), "outputs": outputs}


def plain(value: Any) -> Any:
    """The value with numbers of NumPy as Python's, and those that JSON lacks as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
