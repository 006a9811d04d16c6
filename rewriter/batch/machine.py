"""Runs a batch: skips finished models, runs the others, and saves each outcome as soon as it is known.

Each model has its own process, so that a crash, a hang or its memory does not affect the others.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rewriter.base import sandbox
from rewriter.base.errors import ModelError, NativeError, OutputError, RewriterError, UnbuildableError
from rewriter.base.stopwatch import Progress
from rewriter.batch import models
from rewriter.batch.models import FINISHED, GIB, Ending, Ends, Entry, Outcome
from rewriter.ir.model import data_files
from rewriter.pipeline.options import with_flags
from rewriter.report.checks import judging_check
from rewriter.report.results import FixResult

POLL_SECONDS = 0.05

KILLED = "killed, usually because memory ran out: `jobs=1` or `memory` leaves more for it"

Tick = Callable[[], None]  # raises the exception of a pending Ctrl-C or request to end


def run_batch(
    entries: Sequence[Entry],
    run: Callable[[Sequence[Entry], Tick], Ends],  # closing what it returns stops the other models
    progress: Progress,
    *,
    again: bool = False,  # run finished models, too
) -> list[tuple[Entry, Outcome]]:
    """Runs the models that are not finished. Returns the outcomes in the order of the entries."""
    keys: dict[str, str] = {}
    outcomes: dict[str, Outcome] = {}
    line = ""

    def tick() -> None:
        progress(line, len(outcomes), len(entries))

    def ended(entry: Entry, outcome: Outcome) -> None:
        nonlocal line
        outcomes[entry.name] = outcome
        when = "earlier" if outcome.skipped else f"{outcome.seconds:.1f} s"
        line = f"[{len(outcomes)}/{len(entries)}] {entry.name}: {outcome.ending}, {when}"
        tick()

    for entry in entries:
        tick()
        keys[entry.name] = models.key_of(entry)
        earlier = None if again else models.finished(entry, keys[entry.name])
        if earlier is not None:
            ended(entry, earlier)
    with closing(run([entry for entry in entries if entry.name not in outcomes], tick)) as ends:
        for entry, outcome in ends:
            if outcome.files:
                models.remove_outdated(entry)
            elif models.finished(entry, keys[entry.name]) is None:
                outcome = replace(outcome, text=outcome.text + models.set_aside(entry))
            if outcome.ending in FINISHED:
                models.save(entry, outcome, keys[entry.name])
            ended(entry, outcome)
    return [(entry, outcomes[entry.name]) for entry in entries]


class Process:
    """The process that fixes one model, `limit_s` seconds at most."""

    def __init__(self, entry: Entry, limit_s: float) -> None:
        self.entry, self.limit_s = entry, limit_s
        self.worker: sandbox.Worker | None = None
        self.stopped = False

    def run(self) -> Outcome:
        """Fixes the model: waits for the end of the process, or ends it at its deadline."""
        start, limit_s = time.monotonic(), self.limit_s
        try:
            with closing(sandbox.Worker(None, doing="it", limit_s=limit_s)) as self.worker:
                left = start + limit_s - time.monotonic()
                outcome: Outcome = self.worker.call(_fix, self.entry, limit_s=0.0 if self.stopped else left)
        except UnbuildableError as error:
            outcome = Outcome("unbuildable", error_line(error))
        except NativeError as error:
            if error.cause == "timeout":
                outcome = Outcome("timed out", f"stopped after {limit_s:g} s: `time-limit` allows more")
            else:
                outcome = Outcome("crashed", KILLED if error.cause == "SIGKILL" else error.cause)
        except RewriterError as error:
            outcome = Outcome("refused", error_line(error))
        except Exception as error:
            outcome = Outcome("crashed", f"{type(error).__name__}: {error}")
        return replace(outcome, seconds=time.monotonic() - start)

    def stop(self) -> None:
        """Ends the process and all that it started; `run` then returns without waiting."""
        self.stopped = True
        if self.worker is not None:
            self.worker.kill()


def error_line(error: RewriterError) -> str:
    return " ".join(with_flags("; ".join(str(error).splitlines())).split())


def make_folder(output: Path) -> None:
    """Creates the folder of a result; raises OutputError."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, hint = f"cannot write the result: {error.strerror}", "check permissions and the free space"
        raise OutputError(what, where=output, hint=hint) from error


def _fix(entry: Entry) -> Outcome:
    """Runs in the child process."""
    from rewriter.api import fix

    sandbox.inside = False  # native code of this model runs in processes of its own, as always
    make_folder(entry.output)
    try:
        result = fix(entry.model, entry.output, **entry.options)
    except NativeError as error:  # of such a process: this one has not crashed
        raise ModelError(error.what, where=error.where, hint=error.hint) from None
    return outcome_of(entry, result)


def outcome_of(entry: Entry, result: FixResult) -> Outcome:
    """The outcome of a result that was written; writes its page on request."""
    from rewriter.report.html import write

    conclusion, checks = result.conclusion, result.verdict.checks if result.verdict else ()
    passed = result.verdict is None or result.verdict.passed
    ending: Ending = "unchecked" if not checks else "failed"
    if passed and checks and (result.accepted or not entry.options.get("strict")):
        ending = "verified" if result.proven else "unproven"
    text = "; ".join(check.summary for check in checks if check.passed is False) or result.ending
    if conclusion.limit:
        text = f"{conclusion.limit}; what to do: {conclusion.remedy}"
    judging = judging_check(checks)
    worst = max(float(o.relative_l2) for o in judging.outputs if o.counts) if judging else None
    files = () if result.output is None else (*data_files(result.output), result.output)
    files += (result.script,) if result.script is not None else ()
    if entry.options.get("page") and result.output is not None:
        write(result, models.page_of(entry.output))
        files += (models.page_of(entry.output),)
    names = tuple(file.name for file in files)
    ending = "unbuildable" if conclusion.kind == "unbuildable" else ending
    outcome = Outcome(ending, text, error=worst, latency_shares=result.latency_shares, files=names)
    if result.plan is None:
        return outcome
    nodes = len(result.plan.fp32) + len(result.plan.bf16)
    return replace(outcome, fp32_nodes=nodes, float_nodes=result.plan.float_nodes)


@dataclass(frozen=True)
class Processes:
    """Runs models in child processes of this machine."""

    jobs: int  # models at a time, if the memory holds that many of the largest
    memory_bytes: int  # for all models together; 0: no limit
    seconds: float
    strict: bool = False  # refuse a model that needs more than all memory, in place of running it

    def run(self, entries: Sequence[Entry], tick: Tick) -> Ends:
        """Yields each model with its outcome as it ends; closing the generator stops those that run."""
        needs = {entry.name: models.memory_needed(entry.model) for entry in entries}
        large = [entry for entry in entries if self.strict and needs[entry.name] > self.memory_bytes]
        for entry in large:
            text = f"needs about {needs[entry.name] / GIB:.1f} GiB, and `memory` allows less: allow more"
            yield entry, Outcome("refused", text)
        entries = [entry for entry in entries if entry not in large]
        largest = max((needs[entry.name] for entry in entries), default=1)
        jobs = min(self.jobs, self.memory_bytes // largest) if self.memory_bytes else self.jobs
        processes = [Process(entry, self.seconds) for entry in entries]
        with ThreadPoolExecutor(max(1, jobs)) as threads:
            pairs = zip(entries, processes, strict=True)
            running = {threads.submit(process.run): entry for entry, process in pairs}
            try:
                while running:
                    tick()
                    for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.stop()
