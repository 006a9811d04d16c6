"""Every option that a user can set is read by the job that declares it."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import graph
from paths import ROOT
from searching import OFFSET

import rewriter
from rewriter.pipeline.options import (
    BatchCommand,
    CompareCommand,
    DataOptions,
    EngineOptions,
    FixCommand,
    FixOptions,
    LocateOptions,
    ScanCommand,
    ScanOptions,
    VerifyOptions,
)
from rewriter.pipeline.schema import declarations


def _fix(folder: Path) -> None:
    onnx.save(graph(OFFSET).whole(), folder / "net.onnx")
    rewriter.fix(folder / "net.onnx", folder / "net.onnx", build=False, strict=True, in_place=True)


def _verify(_: Path) -> None:
    for engine in ("onnxruntime", "emulation"):
        rewriter.verify(graph(OFFSET).whole(), graph(OFFSET).whole(), engine=engine)


def read_by(kind: type, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields of an options class that the package reads while `work` runs."""
    read = set[str]()

    def recorded(self: Any, name: str) -> Any:
        if "/rewriter/" in sys._getframe(1).f_code.co_filename:  # and not dataclasses.replace
            read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(kind, "__getattribute__", recorded, raising=False)
    work()
    return read


JOBS = [
    pytest.param(FixOptions, _fix, id="fix"),
    pytest.param(ScanOptions, lambda _: rewriter.scan(graph(OFFSET).whole()), id="scan"),
    pytest.param(VerifyOptions, _verify, id="verify"),
]


@pytest.mark.parametrize(("kind", "work"), JOBS)
def test_a_job_reads_each_of_its_options(
    kind: type, work: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = {field.name for field in fields(kind)}
    assert declared <= read_by(kind, lambda: work(tmp_path), monkeypatch), "an option that nothing reads"


COMMANDS = [
    pytest.param(FixCommand, FixOptions, ["cli/fix.py"], id="fix"),
    pytest.param(BatchCommand, FixOptions, ["cli/fix.py"], id="batch"),
    pytest.param(ScanCommand, ScanOptions, ["cli/scan.py"], id="scan"),
    pytest.param(CompareCommand, None, ["cli/compare.py"], id="compare-inputs"),
    pytest.param(LocateOptions, None, ["cli/compare.py", "jobs/locate.py"], id="locate"),
]


@pytest.mark.parametrize(("kind", "base", "files"), COMMANDS)
def test_a_command_names_each_option_of_its_own(kind: type, base: type | None, files: list[str]) -> None:
    inherited = {field.name for field in fields(base)} if base else set()
    inherited |= {field.name for shared in (DataOptions, EngineOptions) for field in fields(shared)}
    own = {name for name, option in declarations(kind).items() if "command line" in option.set_in}
    words = {word for file in files for word in re.findall(r"\w+", (ROOT / "rewriter" / file).read_text())}
    assert own - inherited <= words, "an option that nothing reads"


@dataclass(frozen=True)
class _WithMore:
    used: int = 0
    unused: int = 0


def test_an_option_that_nothing_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = compile("value.used", "/rewriter/job.py", "eval")
    assert read_by(_WithMore, lambda: eval(source, {"value": _WithMore()}), monkeypatch) == {"used"}
