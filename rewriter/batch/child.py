"""One model in a process of its own: its crash, its hang and its memory stay its own."""

from __future__ import annotations

import time
from dataclasses import replace

from rewriter.batch.models import Entry
from rewriter.batch.state import Ending, Outcome
from rewriter.ir import children
from rewriter.ir.errors import ModelError, NativeError, RewriterError, UnbuildableError
from rewriter.pipeline.options import with_flags
from rewriter.report.checks import judging_check


class Process:
    """The process that fixes one model, `limit_s` seconds at most."""

    def __init__(self, entry: Entry, limit_s: float) -> None:
        self.entry, self.limit_s = entry, limit_s
        self.child: children.Child | None = None
        self.stopped = False

    def run(self) -> Outcome:
        """Waits for the end of the process, or ends it at its deadline."""
        start, limit_s = time.monotonic(), self.limit_s
        try:
            with children.Child(None, doing="it", limit_s=limit_s) as self.child:
                left = start + limit_s - time.monotonic()
                outcome: Outcome = self.child.call(_fix, self.entry, limit_s=0.0 if self.stopped else left)
        except UnbuildableError as error:
            outcome = Outcome("unbuildable", _line(error))
        except NativeError as error:
            outcome = _gone(error, limit_s)
        except RewriterError as error:
            outcome = Outcome("refused", _line(error))
        except Exception as error:
            outcome = Outcome("crashed", f"{type(error).__name__}: {error}")
        return replace(outcome, seconds=time.monotonic() - start)

    def stop(self) -> None:
        """Ends the process and those that it started; `run` returns at once."""
        self.stopped = True
        if self.child is not None:
            self.child.kill()


def _gone(error: NativeError, limit_s: float) -> Outcome:
    """The outcome of a process that ended without one."""
    if error.cause == "timeout":
        return Outcome("timed out", f"stopped after {limit_s:g} s: `time-limit` allows more")
    memory = "killed, as a rule because memory ran out: `jobs=1` or `memory` leaves it more"
    return Outcome("crashed", memory if error.cause == "SIGKILL" else error.cause)


def _line(error: RewriterError) -> str:
    return " ".join(with_flags(str(error)).replace("\n  what to do: ", "; what to do: ").split())


def _fix(entry: Entry) -> Outcome:
    """Runs in the child process."""
    from rewriter.jobs.fix.api import fix

    children.inside = False  # native code of this model runs in processes of its own, as always
    try:
        result = fix(entry.model, entry.output, **entry.options)
    except NativeError as error:  # of such a process: this one has not crashed
        raise ModelError(error.what, where=error.where, hint=error.hint) from None
    conclusion, checks = result.conclusion, result.verdict.checks if result.verdict else ()
    passed = result.verdict is None or result.verdict.passed
    ending: Ending = "unchecked" if not checks else "failed"
    if passed and checks and (result.proven or not entry.options.get("strict")):
        ending = "verified" if result.proven else "unproven"
    text = "; ".join(check.summary for check in checks if check.passed is False) or result.ending
    if conclusion.limit:
        text = f"{conclusion.limit}; what to do: {conclusion.remedy}"
    judging = judging_check(checks)
    worst = max(float(output.relative_l2) for output in judging.outputs) if judging else None
    outcome = Outcome("unbuildable" if conclusion.kind == "unbuildable" else ending, text, error=worst)
    if result.plan is None:
        return outcome
    kept = len(result.plan.fp32) + len(result.plan.bf16)
    return replace(outcome, fp32_nodes=kept, float_nodes=result.plan.float_nodes)
