"""A plan as a JSON file: written by `--save-plan`, edited by hand, applied by `--plan`.

The file names nodes by their key, which is the index of the node's graph and the node's first
output: both survive a change of types, and neither depends on how the model is stored. A line that
somebody adds by hand may give the node's name instead; `plan_fit.fit` finds its key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from rewriter.ir.errors import UsageError
from rewriter.ir.model import write_text
from rewriter.ir.model.writing import from_json
from rewriter.ir.plan import Decision, InputsOutputs, Plan, Precision, Range, Repair, io_parts, plugin_types

SCHEMA = "rewriter-plan"
VERSION = 1
"""Incremented when a field changes its meaning or goes away, not for a new optional field."""

LOWER: tuple[Precision, ...] = ("fp16", "bf16")
"""Precisions of the nodes that a plan does not list."""

FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "version": (int,),
    "precision": (str,),
    "io": (str,),
    "float_nodes": (int,),
    "fp32": (list,),
    "bf16": (list,),
    "norms_in_range": (list,),
    "rescaled": (dict,),
    "plugin_types": (list,),
}
"""Fields of the file with their types. All but the first three are optional."""

NODE_FIELDS: dict[str, tuple[type, ...]] = {
    "node": (str,),
    "op": (str,),
    "key": (str,),
    "rule": (str,),
    "reason": (str,),
    "tensor": (str, type(None)),
    "range": (dict, type(None)),
}
"""Fields of a node in FP32 or BF16. `key` or `node` is required."""

RANGE_FIELDS: dict[str, tuple[type, ...]] = {
    "low": (int, float, str),
    "high": (int, float, str),
    "mean_abs": (int, float, str),
    "finite": (bool,),
}


def to_text(plan: Plan) -> str:
    """The plan as JSON, ending in a newline: the same plan gives the same bytes."""
    fields = {
        "schema": SCHEMA,
        "version": VERSION,
        "precision": plan.precision,
        "io": plan.io,
        "float_nodes": plan.float_nodes,
        "fp32": [_decision_fields(d) for d in plan.decisions if d.repair == "fp32"],
        "bf16": [_decision_fields(d) for d in plan.decisions if d.repair == "bf16"],
        "norms_in_range": sorted(plan.norms_in_range),
        "rescaled": {f"{scope}:{tensor}": k for scope, tensor, k in plan.exponents},
        **({"plugin_types": list(plan.plugin_types)} if plan.plugin_types else {}),
    }
    return json.dumps(fields, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def from_text(text: str, where: str = "plan") -> Plan:
    """Parses a plan; nodes that it gives by name alone have the key "".

    Args:
        where: The file, for messages.

    Raises:
        UsageError: not JSON, another schema or version, or an invalid field, which is named.
    """
    try:
        fields = from_json(text)
    except json.JSONDecodeError as error:
        hint = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"not JSON: {error.msg}", where=where, hint=f"correct {hint}") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise UsageError("not a plan", where=where, hint=f'`save-plan` writes one; "schema" is "{SCHEMA}"')
    if fields.get("version") != VERSION:
        found = f"a plan of version {fields.get('version')!r}, this is version {VERSION}"
        raise UsageError(found, where=where, hint="save it again with this release: `save-plan`")
    _check(fields, FIELDS, where)
    decisions = tuple(
        _decision(entry, repair, f"{where}: {repair}[{index}]")
        for repair in get_args(Repair)
        for index, entry in enumerate(fields.get(repair, []))
    )
    precision: Precision = _chosen(fields, "precision", LOWER, where)
    io: InputsOutputs = fields.get("io", "keep")
    plugins = tuple(_texts(fields.get("plugin_types", []), f"{where}: plugin_types"))
    _read_by(io_parts, io, f"{where}: io")
    _read_by(plugin_types, plugins, f"{where}: plugin_types")
    norms = frozenset(_texts(fields.get("norms_in_range", []), f"{where}: norms_in_range"))
    exponents = tuple(_exponent(key, k, where) for key, k in fields.get("rescaled", {}).items())
    return Plan(precision, io, decisions, fields.get("float_nodes", 0), norms, exponents, plugins)


def read(path: Path) -> Plan:
    """Reads a plan from a file, as `from_text`.

    Raises:
        UsageError: it cannot be read, or is not a plan.
    """
    try:
        return from_text(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        hint = "`save-plan` writes a plan"
        raise UsageError(f"cannot read it: {error.strerror}", where=str(path), hint=hint) from error
    except UnicodeDecodeError as error:
        raise UsageError("not a plan: no UTF-8 text", where=str(path), hint="is it the model?") from error


def given_plan(
    plan: str | os.PathLike[str] | Plan | None,
    precision: Precision | None,
    io: InputsOutputs | None,
    **lists: Sequence[str],
) -> Plan | None:
    """The plan that the user gave; options that contradict it are refused, not ignored.

    Args:
        lists: Options that a plan takes the place of, by name.
    """
    if plan is None:
        return None
    given = plan if isinstance(plan, Plan) else read(Path(plan))
    others = {
        **{f"`{name.replace('_', '-')}`": bool(names) for name, names in lists.items()},
        "`precision`": precision not in (None, given.precision),
        "`io`": io not in (None, "keep", given.io),
    }
    for option, contradicts in others.items():
        if contradicts:
            raise UsageError("it contradicts the plan", where=option, hint="leave it out, or edit the plan")
    return given


def write(plan: Plan, path: Path) -> None:
    """Writes a plan; `path` is replaced only when the new file is complete.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    write_text(to_text(plan), path, "the plan")


def _decision_fields(decision: Decision) -> dict[str, Any]:
    fields = asdict(decision)
    del fields["repair"], fields["norm"]  # the name of the list states the repair
    if decision.range is not None:
        fields["range"] = {name: _plain(value) for name, value in fields["range"].items()}
    return fields


def _texts(entries: list[Any], where: str) -> list[str]:
    if not all(isinstance(entry, str) for entry in entries):
        raise UsageError("not a list of texts", where=where, hint="correct it, or leave it out")
    return entries


def _decision(entry: object, repair: Repair, where: str) -> Decision:
    if not isinstance(entry, dict):
        hint = 'such as {"node": "/encoder/Softmax"}'
        raise UsageError("not an object with fields", where=where, hint=hint)
    _check(entry, NODE_FIELDS, where)
    if not entry.get("key") and not entry.get("node"):
        raise UsageError("no node is named", where=where, hint='give its name as "node", or its "key"')
    measured = entry.get("range")
    return Decision(
        entry.get("node", ""),
        entry.get("op", ""),
        entry.get("key", ""),
        entry.get("rule", "user"),
        entry.get("reason", "kept by the plan"),
        entry.get("tensor"),
        _range(measured, f"{where}: range") if measured is not None else None,
        repair,
    )


def _exponent(key: str, k: object, where: str) -> tuple[int, str, int]:
    scope, colon, tensor = key.partition(":")
    if not colon or not scope.isdecimal() or type(k) is not int:
        hint = 'it is "0:tensor": exponent, with the index of the graph before the colon'
        raise UsageError(f"not an exponent: {key!r}: {k!r}", where=f"{where}: rescaled", hint=hint)
    return int(scope), tensor, k


def _range(entry: dict[str, Any], where: str) -> Range:
    _check(entry, RANGE_FIELDS, where)
    try:
        low, high, mean_abs = (float(entry[name]) for name in ("low", "high", "mean_abs"))
        return Range(low, high, mean_abs, entry["finite"])
    except (KeyError, ValueError) as error:
        hint = f"it has {', '.join(RANGE_FIELDS)}; or leave the range out"
        raise UsageError(f"not a range: {error}", where=where, hint=hint) from error


def _check(fields: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], where: str) -> None:
    for name, value in fields.items():
        if name not in known:
            raise UsageError(f"no field {name!r}", where=where, hint=f"there are {', '.join(known)}")
        kinds = known[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise UsageError(f"{name!r} cannot be {value!r}", where=where, hint=f"it takes {names}")


def _read_by(parse: Callable[[Any], object], value: Any, where: str) -> None:
    try:
        parse(value)
    except ValueError as error:
        raise UsageError(f"it cannot be {value!r}", where=where, hint=str(error)) from error


def _chosen(fields: Mapping[str, Any], name: str, options: tuple[str, ...], where: str) -> Any:
    if fields.get(name) not in options:
        hint = f"choose from {', '.join(options)}"
        raise UsageError(f"{name!r} cannot be {fields.get(name)!r}", where=where, hint=hint)
    return fields[name]


def _plain(value: float | bool) -> float | bool | Literal["nan", "inf", "-inf"]:
    """The number, or the name of NaN or an infinity, which JSON lacks; `float` reads both."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
