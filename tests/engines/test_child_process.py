"""The child process: its results, and the clean-up after every kind of crash and hang.

The faults are real: the functions below run in the child, which imports this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rewriter import walls
from rewriter.engines import child_process
from rewriter.engines.child_process import ChildResult, run_in_child
from rewriter.errors import EngineError


def add(a: int, b: int) -> dict[str, int]:
    sys.stdout.write("adding\n")
    return {"sum": a + b}


def print_from_c(text: str) -> dict[str, int]:
    libc = ctypes.CDLL(None)
    libc.puts(text.encode())
    libc.fflush(None)
    return {}


def print_much(count: int) -> dict[str, int]:
    sys.stdout.write("x" * count + "the end")
    return {}


def segfault() -> None:
    os.write(1, b"about to crash\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def read_address_zero() -> None:
    ctypes.string_at(0)


def leave(code: int) -> None:
    os._exit(code)


def hang(pid_file: str) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(f"{os.getpid()} {grandchild.pid}")
    os.write(1, b"hanging\n")
    if walls.WALLED:
        ctypes.PyDLL(None).sleep(600)  # with Python's lock, as native code may hang
    time.sleep(600)


def allocate(count: int) -> dict[str, int]:
    return {"allocated": len(bytearray(count))}


def allocate_in_c(count: int) -> dict[str, bool]:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if libc.malloc(ctypes.c_size_t(count)) is None:
        libc.abort()  # what C++ does with an uncaught std::bad_alloc
    return {"allocated": True}


def refuse() -> None:
    raise EngineError("no library", where="model.onnx", hint="install one")


def misbehave() -> dict[str, Any]:
    return {"not to be pickled": lambda: None}


def read_env(name: str) -> dict[str, str | None]:
    return {"value": os.environ.get(name)}


def leave_grandchild(pid_file: str) -> dict[str, int]:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(grandchild.pid))
    return {}


class Unreadable:
    """Arguments that the child cannot make again."""

    def __reduce__(self) -> Any:
        return import_module, ("rewriter.no_such_thing",)


def call(function: Callable[..., object], *arguments: Any, timeout_s: float = 60.0) -> ChildResult:
    return run_in_child(function, *arguments, timeout_s=timeout_s)


def is_running(pid: int) -> bool:
    """False for a zombie, too: in a container, nobody may reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def appears(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.read_text()


def test_the_result_and_the_log_are_returned() -> None:
    result = call(add, 2, 3)
    assert (result.status, result.result, result.exit_code) == ("ok", {"sum": 5}, 0)
    assert result.log == "adding\n"
    assert 0 < result.seconds < 60


@pytest.mark.skipif(sys.platform != "linux", reason="the fault needs glibc")
def test_output_of_c_code_is_in_the_log() -> None:
    assert "from C" in call(print_from_c, "from C").log


def test_only_the_end_of_a_long_log_is_kept() -> None:
    log = call(print_much, 4 * child_process.LOG_BYTES).log
    assert len(log) == child_process.LOG_BYTES
    assert log.endswith("the end")


def test_environment_variables_are_added() -> None:
    result = run_in_child(read_env, "REWRITER_TEST", timeout_s=60, env={"REWRITER_TEST": "7"}).result
    assert result == {"value": "7"}


@pytest.mark.parametrize(
    ("function", "arguments", "signal_name", "exit_code"),
    [
        pytest.param(segfault, (), "SIGSEGV", None, id="it kills itself with SIGSEGV"),
        pytest.param(read_address_zero, (), "SIGSEGV", None, id="C reads address zero"),
        pytest.param(leave, (3,), None, 3, id="a library calls exit"),
    ],
)
def test_a_crash_is_a_result(
    function: Callable[..., None], arguments: tuple[int, ...], signal_name: str | None, exit_code: int | None
) -> None:
    result = call(function, *arguments)
    assert (result.status, result.result) == ("crashed", None)
    assert (result.signal, result.exit_code) == (signal_name, exit_code)
    assert (signal_name or f"exit code {exit_code}") in result.summary


def test_the_log_of_a_crash_has_the_output_and_the_python_stack() -> None:
    log = call(segfault).log
    assert "about to crash" in log
    assert "in segfault" in log


def test_a_hang_and_its_children_are_killed_at_the_time_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result = call(hang, str(pids), timeout_s=3.0)
    assert (result.status, result.signal) == ("timeout", "SIGKILL")
    assert 3.0 <= result.seconds < 30
    assert "hanging" in result.log
    assert "killed" in result.summary
    assert all(gone(int(pid)) for pid in appears(pids).split())


def test_processes_left_by_a_finished_child_are_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    result = call(leave_grandchild, str(pid))
    assert result.status == "ok"
    assert result.seconds < 30  # the grandchild holds the log's pipe open
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        pytest.param(allocate, "error", "MemoryError", id="Python raises MemoryError"),
        pytest.param(allocate_in_c, "crashed", "SIGABRT", id="C++ aborts"),
    ],
)
def test_memory_is_limited(function: Callable[[int], object], status: str, words: str) -> None:
    result = run_in_child(function, 8 << 30, timeout_s=60, memory_bytes=4 << 30)
    assert result.status == status
    assert words in result.summary


def test_an_allocation_within_the_limit_succeeds() -> None:
    result = run_in_child(allocate, 1 << 20, timeout_s=60, memory_bytes=4 << 30).result
    assert result == {"allocated": 1 << 20}


def test_an_exception_is_returned_with_its_hint() -> None:
    result = call(refuse)
    assert result.status == "error"
    assert result.result == {
        "type": "EngineError",
        "message": "no library",
        "where": "model.onnx",
        "hint": "install one",
    }
    assert "Traceback" in result.log


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        pytest.param(misbehave, (), "pickle", id="a result that cannot be pickled"),
        pytest.param(len, (Unreadable(),), "no_such_thing", id="an argument that cannot be read"),
    ],
)
def test_an_invalid_job_is_an_error(
    function: Callable[..., object], arguments: tuple[object, ...], words: str
) -> None:
    result = call(function, *arguments)
    assert result.status == "error"
    assert words in result.summary


def test_ctrl_c_kills_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        appears(pids)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        call(hang, str(pids), timeout_s=60)
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_child_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as t; t.call(t.hang, {str(pids)!r})"
    parent = subprocess.Popen([sys.executable, "-c", program])
    family = [int(pid) for pid in appears(pids).split()]
    assert all(is_running(pid) for pid in family)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in family)
