"""Interpreters as children: their results, and the clean-up after every kind of crash and hang.

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

from rewriter.ir import children
from rewriter.ir.errors import EngineError, NativeError


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
    if children.FORKS:
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


def call(
    function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0, **limits: Any
) -> tuple[Any, str]:
    return children.run(function, *arguments, doing="the work", limit_s=limit_s, **limits)


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
    assert call(add, 2, 3) == ({"sum": 5}, "adding\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the fault needs glibc")
def test_output_of_c_code_is_in_the_log() -> None:
    assert "from C" in call(print_from_c, "from C")[1]


def test_only_the_end_of_a_long_log_is_kept() -> None:
    _, log = call(print_much, 4 * children.LOG_BYTES)
    assert len(log) == children.LOG_BYTES
    assert log.endswith("the end")


def test_environment_variables_are_added() -> None:
    assert call(read_env, "REWRITER_TEST", env={"REWRITER_TEST": "7"})[0] == {"value": "7"}


@pytest.mark.parametrize(
    ("function", "arguments", "cause"),
    [
        pytest.param(segfault, (), "SIGSEGV", id="it kills itself with SIGSEGV"),
        pytest.param(read_address_zero, (), "SIGSEGV", id="C reads address zero"),
        pytest.param(leave, (3,), "exit code 3", id="a library calls exit"),
    ],
)
def test_a_crash_is_an_error(function: Callable[..., None], arguments: tuple[int, ...], cause: str) -> None:
    with pytest.raises(NativeError) as caught:
        call(function, *arguments)
    assert (caught.value.cause, caught.value.what) == (cause, f"the work crashed ({cause})")


def test_the_log_of_a_crash_has_the_output_and_the_python_stack() -> None:
    with pytest.raises(NativeError) as caught:
        call(segfault)
    assert "about to crash" in caught.value.log
    assert "in segfault" in caught.value.log


def test_a_hang_and_its_children_are_killed_at_the_time_limit(tmp_path: Path) -> None:
    pids, start = tmp_path / "pids", time.monotonic()
    with pytest.raises(NativeError, match="no result within 3 s") as caught:
        call(hang, str(pids), limit_s=3.0)
    assert 2.5 <= time.monotonic() - start < 30
    assert caught.value.cause == "timeout"
    assert "hanging" in caught.value.log
    assert all(gone(int(pid)) for pid in appears(pids).split())


def test_processes_left_by_a_finished_child_are_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    call(leave_grandchild, str(pid))
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(allocate, "memory ran out", id="Python raises MemoryError"),
        pytest.param(allocate_in_c, "SIGABRT", id="C++ aborts"),
    ],
)
def test_memory_is_limited(function: Callable[[int], object], words: str) -> None:
    with pytest.raises(NativeError, match=words):
        call(function, 8 << 30, memory_bytes=4 << 30)


def test_an_allocation_within_the_limit_succeeds() -> None:
    assert call(allocate, 1 << 20, memory_bytes=4 << 30)[0] == {"allocated": 1 << 20}


def test_an_exception_is_returned_with_its_hint() -> None:
    with pytest.raises(EngineError) as caught:
        call(refuse)
    assert vars(caught.value) == {"what": "no library", "where": "model.onnx", "hint": "install one"}


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
    with pytest.raises(NativeError, match=words):
        call(function, *arguments)


def test_ctrl_c_kills_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        appears(pids)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        call(hang, str(pids), limit_s=60)
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
