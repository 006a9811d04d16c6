"""Measures variants of a model: builds and runs them in child processes, and returns outcomes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rewriter.engines.build_report import BuildReport
from rewriter.engines.child_process import ChildResult, run_in_child
from rewriter.engines.protocol import (
    EngineLayer,
    EngineOutcome,
    Latency,
    MeasureSettings,
    RunOrder,
    Status,
    Variant,
)
from rewriter.engines.tensorrt_build import NO_TF32, BuildOptions, build
from rewriter.errors import EngineError

SHAPE_LIKE = 16
"""Most elements of an integer input that can be a shape, an axis or a trip count: a build needs its value."""


@dataclass(frozen=True)
class _Built:
    """A build of a variant, ready to run."""

    variant: Variant
    number: int
    engine: Path
    report: BuildReport | None


def measure(variants: Sequence[Variant], settings: MeasureSettings, folder: Path) -> list[EngineOutcome]:
    """Build every variant, run every sample, and time all interleaved.

    Args:
        variants: With names of their own.
        folder: Where engines and outputs go; what the outcomes read lives as long as it does.

    Returns:
        One outcome for each variant and build, in that order, failures included. If the process that runs
        them crashes or hangs, each is run alone to find the cause, and the others are then timed without it.

    Raises:
        EngineError: the library is not installed, or two variants share a name.
    """
    names = [variant.name for variant in variants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EngineError(f"several variants are called {sorted(twice)[0]!r}", hint="give each its own name")
    folder.mkdir(parents=True, exist_ok=True)
    built: list[_Built] = []
    outcomes: dict[tuple[str, int], EngineOutcome] = {}
    for place, variant in enumerate(variants):
        for number in range(settings.builds):
            found = build_variant(variant, settings, folder / f"{place:03d}-{number}.engine", number)
            if isinstance(found, EngineOutcome):
                outcomes[variant.name, number] = found
            else:
                built.append(_Built(variant, number, *found))
    for tf32 in (True, False):
        group = [one for one in built if one.variant.tf32 == tf32]
        for outcome in _run_group(group, settings, folder) if group else ():
            outcomes[outcome.variant, outcome.build] = outcome
    return [outcomes[variant.name, number] for variant in variants for number in range(settings.builds)]


def build_variant(
    variant: Variant, settings: MeasureSettings, target: Path, number: int = 0
) -> tuple[Path, BuildReport | None] | EngineOutcome:
    """Build one variant, if its engine needs a build.

    Returns:
        What to load, and the builder's report if there is one; the outcome if there is nothing to load.

    Raises:
        EngineError: the library is not installed.
    """
    if variant.engine is not None:
        return variant.engine, None
    if settings.engine.startswith("onnxruntime"):
        return variant.path, None
    options = BuildOptions(
        shapes=variant.samples.spans() | dict(variant.shapes),
        values=shape_values(next(iter(variant.samples))) if len(variant.samples) else {},
        library=settings.engine.replace("-", "_"),
        optimization_level=settings.optimization_level,
        engine=str(target),
        outputs=variant.outputs,
        debug=variant.debug,
        tf32=variant.tf32,
        details=True,
        plugins=[str(plugin) for plugin in settings.plugins],
        timing_cache=settings.builds == 1,
    )
    built = build(
        variant.path,
        options,
        timeout_s=settings.left(settings.build_timeout_s),
        memory_bytes=settings.memory_bytes,
    )
    if isinstance(built, ChildResult):
        return _accident(variant.name, number, built, "the build")
    if built.engine_bytes is None:
        return _refusal(variant.name, number, built)
    return target, built


def shape_values(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """Values of the inputs that could be shapes themselves, for a build needs them."""
    return {
        name: array.reshape(-1).tolist()
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= SHAPE_LIKE
    }


def _refusal(name: str, number: int, report: BuildReport) -> EngineOutcome:
    """The outcome of a build that gave no engine."""
    reasons = [str(error) for error in report.parser_errors]
    reasons = reasons or ([report.obstacle] if report.obstacle else list(report.errors[-3:]))
    problem = "; ".join(reasons) or "the builder gave no engine and no reason"
    library = f"{report.library} {report.version}"
    return EngineOutcome(
        name, number, "refused", problem, report.hint, report.log, library=library, report=report
    )


def _accident(name: str, number: int, child: ChildResult, what: str) -> EngineOutcome:
    """The outcome of a child process without an answer, or with an unexpected exception."""
    status: Status = child.status if child.status in ("crashed", "timeout") else "error"
    hint = (child.result or {}).get("hint") or ""
    return EngineOutcome(name, number, status, f"{what}: {child.summary}", hint, child.log)


def _run_group(group: Sequence[_Built], settings: MeasureSettings, folder: Path) -> Iterator[EngineOutcome]:
    """Run all together; if that process crashes or hangs, run each alone, and then the survivors together.

    Nothing is run again after `settings.until`.
    """
    child = _run(group, settings, folder)
    if child.status == "ok":
        yield from _outcomes(group, child)
    elif len(group) == 1 or time.monotonic() >= settings.until:
        yield from (_failed(one, child) for one in group)
    else:
        alone = [_alone(one, settings, folder) for one in group]
        well = [one for one, outcome in zip(group, alone, strict=True) if outcome.ran]
        again = list(_together(well, settings, folder))
        timed = {(outcome.variant, outcome.build): outcome for outcome in again}
        yield from (timed.get((outcome.variant, outcome.build), outcome) for outcome in alone)


def _alone(one: _Built, settings: MeasureSettings, folder: Path) -> EngineOutcome:
    child = _run([one], replace(settings, timing=None), folder)
    return next(_outcomes([one], child)) if child.status == "ok" else _failed(one, child)


def _together(well: Sequence[_Built], settings: MeasureSettings, folder: Path) -> Iterator[EngineOutcome]:
    """Those that run alone, once more in one process, to be timed; nothing if that fails again."""
    if well and settings.timing is not None:
        child = _run(well, settings, folder)
        if child.status == "ok":
            yield from _outcomes(well, child)


def _run(group: Sequence[_Built], settings: MeasureSettings, folder: Path) -> ChildResult:
    orders = [_plain(_order(one, settings, folder)) for one in group]
    arguments = {
        "engine": settings.engine,
        "orders": orders,
        "timing": asdict(settings.timing) if settings.timing else None,
    }
    return run_in_child(
        {"call": "rewriter.engines.measure_in_child:run_here", "arguments": arguments},
        timeout_s=settings.left(settings.run_timeout_s),
        env=None if group[0].variant.tf32 else NO_TF32,
        memory_bytes=settings.memory_bytes,
    )


def _order(one: _Built, settings: MeasureSettings, folder: Path) -> RunOrder:
    variant = one.variant
    return RunOrder(
        variant.name,
        one.engine.resolve(),
        tuple(path.resolve() for path in variant.samples.folders),
        (folder / "outputs" / f"{one.engine.stem}-{variant.name}-{one.number}".replace("/", "_")).resolve(),
        variant.outputs,
        variant.debug,
        variant.tf32,
        settings.plugins,
    )


def _plain(order: RunOrder) -> dict[str, Any]:
    """Its fields for JSON."""
    several = {name: [str(path) for path in getattr(order, name)] for name in ("samples", "plugins")}
    return {**asdict(order), **several, "engine": str(order.engine), "results": str(order.results)}


def _failed(one: _Built, child: ChildResult) -> EngineOutcome:
    return replace(_accident(one.variant.name, one.number, child, "the run"), report=one.report)


def _outcomes(group: Sequence[_Built], child: ChildResult) -> Iterator[EngineOutcome]:
    if child.result is None:
        raise EngineError("the child answered nothing")
    for one, answer in zip(group, child.result["outcomes"], strict=True):
        yield _outcome(one, answer, child.log)


def _outcome(one: _Built, answer: Mapping[str, Any], log: str) -> EngineOutcome:
    latency, notes = answer.get("latency"), (one.report.notes if one.report else ())
    return EngineOutcome(
        one.variant.name,
        one.number,
        answer["status"],
        answer.get("problem", ""),
        answer.get("hint", ""),
        "" if answer["status"] == "ok" else log,
        answer.get("device", ""),
        answer.get("library", ""),
        one.report,
        tuple(_layer(**layer) for layer in answer.get("layers", ())),
        tuple(map(Path, answer.get("outputs", ()))),
        tuple(map(Path, answer.get("debug", ()))),
        Latency(**latency) if latency else None,
        (*notes, *answer.get("notes", ())),
    )


def _layer(name: str, type: str, nodes: list[str], outputs: list[list[str]]) -> EngineLayer:  # noqa: A002
    return EngineLayer(name, type, tuple(nodes), tuple((tensor, dtype) for tensor, dtype in outputs))
