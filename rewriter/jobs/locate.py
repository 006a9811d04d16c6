"""`locate`: finds the first tensor at which a model leaves its original when an engine runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.base.stopwatch import Progress
from rewriter.ir.model import load
from rewriter.jobs.fix.provenance import noted_sums
from rewriter.jobs.verify import verify
from rewriter.pipeline.driver import run
from rewriter.pipeline.options import VerifyOptions
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.protocol import MeasureSettings
from rewriter.runtime.engines.tensor_files import Shape
from rewriter.runtime.engines.this_machine import AUTO
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.metrics.parts import Part
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.verification import locate as search
from rewriter.verification.expected import judging
from rewriter.verification.locate import SAME, TOLERANCE, LocateOptions, Location


def locate(
    original: str | os.PathLike[str] | Any,
    other: str | os.PathLike[str] | Any,
    *,
    inputs: Any = None,
    image_preprocess: str | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, Any] | None = None,
    seed: int = 0,
    engine: str = AUTO,
    plugin_lib: Sequence[str | os.PathLike[str]] = (),
    min_shapes: Mapping[str, Shape] | None = None,
    opt_shapes: Mapping[str, Shape] | None = None,
    max_shapes: Mapping[str, Shape] | None = None,
    tolerance: float | None = None,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> Location:
    """Finds the first tensor at which `other` leaves `original`.

    Args:
        original, other: Path, onnx.ModelProto or onnx_graphsurgeon.Graph, with tensor names in common.
        inputs, image_preprocess, input_shapes, input_values, seed, engine, plugin_lib, min_shapes ...: As for
            `verify`.
        tolerance: Relative L2 error above which a tensor is wrong; None: what `verify` allows.
        timeout: Seconds for each build, and for each run.

    Raises:
        RewriterError: bad model, data or option; an engine that was named and cannot run here.
    """
    if not timeout > 0:
        raise UsageError(f"it cannot be {timeout:g}", option="timeout", hint="seconds, such as 600")
    spans = {"min_shapes": min_shapes, "opt_shapes": opt_shapes, "max_shapes": max_shapes}
    data: dict[str, Any] = {"inputs": inputs, "seed": seed, "image_preprocess": image_preprocess}
    data["input_values"] = input_values
    data["input_shapes"] = {name: tuple(shape) for name, shape in (input_shapes or {}).items()}
    deployed, models = deployment(engine, plugin_lib, *spans.values()), (load(original), load(other))
    samples, verdict = load_samples(model=models[0], deployment=deployed, **data), None
    data |= {**spans, "engine": engine, "plugin_lib": plugin_lib, "tolerance": tolerance, "timeout": timeout}
    with suppress(UsageError):  # of other inputs or outputs, which `verify` cannot judge
        verdict = verify(original, other, VerifyOptions(build=False, timing=False, **data), progress=progress)
    chosen, indices = deployed.choose().engine, judging(samples)
    limit, notes = TOLERANCE if tolerance is None else tolerance, list[str]()
    parts = dict[str, Part]()
    if verdict is not None and verdict.outputs:
        if tolerance is None and verdict.tolerance.metric == RELATIVE_L2:
            limit = verdict.tolerance.value
        check = next(check for check in verdict.checks if check.name in ("run", "emulation", "tf32"))
        failed = {o.output for o in check.outputs if not o.passed} or {o.output for o in check.outputs}
        wrong = sorted((o for o in check.outputs if o.part and not o.passed), key=lambda o: o.excess)
        parts = {o.of: o.part for o in wrong if o.part}  # the worst of each output
        notes += [f"{o.name} has an error of {o.relative_l2:.2g}" for o in wrong if parts[o.of] is o.part]
        worst = max((o for o in verdict.outputs if o.name in failed), key=lambda o: o.badness)
        if verdict.passed and worst.relative_l2 > limit:
            limit = SAME * worst.relative_l2
            notes.append(f"allowed by verify: {check.summary}")
        indices, names = [indices[worst.sample]], verdict.data.names
        if len(names) > 1:
            notes.append(f"on {names[worst.sample]}, the worst of {len(names)} samples by verify")
    options, used = LocateOptions(limit, parts=parts), [samples.feeds(index) for index in indices]
    if chosen is None:
        exact = run(models[0], "upgrade-opset", opset=models[1].opset).model  # both in one session
        result = search.locate_by_emulation(exact, models[1], used, options, noted_sums(models[1]) or "fp16")
    else:
        settings = MeasureSettings(chosen, plugins=deployed.plugins, timeout_s=timeout)
        shown = progress or (lambda *_: None)
        result = search.locate(*models, used, settings, options, deployed.profile, shown)
    notes += [*([] if samples.source.real else [samples.source.text]), *data_warnings(models[0], samples)]
    return replace(
        result,
        notes=(*notes, *result.notes),
        data=samples.source,
        original=models[0].path,
        other=models[1].path,
    )
