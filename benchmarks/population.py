"""`fix` on networks that no rule was made for, beside AutoCast, plain FP16 and FP32.

    python benchmarks/population.py draw [--seed N] [--draw FILE]
    python benchmarks/population.py [--half development] run WORK [NAME ...] [--fix-gpu] --seconds 570
    python benchmarks/population.py run WORK usual --no-emulation --variants "fp32;plain;fix" --seconds 290
    python benchmarks/population.py [--half judging] table FOLDER_OR_FILE ...

The networks are those of population_networks.py (small, with a batch of 1) and population_deployed.py (deployed sizes,
which their names have; `usual` are the common ones, the small networks first). A hash of the name puts half of them into `development`, after which
rules may be changed, and half into `judging`. `run` does what WORK does not hold yet and stops before its time is up:
workers on the CPU export, make variants and build engines; one process at a time loads all engines of a network and
times them in turn. WORK/results/NAME.json is written after each stage of a network, and $OUT/population.json has all.

`autocast` is NVIDIA's converter (PYTHONPATH must have modelopt), `plain` the preset trt11-migrate, `fix` what is handed
out without a GPU, `fix-gpu` with one; any other variant is options of `fix`, such as `--skip rescale`. `verify` emulates
the file of `fix` on the held samples, which an engine may miss; without a GPU `plain`, too, and `score` prints that.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.model import Array, Model, load
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.measure import build_variant, measure
from rewriter.runtime.engines.protocol import MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.metrics.outputs import compare
from rewriter.runtime.metrics.parts import Parts, parts_of
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.verification.expected import expected_outputs, selected_axes

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that limit the threads of numpy's linear algebra and other libraries."""

COMMON = ("fp32", "autocast", "plain", "fix")
STAGES = {"measure": "measured", "again": "again"}
COPYING = threading.Lock()
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TARGET = ("--target", "tensorrt-rtx")
TOOL_S, BUILD_S, EXPORT_S, GPU_TOOL_S, RUN_S = 300.0, 120.0, 120.0, 200.0, 400.0
"""Limits of one tool, build, export, `fix` on the GPU, and run of all engines of a network."""

STARTED, LEAST_S, LAST_S = time.monotonic(), 15.0, 6.0
"""Nothing starts in the last 15 seconds, and what still runs ends with 6 left, to be done again by the next call."""


# -- files ---------------------------------------------------------------------------------------


def last_words(log: Path, exit_code: int) -> str:
    """Last line that a failed command printed, without the hint, which is in the log; "" if it did not fail."""
    if not exit_code:
        return ""
    printed = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in printed if line and not line.startswith("what to do:")]
    said = lines[-1].replace(f"{log.parent}/", "") if lines else f"exit code {exit_code}"
    return said[:200]


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a stage's file; empty if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the whole file or none: a stage may be stopped at any moment and continues from these files."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.replace(path)


# -- one network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A step of a network in a child process: its command, its limit, and the pool that it waits for."""

    folder: Path
    step: str
    command: tuple[str, ...]
    limit_s: float
    pool: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def marker(self) -> Path:
        """Written when the step has ended, however it did."""
        return self.folder / f"{file_name(self.step)}.json"


@dataclass(frozen=True)
class Work:
    """What a run is to do with each network.

    Attributes:
        variants: Names, and options of `fix`.
        emulation: Emulate the file of `fix` on the held samples.
    """

    folder: Path
    fix_gpu: bool
    gpu: bool
    variants: Sequence[str] = COMMON
    emulation: bool = True

    def jobs(self, name: str) -> list[Job]:
        """The steps of a network that can be done next; none if it is finished."""
        folder = self.folder / name
        exported = folder / "export.json"
        if not exported.exists():
            command = (sys.executable, str(ROOT / "benchmarks/population_networks.py"), name, str(folder))
            return [Job(folder, "export", command, EXPORT_S, variables=NO_GPU)]
        if read_json(exported)["exit_code"]:
            return []
        if left := [job for variant in self.variants for job in self._made(folder, variant)]:
            return left
        for stage, more in (("measure", ()), ("again", ("fix-gpu",))):
            if not self.gpu or (more and not self.fix_gpu):
                return []
            if left := [job for variant in more for job in self._made(folder, variant)]:
                return left
            command = _own("measure", str(folder), stage, *self.variants, *more)
            step = Job(folder, stage, command, RUN_S, "gpu")
            if not step.marker.exists():
                return [step]
        return []

    def _made(self, folder: Path, variant: str) -> list[Job]:
        """The next step to an engine of a variant."""
        if not (folder / "expect.json").exists() and variant == "fp32":
            return [Job(folder, "expect", _own("expect", str(folder)), BUILD_S, variables=NO_GPU)]
        tool = self._tool(folder, variant)
        if not tool.marker.exists():
            return [tool]
        build = Job(folder, f"build {variant}", _own("build", str(folder), variant), BUILD_S)
        file = folder / f"{file_name(variant)}.onnx"
        made = file.exists() and read_json(tool.marker)["exit_code"] in (0, 1)
        steps = [build] if made else []
        if self.emulation and made and variant in (("fix",) if self.gpu else ("plain", "fix")):
            out, report = (str(folder / f"{variant}.{end}") for end in ("onnx", "held.json"))
            command = (sys.executable, "-m", "rewriter", "verify", str(folder / "model.onnx"), out, "-q")
            judged = (*command, "--inputs", str(folder / "held"), "--json", report, "--engine", "emulation")
            steps.append(Job(folder, f"verify {variant}", judged, TOOL_S, variables=NO_GPU))
        return [step for step in steps if not step.marker.exists()]

    def _tool(self, folder: Path, variant: str) -> Job:
        out, samples = str(folder / f"{file_name(variant)}.onnx"), str(folder / "inputs")
        model = str(folder / "model.onnx")
        if variant in ("fp32", "autocast"):
            copy = (sys.executable, "-c", "import shutil, sys; shutil.copyfile(*sys.argv[1:])", model, out)
            command = copy if variant == "fp32" else _own("autocast", str(folder))
            return Job(folder, f"tool {variant}", command, TOOL_S, variables=NO_GPU)
        report = ("--report", str(folder / f"{file_name(variant)}.report.json"))
        command = (sys.executable, "-m", "rewriter", "fix", model, "--inputs", samples, "-o", out, "-q")
        arguments = (*TARGET, *options(variant), *report)
        where = (GPU_TOOL_S, "fix-gpu", {}) if variant == "fix-gpu" else (TOOL_S, "cpu", NO_GPU)
        return Job(folder, f"tool {variant}", (*command, *arguments), *where)


def _own(step: str, *arguments: str) -> tuple[str, ...]:
    """The command of a step in this file."""
    return (sys.executable, __file__, step, *arguments)


def file_name(text: str) -> str:
    return re.sub(r"[^\w .+-]", "_", text)


def options(variant: str) -> tuple[str, ...]:
    """Arguments of `fix` for a variant."""
    if variant == "plain":
        return ("--preset", "trt11-migrate", "--no-verify")
    if variant == "fix":
        return ("--no-build",)
    return ("--no-verify", *variant.split()) if variant.startswith("--") else ()


# -- steps that run in child processes --------------------------------------------------------------


def held(folder: Path) -> list[dict[str, np.ndarray]]:
    model = load(folder / "model.onnx")
    wanted = {port.name for port in model.signature.inputs}
    found = []
    for path in sorted((folder / "held").glob("*.npz")):
        with np.load(path) as archive:
            found.append({name: archive[name] for name in archive.files if name in wanted})
    return found


def expect(folder: Path) -> None:
    """Outputs of the original in FP32 on the CPU, for the samples that judge."""
    for number, outputs in enumerate(expected_outputs(load(folder / "model.onnx"), held(folder)).exact):
        np.savez(folder / f"expected-{number}.npz", **outputs)  # type: ignore[arg-type]


def build(folder: Path, variant: str) -> None:
    """Builds an engine, unless another variant's file has the same graph."""
    name = file_name(variant)
    path, target = folder / f"{name}.onnx", folder / f"{name}.engine"
    if (first := _first_of(folder, path, name)) != name:
        print(json.dumps({"same_as": first}))
        return
    with tempfile.TemporaryDirectory(dir=folder) as place:
        samples = write_samples(Path(place) / "samples", held(folder))
        settings = MeasureSettings("tensorrt-rtx", timeout_s=BUILD_S)
        _, outcome = build_variant(Variant(name, path, samples), settings, target)
    if not outcome.ran:
        raise SystemExit(f"does not build: {outcome.problem[:200]}")


def autocast(folder: Path) -> None:
    """NVIDIA's AutoCast with the tools' samples as its calibration data, and defaults otherwise.

    ONNX Runtime does not read OMP_NUM_THREADS. By default each session starts one thread for every core, and they spin:
    with several tools at a time that slows all of them.
    """
    import onnxruntime
    from modelopt.onnx.autocast import convert_to_mixed_precision

    original = onnxruntime.InferenceSession

    def limited(model: Any, sess_options: Any = None, **more: Any) -> Any:
        options = sess_options or onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
        return original(model, options, **more)

    onnxruntime.InferenceSession = limited
    samples, out = str(folder / "inputs"), folder / "autocast.onnx"
    options = {"low_precision_type": "fp16", "calibration_data": samples, "keep_io_types": True}
    onnx.save(convert_to_mixed_precision(str(folder / "model.onnx"), **options), out)


def _first_of(folder: Path, path: Path, name: str) -> str:
    """The name of the first variant with this graph."""
    proto = onnx.load(path)
    del proto.metadata_props[:]
    proto.graph.doc_string = proto.doc_string = ""
    marker = folder / hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    try:
        with marker.open("x") as stream:
            stream.write(name)
    except FileExistsError:
        return marker.read_text() or name
    return name


def measure_network(folder: Path, stage: str, *variants: str, engine: str = "tensorrt-rtx") -> None:
    """Runs and times all engines of a network in turn; writes STAGE.rows."""
    model, samples = load(folder / "model.onnx"), held(folder)
    expected = [dict(np.load(path)) for path in sorted(folder.glob("expected-*.npz"))]
    parts = parts_of(expected)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        stored = write_samples(Path(place) / "samples", samples)
        engines = {v: folder / f"{file_name(v)}.engine" for v in variants}
        built = {v: e for v, e in engines.items() if e.exists()}
        ready = [Variant(v, folder / f"{file_name(v)}.onnx", stored, engine=e) for v, e in built.items()]
        settings = MeasureSettings(engine, timing=Timing(10, 30), timeout_s=RUN_S / 2)
        for outcome in measure(ready, settings, Path(place)):
            row: dict[str, Any] = {"problem": outcome.problem[:300]} if not outcome.ran else {}
            if outcome.ran:
                found = [errors(model, e, outcome.values(i), parts) for i, e in enumerate(expected)]
                row["errors"] = {name: worst([one[name] for one in found]) for name in found[0]}
                row["error"] = worst([row["errors"][name] for name in expected[0]])
            if outcome.ran and outcome.latency is not None:
                row |= {"us": round(outcome.latency.median_us, 2), "iqr": round(outcome.latency.iqr_us, 2)}
            rows[file_name(outcome.variant)] = row
    write_json(folder / f"{stage}.rows", rows)


def errors(
    model: Model, expected: dict[str, Array], actual: dict[str, Array], parts: Parts
) -> dict[str, float | None]:
    """Relative L2 error of each output and part, None if not finite; rows match as sets for models that select them.

    That of a part is in units of the output's tolerance: a part of few values may have more.
    """
    actual = {n: a.astype(expected[n].dtype) for n, a in actual.items()}
    tolerance = TOLERANCES["fp16"].value
    rows = [row for row, _ in compare(expected, actual, tolerance, as_sets=selected_axes(model), parts=parts)]
    scaled = {r.name: float(r.relative_l2) * (tolerance / r.tolerance if r.of else 1.0) for r in rows}
    return {r.name: scaled[r.name] if r.finite and math.isfinite(scaled[r.name]) else None for r in rows}


def worst(found: Sequence[float | None]) -> float | None:
    """The largest; None if one is not finite."""
    known = [one for one in found if one is not None]
    return max(known) if len(known) == len(found) and known else None


# -- results ---------------------------------------------------------------------------------------


def collect(work: Work, name: str) -> None:
    """Writes what is known about a network to results/NAME.json, and copies it to $OUT."""
    folder, file = work.folder / name, work.folder / "results" / f"{name}.json"
    known = read_json(file)
    stages = set(known.get("stages", ()))
    found: dict[str, Any] = {"name": name, **read_json(folder / "exported.json")}
    export = read_json(folder / "export.json")
    if export.get("exit_code"):
        stages.add("failed")
        found["note"] = export["note"]
    for stage, key in (("measure", "variants"), ("again", "again")):
        if rows := _rows(folder, stage):
            found[key] = known.get(key, {}) | rows
        stages |= {STAGES[stage]} if (folder / f"{stage}.json").exists() else set()
    file.parent.mkdir(exist_ok=True)
    write_json(file, known | found | {"stages": sorted(stages)})
    if out := os.environ.get("OUT"):
        with COPYING:
            write_json(
                Path(out, "population.json"), {one.stem: read_json(one) for one in file.parent.glob("*.json")}
            )


def _rows(folder: Path, stage: str) -> dict[str, Any]:
    """Rows of all variants of a stage: how each was made and built, and what was measured."""
    marker, measured = read_json(folder / f"{stage}.json"), read_json(folder / f"{stage}.rows")
    if stage == "again" and not marker:
        return {}
    rows = {}
    for path in sorted(folder.glob("tool *.json")):
        tool = read_json(path)
        variant = tool["step"].removeprefix("tool ")
        built = read_json(folder / f"{file_name(f'build {variant}')}.json")
        same = built.get("same_as")
        row = {"made_s": tool["wall_s"], "build_s": built.get("wall_s"), "exit": tool["exit_code"]}
        row |= {"said": tool["said"]} if tool.get("said") else {}
        row |= {"same_as": same} if same else {}
        row |= {"problem": (built or tool)["note"]} if (built or tool)["note"] else {}
        rows[variant] = row | measured.get(same or file_name(variant), {}) | _verified(folder, variant)
        if marker.get("exit_code") and file_name(variant) not in measured:
            rows[variant].setdefault("problem", f"run: {marker['note']}")
    return rows if marker or not bool(nvidia_driver.gpu()) else {}


def _verified(folder: Path, variant: str) -> dict[str, Any]:
    """The error on the held samples by emulation, and the operators of nodes that FP16 does not fit.

    That of a part is in units of the output's tolerance, as in `errors`.
    """
    if not (judged := read_json(folder / f"{variant}.held.json")):
        return {}
    checks = (check for check in judged["checks"] if check["name"] in ("emulation", "tf32"))
    outputs = [output for check in checks for output in check["outputs"]]
    whole = TOLERANCES["fp16"].value
    scales = [whole / output["tolerance"] if output.get("of") else 1.0 for output in outputs]
    found = (output["relative_l2"] for output in outputs)
    error = worst([None if e is None else e * scale for e, scale in zip(found, scales, strict=True)])
    row = {"held": error, "held_passed": judged["passed"]}
    report = read_json(folder / f"{variant}.report.json")
    row["passes"] = [step["name"] for step in report["passes"] if step["changes"]]
    if plan := report["plan"]:
        fp32 = Counter(decision["op"] for decision in plan["fp32"] if decision["rule"] not in FREE)
        row |= {"float_nodes": plan["float_nodes"], "fp32": dict(fp32.most_common())}
    return row


# -- the run ---------------------------------------------------------------------------------------


def work_off(work: Work, names: Sequence[str], until: float, sizes: Mapping[str, int]) -> None:
    """Does the steps of all networks in pools of workers until there is none left, or the time is up."""
    slots = {pool: threading.Semaphore(size) for pool, size in sizes.items()}

    def finish(name: str) -> None:
        folder = work.folder / name
        folder.mkdir(exist_ok=True)
        while job := next(iter(work.jobs(name)), None):
            with slots[job.pool]:
                in_time = until - time.monotonic() > LEAST_S
                ended = bounded(job, until - LAST_S) if in_time else None
            if ended is None:
                return
            write_json(job.marker, ended)
            if job.step in ("export", "measure", "again") or not work.gpu:
                collect(work, name)
            if job.pool != "cpu" or ended["note"]:
                print(f"{name}: {job.step} {ended['wall_s']:.0f} s {ended['note']}", flush=True)
        for engine in folder.glob("*.engine") if work.gpu and work.fix_gpu else ():
            engine.unlink()  # they fill the disk

    with ThreadPoolExecutor(sum(sizes.values())) as pool:
        for name, future in [(name, pool.submit(finish, name)) for name in names]:
            if error := future.exception():
                print(f"{name}: {type(error).__name__}: {error}", flush=True)


def bounded(job: Job, until: float) -> dict[str, Any] | None:
    """Runs a step with its time limit; None if it was stopped because the whole run's time is up."""
    start, log = time.monotonic(), job.folder / f"{file_name(job.step)}.log"
    threads = "2" if job.step == "tool fix" or job.pool == "fix-gpu" else "1"
    variables = {**os.environ, **dict.fromkeys(THREADS, threads), **job.variables}
    with log.open("wb") as stream:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
        process = subprocess.Popen(job.command, **files, cwd=ROOT, env=variables, start_new_session=True)
        note = ""
        try:
            process.wait(max(0.1, min(job.limit_s, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            note = f"stopped after {job.limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if note and time.monotonic() - start < job.limit_s:
        return None
    code, wall = process.returncode, round(time.monotonic() - start, 2)
    ended = {"step": job.step, "wall_s": wall, "exit_code": code, "note": note or last_words(log, code)}
    lines = log.read_text(errors="replace").strip().splitlines()
    if job.step.startswith("build ") and lines and lines[-1].startswith('{"same_as"'):
        ended |= json.loads(lines[-1])
    if job.step in ("tool fix", "tool fix-gpu") and lines:
        ended["said"] = lines[0][:300]
    return ended


def run(arguments: argparse.Namespace) -> None:
    names = usual() if arguments.names == ["usual"] else arguments.names or drawn(arguments)
    names = [n for n in names if not arguments.half or half_of(n) == arguments.half]
    gpu = bool(nvidia_driver.gpu())
    work = Work(
        arguments.work.resolve(), arguments.fix_gpu, gpu, arguments.variants, not arguments.no_emulation
    )
    work.folder.mkdir(parents=True, exist_ok=True)
    sizes = {"cpu": arguments.jobs, "gpu": 4, "fix-gpu": 4}  # four load engines, one times
    work_off(work, names, STARTED + arguments.seconds, sizes)
    left = [n for n in names if work.jobs(n)]
    print(f"{len(names) - len(left)} of {len(names)} networks are done; left: {' '.join(left) or 'none'}")
    if gpu:
        table(argparse.Namespace(folders=[work.folder / "results"], half=arguments.half))


def drawn(arguments: argparse.Namespace) -> list[str]:
    """The names of the draw, from its file if there is one."""
    if arguments.draw.exists():
        return [str(name) for name in json.loads(arguments.draw.read_text())[str(arguments.seed)]]
    from benchmarks.population_networks import draw

    names: list[str] = draw(arguments.seed)
    write_json(arguments.draw, {str(arguments.seed): names})
    return names


def usual() -> list[str]:
    from benchmarks.population_deployed import USUAL

    return list(USUAL)


def stratum_of(name: str) -> str:
    """Names of the deployed stratum have sizes."""
    return "deployed" if "-" in name else "small"


def half_of(name: str) -> str:
    """Rules may be changed after looking at one half; the other judges."""
    return "development" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 else "judging"


# -- the table -------------------------------------------------------------------------------------

NOISE_US, LARGEST_ERROR, OF_FP32, DEFECT = 0.8, 5e-3, 1.5, 2.0
"""What two timings may differ by; the tolerance, how often FP32's own error excuses, and emulations by chance."""


@dataclass(frozen=True)
class Network:
    """Results of one network, of the last measurement that has a variant."""

    name: str
    rows: Mapping[str, Mapping[str, Any]]

    def us(self, variant: str) -> float | None:
        row = self.rows.get(variant, {})
        return row.get("us") if row.get("error") is not None else None

    def error(self, variant: str) -> float | None:
        return self.rows.get(variant, {}).get("error")

    def errors(self, variant: str) -> Mapping[str, float | None]:
        """Of each output and part; of the worst output where older results have no more."""
        row = self.rows.get(variant, {})
        return row.get("errors") or {"": row.get("error")}

    def wrong(self, variant: str) -> list[str]:
        """Outputs and parts that are not finite, or beyond the tolerance and what the FP32 engine has there."""
        of_fp32 = self.errors("fp32")
        limits = {n: max(LARGEST_ERROR, OF_FP32 * (of_fp32.get(n) or 0.0)) for n in self.errors(variant)}
        return [n for n, e in self.errors(variant).items() if e is None or e > limits[n]]

    def valid(self, variant: str) -> bool:
        """Loaded, and right in every output and part."""
        return self.us(variant) is not None and not self.wrong(variant)

    def fastest(self) -> float | None:
        return min((self.us(v) or math.inf for v in ("plain", "autocast") if self.valid(v)), default=None)

    def cell(self, variant: str) -> str:
        row = self.rows.get(variant)
        if row is None:
            return ""
        if self.us(variant) is None:
            return str(row.get("problem") or ("not finite" if "error" in row else "not measured"))[:40]
        parts = [n for n in self.wrong(variant) if n.endswith(")")]
        wrong = (
            ""
            if self.valid(variant)
            else " WRONG"
            if len(parts) < len(self.wrong(variant))
            else f" WRONG in {parts[0]}"
        )
        return f"{self.us(variant):.1f}, {self.error(variant):.1e}{wrong}"


def read(places: Sequence[Path], half: str | None) -> list[dict[str, Any]]:
    """Results of folders, and of files with the results of many networks by name."""
    found: dict[str, dict[str, Any]] = {}
    for place in places:
        files = sorted(place.glob("*.json")) if place.is_dir() else []
        found |= {path.stem: read_json(path) for path in files} if files else read_json(place)
    results = (one for _, one in sorted(found.items()) if "stages" in one)
    return [one for one in results if not half or half_of(one["name"]) == half]


def table(arguments: argparse.Namespace) -> None:
    results = read(arguments.folders, arguments.half)
    for stratum in ("small", "deployed"):
        if ones := [one for one in results if stratum_of(one["name"]) == stratum]:
            print(f"\nThe {stratum} stratum, {len(ones)} networks:\n")
            _table(ones)


def _table(results: Sequence[Mapping[str, Any]]) -> None:
    own = {v: None for one in results for v in one.get("variants", {}) if v.startswith("--")}
    shown = ("fp32", "autocast", "plain", *own, "fix", "fix-gpu")
    first = [Network(one["name"], one.get("variants", {})) for one in results]
    again = [Network(one["name"], one["again"]) for one in results if one.get("again")]
    later = {one.name: one for one in again}
    print(f"| network | {' | '.join(shown)} |\n|---{'|---' * len(shown)}|")
    for one, result in zip(first, results, strict=True):
        cells = [(later.get(one.name, one) if v == "fix-gpu" else one).cell(v) for v in shown]
        print(f"| {one.name} | {' | '.join(cells)} | {result.get('note', '')}")
    compared = [(v, first) for v in ("fix", *own)]
    for variant, networks in (*compared, ("fix", again), ("fix-gpu", again)):
        if any(variant in one.rows for one in networks):
            print(f"\n{variant}{', timed again with fix-gpu' if networks is again else ''}:")
            print("\n".join(f"- {line}" for line in figures(variant, networks)))


def figures(variant: str, networks: Sequence[Network]) -> Iterator[str]:
    for rival in ("autocast", "plain"):
        both = [n for n in networks if n.valid(variant) and n.valid(rival)]
        latency = geometric((n.us(variant) or 1) / (n.us(rival) or 1) for n in both)
        error = geometric(max(n.error(variant) or 0, 1e-9) / max(n.error(rival) or 0, 1e-9) for n in both)
        yield f"{latency:.3f} of {rival}'s latency, {error:.3f} of its error, on {len(both)} where both are valid"
    known = [(n, n.fastest()) for n in networks]
    rivals = [(n, us) for n, us in known if us is not None]
    timed = [(n, us) for n, us in rivals if n.valid(variant)]
    yield f"{geometric((n.us(variant) or 1) / us for n, us in timed):.3f} of the faster valid one's latency"
    for factor in (1.02, 1.05):
        slow = [n.name for n, us in timed if (n.us(variant) or 1) > factor * us + NOISE_US]
        yield f"within {factor}x on {len(timed) - len(slow)} of {len(timed)}; not on {' '.join(slow) or 'none'}"
    wrong = [n.name for n, us in rivals if not n.valid(variant)]
    yield f"wrong or unloadable where a rival is right: {len(wrong)} ({' '.join(wrong)})"
    ran = [(n.name, n.error(variant), n.rows.get(variant, {}).get("held")) for n in networks]
    off = {name: error / held for name, error, held in ran if error and held}
    far = " ".join(name for name, ratio in off.items() if ratio > DEFECT) or "none"
    yield f"{geometric(iter(off.values())):.2f} of its emulated error, on {len(off)}; over {DEFECT:g}: {far}"
    alone = [n.name for n, us in known if us is None and n.valid(variant)]
    yield f"right where no rival is: {len(alone)} ({' '.join(alone)})"


def geometric(ratios: Iterator[float]) -> float:
    logs = [math.log(one) for one in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def score(arguments: argparse.Namespace) -> None:
    """A line for each network without a GPU: errors by emulation on the held samples, and what is in FP32."""
    print("| network | largest | FP32 (TF32) | plain FP16 | `fix` | in FP32 |\n|---|---|---|---|---|---|")
    for one in read(arguments.folders, arguments.half):
        plain, fix = (one.get("variants", {}).get(variant, {}) for variant in ("plain", "fix"))
        nodes = fix.get("fp32", {})
        kinds = ", ".join(f"{n} {op}" for op, n in nodes.items()) or "none"
        share = f"{sum(nodes.values())} of {fix['float_nodes']}: {kinds}" if "fp32" in fix else "all"
        measures = f"{one.get('largest', 0):.2g} | {one.get('tf32_error', 0):.1e}"
        print(
            f"| {one['name']} | {measures} | {_error(plain)} | {_error(fix)} | {one.get('note') or share} |"
        )


def _error(row: Mapping[str, Any]) -> str:
    if "held" not in row:
        return str(row.get("problem", "none"))[:60]
    error = "not finite" if row["held"] is None else f"{row['held']:.1e}"
    return error if row["held_passed"] else f"{error} (no)"


def main() -> None:
    steps: dict[str, Callable[..., None]] = {step.__name__: step for step in (autocast, expect, build)}
    steps["measure"] = measure_network
    if len(sys.argv) > 2 and sys.argv[1] in steps:
        steps[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
        return
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--half", choices=("development", "judging"))
    parser.add_argument("--seed", type=int, default=0)
    draw = Path("population_draw.json")
    parser.add_argument("--draw", type=Path, default=draw, help="where the draw is kept")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="prints the names of a seed, and their halves")
    start = commands.add_parser("run")
    start.add_argument("work", type=Path)
    start.add_argument("names", nargs="*")
    start.add_argument("--seconds", type=float, default=math.inf)
    start.add_argument("--fix-gpu", action="store_true")
    start.add_argument(
        "--no-emulation", action="store_true", help="of the file of `fix`, on the held samples"
    )
    start.add_argument("--variants", type=lambda text: text.split(";"), default=COMMON)
    start.add_argument("--jobs", type=int, default=14, help="processes on the CPU")
    for name in ("table", "score"):
        commands.add_parser(name).add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        print("\n".join(f"{half_of(name)} {name}" for name in drawn(arguments)))
    else:
        {"run": run, "table": table, "score": score}[arguments.command](arguments)


if __name__ == "__main__":
    main()
