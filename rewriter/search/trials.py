"""The plans that a search by emulation tries; each is evaluated once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from rewriter.emulation.accumulate import sum_error
from rewriter.emulation.divergence import Divergence
from rewriter.figures.metrics import Metric
from rewriter.graph.fusion import conv_depth
from rewriter.graph.ops import COMPUTE_BOUND
from rewriter.plan import Plan
from rewriter.planning.costs.prices import Prices
from rewriter.planning.planner import extend_plan, in_bf16, node_key
from rewriter.search.candidate import Candidate
from rewriter.search.node_sets import in_attention, residual_streams, taking_sums
from rewriter.search.problem import Problem

LEAST_US = 0.01
"""Keeps the ranking finite for nodes without cost: two Casts that are fused."""

Types = tuple[frozenset[str], frozenset[str]]
"""The nodes of a plan in FP32, and those in BF16: plans that agree in them give the same model."""


def types_of(plan: Plan) -> Types:
    return plan.fp32, plan.bf16


@dataclass
class Trials:
    """Plans for one problem, with their evaluations.

    Attributes:
        plan: The rules' plan.
        reason: The reason in the plan for a node that the search puts in FP32.
        ranker: The problem with the samples and sums of the ranking; None: those of `problem`.
        count: Number of whole models that were evaluated.
    """

    problem: Problem
    plan: Plan
    metric: Metric
    reason: str
    ranker: Problem | None = None
    count: int = 0
    _plans: dict[Candidate, Plan] = field(default_factory=dict)
    _values: dict[Types, float] = field(default_factory=dict)
    _errors: Divergence | None = None

    @property
    def prices(self) -> Prices:
        return self.problem.prices

    def plan_of(self, candidate: Candidate) -> Plan:
        """Returns the rules' plan with the changes of a candidate, islands merged."""
        if candidate not in self._plans:
            extra = dict.fromkeys(sorted(candidate.added), self.reason)
            problem, released = self.problem, candidate.released
            plan = extend_plan(problem.model, problem.facts, self.plan, extra, released)
            self._plans[candidate] = in_bf16(plan, candidate.bf16)
        return self._plans[candidate]

    def types(self, candidate: Candidate) -> Types:
        return types_of(self.plan_of(candidate))

    def value(self, candidate: Candidate) -> float:
        """Returns the metric of a candidate's plan."""
        if (types := self.types(candidate)) not in self._values:
            self.count += 1
            self._values[types] = self.problem.emulated(self.plan_of(candidate), self.metric)
        return self._values[types]

    def latency_us(self, candidate: Candidate) -> float:
        """Returns the estimated time of a candidate's plan."""
        return self.prices.total_us(self.plan_of(candidate))

    def tried(self) -> list[Candidate]:
        """Returns the evaluated candidates in order; of equal plans the first."""
        return [c for c in self.different(list(self._plans), set()) if self.types(c) in self._values]

    def different(self, candidates: Iterable[Candidate], seen: set[Types]) -> Iterator[Candidate]:
        """Yields candidates whose plans differ from each other and from those in `seen`, which grows."""
        for candidate in candidates:
            if (types := self.types(candidate)) not in seen:
                seen.add(types)
                yield candidate

    @property
    def ranks_fp16_sums(self) -> bool:
        """True if the ranking has FP16 sums."""
        return (self.ranker or self.problem).accumulation == "fp16"

    def weights_alone(self) -> float:
        """Returns the metric if only the weights of MatMul, Conv and their like are rounded."""
        self.count += 1
        graph = self.problem.model.proto.graph
        others = frozenset(node_key(0, n) for n in graph.node if n.op_type not in COMPUTE_BOUND)
        return self.problem.with_rounded_constants(self.plan_of(Candidate(others)), self.metric)

    def ranking(self) -> list[str]:
        """Returns the keys of the nodes that add an error and are not kept yet, best first.

        The order is that of the squared error over the estimated cost of FP32.
        """
        if self._errors is None:
            self.count += 1
            self._errors = (self.ranker or self.problem).errors(self.plan)
        kept, extra = self.plan.fp32 | self.plan.bf16, self.prices.extra
        errors = self._added(self._errors)
        if not self.ranks_fp16_sums:
            for key, error in self._sums().items():
                errors[key] = math.hypot(errors.get(key, 0.0), error)
        open_keys = [key for key in errors if key in extra and key not in kept]
        return sorted(open_keys, key=lambda key: -(errors[key] ** 2) / (extra[key] + LEAST_US))

    def useful_nodes(self, *, norms: bool = False) -> list[str]:
        """Returns the ranking without nodes that make an engine worse; `norms` keeps norms that take sums."""
        barred = self._in_attention if norms else self._in_attention | self._taking_sums
        return [key for key in self.ranking() if key not in barred]

    def streams(self) -> list[str]:
        """Returns the residual streams, without nodes that make an engine worse in FP32."""
        barred = self._in_attention | self._taking_sums
        return [key for key in residual_streams(self.problem, self.plan) if key not in barred]

    @cached_property
    def _in_attention(self) -> frozenset[str]:
        return in_attention(self.problem, self.plan)

    @cached_property
    def _taking_sums(self) -> frozenset[str]:
        return taking_sums(self.problem, self.plan)

    def all_nodes(self) -> list[str]:
        """Returns the useful nodes, then, as a last resort, the other nodes of the ranking."""
        return list(dict.fromkeys((*self.useful_nodes(), *self.ranking())))

    def _sums(self) -> dict[str, float]:
        """Returns the error that FP16 sums add to each Conv, for a model too large to rank with them."""
        known = self.problem.facts.main
        sums = {}
        for node in self.problem.model.proto.graph.node:
            weight = known.get(node.input[1]) if node.op_type == "Conv" else None
            if weight is not None and weight.shape is not None:
                sizes = [size if isinstance(size, int) else 1 for size in weight.shape]
                sums[node_key(0, node)] = sum_error(conv_depth(node, sizes))
        return sums

    def _added(self, found: Divergence) -> dict[str, float]:
        """Returns the error that each node adds; nodes without float outputs have that of their inputs."""
        tensors: dict[str, float] = {}
        errors: dict[str, float] = {}
        for row in found.nodes:
            if row.added > 0.0:
                tensors[row.tensor] = max(tensors.get(row.tensor, 0.0), row.added)
                errors[row.key] = max(errors.get(row.key, 0.0), row.added)
        measured = {row.key for row in found.nodes}
        for node in self.problem.model.proto.graph.node:
            key, read = node_key(0, node), [tensors[name] for name in node.input if name in tensors]
            if key not in measured and read:
                errors[key] = max(read)
        return errors
