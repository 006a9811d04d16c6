"""The verbs as `import rewriter` offers them: the jobs, with arguments that are checked first.

A keyword that a verb lacks is an error that names the closest one.
"""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rewriter.base.errors import UsageError, shortened
from rewriter.input_comparison.job import compare_inputs as compare_inputs_job
from rewriter.jobs.emulate import emulate as emulate_job
from rewriter.jobs.fix.api import fix as fix_job
from rewriter.jobs.locate import locate as locate_job
from rewriter.jobs.probe import probe as probe_job
from rewriter.jobs.scan import scan as scan_job
from rewriter.jobs.verify import verify as verify_job
from rewriter.pipeline.driver import run
from rewriter.pipeline.schema import converted, type_hints, unknown

__all__ = ["compare_inputs", "emulate", "fix", "locate", "probe", "run_passes", "scan", "verify"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _verb(job: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The job as a verb of the API: arguments are checked by its annotations first."""
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
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            if not takes_options or name == "output":  # the job itself checks the fields of an options class
                try:
                    converted(value, type_hints(job)[name])
                except ValueError as error:
                    what, key = f"it cannot be {shortened(value)}", name.replace("_", "-")
                    raise UsageError(what, option=key, hint=str(error)) from error
        return job(*args, **kwargs)

    return verb


fix = _verb(fix_job)
scan = _verb(scan_job)
verify = _verb(verify_job)
locate = _verb(locate_job)
compare_inputs = _verb(compare_inputs_job)
emulate = _verb(emulate_job)
probe = _verb(probe_job)
run_passes = _verb(run)
