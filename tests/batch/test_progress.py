"""What a batch shows while it runs and at its end, also of verdicts on types of GPU."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rewriter.batch.models import Entry
from rewriter.batch.state import Outcome, Record
from rewriter.batch.summary import Bars, Summary, as_dict, print_summary, write_page
from rewriter.report import terminal

ENTRY = Entry("nets/a.onnx", Path("a.onnx"), Path("out/a.onnx"))
FIXED = Outcome("verified", "fixed and verified", 6, 44, error=7e-4, seconds=1.5, peak_bytes=2**30)
WRONG = Outcome("failed", "the engine's result is NOT within 0.005", error=0.3, seconds=2.0)


def test_a_bar_has_a_line_for_each_model_that_runs() -> None:
    stream = io.StringIO()
    with Progress(console=Console(file=stream, width=100)) as shown:
        bars = Bars(shown, 2, lambda: None)
        bars.started(ENTRY)
        bars.started(ENTRY, "L4")
        assert [task.description for task in shown.tasks] == [
            "all models",
            "nets/a.onnx",
            "nets/a.onnx on L4",
        ]
        bars.ended(Record(ENTRY, FIXED))
        assert [(task.description, task.completed) for task in shown.tasks] == [
            ("all models", 1),
            ("nets/a.onnx on L4", 0),
        ]
        bars.ended(Record(ENTRY, FIXED, verdicts={"L4": WRONG}), "L4")
        assert [(task.description, task.completed) for task in shown.tasks] == [("all models", 1)]
        bars.ended(Record(ENTRY, FIXED, skipped=True))  # which never started
    lines = stream.getvalue().splitlines()
    assert "[1/2] nets/a.onnx: verified, 1.5 s" in lines
    assert "[1/2] nets/a.onnx on L4: failed, 2.0 s" in lines
    assert "[2/2] nets/a.onnx: verified, earlier" in lines


def test_verdicts_on_gpus_are_columns_and_a_failure_is_explained(tmp_path: Path) -> None:
    record = Record(ENTRY, FIXED, verdicts={"L4": WRONG})
    summary = Summary([record], ("L4", "H100"), "a cluster", 3.0)
    stream = io.StringIO()
    print_summary(summary, terminal.console(stream))
    text = " ".join(stream.getvalue().split())
    assert not summary.passed
    assert "nets/a.onnx verified 6 of 44 0.0007 failed 0.3 1.5 1.0" in text
    assert "nets/a.onnx on L4: the engine's result is NOT within 0.005" in text
    write_page(summary, tmp_path / "batch.html", "rewriter batch nets")
    assert "failed 0.3" in (tmp_path / "batch.html").read_text(encoding="utf-8")
    assert as_dict(summary)["models"][0]["verified_on"]["L4"]["ending"] == "failed"
