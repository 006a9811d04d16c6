"""Switches off one pass or one rule at a time, and measures what each is worth without a GPU.

    python benchmarks/ablation.py FOLDER OUT.json [NAME ...] [--preset NAME]

FOLDER holds NAME.onnx with samples beside it: NAME/tool and NAME/kept (benchmarks/trained_inputs.py), NAME/0.npz ...
(models/build.py --full) or NAME.npz (models/). Only what changes a model, or keeps a node of it in FP32, is switched
off there. Errors are emulated with FP16 sums on samples that no tool saw; latencies are estimated from recorded costs,
so only those of plans are compared: a pass that writes another form of the graph is judged by an engine alone.

`--table` prints OUT.json as the table of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from benchmarks.comparison import errors
from rewriter.data.inputs import load_samples
from rewriter.emulation import emulation
from rewriter.errors import RewriterError
from rewriter.hazards import Rule
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Model, facts, load
from rewriter.planning import planner
from rewriter.verification.expected import as_declared, expected_outputs, run_all

NEEDED = frozenset(
    {"inline-functions", "upgrade-opset", "drop-double", "simplify", "clean-casts", "mixed-precision"}
)
"""Passes that the others start from, or that lower the model: their changes are counted, nothing else."""

EXTENSIONS = {
    "epilogue": "extend_over_epilogues",
    "norm": "extend_over_norms",
    "softmax": "extend_over_softmax",
    "dot-product": "extend_over_dot_products",
    "rounded-reciprocal": "extend_over_rounded_reciprocals",
}
"""Rules of FP32 that is free, and their functions in `rewriter.planning.planner`."""

TRAINED = Path(__file__).with_name("trained.json")
"""Its keys are the trained networks."""

JUDGED = 1
"""Samples that errors are emulated on: a large network needs half a minute for one."""


def samples_of(model: Path) -> tuple[Path, Path]:
    """The samples for the tool, and those that are kept from it, where there are enough."""
    folder = model.with_suffix("")
    if (folder / "tool").is_dir():
        return folder / "tool", folder / "kept"
    return (folder, folder) if folder.is_dir() else (model.with_suffix(".npz"), model.with_suffix(".npz"))


@contextmanager
def without_rule(rule: Rule) -> Iterator[None]:
    """The planner without one hazard rule."""
    with patch.object(planner, "RULES", tuple(one for one in planner.RULES if one is not rule)):
        yield


@contextmanager
def without_extension(name: str) -> Iterator[None]:
    """The planner without one rule of `EXTENSIONS`."""
    with patch.object(planner, EXTENSIONS[name], lambda survey, found: None):
        yield


def deciding(made: Callable[[], FixResult]) -> tuple[FixResult, dict[Rule, int]]:
    """A run of `fix`, and how many nodes each hazard rule named first."""
    counts: Counter[Rule] = Counter()
    named: set[int] = set()

    def counted(rule: Rule) -> Rule:
        def seen(survey: Any) -> Any:
            for hazard in rule(survey):
                counts[rule] += id(hazard.node) not in named
                named.add(id(hazard.node))
                yield hazard

        return seen

    with patch.object(planner, "RULES", tuple(map(counted, planner.RULES))):
        return made(), dict(counts)


class Network:
    """One model, fixed in several ways and judged alike."""

    def __init__(self, path: Path, preset: str) -> None:
        self.path, self.preset = path, preset
        self.tool, kept = samples_of(path)
        self.original = load(path)
        self.judged = list(load_samples(str(kept), self.original))[:JUDGED]
        self.expected = expected_outputs(self.original, self.judged).exact

    def fixed(self, *skip: str) -> FixResult:
        return rewriter.fix(
            self.path,
            inputs=self.tool,
            preset=self.preset,
            skip=skip,
            target="tensorrt-rtx",
            verify=False,
        )

    def row(self, result: FixResult) -> dict[str, Any]:
        """Nodes, nodes in FP32 and the worst error of all samples and outputs."""
        plan = result.plan
        nodes = sum(node.op_type not in {"Constant", "Cast"} for node in result.model.proto.graph.node)
        return {
            "nodes": nodes,
            "fp32": len(plan.fp32) if plan else None,
            "error": self.error(result.model),
            "seconds": round(sum(result.seconds.values()), 1),
        }

    def error(self, model: Model) -> float | None:
        """Relative L2 error of the worst output, emulated with FP16 sums and TF32; None if not finite."""
        emulated = emulation(model, facts.infer(model), "fp16", tf32=True)
        runs = run_all(emulated, [as_declared(model, one) for one in self.judged])
        found = [
            error
            for exact, values in zip(self.expected, runs, strict=True)
            for error in errors(self.original, dict(exact), values).values()
        ]
        return None if None in found or not found else max(e for e in found if e is not None)


def ablated(network: Network) -> dict[str, Any]:
    """One row for the whole pipeline, and one for each pass and rule that did something."""
    start = time.perf_counter()
    base, ruled = deciding(network.fixed)
    rows: dict[str, Any] = {"all": network.row(base)}
    changes = Counter({one.name: 0 for one in base.passes})
    for one in base.passes:
        changes[one.name] += len(one.changes)
    for name, count in changes.items():
        if count and name in NEEDED:
            rows[name] = {"changes": count}
        elif count:
            rows[name] = {"changes": count} | attempted(network, lambda name=name: network.fixed(name))
    for rule, count in ruled.items():
        if count:
            with without_rule(rule):
                rows[f"rule {rule.__name__}"] = {"changes": count} | attempted(network, network.fixed)
    free = Counter(d.rule for d in base.plan.decisions) if base.plan else Counter[str]()
    for name in EXTENSIONS:
        if free[name]:
            with without_extension(name):
                rows[f"rule {name}"] = {"changes": free[name]} | attempted(network, network.fixed)
    return {"rows": rows, "seconds": round(time.perf_counter() - start)}


def attempted(network: Network, make: Callable[[], FixResult]) -> dict[str, Any]:
    """The row of a run, or the reason why there is none."""
    try:
        return network.row(make())
    except RewriterError as error:
        return {"problem": str(error).splitlines()[0]}


def run_each(folder: Path, out: Path, names: list[str], preset: str) -> None:
    """One process for each network: memory is returned, and a crash is one network's."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for path in sorted(folder.glob("*.onnx"), key=lambda one: one.stat().st_size):
        if path.stem in found or (names and path.stem not in names):
            continue
        command = [sys.executable, __file__, str(folder), str(out), path.stem, "--preset", preset, "--one"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        found[path.stem] = json.loads(done.stdout) if done.returncode == 0 else {"problem": last}
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(path.stem, found[path.stem].get("seconds", last), flush=True)


def gains(found: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By pass or rule and by network: the error without it over that with it, as text."""
    cells: dict[str, dict[str, str]] = {}
    for network, result in found.items():
        rows = result.get("rows", {})
        base = rows.get("all", {}).get("error")
        for name, row in rows.items():
            if name != "all" and name not in NEEDED:
                error = row.get("error")
                known = f"{error / base:.2f}" if error and base else "not finite" if error is None else "-"
                cells.setdefault(name, {})[network] = row.get("problem", known)
    return cells


def table(found: Mapping[str, Any]) -> str:
    """A line for each pass and rule, trained networks apart from the case models."""
    trained = set(json.loads(TRAINED.read_text()))
    lines = ["| off | trained networks | case models |", "|---|---|---|"]
    for name, cells in sorted(gains(found).items(), key=lambda item: (item[0].startswith("rule"), item[0])):
        sides = ([f"{n} {v}" for n, v in cells.items() if (n in trained) == side] for side in (True, False))
        lines.append(f"| {name} | {' | '.join(', '.join(side) or '-' for side in sides)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--preset", default="trt-fp16")
    parser.add_argument("--one", action="store_true", help="print the result of one network as JSON")
    parser.add_argument("--table", action="store_true", help="print OUT.json as Markdown, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.out.read_text())))
    elif arguments.one:
        print(json.dumps(ablated(Network(arguments.folder / f"{arguments.names[0]}.onnx", arguments.preset))))
    else:
        run_each(arguments.folder, arguments.out, arguments.names, arguments.preset)


if __name__ == "__main__":
    main()
