"""Kernels that TensorRT-RTX compiled: a file that is missing, damaged or cannot be written stops nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rewriter.runtime.engines.runtime_cache import RuntimeCache, open_cache


class Cache:
    """The two calls of IRuntimeCache; it refuses what it did not write."""

    def __init__(self) -> None:
        self.kernels = b"kernels"

    def deserialize(self, blob: bytes) -> bool:
        if blob.startswith(b"kernels"):
            self.kernels = blob + b" and more"
        return blob.startswith(b"kernels")

    def serialize(self) -> bytes:
        return self.kernels


class Config:
    """The two calls of IRuntimeConfig for its cache."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        return self.takes


def _stored(path: Path) -> bytes:
    cache = open_cache(Config(), path)
    assert cache is not None
    cache.keep()
    return path.read_bytes()


def test_the_next_engine_finds_the_kernels_of_the_last(tmp_path: Path) -> None:
    assert _stored(tmp_path / "a") == b"kernels"
    assert _stored(tmp_path / "a") == b"kernels and more"


def test_a_file_that_the_library_refuses_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"of another GPU")
    assert _stored(tmp_path / "a") == b"kernels"


def test_none_is_used_unless_wanted_and_taken(tmp_path: Path) -> None:
    assert open_cache(Config(), None) is None
    assert open_cache(Config(takes=False), tmp_path / "a") is None
    assert open_cache(SimpleNamespace(), tmp_path / "a") is None


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    RuntimeCache(Cache(), tmp_path / "a").keep()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_or_written_is_ignored(tmp_path: Path) -> None:
    cache = open_cache(Config(), tmp_path)  # a folder
    assert cache is not None
    cache.keep()
    assert list(tmp_path.iterdir()) == []


def test_engines_of_a_process_share_a_cache_as_long_as_one_of_them_lives(tmp_path: Path) -> None:
    first = open_cache(Config(), tmp_path / "a")
    assert first is not None
    assert open_cache(Config(), tmp_path / "a") is first
    assert open_cache(Config(), tmp_path / "b") is not first
    first.keep()
    del first
    assert _stored(tmp_path / "a") == b"kernels and more"
