"""Plans of small graphs, for tests."""

from collections.abc import Mapping

from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import Model
from rewriter.ir.plan import Plan, Range

SMALL = Range(-1.0, 1.0, 0.5, True)


def planned(
    source: Model,
    wanted: PrecisionRequest | None = None,
    ranges: Mapping[tuple[int, str], Range] | None = None,
) -> Plan:
    """The plan if every tensor lies within [-1, 1], but for those in `ranges`."""
    measured = {(scope, name): SMALL for scope, names in enumerate(source.facts().scopes) for name in names}
    return make_plan(source, {**measured, **(ranges or {})}, wanted or PrecisionRequest())


def kept(plan: Plan) -> dict[str, str]:
    """Rule by first output, of the main graph."""
    return {d.key.partition(":")[2]: d.rule for d in plan.decisions if d.key.startswith("0:")}
