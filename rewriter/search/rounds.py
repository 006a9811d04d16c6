"""The search on an engine: groups of nodes one by one, then together, then the best plan refined.

It tries some thirty plans, in batches. The rules' plan comes first: its time shows how many others fit. Then
comes every group alone, the most promising first. Squared errors of independent changes add, and so do times,
roughly. From these sums follow the groups to combine: those that save time, those that save error for their
time, both, and the best two, three, and so on. Last comes the best plan with one group more or less. A plan
that does not fit in the remaining time is not begun. The choice depends on the measurements alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rewriter.plan import Plan
from rewriter.search.candidate import Candidate, Group, united
from rewriter.search.evaluator import Evaluator, Measured
from rewriter.search.goal import ErrorLimit, Found, Goal
from rewriter.search.select import LEAST_DIFFERENCE, Trial, chosen, objective
from rewriter.search.trials import Trials

FIRST, SECOND, THIRD = 18, 7, 5
"""Plans with one group, with several, and refined, at most; the rules' plan comes on top."""

SINGLES = 0.65
"""Share of what the time does for that is plans with one group; the rest is combinations of what helped."""

DEEPEST = 5
"""Groups in a row of the second batch, of those that make it faster and of those that make it better."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effect:
    """The effect of one group alone.

    Attributes:
        faster: Share of the latency that it saved; what is within the noise is 0.
        square: Change of the squared error over that of the rules' plan: -1 takes all of it away.
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
        trials: Whose `plan` is the rules'; it makes the plans.
        batches: Batches of groups, likeliest first, in batches and in all; `FIRST` of them are tried. A
            batch is generated after the one before it was judged. If the rules' plan is too inaccurate for
            the goal, the last batch comes first: what makes plans more accurate.
        report: Gets a line after each plan.
    """
    search = _Search(trials, judge, goal, report)
    search.batch([()])
    if not search.base.untried:
        met = goal.meets(search.base.worth.value)
        _one_by_one(search, batches if met else reversed(list(batches)), judge)
    for make, most in ((_combined, SECOND), (_refined, THIRD)):
        if not search.base.works:
            break
        search.batch(make(search, goal)[: min(most, judge.affords())])
    return search.found()


def _one_by_one(search: _Search, batches: Iterable[Sequence[Group]], judge: Evaluator) -> None:
    left = FIRST
    for batch in batches:
        most = min(left, math.ceil(SINGLES * judge.affords()))  # each run tells better what a plan costs
        search.batch([(group,) for group in batch[:most]])
        left -= len(batch[:most])
        if left <= 0 or most < len(batch):
            return


class _Search:
    """The plans tried so far."""

    def __init__(self, trials: Trials, judge: Evaluator, goal: Goal, report: Progress) -> None:
        self._trials, self._judge, self._goal, self._report = trials, judge, goal, report
        self.tried: list[Trial] = []

    @property
    def base(self) -> Trial:
        """The rules' plan."""
        return self.tried[0]

    def batch(self, rows: Sequence[tuple[Group, ...]]) -> None:
        """Judges unions of groups, each plan once, and keeps them in the order of `rows`."""
        known = {one.types for one in self.tried}
        new: list[tuple[tuple[Group, ...], Plan]] = []
        for row in rows:
            candidate = united(row) if row else Candidate()
            plan = None if candidate is None else self._trials.plan_of(candidate)
            if plan is not None and (plan.fp32, plan.bf16) not in known:
                known.add((plan.fp32, plan.bf16))
                new.append((row, plan))
        before, found = list(self.tried), dict[int, Trial]()
        for place, worth in self._judge.measured([plan for _, plan in new]):
            found[place] = Trial(*new[place], worth, self._trials.metric.least)
            self.tried = [*before, *(found[at] for at in sorted(found))]
            if not worth.untried:
                self._report(self.line())

    def effects(self) -> list[Effect]:
        """Of the groups that work alone, in the order in which they were tried."""
        base, found = self.base, []
        for one in self.tried:
            if len(one.groups) == 1 and one.works:
                gained = base.us - one.us
                faster = gained / base.us if abs(gained) > one.noise(base) else 0.0
                found.append(Effect(one.groups[0], faster, _square(one, base)))
        return found

    def line(self) -> str:
        """How many plans were tried, and the best so far."""
        best, count = chosen(self.tried, self._goal), sum(not one.untried for one in self.tried)
        plans = f"{count} plan{'s' if count > 1 else ''} tried"
        if not best.works:
            return f"{plans}, none of them works"
        name, base = self._goal.metric, self.base
        more = f" ({best.us / base.us - 1.0:+.1%})" if base.works and best is not base else ""
        return f"{plans}; best so far: {best.words}, {name} {best.worth.value:.3g}, {best.us:.1f} us{more}"

    def found(self) -> Found:
        best, base, goal = chosen(self.tried, self._goal), self.base, self._goal
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
            self._judge.origin,
            tuple(one.as_row(best) for one in self.tried),
        )


def _square(one: Trial, base: Trial) -> float:
    """Change of the squared error as a share; metrics of which more is better are turned round."""
    before, after = base.error, one.error
    if before > 0.0 and not one.least:
        return (after / before) ** 2 - 1.0
    return (after - before) / abs(before) if before else float(after > before)


def _combined(search: _Search, goal: Goal) -> list[tuple[Group, ...]]:
    """The best two, the best three, ... of the groups that help; then what should be best together."""
    base, effects = search.base, search.effects()
    alone = [one for one in search.tried if len(one.groups) == 1 and one.works]
    rank = {one.groups: objective(one, base, goal) for one in alone}
    helping = [one for one in alone if rank[one.groups] < objective(base, base, goal)]
    helping.sort(key=lambda one: rank[one.groups])
    row = tuple(group for one in helping for group in one.groups)
    greedy = _new(search, (row[:length] for length in range(2, DEEPEST + 1)))[: SECOND // 2]
    faster = _groups(sorted((e for e in effects if e.faster > 0.0), key=_loss))
    better = _groups(sorted((e for e in effects if e.square < 0.0), key=lambda e: e.square / _cost(e)))
    both = (faster[:f] + better[:b] for f in range(DEEPEST + 1) for b in range(DEEPEST + 1))
    return _new(search, [*greedy, *_ranked(search, both, goal)])[:SECOND]


def _loss(effect: Effect) -> tuple[float, float]:
    """Squared error for the latency that it saves; of those that lose nothing the fastest first."""
    return max(effect.square, 0.0) / effect.faster, -effect.faster


def _cost(effect: Effect) -> float:
    """Share of the latency that a group costs, at least the noise."""
    return max(-effect.faster, LEAST_DIFFERENCE)


def _groups(effects: Sequence[Effect]) -> tuple[Group, ...]:
    return tuple(effect.group for effect in effects)


def _refined(search: _Search, goal: Goal) -> list[tuple[Group, ...]]:
    """The best plan with one group less, and with one more."""
    best = chosen(search.tried, goal)
    alone = [effect.group for effect in search.effects() if effect.faster or effect.square]
    less = [tuple(g for g in best.groups if g != group) for group in best.groups]
    more = [(*best.groups, group) for group in alone if group not in best.groups]
    return _ranked(search, [*less, *more], goal)[:THIRD]


def _new(search: _Search, rows: Iterable[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    """The rows that have not been tried and whose groups go together, each once, in their order."""
    before = {frozenset(one.groups) for one in search.tried}
    new: dict[frozenset[Group], tuple[Group, ...]] = {}
    for row in rows:
        once = tuple(dict.fromkeys(row))
        if frozenset(once) not in before and united(once) is not None:
            new.setdefault(frozenset(once), once)
    return list(new.values())


def _ranked(search: _Search, rows: Iterable[tuple[Group, ...]], goal: Goal) -> list[tuple[Group, ...]]:
    """The new ones of the rows by what they are expected to give; equal ones in their order."""
    base, effects = search.base, {effect.group: effect for effect in search.effects()}

    def expected(row: tuple[Group, ...]) -> tuple[float, ...]:
        return objective(_expected(base, row, effects), base, goal)

    return sorted(_new(search, rows), key=expected)


def _expected(base: Trial, row: Sequence[Group], effects: dict[Group, Effect]) -> Trial:
    """Estimates the groups together: squared errors add, and times."""
    known = [effects[group] for group in row if group in effects]
    faster, square = sum(e.faster for e in known), sum(e.square for e in known)
    if base.least or base.error <= 0.0:
        error = base.error + square * abs(base.error)
    else:
        error = base.error * math.sqrt(max(1.0 + square, 1e-4))
    worth = Measured(-error if base.least else error, max(base.us * (1.0 - faster), 0.0))
    return Trial(tuple(row), base.plan, worth, base.least)
