"""A plan as a JSON file: written by `--save-plan`, edited by hand, applied by `--plan`.

The file names nodes by their key, which is the index of the node's graph and the node's first
output: both survive a change of types, and neither depends on how the model is stored. A line that
somebody adds by hand may give the node's name instead; `plan_fit.fit` finds its key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rewriter.ir.errors import UsageError
from rewriter.ir.model import write_text
from rewriter.ir.model.writing import from_json
from rewriter.ir.plan import Decision, InputsOutputs, Plan, Precision, Range, Repair, io_parts, plugin_types

SCHEMA = "rewriter-plan"
VERSION = 1
"""Incremented when a field changes its meaning or goes away, not for a new optional field."""

LOWER: tuple[Precision, ...] = ("fp16", "bf16")
"""Precisions of the nodes that a plan does not list."""

FIELDS: dict[str, Any] = {
    "schema": SCHEMA,
    "version": VERSION,
    "precision": "",
    "io": "keep",
    "float_nodes": 0,
    "fp32": [],
    "bf16": [],
    "norms_in_range": [],
    "rescaled": {},
    "plugin_types": [],
}
"""Fields of the file with their defaults, whose types they have. All but the first three are optional."""

NODE_FIELDS: dict[str, Any] = {
    "node": "",
    "op": "",
    "key": "",
    "rule": "user",
    "reason": "kept by the plan",
    "tensor": "",
    "range": {},
}
"""Fields of a node in FP32 or BF16. `key` or `node` is required; `tensor` and `range` may be null."""

RANGE_FIELDS = ("low", "high", "mean_abs", "finite")


def to_text(plan: Plan) -> str:
    """The plan as JSON, ending in a newline: the same plan gives the same bytes."""
    fields = {
        "schema": SCHEMA,
        "version": VERSION,
        "precision": plan.precision,
        "io": plan.io,
        "float_nodes": plan.float_nodes,
        **{name: [_entry(d) for d in plan.decisions if d.repair == name] for name in get_args(Repair)},
        "norms_in_range": sorted(plan.norms_in_range),
        "rescaled": {f"{scope}:{tensor}": k for scope, tensor, k in plan.exponents},
        **({"plugin_types": list(plan.plugin_types)} if plan.plugin_types else {}),
    }
    return json.dumps(fields, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _entry(decision: Decision) -> dict[str, Any]:
    fields = asdict(decision)
    del fields["repair"], fields["norm"]  # the name of the list states the repair
    if decision.range is not None:  # JSON has no NaN and no infinity; `float` reads their names
        numbers = fields["range"].items()
        fields["range"] = {name: n if math.isfinite(n) else str(n) for name, n in numbers}
    return fields


def from_text(text: str, where: str = "plan") -> Plan:
    """Parses a plan, of the file `where`; nodes that it gives by name alone have the key "".

    Raises:
        UsageError: not JSON, another schema or version, or an invalid field, which is named.
    """
    try:
        entries = from_json(text)
    except json.JSONDecodeError as error:
        hint = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"not JSON: {error.msg}", where=where, hint=f"correct {hint}") from error
    if not isinstance(entries, dict) or entries.get("schema") != SCHEMA:
        raise UsageError("not a plan", where=where, hint=f'`save-plan` writes one; "schema" is "{SCHEMA}"')
    if entries.get("version") != VERSION:
        version = f"a plan of version {entries.get('version')!r}, this is version {VERSION}"
        raise UsageError(version, where=where, hint="save it again with this release: `save-plan`")
    fields = _filled(entries, FIELDS, where)
    decisions = tuple(
        _decision(entry, repair, f"{where}: {repair}[{index}]")
        for repair in get_args(Repair)
        for index, entry in enumerate(fields[repair])
    )
    if fields["precision"] not in LOWER:
        what = f"'precision' cannot be {fields['precision']!r}"
        raise UsageError(what, where=where, hint=f"choose from {', '.join(LOWER)}")
    for name, parse in (("io", io_parts), ("plugin_types", plugin_types)):
        with _refusing(name, where, f"it cannot be {fields[name]!r}"):
            parse(fields[name])
    with _refusing("norms_in_range", where, "not a list of texts"):
        norms = frozenset(_text(name) for name in fields["norms_in_range"])
    with _refusing("rescaled", where, 'not {"0:tensor": exponent}, with the index of the graph'):
        exponents = tuple(_exponent(key, k) for key, k in fields["rescaled"].items())
    plugins = tuple(fields["plugin_types"])
    return Plan(
        fields["precision"], fields["io"], decisions, fields["float_nodes"], norms, exponents, plugins
    )


def read(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan from a file, as `from_text`.

    Raises:
        UsageError: it cannot be read, or is not a plan.
    """
    try:
        return from_text(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, TypeError, UnicodeDecodeError) as error:
        hint = "`save-plan` writes a plan, which is text"
        raise UsageError(f"cannot read it: {error}", where=str(path), hint=hint) from error


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
    given = plan if isinstance(plan, Plan) else read(plan)
    contradicts = {
        **lists,
        "precision": precision not in (None, given.precision),
        "io": io not in (None, "keep", given.io),
    }
    for option in (name.replace("_", "-") for name, value in contradicts.items() if value):
        hint = "leave it out, or edit the plan"
        raise UsageError("it contradicts the plan", option=option, hint=hint)
    return given


def write(plan: Plan, path: Path) -> None:
    """Writes a plan; `path` is replaced only when the new file is complete.

    Raises:
        OutputError: the folder does not exist or cannot be written, or the disk is full.
    """
    write_text(to_text(plan), path, "the plan")


def _filled(entries: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields, with defaults for those that lack; null is a field that lacks."""
    for name, value in entries.items():
        if name not in defaults:
            raise UsageError(f"no field {name!r}", where=where, hint=f"there are {', '.join(defaults)}")
        kind = type(defaults[name])
        if type(value) is not kind and not (value is None and name in ("tensor", "range")):
            hint = f"it takes {kind.__name__}"
            raise UsageError(f"{name!r} cannot be {value!r}", where=where, hint=hint)
    return {**defaults, **entries}


def _decision(entry: object, repair: Repair, where: str) -> Decision:
    if not isinstance(entry, dict):
        hint = 'such as {"node": "/encoder/Softmax"}'
        raise UsageError("not an object with fields", where=where, hint=hint)
    fields = _filled(entry, NODE_FIELDS, where)
    if not fields["key"] and not fields["node"]:
        raise UsageError("no node is named", where=where, hint='give its name as "node", or its "key"')
    measured, bounds = fields.pop("range"), None
    if measured:
        with _refusing("range", where, f"it has {', '.join(RANGE_FIELDS)}; or leave the range out"):
            low, high, mean_abs = (float(measured[name]) for name in RANGE_FIELDS[:3])
            bounds = Range(low, high, mean_abs, bool(measured["finite"]))
    return Decision(**{**fields, "tensor": fields["tensor"] or None}, range=bounds, repair=repair)


def _exponent(key: str, k: object) -> tuple[int, str, int]:
    scope, _, tensor = key.partition(":")
    if not tensor or type(k) is not int:
        raise ValueError(f"{key!r}: {k!r}")
    return int(scope), tensor, k


def _text(entry: object) -> str:
    if not isinstance(entry, str):
        raise TypeError(f"it has {entry!r}")
    return entry


@contextmanager
def _refusing(field: str, where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hint = f"correct it, or leave it out: {error}"
        raise UsageError(what, where=f"{where}: {field}", hint=hint) from error
