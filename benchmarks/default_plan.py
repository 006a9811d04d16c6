"""Checks the default plan against its targets: error, time, and the same bytes twice. Needs no GPU.

    python models/build.py NAME ... --full --samples 4 -o FOLDER
    python benchmarks/default_plan.py FOLDER [NAME ...] [--json benchmarks/default_plan.json]

- Error: the default plan is emulated on the first sample and compared with a guarded plan. That one also keeps in FP32
  every node with a warning or an error of `scan`, and all neighbours of these and of the default plan's nodes. The
  default plan's error may be 1.3 times the guarded one, and at most 5e-3.
- Time: a whole process of `rewriter fix --no-verify` may need 3 times one FP32 pass over the samples (ONNX Runtime,
  optimisations off, session included) plus 2 s. `load` is the machine's load average before the run.
- The plan's nodes include those that are in FP32 because it is free (`free` of them), which are most.
- Two processes write the same model and the same plan, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from benchmarks.comparison import errors, feeds_of
from rewriter.data.inputs import load_samples
from rewriter.data.ranges import measure as measured
from rewriter.emulation import emulation, reference
from rewriter.graph.casts import retype
from rewriter.hazards import SCAN_RULES, PrecisionRequest
from rewriter.hazards.kinds import KINDS
from rewriter.model import Array, Model, facts, load
from rewriter.passes.mixed_precision import request
from rewriter.plan import Plan
from rewriter.planning.free_fp32 import FREE
from rewriter.planning.planner import extend_plan, node_key, surveys
from rewriter.verification.expected import as_declared, expected_outputs, run_all

FACTOR, LARGEST = 1.3, 5e-3
PASSES, SECONDS = 3.0, 2.0


def guarded(structured: Model, plan: Plan, samples: Any) -> Plan:
    """`plan` with the nodes of all scanned hazards, and the neighbours of all kept nodes, also in FP32."""
    known = facts.infer(structured)
    widened = reference(structured, known)
    ranges = measured(widened, samples, facts.infer(widened))
    extra: dict[str, str] = {}
    for survey in surveys(structured, known, ranges, PrecisionRequest(TensorProto.FLOAT16)):
        centre = {
            node_key(survey.scope, n): n for n in survey.nodes if node_key(survey.scope, n) in plan.fp32
        }
        for rule in SCAN_RULES:
            for hazard in rule(survey):
                if (hazard.severity or KINDS[hazard.rule].severity) != "note":
                    centre[node_key(survey.scope, hazard.node)] = hazard.node
        for key, node in centre.items():
            extra.setdefault(key, "a hazard")
            producers = (survey.producer(t) for t in node.input if t and survey.is_float(t))
            readers = (r for t in node.output if t and survey.is_float(t) for _, r in survey.readers(t))
            for other in [*producers, *readers]:
                if other is not None:
                    extra.setdefault(node_key(survey.scope, other), "next to a hazard")
    return extend_plan(structured, known, plan, extra)


def emulated_error(
    original: Model, model: Model, feeds: dict[str, Array], expected: dict[str, Array]
) -> float:
    stand_in = emulation(model, facts.infer(model), tf32=True)
    (outputs,) = run_all(stand_in, [as_declared(model, feeds)])
    return max(math.inf if e is None else e for e in errors(original, expected, outputs).values())


def one_pass(original: Model, samples: Any) -> float:
    """Seconds of one FP32 pass over the samples, with the session's creation."""
    start = time.perf_counter()
    run_all(reference(original, facts.infer(original)), samples)
    return time.perf_counter() - start


def fixed_twice(path: Path, samples: Path) -> tuple[float, bool, bool]:
    """Wall seconds of the faster of two processes; then True if their models, and if their plans, are the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, models, plans = [], [], []
        for number in (1, 2):
            out, plan = Path(folder) / f"{number}" / "fixed.onnx", Path(folder) / f"{number}.json"
            out.parent.mkdir()
            command = [sys.executable, "-m", "rewriter", "fix", str(path), "--inputs", str(samples)]
            start = time.perf_counter()
            subprocess.run(
                [*command, "-o", str(out), "--save-plan", str(plan), "--no-verify", "-q"], check=True
            )
            seconds.append(time.perf_counter() - start)
            models.append([f.read_bytes() for f in sorted(out.parent.iterdir())])
            plans.append(plan.read_bytes())
        return min(seconds), models[0] == models[1], plans[0] == plans[1]


def row(folder: Path, name: str) -> dict[str, Any]:
    """All results of one model."""
    path, samples = folder / f"{name}.onnx", folder / name
    busy = os.getloadavg()[0]
    seconds, same_model, same_plan = fixed_twice(path, samples)
    original = load(path)
    data = load_samples(samples, original)
    pass_s = one_pass(original, data)
    feeds = feeds_of(samples)
    (expected,) = expected_outputs(original, [feeds]).exact
    structured = rewriter.fix(path, precision="fp32", inputs=samples, verify=False).model
    result = rewriter.fix(path, inputs=samples, verify=False)
    assert result.plan is not None
    wide = guarded(structured, result.plan, data)
    error = emulated_error(original, result.model, feeds, expected)
    guarded_error = emulated_error(
        original, retype(structured, facts.infer(structured), request(structured, wide, "")), feeds, expected
    )
    allowed_s = PASSES * pass_s + SECONDS
    return {
        "model": name,
        "error": error,
        "guarded_error": guarded_error,
        "kept": len(result.plan.decisions),
        "free": sum(d.rule in FREE for d in result.plan.decisions),
        "guarded_kept": len(wide.decisions),
        "error_met": error <= min(FACTOR * guarded_error, LARGEST),
        "seconds": round(seconds, 2),
        "pass_s": round(pass_s, 2),
        "allowed_s": round(allowed_s, 2),
        "time_met": seconds <= allowed_s,
        "load": round(busy, 1),
        "same_model": same_model,
        "same_plan": same_plan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(
        "| model | error | guarded | ratio | FP32 nodes: plan, free, guarded | s | allowed s | load | same bytes |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.names or sorted(p.stem for p in arguments.folder.glob("*.onnx")):
        r = row(arguments.folder, name)
        rows.append(r)
        print(
            f"| {name} | {r['error']:.2g} | {r['guarded_error']:.2g} | {r['error'] / r['guarded_error']:.2f} "
            f"| {r['kept']}, {r['free']}, {r['guarded_kept']} | {r['seconds']} | {r['allowed_s']} | {r['load']} "
            f"| {'yes' if r['same_model'] and r['same_plan'] else 'NO'} |",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
