"""The search on an engine: groups of nodes one by one, then combined, then the best plan refined.

It tries some thirty plans in batches. The rules' plan comes first: its time shows how many others fit. Then
comes every group alone, the most promising first. Squared errors of independent changes add up, and times do
roughly. These sums select combinations: groups that save time, groups that save error for their time, both,
and the best two, three, and so on. Last comes the best plan with one group more or less. A plan that does not
fit in the remaining time is not started. The choice depends on the measurements alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rewriter.plan import Plan
from rewriter.search.candidate import Group, united
from rewriter.search.goal import ErrorLimit, Found, Goal
from rewriter.search.select import LEAST_DIFFERENCE, Trial, chosen, objective
from rewriter.search.trials import Trials, types_of
from rewriter.search.tried_plans import Judged, Measured

FIRST, SECOND, THIRD = 18, 7, 5
"""Most plans with one group, with several, and refined; the rules' plan is not counted."""

SINGLES = 0.65
"""Share of the affordable plans that have one group; the rest are combinations of groups that helped."""

DEEPEST = 5
"""Most groups that save time, and most that save error, in a combination."""

Progress = Callable[[str], None]
Groups = tuple[Group, ...]


class Evaluator(Protocol):
    """Judges whole plans, many at a time."""

    @property
    def origin(self) -> str:
        """Source of the latencies, for the report."""
        ...

    def measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """Yields the evaluation of each plan as it becomes known. A plan that fails raises no error."""
        ...

    def affords(self) -> int:
        """Returns how many more plans there should be time for."""
        ...


@dataclass(frozen=True)
class Effect:
    """The effect of one group alone.

    Attributes:
        faster: Share of the latency that it saves; 0 within the noise.
        square: Change of the squared error as a share of the rules' plan's: -1 removes all of it.
    """

    group: Group
    faster: float
    square: float


def by_measurement(
    trials: Trials,
    batches: Iterable[Sequence[Group]],
    goal: Goal,
    judge: Evaluator,
    report: Progress = lambda line: None,
) -> Found:
    """Returns the best plan for `goal` of those that `judge` evaluated.

    Args:
        trials: Makes the plans from the rules' plan.
        batches: Batches of groups, most promising first; `FIRST` groups are tried. A batch is asked for after
            the one before it was judged. If the rules' plan misses the goal, the last batch, which makes
            plans more accurate, comes first.
        report: Called with a line after each plan.
    """
    search = _Search(trials, judge, goal, report)
    search.batch([()])
    if not search.base.untried:
        met = goal.meets(search.base.worth.value)
        _one_by_one(search, batches if met else reversed(list(batches)))
    for make, most in ((_combined, SECOND), (_refined, THIRD)):
        if not search.base.works:
            break
        search.batch(make(search)[: min(most, judge.affords())])
    return search.found()


def _one_by_one(search: _Search, batches: Iterable[Sequence[Group]]) -> None:
    left = FIRST
    for batch in batches:
        most = min(left, math.ceil(SINGLES * search.judge.affords()))  # each run improves this estimate
        search.batch([(group,) for group in batch[:most]])
        left -= len(batch[:most])
        if left <= 0 or most < len(batch):
            return


@dataclass
class _Search:
    """The plans tried so far."""

    trials: Trials
    judge: Evaluator
    goal: Goal
    report: Progress
    tried: list[Trial] = field(default_factory=list)

    @property
    def base(self) -> Trial:
        """The rules' plan."""
        return self.tried[0]

    def batch(self, combinations: Sequence[Groups]) -> None:
        """Judges unions of groups, each plan once, and keeps them in their order."""
        known = {types_of(one.plan) for one in self.tried}
        new: list[tuple[Groups, Plan]] = []
        for combination in combinations:
            candidate = united(combination)
            if candidate is not None and (types := self.trials.types(candidate)) not in known:
                known.add(types)
                new.append((combination, self.trials.plan_of(candidate)))
        before, found = list(self.tried), dict[int, Trial]()
        for place, worth in self.judge.measured([plan for _, plan in new]):
            found[place] = Trial(*new[place], worth, self.trials.metric.least)
            self.tried = [*before, *(found[at] for at in sorted(found))]
            if not worth.untried:
                self.report(self.line())

    def effects(self) -> list[Effect]:
        """Returns the effects of the groups whose plans work, in the order of the trials."""
        base, found = self.base, []
        for one in self.tried:
            if len(one.groups) == 1 and one.works:
                gained = base.us - one.us
                faster = gained / base.us if abs(gained) > one.noise(base) else 0.0
                found.append(Effect(one.groups[0], faster, _square(one, base)))
        return found

    def line(self) -> str:
        """Returns a line with the number of plans tried, and the best so far."""
        best, count = chosen(self.tried, self.goal), sum(not one.untried for one in self.tried)
        plans = f"{count} plan{'s' if count > 1 else ''} tried"
        if not best.works:
            return f"{plans}, none of them works"
        name, base = self.goal.metric, self.base
        more = f" ({best.us / base.us - 1.0:+.1%})" if base.works and best is not base else ""
        return f"{plans}; best so far: {best.words}, {name} {best.worth.value:.3g}, {best.us:.1f} us{more}"

    def found(self) -> Found:
        best, base, goal = chosen(self.tried, self.goal), self.base, self.goal
        kept = base.untried and not isinstance(goal, ErrorLimit)  # the rules' plan is no slower and no worse
        return Found(
            best.plan,
            kept or (goal.meets(best.worth.value) and best.works),
            best.worth.value,
            base.worth.value,
            None,
            sum(not one.untried for one in self.tried),
            best.us - base.us if best.works and base.works else 0.0,
            base.us if base.works else 0.0,
            goal,
            self.judge.origin,
            tuple(one.as_row(best) for one in self.tried),
        )


def _square(one: Trial, base: Trial) -> float:
    """Returns the change of the squared error as a share; metrics of which more is better are negated."""
    before, after = base.error, one.error
    if before > 0.0 and not one.least:
        return (after / before) ** 2 - 1.0
    return (after - before) / abs(before) if before else float(after > before)


def _combined(search: _Search) -> list[Groups]:
    """Returns the best two, three, ... of the groups that help, then the best combinations by their sums."""
    base, goal, effects = search.base, search.goal, search.effects()
    alone = [one for one in search.tried if len(one.groups) == 1 and one.works]
    rank = {one.groups: objective(one, base, goal) for one in alone}
    helping = [one for one in alone if rank[one.groups] < objective(base, base, goal)]
    helping.sort(key=lambda one: rank[one.groups])
    best = tuple(group for one in helping for group in one.groups)
    greedy = _new(search, (best[:length] for length in range(2, DEEPEST + 1)))[: SECOND // 2]
    faster = tuple(e.group for e in sorted((e for e in effects if e.faster > 0.0), key=_loss))
    better = tuple(e.group for e in sorted((e for e in effects if e.square < 0.0), key=_gain))
    both = (faster[:f] + better[:b] for f in range(DEEPEST + 1) for b in range(DEEPEST + 1))
    return _new(search, [*greedy, *_ranked(search, both)])[:SECOND]


def _loss(effect: Effect) -> tuple[float, float]:
    """Sorts by added squared error over saved latency; groups without a loss, the fastest first."""
    return max(effect.square, 0.0) / effect.faster, -effect.faster


def _gain(effect: Effect) -> float:
    """Sorts by saved squared error over the cost in latency, which counts as the noise at least."""
    return effect.square / max(-effect.faster, LEAST_DIFFERENCE)


def _refined(search: _Search) -> list[Groups]:
    """Returns the groups of the best plan with one less, and with one more."""
    best = chosen(search.tried, search.goal)
    alone = [effect.group for effect in search.effects() if effect.faster or effect.square]
    less = [tuple(g for g in best.groups if g != group) for group in best.groups]
    more = [(*best.groups, group) for group in alone if group not in best.groups]
    return _ranked(search, [*less, *more])[:THIRD]


def _new(search: _Search, combinations: Iterable[Groups]) -> list[Groups]:
    """Returns the possible combinations that have not been tried, each once, in their order."""
    before = {frozenset(one.groups) for one in search.tried}
    new: dict[frozenset[Group], Groups] = {}
    for combination in combinations:
        once = tuple(dict.fromkeys(combination))
        if frozenset(once) not in before and united(once) is not None:
            new.setdefault(frozenset(once), once)
    return list(new.values())


def _ranked(search: _Search, combinations: Iterable[Groups]) -> list[Groups]:
    """Returns the new combinations, the best by their estimate first."""
    base, effects = search.base, {effect.group: effect for effect in search.effects()}
    return sorted(
        _new(search, combinations),
        key=lambda groups: objective(_expected(base, groups, effects), base, search.goal),
    )


def _expected(base: Trial, groups: Groups, effects: dict[Group, Effect]) -> Trial:
    """Estimates the groups together: squared errors and times add up."""
    known = [effects[group] for group in groups if group in effects]
    faster, square = sum(e.faster for e in known), sum(e.square for e in known)
    if base.least or base.error <= 0.0:
        error = base.error + square * abs(base.error)
    else:
        error = base.error * math.sqrt(max(1.0 + square, 1e-4))
    worth = Measured(-error if base.least else error, max(base.us * (1.0 - faster), 0.0))
    return Trial(groups, base.plan, worth, base.least)
