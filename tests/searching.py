"""Searches by emulation for tests."""

import math

import graphs

from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Plan
from rewriter.jobs.search.goal import Budget, ErrorLimit, Found, Goal
from rewriter.jobs.search.run import cheapest, most_accurate
from rewriter.jobs.search.trials import AddedNodes, Trials
from rewriter.runtime.emulation import reference
from rewriter.verification.expected import run_all

CANCELLING = """
    g (float[256] x) => (float[256] y)
    <float big = {64.0}, float k = {0.7}, int64[2] axes = {0, 1}, float[1,1,3] copy = {0, 1, 0}> {
        h = Unsqueeze(x, axes) v = Conv <pads = [1, 1]> (h, copy) i = Squeeze(v, axes) p = Sin(i)
        a = Add(p, big) s = Sub(a, big) b = Mul(s, k) c = Tanh(b) d = Exp(c) e = Atan(d) f = Cos(e)
        y = Exp(f) }"""
"""The spacing of FP16 at 64 is 1/16: small numbers are lost in sums with it; other roundings are harmless."""


OFFSET = """
    g (float[4,64] x) => (float[4,64] y)
    <float offset = {300.0}, float share = {0.37}, int64[1] mid = {1}, float[1,1,3] copy = {0, 1, 0}> {
        h = Unsqueeze(x, mid) v = Conv <pads = [1, 1]> (h, copy) i = Squeeze(v, mid)
        a = Add(i, offset) t = Tanh(a) u = Mul(t, share) b = Sub(a, offset) c = Mul(b, share)
        y = Add(c, u) }"""
"""FP16 keeps two digits of x beside 300. All is in range, and a Conv is a layer: no rule sees it."""

HOPELESS = """
    g (float[2,8] x) => (float[2,2] y)
    <float[8,2] w = {2049.0, 2049.0, -2048.0, -2048.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
                     0.0, 0.0, 0.0, 0.0, 0.0, 0.0}> { y = MatMul(x, w) }"""
"""Neither FP16 nor TF32 holds 2049."""


def begin(source: Model, plan: Plan, goal: Goal, feeds: dict[str, Array] | None = None) -> Trials:
    """Trials of a search for `goal` with one sample, random unless it is given."""
    samples = [feeds or graphs.random_feeds(source)]
    exact = run_all(reference(source), samples)
    return Trials(source, samples, exact, plan, goal.measure, f"added by the search for {goal}")


def reachable(trials: Trials, goal: ErrorLimit | Budget) -> Found:
    return cheapest(trials, goal) if isinstance(goal, ErrorLimit) else most_accurate(trials, goal)


def tried(trials: Trials) -> list[AddedNodes]:
    """The evaluated candidates but the rules' plan, in order; of equal plans the first."""
    return [c for c in trials.different(list(trials._plans)) if trials.plan_of(c).fp32 in trials._values]


def most_emulations(nodes: int) -> int:
    """Upper bound of `Found.emulations` for a tolerance: 3 to begin with, then bisections."""
    return 3 + 5 * max(1, math.ceil(math.log2(nodes + 1)))
