"""Answers of probes that were measured on this machine, and kept in the cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rewriter.base.errors import OutputError, UsageError
from rewriter.ir.model import write_json
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.caches import user_cache
from rewriter.target import Target
from rewriter.target.answers import Answers, plain_fields, read, recorded


def known_target(target: Target) -> Target:
    """The target with its answers, measured on this machine's GPU or recorded, and with that GPU."""
    here = this_machine.at_hand(target)
    asked = replace(target, gpus=here.gpus)
    answers = measured(asked) or next((a for a in recorded() if a.fits(asked)), None)
    if answers is None:
        return here
    return replace(here, answers=answers.values, known_from=answers.origin)


def measured(target: Target | None = None) -> Answers | None:
    """The newest answers of this machine's GPU and driver, for a target if one is given."""
    files = list[Path]()
    with suppress(OSError):  # there is no folder, or none that can be read
        folder = user_cache("probe", "any").parent
        files += sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    cached = filter(None, map(_read_cached, files))
    fitting = [answers for answers in cached if target is None or answers.fits(target)]
    gpu = this_machine.gpu() if fitting else None  # asks the driver in a child process: only if it matters
    return next((a for a in fitting if gpu is not None and (a.gpu, a.driver) == (gpu.name, gpu.cuda)), None)


def remember(answers: Answers) -> Path | None:
    """Keep answers in the user's cache folder, by GPU, driver and library; returns the file.

    None if the folder cannot be written: the answers, measured in minutes, are more than their copy.
    """
    name = f"{answers.gpu}, {answers.driver}, {answers.library} {answers.version}.json"
    with suppress(OSError, OutputError):
        path = user_cache("probe", name)
        write_json(plain_fields(answers), path, "the answers")
        return path
    return None


def _read_cached(path: Path) -> Answers | None:
    """A file of the cache; None if it is broken or of another version: it can be measured again."""
    with suppress(UsageError):
        return read(path)
    return None
