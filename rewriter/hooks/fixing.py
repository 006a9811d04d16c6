"""Fixes an exported model in place, or keeps the plain export. Independent of PyTorch."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from rewriter.errors import RewriterError
from rewriter.hooks.hook_options import HookOptions
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Array, Model, load, save
from rewriter.printable import printable
from rewriter.verification.verdict import Verdict

Feeds = Callable[[Model], Iterable[Mapping[str, Array]] | None]
"""Returns feeds for a model; None: `rewriter.fix` generates random data."""


class FixWarning(UserWarning):
    """A model was exported but could not be fixed: the plain export is kept."""


class Unverified(RewriterError):
    """The fixed model failed its verification and was discarded."""


@dataclass(frozen=True)
class Fixed:
    """Result of one export.

    Attributes:
        path: The file; None if the export was not to a path.
        result: Result of `rewriter.fix`; None if it failed.
        error: Why the fix failed, in which case the file is the plain export.
        raw: The plain export, if it was kept beside the fixed file.
    """

    path: Path | None = None
    result: FixResult | None = None
    error: Exception | None = None
    raw: Path | None = None


def raw_path(path: Path) -> Path:
    """Path of the plain export: `net.raw.onnx` beside `net.onnx`."""
    return path.with_name(f"{path.stem}.raw{path.suffix}")


def fix_file(path: Path, feeds: Feeds, options: HookOptions) -> Fixed:
    """Replace an exported file by the fixed one; if that fails, the file is unchanged.

    Raises:
        Exception: the fix failed and `strict` is set.
    """
    raw = raw_path(path) if options.keep_raw else None

    def work() -> Fixed:
        try:
            if raw is not None:
                copy_model(path, raw)
            return Fixed(path, _fix(path, path, feeds, options), raw=raw)
        except Exception:
            if raw is not None:
                raw.unlink(missing_ok=True)
            raise

    return attempt(work, options, str(path), path)


def fix_proto(proto: onnx.ModelProto, feeds: Feeds, options: HookOptions, where: str) -> Fixed:
    """Fix a model in memory; the fixed one is `result.proto`."""
    return attempt(lambda: Fixed(result=_fix(proto, None, feeds, options)), options, where)


def attempt(work: Callable[[], Fixed], options: HookOptions, where: str, path: Path | None = None) -> Fixed:
    """Do the work; errors become warnings that name `where`, or are raised if `strict` is set."""
    try:
        return work()
    except Exception as error:
        if options.strict:
            raise
        reason = str(error) if isinstance(error, RewriterError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"{where} is the plain export, not fixed: {reason}", FixWarning, stacklevel=4)
        return Fixed(path, error=error)


def say(text: str, options: HookOptions) -> None:
    """Print for the user on stderr: stdout belongs to the training script."""
    if not options.quiet:
        print(printable(f"rewriter: {text}"), file=sys.stderr, flush=True)  # noqa: T201


def _fix(
    source: Path | onnx.ModelProto, target: Path | None, feeds: Feeds, options: HookOptions
) -> FixResult:
    from rewriter.jobs.fix.api import fix
    from rewriter.report.fix import verdict_line

    resolved = options.resolve()
    for sentence in resolved.messages():
        say(sentence, options)
    arguments = {**resolved.arguments("fix"), **options.fix, "strict": True}
    if options.calibration is not None or arguments.get("inputs") is None:
        arguments["inputs"] = feeds(load(source))
    with resolved.errors_name_sources():
        result = fix(source, target, in_place=True, **arguments)
    if result.verdict is not None and not result.verdict.passed:
        raise Unverified(
            _failures(result.verdict),
            hint="`rewriter fix` on the plain export has details; fix={'keep_fp32': [...]} may help",
        )
    for warning in result.warnings:
        say(warning, options)
    say(verdict_line(result).plain, options)
    return result


def _failures(verdict: Verdict) -> str:
    failed = [check.summary for check in verdict.checks if check.passed is False]
    return "the fixed model failed its verification: " + ("; ".join(failed) or "no check could be made")


def copy_model(path: Path, raw: Path) -> None:
    """Copy a model, its external data included."""
    model = load(path)
    if model.external:
        save(model, raw)
    else:
        shutil.copyfile(path, raw)
