"""Judges every attempt of a run by one measure: the same samples, expected outputs and excuses."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path

from rewriter.base.errors import ArithmeticRunError, EngineError
from rewriter.base.stopwatch import Stopwatch, interrupt_handled
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.hazards.resolution import float64_differences
from rewriter.ir.graph import display_name, draws_noise
from rewriter.ir.model import Array, Model, load, save, walk_nodes
from rewriter.ir.plan import Plan
from rewriter.passes.base import Pass
from rewriter.runtime.emulation import Accumulation, import_float64, reference
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.build import BuildOptions
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import began_on_cuda, on_cuda
from rewriter.runtime.engines.protocol import EngineOutcome, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import Span, values_of, write_samples
from rewriter.runtime.inputs.sizes import at_shapes
from rewriter.runtime.metrics.tolerances import TOLERANCES, precision_of
from rewriter.runtime.ranges import measure as measure_ranges
from rewriter.target import Target
from rewriter.verification import arithmetic_checks as arithmetic
from rewriter.verification import build_check as building
from rewriter.verification.arithmetic_checks import Rounds
from rewriter.verification.compare_runs import RunComparison, Standard, compare_outputs, run_check
from rewriter.verification.expected import Expected, Outputs, as_declared, expected_outputs, run_all
from rewriter.verification.profile_check import Shapes, ends, profile_check
from rewriter.verification.verdict import ORIGINAL, PROFILE, Check, remark

DEFECT = 10.0
"""Times its emulated error from which an FP32 engine is wrong and excuses nothing: an encoder of three LSTMs
had an error of 0.2 in FP32 and of 0.003 in FP16; sound engines have up to 2.2 times the emulated error."""


@dataclass
class Verifier:
    """Judges results, and measures each part that they share once, when a check needs it.

    The original is loaded again for that: between, its weights need no memory.

    Attributes:
        original: The model as the user gave it.
        samples: The samples that checks compare; `expected`: the outputs of the original for them, None if it
            cannot run, or nothing is verified. `indices`: theirs among all samples.
        standards: By precision: how close results have to be.
        deployment: Engine and plugins. `spans`: the optimisation profile, shapes of the samples included.
        timeout_s: Deadline of a build, and of a run.
        folder: For engines; what is in it lives as long as the run.
        against: The model that the original was made from: `expected.exact` has its outputs.
        asked: True if the tolerance is the user's own: nothing excuses an error beyond it but conditioning.
        verify, build: The options. `real`: True if the samples are the user's data.
        target: The TensorRT that results are for; `plugin_types`: the operators of the user's plugins.
        emulation_s: Processor seconds that the emulation of a result may need.
        interrupted: True after Ctrl-C in the first build: its model is the result, not completely verified.
    """

    original: Model
    samples: Sequence[Mapping[str, Array]]
    expected: Expected | None
    standards: Mapping[str, Standard]
    deployment: Deployment
    spans: Mapping[str, Span]
    timeout_s: float
    folder: Path
    stage: Stopwatch
    indices: Sequence[int] = ()
    asked: bool = False
    against: Model | None = None
    verify: bool = True
    build: bool = True
    real: bool = False
    emulation_s: float = 0.0
    target: Target = field(default_factory=Target)
    plugin_types: Sequence[str] = ()
    interrupted: bool = field(default=False, init=False)
    _built: int = field(default=0, init=False)

    @cached_property
    def settings(self) -> MeasureSettings | None:
        """Settings of engines; None if none runs here, none is to be built, or nothing can be compared."""
        engine = self.deployment.choose().engine
        if engine is None or not (self.verify and self.build) or self.expected is None:
            return None
        kernels, plugins = self.folder / "kernels", self.deployment.plugins
        return MeasureSettings(engine, plugins=plugins, kernels=kernels, timeout_s=self.timeout_s)

    def structure(
        self, structured: Model, changed: Sequence[Pass], outputs: Mapping[int, Outputs]
    ) -> Iterator[Check]:
        """Compares the model in FP32, after passes that changed it, with the original.

        Args:
            outputs: Of the model, by place of the sample; it runs again if there are none.
        """
        if not self.verify:
            return
        if self.expected is None:
            yield Check("structure", None, remark("no-reference"))
            return
        with self.stage("comparing the rewritten model"):
            chosen = [outputs[index] for index in self.indices] if outputs else None
            check = arithmetic.check_structure(self.expected, structured, changed, self.samples, chosen)
            if check.passed is False and began_on_cuda():
                with on_cuda(False):
                    expected = expected_outputs(self.original, self.samples, self.against)
                    check = arithmetic.check_structure(expected, structured, changed, self.samples)
            yield arithmetic.excused(check, lambda: self.conditioning)

    def emulated(self, fixed: Model, precision: str, sums: Accumulation) -> Check:
        """Emulates the planned types; TF32 for a model in FP32. What misses is tried without TF32, too."""
        assert self.expected is not None
        with self.stage("comparing outputs", self.emulation_s):
            held = self.standards[precision]
            emulate = partial(
                arithmetic.check_emulation,
                self.expected,
                fixed,
                precision,
                self.samples,
                sums,
                held,
                float64=self.lost_float64,
            )
            check = self.excused(emulate(), fixed, lambda: self.emulated_fp32)
            if not arithmetic.fp32_products(fixed) or arithmetic.beyond_tf32(
                check, lambda: self.emulated_fp32
            ):
                return check
            return arithmetic.without_tf32(check, lambda: self.beside_original(emulate(tf32=False)))

    def excused(self, check: Check, fixed: Model | None = None, rounds: Callable[[], Rounds] = list) -> Check:
        """Judges a check again by the error of the original: by rounding in another place, and its engine's.

        With `against`, by its error against that model: in FP32, and with TF32 in its engine.

        Args:
            rounds: The outputs of the original's own FP32 engine.
        """
        if self.against is not None:
            check = self.beside_original(check)
            if check.passed is not False or self.asked or fixed is None:
                return check
            check = arithmetic.as_original(check, RunComparison(tuple(map(tuple, rounds()))))
            return replace(check, excuse="as-fp32") if check.passed else check
        check = arithmetic.excused(
            check, lambda: self.conditioning, quantised=bool(arithmetic.quantisers(self.original))
        )
        if fixed is None:
            return check
        chance = arithmetic.errs_by_chance(fixed)
        return arithmetic.as_fp32(check, rounds, by_chance=chance, parts_alone=self.asked)

    def beside_original(self, check: Check) -> Check:
        """The check, where outputs may be as far from `against` as the original's; the same without one."""
        return check if self.against is None else arithmetic.as_original(check, self.own, asked=self.asked)

    def at_last(self, check: Check, fixed: Model, precision: str) -> Check:
        """The check of the result itself: one whose error TF32 explains is no failure, and no proof."""
        if check.name != "run":
            return arithmetic.limited_by_tf32(check, lambda: self.emulated_fp32, asked=self.asked)
        if self.settings is not None and this_machine.ENGINES[self.settings.engine].on_gpu:
            exact = partial(self._without_tf32, fixed, precision)
            check = arithmetic.without_tf32(check, exact) if arithmetic.fp32_products(fixed) else check
        return arithmetic.limited_by_tf32(check, lambda: self.fp32_engine, asked=self.asked)

    def _without_tf32(self, fixed: Model, precision: str) -> Check:
        """Builds and runs a model whose FP32 products are exact."""
        assert self.settings is not None and self.expected is not None
        folder = self.folder / "exact"
        with self.stage("running the engine"):
            path = save(fixed, self.folder / "exact.onnx", map_back=True)
            variant = self.variant(fixed, path, folder / "samples", tf32=False)
            outcomes = measure([variant], replace(self.settings, timing=None, builds=1), folder)
            standard, parts = self.standards[precision], self.expected.parts
            return self.beside_original(run_check(self.expected.exact, outcomes, standard, parts=parts)[0])

    def built(self, fixed: Model, plan: Plan | None) -> tuple[list[Check], Path | None]:
        """Builds a model, and runs it where an engine runs here.

        Returns:
            The checks, and what is loaded, beside the ONNX file that it was built from; None if nothing is.
        """
        if not self.verify or self.interrupted:
            return [], None
        if not self.build:
            check = self.operators(fixed, plan)
            return [check] if check else [], None
        self._built += 1
        try:
            return self._built_and_run(fixed, plan)
        except KeyboardInterrupt:
            if self._built > 1:
                raise
            interrupt_handled()
            self.interrupted = True
            return [], None

    def _built_and_run(self, fixed: Model, plan: Plan | None) -> tuple[list[Check], Path | None]:
        folder, choice, checks = self.folder / f"{self._built:03d}", self.deployment.choose(), list[Check]()
        folder.mkdir()
        with self.stage("building an engine"):  # many attempts are kept: their weights need no memory
            engine = path = save(fixed, folder / "model.onnx", map_back=True)
        if choice.engine is None or this_machine.ENGINES[choice.engine].builds:
            engine = folder / "model.engine"
            checks.append(self.build_check(fixed, path, engine if choice.engine else None, plan))
        if not engine.exists():
            return checks, None
        if self.settings is not None:
            precision = precision_of(fixed) if plan is None else plan.precision
            with self.stage("running the engine"):
                start, variant = time.perf_counter(), self.variant(fixed, path, folder / "samples", engine)
                (outcome,) = measure([variant], self.settings, folder)
                check, _ = self.run_check([outcome], fixed, precision, start)
            checks.append(replace(check, latency=outcome.latency))
        elif choice.engine is None and this_machine.gpu() is not None:
            reasons = "; ".join(choice.reasons)
            checks.append(Check("run", None, remark("not-run", where=this_machine.gpu(), reason=reasons)))
        return checks, engine

    def at_profile(
        self, fixed: Model, precision: str, run: Check, spans: Mapping[str, Span], engine: Path | None
    ) -> Check | None:
        """Compares the engine with the original at the shapes of a profile that no sample has.

        Args:
            run: The check at the samples' shapes.
            spans: The profile, by input with dynamic axes.
            engine: Built with this profile; None: it is built.

        Returns:
            None if no engine runs here, or the original takes none of the shapes.
        """
        if self.settings is None or not run.passed or not self.samples:
            return None
        start, shapes = time.perf_counter(), list[Shapes]()
        exact, feeds = list[Outputs](), list[Outputs]()
        with self.stage("running the engine"):
            for each in ends(spans, self.samples):
                fed = at_shapes(self.samples, each)
                with suppress(ArithmeticRunError):
                    exact += run_all(reference(self.against or self.original), [fed])
                    shapes.append(each)
                    feeds.append(as_declared(fixed, fed))
            if not shapes:
                return None
            folder = self.folder / "profile"
            stored = write_samples(folder / "samples", feeds)
            path = save(fixed, folder / "model.onnx", map_back=True)
            variant = Variant("profile", path, stored, True, {**self.spans, **spans}, engine=engine)
            try:
                (outcome,) = measure([variant], replace(self.settings, timing=None, builds=1), folder)
            except EngineError as error:
                return Check(PROFILE, None, remark("profile-not-run", reason=error.what))
            parts = self.expected.parts if self.expected is not None else {}
            seconds = time.perf_counter() - start
            return profile_check(shapes, exact, outcome, self.standards[precision], run, parts, seconds)

    def operators(self, fixed: Model, plan: Plan | None = None) -> Check | None:
        """The failed check of what the target refuses by the table of operators; None if it takes all."""
        return building.check_operators(self.expectation(fixed, plan))

    def not_run(self) -> Iterator[str]:
        """Yields a warning if results are built, but no GPU runs them."""
        choice = self.deployment.choose()
        if self.verify and self.build and choice.engine is None and this_machine.gpu() is None:
            yield (
                f"NOT run on a GPU ({'; '.join(choice.reasons)}): the figures are emulated, and what was "
                "built was not loaded; `rewriter verify` on a machine with a GPU runs it"
            )

    @cached_property
    def original_build(self) -> Check:
        """The build of the original, which shows whether a failed build is our fault."""
        original = self.original
        if not self.build:
            passed = Check(ORIGINAL, True, remark("taken"))
            return replace(self.operators(original) or passed, name=ORIGINAL)
        path = self.file(original, "original", original)
        with self.stage("building an engine"):
            any_network = replace(self.expectation(original), layer_normalizations=0, tensor_types={})
            check = building.check_build(path, any_network, self._build_options(), self.timeout_s)
            switch = building.switch(original) if check.passed is False else None
            return replace(check, name=ORIGINAL, switch=switch)

    @cached_property
    def own(self) -> RunComparison:
        """The original's outputs in FP32, compared with the outputs of `against`."""
        assert self.expected is not None
        exact, parts = self.expected.exact, self.expected.parts
        return compare_outputs(exact, self.expected.of_model, _tf32(self.original), parts=parts)

    @cached_property
    def conditioning(self) -> Mapping[str, float]:
        """Error of each output when the original's sums run in another order; needed where a check fails."""
        if self.expected is None:
            return {}
        return arithmetic.conditioning(self.original, self.samples, self.expected)

    @cached_property
    def fp32_engine(self) -> Rounds:
        """The original's own FP32 engine, with TF32 as the library has it; () if a defect makes it wrong."""
        if self.settings is None or self.expected is None:
            return ()
        original = self.original
        model, folder = reference(original), self.folder / "fp32"
        variant = self.variant(model, self.file(model, "fp32", original), folder / "samples")
        try:
            (outcome,) = measure([variant], replace(self.settings, timing=None), folder)
        except EngineError:
            return ()
        if not outcome.ran:
            return ()
        actual = (outcome.values(number) for number in range(len(outcome.outputs)))
        held, parts = _tf32(original), self.expected.parts
        rounds = compare_outputs(self.expected.exact, actual, held, parts=parts).rounds
        return rounds if _worst(rounds) <= DEFECT * _worst(self.emulated_fp32) else ()

    def outputs_of(self, places: Iterable[int]) -> list[Outputs]:
        """The original's outputs and final states for samples that judge, numbered among all samples."""
        if self.expected is None:
            return []
        found, states = self.expected.of_model, self.expected.states or ({},) * len(self.samples)
        return [{**found[at], **states[at]} for at in map(self.indices.index, places)]

    @cached_property
    def emulated_fp32(self) -> Rounds:
        """The original in FP32 with TF32, emulated; what float64 loses as float32 excuses nothing."""
        if self.expected is None:
            return ()
        original = self.original
        wide, expected, held = import_float64(original), self.expected, _tf32(original)
        if wide is not original:
            expected = expected_outputs(wide, self.samples, self.against)
        return arithmetic.check_emulation(
            expected, reference(wide), "fp32", self.samples, "fp32", held
        ).rounds

    @cached_property
    def lost_float64(self) -> str:
        """Where float32 is not accurate enough to replace float64 for an output; "" if it is."""
        original = self.original
        single = import_float64(original)
        if self.expected is None or single is original:
            return ""
        try:
            outputs = run_all(reference(single), self.samples)
        except ArithmeticRunError:
            return ""
        judged = compare_outputs(self.expected.of_model, outputs, _tf32(original), parts=self.expected.parts)
        if all(output.passed for output in judged.comparisons):
            return ""
        seen = analyses(original, measure_ranges(reference(original), self.samples), PrecisionRequest())
        reasons = [hazard.reason for analysis in seen for hazard in float64_differences(analysis)]
        return reasons[0] if reasons else "float64 arithmetic"

    def error_in_fp32(self, check: Check) -> float:
        """The largest FP32 error of an output on the samples that it fails on, and the least of such outputs.

        No plan has to be closer. It is measured on the original's engine where one runs, else emulated.
        """
        errors = dict[str, float]()
        for outputs, own in zip(
            check.rounds, cycle(self.fp32_engine or self.emulated_fp32 or [()]), strict=False
        ):
            own_errors = {o.name: o.relative_l2 for o in own if o.finite}
            for name in (o.name for o in outputs if not o.passed):
                errors[name] = max(errors.get(name, 0.0), own_errors.get(name, 0.0))
        return min(errors.values(), default=0.0)

    def timed_in_turn(self, engines: Sequence[Path]) -> list[float | None]:
        """Median latencies in microseconds of engines that are timed in turn in one process.

        The GPU's clock rises and falls over a run: latencies of two processes differ by more than two plans.
        None for an engine that does not run, or if no engine runs here.
        """
        if self.settings is None or not engines:
            return [None] * len(engines)
        with tempfile.TemporaryDirectory(prefix="timed-", dir=self.folder) as name:
            variants = [
                self.variant(load(path), path, Path(name, str(index)), engine)
                for index, engine in enumerate(engines)
                for path in (engine.with_suffix(".onnx"),)
            ]
            try:
                outcomes = measure(variants, self.settings, Path(name))
            except EngineError:
                return [None] * len(engines)
            return [o.latency.median_us if o.latency is not None else None for o in outcomes]

    def _build_options(self, engine: Path | None = None) -> BuildOptions:
        deployment, sample = self.deployment, next(iter(self.samples), {})
        chosen = deployment.choose().engine
        return BuildOptions(
            shapes={name: (array.shape,) * 3 for name, array in sample.items()} | dict(self.spans),
            values=values_of([sample]),
            library=chosen and chosen.replace("-", "_"),
            engine=engine,
            plugins=deployment.plugins,
            gpus=self.target.gpus,
            timing_cache=True,
        )

    def build_check(self, fixed: Model, path: Path, engine: Path | None, plan: Plan | None) -> Check:
        """Builds the file of a model; the engine is kept in `engine`, if that is given."""
        with self.stage("building an engine"):
            expected = self.expectation(fixed, plan)
            return building.check_build(path, expected, self._build_options(engine), self.timeout_s)

    def expectation(self, fixed: Model, plan: Plan | None = None) -> building.BuildExpectation:
        """The network that a model must have."""
        in_range = plan.norms_in_range if plan is not None else frozenset[str]()
        plugins = None if self.deployment.plugins else self.plugin_types
        return building.expectation(fixed, in_range, this_machine.parser_here(self.target), plugins)

    def run_check(
        self, outcomes: Sequence[EngineOutcome], fixed: Model, precision: str, start: float
    ) -> tuple[Check, RunComparison]:
        """The check of builds that ran, and their figures.

        Args:
            start: Of their builds or runs, by `time.perf_counter`.
        """
        assert self.expected is not None
        standard, seconds = self.standards[precision], time.perf_counter() - start
        check, judged = run_check(self.expected.exact, outcomes, standard, seconds, self.expected.parts)
        engine, noise = self.deployment.choose().engine, noise_reason(self.original)
        if noise and engine and this_machine.ENGINES[engine].builds and all(o.ran for o in outcomes):
            return Check("run", None, remark("not-compared", reason=noise), device=check.device), judged
        return self.excused(check, fixed, lambda: self.fp32_engine), judged

    def variant(
        self, model: Model, path: Path, folder: Path, engine: Path | None = None, *, tf32: bool = True
    ) -> Variant:
        """A model as a file, with the samples, which are written to `folder`."""
        stored = write_samples(folder, (as_declared(model, sample) for sample in self.samples))
        return Variant(folder.name, path, stored, tf32, self.spans, engine=engine)

    def file(self, model: Model, name: str, loaded: Model) -> Path:
        """The file of `loaded` if that is the model itself; else a new one."""
        if model is loaded and loaded.path is not None:
            return loaded.path
        with self.stage("building an engine"):
            return save(model, self.folder / f"{name}.onnx")


LISTED = 3
"""Nodes that a message names."""


def noise_reason(model: Model) -> str:
    """Why an engine's results are not compared: it draws noise of its own; "" for a model without noise."""
    nodes = [n for n in walk_nodes(model.proto.graph) if draws_noise(n)]
    names = ", ".join(f"{display_name(node)} ({node.op_type})" for node in nodes[:LISTED])
    return f"an engine draws other numbers in {names}" if names else ""


def _worst(rounds: Rounds) -> float:
    return max((o.relative_l2 for outputs in rounds for o in outputs if not o.of), default=0.0)


def _tf32(original: Model) -> Standard:
    return Standard.of(original, TOLERANCES["tf32"])


def engine_first(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks, where a real engine that passes overrules an emulation of it that failed."""
    if not any(check.name == "run" and check.passed for check in checks):
        return tuple(checks)
    return tuple(
        replace(check, passed=None, remarks=check.remarks + remark("engine-decides"))
        if check.name in ("emulation", "tf32") and check.passed is False
        else check
        for check in checks
    )
