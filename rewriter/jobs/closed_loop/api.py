"""The closed loop of a recording after its files were fixed: engines where they run, and repairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.base.errors import EngineError, NativeError, RewriterError
from rewriter.base.stopwatch import Progress, silent
from rewriter.hazards.accumulation import SLOW_STEP, slow_state
from rewriter.ir.model import Array
from rewriter.ir.model.output_files import work_folder
from rewriter.jobs.closed_loop.job import closed_loop
from rewriter.jobs.closed_loop.result import LoopResult, Step
from rewriter.jobs.fix.api import fix
from rewriter.jobs.fix.result import FixResult
from rewriter.pipeline.options import FixOptions, combined
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.measure import EngineCalls
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import write_tensors
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.runtime.recording.record import RecordedFile, Recording

REPAIRED_STEP = 4.0 * SLOW_STEP
"""Median step of a state below which a repair keeps it in FP32: suspects beyond the rule's own limit.
States of GRUs and LSTMs and rolling caches move by 84 to 1,346."""

Refixed = Callable[[str, FixResult], None]

MARGIN = 0.5
"""The goal of a search, in units of the error that would do: errors in a loop are not proportional."""


def loop_of(
    folder: Path,
    fixed: Mapping[str, Path],
    options: FixOptions,
    limit_s: float,
    progress: Progress = silent,
    refixed: Refixed = lambda name, result: None,
) -> LoopResult:
    """Runs the script of a recording with the files that were fixed from it, and repairs these in place.

    Args:
        folder: The recording. `fixed`: the fixed file of each model by its name.
        options: Those that the files were fixed with: `engine`, `build` and `repair` hold here, too.
        limit_s: For all runs of the script together, in seconds; no repair starts later.
        refixed: Gets each result of a repair with the name of its model.

    Raises:
        UsageError: the folder is no recording.
    """
    recording = Recording.read(folder)
    files = tuple(replace(file, model=str(folder / file.model)) for file in recording.files)
    recording = replace(recording, files=files)
    repair = _Repairs(recording, folder, fixed, options, refixed) if options.repair else None
    deployed = deployment(options.engine, options.plugin_lib, None, None, None)
    engine = deployed.choose().engine if options.build else None
    with work_folder() as work, ExitStack() as stack:
        if engine is not None:
            settings = MeasureSettings(
                engine, timing=None, plugins=deployed.plugins, timeout_s=options.timeout
            )
            engines = _Engines(folder, settings, work, stack)
            try:
                result = closed_loop(recording, fixed, limit_s, repair, engines=engines, progress=progress)
                return replace(result, engine=engine)
            except (EngineError, NativeError) as error:
                progress(f"emulating, since {error.what}", 0, 0)
        try:
            return closed_loop(recording, fixed, limit_s, repair, progress=progress)
        except RewriterError as error:
            return LoopResult("refused", "not-run", error.what)


class _Engines:
    """Loads files as engines, whose profiles hold all shapes of the recorded calls."""

    def __init__(self, folder: Path, settings: MeasureSettings, work: Path, stack: ExitStack) -> None:
        self._folder, self._settings, self._work, self._stack = folder, settings, work, stack
        self._numbers = count()

    def __call__(self, file: RecordedFile, path: Path) -> Callable[[Mapping[str, Any]], Mapping[str, Array]]:
        name = f"engine{next(self._numbers)}"
        first = min((self._folder / file.samples).glob("*.npz"))
        with np.load(first) as arrays:
            sample = write_tensors(self._work / name, dict(arrays))
        variant = Variant(name, path, (sample,), shapes=file.shapes)
        return self._stack.enter_context(EngineCalls(variant, self._settings, self._work)).run


@dataclass(frozen=True)
class _Repairs:
    """Fixes one file of a pipeline again, because the loop showed what its samples do not.

    Attributes:
        samples: The folder of the recording. `options`: those that the files were fixed with.
    """

    recording: Recording
    samples: Path
    fixed: Mapping[str, Path]
    options: FixOptions
    refixed: Refixed

    def __call__(self, file: RecordedFile, step: Step, share: float) -> bool:
        """Fixes a file again; False if it has no state that moves slowly, for the step `states`."""
        steps = [s.step for s in self.recording.states if s.file == file.name and s.step is not None]
        if step == "states" and not min(steps, default=math.inf) < REPAIRED_STEP:
            return False
        rule = partial(slow_state, limit=REPAIRED_STEP)
        own: dict[str, Any] = {
            "inputs": self.samples / file.samples,
            "hazards": [*self.options.hazards, rule],
        }
        if step == "search":
            tolerance = TOLERANCES["bf16" if self.options.precision == "bf16" else "fp16"].value
            own |= {"tolerance": tolerance * min(share, 1.0) * MARGIN, "max_latency_cost": None}
        elif step == "fp32":
            own |= {"precision": "fp32", "io": None}
        target = self.fixed[file.name]
        self.refixed(file.name, fix(file.model, target, combined(FixOptions, self.options, own)))
        return True
