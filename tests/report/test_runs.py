"""`rewriter report`: two JSON reports compared, on the terminal and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest
from typer.testing import CliRunner

from rewriter.cli import app
from rewriter.errors import UsageError
from rewriter.model import write_json
from rewriter.plan import Plan
from rewriter.report import fix, html, scan, verify
from rewriter.report.runs import change, compare_runs, plain_number
from rewriter.verification.verdict import Verdict


@pytest.fixture
def reports(tmp_path: Path) -> tuple[Path, Path]:
    """Reports of a run, and of one with a worse error, one node less in FP32, and one pass less."""
    good = pages.fixed()
    assert good.plan is not None and good.verdict is not None
    checks = [
        replace(check, outputs=tuple(replace(o, relative_l2=10 * o.relative_l2) for o in check.outputs))
        for check in good.verdict.checks
    ]
    worse = replace(
        good,
        plan=Plan("fp16", decisions=good.plan.decisions[1:], float_nodes=good.plan.float_nodes),
        verdict=Verdict((*checks[:-1], replace(checks[-1], passed=False))),
        passes=[step for step in good.passes if step.name != "mixed-precision"],
        pipeline=good.pipeline.replace("mixed-precision{epilogues=true},", ""),
    )
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, result in zip(paths, (good, worse), strict=True):
        write_json(fix.as_dict(result), path)
    return paths


def test_what_differs_is_found(reports: tuple[Path, Path]) -> None:
    found = compare_runs(*reports)
    assert ("nodes in FP32", 3.0, 2.0) in found.figures
    assert list(found.gone) == ["/body/far"] and not found.new
    assert [name for name, _, _ in found.passes] == ["mixed-precision"]
    ((name, old, new),) = found.outputs
    assert name == "y" and old and new and new.error == pytest.approx(10 * old.error)
    assert [name for name, _, _ in found.facts] == ["pipeline"]
    assert found.verdict.startswith("The first passed, the second failed; the first is more accurate")


def test_equal_runs_are_alike(reports: tuple[Path, Path]) -> None:
    found = compare_runs(reports[0], reports[0])
    assert found.verdict.startswith("Both passed; their errors are alike")
    assert not (found.gone or found.new or found.passes or found.facts)


def test_the_terminal_shows_it_and_the_page_is_written(reports: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, reports), "-o", str(page)])
    assert done.exit_code == 0
    assert "x 10" in done.output and "/body/far" in done.output
    assert "only in the first: mixed-precision" in done.output
    assert "3 → 2" in page.read_text() and "x 10" in page.read_text()


@pytest.mark.parametrize(
    ("report", "result"), [(scan, pages.scanned), (verify, pages.verified)], ids=["scan", "verify"]
)
def test_reports_of_other_commands_compare(report: Any, result: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_json(report.as_dict(result()), path)
    found = compare_runs(path, path)
    assert found.before.figures and (found.before.nodes or found.before.outputs)
    assert "Both" in html.as_html(found)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no report"),
        ('{"schema_version": 1}', "no report"),
        ('{"schema_version": 99, "pipeline": ""}', "no report"),
        ('{"schema_version": 1, "pipeline": ""}', "not whole"),
        ('{"schema_version": 1, "pipeline": "", "plan": 3, "versions": [], "verified": 1}', "not whole"),
    ],
)
def test_what_is_no_report_is_refused(content: str, reason: str, reports: tuple[Path, Path]) -> None:
    reports[1].write_text(content)
    with pytest.raises(UsageError, match=reason):
        compare_runs(*reports)


def test_reports_of_two_commands_are_refused(reports: tuple[Path, Path]) -> None:
    write_json(scan.as_dict(pages.scanned()), reports[1])
    with pytest.raises(UsageError, match="of fix, the other of scan"):
        compare_runs(*reports)


def test_a_page_needs_its_suffix(reports: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", *map(str, reports), "-o", str(tmp_path / "page.pdf")])
    assert done.exit_code == 2 and "-o page.html" in done.output


def test_infinite_errors_compare(reports: tuple[Path, Path]) -> None:
    content = json.loads(reports[1].read_text())
    for check in content["checks"]:
        for output in check["outputs"]:
            output["relative_l2"] = "inf"
    reports[1].write_text(json.dumps(content))
    assert "the first is more accurate" in compare_runs(*reports).verdict


def test_changes_read_as_factor_or_percent() -> None:
    assert [change(1, 10), change(10, 9), change(0, 3), change(2, 2), change(None, 1)] == [
        "x 10",
        "-10.0%",
        "+3",
        "",
        "",
    ]
    assert [plain_number(v) for v in (3.0, 0.12345, None)] == ["3", "0.123", ""]
