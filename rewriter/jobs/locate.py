"""`locate`: finds the first tensor at which a model leaves its original when an engine runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rewriter.ir.errors import UsageError
from rewriter.ir.model import load
from rewriter.ir.model.stopwatch import Progress
from rewriter.jobs.fix.provenance import noted_sums, noted_tolerance
from rewriter.judge import locate as search
from rewriter.judge.locate import TOLERANCE, LocateOptions, Location
from rewriter.judge.locate.bisection import MARKS, MAX_BUILDS
from rewriter.pipeline.driver import run
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.protocol import MeasureSettings
from rewriter.runtime.engines.tensor_files import Shape
from rewriter.runtime.engines.this_machine import AUTO
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.figures.tolerances import TOLERANCES, precision_of
from rewriter.runtime.inputs import load_samples

MOST_SAMPLES = 4
"""Samples that are used: every build of the search runs all of them."""


def locate(
    original: str | os.PathLike[str] | Any,
    other: str | os.PathLike[str] | Any,
    *,
    inputs: Any = None,
    image_preprocess: str | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    engine: str = AUTO,
    plugin_lib: Sequence[str | os.PathLike[str]] = (),
    min_shapes: Mapping[str, Shape] | None = None,
    opt_shapes: Mapping[str, Shape] | None = None,
    max_shapes: Mapping[str, Shape] | None = None,
    tolerance: float | None = None,
    marks: int = MARKS,
    max_builds: int = MAX_BUILDS,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> Location:
    """Finds the first tensor at which `other` leaves `original`.

    Args:
        original, other: Path, onnx.ModelProto or onnx_graphsurgeon.Graph, with tensor names in common.
        inputs, image_preprocess, input_shapes, seed, engine, plugin_lib, min_shapes ...: As for `verify`.
        tolerance: Relative L2 error above which a tensor is wrong; None: what `verify` allows.
        marks: Tensors that one build marks, at most.
        max_builds: Builds of the search, at most.
        timeout: Seconds for each build, and for each run.

    Raises:
        RewriterError: bad model, data or option; an engine that was named and cannot run here.
    """
    if marks < 1 or max_builds < 1:
        raise UsageError("at least one is needed", where="`marks`, `max-builds`", hint="8 and 48 do well")
    if not timeout > 0:
        raise UsageError(f"it cannot be {timeout:g}", where="`timeout`", hint="seconds, such as 600")
    deployed = deployment(engine, plugin_lib, min_shapes, opt_shapes, max_shapes)
    models = load(original), load(other)
    sizes = {name: tuple(shape) for name, shape in (input_shapes or {}).items()}
    samples = load_samples(
        inputs,
        models[0],
        input_shapes=sizes,
        seed=seed,
        deployment=deployed,
        image_preprocess=image_preprocess,
    )
    chosen, used = deployed.choose().engine, list(islice(samples, MOST_SAMPLES))
    precision = precision_of(models[1])
    rounds = precision == "fp32" and chosen != "onnxruntime"
    held = noted_tolerance(models[1]) or TOLERANCES["tf32" if rounds else precision]
    usual = held.value if held.metric == "relative-l2" else TOLERANCE
    options = LocateOptions(usual if tolerance is None else tolerance, marks, max_builds)
    if chosen is None:
        exact = run(models[0], "upgrade-opset", opset=models[1].opset).model  # both in one session
        result = search.locate_by_emulation(exact, models[1], used, options, noted_sums(models[1]) or "fp16")
    else:
        settings = MeasureSettings(
            chosen, plugins=deployed.plugins, build_timeout_s=timeout, run_timeout_s=timeout
        )
        shown = progress or (lambda *_: None)
        result = search.locate(*models, used, settings, options, deployed.profile, shown)
    notes = [*([] if samples.source.real else [samples.source.text]), *data_warnings(models[0], samples)]
    if len(samples) > MOST_SAMPLES:
        notes.append(f"the first {MOST_SAMPLES} of {len(samples)} samples were looked at")
    return replace(
        result,
        notes=(*notes, *result.notes),
        data=samples.source,
        original=models[0].path,
        other=models[1].path,
    )
