"""`verify`: the fixed model against the original, on the best engine of this machine."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from rewriter.ir.errors import UsageError
from rewriter.ir.model import load
from rewriter.ir.model.stopwatch import Progress, Stopwatch
from rewriter.jobs.fix.provenance import noted_sums, noted_tolerance
from rewriter.judge.judge import BuildRun
from rewriter.judge.not_finite import nan_warnings
from rewriter.judge.run_check import build_without_gpu, run_emulated, run_on_engine
from rewriter.judge.verdict import Verdict
from rewriter.judge.verify_result import VerifyResult
from rewriter.judge.workspace import MOST_SAMPLES, Workspace
from rewriter.pipeline.keywords import VerifyKeywords
from rewriter.pipeline.options import VerifyOptions, combined, documented
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.onnxruntime import gpu_notes
from rewriter.runtime.engines.onnxruntime_library import NoKernelError
from rewriter.runtime.engines.protocol import MeasureSettings, Timing
from rewriter.runtime.engines.this_machine import Choice
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.figures.metrics import named
from rewriter.runtime.figures.outputs import OutputStatistics
from rewriter.runtime.figures.tolerances import Tolerance, default_tolerance
from rewriter.runtime.inputs import Samples, load_samples

__all__ = ["BuildRun", "OutputStatistics", "Tolerance", "VerifyResult", "verify"]


@documented(VerifyOptions)
def verify(
    original: str | os.PathLike[str] | Any,
    fixed: str | os.PathLike[str] | Any,
    options: VerifyOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Unpack[VerifyKeywords],
) -> VerifyResult:
    """Run the fixed model and compare it, output by output, with the original in FP32.

    The reference is the original on ONNX Runtime's CPU, every FP16 and BF16 tensor widened. Without a GPU the
    engine `auto` is the emulation, and a build without a GPU; the result says so.

    Args:
        original, fixed: Path, onnx.ModelProto or onnx_graphsurgeon.Graph, with equal names of inputs
            and outputs.
        options: Options as a whole; keywords replace single ones.

    Raises:
        RewriterError: bad model, data or option; an engine that was named and cannot run here.
    """
    request = combined(VerifyOptions, options, keywords)
    tolerance, metric, timeout = request.tolerance, request.metric, request.timeout
    if isinstance(tolerance, Tolerance):
        metric = tolerance.metric
    asked = _asked(tolerance, metric)
    watch = Stopwatch(progress or (lambda stage, done, total: None))
    deployed = deployment(
        request.engine, request.plugin_lib, request.min_shapes, request.opt_shapes, request.max_shapes
    )
    chosen = deployed.choose()
    with tempfile.TemporaryDirectory(prefix="rewriter-verify-") as folder:
        with watch("load"):
            models = load(original), load(fixed)
            asked = asked or noted_tolerance(models[1])
            samples = load_samples(
                request.inputs,
                models[0],
                input_shapes=request.input_shapes,
                seed=request.seed,
                deployment=deployed,
                image_preprocess=request.image_preprocess,
            )
            workspace = Workspace(*models, samples, Path(folder), deployed.profile)
        tf32 = chosen.engine != "onnxruntime"
        held = asked or default_tolerance(workspace.fixed_facts, tf32=tf32)
        with watch("reference"):
            missing = _without_reference(workspace, chosen)
            made_nan = nan_warnings(models[0], islice(samples, MOST_SAMPLES), workspace.expected)
        if chosen.engine is None:
            with watch("emulation"):
                sums = request.accumulation or noted_sums(models[1]) or "fp16"
                done = run_emulated(workspace, held, sums, asked=asked is not None)
            with watch("build"):
                if request.build:
                    built = build_without_gpu(workspace, timeout, deployed.plugins)
                    done = replace(done, checks=(*done.checks, built))
        else:
            settings = MeasureSettings(
                chosen.engine,
                builds=request.builds,
                timing=Timing() if request.timing else None,
                plugins=deployed.plugins,
                build_timeout_s=timeout,
                run_timeout_s=timeout,
            )
            with watch("run"):
                done = run_on_engine(workspace, settings, held, missing, asked=asked is not None)
        warnings = (
            *_warnings(chosen, samples),
            *data_warnings(models[0], samples),
            *made_nan,
            *done.warnings,
            *gpu_notes(),
        )
        return VerifyResult(
            original=models[0].path,
            fixed=models[1].path,
            engine=done.engine,
            device=done.device,
            tolerance=held,
            data=samples.source,
            outputs=done.judged.outputs,
            builds=done.judged.builds,
            latency=done.latency,
            reference_latency=done.reference_latency,
            verdict=Verdict(done.checks),
            warnings=warnings,
            seconds=watch.seconds,
        )


def _without_reference(workspace: Workspace, chosen: Choice) -> str:
    """Compute the reference; or why ONNX Runtime cannot, where an engine of the original can stand in."""
    try:
        workspace.compute_reference()
    except NoKernelError as error:
        if chosen.engine in ("tensorrt", "tensorrt-rtx"):
            return error.what
        error.hint = "on a GPU its FP32 engine is the reference: `engine=tensorrt`, with `plugin-lib`"
        raise
    return ""


def _warnings(chosen: Choice, samples: Samples) -> Iterator[str]:
    if chosen.engine is None:
        why = "; ".join(chosen.reasons)
        yield (
            f"NOT run on a GPU ({why}): the figures are emulated; they do not show speed or defects of "
            "TensorRT's kernels"
        )
    elif chosen.engine == "onnxruntime":
        yield (
            "NOT run on a GPU: ONNX Runtime on the CPU computes FP16 in FP32, between nodes, too, so that an "
            "overflow may not show; `engine=emulation` shows it"
        )
    if not samples.source.real:
        yield samples.source.text
    if len(samples) > MOST_SAMPLES:
        yield f"the first {MOST_SAMPLES} of {len(samples)} samples were compared"


def _asked(tolerance: float | Tolerance | None, metric: str) -> Tolerance | None:
    """The user's tolerance, if there is one and it makes sense."""
    measure = named(metric)
    if tolerance is None:
        if metric != "relative-l2":
            raise UsageError(
                f"there is no default tolerance for {metric}", where="`metric`", hint="add `tolerance=VALUE`"
            )
        return None
    asked = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance, metric, "`tolerance`")
    if math.isnan(asked.value) or (asked.value < 0 and not measure.least):
        raise UsageError(f"it cannot be {asked.value:g}", where="`tolerance`", hint="such as 1e-3")
    return asked
