"""Whether the emulation says what the engines of trained networks do, output by output: needs no GPU.

    python benchmarks/trained_agreement.py FOLDER TRAINED.json [NAME ...]

FOLDER is that of benchmarks/trained_inputs.py. Each variant of `trained.py` that does not depend on a GPU is made again and
emulated with FP16 sums and TF32, on the samples that judge. The errors of TRAINED.json are those of the engines.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.agreement import FACTOR
from benchmarks.trained import VARIANTS, judged, kept, make
from rewriter.emulation import emulation
from rewriter.model import facts, load
from rewriter.verification.expected import as_declared, run_all

ALIKE = ("plain", "rules", "accurate")
"""Variants whose file is the same with a GPU and without one."""


def emulated(model: Path, work: Path) -> dict[str, Any]:
    """The emulated errors of the outputs, by variant."""
    original = load(model)
    samples, expected = kept(model, original)
    found: dict[str, Any] = {}
    for name in ALIKE:
        made = make(model, work, name, VARIANTS[name])
        if made["exit"] is not None and (work / f"{name}.onnx").exists():
            fixed = load(work / f"{name}.onnx")
            outputs = run_all(
                emulation(fixed, facts.infer(fixed), "fp16", tf32=True),
                [as_declared(fixed, sample) for sample in samples],
            )
            found[name] = judged(original, expected, [dict(one) for one in outputs])["errors"]
    return found


def quotients(rows: dict[str, Any]) -> dict[str, float]:
    """The engine's error over the emulated one, for each variant and output that has both."""
    return {
        f"{variant} {output}": engine / guess
        for variant, errors in rows.get("emulated", {}).items()
        for output, guess in errors.items()
        if guess and (engine := rows.get(variant, {}).get("errors", {}).get(output))
    }


def main(folder: Path, out: Path, names: list[str]) -> None:
    found = json.loads(out.read_text())
    for model in sorted(folder.glob("*.onnx")):
        if "fp32" in found.get(model.stem, {}) and (not names or model.stem in names):
            with tempfile.TemporaryDirectory() as work:
                found[model.stem]["emulated"] = emulated(model, Path(work))
            out.write_text(json.dumps(found, indent=1) + "\n")
    pairs = {f"{name} {key}": q for name, rows in found.items() for key, q in quotients(rows).items()}
    apart = {name: q for name, q in pairs.items() if abs(math.log(q)) > math.log(FACTOR)}
    print(f"{len(pairs) - len(apart)} of {len(pairs)} within a factor of {FACTOR:g}; beyond it:")
    print("\n".join(f"  {name}: {q:.2f}" for name, q in sorted(apart.items(), key=lambda item: item[1])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
