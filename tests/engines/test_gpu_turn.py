"""Measurements on a GPU wait for each other, whatever happens to those that hold the turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rewriter.runtime.engines.gpu_turn import gpu_turn
from rewriter.runtime.engines.user_cache import VARIABLE

HOLDER = """
import sys
from rewriter.runtime.engines.gpu_turn import gpu_turn
with gpu_turn():
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def holder() -> subprocess.Popen[str]:
    """A process that asks for the turn and keeps it until it is told or killed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_second_process_waits_for_the_first() -> None:
    with holder() as second:
        assert second.stdin is not None
        assert second.stdout is not None
        with gpu_turn():
            second.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(3.0)
        assert second.stdout.read() == "mine\n"


def test_a_killed_process_gives_its_turn_back() -> None:
    with holder() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "mine\n"
        first.kill()
        with gpu_turn():
            pass


def test_nothing_waits_where_no_lock_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with gpu_turn():
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_turn_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.runtime.engines.gpu_turn.MOST_S", 0.2)
    with holder() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "mine\n"
        with gpu_turn():
            assert first.poll() is None
        first.kill()
