"""The benchmark against other tools, as far as it goes without them and without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.headline import agreement, table
from benchmarks.preparation import Limits, child
from benchmarks.report import markdown, with_summary

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "side_by_side.py")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """All stages on one small model, run by ONNX Runtime's CPU; the rows by variant."""
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("work")
    shutil.copy(ROOT / "models" / "t5_encoder.onnx", folder)
    (folder / "t5_encoder").mkdir()
    shutil.copy(ROOT / "models" / "t5_encoder.npz", folder / "t5_encoder" / "0.npz")
    out = work / "found.json"
    for stage in (
        ["prepare", "--variants", "fp32,naive,autocast,fix,fix-accurate", "--accumulations", "fp32,fp16"],
        ["build", "--jobs", "2"],
        ["measure", "--engine", "onnxruntime"],
        ["report", "--json", str(out)],
    ):
        command = [*SCRIPT, stage[0], str(folder), str(work), *stage[1:]]
        subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert out.with_suffix(".md").read_text() == markdown(json.loads(out.read_text()))
    return {row["variant"]: row for row in rows}


def test_naive_is_garbage_and_fix_is_not(found: dict[str, dict[str, object]]) -> None:
    worst = {}
    for variant in ("naive", "fix"):
        emulated = found[variant]["emulated_fp16"]
        assert isinstance(emulated, dict)
        worst[variant] = emulated["errors"]["hidden"]
    assert worst["naive"] > 0.5
    assert worst["fix"] < 5e-3


def test_everything_is_counted(found: dict[str, dict[str, object]]) -> None:
    counts = {v: int(str(found[v]["fp32_nodes"])) for v in ("fp32", "naive", "fix")}
    assert counts["naive"] == 0 < counts["fix"] < counts["fp32"]


def test_a_tool_that_is_not_there_is_a_row_with_its_error(found: dict[str, dict[str, object]]) -> None:
    row = found["autocast"]
    assert row["made"] is False
    assert "modelopt" in str(row["tool"])


def test_engines_are_built_without_a_gpu(found: dict[str, dict[str, object]]) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert found["fix"]["builds"] is True
    assert found["fp32-tf32-off"]["builds"] is True


def test_what_was_built_is_run_and_timed(found: dict[str, dict[str, object]]) -> None:
    engines = {variant: row["engine"] for variant, row in found.items() if "engine" in row}
    assert set(engines) == {"fp32", "naive", "fix", "fix-accurate", "fp32-tf32-off"}
    for engine in engines.values():
        assert isinstance(engine, dict)
        assert engine["latency_us"] > 0
    assert engines["fp32"]["errors"]["hidden"] < 1e-5  # type: ignore[index]
    assert 1e-5 < engines["fix"]["errors"]["hidden"] < 5e-3  # type: ignore[index]


def test_the_committed_pages_are_those_of_the_committed_figures() -> None:
    folder = ROOT / "benchmarks"
    found = json.loads((folder / "side_by_side.json").read_text())
    again = "run `python benchmarks/report.py benchmarks/side_by_side.json --readme benchmarks/README.md`"
    assert (folder / "side_by_side.md").read_text() == markdown(found), again
    readme = (folder / "README.md").read_text()
    assert readme == with_summary(readme, found), again


def _row(
    variant: str, engine: float | None, us: float, fp32: float | None, fp16: float | None = 0.0
) -> dict[str, object]:
    row: dict[str, object] = {"model": "m", "variant": variant, "emulated_fp32": {"errors": {"y": fp32}}}
    if fp16 != 0.0:
        row["emulated_fp16"] = {"errors": {"y": fp16}}
    return row | {"engine": {"errors": {"x": 1e-9, "y": engine}, "latency_us": us}}


ROWS = [
    _row("autocast", 2e-3, 100.0, 1.5e-3),
    _row("fix", 1e-3, 80.0, 4e-4, 9e-4),
    _row("fix-rescaled", 3e-3, 90.0, 1e-3),
    _row("naive", None, 70.0, None),
    _row("onnxconverter-common", None, 70.0, 1e-3),
    _row("fp32", 1e-9, 300.0, 1.0),
]


def test_ratios_to_autocast_leave_out_what_is_not_finite() -> None:
    *_, row, means = table(ROWS).splitlines()
    assert row == ("| m | 2.0e-03 | 1.0e-03 | 3.0e-03 | not finite | 100 | 80 | 90 | 70 | 0.50 | 0.80 |")
    cells = [cell.strip() for cell in means.split("|")[2:-1]]
    assert cells == ["", "**0.500**", "**1.500**", "", "", "**0.800**", "**0.900**", "**0.700**", "", ""]


def test_the_emulation_is_held_to_the_engines() -> None:
    text = agreement(ROWS)
    assert "agrees on 4 of 5" in text
    assert "within a factor of 2 on 67 % of 3" in text
    assert "With FP16 sums the engine's error is 1.11 times" in text
    assert "Finite on one side alone: m onnxconverter-common." in text
    assert text.endswith("m fix-rescaled 3.0.")


@pytest.mark.parametrize(
    ("code", "limits", "note"),
    [
        pytest.param("pass", Limits(), "", id="all is well"),
        pytest.param("raise SystemExit('no such thing')", Limits(), "no such thing", id="it fails"),
        pytest.param("import time; time.sleep(60)", Limits(seconds=0.5), "stopped after 0 s", id="too slow"),
        pytest.param(
            "x = bytearray(600_000_000); import time; time.sleep(60)",
            Limits(gigabytes=0.5),
            "stopped at 0.",
            id="too large",
        ),
    ],
)
def test_limits(tmp_path: Path, code: str, limits: Limits, note: str) -> None:
    ran = child([sys.executable, "-c", code], tmp_path / "log", limits)
    assert ran["note"].startswith(note)
    assert bool(note) == bool(ran["note"]) == bool(ran["exit_code"])
    assert ran["wall_s"] < 30
