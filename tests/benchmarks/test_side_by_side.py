"""The benchmark against other tools, in the parts that need neither them nor a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from benchmarks.agreement import agreement_of, agreement_text
from benchmarks.children import Limits, child
from benchmarks.comparison import Case, read_json, write_json
from benchmarks.headline import table
from benchmarks.preparation import Tools, prepare_all
from benchmarks.report import markdown, with_summary
from rewriter.errors import InputsError

MODELS = ("t5_encoder", "resnet")
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "side_by_side.py")]


def small_case(folder: Path) -> None:
    """The T5 encoder with two samples: the committed one, which is held out, and its tokens in reverse."""
    shutil.copy(ROOT / "models" / "t5_encoder.onnx", folder)
    (folder / "t5_encoder").mkdir()
    with np.load(ROOT / "models" / "t5_encoder.npz") as archive:
        sample = dict(archive)
    np.savez(folder / "t5_encoder" / "0.npz", **sample)
    backwards: dict[str, Any] = {
        name: np.ascontiguousarray(array[..., ::-1]) for name, array in sample.items()
    }
    np.savez(folder / "t5_encoder" / "1.npz", **backwards)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """All stages on a small and a broken model, on ONNX Runtime's CPU: WORK, and the printed lines."""
    folder, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("work")
    small_case(folder)
    (folder / "resnet.onnx").write_bytes(b"no model")
    shutil.copytree(folder / "t5_encoder", folder / "resnet")
    said = []
    for stage in (
        ["prepare", "--variants", "fp32,naive,autocast,fix,fix-accurate", "--jobs", "2"],
        ["build", "--jobs", "2"],
        ["measure", "--engine", "onnxruntime"],
        ["report", "--json", str(work / "found.json")],
    ):
        command = [*SCRIPT, stage[0], str(folder), str(work), *stage[1:]]
        said.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return work, said


@pytest.fixture(scope="module")
def found(stages: tuple[Path, list[str]]) -> dict[str, dict[str, object]]:
    """The rows of the report by variant."""
    out = stages[0] / "found.json"
    collected = json.loads(out.read_text())
    assert out.with_suffix(".md").read_text() == markdown(collected)
    assert collected["data"] == {"calibration": [1], "held_out": True}
    return {row["variant"]: row for row in collected["rows"]}


def test_a_broken_model_does_not_stop_the_others(stages: tuple[Path, list[str]]) -> None:
    work, said = stages
    for text in said[:3]:
        lines = {name: [line for line in text.splitlines() if line.startswith(f"{name}:")] for name in MODELS}
        assert len(lines["t5_encoder"]) == 1, text
        assert lines["resnet"], text
    assert "no expected outputs" in said[0]
    assert "4 of 5 variants made; autocast:" in said[0]
    assert not (work / "resnet" / "measured.json").exists()


def test_no_tool_sees_the_sample_that_is_compared(stages: tuple[Path, list[str]]) -> None:
    work = stages[0] / "t5_encoder"
    (given,) = (work / "calibration").iterdir()
    assert given.name == given.resolve().name == "1.npz"
    plan = json.loads((work / "fix.plan").read_text())
    assert plan


def test_a_finished_stage_does_nothing(stages: tuple[Path, list[str]], tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(stages[0], work, symlinks=True)
    folder = (stages[0] / "t5_encoder" / "calibration" / "1.npz").resolve().parent.parent
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}
    for stage in (
        ["prepare", "--variants", "fp32,naive,fix"],
        ["build"],
        ["measure", "--engine", "onnxruntime"],
    ):
        command = [*SCRIPT, stage[0], str(folder), str(work), "t5_encoder", *stage[1:]]
        subprocess.run(command, check=True, capture_output=True)
    after = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}
    changed = {path.name for path, stamp in after.items() if before.get(path) != stamp}
    assert all("sample" in str(path) for path in after if path.name in changed), changed


def test_one_sample_cannot_be_held_out(tmp_path: Path) -> None:
    small_case(tmp_path)
    (tmp_path / "t5_encoder" / "1.npz").unlink()
    case = Case(tmp_path / "t5_encoder.onnx", tmp_path / "t5_encoder", tmp_path / "work" / "t5_encoder")
    with pytest.raises(InputsError, match="one sample"):
        case.hold_out()


def test_an_emulation_over_its_time_limit_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_case(tmp_path)
    case = Case(tmp_path / "t5_encoder.onnx", tmp_path / "t5_encoder", tmp_path / "work" / "t5_encoder")
    prepare_all([case], ["naive"], Tools(sys.executable, [], Limits()), 1)
    prepare_all([case], ["naive"], Tools(sys.executable, ["fp16"], Limits(seconds=0.1)), 1)
    note = read_json(case.work / "naive.json")["emulated_fp16"]["note"]
    assert note == "emulate naive fp16: stopped after 0 s"
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(f"t5_encoder: 1 of 1 variants made; naive: {note}")
    )


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert read_json(tmp_path / "a.json") == {"a": 1}
    assert read_json(tmp_path / "b.json") == {}


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


def test_a_missing_tool_is_a_row_with_its_error(found: dict[str, dict[str, object]]) -> None:
    row = found["autocast"]
    assert row["made"] is False
    assert "modelopt" in str(row["tool"])


def test_engines_are_built_without_a_gpu(found: dict[str, dict[str, object]]) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert found["fix"]["builds"] is True
    assert found["fp32-tf32-off"]["builds"] is True


def test_built_variants_are_run_and_timed(found: dict[str, dict[str, object]]) -> None:
    engines = {variant: row["engine"] for variant, row in found.items() if "engine" in row}
    assert set(engines) == {"fp32", "naive", "fix", "fix-accurate", "fp32-tf32-off"}
    for engine in engines.values():
        assert isinstance(engine, dict)
        assert engine["latency_us"] > 0
    assert engines["fp32"]["errors"]["hidden"] < 1e-5  # type: ignore[index]
    assert 1e-5 < engines["fix"]["errors"]["hidden"] < 5e-3  # type: ignore[index]


def test_the_committed_pages_match_the_committed_figures() -> None:
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
    _row("fix-accurate", 3e-3, 90.0, 1e-3),
    _row("naive", None, 70.0, None),
    _row("onnxconverter-common", None, 70.0, 1e-3),
    _row("fp32", 1e-9, 300.0, 1.0),
]


def test_ratios_to_autocast_skip_errors_that_are_not_finite() -> None:
    *_, row, means = table(ROWS).splitlines()
    assert row == (
        "| m | 2.0e-03 | 1.0e-03 | 3.0e-03 | not finite | 1.0e-09 | 100 | 80 | 90 | 70 | 300 | 0.50 | 0.80 |"
    )
    cells = [cell.strip() for cell in means.split("|")[2:-1]]
    assert cells[:5] == ["", "**0.500**", "**1.500**", "", "**0.000**"]
    assert cells[5:] == ["", "**0.800**", "**0.900**", "**0.700**", "**3.000**", "", ""]


def test_the_emulation_with_fp16_sums_is_compared_with_the_engines() -> None:
    rows = [
        _row("autocast", 2e-3, 100.0, 1.5e-3, 1.9e-3),
        _row("fix", 1e-3, 80.0, 4e-4, 9e-4),
        _row("fix-accurate-50", 3e-3, 90.0, 2.9e-3, 1e-3),
        _row("naive", None, 70.0, None, None),
        _row("onnxconverter-common", None, 70.0, None, 1e-3),
        _row("fix-accurate", 1e-3, 70.0, 1e-3),
        _row("fp32", 1e-9, 300.0, 1.0, 1.0),
    ]
    agreement = agreement_of(rows, "fp16")
    assert agreement.missing == 1
    assert [pair.name for pair in agreement.surprises] == ["m onnxconverter-common"]
    assert agreement.outside == [("m fix-accurate-50", pytest.approx(3.0))]
    assert agreement.share == pytest.approx(2 / 3)
    text = agreement_text(rows, {"fix": "fp32", "verify": "fp16"})
    assert "agrees on 4 of 5; error within a factor of 2 on 67 % of 3. 1 more variants ran" in text
    assert "With FP16 sums the engine's error is 1.52 times" in text
    assert "With FP32 sums the engine's error is 1.36 times" in text
    assert "Finite on one side alone: m onnxconverter-common." in text
    assert "m fix-accurate-50 3.0." in text
    assert text.endswith("`rewriter fix` in FP32; `rewriter verify` in FP16 (`--accumulation`).")


@pytest.mark.parametrize(
    ("code", "limits", "note"),
    [
        pytest.param("pass", Limits(), "", id="success"),
        pytest.param("raise SystemExit('no such thing')", Limits(), "no such thing", id="a failure"),
        pytest.param(
            "import sys; print('no', sys.argv[1][:-3] + 'x'); sys.exit('what to do: nothing')",
            Limits(),
            "no x",
            id="a note without folders and hints",
        ),
        pytest.param("raise SystemExit(3)", Limits(), "exit code 3", id="a failure without output"),
        pytest.param("import time; time.sleep(60)", Limits(seconds=0.5), "stopped after 0 s", id="too slow"),
        pytest.param(
            "x = bytearray(600_000_000); import time; time.sleep(60)",
            Limits(gigabytes=0.5),
            "stopped at 0.",
            id="too large",
        ),
    ],
)
def test_a_child_over_its_limits_is_stopped(tmp_path: Path, code: str, limits: Limits, note: str) -> None:
    ran = child([sys.executable, "-c", code, str(tmp_path / "log")], tmp_path / "log", limits)
    assert ran["note"].startswith(note)
    assert bool(note) == bool(ran["note"]) == bool(ran["exit_code"])
    assert ran["wall_s"] < 30
