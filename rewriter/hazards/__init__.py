"""Rules that find nodes which must not compute in the lower precision.

A rule is a function from one graph with its measured ranges to hazards. Rules edit nothing, and do not
know each other. `RULES` decide what `fix` keeps in FP32, where a hazard is as severe as its kind says
(`Kind.acts`). `SCAN_RULES` are what `scan` reports: most of those, and rules that only advise.
"""

from collections.abc import Callable, Iterable

from rewriter.hazards import (
    accumulation,
    magnitude,
    norms,
    resolution,
    small_values,
    target_rules,
    types,
    weights,
)
from rewriter.hazards.analysis import ALREADY_AVOIDED as ALREADY_AVOIDED
from rewriter.hazards.analysis import GraphAnalysis as GraphAnalysis
from rewriter.hazards.analysis import Hazard as Hazard
from rewriter.hazards.analysis import PrecisionRequest as PrecisionRequest
from rewriter.hazards.analysis import is_already_avoided as is_already_avoided

Rule = Callable[[GraphAnalysis], Iterable[Hazard]]

HAZARDS: tuple[Rule, ...] = (
    norms.unfused_norm,
    weights.masks,
    magnitude.overflow,
    magnitude.hidden_sums,
    magnitude.norm_operators,
    magnitude.long_softmax,
    accumulation.partial_sums,
    small_values.steep_functions,
    norms.lost_epsilon,
    small_values.small_operands,
    small_values.differences,
    magnitude.underflow,
    weights.weights,
    weights.batch_statistics,
    resolution.phase,
    resolution.positions,
    resolution.integers,
    resolution.coordinates,
    resolution.order,
    types.quantized,
    accumulation.accumulation,
    accumulation.slow_state,
    types.unmeasured,
)

_TYPES: tuple[Rule, ...] = (
    types.user_choice,
    types.no_lower_type,
    target_rules.kept_for_defects,
    types.generated,
    resolution.float64_outputs,
)

RULES: tuple[Rule, ...] = (*_TYPES, *HAZARDS)
"""The rules that `fix` uses, in order of precedence: the first that names a node gives the reason."""

SCAN_RULES: tuple[Rule, ...] = (
    *HAZARDS,
    resolution.float64_differences,
    types.cast_pairs,
    target_rules.known_defects,
    target_rules.refused_operators,
)
"""The rules that `scan` uses: all of them report, so a node may occur in several hazards."""
