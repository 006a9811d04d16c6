"""Every ending says what it is, and `fix`, `verify` and `scan` give one verdict."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from needs import needs_rtx, without_gpu
from nightly import NIGHTLY, small
from paths import MODELS
from test_cases import CASES as MODEL_CASES

import rewriter
from docs.endings import CASES, PAGE, section
from rewriter.base.errors import RewriterError
from rewriter.verification.verdict import deciding

QUICK = ("verified", "TF32", "refused")
ALONE = ("bad samples", "an option is not kept", "no check", "with ONNX Runtime")
"""Endings of `fix` alone: the others end with an error, do not know the option, or add latencies."""

OPTIONS: dict[str, dict[str, Any]] = {
    "--no-build": {"build": False},
    "--no-repair": {"repair": False},
    "--max-shapes x:8x64": {"max_shapes": {"x": (8, 64)}},
}
"""The keywords of a case's options."""

SHOWN = PAGE.read_text(encoding="utf-8")


@needs_rtx
@without_gpu
@pytest.mark.parametrize("name", CASES if NIGHTLY else QUICK)
def test_the_page_has_the_first_lines_that_are_printed(name: str) -> None:
    assert section(name) in SHOWN, "run `python -m docs.endings`"


def one_verdict(model: Any, data: Any, folder: Path, **options: Any) -> None:
    """Checks that the three commands agree: on the ending, the errors, the limits, and plain FP16."""
    fixed = folder / "fixed.onnx"
    first = rewriter.fix(model, fixed, inputs=data, **options)
    same = {name: options[name] for name in ("build", "max_shapes", "against") if name in options}
    again = rewriter.verify(model, fixed, inputs=data, engine="emulation", **same)
    assert again.passed is bool(first.verified)
    assert [(g.kind, g.brief) for g in again.gaps] == [(g.kind, g.brief) for g in first.gaps]
    assert again.proven is first.proven
    gain = f", {first.gain}" if first.gain and "(" not in first.ending[:30] else ""
    if first.verified is not False or first.conclusion.kind == "unbuildable":
        assert again.ending == first.ending.removesuffix(gain)
    ours, theirs = (deciding(check for check in one.checks if check.outputs) for one in (first, again))
    if ours is not None and ours.name in ("emulation", "tf32"):
        assert theirs is not None and ours.excuse == theirs.excuse
        assert [(o.name, o.relative_l2, o.tolerance, o.allowance) for o in ours.outputs] == [
            (o.name, o.relative_l2, o.tolerance, o.allowance) for o in theirs.outputs
        ]
    seen = rewriter.scan(model, inputs=data)
    refused = [f for f in seen.findings if f.kind == "refused-operator" and f.severity == "error"]
    assert bool(refused) is (first.conclusion.kind == "unbuildable")
    if first.before and "against" not in options:
        assert seen.plain is not None
        assert [(o.name, o.relative_l2) for o in seen.plain.outputs] == [
            (o.name, o.relative_l2) for o in first.before
        ]
        wrong = not all(output.passed for output in first.before)
        others = [f for f in seen.findings if f.severity == "error" and f.kind != "known-defect"]
        assert bool(others) is (wrong or bool(refused)), others


@needs_rtx
@without_gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.samples and name not in ALONE])
def test_three_commands_give_one_verdict_of_every_ending(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    options = OPTIONS.get(case.options, {})
    if case.plan:
        (tmp_path / "plan.json").write_text(case.plan, encoding="utf-8")
        options = {"plan": tmp_path / "plan.json"}
    if case.before:
        onnx.save(case.model(case.before), tmp_path / "float.onnx")
        options = {"against": tmp_path / "float.onnx"}
    onnx.save(case.model(), tmp_path / "net.onnx")
    (tmp_path / "data").mkdir()
    for number, sample in enumerate(case.samples):
        np.savez(tmp_path / "data" / f"{number}.npz", **sample)  # type: ignore[arg-type]
    one_verdict(tmp_path / "net.onnx", tmp_path / "data", tmp_path, **options)


@needs_rtx
@without_gpu
@pytest.mark.parametrize("name", small(MODEL_CASES) if NIGHTLY else ("bert", "mixed_casts", "conv_clip"))
def test_three_commands_give_one_verdict_of_every_case(name: str, tmp_path: Path) -> None:
    model, data = (MODELS / MODEL_CASES[name][key] for key in ("file", "inputs"))
    one_verdict(model, data, tmp_path)


def test_samples_that_are_refused_are_refused_by_all(tmp_path: Path) -> None:
    case = CASES["bad samples"]
    onnx.save(case.model(), tmp_path / "net.onnx")
    path, data = tmp_path / "net.onnx", [dict(one) for one in case.samples]
    for command in (rewriter.fix, rewriter.scan, lambda model, **more: rewriter.verify(model, model, **more)):
        with pytest.raises(RewriterError, match="is nan"):
            command(path, inputs=data)
