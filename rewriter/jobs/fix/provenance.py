"""The provenance of a fixed model, in its metadata, which Netron and any ONNX library show.

The model holds the tool and its version, the preset and the passes, the plan's hash, the source's name and
hash, and the verdict. Each node that the plan keeps in FP32 or BF16 holds its reason; each node that a pass
made holds the pass (`rewriter.ir.graph.editor.TAG`). A model that no pass changed gets no metadata.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rewriter import __version__
from rewriter.base.errors import RewriterError, UsageError
from rewriter.base.text import figure
from rewriter.ir.model import Model, load, set_metadata, walk_graphs
from rewriter.ir.plan import Plan, node_key, plan_file
from rewriter.jobs.fix.job import FixJob
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines.probing import known_target
from rewriter.runtime.metrics.metrics import METRICS
from rewriter.runtime.metrics.tolerances import Tolerance
from rewriter.target import Target

VERSION, PRESET, PIPELINE = "rewriter.version", "rewriter.preset", "rewriter.pipeline"
PLAN, SOURCE, SOURCE_HASH = "rewriter.plan.sha256", "rewriter.source", "rewriter.source.sha256"
VERDICT, SUMS, LIMIT = "rewriter.verdict", "rewriter.sums", "rewriter.tolerance"
SAMPLES, TARGET, WORSE = "rewriter.samples", "rewriter.target", "rewriter.worse"
PRECISION = "rewriter.precision"
"""Keys of the model's metadata."""

ALREADY_AVOIDED, RULE = "rewriter.kept", "rewriter.rule"
"""Keys of a node's metadata: why it is in FP32 or BF16, in words, and by which rule."""

LISTED = 3  # outputs that WORSE names

UNFINISHED = "not verified to the end"  # the verdict of a run that was interrupted


def worse_text(rows: Sequence[tuple[str, float, float]]) -> str:
    """Outputs on which plain FP16 is more accurate, as a file notes them: names, and both errors."""
    return ", ".join(
        f"{name} ({figure(plain)}, here {figure(error)})" for name, error, plain in rows[:LISTED]
    )


def source_hash(source: Any, original: Model) -> str:
    """SHA-256 of the source: of its file, then its files of weights, in the order of their names.

    Without a file: of the serialised model, then of its large weights in the order of their names.
    """
    digest = hashlib.sha256()
    if isinstance(source, (str, os.PathLike)):
        for path in (Path(source), *sorted(original.files)):
            with path.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)
    else:
        digest.update(original.proto.SerializeToString(deterministic=True))
        for name in sorted(original.weights):
            digest.update(original.weights[name].tobytes())
    return digest.hexdigest()


def stamp(model: Model, job: FixJob, pipeline: str, plan: Plan | None, source: str, verdict: str) -> None:
    """Notes where a model comes from in the model and its nodes; `source` is of `source_hash`."""
    named, target = isinstance(job.source, (str, os.PathLike)), job.precision.target
    entries = {
        VERSION: f"rewriter {__version__}",
        PRESET: job.request.preset if job.request.passes is None else "",
        PIPELINE: pipeline,
        PLAN: "" if plan is None else hashlib.sha256(plan_file.to_text(plan).encode()).hexdigest(),
        SOURCE: Path(job.source).name if named else "",
        SOURCE_HASH: source,
        VERDICT: verdict,
        SUMS: job.accumulation,
        PRECISION: job.precision.precision if job.lowers else "fp32",
        TARGET: " ".join((target.library, ".".join(map(str, target.version)), *target.gpus[:1])),
        LIMIT: "" if job.limit is None else f"{job.limit.tolerance!r} {job.limit.metric}",
    }
    set_metadata(model.proto, entries)
    by_key = {decision.key: decision for decision in plan.decisions} if plan is not None else {}
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        for node in graph.node:
            decision = by_key.get(node_key(scope, node))
            if decision is not None and node.op_type != "Cast":
                text = f"{decision.repair.upper()}, {decision.rule}: {decision.reason}"
                if decision.range and str(decision.range) not in text:
                    text += f"; {decision.tensor} is in {decision.range}"
                set_metadata(node, {ALREADY_AVOIDED: text, RULE: decision.rule})


def noted_tolerance(model: Model) -> Tolerance | None:
    """The tolerance that a file says `fix` judged it by; None if it says none, or it cannot be read."""
    value, _, metric = noted(model, LIMIT).partition(" ")
    if metric not in METRICS:  # a file from elsewhere does not name code to run
        return None
    with suppress(ValueError):
        return Tolerance(float(value), metric, "the `tolerance` of `fix`, noted in the file")
    return None


def noted_sums(model: Model) -> Accumulation | None:
    """The type of the emulated sums that `fix` judged a model by; None if it was not made by `fix`."""
    sums: dict[str, Accumulation] = {"fp32": "fp32", "fp16": "fp16"}
    return sums.get(noted(model, SUMS))


def recorded_sums(target: Target) -> Accumulation:
    """The type of FP16 sums that is recorded of a target; FP32, too, if it was never asked."""
    asked = (target.answers.get(probe) for probe in ("matmul-accumulation", "conv-accumulation"))
    return "fp16" if "fp16" in asked else "fp32"


def sums_of(model: Model, target: Target | None = None) -> Accumulation:
    """The type of the FP16 sums of a file: as `fix` judged it, else as recorded of its target.

    Args:
        target: Where the file names none; by default TensorRT.
    """
    return noted_sums(model) or recorded_sums(known_target(noted_target(model) or target or Target()))


def noted_target(model: Model) -> Target | None:
    """The target that `fix` made a model for; None if it was not made by `fix`."""
    with suppress(UsageError):
        return Target.parse(noted(model, TARGET)) if noted(model, TARGET) else None
    return None


def is_result_of(path: Path, source: Path) -> bool:
    """True if a file is what `fix` made of a model, or, where no pass changed anything, a copy of it."""
    with suppress(RewriterError, OSError):
        model = load(path)
        ours = noted(model, SOURCE) == source.name
        return ours or source_hash(path, model) == source_hash(source, load(source))
    return False


def made_by_fix(model: Model) -> str:
    """Sentence for a model that is a result of `fix` itself; "" for any other."""
    if not (version := noted(model, VERSION)):
        return ""
    source = noted(model, SOURCE) or "a model in memory"
    made = f"{version}, of {source}: {noted(model, VERDICT)}"
    return f"the model is a result of `fix` already ({made}); it is compared with itself, not with {source}"


def noted(model: Model, key: str) -> str:
    """The value that `fix` noted under a key; "" if there is none."""
    return next((entry.value for entry in model.proto.metadata_props if entry.key == key), "")
