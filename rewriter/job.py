"""One run of `fix`: the stages in order, with what each hands to the next."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rewriter import activations, checks, epilogues, pipeline, plan_file, splits, weak_typing
from rewriter import facts as tensor_facts
from rewriter.base import Calibration, Context, Kept, Merged, Pass, Rescaled, Spent, Target
from rewriter.deployment import Deployment
from rewriter.driver import Driver, PassResult
from rewriter.emulation import Accumulation, reference
from rewriter.engines import host
from rewriter.engines.protocol import EngineName, Settings, Span
from rewriter.errors import ArithmeticRunError, UsageError
from rewriter.expectations import data_warnings
from rewriter.facts import Facts
from rewriter.inputs import Samples, load_samples, random_samples
from rewriter.model import Model, load, save
from rewriter.norm_opset import needed_opset
from rewriter.plan import Plan
from rewriter.plan_fit import fit, kept_by_user, named_by, operators
from rewriter.planner import Wish, make_plan
from rewriter.pricing import priced
from rewriter.ranges import Ranges, measure
from rewriter.ranges.binades import measure_binades
from rewriter.ranges.merged import merged_ranges
from rewriter.result import Check, FixResult, Frontier, Searched, Verdict
from rewriter.search.goal import Aim, Budget
from rewriter.search.stage import Order, Subject, answer
from rewriter.verification.execute import run_built

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much (0: not known)."""

VERIFIED_SAMPLES = 1
"""How many samples are compared: each costs three runs of the model. Ranges use them all."""


@dataclass(frozen=True)
class Options:
    """The arguments of `fix`, checked and complete; see there.

    `free_opset`: whether `opset` is a default, which a model's norms may raise.
    """

    source: Any
    output: str | os.PathLike[str] | None
    steps: tuple[Pass, ...]
    wish: Wish
    opset: int
    free_opset: bool
    target: Target
    inputs: Any
    input_shapes: Mapping[str, tuple[int, ...]]
    seed: int
    verify: bool
    build: bool
    dry_run: bool
    in_place: bool
    strict: bool
    build_timeout: float
    progress: Progress
    plan: Plan | None = None
    plan_source: str = "the plan"
    save_plan: Path | None = None
    accumulation: Accumulation = "fp32"
    goal: Aim | None = None
    metric: str = "relative-l2"
    pareto: bool = False
    weak_typing: bool = False
    search_engine: EngineName | None = None
    deployment: Deployment = field(default_factory=Deployment)
    search_seconds: float = 300.0


@dataclass
class Job:
    """Runs the stages and gathers what the result tells of them."""

    options: Options
    passes: list[PassResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    search_check: Check | None = None
    frontier: Frontier | None = None
    searched: Searched | None = None

    def run(self) -> FixResult:
        """From the file to the verdict."""
        destination = _destination(self.options)
        original, samples = self._load()
        options = self.options
        expected = self._expected(original, samples) if options.verify else None
        structural, measuring, following, lowering = _split(options.steps)
        structured = self._rewrite(original, structural)
        wanted = bool(measuring or lowering) and options.plan is None
        ranges = self._measure(structured, samples) if wanted else Ranges()
        if measuring and options.plan is not None:  # it says what they found
            structured = self._rewrite(structured, measuring, options.plan)
        elif measuring:
            structured, ranges = self._rewrite_measured(structured, measuring, ranges, samples)
        done = self._check_structure(expected, structured, samples) if options.verify else []
        plan = self._plan(structured, ranges) if lowering else None
        plan, structured = self._followed(original, structured, following, plan, samples)
        if plan is not None and options.plan is None:
            plan = replace(plan, exponents=self._exponents())
        fixed = self._rewrite(structured, lowering, plan)
        if plan is not None and options.save_plan is not None:
            plan_file.write(plan, options.save_plan)
        given = weak_typing.named(structured) if options.weak_typing else fixed
        del original, structured  # their FP32 weights are as large as all that is still to come
        if self.search_check is not None:
            done.append(self.search_check)
        if expected is not None and plan is not None:
            done.append(self._check_emulation(expected, fixed, samples, plan))
        elif expected is not None and options.wish.precision == "fp32":
            done.append(self._check_tf32(expected, fixed, samples))
        written = self._write_and_build(given, destination, samples, done, plan, expected)
        constraints = None
        if options.weak_typing and written is not None and plan is not None:
            constraints = self._write_constraints(given, plan, written)
        return FixResult(
            given,
            written,
            pipeline.render(options.steps),
            options.target,
            self.passes,
            plan,
            replace(samples.source, spans=self._spans(samples)),
            Verdict(tuple(done)) if options.verify or done else None,
            self.frontier,
            self.warnings,
            self.seconds,
            constraints,
            self.searched,
        )

    def _load(self) -> tuple[Model, Samples]:
        """The model and its samples; a default opset becomes the one that the model needs."""
        options = self.options
        with self._stage("load"):
            original = load(options.source)
            samples = self._samples(original)
            if options.free_opset:
                raised = needed_opset(original, options.opset, options.target)
                self.options = replace(options, opset=raised)
        return original, samples

    def _samples(self, original: Model) -> Samples:
        options = self.options
        options.deployment.check(original.signature)
        if options.inputs is not None:
            given = load_samples(options.inputs, original)
            options.deployment.check_data(given.source.spans)
            self.warnings.extend(data_warnings(original, given))
            return given
        shapes = {**options.deployment.usual, **options.input_shapes}
        samples = random_samples(original, seed=options.seed, input_shapes=shapes)
        options.deployment.check_data(samples.source.spans)
        if options.verify or any(
            step.needs_ranges or step.name == "mixed-precision" for step in options.steps
        ):
            self.warnings.append(samples.source.text)
        return samples

    def _expected(self, original: Model, samples: Samples) -> checks.Expected | None:
        """Outputs of the original; None if ONNX Runtime cannot run the model."""
        with self._stage("reference"):
            try:
                return checks.expected_outputs(original, list(islice(samples, VERIFIED_SAMPLES)))
            except ArithmeticRunError as error:
                self.warnings.append(f"the original does not run on ONNX Runtime: {error.what}")
                return None

    def _rewrite(
        self, model: Model, steps: Sequence[Pass], plan: Plan | None = None, ranges: Ranges | None = None
    ) -> Model:
        context = Context(
            self.options.opset, self.options.target, plan, ranges, self._kept(), budget=self._budget()
        )
        return self._driven(model, steps, context)

    def _driven(self, model: Model, steps: Sequence[Pass], context: Context) -> Model:
        total = len(self.options.steps)
        driver = Driver(lambda step: self.options.progress(f"pass {step.name}", len(self.passes), total))
        with self._stage("passes"):
            rewritten, results = driver.run(model, steps, context)
        self.passes.extend(results)
        return rewritten

    def _budget(self) -> float | None:
        """Share of latency that may be spent on accuracy: none where an error is the aim; None: not said.

        A plan that is given says what was done: its nodes must be there again.
        """
        goal, plan = self.options.goal, self.options.plan
        if plan is not None:
            return None if any(d.rule == splits.RULE for d in plan.decisions) else 0.0
        return goal.share if isinstance(goal, Budget) else None if goal is None else 0.0

    def _left(self, structured: Model, facts: Facts, plan: Plan) -> Aim | None:
        """The aim of a search, with what passes left of a budget."""
        goal = self.options.goal
        changes = (change for result in self.passes for change in result.changes)
        spent = sum(change.us for change in changes if isinstance(change, Spent))
        if not spent or not isinstance(goal, Budget):
            return goal
        prices = priced(structured, facts, self.options.target)
        left = splits.left(goal.share, prices.total_us(plan), spent)
        return replace(goal, share=left, asked=goal.share)

    def _kept(self) -> Kept:
        """What the user keeps in FP32, by the options or in the plan that excludes them."""
        wish, plan = self.options.wish, self.options.plan
        return Kept(wish.keep_nodes, wish.keep_ops) if plan is None else kept_by_user(plan)

    def _rewrite_measured(
        self, model: Model, steps: Sequence[Pass], ranges: Ranges, samples: Samples
    ) -> tuple[Model, Ranges]:
        """The model after passes that need ranges, with its ranges: known, or measured again."""
        first = len(self.passes)
        if wanted := {tensor for step in steps for tensor in step.spread_of(model, ranges)}:
            with self._stage("ranges"):
                widened = reference(model, tensor_facts.infer(model))
                ranges.binades = measure_binades(widened, samples, wanted)
        rewritten = self._rewrite(model, steps, ranges=ranges)
        made = self.passes[first:]
        if not all(isinstance(change, (Merged, Rescaled)) for result in made for change in result.changes):
            return rewritten, self._measure(rewritten, samples)
        known = ranges.rescaled(self._exponents())
        merging = {r.name for r in made if any(isinstance(change, Merged) for change in r.changes)}
        merged = merged_ranges(rewritten, known, merging) if merging else known
        return rewritten, merged if merged is not None else self._measure(rewritten, samples)

    def _followed(
        self, original: Model, structured: Model, steps: Sequence[Pass], plan: Plan | None, samples: Samples
    ) -> tuple[Plan | None, Model]:
        """The plan, searched if that was asked for, and the model as its type wants it.

        That is with constants that the type holds, and operators that sum better in it: a search judges plans
        with these. Those that follow the search, too, run once more with what it found.
        """
        first, options = len(self.passes), self.options
        followed = self._follow(structured, steps, plan, samples)
        if plan is None:
            return plan, followed
        given = operators(structured)
        plan = named_by(given, self._with_activations(followed, plan))
        if options.goal is None and not options.pareto:
            return plan, followed
        found = named_by(given, self._searched(original, followed, samples, plan))
        if found.decisions != plan.decisions and any(step.follows_search for step in steps):
            del followed, self.passes[first:]
            followed = self._follow(structured, steps, found, samples)
        return found, followed

    def _with_activations(self, followed: Model, plan: Plan) -> Plan:
        """The plan with what is free in FP32 behind ConvTransposes; one that the user gave stays as it is."""
        if self.options.plan is not None or not self.options.wish.epilogues:
            return plan
        with self._stage("plan"):
            return activations.extend_over_activations(followed, plan, self.options.target)

    def _follow(self, model: Model, steps: Sequence[Pass], plan: Plan | None, samples: Samples) -> Model:
        given = Calibration(samples, samples.source.real, self.options.seed)
        context = Context(self.options.opset, self.options.target, plan, kept=self._kept(), calibration=given)
        return self._driven(model, steps, context)

    def _exponents(self) -> tuple[tuple[int, str, int], ...]:
        """What was multiplied by a power of two so far, in the order of the changes."""
        changes = (change for result in self.passes for change in result.changes)
        return tuple(e for change in changes if isinstance(change, Rescaled) for e in change.exponents)

    def _measure(self, structured: Model, samples: Samples) -> Ranges:
        with self._stage("ranges"):
            widened = reference(structured, tensor_facts.infer(structured))
            ranges = measure(
                widened,
                samples,
                tensor_facts.infer(widened),
                progress=lambda done: self.options.progress("ranges", done, len(samples)),
            )
        ranges.real = samples.source.real
        if ranges.unsupported:
            self.warnings.append(
                f"ONNX Runtime has no kernel for {', '.join(ranges.unsupported)}: what depends on it was not "
                "measured and stays in FP32"
            )
        return ranges

    def _plan(self, structured: Model, ranges: Ranges) -> Plan:
        """The user's plan, or that of the rules on measured ranges."""
        with self._stage("plan"):
            facts = tensor_facts.infer(structured)
            if self.options.plan is not None:
                return fit(structured, facts, self.options.plan, self.options.plan_source)
            plan = make_plan(structured, facts, ranges, self.options.wish)
        self.warnings.extend((*_unmatched(self.options.wish, plan), *_declined(self.options.wish)))
        return plan

    def _searched(self, original: Model, structured: Model, samples: Samples, plan: Plan) -> Plan:
        """The plan that reaches the aim; one out of reach is a failed check, and told."""
        options = self.options
        with self._stage("search"):
            facts = tensor_facts.infer(structured)
            order = Order(
                self._left(structured, facts, plan),
                options.metric,
                options.pareto,
                options.search_engine,
                options.search_seconds,
                options.build_timeout,
                options.accumulation,
                options.target,
                options.deployment,
            )
            subject = Subject(original, structured, facts, samples, plan)
            found = answer(subject, order, options.progress)
        self.search_check, self.frontier, self.searched = found.check, found.frontier, found.searched
        self.warnings.extend(found.warnings)
        return found.plan

    def _check_structure(
        self, expected: checks.Expected | None, structured: Model, samples: Samples
    ) -> list[Check]:
        if expected is None:
            return [Check("structure", None, "not checked: ONNX Runtime cannot run the original")]
        with self._stage("verify"):
            compared = islice(samples, VERIFIED_SAMPLES)
            return [checks.check_structure(expected, structured, self._changed(), compared)]

    def _check_emulation(
        self, expected: checks.Expected, fixed: Model, samples: Samples, plan: Plan
    ) -> Check:
        accumulation, compared = self.options.accumulation, list(islice(samples, VERIFIED_SAMPLES))
        with self._stage("verify"):
            check = checks.check_emulation(expected, fixed, plan.precision, compared, accumulation)
        structural, measuring, *_ = _split(self.options.steps)
        by_ranges = any(step.needs_ranges for step in self._changed())
        if check.passed is not False or by_ranges:  # what ranges changed cannot be made again without them
            return check
        again = (*structural, *(step for step in measuring if not step.needs_ranges))
        with self._stage("explain"):
            return checks.explained(check, self._structured_again(again), fixed, compared, accumulation)

    def _check_tf32(self, expected: checks.Expected, fixed: Model, samples: Samples) -> Check:
        """TensorRT's FP32 engines use TF32: what that does is told before one is built."""
        with self._stage("verify"):
            return checks.check_tf32(expected, fixed, list(islice(samples, VERIFIED_SAMPLES)))

    def _structured_again(self, structural: Sequence[Pass]) -> Model:
        """What the precision passes saw; made anew, for its weights were given back."""
        context = Context(self.options.opset, self.options.target, kept=self._kept(), budget=self._budget())
        return Driver(lambda step: None).run(load(self.options.source), structural, context)[0]

    def _changed(self) -> list[Pass]:
        """The passes before the plan that changed something."""
        structural, measuring, *_ = _split(self.options.steps)
        return [s for s, r in zip((*structural, *measuring), self.passes, strict=False) if r.changes]

    def _write_and_build(
        self,
        fixed: Model,
        destination: Path | None,
        samples: Samples,
        done: list[Check],
        plan: Plan | None,
        expected: checks.Expected | None,
    ) -> Path | None:
        """Build the file as written; with `strict` it comes to its place only after all checks."""
        options = self.options
        written = None
        if destination is not None and not options.strict:
            written = self._save(fixed, destination)
        if options.verify and options.build:
            with tempfile.TemporaryDirectory(prefix="rewriter-") as folder:
                path = written or self._save(fixed, Path(folder) / "model.onnx")
                with _told_if_interrupted(written):
                    done.extend(self._build_and_run(fixed, path, Path(folder), samples, plan, expected))
        if written is not None or destination is None:
            return written
        if options.verify and not Verdict(tuple(done)).passed:
            self.warnings.append(f"--strict: {destination} was not written")
            return None
        return self._save(fixed, destination)

    def _build_and_run(
        self,
        fixed: Model,
        path: Path,
        folder: Path,
        samples: Samples,
        plan: Plan | None,
        expected: checks.Expected | None,
    ) -> Iterator[Check]:
        """Build once; where there is a GPU, run what was built, too."""
        options = self.options
        with self._stage("build"):
            choice = options.deployment.choose()
            engine = folder / "model.engine" if choice.engine else None
            sample, spans = next(iter(samples), {}), self._spans(samples)
            yield checks.check_engine(
                fixed,
                path,
                sample,
                spans,
                options.build_timeout,
                plan.norms_in_range if plan is not None else frozenset(),
                plugins=options.deployment.plugins,
                engine=engine,
                library=choice.engine and choice.engine.replace("-", "_"),
            )
        if choice.engine is None and host.gpu() is None:
            self.warnings.append(
                f"NOT run on a GPU ({'; '.join(choice.reasons)}): the figures are emulated, and what was "
                "built was not loaded; `rewriter verify` on a machine with a GPU runs it"
            )
        elif choice.engine is None:
            yield Check("run", None, f"not run on {host.gpu()}: {'; '.join(choice.reasons)}")
        if choice.engine and engine and engine.exists() and expected is not None:
            plugins, timeout = options.deployment.plugins, options.build_timeout
            settings = Settings(choice.engine, plugins=plugins, run_timeout_s=timeout)
            compared = list(islice(samples, VERIFIED_SAMPLES))
            with self._stage("run"):
                yield run_built(fixed, path, engine, settings, compared, expected.exact)

    def _spans(self, samples: Samples) -> dict[str, Span]:
        """The optimisation profile: the user's, else what the data says."""
        return {**samples.source.spans, **self.options.deployment.profile}

    def _write_constraints(self, model: Model, plan: Plan, path: Path) -> Path:
        files = weak_typing.write(model, tensor_facts.infer(model), plan, path)
        self.warnings.append(
            f"weak typing: {path} is FP32; build it with trtexec and the arguments in {files.trtexec}, or "
            f"with the code in {files.python}, which finds all layers of a node that becomes several"
        )
        return files.trtexec

    def _save(self, model: Model, path: Path) -> Path:
        with self._stage("save"):
            return save(model, path)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.options.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def _told_if_interrupted(written: Path | None) -> Iterator[None]:
    """Ctrl-C in a long build leaves the file, which has passed what came before, and says what it lacks."""
    try:
        yield
    except KeyboardInterrupt:
        if written is None:
            raise
        raise KeyboardInterrupt(f"{written} is written, but not verified to the end") from None


def _declined(wish: Wish) -> Iterator[str]:
    """What the user asked for and the target was measured not to do."""
    if wish.epilogues and wish.precision == "fp16":
        yield from (*epilogues.refusals(wish.target), *activations.refusals(wish.target))


def _unmatched(wish: Wish, plan: Plan) -> Iterator[str]:
    """A name that keeps nothing is a typing error, or a node that is not there any more."""
    told = {d.reason for d in plan.decisions if d.rule == "user"}
    for option, names in (("--keep-fp32", wish.keep_nodes), ("--keep-fp32-op", wish.keep_ops)):
        for name in names:
            if not any(reason.endswith(f"{option} {name}") for reason in told):
                yield f"{option} {name} names no node that computes on floats"


def _split(steps: Sequence[Pass]) -> tuple[tuple[Pass, ...], ...]:
    """The passes up to the first that needs ranges, to the first behind the plan, to the plan's; the rest."""
    end = next((i for i, step in enumerate(steps) if step.name == "mixed-precision"), len(steps))
    middle = next((i for i, step in enumerate(steps[:end]) if step.follows_plan), end)
    start = next((i for i, step in enumerate(steps[:middle]) if step.needs_ranges), middle)
    return tuple(steps[:start]), tuple(steps[start:middle]), tuple(steps[middle:end]), tuple(steps[end:])


def _destination(options: Options) -> Path | None:
    if options.output is None or options.dry_run:
        return None
    path = Path(options.output)
    if not path.parent.is_dir():
        raise UsageError("its folder does not exist", where=str(path), hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise UsageError("the output is a folder", where=str(path), hint="name a file in it")
    source = options.source
    named = isinstance(source, (str, os.PathLike)) and path.exists() and Path(source).exists()
    if named and not options.in_place and path.samefile(source):
        raise UsageError(
            "the output is the input",
            where=str(path),
            hint="write elsewhere, or say --in-place to replace the model",
        )
    return path
