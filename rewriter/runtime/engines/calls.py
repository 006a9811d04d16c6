"""An engine that stays loaded in a process of its own and answers calls, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from rewriter.base import sandbox
from rewriter.base.errors import EngineError
from rewriter.ir.model import Array
from rewriter.runtime.engines.build import NO_TF32
from rewriter.runtime.engines.measure import build_variant
from rewriter.runtime.engines.protocol import MeasureSettings, Program, Variant
from rewriter.runtime.engines.this_machine import ENGINES


class EngineCalls(AbstractContextManager["EngineCalls"]):
    """Builds and loads a model; `close` ends its process.

    Args:
        variant: Its samples and shapes give the profile: axes that grow from call to call need a span.
        folder: For the engine's file.

    Raises:
        EngineError: it cannot be built or loaded here.
        NativeError: its process crashed.
    """

    def __init__(self, variant: Variant, settings: MeasureSettings, folder: Path) -> None:
        built, outcome = build_variant(variant, settings, folder / f"{variant.name}.engine")
        if not outcome.ran:
            raise EngineError(outcome.problem, where=str(variant.path), hint=outcome.hint)
        env = None if variant.tf32 else NO_TF32
        self._worker = sandbox.Worker(None, doing="the engine", limit_s=settings.timeout_s, env=env)
        self._worker.call(_load, built, settings)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name; an EngineError if a shape is outside the profile."""
        values: dict[str, Array] = self._worker.call(_run, dict(feeds))
        return values

    def time_us(self, feeds: Mapping[str, Array], repeats: int) -> list[float]:
        """The device's time of runs on these feeds, without copies, in microseconds."""
        times: list[float] = self._worker.call(_time, dict(feeds), repeats)
        return times

    def close(self) -> None:
        self._worker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


_programs: list[Program] = []
"""The program of this process."""


def _load(variant: Variant, settings: MeasureSettings) -> None:
    _programs.append(ENGINES[settings.engine].load(variant, settings))


def _run(feeds: dict[str, Array]) -> dict[str, Array]:
    return _programs[0].run(feeds)


def _time(feeds: dict[str, Array], repeats: int) -> list[float]:
    _programs[0].prepare(feeds)
    return [_programs[0].time_us() for _ in range(repeats)]
