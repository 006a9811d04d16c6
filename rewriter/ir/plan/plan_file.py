"""A plan as a JSON file: written by `--save-plan`, edited by hand, applied by `--plan`.

The file names nodes by their key, which is the index of the node's graph and the node's first
output: both survive a change of types, and neither depends on how the model is stored. A line that
somebody adds by hand may give the node's name instead; `planner.fit` finds its key.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from rewriter.base.errors import UsageError, shortened
from rewriter.ir.plan import Decision, InputsOutputs, Plan, Precision, Range, Repair, io_parts, plugin_types
from rewriter.ir.reading import content_of, from_json

SCHEMA = "rewriter-plan"
VERSION = 1
"""Incremented when a field changes its meaning or goes away, not for a new optional field."""

LARGEST_EXPONENT = 277
"""Between the smallest and the largest FP32 number are 2^276: no exponent beyond makes sense."""

NOT_JSON = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Numbers that JSON lacks, by their names in the file."""

Exponent = Annotated[int, Field(ge=-LARGEST_EXPONENT, le=LARGEST_EXPONENT)]


def _exponents(table: Mapping[str, Exponent]) -> tuple[tuple[int, str, int], ...]:
    parts = [(*key.partition(":")[::2], k) for key, k in table.items()]
    if not all(graph.isdecimal() and len(graph) < 9 and tensor for graph, tensor, _ in parts):
        raise ValueError('it takes {"0:tensor": exponent}, with the index of the graph; or leave it out')
    return tuple((int(graph), tensor, k) for graph, tensor, k in parts)


def _checked(parse: Any) -> AfterValidator:
    """Holds a text to what a function can parse."""
    return AfterValidator(lambda value: (parse(value), value)[1])


PluginTypes = Annotated[tuple[str, ...], _checked(plugin_types)]
Number = Annotated[float, BeforeValidator(lambda n: NOT_JSON.get(n, n) if isinstance(n, str) else n)]


@dataclass(frozen=True)
class RangeFields:
    """The range of a node's tensor."""

    low: Number
    high: Number
    mean_abs: Number
    finite: bool
    headroom: Number = 0.0  # as of the samples, which this run measures anew


@dataclass(frozen=True)
class NodeFields:
    """A node in FP32 or BF16. `key` or `node` is required."""

    node: str = ""
    op: str = ""
    key: str = ""
    rule: str = "user"
    reason: str = "kept by the plan"
    tensor: str | None = None
    range: RangeFields | None = None


@dataclass(frozen=True)
class PlanFields:
    """The fields of the file, and its types. All but the first three are optional."""

    schema: str
    version: int
    precision: Literal["fp16", "bf16"]
    io: Annotated[str, _checked(io_parts)] = "keep"
    float_nodes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    fp32: tuple[NodeFields, ...] = ()
    bf16: tuple[NodeFields, ...] = ()
    norms_in_range: frozenset[str] = frozenset()
    rescaled: Annotated[dict[str, Exponent], _checked(_exponents)] = field(default_factory=dict)
    plugin_types: PluginTypes = ()


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
    fields = {**vars(decision)}
    del fields["repair"], fields["norm"], fields["about"]  # the name of the list states the repair
    if decision.range is not None:  # JSON has no NaN and no infinity; `float` reads their names
        numbers = {**vars(decision.range)}
        del numbers["step"]  # the reason states it
        fields["range"] = {name: n if math.isfinite(n) else str(n) for name, n in numbers.items()}
    return fields


def from_text(text: str | bytes, where: str = "plan") -> Plan:
    """Parses a plan of the file `where`, with the key "" for nodes given by name; UsageError: it is none."""
    entries = from_json(text, Any, where, "correct it; `save-plan` writes a plan")
    if not isinstance(entries, dict) or entries.get("schema") != SCHEMA:
        raise UsageError("not a plan", where=where, hint=f'`save-plan` writes one; "schema" is "{SCHEMA}"')
    if entries.get("version") != VERSION:
        version = f"a plan of version {shortened(entries.get('version'))}, this is version {VERSION}"
        raise UsageError(version, where=where, hint="save it again with this release: `save-plan`")
    fields: PlanFields = from_json(text, PlanFields, where, "correct it, or leave it out")
    decisions = tuple(
        _decision(entry, repair, f"{where}: {repair}[{index}]")
        for repair in get_args(Repair)
        for index, entry in enumerate(getattr(fields, repair))
    )
    rest = fields.float_nodes, fields.norms_in_range, _exponents(fields.rescaled), fields.plugin_types
    return Plan(fields.precision, fields.io, decisions, *rest)


def read(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan from a file, as `from_text`; a UsageError if it cannot be read, or is none."""
    return from_text(content_of(path, "`save-plan` writes a plan"), str(path))


def given_plan(
    plan: str | os.PathLike[str] | Plan | None,
    precision: Precision | None,
    io: InputsOutputs | None,
    **lists: Sequence[str],
) -> Plan | None:
    """The plan that the user gave; options, and `lists` by name, that contradict it are refused."""
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


def _decision(entry: NodeFields, repair: Repair, where: str) -> Decision:
    if not entry.key and not entry.node:
        raise UsageError("no node is named", where=where, hint='give its name as "node", or its "key"')
    own = entry.range
    bounds = None if own is None else Range(own.low, own.high, own.mean_abs, own.finite)
    named = entry.node, entry.op, entry.key, entry.rule, entry.reason
    return Decision(*named, entry.tensor or None, bounds, repair)
