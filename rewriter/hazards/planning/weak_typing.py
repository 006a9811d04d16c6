"""Writes a plan as constraints for a weakly typed build of the FP32 model with TensorRT 8 to 10.

Weakly typed builds take precisions from the builder: `--fp16`, and per layer `--layerPrecisions` and
`--layerOutputTypes`, or `layer.precision` and `layer.set_output_type`, which OBEY_PRECISION_CONSTRAINTS makes
binding. TensorRT 11 has none of these.

The parser names a layer after its node. If a node becomes several layers, the others get a suffix, `_` and
a number (onnx-tensorrt's registerLayer), and the metadata `[ONNX Layer: name]`. trtexec only takes exact
names, separated by commas, with a colon before the type: nodes get names without these characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from rewriter.ir.model import Model, holds_graphs, walk_graphs, walk_nodes, write_text
from rewriter.ir.model.graphs import fresh_name
from rewriter.ir.model.tensors import FLOATS
from rewriter.ir.plan import Plan, Repair, node_key

UNSAFE = re.compile(r"[^A-Za-z0-9_./-]")
"""Characters to avoid: trtexec splits at `,` and `:`, shells at more, and the metadata ends at `]`."""

DATA_TYPES: dict[Repair, str] = {"fp32": "FLOAT", "bf16": "BF16"}
"""TensorRT's `DataType` for each repair of a plan; the repair is trtexec's name of the type."""


@dataclass(frozen=True)
class Constraint:
    """A layer, named as its node, that must not compute in FP16; `floats`: all its outputs are floats."""

    layer: str
    repair: Repair
    floats: bool
    outputs: int


def named(model: Model) -> Model:
    """The model with node names that are unique in all its graphs and that trtexec accepts."""
    result = model.copy()
    taken: set[str] = set()
    for node in walk_nodes(result.proto.graph):
        wanted = node.name or next(filter(None, node.output), node.op_type) + "/" + node.op_type
        node.name = fresh_name(UNSAFE.sub("_", wanted), taken, ".")  # TensorRT appends `_` and a number
    return result


def constraints(model: Model, plan: Plan) -> tuple[Constraint, ...]:
    """The plan's nodes in FP32 and BF16, in the order of a model that `named` gave."""
    repairs: dict[str, Repair] = {d.key: d.repair for d in plan.decisions}
    layers, facts = [], model.facts()
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        types = facts.main | facts.scopes[scope]
        for node in graph.node:
            repair = repairs.get(node_key(scope, node))
            if repair is not None and not holds_graphs(node):  # If, Loop and Scan are no layers
                outputs = [name for name in node.output if name]
                floats = all(name in types and types[name].dtype in FLOATS for name in outputs)
                layers.append(Constraint(node.name, repair, floats, len(outputs)))
    return tuple(layers)


def trtexec_arguments(wanted: Sequence[Constraint]) -> str:
    """The arguments of trtexec as one line; an output that is no float keeps its type."""
    flags = ["--fp16", *(["--bf16"] if any(c.repair == "bf16" for c in wanted) else [])]
    if not wanted:
        return " ".join(flags)
    precisions = ",".join(f"{c.layer}:{c.repair}" for c in wanted)
    types = ",".join(f"{c.layer}:{'+'.join([c.repair] * c.outputs)}" for c in wanted if c.floats)
    arguments = ["--precisionConstraints=obey", f"--layerPrecisions={precisions}"]
    return " ".join([*flags, *arguments, *([f"--layerOutputTypes={types}"] if types else [])])


def python_code(wanted: Sequence[Constraint], model: str) -> str:
    """The source of a module that sets the constraints on a parsed network."""
    rows = "\n".join(f"    {c.layer!r}: {DATA_TYPES[c.repair]!r}," for c in wanted)
    flags = ", ".join(repr(f) for f in ("FP16", *(["BF16"] if "'BF16'" in rows else [])))
    code = files("rewriter.hazards.planning").joinpath("constraints.template").read_text(encoding="utf-8")
    quoted = ascii(model)[1:-1].replace('"', '\\"')
    return Template(code).substitute(model=quoted, rows=rows, flags=flags)


def constraint_files(path: Path) -> tuple[Path, Path]:
    """The files of a model's constraints: `x.trtexec.txt` and `x_constraints.py` for `x.onnx`."""
    python = re.sub(r"\W", "_", path.stem) + "_constraints.py"  # it must be importable
    return path.with_name(f"{path.stem}.trtexec.txt"), path.with_name(python)


def write(model: Model, plan: Plan, path: Path) -> tuple[Path, Path]:
    """Write the constraints beside the model's file; an OutputError if they cannot be."""
    wanted, (trtexec, python) = constraints(model, plan), constraint_files(path)
    write_text(trtexec_arguments(wanted) + "\n", trtexec, "the constraints")
    write_text(python_code(wanted, path.name), python, "the constraints")
    return trtexec, python
