"""Runs a function in a child process, so that a crash, a hang or a lack of memory is a result.

Native code (ONNX parsers, engine builders) may end its process, but must not end the user's. Order and
answer are pickled into a folder of this user; the output of the child's Python and C++ is the log. The child
ends when its stdin closes, which happens when the parent ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rewriter import walls

ChildStatus = Literal["ok", "error", "crashed", "timeout"]

LOG_BYTES = 256 * 1024
"""Size of the end of a child's output that is kept: a builder can print gigabytes."""

GRACE_S = 5.0
"""Time limit for reading the rest of a dead child's output."""

POLL_S = 0.02
"""Interval of checks whether a child has ended; small against the start of an interpreter."""

_BOOTSTRAP = (
    "import pickle, sys; order = open(sys.argv[1], 'rb'); sys.path[:] = pickle.load(order); "
    "from rewriter.engines.child_process import serve; serve(order)"
)
"""The child has this process's import path, so that `rewriter` need not be installed."""


@dataclass(frozen=True)
class ChildResult:
    """The end of a child process.

    Attributes:
        status: `ok`: the function returned; `error`: it raised; `crashed`: the process ended
            without an answer; `timeout`: it was killed because its time was up.
        result: What the function returned; for `error` a dict of `type`, `message`, `where` and
            `hint`; else None.
        log: End of what the child printed, at most `LOG_BYTES`.
        seconds: Wall time, the start of the interpreter included.
        signal: Name of the signal that ended the child, e.g. `SIGSEGV`; None if none did.
        exit_code: Its exit code; None if a signal ended it.
    """

    status: ChildStatus
    result: Any
    log: str
    seconds: float
    signal: str | None = None
    exit_code: int | None = None

    @property
    def summary(self) -> str:
        """One line for the user."""
        if self.status == "ok":
            return f"done in {self.seconds:.1f} s"
        if self.status == "timeout":
            return f"no result after {self.seconds:.0f} s, so the process was killed"
        if self.status == "error":
            return f"{self.result['type']}: {self.result['message']}"
        cause = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        hint = ", which the kernel sends when memory runs out" if self.signal == "SIGKILL" else ""
        return f"the process ended without a result ({cause}{hint})"


def run_in_child(
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
) -> ChildResult:
    """Call a function in a child process that leads a process group of its own.

    Args:
        function: A function of a module. Its arguments and its result are pickled.
        timeout_s: Wall time after which the child and its own children are killed.
        env: Environment variables on top of the caller's.
        memory_bytes: Limit on the child's address space (RLIMIT_AS; not on Windows). CUDA reserves
            far more addresses than it uses: leave it out where a GPU is used.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rewriter-child-") as folder:
        order, answer = Path(folder) / "order", Path(folder) / "answer"
        parts = sys.path, (answer, memory_bytes), (function, arguments)
        order.write_bytes(b"".join(map(pickle.dumps, parts)))
        with _child(order, env) as process:
            tail = _Tail(process)
            ended = _wait(process, start + timeout_s)
            _end(process)
            log = tail.text()
        answered = pickle.loads(answer.read_bytes()) if answer.exists() else None
    return _verdict(process.returncode, answered, ended, log, time.perf_counter() - start)


@contextlib.contextmanager
def _child(order: Path, env: Mapping[str, str] | None) -> Iterator[subprocess.Popen[bytes]]:
    """A started child that is gone afterwards whatever happens, KeyboardInterrupt included."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOTSTRAP, str(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """True if the child ended before `deadline` (time.perf_counter)."""
    while not _has_ended(process):
        if time.perf_counter() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):  # Windows, older macOS
        return process.poll() is not None
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT  # not reaped, so that its group's id stays its own
    return os.waitid(os.P_PID, process.pid, flags) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child's whole group, if the child was not reaped yet, and reap it."""
    if process.returncode is None:
        if sys.platform == "win32":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Tail:
    """Reads a child's output continuously, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 65536):
            self._kept = (self._kept + chunk)[-LOG_BYTES:]

    def text(self) -> str:
        self._thread.join(GRACE_S)
        return self._kept.decode(errors="replace")


def _verdict(
    returncode: int, answered: tuple[ChildStatus, Any] | None, ended: bool, log: str, seconds: float
) -> ChildResult:
    if answered is not None:
        return ChildResult(*answered, log, seconds, exit_code=0)
    name = _signal_name(-returncode) if returncode < 0 else None
    status: ChildStatus = "crashed" if ended else "timeout"
    return ChildResult(status, None, log, seconds, name, None if name else returncode)


def _signal_name(number: int) -> str:
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


# -- in the child ------------------------------------------------------------------------------


def serve(order: BinaryIO) -> None:
    """Carry out one order and end the process, without the destructors of native libraries."""
    faulthandler.enable()
    walls.enter()
    os.environ.update(walls.QUIET)
    answer, memory_bytes = pickle.load(order)
    _limit_memory(memory_bytes)
    if walls.WALLED:
        walls.end_with_parent(sys.stdin.fileno(), -os.getpgrp())
    else:
        threading.Thread(target=_die_with_parent, daemon=True).start()
    complete = answer.with_suffix(".part")
    complete.write_bytes(_carry_out(order))
    complete.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _carry_out(order: BinaryIO) -> bytes:
    try:
        function, arguments = pickle.load(order)
        return pickle.dumps(("ok", function(*arguments)))
    except BaseException as error:
        traceback.print_exc()
        result = {"type": type(error).__name__, "message": getattr(error, "what", None) or str(error)}
        result |= {key: getattr(error, key, None) for key in ("where", "hint")}
        return pickle.dumps(("error", result))


def _limit_memory(limit: int | None) -> None:
    if limit is not None and sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _die_with_parent() -> None:
    """Wait for the end of stdin: a build must not continue without its parent."""
    while os.read(0, 4096):
        pass
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
