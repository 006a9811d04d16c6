"""Runs a pipeline of passes on a model, without ranges, plan and verification: `rewriter.run_passes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import onnx

from rewriter.ir.base import Context, Pass, Stage, Target
from rewriter.ir.english import count
from rewriter.ir.errors import UsageError
from rewriter.ir.model import Model, load
from rewriter.ir.summary import Row, Summary
from rewriter.pipeline.driver import Driver, PassResult
from rewriter.pipeline.text import listed, render


@dataclass(frozen=True, repr=False)
class Rewritten(Summary):
    """A model after some passes.

    Attributes:
        model: The rewritten model; `rewriter.save` writes it.
        pipeline: Text of the passes that ran.
        passes: What each pass did and declined.
    """

    model: Model
    pipeline: str
    passes: tuple[PassResult, ...] = field(default=())

    @property
    def proto(self) -> onnx.ModelProto:
        """The rewritten model with its weights inside (up to 2 GiB)."""
        return self.model.whole()

    def summary(self) -> Iterator[Row]:
        changes = sum(len(one.changes) for one in self.passes)
        yield "changed", count(changes, "place")
        for one in self.passes:
            declined = f", {len(one.refusals)} declined" if one.refusals else ""
            yield one.name, f"{count(len(one.changes), 'change')}{declined}"


def run(
    model: Any,
    passes: str | Sequence[str | Pass | EllipsisType],
    *,
    opset: int | None = None,
    target: str = "tensorrt",
    on_pass: Callable[[Pass], None] | None = None,
) -> Rewritten:
    """Runs structural passes on a model, one after the other; the model that is given stays unchanged.

    Args:
        model: Path, onnx.ModelProto, onnx_graphsurgeon.Graph, or a `rewriter.Model`.
        passes: A pipeline as text, or a list of names and passes of your own: `["simplify", MyPass()]`.
        opset: The highest operator set that passes may use; None: 17, or the model's if that is higher.
        target: The TensorRT that the result is for.
        on_pass: Called with each pass before it runs.

    Raises:
        UsageError: an unknown pass, or one that needs measured ranges or a plan: those run in `rewriter.fix`.
        PassError: a pass broke its contract. ModelError: the model cannot be read.
    """
    steps = listed(passes)
    for step in steps:
        if step.stage is not Stage.STRUCTURE:
            raise UsageError(
                "it needs measured ranges or a plan",
                where=f"pass {step.name!r}",
                hint="run it with rewriter.fix(model, passes=[...]), which measures and plans",
            )
    given = load(model)
    highest = opset if opset is not None else max(given.opset, 17)
    context = Context(highest, Target.parse(target))
    made, results = Driver(on_pass or (lambda _: None)).run(given, steps, context)
    return Rewritten(made, render(steps), tuple(results))
