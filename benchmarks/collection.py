"""The last stage of side_by_side.py: collects the results of the other stages in WORK into one JSON."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison import Case, read_json, write_json
from benchmarks.headline import Row
from benchmarks.measurement import WITHOUT_TF32
from benchmarks.report import markdown
from benchmarks.variants import VARIANTS
from rewriter.pipeline.options import FixOptions, VerifyOptions

PACKAGES = (
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "numpy",
    "nvidia-modelopt",
    "onnxconverter-common",
    "tensorrt",
    "tensorrt-rtx",
)


def collect(cases: Sequence[Case]) -> list[Row]:
    """One row for each variant of each model, with all its measurements."""
    rows = []
    for case in cases:
        measured = read_json(case.work / "measured.json")
        for variant in [*VARIANTS, WITHOUT_TF32]:
            row = read_json(case.work / f"{variant}.json")
            built = read_json(case.work / f"{variant}.built")
            if not row and not built:
                continue
            row = {"model": case.name, "variant": variant} | row
            if built:
                row |= {"builds": built["builds"], "build_s": built["wall_s"], "build_note": built["note"]}
            if variant in measured:
                row["engine"] = measured[variant]
            rows.append(row)
    return rows


def data(cases: Sequence[Case]) -> Row:
    """Numbers of samples that the tools had; the sample that is compared is held out."""
    counts = {len(list(case.calibration.glob("*.npz"))) for case in cases if case.calibration.is_dir()}
    return {"calibration": sorted(counts), "held_out": True}


def default_sums() -> dict[str, str]:
    """Default type in which the emulations of `fix` and `verify` sum FP16 products."""
    return {
        "fix": FixOptions().accumulation or "as recorded of the target",
        "verify": VerifyOptions().accumulation,
    }


def versions(python: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Versions in rewriter's environment, in the other tools' environment, and of the GPU and its library."""
    code = (
        "import json; from importlib.metadata import version, PackageNotFoundError\n"
        "def v(p):\n try: return version(p)\n except PackageNotFoundError: return None\n"
        f"print(json.dumps({{p: x for p in {PACKAGES!r} if (x := v(p))}}))"
    )
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for title, interpreter in (("rewriter's", sys.executable), ("other tools'", python)):
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
        found[title] = json.loads(done.stdout)
    describe = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    found["commit"] = describe.stdout.strip()
    hosts = [read_json(case.work / "measured.json").get("host") for case in cases]
    return found | next((host for host in hosts if host), {})


def write(cases: Sequence[Case], python: str, out: Path) -> None:
    """Writes `out` as JSON, and the same as Markdown next to it."""
    found = {
        "versions": versions(python, cases),
        "data": data(cases),
        "default_sums": default_sums(),
        "rows": collect(cases),
    }
    write_json(out, found)
    out.with_suffix(".md").write_text(markdown(found))
