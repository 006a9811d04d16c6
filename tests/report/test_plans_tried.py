"""What a search tried, and what an engine measured, as the terminal and the page show it."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pages
import pytest

from rewriter.engines.protocol import Latency
from rewriter.figures.metrics import METRICS
from rewriter.jobs.fix.result import FixResult
from rewriter.plan import Decision, Plan
from rewriter.report import fix as fix_report
from rewriter.report import frontier, html, searched, terminal
from rewriter.report.fix_summary import rows
from rewriter.report.html.scatter import frontier_plot, searched_plot
from rewriter.search.pareto import FrontierPoint, frontier_of
from rewriter.search.tried_plans import Searched, TriedPlan
from rewriter.verification.verdict import Check, Verdict

TIMED = Check("run", True, "FP16 on this GPU", latency=Latency(52.04, 1.51, 48.0, 200, True))
BUILT = Check("build", True, "built")


def fixed(**changes: Any) -> FixResult:
    return replace(pages.fixed(), **changes)


def plan(fp32: int, bf16: int = 0) -> Plan:
    kept = [Decision(f"n{i}", "Add", f"0:n{i}", "overflow", "large") for i in range(fp32 + bf16)]
    return Plan(
        "fp16",
        decisions=tuple(replace(d, repair="bf16" if i < bf16 else "fp32") for i, d in enumerate(kept)),
        float_nodes=9,
    )


def tried(words: str, value: float, us: float | None, fp32: int) -> TriedPlan:
    return TriedPlan(value=value, latency_us=us, words=words, plan=plan(fp32), applied=False)


RULES = replace(tried("the rules' plan", 3e-3, 100.0, 2), spread_us=1.5)
BROKEN = replace(tried("without the head", math.inf, None, 1), problem="the build crashed\nSIGSEGV at 0x0")
CHOSEN = replace(tried("without epilogues", 2e-3, 90.0, 3), spread_us=0.5, applied=True)
FOUND = Searched("relative-l2", "TensorRT 10.15 on an H200", (RULES, BROKEN, CHOSEN))


def text_of_page(result: FixResult) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html.as_html(result)).split())


def in_a_terminal(result: FixResult) -> str:
    stream = io.StringIO()
    fix_report.print_result(result, terminal.console(stream), verbosity=1)
    return " ".join(stream.getvalue().split())


LATENCIES = [
    pytest.param({"verdict": Verdict((BUILT, TIMED))}, "52.0 us (+- 1.5) on this GPU", id="measured"),
    pytest.param(
        {"verdict": Verdict((TIMED,)), "searched": FOUND},
        "52.0 us (+- 1.5) on this GPU; 100.0 us before the search",
        id="another plan was faster",
    ),
    pytest.param(
        {"verdict": Verdict((TIMED,)), "searched": replace(FOUND, tried=(replace(RULES, applied=True),))},
        "52.0 us (+- 1.5) on this GPU",
        id="the rules' plan stayed",
    ),
    pytest.param(
        {"verdict": Verdict((TIMED,)), "searched": replace(FOUND, tried=(BROKEN, CHOSEN))},
        "52.0 us (+- 1.5) on this GPU",
        id="the rules' plan did not run",
    ),
    pytest.param({"verdict": Verdict((BUILT,)), "warnings": []}, "not measured: no engine ran", id="built"),
    pytest.param({"verdict": Verdict((BUILT,)), "warnings": ["NOT run: no GPU"]}, None, id="said elsewhere"),
    pytest.param(
        {"verdict": Verdict((BUILT,)), "warnings": ["large"]},
        "not measured: no engine ran",
        id="another note",
    ),
    pytest.param({"verdict": Verdict(()), "warnings": []}, None, id="nothing was built"),
    pytest.param({"verdict": None, "warnings": []}, None, id="not verified"),
]


@pytest.mark.parametrize(("changes", "words"), LATENCIES)
def test_the_summary_has_the_latency_or_why_there_is_none(changes: dict[str, Any], words: str | None) -> None:
    found = [text for label, text in rows(fixed(**changes), everything=True) if label == "Latency"]
    assert found == ([] if words is None else [words])


def test_the_page_has_the_latency_and_every_plan_that_was_tried() -> None:
    text = text_of_page(fixed(verdict=Verdict((TIMED,)), searched=FOUND, frontier=None))
    assert "Latency 52.0 µs ± 1.5, on this GPU" in text
    assert "Plans towards the lower left are better." in text
    assert "Plans tried (TensorRT 10.15 on an H200)" in text
    assert "the rules&#39; plan 0.003 100.0 1.5 2" in text
    assert re.search(r"without the head (\W+ )*1 the build crashed ", text)
    assert "SIGSEGV" not in text
    assert "without epilogues 0.002 90.0 0.5 3 applied" in text


def test_more_is_better_for_some_metrics() -> None:
    least = next(name for name, metric in METRICS.items() if metric.least)
    text = text_of_page(fixed(searched=replace(FOUND, metric=least), frontier=None))
    assert "Plans towards the upper left are better." in text


def test_the_plot_has_the_plans_that_ran() -> None:
    plot = searched_plot(FOUND)
    assert plot is not None
    assert [(point.kind, point.text) for point in plot.points] == [
        ("tried", "the rules' plan: relative-l2 0.003 at 100.0 µs"),
        ("applied", "without epilogues: relative-l2 0.002 at 90.0 µs"),
    ]
    assert plot.summary == (
        "2 plans: relative-l2 (less is better) from 0.002 to 0.003; latency from 90.0 to 100.0 µs "
        "(TensorRT 10.15 on an H200); applied: without epilogues with 0.002 at 90.0 µs."
    )
    slow, fast = plot.points
    assert fast.x < slow.x, "faster is further left"
    assert fast.y > slow.y, "a smaller error is lower, and y counts from the top"
    assert plot.legend == [("tried", "tried"), ("applied", "applied")]
    assert plot.line == f"M{fast.x:.1f} {fast.y:.1f}", "the slower plan is worse in both"


def test_plans_that_did_not_run_make_no_plot_and_stay_in_the_table() -> None:
    alone = replace(FOUND, tried=(BROKEN,))
    assert searched_plot(alone) is None
    text = text_of_page(fixed(searched=alone, frontier=None))
    assert "the build crashed" in text and "latency in µs" not in text
    assert "latency in µs (TensorRT 10.15 on an H200)" in text_of_page(fixed(searched=FOUND, frontier=None))


def test_the_terminal_compares_with_the_rules_plan() -> None:
    text = in_a_terminal(fixed(searched=FOUND))
    assert "Plans tried (TensorRT 10.15 on an H200)" in text
    assert "the rules' plan 0.003 100.0 1.5 +0.0% 2" in text
    assert "without the head 1 the build crashed" in text
    assert "without epilogues 0.002 90.0 0.5 -10.0% 3 applied" in text
    first_failed = in_a_terminal(fixed(searched=replace(FOUND, tried=(BROKEN, CHOSEN))))
    assert "without epilogues 0.002 90.0 0.5 3 applied" in first_failed


def test_json_has_what_failed_too() -> None:
    one, failed, chosen = searched.searched_dict(FOUND)["tried"]
    assert (one["value"], one["latency_us"], one["fp32"], one["applied"]) == (3e-3, 100.0, 2, False)
    assert (failed["latency_us"], failed["problem"]) == (None, BROKEN.problem)
    assert chosen["applied"] and not chosen["untried"]


def point(us: float, value: float, fp32: int, bf16: int = 0) -> FrontierPoint:
    return FrontierPoint(us, value, plan(fp32, bf16))


FAST, MIDDLE, SLOW = point(10.0, 1e-2, 0), point(11.0, 1e-3, 2, 1), point(20.0, 1e-4, 9)
BEATEN, NAN = point(15.0, 5e-2, 5), point(12.0, math.nan, 4)


def test_the_table_of_the_frontier_compares_with_the_fastest() -> None:
    found = frontier_of([SLOW, BEATEN, FAST, MIDDLE], "relative-l2", False, "recorded", MIDDLE.plan)
    text = in_a_terminal(fixed(frontier=found))
    assert "Frontier (relative-l2; latency recorded)" in text
    assert "10.00 +0.00% 0.01 0 0" in text
    assert "11.00 +10.00% 0.001 2 1 applied" in text
    assert "20.00 +100.00% 0.0001 9 0" in text
    assert "15.00" not in text


def test_the_drawing_marks_tried_best_and_applied() -> None:
    found = frontier_of([SLOW, BEATEN, FAST, MIDDLE, NAN], "relative-l2", False, "recorded", MIDDLE.plan)
    lines = frontier.drawing(found).splitlines()
    assert len(lines) == frontier.ROWS + 2
    left = " " * 10 + " |"
    assert lines[0].startswith(f"{'0.05':>10} |") and lines[frontier.ROWS - 1].startswith(f"{'0.0001':>10} |")
    marks = {
        (row, column - len(left)): mark
        for row, line in enumerate(lines[: frontier.ROWS])
        for column, mark in enumerate(line)
        if mark in "o*@"
    }
    assert sorted(marks.values()) == ["*", "*", "@", "o"], "NaN has no place"
    assert marks[0, round(0.5 * (frontier.COLUMNS - 1))] == "o"
    assert marks[frontier.ROWS - 1, frontier.COLUMNS - 1] == "*", "slowest and most accurate: bottom right"
    assert min(column for (_, column), mark in marks.items() if mark == "*") == 0, (
        "the fastest is at the left"
    )
    assert lines[-1].split() == ["10.00", "20.00", "us"]


def test_one_plan_is_drawn_in_the_middle() -> None:
    lines = frontier.drawing(frontier_of([FAST], "relative-l2", False, "recorded")).splitlines()
    [(row, column)] = [(i, line.index("*")) for i, line in enumerate(lines) if "*" in line]
    assert row == round(frontier.CENTRE * (frontier.ROWS - 1))
    assert column - 12 == round(frontier.CENTRE * (frontier.COLUMNS - 1))


def test_a_frontier_without_a_finite_value_says_so() -> None:
    found = frontier_of([NAN, point(9.0, math.inf, 1)], "relative-l2", False, "recorded")
    assert frontier.drawing(found) == "All tried plans have NaN or infinity in their outputs."
    assert frontier_plot(found) is None


def test_the_plot_of_the_frontier_says_which_plans_nothing_beats() -> None:
    found = frontier_of([SLOW, BEATEN, FAST, MIDDLE, NAN], "relative-l2", False, "recorded", MIDDLE.plan)
    plot = frontier_plot(found)
    assert plot is not None
    assert [(p.kind, p.text) for p in plot.points] == [
        ("tried", "5 nodes in FP32: relative-l2 0.05 at 15.0 µs"),
        ("best", "0 nodes in FP32: relative-l2 0.01 at 10.0 µs"),
        ("best", "9 nodes in FP32: relative-l2 0.0001 at 20.0 µs"),
        ("applied", "2 nodes in FP32, 1 in BF16: relative-l2 0.001 at 11.0 µs"),
    ]
    assert plot.line.count("L") == 2, "three plans are on it"
    assert [kind for kind, _ in plot.legend] == ["tried", "best", "applied"]


def test_more_is_better_turns_the_frontier_round() -> None:
    low, high, beaten = point(10.0, 30.0, 0), point(20.0, 40.0, 1), point(30.0, 35.0, 2)
    found = frontier_of([beaten, high, low], "psnr", True, "recorded")
    assert found.points == (low, high)
    plot = frontier_plot(found)
    assert plot is not None and "more is better" in plot.y_label
    assert {p.text.partition(":")[0]: p.kind for p in plot.points} == {
        "0 nodes in FP32": "best",
        "1 nodes in FP32": "best",
        "2 nodes in FP32": "tried",
    }
