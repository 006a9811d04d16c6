"""Several files on one page, and a closed loop in words, as JSON and as a page."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rewriter.batch.models import Entry, Outcome
from rewriter.batch.summary import Summary, as_page
from rewriter.jobs.closed_loop.result import LoopResult, OtherWord, OutputError, Repair, Stream
from rewriter.report import pipeline
from rewriter.report.html.pipeline import page
from rewriter.report.html.render import html
from rewriter.runtime.recording.record import Link, RecordedFile, Recording

OUTPUTS = (
    OutputError("decoder", "logits", 1e-3, 0.02),
    OutputError("decoder", "present", 2e-3, 0.1, state=True),
)
SAME = Stream(4, (1e-3, math.nan, 1e-3, 2e-3), OUTPUTS, printed=4)
OTHER = replace(
    SAME, calls=2, errors=(1e-3, 2e-3), other=OtherWord(1, "decoder", "logits", 0.012, 1.5), other_printed=2
)
LOOP = LoopResult("as-original", calls=4, limit=5e-3, plain=SAME, fixed=SAME, tf32=SAME)

LOOPS = {
    "As the original in the loop: 4 of 4 calls": LOOP,
    "As the original in the loop: 2 of 4 calls (ended early)": replace(
        LOOP, fixed=replace(SAME, calls=2), stopped=True
    ),
    "Differs at call 2 of 4, as FP32 with TF32 does": replace(
        LOOP, ending="within-limit", fixed=OTHER, tf32=OTHER
    ),
    "Differs at call 2 of 4, within the limit": replace(LOOP, ending="within-limit", fixed=OTHER),
    "As close as rounding allows in the loop: 4 of 4 calls; 3 of 4 printed words differ": replace(
        LOOP, ending="within-limit", fixed=replace(SAME, other_printed=3)
    ),
    "FAILED in the loop: decoder, state present, error 0.001 after 4 of 4 calls": replace(
        LOOP,
        ending="failed",
        culprit="decoder",
        state="present",
        repairs=(Repair("decoder", "search", 0.1, False),),
    ),
    "The loop was not compared: two runs of the original differ from call 3 on; "
    "give the script's random numbers a seed": LoopResult("refused", "random", "3"),
}

RECORDING = Recording(
    ("python", "script.py"),
    tuple(RecordedFile(name, f"/{name}.onnx", "", name, 2, {}) for name in ("encoder", "decoder")),
    (("encoder", 0), ("decoder", 0), ("decoder", 1), ("decoder", 2)),
    (
        Link("encoder", "hidden", "decoder", "hidden", None, 3),
        Link("decoder", "present", "decoder", "past", 2, 2),
    ),
    (),
    "",
    0,
    {},
)


@pytest.mark.parametrize("words", LOOPS)
def test_a_loop_in_words(words: str) -> None:
    loop = LOOPS[words]
    assert pipeline.verdict_line(loop) == words
    assert (pipeline.state(loop) == "bad") is (loop.passed is False)
    document = json.loads(json.dumps(pipeline.as_dict(loop)))
    assert (document["verdict"], document["passed"]) == (words, loop.passed)


def test_the_rows_have_margins_and_repairs() -> None:
    rows = [text for loop in LOOPS.values() for _, text in pipeline.rows(loop)]
    assert "fixed: another word after call 2, of decoder, where logits decides by 0.012 (usually 1.5)" in rows
    assert "decoder: searched for a smaller error: 0.1, not enough" in rows


def test_a_pipeline_has_links_and_curves() -> None:
    lines = [pipeline.FileLine(file.name, "Verified", "good", "1 of 9") for file in RECORDING.files]
    loop = LOOPS["Differs at call 2 of 4, as FP32 with TF32 does"]
    text = html(page("fixed/", "verdict", "good", [], lines, "rewriter fix", RECORDING, loop))
    assert "2 files; encoder feeds decoder" in text
    assert re.findall(r">(\d calls?), 1 of 9 in FP32<", text) == ["1 call", "3 calls"]
    assert ">1 state<" in text
    assert [len(path.split("L")) for path in re.findall(r'class="curve \w+" d="M([\d. L]+)"', text)[3:]] == [
        3,
        2,
        2,
    ]
    assert text.count('class="dot" d="M1.5') == 2
    assert "nan" not in text.lower().split("<main")[1]


def test_a_batch_has_the_pages_of_its_models_behind_it(tmp_path: Path) -> None:
    good = Outcome("verified", "", 3, 17, 9e-4, 1.0, ("a b.onnx", "a b.onnx.html"))
    bad = Outcome("refused", "it is no model")
    records = [
        (Entry("a b.onnx", Path("in/a b.onnx"), tmp_path / "out" / "a b.onnx"), good),
        (Entry("c.onnx", Path("in/c.onnx"), tmp_path / "out" / "c.onnx"), bad),
    ]
    text = as_page(Summary(records, "1 job", 2.0), tmp_path / "all.html")
    assert re.findall(r'href="([^#"d][^"]*)"', text) == ["out/a%20b.onnx.html"]
    assert "1 of 2 models passed" in text and "c.onnx: it is no model" in text
