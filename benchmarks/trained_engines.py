"""What engines make of the feeds that packages hand to their networks: on a GPU.

    python benchmarks/trained_engines.py FIXED FEEDS WORK [NAME ...]

FIXED holds NAME.onnx, FEEDS what `trained_results.py record` saw. An engine is built for all shapes of its feeds and run on
each; WORK/NAME gets the outputs, for `trained_results.py judge`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.protocol import EngineName, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import write_samples


def run(model: Path, feeds: list[Path], engine: EngineName, work: Path) -> str:
    """Writes the outputs for each feed under its name; returns what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        stored = write_samples(Path(folder) / "samples", (dict(np.load(path)) for path in feeds))
        settings = MeasureSettings(engine, timing=None)
        (outcome,) = measure([Variant(model.stem, model, stored)], settings, Path(folder) / "run")
        if not outcome.ran:
            return outcome.problem
        work.mkdir(parents=True, exist_ok=True)
        for index, path in enumerate(feeds):
            np.savez_compressed(work / path.name, **outcome.values(index))
    return ""


def main(fixed: Path, feeds: Path, work: Path, names: list[str]) -> None:
    engine = this_machine.choose().engine
    assert engine is not None, "this needs a GPU"
    for model in sorted(fixed.glob("*.onnx")):
        found = sorted((feeds / model.stem).glob("*.npz"))
        if found and (not names or model.stem in names):
            problem = run(model, found, engine, work / model.stem)
            print(model.stem, problem or f"{len(found)} feeds", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
