"""Kernel timings between builds: where they are stored, and that they never make a build fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.nvidia_driver import Gpu
from rewriter.runtime.engines.timing_cache import TimingCache, open_cache


class Config:
    """The three calls of TensorRT's builder config for its cache, which is bytes here."""

    def __init__(self) -> None:
        self.cache = b""

    def create_timing_cache(self, stored: bytes) -> bytes:
        return stored

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b" and more")


TENSORRT = SimpleNamespace(__name__="tensorrt", __version__="10.13.3")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REWRITER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvidia_driver, "gpus", lambda: [Gpu("NVIDIA L4", (8, 9), (13, 0))])
    return tmp_path / "cache" / "timing"


def test_the_next_build_uses_the_timings_of_the_last(folder: Path) -> None:
    first = open_cache(TENSORRT, Config())
    assert first is not None and first.config.cache == b""
    first.keep()
    (file,) = folder.iterdir()
    assert file.name == "tensorrt_10.13.3_NVIDIA_L4.cache"
    again = open_cache(TENSORRT, Config())
    assert again is not None and again.config.cache == b" and more"


def test_every_release_has_its_own_file(folder: Path) -> None:
    for version in ("10.13.3", "11.0.0"):
        cache = open_cache(SimpleNamespace(__name__="tensorrt", __version__=version), Config())
        assert cache is not None
        cache.keep()
    assert len(list(folder.iterdir())) == 2


def test_tensorrt_rtx_and_a_machine_without_a_gpu_have_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_cache(SimpleNamespace(__name__="tensorrt_rtx", __version__="1.6"), Config()) is None
    monkeypatch.setattr(nvidia_driver, "gpus", list)
    assert open_cache(TENSORRT, Config()) is None


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    TimingCache(Config(), tmp_path / "tensorrt.cache").keep()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    TimingCache(Config(), tmp_path / "gone" / "tensorrt.cache").keep()
    assert list(tmp_path.iterdir()) == []
