"""The types of linked outputs and inputs, which `io` calls `links`: both sides of a link have one type.

Links are those that a recording shows, or the caches of a decoder by their names.
"""

import glob
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import TensorProto

from rewriter.hazards.accumulation import SLOW_STEP
from rewriter.ir.graph import casts_to, open_graphs
from rewriter.ir.model import Model, load
from rewriter.ir.plan import InputsOutputs
from rewriter.pipeline.options import FixOptions
from rewriter.runtime.inputs.random_samples import cache_pairs
from rewriter.runtime.recording.record import Link, Recording

LINKS = "links"

LinkEnd = tuple[str, str]  # a file and one of its inputs or outputs


def type_of_links(io: InputsOutputs | None) -> str:
    """The type that `io` asks for links; "" if it names none."""
    parts = (part.strip().rpartition("=") for part in (io or "").split(","))
    return next((name for pattern, _, name in parts if pattern == LINKS), "")


def io_of_model(source: Any, options: FixOptions) -> InputsOutputs:
    """`io` of one model with the names of its links to itself: of its recording, or of its caches."""
    model, data = load(source), options.inputs
    found = Recording.of_samples(Path(data)) if isinstance(data, (str, Path)) else None
    if found is None:
        links = [Link("", output, "", name, None, 0) for name, output in cache_pairs(model).items()]
        return io_of_files({"": (model, options)}, links, {})[""]
    recording, file = found
    own = [link for link in recording.links if link.producer == link.consumer == file.name]
    steps = {(file.name, output): step for output, step in recording.steps(file.name).items()}
    return io_of_files({file.name: (model, options)}, own, steps)[file.name]


def io_of_files(
    files: Mapping[str, tuple[Any, FixOptions]], links: Iterable[Link], steps: Mapping[LinkEnd, float]
) -> dict[str, InputsOutputs]:
    """`io` of each file, with the names of linked inputs and outputs.

    A link is lowered if both sides compute in the type, and if it is no slow state; with it all that share
    an end with it.

    Args:
        files: Models with their options, by name.
        steps: Median steps of states by file and output.
    """
    pairs = [((link.producer, link.output), (link.consumer, link.input)) for link in links]
    low = set[LinkEnd]()
    for file, (model, options) in files.items():
        names = {name for pair in pairs for owner, name in pair if owner == file}
        low |= {(file, name) for name in _computed_low(load(model), names, options)}
    low -= {end for end, step in steps.items() if step < SLOW_STEP}
    while bad := {end for pair in pairs if not low.issuperset(pair) for end in pair if end in low}:
        low -= bad
    return {
        file: _named(options.io or "", (name for owner, name in sorted(low) if owner == file))
        for file, (_, options) in files.items()
    }


def _named(io: InputsOutputs, names: Iterable[str]) -> InputsOutputs:
    """`io` with names in place of `links`."""
    parts = [part for part in io.split(",") if not part.strip().startswith(f"{LINKS}=")]
    own = [f"{glob.escape(name)}={type_of_links(io)}" for name in names]
    return ",".join([*own, *parts]) or "keep"


def _computed_low(model: Model, names: Iterable[str], options: FixOptions) -> set[str]:
    """The FP32 inputs and outputs that compute in the lower type if they may have it."""
    from rewriter.jobs.fix.api import fix

    ports = (*model.signature.inputs, *model.signature.outputs)
    wide = sorted({port.name for port in ports if port.dtype == TensorProto.FLOAT} & {*names})
    if not wide or type_of_links(options.io) in ("fp32", "keep"):
        return {*wide}
    trial = replace(options, io=_named(options.io or "", wide), verify=False, build=False, save_plan=None)
    graph = open_graphs(fix(model, None, trial).model)[0]
    low = set[str]()
    for name in wide:
        producer = graph.producer(name)
        if producer is not None and producer.op_type == "Cast":
            fits = graph.dtype(producer.input[0]) != TensorProto.FLOAT
        else:
            fits = producer is not None or not all(
                casts_to(n, TensorProto.FLOAT) for n in graph.consumers(name)
            )
        low |= {name} if fits else set()
    return low
