"""Fix what was exported: in its place, or not at all. Nothing here knows PyTorch."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from rewriter.errors import RewriterError
from rewriter.hooks.settings import Settings
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Array, Model, load, save
from rewriter.verification.verdict import Verdict

Feeds = Callable[[Model], Iterable[Mapping[str, Array]] | None]
"""Samples for a model: arrays by input. None: `rewriter.fix` makes random ones."""


class FixWarning(UserWarning):
    """A model was exported but could not be fixed: the plain export is what is there."""


class Unverified(RewriterError):
    """The fixed model failed its verification and was thrown away."""


@dataclass(frozen=True)
class Fixed:
    """What came of one export.

    Attributes:
        path: The file; None if the export went elsewhere.
        result: What `rewriter.fix` says; None if it failed.
        error: Why it failed; None if it did not. The file is the plain export then.
        raw: The plain export, if it was to be kept and the file is not it.
    """

    path: Path | None = None
    result: FixResult | None = None
    error: Exception | None = None
    raw: Path | None = None


def raw_path(path: Path) -> Path:
    """Where the plain export is kept: `net.raw.onnx` beside `net.onnx`."""
    return path.with_name(f"{path.stem}.raw{path.suffix}")


def fix_file(path: Path, feeds: Feeds, settings: Settings) -> Fixed:
    """Replace an exported file by the fixed one; the file stays as it is if that fails.

    Raises:
        Exception: what went wrong, with `strict` alone.
    """
    raw = raw_path(path) if settings.keep_raw else None

    def work() -> Fixed:
        if raw is not None:
            _copy(path, raw)
        return Fixed(path, _fix(path, path, feeds, settings), raw=raw)

    def undo() -> None:
        if raw is not None:
            raw.unlink(missing_ok=True)

    return attempt(work, settings, str(path), undo, Fixed(path))


def fix_proto(proto: onnx.ModelProto, feeds: Feeds, settings: Settings, where: str) -> Fixed:
    """Fix a model that is in no file; `result.proto` is what came of it."""
    return attempt(lambda: Fixed(result=_fix(proto, None, feeds, settings)), settings, where)


def attempt(
    work: Callable[[], Fixed],
    settings: Settings,
    where: str,
    undo: Callable[[], None] = lambda: None,
    failed: Fixed | None = None,
) -> Fixed:
    """Do the work; what goes wrong is a warning that names `where`, or raised with `strict`."""
    try:
        return work()
    except Exception as error:
        undo()
        if settings.strict:
            raise
        said = str(error) if isinstance(error, RewriterError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"{where} is the plain export, not fixed: {said}", FixWarning, stacklevel=4)
        return replace(failed or Fixed(), error=error)


def say(text: str, settings: Settings) -> None:
    """Tell the user, on stderr: stdout belongs to the training script."""
    if not settings.quiet:
        print(f"rewriter: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _fix(source: Path | onnx.ModelProto, target: Path | None, feeds: Feeds, settings: Settings) -> FixResult:
    from rewriter.jobs.fix.api import fix
    from rewriter.passes.compensate_rounding import CompensateRounding
    from rewriter.report.terminal import verdict_line

    resolved = settings.resolve(source if isinstance(source, Path) else None)
    for sentence in resolved.messages():
        say(sentence, settings)
    options = {**resolved.arguments("fix"), **settings.fix, "strict": True}
    if settings.calibration is not None or options.get("inputs") is None:
        options["inputs"] = feeds(load(source))
        if settings.calibration is None:  # an export's example is often noise: no weight is fitted to it
            options["skip"] = (*(options.get("skip") or ()), CompensateRounding.name)
    with resolved.errors_name_sources():
        result = fix(source, target, in_place=True, **options)
    if result.verdict is not None and not result.verdict.passed:
        raise Unverified(
            _failures(result.verdict),
            hint="`rewriter fix` on the plain export shows more; fix={'keep_fp32': [...]} keeps nodes",
        )
    for warning in result.warnings:
        say(warning, settings)
    say(verdict_line(result).plain, settings)
    return result


def _failures(verdict: Verdict) -> str:
    failed = [check.summary for check in verdict.checks if check.passed is False]
    return "the fixed model failed its verification: " + ("; ".join(failed) or "no check could be made")


def _copy(path: Path, raw: Path) -> None:
    """A second model that needs no file of the first."""
    model = load(path)
    if model.external:
        save(model, raw)
    else:
        shutil.copyfile(path, raw)
