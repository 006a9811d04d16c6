"""The benchmark against other tools, as far as it goes without them and without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.preparation import Limits, child
from benchmarks.report import markdown

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
