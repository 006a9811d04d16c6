"""Checks, and the verdict of all of them."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rewriter.runtime.emulation.divergence import NodeError
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.detections import Detections
from rewriter.runtime.metrics.outputs import OutputComparison, OutputStatistics
from rewriter.runtime.metrics.pictures import Picture

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks of a search's goal, which verify nothing about the written model."""

ARITHMETIC = ("run", "emulation", "tf32")
"""Checks of a result's arithmetic; an engine's own figure decides over its emulation."""

PROFILE = "profile"
"""Check of an engine at shapes of its profile that no sample has."""

ORIGINAL = "original build"
"""Check that the original builds, to distinguish unsupported models from broken passes."""

Excuse = Literal["", "conditioning", "as-fp32", "tf32", "tf32-off"]
"""Why an error beyond the tolerance passes: the network's own sums move its result that far in another order,
or its own FP32 engine has the same error. `tf32`: that engine misses the tolerance, too; `tf32-off`: it does,
and this file is within the tolerance with TF32 off."""

CPU = "CPU"
"""Device of an engine that needs no GPU."""

LOG_LINES = 15
"""Lines of a dead child's log that are reported."""


@dataclass(frozen=True)
class MetricValue:
    """A result under a metric that judges all outputs together.

    `value` is the worst sample's, `allowed` the user's tolerance.
    """

    metric: str
    value: float
    allowed: float
    met: bool

    @property
    def excess(self) -> float:
        """Distance from the tolerance in its units; above 1 it is missed."""
        if self.met:
            return 0.0
        far = abs(self.value - self.allowed) / (abs(self.allowed) or 1.0)
        return 1.0 + far if math.isfinite(far) else math.inf


class Remark(NamedTuple):
    """A result as values, of a kind that `report/` has a sentence for, which names them."""

    kind: str
    values: dict[str, Any]


def remark(kind: str, **values: Any) -> tuple[Remark]:
    return (Remark(kind, values),)


@dataclass(frozen=True)
class Check:
    """One step of verification, such as `structure`, `emulation`, `build` and `run`, or a goal of `GOALS`.

    `passed` is None if the step was impossible; its remark then gives the reason.

    Attributes:
        summary: The remarks as a sentence, once `report/` has composed it.
        device: What `run` ran on: the name of a GPU, or `CPU`.
        latency: Of the engine that `run` timed.
        statistics: Errors of each output in its worst sample, of the arrays that `outputs` compares.
        pictures: The same samples of outputs that look like images.
        excuse: Of a check that passed beyond its tolerance.
        rounds: The outputs of each sample, build by build; `outputs` has each in the worst of them.
        value: Under a metric of the user's, which judges all outputs together.
        tf32_off: As `error`, of the same file where FP32 products are exact; None if that was not tried.
        built: True if there is an engine, whatever is wrong with it; None if no build was tried.
        refused: Name and operator of the nodes that the parser refused.
        switch: Of an original that does not build: an input that selects a branch, and the name of the If.
        worst: The nodes that add most of a failed emulation's error, largest first.
        advice: What to do about a build or run that failed; `details` has it, too.
        shapes: Of `PROFILE`: the shapes that were run, for people.
        wrong_states: Final states that nothing reads and that are wrong, and their errors: no excuse.
        detections: The boxes above the threshold, of outputs that are recognised as boxes.
    """

    name: str
    passed: bool | None
    remarks: tuple[Remark, ...] = ()
    outputs: tuple[OutputComparison, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0
    statistics: tuple[OutputStatistics, ...] = ()
    pictures: tuple[Picture, ...] = ()
    excuse: Excuse = ""
    latency: Latency | None = None
    value: MetricValue | None = None
    rounds: tuple[tuple[OutputComparison, ...], ...] = ()
    worst: tuple[NodeError, ...] = ()
    tf32_off: float | None = None
    built: bool | None = None
    refused: tuple[tuple[str, str], ...] = ()
    switch: tuple[str, str] | None = None
    device: str = ""
    advice: str = ""
    shapes: str = ""
    wrong_states: tuple[tuple[str, float], ...] = ()
    detections: Detections | None = None
    summary: str = ""

    @property
    def error(self) -> float:
        """Largest error of an output in units of its tolerance; infinite where none could be compared."""
        if self.value is not None:
            return self.value.excess
        return max((output.excess for output in self.outputs), default=math.inf)


@dataclass(frozen=True)
class Verdict:
    """All checks of one model."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if at least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)

    @property
    def unbuildable(self) -> Check | None:
        """The failed build of the original; None if it builds, or was not asked for."""
        return next((c for c in self.checks if c.name == ORIGINAL and c.passed is False), None)

    @property
    def compared(self) -> bool:
        """True if a check compared results with the original's; otherwise it is only known to build."""
        return any(c.passed is not None and (c.outputs or c.value) for c in self.checks)


def deciding(checks: Iterable[Check], names: Sequence[str] = ARITHMETIC) -> Check | None:
    """The first of the checks in the order of `names`; None if there is none."""
    by_name = {check.name: check for check in checks}
    return next((by_name[name] for name in names if name in by_name), None)


def ran(checks: Iterable[Check]) -> bool:
    """True if an engine ran the result on a GPU of this machine, and was within its tolerance."""
    return any(check.name == "run" and check.passed and check.device != CPU for check in checks)


PLUGINS = "plugins"
"""Check of what plugins compute that are not here: it is never made, and says so."""

GapKind = Literal["data", "tf32", "plain", "original", "build", "plugins", "fp32"]
"""A lack that keeps a checked result from being "Verified": the samples prove nothing; it is right only with
TF32 off, or as wrong as TF32; less accurate than plain FP16; the original is too far from the model that it
was made from; no engine was built; it was not run from its plugins on; nothing was lowered."""


def gap_kinds(
    checks: Sequence[Check], data: DataSource | None, *, worse: bool = False, all_fp32: bool = False
) -> tuple[GapKind, ...]:
    """Returns the gaps of checks that passed.

    Args:
        worse: True if plain FP16 is more accurate.
        all_fp32: True if nothing was lowered, though it has floats and FP32 was not the request.
    """
    ran = any(check.name == "run" and check.passed for check in checks)
    built = any(check.name == "build" and (check.built or check.passed) for check in checks)
    lacks: dict[GapKind, bool] = {
        "data": data is not None and bool(data.doubt),
        "tf32": any(check.excuse in ("tf32", "tf32-off") for check in checks),
        "plain": worse,
        "original": any(output.unusable for check in checks for output in check.outputs),
        "build": not (ran or built),
        "plugins": any(check.name == PLUGINS for check in checks),
        "fp32": all_fp32,
    }
    return tuple(kind for kind, is_lacking in lacks.items() if is_lacking)


def log_lines(log: str) -> tuple[str, ...]:
    """Returns the library's last lines in a child's log, as details, without the Python stack after them."""
    native = re.split(r"Fatal Python error|Traceback \(most recent call last\)", log)[0]
    lines = [line for line in native.splitlines() if line.strip()]
    return tuple(f"log: {line}" for line in lines[-LOG_LINES:])
