"""Files of caches and the turn on a GPU: none that is missing or damaged stops anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.caches import VARIABLE, LibraryCache, gpu_turn, kernel_cache, timing_cache
from rewriter.runtime.engines.nvidia_driver import Gpu


class Timings:
    """The three calls of TensorRT's builder config for its cache, which is bytes here."""

    cache = b""

    def create_timing_cache(self, stored: bytes) -> bytes:
        return stored

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b" and more")


class Kernels:
    """The two calls of IRuntimeCache; it refuses what it did not write."""

    kernels = b"kernels"

    def deserialize(self, blob: bytes) -> bool:
        if blob.startswith(b"kernels"):
            self.kernels = blob + b" and more"
        return blob.startswith(b"kernels")

    def serialize(self) -> bytes:
        return self.kernels


def runtime_config(takes: bool = True) -> Any:
    """The two calls of IRuntimeConfig for its cache."""
    return SimpleNamespace(create_runtime_cache=Kernels, set_runtime_cache=lambda _: takes)


def library(name: str = "tensorrt", version: str = "10.13.3") -> Any:
    return SimpleNamespace(__name__=name, __version__=version)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(nvidia_driver, "gpus", lambda: [Gpu("NVIDIA L4", (8, 9), (13, 0))])
    return tmp_path / "cache"


def test_the_next_build_uses_the_timings_of_the_last(folder: Path) -> None:
    for before in (b"", b" and more"):
        config = Timings()
        cache = timing_cache(library(), config)
        assert cache is not None and config.cache == before
        cache.keep()
    other = timing_cache(library(version="11.0.0"), Timings())
    assert other is not None
    other.keep()
    names = sorted(file.name for file in (folder / "timing").iterdir())
    assert names == ["tensorrt_10.13.3_NVIDIA_L4.cache", "tensorrt_11.0.0_NVIDIA_L4.cache"]


def test_tensorrt_rtx_and_a_machine_without_a_gpu_have_no_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing_cache(library("tensorrt_rtx"), Timings()) is None
    monkeypatch.setattr(nvidia_driver, "gpus", list)
    assert timing_cache(library(), Timings()) is None


def _stored(path: Path) -> bytes:
    cache = kernel_cache(runtime_config(), path)
    assert cache is not None
    cache.keep()
    return path.read_bytes()


def test_the_next_engine_finds_the_kernels_of_the_last_unless_they_are_refused(
    tmp_path: Path,
) -> None:
    assert _stored(tmp_path / "a") == b"kernels"
    assert _stored(tmp_path / "a") == b"kernels and more"
    (tmp_path / "a").write_bytes(b"of another GPU")
    assert _stored(tmp_path / "a") == b"kernels"


def test_no_kernels_are_kept_unless_wanted_and_taken(tmp_path: Path) -> None:
    assert kernel_cache(runtime_config(), None) is None
    assert kernel_cache(runtime_config(takes=False), tmp_path / "a") is None
    assert kernel_cache(SimpleNamespace(), tmp_path / "a") is None


def test_engines_of_a_process_share_a_cache_as_long_as_one_of_them_lives(tmp_path: Path) -> None:
    first = kernel_cache(runtime_config(), tmp_path / "a")
    assert first is not None
    assert kernel_cache(runtime_config(), tmp_path / "a") is first
    assert kernel_cache(runtime_config(), tmp_path / "b") is not first
    first.keep()
    del first
    assert _stored(tmp_path / "a") == b"kernels and more"


def test_a_file_that_cannot_be_read_or_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = kernel_cache(runtime_config(), tmp_path)  # a folder
    assert cache is not None
    cache.keep()
    LibraryCache(Kernels, tmp_path / "gone" / "a.cache").keep()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    LibraryCache(Kernels, tmp_path / "a.cache").keep()
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys
from rewriter.runtime.engines.caches import gpu_turn
with gpu_turn():
    print("mine", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder() -> Iterator[Any]:
    """A process that asks for the turn, and keeps it until its input ends or it is killed."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_second_process_waits_for_the_first() -> None:
    with holder() as second:
        with gpu_turn():
            second.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(2.0)
        assert second.stdout.read() == "mine\n"


def test_no_turn_is_waited_for_without_end_and_a_killed_process_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with holder() as first:
        assert first.stdout.readline() == "mine\n"
        with monkeypatch.context() as patch:
            patch.setattr("rewriter.runtime.engines.caches.MOST_S", 0.2)
            with gpu_turn():
                assert first.poll() is None
        first.kill()
        with gpu_turn():
            pass


def test_nothing_waits_where_no_lock_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with gpu_turn():
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
