"""Files of caches and the turn on a GPU: none that is missing or damaged stops anything."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.caches import VARIABLE, gpu_turn, timing_cache, user_cache
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


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: Gpu("NVIDIA L4", (8, 9), (13, 0)))
    return tmp_path / "cache"


def found_by_a_build(name: str = "tensorrt", version: str = "10.13.3") -> bytes:
    config = Timings()
    with timing_cache(SimpleNamespace(__name__=name, __version__=version), config):
        return config.cache


def test_the_next_build_uses_the_timings_of_the_last(folder: Path) -> None:
    assert [found_by_a_build(), found_by_a_build(), found_by_a_build(version="11.0.0")] == [
        b"",
        b" and more",
        b"",
    ]
    names = sorted(file.name for file in (folder / "timing").iterdir())
    assert names == ["tensorrt_10.13.3_NVIDIA_L4.cache", "tensorrt_11.0.0_NVIDIA_L4.cache"]


def test_rtx_and_a_machine_without_a_gpu_have_no_timings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_by_a_build("tensorrt_rtx")
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: None)
    found_by_a_build()
    assert not folder.exists()


def test_a_file_that_cannot_be_used_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert found_by_a_build() == b""
    assert list((folder / "timing").iterdir()) == []
    monkeypatch.setenv(VARIABLE, __file__)
    assert found_by_a_build() == b""


def test_the_cache_folder_can_be_chosen(folder: Path) -> None:
    path = user_cache("timing", "tensorrt 10.3 NVIDIA H200/0.cache")
    assert path == folder / "timing" / "tensorrt_10.3_NVIDIA_H200_0.cache"
    assert path.parent.is_dir()


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


def test_a_turn_is_waited_for_a_while_and_a_killed_process_gives_it_back(
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


def test_nothing_waits_where_no_lock_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, __file__)
    with gpu_turn():
        pass
