"""Each pass and each rule of FP32 in random surroundings: the engine beside ONNX Runtime in FP32.

    python benchmarks/surroundings.py WORK [--only NAME ...] [--count 50] [--seed 0] [--seconds 540] [--no-gpu]

The patterns are the cases of tests/passes/text for passes, and those of surroundings.toml for rules. A draw has one in
other sizes, with producers of its inputs and consumers of its outputs. `ours` is the draw after the pass, or after the
pipeline in which the rule acts, in FP16; `plain` is the draw in FP16.

A file's result is wrong if the engine errs by more than 5e-3 and by 10 times what the emulation of the same file does;
or if it does not build, load or run, and FP32 does. It is then made smaller, one neighbour and one size at a time, as
long as the symptom stays, and printed as a row of rewriter/target/quirks.toml. WORK/NAME.json has the draws of a
pattern; another run continues there. Without a GPU, files are built and not run.
"""

import argparse
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.population import THREADS, read_json, write_json
from benchmarks.surroundings_graphs import Draw, build, drawn, examples, feeds_of, quirk, smaller
from rewriter.base import sandbox
from rewriter.base.errors import EngineError, NativeError, RewriterError
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, load, save
from rewriter.runtime.emulation import emulation, reference
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.build import BuildOptions, build_here
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import values_of
from rewriter.runtime.engines.this_machine import ENGINES

LARGEST_ERROR = 5e-3
"""Ten steps of FP16: by emulation, the median of these short graphs of unit scale is 2e-4 to 2e-3."""

TIMES_EMULATED = 10.0
"""Emulation sums in another order, and knows no fast exponentials."""

TRIES, MOST_BISECTED = 12, {"ours": 3, "plain": 1}
"""Draws until one is valid; wrong results of a pattern that are made smaller."""

CALL_S, LAST_S = 60.0, 10.0
"""Limit of one step in a child; nothing starts in the last 10 seconds."""

VARIANTS = tuple(MOST_BISECTED)


# -- steps in a child ------------------------------------------------------------------------------


def make(draw: Draw, folder: Path) -> str:
    """Writes the files of a draw, its feeds and the expected outputs; returns why it is no valid draw, or ""."""
    model = build(draw)
    original, feeds = load(model), feeds_of(model, draw.number)
    expected = LocalSession(reference(original)).run(feeds)
    expected = {name: value for name, value in expected.items() if value.dtype.kind == "f"}
    if not all(np.isfinite(value).all() and value.any() for value in expected.values()):
        return "its reference is not finite, or zero"
    ours = examples()[draw.pattern][draw.example].lowered(original, feeds)
    if ours is None:
        return "the pass or rule does not act"
    save(ours, folder / "ours.onnx")
    save(original, folder / "fp32.onnx")
    try:
        low = TypeRequest(lambda _scope, _node: onnx.TensorProto.FLOAT16)
        save(retype(original, low), folder / "plain.onnx")
    except RewriterError:  # a constant is beyond FP16
        (folder / "plain.onnx").unlink(missing_ok=True)
    for name, values in (("feeds", feeds), ("expected", expected)):
        np.savez(folder / f"{name}.npz", **values)
    return ""


def build_engine(folder: Path, variant: str) -> str:
    """Builds a file of the folder; returns why not, or ""."""
    feeds = arrays(folder / "feeds.npz")
    target = folder / f"{variant}.engine"
    options = BuildOptions(values=values_of([feeds]), library="tensorrt_rtx", engine=target)
    report = build_here(folder / f"{variant}.onnx", options)
    if report.engine_bytes is not None:
        return ""
    return report.refusal[:300]


def run_engine(folder: Path, variant: str) -> float:
    """The error of an engine on the GPU.

    Raises:
        EngineError: it does not load or run.
    """
    files = [folder / f"{variant}.{kind}" for kind in ("onnx", "engine")]
    built = Variant(variant, files[0], (), engine=files[1])
    with closing(ENGINES["tensorrt-rtx"].load(built, MeasureSettings("tensorrt-rtx"))) as program:
        return worst_error(folder, program.run(arrays(folder / "feeds.npz")))


def emulate(folder: Path, variant: str) -> float:
    """The error of a file by emulation with FP16 sums."""
    model = load(folder / f"{variant}.onnx")
    session = LocalSession(emulation(model, "fp16", tf32=True))
    return worst_error(folder, session.run(arrays(folder / "feeds.npz")))


def worst_error(folder: Path, actual: Mapping[str, Array]) -> float:
    """Relative L2 error of the worst float output; infinite if one is not finite."""
    exact = arrays(folder / "expected.npz")
    errors = [np.linalg.norm(np.float64(actual[n]) - exact[n]) / np.linalg.norm(exact[n]) for n in exact]
    return max((float(e) if np.isfinite(e) else math.inf for e in errors), default=0.0)


def arrays(path: Path) -> dict[str, Array]:
    with np.load(path) as archive:
        return dict(archive)


# -- one draw --------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A child that makes, builds and runs in a folder of its own; another one follows a failure."""

    folder: Path
    gpu: bool
    until: float
    child: sandbox.Worker | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Raises NativeError if the child did not survive, and what the function raised."""
        limit_s = max(5.0, min(CALL_S, self.until + LAST_S - time.monotonic()))
        if self.child is None or not self.child.alive:
            threads = dict.fromkeys(THREADS, "1")
            self.child = sandbox.Worker(None, doing=function.__name__, limit_s=limit_s, env=threads)
        try:
            return self.child.call(function, *arguments, limit_s=limit_s)
        except EngineError:
            self.child.close()  # an error of CUDA stays with its process
            raise

    def outcome(self, variant: str) -> dict[str, Any]:
        """`symptom` and `problem`, or `error`, or `built` without a GPU; {} if there is no such file."""
        if not (self.folder / f"{variant}.onnx").exists():
            return {}
        symptom = "does not build"
        try:
            if problem := self.call(build_engine, self.folder, variant):
                return {"symptom": symptom, "problem": problem}
            symptom = "does not load"
            return {"error": self.call(run_engine, self.folder, variant)} if self.gpu else {"built": True}
        except RewriterError as error:
            died = isinstance(error, NativeError)
            return {"symptom": "crashes" if died else symptom, "problem": f"{symptom}: {error.what}"[:300]}

    def judged(self, draw: Draw) -> dict[str, Any]:
        """The outcomes of `ours` and `plain`, also `wrong`; `invalid`, or `refused` in FP32, too, say why not."""
        try:
            if why := self.call(make, draw, self.folder):
                return {"invalid": why}
        except Exception as error:
            return {"invalid": f"{type(error).__name__}: {error}"[:300]}
        try:
            rows = {variant: self.outcome(variant) for variant in VARIANTS}
            if all("symptom" in row or not row for row in rows.values()):
                fp32 = self.outcome("fp32")
                if "symptom" in fp32:
                    return {"refused": fp32["problem"]}
            for variant, row in rows.items():
                if row.get("error", 0.0) > LARGEST_ERROR:
                    row["emulated"] = self.call(emulate, self.folder, variant)
                    if row["error"] > TIMES_EMULATED * row["emulated"]:
                        row["symptom"] = "wrong"
        except RewriterError as error:  # any other is a fault of this file
            return {"invalid": f"{type(error).__name__}: {error}"[:300]}
        return rows

    def bisected(self, draw: Draw, variant: str, symptom: str) -> Draw:
        """The smallest draw with the same symptom, or the smallest in time."""
        for candidate in smaller(draw):
            if time.monotonic() > self.until:
                break
            if self.judged(candidate).get(variant, {}).get("symptom") == symptom:
                return self.bisected(candidate, variant, symptom)
        return draw


# -- all of them -----------------------------------------------------------------------------------


@dataclass
class Suite:
    """The results by pattern and number; each thread has a worker."""

    work: Path
    seed: int
    until: float
    gpu: bool
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    local: threading.local = field(default_factory=threading.local)

    def run(self, names: Sequence[str], count: int, jobs: int) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.found = {name: read_json(self.work / f"{name}.json") for name in names}
        left = [(name, n) for name in names for n in range(count) if str(n) not in self.found[name]]
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
            for job in [pool.submit(self._one, *one, place) for one in left]:
                if problem := job.exception():
                    print(repr(problem), file=sys.stderr)
        done = sum(map(len, self.found.values()))
        print(f"{done} of {count * len(names)} draws are done")

    def _one(self, pattern: str, number: int, place: str) -> None:
        """Draws, judges and, if something is wrong, bisects one surrounding."""
        if not hasattr(self.local, "worker"):
            self.local.worker = Worker(Path(tempfile.mkdtemp(dir=place)), self.gpu, self.until)
        worker: Worker = self.local.worker
        for attempt in range(TRIES):
            if time.monotonic() > self.until - LAST_S:
                return
            draw = drawn(pattern, self.seed, number, attempt)
            row = worker.judged(draw)
            if "invalid" not in row:
                break
        for variant in VARIANTS:
            symptom = row.get(variant, {}).get("symptom")
            rows = [*self.found[pattern].values()]
            if symptom and sum("quirk" in row.get(variant, {}) for row in rows) < MOST_BISECTED[variant]:
                least = worker.bisected(draw, variant, symptom)
                worker.judged(least)
                row[variant]["quirk"] = quirk(worker.folder / f"{variant}.onnx", least, symptom)
        if time.monotonic() < self.until:
            with self.lock:
                self.found[pattern][str(number)] = row
                write_json(self.work / f"{pattern}.json", self.found[pattern])


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each pattern, and the row of each wrong result for the quirk table."""
    yield "| pattern | valid | ours | median error | plain | median error |\n|---|---|---|---|---|---|"
    for name, rows in found.items():
        valid = [row for row in rows.values() if "ours" in row]
        cells = [cell for variant in VARIANTS for cell in _cells([row[variant] for row in valid])]
        why = [row.get("refused") or row["invalid"] for row in rows.values() if row not in valid][:1]
        yield f"| {name} | {len(valid)} of {len(rows)} {' '.join(why)[:100]} | {' | '.join(cells)} |"
    for name, rows in found.items():
        for number, variant in ((n, v) for n in rows for v in VARIANTS):
            one = rows[number].get(variant, {})
            if "symptom" in one:
                figures = one.get("problem") or f"by {one['error']:.2g}, emulated {one['emulated']:.2g}"
                yield f"\n# {name} {number}, {variant}: {one['symptom']}, {figures}{one.get('quirk', '')}"


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    symptoms = Counter(row["symptom"] for row in rows if "symptom" in row)
    errors = [row["error"] for row in rows if "error" in row]
    shown = ", ".join(f"{n} {symptom}" for symptom, n in symptoms.items())
    return shown, f"{np.median(errors):.1e}" if errors else ""


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names = sorted(examples())
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--count", type=int, default=50, help="surroundings of each pattern")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--no-gpu", action="store_true", help="build, and run nothing")
    asked = parser.parse_args()
    gpu = bool(nvidia_driver.gpu()) and not asked.no_gpu
    suite = Suite(asked.work.resolve(), asked.seed, time.monotonic() + asked.seconds, gpu)
    suite.run(asked.only, asked.count, asked.jobs)
    print("\n".join(table(suite.found)))


if __name__ == "__main__":
    from benchmarks.surroundings import main as start  # children find its functions by this name

    start()
