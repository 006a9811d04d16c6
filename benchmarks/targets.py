"""Judges the targets of the side by side by the measurements, model by model.

A target without any measurement is neither met nor missed. A model that lacks one side of a comparison is named.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.agreement import FACTOR, agreement_of
from benchmarks.headline import RIVAL, Found, Row, mean, ratios
from benchmarks.variants import CHECKED
from rewriter.figures.tolerances import TOLERANCES

NOISE = 1.02
"""Two runs of one engine differ by up to 2 %; errors that must be no worse are allowed the same."""

MEAN_LATENCY, MEAN_ERROR = 0.87, 0.42
SECOND = ("fix-accurate", "fix-accurate-50")
SECOND_LATENCY, SECOND_ERROR = 1.10, 1 / 3
NAIVE_LATENCY = 1.03
GARBAGE = 0.1
"""Naive FP16 with a larger relative L2 error is wrong, not inaccurate; measured: at most 1.4e-2, or at least 0.28."""
NAFNET_ERROR = 8e-4
SHARE = 0.9


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        title, goal: The target, in words.
        reached: The measurement, in words.
        met: None if nothing was measured.
        missed: The models, or variants, that miss it, each with its figures.
    """

    title: str
    goal: str
    reached: str = "not measured"
    met: bool | None = None
    missed: tuple[str, ...] = ()


def targets(rows: Sequence[Row]) -> list[Target]:
    """All targets, in the order of the table."""
    found = Found(rows)
    return [
        every_model(found),
        means(found, "fix"),
        means(found, CHECKED),
        second_plan(found),
        naive(found),
        nafnet(found),
        emulation_agreement(rows),
    ]


def targets_table(rows: Sequence[Row]) -> str:
    """The targets as a Markdown table."""
    verdicts = {True: "yes", False: "**no**", None: "-"}
    lines = ["| target | aim | reached | met | missed by |", "|---|---|---|---|---|"]
    lines += [
        f"| {t.title} | {t.goal} | {t.reached} | {verdicts[t.met]} | {'; '.join(t.missed)} |"
        for t in targets(rows)
    ]
    return "\n".join(lines)


def every_model(found: Found) -> Target:
    """At least as fast and as accurate as AutoCast on each model, except for noise."""
    title = "against AutoCast, every model"
    goal = "at least as fast (2 % noise allowed) and at least as accurate (likewise)"
    judged, missed = 0, []
    for model in found.models:
        error, rival_error = found.error(model, "fix"), found.error(model, RIVAL)
        us, rival_us = found.latency(model, "fix"), found.latency(model, RIVAL)
        if rival_error is None:
            missed.append(f"{model} (no AutoCast)")
            continue
        judged += 1
        if error is None:
            missed.append(f"{model} (fix did not run)")
            continue
        worse = []
        if not math.isfinite(error) or error > rival_error * NOISE:
            worse.append(f"error {_times(error, rival_error)}")
        if us is None or rival_us is None:
            worse.append("no latency")
        elif us > rival_us * NOISE:
            worse.append(f"latency {_times(us, rival_us)}")
        if worse:
            missed.append(f"{model} {', '.join(worse)}")
    return _counted(title, goal, judged, len(found.models), missed)


def means(found: Found, variant: str) -> Target:
    """The geometric means over the models for which both ratios are finite."""
    title = f"`{variant}`, geometric mean over the models"
    goal = f"latency {MEAN_LATENCY:g}x of AutoCast's, error {MEAN_ERROR:g}x"
    both = {
        model: (e, us)
        for model, (e, us) in ratios(found, variant).items()
        if e is not None and us is not None
    }
    if not both:
        return Target(title, goal)
    error, us = (mean([pair[which] for pair in both.values()]) for which in (0, 1))
    missed = [
        f"{model} {own_us:.2f}x, {own_error:.2f}x"
        for model, (own_error, own_us) in both.items()
        if own_us > MEAN_LATENCY or own_error > MEAN_ERROR
    ]
    reached = f"latency {us:.3f}x, error {error:.3f}x ({len(both)} models)"
    met = us <= MEAN_LATENCY and error <= MEAN_ERROR
    return Target(title, goal, reached, met, () if met else tuple(missed))


def second_plan(found: Found) -> Target:
    """For each model the accurate plan that comes closest to both limits."""
    title = "a second, accurate plan for every model"
    goal = f"a third of AutoCast's error at {SECOND_LATENCY:.2f}x of its latency or less"
    plans = {variant: ratios(found, variant) for variant in SECOND}
    judged, missed = 0, []
    for model in found.models:
        if found.error(model, RIVAL) is None:
            missed.append(f"{model} (no AutoCast)")
            continue
        judged += 1
        known = [
            (e, us, v) for v in SECOND for e, us in [plans[v][model]] if e is not None and us is not None
        ]
        if not known:
            missed.append(f"{model} (no such plan)")
            continue
        error, us, variant = min(known, key=_excess)
        if _excess((error, us, variant)) > 1.0:
            missed.append(f"{model} {variant} error {error:.3f}x at {us:.3f}x")
    return _counted(title, goal, judged, len(found.models), missed)


def _excess(plan: tuple[float, float, str]) -> float:
    """Error and latency of a plan, each over its limit; the larger of the two."""
    return max(plan[0] / SECOND_ERROR, plan[1] / SECOND_LATENCY)


def naive(found: Found) -> Target:
    """Never slower than naive FP16 on any model, and right where naive FP16 is garbage."""
    title = "against naive FP16"
    right = TOLERANCES["fp16"].value
    goal = f"never slower than {NAIVE_LATENCY:g}x; right (error below {right:g}) where it is garbage"
    missed, slowest, garbage, repaired = [], 0.0, 0, 0
    for model in found.models:
        theirs, error = found.error(model, "naive"), found.error(model, "fix")
        us, naive_us = found.latency(model, "fix"), found.latency(model, "naive")
        if theirs is None or error is None:
            missed.append(f"{model} (not both ran)")
            continue
        if us is not None and naive_us is not None:
            slowest = max(slowest, us / naive_us)
            if us > naive_us * NAIVE_LATENCY:
                missed.append(f"{model} latency {_times(us, naive_us)}")
        if theirs > GARBAGE:
            garbage += 1
            repaired += error < right
            missed += [] if error < right else [f"{model} error {error:.1e}"]
    if not slowest:
        return Target(title, goal)
    right_on = f"right on {repaired} of {garbage} where it is garbage" if garbage else "it is garbage nowhere"
    reached = f"at most {slowest:.2f}x; {right_on}"
    return Target(title, goal, reached, not missed, tuple(missed))


def nafnet(found: Found) -> Target:
    """NAFNet as fast as naive FP16, and accurate: the goal of its hand-made plan."""
    title, model = "NAFNet", "nafnet"
    goal = f"no slower than naive (2 % noise allowed) at {NAFNET_ERROR:.0e} or less".replace("e-0", "e-")
    error, us = found.error(model, "fix"), found.latency(model, "fix")
    naive_us = found.latency(model, "naive")
    if error is None or us is None or naive_us is None:
        return Target(title, goal)
    reached = f"{us:g} us against naive's {naive_us:g}, error {error:.1e}"
    return Target(title, goal, reached, us <= naive_us * NOISE and error <= NAFNET_ERROR)


def emulation_agreement(rows: Sequence[Row]) -> Target:
    """Agreement of the emulation with FP16 sums, on every variant that ran."""
    title = "emulation against engine"
    goal = f"finite or not agrees on all; error within a factor of {FACTOR:g} on {100 * SHARE:.0f} %"
    found = agreement_of(rows, "fp16")
    if not found.pairs or found.share is None:
        return Target(title, goal)
    agreeing = len(found.pairs) - len(found.surprises)
    reached = (
        f"finite or not on {agreeing} of {len(found.pairs)}; "
        f"within the factor {100 * found.share:.0f} % of {len(found.quotients)}"
    )
    missed = [f"{pair.name} (finite on one side)" for pair in found.surprises]
    missed += [f"{name} {q:.1f}x" for name, q in found.outside]
    if found.missing:
        missed.append(f"{found.missing} variants not emulated with FP16 sums")
    met = not found.surprises and not found.missing and found.share >= SHARE
    return Target(title, goal, reached, met, tuple(missed))


def _counted(title: str, goal: str, judged: int, models: int, missed: Sequence[str]) -> Target:
    if not judged:
        return Target(title, goal)
    return Target(title, goal, f"{models - len(missed)} of {models} models", not missed, tuple(missed))


def _times(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}x" if theirs and math.isfinite(ours / theirs) else f"{ours:.1e}"
