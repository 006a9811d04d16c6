"""Runs passes and holds every one of them to the contract; `run` is `rewriter.run_passes`.

Names, types and shapes of inputs and outputs stay; the checker and strict shape inference pass;
a pass that reports no change leaves the model byte-identical.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any

import onnx

from rewriter.base.errors import ModelError, PassError, UsageError, described
from rewriter.base.stopwatch import raise_signal
from rewriter.base.text import Row, Summary, count
from rewriter.ir.graph import GraphEditor, open_graphs
from rewriter.ir.model import Model, Signature, check, load
from rewriter.ir.model.normalization import lift_weights
from rewriter.passes import ALL
from rewriter.passes.base import Change, Context, Event, GraphPass, ModelPass, Pass, Refusal, Stage
from rewriter.pipeline.text import listed, parse, render
from rewriter.target import Target


@dataclass(frozen=True)
class PassResult:
    """The changes and refusals of one pass. `seconds` is wall time, checks included.

    `failure` is the error that the pass raised, or its breach of the contract, if the driver skipped it.
    """

    name: str
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    seconds: float
    failure: str = ""


@dataclass(frozen=True)
class Driver:
    """Runs passes one after the other; `on_pass` is called with each before it runs.

    With `lenient`, a pass that fails is left out, unless it applies the plan. Runs with the same list of
    `drafts` take over the draft that the last one left unchanged, if they start from its result.
    """

    on_pass: Callable[[Pass], None] = lambda _: None
    lenient: bool = False
    drafts: list[Draft] = field(default_factory=list)

    def run(self, model: Model, passes: Sequence[Pass], context: Context) -> tuple[Model, list[PassResult]]:
        """Returns the rewritten model and one result for each pass; `model` itself is unchanged.

        Weights in Constant nodes are initializers for every pass. If no pass changes anything, the result is
        `model` itself.

        Raises:
            PassError: a pass broke the contract; the message names it and the passes before it. Other errors
                of a pass are passed on.
        """
        draft = next((draft for draft in self.drafts if draft.original is model), None)
        self.drafts.clear()
        strict = not model.facts().contradiction  # the user's own model may have some
        results: list[PassResult] = []
        for step in passes:
            self.on_pass(step)
            start = time.perf_counter()
            draft = draft or Draft(model)
            events, failure = list[Event](), ""
            try:
                events = _run_one(draft, step, context, strict, [r.name for r in results])
            except Exception as error:
                raise_signal()
                if not self.lenient or step.stage is Stage.LOWERING or isinstance(error, UsageError):
                    raise  # a UsageError: the plan that the user gave does not fit
                failure = described(error)
                draft.undo()
            changes = tuple(event for event in events if isinstance(event, Change))
            refusals = tuple(event for event in events if isinstance(event, Refusal))
            results.append(PassResult(step.name, changes, refusals, time.perf_counter() - start, failure))
        if draft is None or not any(result.changes for result in results):
            self.drafts.extend([draft] if draft is not None else [])
            return model, results
        return draft.model, results


def inlined(model: Model) -> Model:
    """The model with its local functions inlined, if it has any."""
    if not model.proto.functions:
        return model
    rewritten, _ = Driver().run(model, parse("inline-functions"), Context(model.opset))
    return rewritten


class Draft:
    """A copy of a model that the passes of a run edit one after the other.

    A pass that fails is undone from the bytes that the last check wrote: a copy for each pass would cost more
    than most of them. Graph passes that change nothing share the index of the graph.

    Attributes:
        signature: Inputs and outputs before the pass.
    """

    def __init__(self, original: Model) -> None:
        self.original = original
        self._checked: Model | None = None
        self.undo()

    def undo(self) -> None:
        """Takes back the edits since the last check."""
        self.model, self._editors = self._before(), list[GraphEditor]()
        self.signature, self._revision = self.model.signature, self.model.revision

    def keep(self, signature: Signature) -> None:
        """Keeps the edits, which have just been checked."""
        self.signature, self._revision = signature, self.model.revision
        self.model.serialized()
        self._checked = replace(self.model, proto=onnx.ModelProto(), weights=dict(self.model.weights))

    def _before(self) -> Model:
        """A copy of the model before the edits since the last check."""
        if self._checked is None:
            lift_weights(model := self.original.copy())
            return model
        proto = onnx.ModelProto.FromString(self._checked.serialized())
        return replace(self._checked, proto=proto, weights=dict(self._checked.weights))

    def is_edited(self) -> bool:
        """True if an editor or a pass has marked an edit since the last check."""
        return self.model.revision != self._revision

    def is_unchanged(self, step: Pass) -> bool:
        """True if a pass that reports no change made none. Our own, tested on that, are believed."""
        return (type(step) in ALL and not self.is_edited()) or self.model.same_as(self._before())

    def events(self, step: Pass, context: Context) -> Iterator[Event]:
        if isinstance(step, ModelPass):
            self._editors = []
            yield from step.rewrite_model(self.model, context)
        elif isinstance(step, GraphPass):
            if not (self._editors and all(editor.untouched for editor in self._editors)):
                self._editors = open_graphs(self.model)
            for editor in reversed(self._editors):
                editor.tag = step.name
                with editor:
                    yield from step.rewrite(editor, context)


def _run_one(draft: Draft, step: Pass, context: Context, strict: bool, earlier: list[str]) -> list[Event]:
    """Runs a pass on a draft, and holds it to the contract; without a Change the model must be the same."""
    too_old = step.requires.refusal(draft.model.opset)
    try:
        events = list(draft.events(step, context))
        _require(all(isinstance(event, Event) for event in events), "it yields objects that are no events")
        if not any(isinstance(event, Change) for event in events):
            _require(draft.is_unchanged(step), "it reports no change, but the model differs")
        elif too_old is not None:
            draft.undo()
            return [Refusal(e.node, too_old) if isinstance(e, Change) else e for e in events]
        else:
            if type(step) not in ALL or not draft.is_edited():
                draft.model.mark_edited()  # it may have edited the proto itself
            was, now = draft.signature, draft.model.signature
            kept = not step.keeps_signature or now == was
            _require(kept, f"inputs or outputs changed: {was} became {now}")
            check(draft.model)
            draft.model.facts(strict=strict)
            draft.keep(now)
        return events
    except (ModelError, _BrokenContract) as error:
        if step.imported:
            draft.undo()
            why = error.what if isinstance(error, ModelError) else error
            return [Refusal("model", f"rolled back: {why}")]
        what, before = f"pass {step.name} broke its contract: {error}", ", ".join(earlier) or "none"
        hint = f"run without it (`skip={step.name}`) and report it; passes before it: {before}"
        raise PassError(what, where=draft.original.path, hint=hint) from error


class _BrokenContract(Exception):
    pass


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _BrokenContract(message)


@dataclass(frozen=True, repr=False)
class Rewritten(Summary):
    """A model after some passes."""

    model: Model
    pipeline: str
    passes: tuple[PassResult, ...] = ()

    @property
    def proto(self) -> onnx.ModelProto:
        """The rewritten model with its weights inside (up to 2 GiB)."""
        return self.model.whole()

    def summary(self) -> Iterator[Row]:
        yield "changes", str(sum(len(step.changes) for step in self.passes))
        for step in self.passes:
            declined = f", {len(step.refusals)} declined" if step.refusals else ""
            yield step.name, f"{count(len(step.changes), 'change')}{declined}"


def run(
    model: Any,
    passes: str | Sequence[str | Pass | EllipsisType],
    *,
    opset: int | None = None,
    target: str = "tensorrt",
) -> Rewritten:
    """Runs structural passes on a model, one after the other; the model that is given stays unchanged.

    Args:
        model: Path, onnx.ModelProto, onnx_graphsurgeon.Graph, or a `rewriter.Model`.
        passes: A pipeline as text, or a list of names and passes of your own: `["simplify", MyPass()]`.
        opset: The highest operator set that passes may use; None: 17, or the model's if that is higher.
        target: The TensorRT that the result is for.

    Raises:
        UsageError: an unknown pass, or one that needs measured ranges or a plan: those run in `rewriter.fix`.
        PassError: a pass broke its contract. ModelError: the model cannot be read.
    """
    for step in (steps := listed(passes)):
        if step.stage is not Stage.STRUCTURE:
            what, hint = "it needs measured ranges or a plan", "run it with rewriter.fix(model, passes=[...])"
            raise UsageError(what, where=f"pass {step.name!r}", hint=f"{hint}, which measures and plans")
    original = load(model)
    highest = opset if opset is not None else max(original.opset, 17)
    context = Context(highest, Target.parse(target))
    result, results = Driver().run(original, steps, context)
    return Rewritten(result, render(steps), tuple(results))
