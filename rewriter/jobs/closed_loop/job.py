"""Runs a recorded script with the fixed files in place, compares the runs, and repairs what goes wrong."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from rewriter.base.errors import EngineError, NativeError, RewriterError
from rewriter.base.stopwatch import Progress, silent
from rewriter.hazards.accumulation import SLOW_STEP, slow_state
from rewriter.ir.model import Array, Model, load, save
from rewriter.ir.model.output_files import work_folder
from rewriter.jobs.closed_loop.result import LoopEnding, LoopResult, RefusedBecause, Repair, Step, Stream
from rewriter.jobs.closed_loop.traces import Port, Trace, compared
from rewriter.jobs.fix.api import fix
from rewriter.jobs.fix.before import lowered
from rewriter.jobs.fix.provenance import noted_sums, sums_of
from rewriter.pipeline.options import FixOptions, combined
from rewriter.runtime.emulation import Accumulation, emulation
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.measure import EngineCalls
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import write_tensors
from rewriter.runtime.metrics.pairwise_error import is_float
from rewriter.runtime.metrics.tolerances import TOLERANCES, precision_of
from rewriter.runtime.recording.interception import Feeds
from rewriter.runtime.recording.record import RecordedFile, Recording
from rewriter.runtime.recording.served import STOPPED, StopScript, serve

OVER_TF32 = 2.0
"""Error that is allowed in the loop, in units of the error of FP32 with TF32 products there: FP16 rounds
operands to the same 11 bits, and results as well."""

SAME_RUN = 1e-5
"""Largest relative error between two runs of the original: threads may sum in another order."""

REPAIRED_STEP = 4.0 * SLOW_STEP
"""Median step of a state below which a repair keeps it in FP32: suspects beyond the rule's own limit.
States of GRUs and LSTMs and rolling caches move by 84 to 1,346."""

MARGIN = 0.5
"""The goal of a search, in units of the error that would do: errors in a loop are not proportional."""

STEPS: tuple[Step, ...] = ("states", "search", "fp32")

Repairing = Callable[[RecordedFile, Step, float], bool]
"""Fixes a file again in the way of a step; gets the share of the error that may stay. False: no such way."""

Engines = Callable[[RecordedFile, Path], Callable[[Feeds], Mapping[str, Array]]] | None
Fixing = Callable[[str, str, Path, FixOptions], object]
"""Fixes a file by its name; gets the model, the path of the result, and the options."""


Answer = Callable[[Sequence[str], Feeds], list[Array]]
Answers = Mapping[str, Answer]


def answering(original: Model, model: Model, run: Callable[[Feeds], Mapping[str, Array]]) -> Answer:
    """A model that answers calls of `original`, in its types; `run` takes and gives the types of `model`."""
    inputs, outputs = (
        {port.name: tensor_dtype_to_np_dtype(port.dtype) for port in ports}
        for ports in (model.signature.inputs, original.signature.outputs)
    )

    def typed(value: Any, dtype: Any) -> Array:
        array = np.asarray(value)
        return array.astype(dtype, copy=False) if is_float(array) else array

    def answer(names: Sequence[str], feeds: Feeds) -> list[Array]:
        values = run({name: typed(feeds[name], dtype) for name, dtype in inputs.items() if name in feeds})
        return [typed(values[name], outputs[name]) for name in names]

    return answer


@dataclass
class _Loop:
    """The runs of one script."""

    recording: Recording
    deadline: float  # by `time.monotonic`
    progress: Progress
    states: frozenset[Port] = frozenset()  # outputs that a model reads again
    original: Trace = field(default_factory=Trace)  # one run of the original
    again: Trace | None = None  # another one
    stopped: bool = False  # the deadline ended one of the runs
    most: float = math.inf  # calls of each run: as recorded, or as the stopped original has

    def trace(self, answering: Answers, doing: str, runs: int) -> tuple[Trace, int]:
        """One run, of `runs` in the time left, with its exit code; other files compute as they are."""
        trace, names = Trace(), {file.sha256: file.name for file in self.recording.files}
        now, total = time.monotonic(), len(self.original.calls)
        end = now + (self.deadline - now) / runs
        self.progress(doing, 0, total)

        def answer(file: str, outputs: Sequence[str], feeds: Feeds, own: Any) -> Any:
            if time.monotonic() > end or len(trace.calls) >= self.most:
                raise StopScript
            results = own if own is not None else answering[file](outputs, feeds)
            trace.add(file, outputs, feeds, results)
            self.progress(doing, len(trace.calls), max(total, len(trace.calls)))
            return results if own is None else None

        run = serve(self.recording.command, names, sorted(answering), answer, max(end - now, 0.0))
        trace.printed = run.printed
        ended = run.exit_code < 0 and time.monotonic() > end
        return trace, STOPPED if ended else run.exit_code

    def stream(self, answering: Answers, doing: str, runs: int = 2) -> Stream | None:
        """One run, compared with the original; None if there was no time for its first call."""
        return self._compared(*self.trace(answering, doing, runs), self.states) if self.has_time else None

    def _compared(self, trace: Trace, code: int, states: frozenset[Port]) -> Stream | None:
        if code != STOPPED:
            return compared(self.original, self.again or trace, trace, states)
        self.stopped = True
        calls = self.original.calls[: len(trace.calls)]
        return compared(Trace(calls), None, Trace(trace.calls), states) if calls else None

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline

    def refusal(self) -> tuple[RefusedBecause, str]:
        """Runs the original twice; the reason why a comparison with it would say nothing, and its detail."""
        if not self.recording.command:
            return "no-command", ""
        self.original, code = self.trace({}, "running the script", 5)
        if code == STOPPED:
            self.most, self.stopped = len(self.original.calls), True
        elif code not in (0, self.recording.exit_code):  # 0, if the recording ended it early
            return "failed-again", str(code)
        if not self.original.calls:
            return ("no-time" if code == STOPPED else "other-calls"), ""
        trace, code = self.trace({}, "running the script again", 4)
        stream = self._compared(trace, code, frozenset())
        if stream is None:
            return "no-time", ""
        if stream.other is not None or stream.error > SAME_RUN:
            first = next((n for n, error in enumerate(stream.errors) if error > SAME_RUN), stream.calls)
            return "random", str(first + 1)
        self.again = trace if code != STOPPED else None
        return "", ""


class _Answers:
    """Makes what answers the calls of a file: emulations, or engines. Each is loaded once.

    `stack` closes them, and `folder` takes lowered files. `sums`: of the FP16 sums of files that note none.
    """

    def __init__(
        self,
        files: Sequence[RecordedFile],
        stack: ExitStack,
        folder: Path,
        engines: Engines,
        sums: Accumulation,
    ) -> None:
        self._files = {file.name: file for file in files}
        self.originals = {file.name: load(file.model) for file in files}
        self._stack, self._folder, self._engines = stack, folder, engines
        self._sums: Accumulation = sums

    def of(self, name: str, model: Model) -> Answer:
        """A model in place of the original of this name."""
        if self._engines is not None and model.path is not None:
            run = self._engines(self._files[name], model.path)
        else:
            emulated = emulation(model, noted_sums(model) or self._sums, tf32=True)
            run = self._stack.enter_context(Session(emulated)).run
        return answering(self.originals[name], model, run)

    def plain(self, name: str) -> Answer:
        """Every node in FP16 that can be, without a plan."""
        low = lowered(self.originals[name], "fp16")
        if self._engines is not None:
            low.path = self._folder / f"{len(list(self._folder.iterdir()))}.onnx"
            save(low, low.path)
        return self.of(name, low)


def closed_loop(
    recording: Recording,
    fixed: Mapping[str, Path],  # by the name of the model; one that is missing computes as it is
    limit_s: float,  # for all runs; one that it ends is compared up to there
    repair: Repairing | None = None,  # fixes a file again, in place, in the way of a step
    *,
    engines: Engines = None,  # loads a file as an engine; None emulates
    progress: Progress = silent,
) -> LoopResult:
    """Runs the script of a recording with the fixed files and with TF32, and compares.

    Raises:
        RewriterError: a file cannot be read, emulated or built.
    """
    start = time.monotonic()
    loop = _Loop(recording, start + limit_s, progress, most=len(recording.calls) or math.inf)
    loop.states = frozenset((link.producer, link.output) for link in recording.links)
    refusal, detail = loop.refusal()
    result = LoopResult("refused", refusal, detail, len(loop.original.calls))
    if not refusal:
        with work_folder() as folder, ExitStack() as stack:
            first = next(iter(fixed.values()), None)
            sums: Accumulation = "fp32" if first is None else sums_of(load(first))
            answers = _Answers(recording.files, stack, folder, engines, sums)
            result = _compared(loop, answers, fixed, repair)
    return replace(result, stopped=loop.stopped, seconds=time.monotonic() - start)


def _compared(
    loop: _Loop, answers: _Answers, fixed: Mapping[str, Path], repair: Repairing | None
) -> LoopResult:
    plain = None
    with suppress(RewriterError):  # a figure for comparison only
        plain = loop.stream({name: answers.plain(name) for name in fixed}, "running plain FP16", 3)
    tf32 = loop.stream(
        {name: answers.of(name, answers.originals[name]) for name in fixed}, "running FP32 with TF32"
    )
    current = {name: answers.of(name, load(path)) for name, path in fixed.items()}
    stream = loop.stream(current, "running the fixed files", 1)  # last: the script may write files
    calls = len(loop.original.calls)
    if stream is None or tf32 is None:
        return LoopResult("refused", "no-time", calls=calls)
    low = {precision_of(load(path)) for path in fixed.values()}
    tolerance = TOLERANCES["bf16" if "bf16" in low else "fp16"].value
    limit = max(OVER_TF32 * tf32.error, tolerance)
    result = LoopResult(
        _ending(stream, limit), calls=calls, limit=limit, plain=plain, fixed=stream, tf32=tf32
    )
    if result.passed is False:
        result = _blamed(loop, result, current)
    waiting = {file.name: file for file in loop.recording.files if file.name in fixed}
    while repair is not None and result.passed is False and result.culprit in waiting and loop.has_time:
        file = waiting.pop(result.culprit)
        for step in STEPS:
            if result.passed or not loop.has_time or not repair(file, step, limit / result.error):
                continue
            current[file.name] = answers.of(file.name, load(fixed[file.name]))
            if (stream := loop.stream(current, "running the repaired file")) is not None:
                ending = _ending(stream, limit)
                repairs = (*result.repairs, Repair(file.name, step, stream.error, ending != "failed"))
                result = replace(result, ending=ending, fixed=stream, repairs=repairs)
        if result.passed is False and waiting:
            result = _blamed(loop, result, {name: current[name] for name in waiting})
    return result


def _ending(stream: Stream, limit: float) -> LoopEnding:
    if not stream.error <= limit:
        return "failed"
    return "as-original" if stream.same else "within-limit"


def _blamed(loop: _Loop, result: LoopResult, fixed: Answers) -> LoopResult:
    """The result with its culprit, found by swapping one file at a time, and the culprit's worst state."""
    single = dict(result.single)
    if len(fixed) > 1:
        for name, answer in fixed.items():
            stream = loop.stream({name: answer}, f"running with {name} by itself")
            single |= {name: stream.error} if stream is not None else {}
    assert result.fixed is not None
    culprit = max(fixed, key=lambda name: single.get(name, 0.0))
    slow = {(s.file, s.output) for s in loop.recording.states if s.step is not None and s.step < SLOW_STEP}
    outputs = [output for output in result.fixed.outputs if output.file == culprit]
    states = [output for output in outputs if output.state and output.relative_l2 > result.limit]
    states.sort(key=lambda output: ((output.file, output.output) in slow, output.relative_l2))
    return replace(result, culprit=culprit, state=states[-1].output if states else "", single=single)


def loop_of(
    folder: Path,  # the recording
    fixed: Mapping[str, Path],  # the fixed file of each model by its name
    options: FixOptions,  # those that the files were fixed with
    limit_s: float,  # for all runs of the script together; no repair starts later
    progress: Progress = silent,
    fixing: Fixing = lambda name, *fixed: fix(*fixed),
) -> LoopResult:
    """Runs the script of a recording with the files that were fixed from it, and repairs these in place.

    Raises:
        UsageError: the folder is no recording.
    """
    recording = Recording.read(folder)
    files = tuple(replace(file, model=str(folder / file.model)) for file in recording.files)
    recording = replace(recording, files=files)
    repair = partial(_fixed_again, recording, folder, fixed, options, fixing) if options.repair else None
    deployed = deployment(options.engine, options.plugin_lib, None, None, None)
    engine = deployed.choose().engine if options.build else None
    with work_folder() as work, ExitStack() as stack:
        if engine is not None:
            settings = MeasureSettings(
                engine, timing=None, plugins=deployed.plugins, timeout_s=options.timeout
            )
            numbers = count()

            def loaded(file: RecordedFile, path: Path) -> Callable[[Feeds], Mapping[str, Array]]:
                """Loads a file as an engine, whose profile holds all shapes of the recorded calls."""
                with np.load(min((folder / file.samples).glob("*.npz"))) as arrays:
                    sample = write_tensors(work / (name := f"engine{next(numbers)}"), dict(arrays))
                variant = Variant(name, path, (sample,), shapes=file.shapes)
                return stack.enter_context(EngineCalls(variant, settings, work)).run

            try:
                result = closed_loop(recording, fixed, limit_s, repair, engines=loaded, progress=progress)
                return replace(result, engine=engine)
            except (EngineError, NativeError) as error:
                progress(f"emulating, since {error.what}", 0, 0)
        try:
            return closed_loop(recording, fixed, limit_s, repair, progress=progress)
        except RewriterError as error:
            return LoopResult("refused", "not-run", error.what)


def _fixed_again(
    recording: Recording,
    folder: Path,
    fixed: Mapping[str, Path],
    options: FixOptions,
    fixing: Fixing,
    file: RecordedFile,
    step: Step,
    share: float,
) -> bool:
    """Fixes a file again; False if it has no state that moves slowly, for the step `states`."""
    steps = [s.step for s in recording.states if s.file == file.name and s.step is not None]
    if step == "states" and not min(steps, default=math.inf) < REPAIRED_STEP:
        return False
    rule = partial(slow_state, limit=REPAIRED_STEP)
    own: dict[str, Any] = {"inputs": folder / file.samples, "hazards": [*options.hazards, rule]}
    if step == "search":
        tolerance = TOLERANCES["bf16" if options.precision == "bf16" else "fp16"].value
        own |= {"tolerance": tolerance * min(share, 1.0) * MARGIN, "max_latency_cost": None}
    elif step == "fp32":
        own |= {"precision": "fp32", "io": None}
    fixing(file.name, file.model, fixed[file.name], combined(FixOptions, options, own))
    return True
