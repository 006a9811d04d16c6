"""The plans that a search tries: each is emulated once, and priced by recorded costs.

Some norms and nodes of attention make an engine worse in FP32, because they undo a free repair of the rules
or break a kernel (docs/plans.md#nodes-that-are-worse-in-fp32). An emulation with FP32 sums does not show it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

from rewriter.base.sandbox import processor_s
from rewriter.base.stopwatch import seconds_left, within
from rewriter.hazards.analysis import GraphAnalysis, PrecisionRequest
from rewriter.hazards.planning.free_fp32 import RULE
from rewriter.hazards.planning.planner import analyses, extend_plan
from rewriter.hazards.target_rules import lowered_for_defects
from rewriter.ir.graph.ops import ELEMENTWISE, REDUCING, TENSOR_CORE, VALUE_PRESERVING
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import NodePatterns, Plan, node_key
from rewriter.jobs.search.goal import Found, Goal
from rewriter.passes.base import Context, Shared
from rewriter.passes.mixed_precision import lowered
from rewriter.runtime.emulation import Accumulation, emulation
from rewriter.runtime.emulation.accumulate import ONE_ROUNDING, sum_error
from rewriter.runtime.emulation.divergence import contributions, diverge
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.metrics.metrics import Metric
from rewriter.target import Target
from rewriter.target.costs import Prices, priced
from rewriter.target.fusion import conv_depth, kernel_results
from rewriter.verification.arithmetic_checks import state_errors
from rewriter.verification.expected import as_declared, unread_states, with_states

LEAST_US = 0.01
"""Keeps the ranking finite for nodes without cost: two Casts that are fused."""

ROUNDED = 2.0 * ONE_ROUNDING
"""Largest error of a node that rounds its result, and else computes exactly: its operands may be rounded."""

SLOW_S = 2.0  # CPU seconds of an emulation from which a search ends near the best plan
RANKING_RUNS = 3  # computations of a ranking, side by side
CHECKS = 2  # emulations of each sample by a check: as it is built, and with TF32 off

AddedNodes = frozenset[str]
"""Keys of the nodes that a plan puts in FP32 in addition to the rules' plan."""


KEPT_BYTES = 2**22  # largest outputs of a run that are kept for the next search


@dataclass
class Memory:
    """Results of a search for the next one in the same model, for another limit or with one more sample.

    Attributes:
        rounded: As of `Context`.
        runs: Outputs of emulated plans. `ranked`: errors and shares as of `Trials`, from the first sample.
        emulation_s: Most CPU seconds of an emulation.
    """

    rounded: Shared = field(default_factory=dict)
    runs: dict[tuple[object, ...], Mapping[str, Array]] = field(default_factory=dict)
    ranked: dict[tuple[object, ...], tuple[dict[str, float], dict[str, float]]] = field(default_factory=dict)
    emulation_s: float = 0.0


@dataclass
class Trials:
    """Plans for one model, with their evaluations.

    Attributes:
        model: The model that `plan`, the rules' plan, is for. Candidates are ranked and priced on it.
        expected: Outputs of the original in FP32 for each of `samples`.
        reason: The reason in the plan for a node that the search puts in FP32.
        means_of: As for `lowered`.
        states: As `expected`, the final states that nothing reads: their relative L2 error counts as an
            output's. () if the metric is another.
        accumulation: Type of the sums of an emulated plan. `ranking_sums`: of those in the ranking.
        places: Numbers of the samples in `memory`; () without one.
        lower: Nodes that stay in the lower precision, as the user says.
        deadline: By `time.monotonic`; evaluations end early enough for a check of `checked` samples.
        count: Number of whole models that were evaluated.
        tried: The metric of each candidate so far.
    """

    model: Model
    samples: Sequence[Mapping[str, Array]]
    expected: Sequence[Mapping[str, Array]]
    plan: Plan
    metric: Metric
    reason: str = "added by a search"
    accumulation: Accumulation = "fp16"
    ranking_sums: Accumulation = "fp16"
    target: Target = field(default_factory=Target)
    means_of: Context | None = None
    states: Sequence[Mapping[str, Array]] = ()
    places: Sequence[int] = ()
    memory: Memory = field(default_factory=Memory)
    deadline: float = math.inf
    checked: int = 0
    lower: NodePatterns = field(default_factory=NodePatterns)
    count: int = 0
    tried: dict[AddedNodes, float] = field(default_factory=dict, init=False)
    _plans: dict[AddedNodes, Plan] = field(default_factory=dict, init=False)
    _values: dict[frozenset[str], float] = field(default_factory=dict, init=False)
    _check_s: float = field(default=0.0, init=False)

    @cached_property
    def prices(self) -> Prices:
        """Recorded costs of the model's nodes, at the shapes of the first sample."""
        return priced(self.model.at_sizes(self.samples[0]), self.target)

    def plan_of(self, added: AddedNodes) -> Plan:
        """Returns the rules' plan with more nodes in FP32, islands merged.

        A Loop, Scan or If has the nodes inside it in FP32, too, except its products, which cost the most.
        """
        if added not in self._plans:
            inside = (key for owner in added for key in self._inside.get(owner, {}).get(False, ()))
            extra = dict.fromkeys(sorted({*added, *inside}), self.reason)
            self._plans[added] = extend_plan(self.model, self.plan, extra)
        return self._plans[added]

    def value(self, added: AddedNodes) -> float:
        """Returns the metric of a candidate's plan, the worst over samples, with TF32 for FP32 products.

        Sums are emulated backwards: what a search chooses owes a part of its small error to chance, which the
        check of it, in the other order, does not share (docs/accuracy.md#emulated-sums).

        Candidates with the same nodes in FP32 are one.
        """
        plan = self.plan_of(added)
        if plan.fp32 not in self._values:
            with self._in_time():
                worst = min if self.metric.least else max
                self._values[plan.fp32] = worst(self._by_sample(plan))
        self.tried[added] = self._values[plan.fp32]
        return self._values[plan.fp32]

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Ends the block early enough for the check of a plan, by the slowest evaluation so far."""
        with within(self.deadline - self._check_s):
            seconds_left()
            yield

    def _by_sample(self, plan: Plan) -> list[float]:
        runs = self._runs(plan)
        values = [self.metric.worst(*pair) for pair in zip(self.expected, runs, strict=True)]
        states = zip(self.states, runs, strict=False)
        worst = [max(state_errors([exact], [run]).values(), default=0.0) for exact, run in states]
        return [max(value, own) for value, own in zip_longest(values, worst, fillvalue=0.0)]

    def _runs(self, plan: Plan) -> list[Mapping[str, Array]]:
        """The emulated outputs of a plan for each sample, with the states."""
        kept, places = self._key(plan), self.places or range(len(self.samples))
        runs = {n: self.memory.runs[*kept, n] for n in self.places if (*kept, n) in self.memory.runs}
        missing = [(n, s) for n, s in zip(places, self.samples, strict=True) if n not in runs]
        if missing:
            self.count += 1
            start, began = time.monotonic(), processor_s()
            low = lowered(self.model, plan, self.means_of)
            shown = with_states(low) if self.states else low
            with Session(emulation(shown, self.accumulation, tf32=True, backwards=True)) as session:
                opened = time.monotonic()
                runs |= {place: session.run(as_declared(low, sample)) for place, sample in missing}
            run_s = (time.monotonic() - opened) / len(missing)
            self._check_s = max(self._check_s, CHECKS * (opened - start + self.checked * run_s))
            self.memory.emulation_s = max(self.memory.emulation_s, processor_s() - began)
        self._keep(plan, ((place, runs[place]) for place in self.places))
        return [runs[place] for place in places]

    def _keep(self, plan: Plan, runs: Iterable[tuple[int, Mapping[str, Array]]]) -> None:
        """Keeps the outputs of a plan by the place of the sample, for this search and the next."""
        for place, outputs in runs:
            if sum(array.nbytes for array in outputs.values()) <= KEPT_BYTES:
                self.memory.runs[*self._key(plan), place] = outputs

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """All that the emulation of a plan depends on beside the model and the sample."""
        sums = self.accumulation, self.ranking_sums
        return plan.fp32, plan.bf16, plan.io, *sums, self.means_of is None, bool(self.states)

    @property
    def slow(self) -> bool:
        """True if an emulation costs so much that a plan near the best one is enough."""
        return self.memory.emulation_s > SLOW_S

    def evaluated(self, added: AddedNodes) -> float | None:
        """The metric of a candidate that needs no emulation, since its plan was evaluated; else None."""
        return self._values.get(self.plan_of(added).fp32)

    def latency_us(self, added: AddedNodes) -> float:
        return self.prices.total_us(self.plan_of(added))

    def different(self, candidates: Iterable[AddedNodes]) -> Iterator[AddedNodes]:
        """Yields candidates whose plans differ from each other and from the rules' plan."""
        seen = {self.plan.fp32}
        for candidate in candidates:
            if (fp32 := self.plan_of(candidate).fp32) not in seen:
                seen.add(fp32)
                yield candidate

    def found(self, goal: Goal, added: AddedNodes, *, met: bool = True) -> Found:
        """Returns the outcome of a search that ends with a candidate; see `Found`."""
        rules = AddedNodes()
        value, before, base = self.value(added), self.value(rules), self.latency_us(rules)
        cost = self.latency_us(added) - base
        return Found(goal, met, self.plan_of(added), value, before, self.count, cost, base)

    @cached_property
    def _groups(self) -> list[tuple[str, ...]]:
        """The keys of the nodes that add an error, are not kept yet and right in FP32, each with its readers.

        A result that is merely rounded stays so until the nodes that read it are in FP32, too.
        """
        shares, fp32, extra = self.shares, self.plan.fp32 | self.plan.bf16, self.prices.extra
        wrong = lowered_for_defects(self._survey)
        low = (n for n in self._survey.nodes if id(n) in wrong or any(self.lower.requests(n)))
        closed = fp32 | {node_key(self._survey.scope, node) for node in low}
        open_keys = {key: None for key in shares if key in extra and key not in closed}
        groups: list[tuple[str, ...]] = [(key,) for key in open_keys]
        for node in self._survey.nodes:
            if (key := node_key(self._survey.scope, node)) in open_keys and self.errors[key] <= ROUNDED:
                read = (
                    self._survey.downstream(name, lambda n: n.op_type in VALUE_PRESERVING)
                    for name in node.output
                )
                readers = {node_key(self._survey.scope, reader) for found in read for _, reader in found}
                groups.append((key, *sorted(readers & open_keys.keys() - {key})))
        return groups

    def ranked(self, *, by_cost: bool = True) -> list[str]:
        """The nodes by their squared error in the outputs, over the estimated cost of FP32 or not.

        Those that read a merely rounded result come where the same error is worth their cost.
        """

        def worth(group: tuple[str, ...]) -> float:
            cost = sum(self.prices.extra[key] for key in group) + LEAST_US if by_cost else float(len(group))
            return self.shares[group[0]] / cost

        groups = sorted(self._groups, key=worth, reverse=True)
        return self.with_products_inside(dict.fromkeys(key for group in groups for key in group))

    def with_products_inside(self, keys: Iterable[str]) -> list[str]:
        """The keys; after a Loop, Scan or If come the keys of the products inside it."""
        return [k for key in keys for k in (key, *self._inside.get(key, {}).get(True, ()))]

    @cached_property
    def shares(self) -> dict[str, float]:
        """The squared error of the outputs that each node causes under the rules' plan, by its key."""
        return self._ranked[1]

    @cached_property
    def errors(self) -> dict[str, float]:
        """The error that each node of the main graph adds under the rules' plan, by its key.

        Nodes without float outputs have the largest error of their inputs. A model too large to rank with
        FP16 sums has the errors of its Convs' sums by their depth.
        """
        return self._ranked[0]

    @cached_property
    def _ranked(self) -> tuple[dict[str, float], dict[str, float]]:
        """`errors` and `shares`, which are measured in one run."""
        key = (*self._key(self.plan), *self.places[:1])
        if not self.places or key not in self.memory.ranked:
            self.memory.ranked[key] = self._rank()
        return self.memory.ranked[key]

    def _rank(self) -> tuple[dict[str, float], dict[str, float]]:
        self.count += 1
        tensors: dict[str, float] = {}
        errors: dict[str, float] = {}
        start, began = time.monotonic(), processor_s()
        low, results = lowered(self.model, self.plan, self.means_of), list[dict[str, Array]]()
        with self._in_time():
            rows = diverge(
                self.model, low, self.samples[:1], self.ranking_sums, backwards=True, results=results
            )
        one_s = (time.monotonic() - start) / RANKING_RUNS
        self._check_s = max(self._check_s, CHECKS * max(1, self.checked) * one_s)
        self.memory.emulation_s = max(self.memory.emulation_s, (processor_s() - began) / RANKING_RUNS)
        if results and not self.states and self.ranking_sums == self.accumulation:
            self._keep(self.plan, zip(self.places, results, strict=False))
        for row in rows:
            if row.added > 0.0:
                tensors[row.tensor] = max(tensors.get(row.tensor, 0.0), row.added)
                errors[row.key] = max(errors.get(row.key, 0.0), row.added)
        measured = {row.key for row in rows}
        for node in self.model.proto.graph.node:
            key, read = node_key(0, node), [tensors[name] for name in node.input if name in tensors]
            if key not in measured and read:
                errors[key] = max(read)
            weight = self.model.facts().main.get(node.input[1]) if node.op_type == "Conv" else None
            if self.ranking_sums == "fp32" and weight is not None and weight.shape is not None:
                sizes = [size if isinstance(size, int) else 1 for size in weight.shape]
                errors[key] = math.hypot(errors.get(key, 0.0), sum_error(conv_depth(node, sizes)))
        wrong = state_errors(self.states, self._runs(self.plan)) if self.states else {}
        states: dict[str, float] = {}
        for node, *_, name in unread_states(self.model) if wrong else ():
            key = node_key(0, node)
            states[key] = max(states.get(key, 0.0), wrong.get(name, 0.0))
        shares = contributions(self.model, rows, errors)
        for key, error in states.items():
            errors[key] = max(errors.get(key, 0.0), error)
            shares[key] = shares.get(key, 0.0) + error * error
        return errors, shares

    @cached_property
    def _inside(self) -> Mapping[str, Mapping[bool, list[str]]]:
        """Keys of the products (True) and of the other nodes (False) inside nodes of the main graph."""
        owners: dict[int, str] = {}
        inside: dict[str, dict[bool, list[str]]] = {}
        for analysis in analyses(self.model, {}, self._request):
            graph = analysis.graph
            if graph.owner is not None and graph.parent is not None:
                owner = owners.get(id(graph.parent)) or node_key(0, graph.owner)
                kinds = inside.setdefault(owners.setdefault(id(graph), owner), {False: [], True: []})
                for node in analysis.nodes:
                    kinds[node.op_type in TENSOR_CORE].append(node_key(analysis.scope, node))
        return inside

    def useful_nodes(self) -> list[str]:
        """Returns the ranking without nodes that make an engine worse."""
        return [key for key in self.ranked() if key not in self._worse]

    def all_nodes(self) -> list[str]:
        """Returns the useful nodes, then, as a last resort, the other nodes of the ranking."""
        return list(dict.fromkeys((*self.useful_nodes(), *self.ranked())))

    @cached_property
    def _survey(self) -> GraphAnalysis:
        """The main graph as the hazard rules see it, without ranges."""
        return next(iter(analyses(self.model, {}, self._request)))

    @property
    def _request(self) -> PrecisionRequest:
        return PrecisionRequest(self.plan.precision, self.plan.io, target=self.target)

    @cached_property
    def _worse(self) -> frozenset[str]:
        """Keys of nodes that the rules do not keep: nodes of fused attention, whose kernel FP32 breaks, and
        norms and reductions that read an FP32 epilogue through elementwise nodes.
        """
        broken = (a for a in self.prices.attentions if a.us > 0.0)  # else the target fuses any types
        attention = frozenset[str]().union(*(a.nodes | a.inside for a in broken))
        analysis, plan = self._survey, self.plan
        epilogues = frozenset(d.key for d in plan.decisions if d.rule == RULE)
        results = kernel_results(
            analysis.nodes,
            begins=lambda n: node_key(analysis.scope, n) in epilogues,
            belongs=lambda n: n.op_type in ELEMENTWISE or n.op_type == "Split",
            source=analysis.source,
        )
        taking = frozenset(
            node_key(analysis.scope, node)
            for node in analysis.nodes
            if node.op_type in REDUCING
            and any(analysis.source(name) in results for name in node.input if name)
        )
        return (attention | taking) - plan.fp32 - plan.bf16
