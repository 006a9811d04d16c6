"""What each group of FP32 epilogues costs and gains, on networks that `population.py run WORK` exported and built.

    python benchmarks/epilogue_groups.py WORK NAME ...

A group is the operators of a chain after a product, and what reads its end: `Add+Sigmoid+Mul > MatMul`. For each group the
plan of `fix` is applied again without its nodes; all engines of a network are timed in turn. Needs a GPU.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
from population import NO_GPU, ROOT, build, file_name, measure_network, read_json, write_json

from rewriter.hazards.planning.free_fp32 import RULE


def fix(folder: Path, variant: str, *options: str) -> None:
    """Runs `fix` on a network without checks; raises CalledProcessError if it fails."""
    paths = (
        folder / "model.onnx",
        "--inputs",
        folder / "inputs",
        "-o",
        folder / f"{file_name(variant)}.onnx",
    )
    flags = ("--target", "tensorrt-rtx", "--no-verify", "-q", *options)
    command = (sys.executable, "-m", "rewriter", "fix", *paths, *flags)
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **NO_GPU})


def groups(model: onnx.ModelProto, plan: Mapping[str, Any]) -> dict[str, set[str]]:
    """The names of the nodes of each group."""
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    nodes = {node.name: node for node in model.graph.node}
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node)
    chains = defaultdict(list)
    for decision in plan["fp32"]:
        if decision["rule"] == RULE and decision["node"] in nodes:
            chains[decision["tensor"]].append(nodes[decision["node"]])
    found: dict[str, set[str]] = defaultdict(set)
    for chain in chains.values():
        inside, after = {node.name for node in chain}, set()
        waiting = [reader for node in chain for reader in readers[node.output[0]]]
        while waiting:
            reader = waiting.pop()
            if reader.op_type == "Cast":
                waiting += readers[reader.output[0]]
            elif reader.name not in inside:
                after.add(reader.op_type)
        found["+".join(node.op_type for node in chain) + " > " + "+".join(sorted(after))] |= inside
    return dict(found)


def variants(folder: Path) -> list[str]:
    """Writes the plan of `fix` and, for each group, the same without it; returns their names."""
    saved = folder / "plan.json"
    fix(folder, "fix", "--save-plan", str(saved))
    plan = read_json(saved)
    left_out = groups(onnx.load(folder / "fix.onnx", load_external_data=False), plan)
    left_out["all"] = set().union(*left_out.values())
    for group, names in left_out.items():
        kept = [d for d in plan["fp32"] if d["rule"] != RULE or d["node"] not in names]
        write_json(folder / "without.json", {**plan, "fp32": kept})
        fix(folder, f"without {group}", "--plan", str(folder / "without.json"))
    return ["fix", *(f"without {group}" for group in left_out)]


def measured(folder: Path) -> dict[str, Any]:
    """Latency and error of each variant's engine."""
    names = variants(folder)
    for marker in folder.glob("?" * 64):
        marker.unlink()  # an engine of an earlier plan
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: build(folder, name), names))
    measure_network(folder, "groups", *names)
    return read_json(folder / "groups.rows")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        for variant, row in measured(Path(sys.argv[1], name)).items():
            print(name, variant, json.dumps(row), flush=True)
