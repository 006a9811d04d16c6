"""The catalogue page: fresh, complete, and true to the passes."""

import re
from pathlib import Path

import pytest

from docs.catalogue import PAGES, ROOT, main
from rewriter.hazards.analysis import KINDS as KINDS_OF_HAZARD
from rewriter.hazards.planning import free_fp32
from rewriter.passes.base import Pass
from rewriter.passes.fuse_softmax import FuseSoftmax
from rewriter.passes.pad_channels import PadChannels
from rewriter.pipeline import catalogue
from rewriter.pipeline.text import options_of, own_passes
from rewriter.report.explain import OTHER_RULES
from rewriter.runtime.metrics.metrics import METRICS

KINDS = list(own_passes().values())


def test_the_pages_are_fresh() -> None:
    assert main(["--check"]) == 0, "run `python -m docs.catalogue`"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_stale_page_fails_and_is_mended(page: Path, tmp_path: Path) -> None:
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["--check"], tmp_path) == 0
    fresh = (tmp_path / page).read_text(encoding="utf-8")
    stale = fresh.replace("|---|", "|---|---|by hand", 1).replace("TypedDict", "by hand", 1)
    (tmp_path / page).write_text(stale, encoding="utf-8")
    assert main(["--check"], tmp_path) == 1
    assert main([], tmp_path) == 0
    assert (tmp_path / page).read_text(encoding="utf-8") == fresh


def test_every_rule_of_a_plan_has_an_entry() -> None:
    named = re.compile(r"[Hh]azard\(\s*\w+,\s*\"([a-z0-9-]+)\"")
    files = (ROOT / "rewriter" / "hazards").rglob("*.py")
    used = {rule for file in files for rule in named.findall(file.read_text(encoding="utf-8"))}
    assert len(used) > 15
    assert used <= KINDS_OF_HAZARD.keys() | OTHER_RULES.keys()
    assert OTHER_RULES.keys() > free_fp32.FREE


def test_every_metric_has_an_entry_and_no_entry_is_stale() -> None:
    page = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    table = page.partition("| metric | unit |")[2].partition("\n\n")[0]
    entries = {
        name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
    assert {name for name in entries if ":" not in name} == METRICS.keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_pass_documents_itself(kind: type[Pass]) -> None:
    assert kind.__module__ == "rewriter.passes." + kind.name.replace("-", "_")
    assert catalogue.summary(kind).endswith("."), "its docstring begins with a sentence that says why"
    text = catalogue.page(kind)
    for option in options_of(kind).values():
        (line,) = [line for line in text.splitlines() if line.startswith(f"- `{option.name}` (")]
        assert "): " in line, f"option {option.name} is not explained under Options: in the docstring"


def test_a_page_holds_what_a_user_asks_for() -> None:
    text = catalogue.page(PadChannels)
    assert "FP32 result: within 1e-05" in text
    assert "- `least` (a whole number; default 32): Numbers of channels" in text
    assert "- a model below opset 13" in catalogue.page(FuseSoftmax)
    assert "Example (`pad-channels{step=2 least=1}`):" in text
    assert "-<float[3,1,1,1] a = {1, 2, 3}" in text and "+<float[4,1,1,1] a = {1, 2, 3, 0}" in text
