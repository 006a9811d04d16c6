"""Checks, and the verdict of all of them."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rewriter.base.text import count
from rewriter.runtime.emulation.divergence import NodeError
from rewriter.runtime.engines.deployment import shown
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.detections import Detections
from rewriter.runtime.metrics.outputs import OutputComparison, OutputStatistics
from rewriter.runtime.metrics.pictures import Picture
from rewriter.runtime.metrics.tolerances import USABLE

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks of a search's goal, which verify nothing about the written model."""

ARITHMETIC = ("run", "emulation", "tf32")
"""Checks of a result's arithmetic; an engine's own figure decides over its emulation."""

PROFILE = "profile"
"""Check of an engine at shapes of its profile that no sample has."""

ORIGINAL = "original build"
"""Check that the original builds, to distinguish unsupported models from broken passes."""

UNBUILDABLE = "TensorRT cannot build the original model"
"""The ending of a model whose original does not build."""

Excuse = Literal["", "conditioning", "as-fp32", "tf32", "tf32-off"]
"""Why an error beyond the tolerance passes: the network's own sums move its result that far in another order,
or its own FP32 engine has the same error. `tf32`: that engine misses the tolerance, too; `tf32-off`: it does,
and this file is within the tolerance with TF32 off."""

TF32_OFF = "build it with TF32 off"

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


@dataclass(frozen=True)
class Check:
    """One step of verification, such as `structure`, `emulation`, `build` and `run`, or a goal of `GOALS`.

    `passed` is None if the step was impossible; `summary` then gives the reason.

    Attributes:
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
        worst: The nodes that add most of a failed emulation's error, largest first.
        advice: What to do about a build or run that failed; `details` has it, too.
        shapes: Of `PROFILE`: the shapes that were run, for people.
        wrong_states: A sentence for each final state that nothing reads and that is wrong: no excuse.
        detections: The boxes above the threshold, of outputs that are recognised as boxes.
    """

    name: str
    passed: bool | None
    summary: str
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
    device: str = ""
    advice: str = ""
    shapes: str = ""
    wrong_states: tuple[str, ...] = ()
    detections: Detections | None = None

    @property
    def lost_words(self) -> str:
        """The boxes that a failed check lost, for its summary; "" if the outputs explain it."""
        lost = self.passed is False and self.detections is not None and not self.detections.passed
        return f"; detections: {self.detections}" if lost else ""

    @property
    def place(self) -> str:
        """Where `run` ran: ONNX Runtime's CPU kernels compute FP16 in FP32."""
        return "with ONNX Runtime on the CPU" if self.device == CPU else "on this GPU"

    @property
    def error(self) -> float:
        """Largest error of an output in units of its tolerance; infinite where none could be compared."""
        if self.value is not None:
            return self.value.excess
        return max((output.excess for output in self.outputs), default=math.inf)

    def error_words(self, default: float) -> str:
        """`largest error 0.002, within 0.005`: the one closest to its tolerance, or furthest beyond.

        Args:
            default: The tolerance where there are no outputs.
        """
        if self.value is not None:
            relation = "within" if self.value.met else "NOT within"
            return f"{self.value.metric} {self.value.value:.3g}, {relation} {self.value.allowed:.3g}"
        worst = max(self.outputs, key=lambda o: (o.excess, o.relative_l2, o.tolerance), default=None)
        error, allowed = (0.0, default) if worst is None else (worst.relative_l2, worst.tolerance)
        relation = "within" if error <= allowed else "beyond" if self.passed else "NOT within"
        part = f" in {worst.name}" if worst is not None and worst.of else ""
        return f"largest error {error:.2g}{part}, {relation} {allowed:.2g}"


@dataclass(frozen=True)
class Verdict:
    """All checks of one model."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if at least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)

    def rows(self) -> Iterator[tuple[str, str]]:
        """The checks, each with its outcome."""
        for check in self.checks:
            outcome = {True: "passed", False: "FAILED", None: "not possible"}[check.passed]
            yield check.name, f"{outcome}: {check.summary}"

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

GapKind = Literal["data", "build", "tf32", "plain", "plugins", "fp32", "original"]


@dataclass(frozen=True)
class Gap:
    """A lack that keeps a checked result from being "Verified": words for the first line, and the reason.

    Attributes:
        kind: The samples prove nothing; no engine was built; right only with TF32 off, or as wrong as
            TF32; less accurate than plain FP16; not run from its plugins on; nothing lowered; the original
            is too far from the model that it was made from.
        brief: "" where the first line says so in other words.
    """

    kind: GapKind
    brief: str
    reason: str


def gaps(
    checks: Sequence[Check],
    data: DataSource | None,
    no_build: str = "",
    worse: str = "",
    *,
    all_fp32: bool = False,
) -> tuple[Gap, ...]:
    """Returns the gaps of checks that passed.

    Args:
        worse: The outputs on which plain FP16 is more accurate.
        all_fp32: True if nothing was lowered, though it has floats and FP32 was not the request.
        no_build: Why there is no check of the build, if there is none.
    """
    found = list[Gap]()
    if data is not None and data.doubt:
        reason = f"samples as in deployment: {data.text}"
        found.append(Gap("data", f"on {data.doubt}, which is no proof", reason))
    excuse = next((check.excuse for check in checks if check.excuse in ("tf32", "tf32-off")), "")
    if excuse:
        cured = excuse == "tf32-off"
        reason = "TF32, the default of TensorRT, takes the original as far from FP32: "
        reason += f"{TF32_OFF} (--noTF32)" if cured else "take `precision=fp32`, and " + TF32_OFF
        found.append(Gap("tf32", f"as wrong as FP32 with TF32{': ' + TF32_OFF if cured else ''}", reason))
    if worse:
        reason = f"the accuracy of plain FP16 on {worse}"
        found.append(Gap("plain", "less accurate than plain FP16", reason))
    lost = [output for check in checks for output in check.outputs if output.unusable]
    if lost:
        errors = {o.name: o.allowance.measured for o in lost if o.allowance is not None}
        name = max(errors, key=errors.__getitem__)
        reason = f"an accurate original: it has {errors[name]:.2g} on {name} against the model that it was "
        reason += f"made from; beyond {USABLE} a result is of no use"
        found.append(Gap("original", "as inaccurate as the original", reason))
    run = any(check.name == "run" and check.passed for check in checks)
    if not run and not any(check.name == "build" and (check.built or check.passed) for check in checks):
        build = next((check.summary for check in checks if check.name == "build"), no_build)
        reason = build.removeprefix("not built: ") or "no library of TensorRT built it"
        found.append(Gap("build", "NOT built", f"an engine: {reason}"))
    plugins = (check.summary for check in checks if check.name == PLUGINS)
    found += (Gap("plugins", "up to its plugins", summary) for summary in plugins)
    found += [Gap("fp32", "", "nodes in reduced precision: all of it is FP32")] * all_fp32
    return tuple(found)


def proof(checks: Sequence[Check], samples: int, data: DataSource | None, lacks: Sequence[Gap]) -> str:
    """How a result was checked, in the words of the first line; "Verified" only if nothing is lacking.

    Args:
        samples: Number of those that judged; 0 if unknown.
    """
    brief = {gap.kind: gap.brief for gap in lacks if gap.brief}
    on = brief.pop("data", f"on {count(samples, 'sample')}" if samples else "")
    profile = next((check for check in checks if check.name == PROFILE and check.passed), None)
    on += f" and with {profile.shapes}" if profile else ""
    beyond = data.beyond.items() if data is not None else ()
    ran = profile.shapes if profile else ""
    shapes = [
        f"{n} at {shown(seen)} of up to {shown(most)}" for n, (seen, most) in beyond if shown(most) not in ran
    ]
    on += f" ({', '.join(shapes)})" if shapes else ""
    run = next((check for check in checks if check.name == "run" and check.passed), None)
    lacking = any(gap.brief for gap in lacks)
    verb = "Checked" if lacking else "Verified"
    how = f"{verb} {run.place}" if run else "Emulated" if lacking else "Verified by emulation"
    built = run is None and any(check.name == "build" and check.passed for check in checks)
    parts = [" ".join(filter(None, (how, on))), *["built without a GPU"] * built, *brief.values()]
    return ", ".join(parts)


def not_lowered(how: str, *, floats: bool) -> str:
    """The ending of a file with nothing in reduced precision. `how`: of `proof`; `floats`: if it has any."""
    what = "all of it is FP32" if floats else "no node has floats"
    return f"Nothing was lowered: {what} ({how[0].lower()}{how[1:]})"


NO_GAIN = 0.95
"""Share of FP32's latency above which nothing was gained: medians of two runs differ by a few percent."""


def gain(share: float, of: str, source: str = "") -> str:
    """`2.2 times as fast as FP32`, or that nothing was gained, in the words of the first line.

    Args:
        share: Of the latency of `of`. `source`: its origin, unless it was measured.
    """
    if share <= NO_GAIN:
        return f"{1.0 / share:.2g} times as fast as {of}{source}"
    return f"{'slower than' if share > 1.0 / NO_GAIN else 'as slow as'} {of}: {100 * share:.0f} %{source}"


def log_lines(log: str) -> tuple[str, ...]:
    """Returns the library's last lines in a child's log, as details, without the Python stack after them."""
    native = re.split(r"Fatal Python error|Traceback \(most recent call last\)", log)[0]
    lines = [line for line in native.splitlines() if line.strip()]
    return tuple(f"log: {line}" for line in lines[-LOG_LINES:])
