"""The verbs as `import rewriter` offers them: the jobs, with checked arguments, and sentences for people.

A keyword that a verb lacks is an error that names the closest one.
"""

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rewriter.base.errors import UsageError, shortened
from rewriter.base.stopwatch import Progress, silent
from rewriter.input_comparison.job import compare_inputs as compare_inputs_job
from rewriter.jobs.emulate import emulate as emulate_job
from rewriter.jobs.fix.api import fix as fix_job
from rewriter.jobs.locate import locate as locate_job
from rewriter.jobs.probe import probe as probe_job
from rewriter.jobs.scan import scan as scan_job
from rewriter.jobs.verify import verify as verify_job
from rewriter.pipeline.driver import run
from rewriter.pipeline.options import FixOptions, VerifyOptions, combined, documented
from rewriter.pipeline.schema import converted, type_hints, unknown
from rewriter.report import deploy
from rewriter.report.remarks import worded
from rewriter.report.results import FixResult, VerifyResult

__all__ = ["compare_inputs", "emulate", "fix", "locate", "probe", "run_passes", "scan", "verify"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _verb(
    job: Callable[Arguments, Result], finish: Callable[[Result], Result] = lambda result: result
) -> Callable[Arguments, Result]:
    """The job as a verb of the API: arguments are checked by its annotations first, its result finished."""
    signature = inspect.signature(job)
    takes_options = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @wraps(job)
    def verb(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        names = list(signature.parameters)
        if wrong := next((name for name in kwargs if name not in names and not takes_options), None):
            raise unknown(wrong, "there is no such keyword", "", names)
        cost: Any = kwargs.get("max_latency_cost")
        if isinstance(cost, (int, float)) and not isinstance(cost, bool) and 1.0 <= cost < math.inf:
            # as on the command line: 20 may be 20 % or 20 times
            hint = f'"{cost:g}%" is that much more latency, "{cost:g}x" that many times of it'
            raise UsageError(f"it cannot be {cost:g}", option="max-latency-cost", hint=hint)
        try:
            arguments = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return job(*args, **kwargs)  # Python's own error names the function, and what it takes
        for name, value in arguments.items():
            if not takes_options or name == "output":  # the job itself checks the fields of an options class
                try:
                    converted(value, type_hints(job)[name])
                except ValueError as error:
                    what, key = f"it cannot be {shortened(value)}", name.replace("_", "-")
                    raise UsageError(what, option=key, hint=str(error)) from error
        return finish(job(*args, **kwargs))

    return verb


@_verb
@documented(FixOptions)
def fix(
    model: str | os.PathLike[str] | Any,
    output: str | os.PathLike[str] | None = None,
    options: FixOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Any,
) -> FixResult:
    """Make a model accurate in a strongly typed TensorRT engine of reduced precision, and check it.

    Args:
        model: Path, onnx.ModelProto or onnx_graphsurgeon.Graph; FP32, FP16 or mixed.
        output: Where to write; None writes nothing.
        options: Options as a whole; keywords replace single ones.
        progress: Called with the stage, and with how many of how many steps of it are done.

    Raises:
        RewriterError: bad model, data, option or output path; nothing is written then.
    """
    request = combined(FixOptions, options, keywords)
    outcome = fix_job(model, output, request, progress or silent, lambda end: FixResult.of(end).ending)
    if request.deploy is not None and deploy.command(outcome):
        outcome.script = deploy.write(outcome, request.deploy)
    return FixResult.of(outcome)


@_verb
@documented(VerifyOptions)
def verify(
    original: str | os.PathLike[str] | Any,
    fixed: str | os.PathLike[str] | Any,
    options: VerifyOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Any,
) -> VerifyResult:
    """Run the fixed model and compare it, output by output, with the original in FP32.

    The reference is the original on ONNX Runtime, every FP16 and BF16 tensor widened. Without a GPU the
    engine `auto` is the emulation, and a build without a GPU; the result says so.

    Args:
        original, fixed: Path, onnx.ModelProto or onnx_graphsurgeon.Graph, with equal names of inputs
            and outputs.
        options: Options as a whole; keywords replace single ones.

    Raises:
        RewriterError: bad model, data or option; an engine that was named and cannot run here.
    """
    request = combined(VerifyOptions, options, keywords)
    return VerifyResult.of(verify_job(original, fixed, request, progress or silent))


scan = _verb(scan_job, lambda result: replace(result, plain=result.plain and worded(result.plain)))
locate = _verb(locate_job)
compare_inputs = _verb(compare_inputs_job)
emulate = _verb(emulate_job)
probe = _verb(probe_job)
run_passes = _verb(run)
