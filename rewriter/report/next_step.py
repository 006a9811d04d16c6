"""Suggests what to run after `fix`: the build of an engine, and the check on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rewriter.base.text import command_line
from rewriter.jobs.fix import deploy
from rewriter.jobs.fix.provenance import noted_tolerance
from rewriter.jobs.fix.result import FixResult
from rewriter.report.terminal import data_words
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.target import Target
from rewriter.verification.verdict import ran

PROPOSED = (
    "suggested profile: from the model's smallest shapes to twice your largest sample, where the model takes "
    "that; `min-shapes`, `opt-shapes` and `max-shapes` set yours"
)


@dataclass(frozen=True)
class NextStep:
    """Commands to run after `fix`.

    Attributes:
        build: Builds the engine; the user replaces `?` by the size of an unknown axis.
        verify: The command that runs the result where there is a GPU; "" if it ran here.
        remarks: What to know before, one sentence each.
    """

    build: str
    verify: str = ""
    remarks: tuple[str, ...] = ()


def next_step(result: FixResult) -> NextStep:
    """Returns the commands for a result; none if no file was written, or a check failed."""
    build = deploy.command(result)
    return NextStep(build, _verify(result), tuple(_remarks(result))) if build else NextStep("")


def _remarks(result: FixResult) -> Iterator[str]:
    target = result.target
    if result.output is not None and deploy.Build(result, result.output, None).proposed:
        yield PROPOSED
    if result.constraints is not None or result.script is not None:
        return
    if target == Target():
        yield "TensorRT 11 types every network strongly: leave out --stronglyTyped there"
    if deploy.chooses_types(target) and deploy.lowered(result):
        yield f"the builder of {target} chooses types itself: `weak-typing` writes constraints for it"


def _verify(result: FixResult) -> str:
    """The whole command that verifies the file where there is a GPU; "" for models in memory."""
    source, data = result.model.path, result.data
    if source is None or (result.verdict is not None and ran(result.verdict.checks)):
        return ""
    words = ["rewriter", "verify", source, Path(str(result.output)), *data_words(data)]
    if limit := noted_tolerance(result.model):
        words += ["--tolerance", f"{limit.value!r}"]
        words += ["--metric", limit.metric] if limit.metric != RELATIVE_L2 else []
    for flag, index in (("--min-shapes", 0), ("--opt-shapes", 1), ("--max-shapes", 2)):
        spans = data.spans if data is not None else {}
        inputs = sorted(data.profiled) if data is not None and not data.recorded else ()
        words += [f"{flag}={name}:{'x'.join(map(str, spans[name][index]))}" for name in inputs]
    return command_line(words)
