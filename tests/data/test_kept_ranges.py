"""Ranges that are kept: read for the same content, measured for any other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from graphs import graph

from rewriter.ir.model import facts as tensor_facts
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.ranges import Ranges, kept, measure

BODY = "g (float[4] x) => (float[4] y) <float k = {K}> { a = Mul(x, k) b = Log(a) y = Exp(b) }"


class Folder:
    """A cache folder, and how often something was measured."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.measured = path, 0
        monkeypatch.setenv(kept.VARIABLE, "1")
        monkeypatch.setenv("REWRITER_CACHE", str(path / "cache"))
        monkeypatch.setattr(kept, "measure", self._measure)

    def _measure(self, *arguments: object, **keywords: object) -> Ranges:
        self.measured += 1
        return measure(*arguments, **keywords)  # type: ignore[arg-type]

    def ranges(self, factor: float = 2.0, value: float = 1.0) -> Ranges:
        model = graph(BODY.replace("{K}", f"{{{factor}}}"))
        np.savez(self.path / "data.npz", x=np.array([value, 2, 0, -1], np.float32))
        samples = load_samples(self.path / "data.npz", model)
        return kept.kept_or_measured(model, samples, tensor_facts.infer(model), progress=lambda _: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def test_the_same_content_is_measured_once(folder: Folder) -> None:
    first, again = folder.ranges(), folder.ranges()
    assert folder.measured == 1
    assert repr(again) == repr(first)  # NaN is not equal to itself
    assert (again.samples, again.unsupported) == (1, ())
    assert not again[0, "b"].finite
    assert math.isinf(again[0, "b"].absmax)


def test_other_samples_and_other_weights_are_measured(folder: Folder) -> None:
    assert len({repr(one) for one in (folder.ranges(), folder.ranges(3.0), folder.ranges(value=7.0))}) == 3
    assert folder.measured == 3


def test_a_damaged_file_is_measured_again(folder: Folder) -> None:
    first = folder.ranges()
    (file,) = (folder.path / "cache/ranges").iterdir()
    file.write_text(file.read_text()[:-9])
    assert repr(folder.ranges()) == repr(first)
    assert folder.measured == 2


def test_nothing_is_kept_outside_a_batch(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kept.VARIABLE)
    folder.ranges()
    assert not (folder.path / "cache").exists()
