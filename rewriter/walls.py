"""Runs native code on a user's model in a child process, so that its crash, hang or greed is an error.

    inferred = walls.call(infer, proto_bytes, doing="shape inference")

The child is a fork of this process: it starts in milliseconds, has the libraries that are imported here, and
shares this process's memory, weights included, without a copy. `call` keeps one child warm for all calls.
`Walled` gives an object a child of its own, such as a session that holds a model.

Large arrays travel through shared memory. A child that crashes or exceeds its limits is gone: the call raises
`NativeError`, and the next call starts another child. There are walls on Linux alone. Forks are not safe on
macOS and do not exist on Windows; there the code runs in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from rewriter.errors import NativeError

WALLED = sys.platform == "linux"

CALL_S = 60.0
"""Wall time of one call in seconds; shape inference of 50,000 nodes needs two."""

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""Environment in which ONNX Runtime keeps no records of the models that it runs, and opens no connection."""

LEAST_BYTES = 4 << 30
"""Address space that a child may always take on top of this process's own."""

SHARE = 0.9
"""Share of the machine's available memory that a child may take."""

ALARM_S = 10.0
"""How much later than its limit a child ends itself, should its parent be stopped and not end it."""

PATIENCE = 10
"""Times its limit that a child may take which waits for a processor: on a busy machine it is not to blame."""

POLL_S = 0.5
"""How often a child whose time is up is looked at."""

INLINE_BYTES = 1 << 16
"""Larger messages go through shared memory."""

_HEAD = struct.Struct("<QI")
"""Bytes of a message, and the number of buffers that come with it."""

UNKNOWN = "a native library raised it: run again with a smaller model to find the node"

T = TypeVar("T")

inside = False
"""True in a child: what it runs is behind a wall already."""


class Walled:
    """A child process that holds one object and calls its methods; a context manager.

    Args:
        make: Makes the object, in the child.
        doing: What the child does, for messages: `a run on ONNX Runtime`.
        limit_s: Wall time of `make` and, unless given there, of each call.

    Raises:
        NativeError: the child did not survive `make`, or exceeded a limit. Exceptions are passed on.
    """

    def __init__(self, make: Callable[[], Any], *, doing: str, limit_s: float | None = None) -> None:
        self.doing = doing
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._log = _scratch("rewriter-log")
        mine, its = socket.socketpair()
        watched, self._lifeline = os.pipe()
        self._pid = _fork(make, its, watched, self._log, self._time())
        its.close()
        os.close(watched)
        self._socket: socket.socket | None = mine
        _children.add(self)
        try:
            self._answer(self._time())
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, limit_s: float | None = None, **keywords: Any) -> Any:
        """Call a method of the object.

        Raises:
            NativeError: the child crashed or exceeded a limit. Exceptions of the method are passed on.
        """
        seconds = self._time() if limit_s is None else limit_s
        with self._lock:
            try:
                _send(self._opened(), (method, arguments, keywords, seconds))
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended() from None
            except KeyboardInterrupt:
                self.close()
                raise
            return self._answer(seconds)

    @property
    def alive(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        """End the child."""
        if self._socket is not None:
            self._let_go()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def disown(self) -> None:
        """Let go of the child without ending it: it belongs to the process that this one is a fork of."""
        self._lock = threading.Lock()  # a thread of the other process may have held it
        if self._socket is not None:
            self._let_go()

    def _let_go(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        os.close(self._log)
        os.close(self._lifeline)

    def _time(self) -> float:
        return CALL_S if self._limit_s is None else self._limit_s

    def _opened(self) -> socket.socket:
        if self._socket is None:
            raise BrokenPipeError
        return self._socket

    def _answer(self, seconds: float) -> Any:
        """Wait for the child's answer; the child is ended if there is none, KeyboardInterrupt included."""
        try:
            connection = self._opened()
            self._await(connection, seconds)
            good, value = _receive(connection)
        except TimeoutError:
            raise self._ended(after_s=seconds) from None
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise self._ended() from None
        except BaseException:
            self.close()
            raise
        if good:
            return value
        raise value

    def _await(self, connection: socket.socket, seconds: float) -> None:
        """Wait until there is an answer.

        Raises:
            TimeoutError: the child had its time, on a processor or asleep.
        """
        if not math.isfinite(seconds):
            return
        before = _processor_s(self._pid)
        if _readable(connection, seconds):
            return
        for _ in range(int((PATIENCE - 1) * seconds / POLL_S)):
            if _processor_s(self._pid) - before >= seconds or not _wants_a_processor(self._pid):
                break
            if _readable(connection, POLL_S):
                return
        raise TimeoutError

    def _ended(self, after_s: float | None = None) -> NativeError:
        """The error for a child that is gone, or is ended now because its time was up."""
        if self._socket is None:
            return NativeError(f"{self.doing}: its process is gone", hint="start again: it crashed before")
        if after_s is not None:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        log = _tail(self._log)
        self.close()
        if after_s is not None:
            return NativeError(
                f"{self.doing} gave no result within {after_s:.0f} s, and was stopped",
                hint="the model may hold a loop without an end, or grow without measure when it is expanded",
                cause="timeout",
                log=log,
            )
        code = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = "the model makes a native library fail: look at the attributes and shapes of its nodes"
        return NativeError(f"{self.doing} crashed ({name})", hint=hint, cause=name, log=log)

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def __enter__(self) -> Walled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enter() -> None:
    """Mark this process as a child, whose own calls need no other."""
    global inside  # a process is behind a wall from its start to its end
    inside = True


class _Caller:
    """The object of the warm child."""

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return function(*arguments)


_idle: list[Walled] = []
"""Warm children that nobody uses at the moment: one, or as many as threads called at once."""


_children: weakref.WeakSet[Walled] = weakref.WeakSet()
"""All children of this process."""


def _disown_all() -> None:
    """Two processes that write to one child would read each other's answers."""
    for child in _children:
        child.disown()
    _children.clear()
    _idle.clear()


if WALLED:
    os.register_at_fork(after_in_child=_disown_all)


def call(function: Callable[..., T], *arguments: Any, doing: str, limit_s: float | None = None) -> T:
    """Call a function of a module in the warm child; arguments and result are pickled.

    Args:
        doing: What it does, for messages: `shape inference`.
        limit_s: Wall time; None: `CALL_S`.

    Raises:
        NativeError: it crashed, or exceeded the limits of time and memory.
    """
    if inside or not WALLED:
        return function(*arguments)
    child = _idle.pop() if _idle else Walled(_Caller, doing="a new process")
    child.doing = doing
    try:
        return cast(
            "T", child.call("call", function, arguments, limit_s=CALL_S if limit_s is None else limit_s)
        )
    finally:
        if child.alive:
            _idle.append(child)


def fresh(function: Callable[[], T], *, doing: str) -> T:
    """Call a function in a child of its own, which has what is imported here by now.

    Raises:
        NativeError: it crashed, or exceeded the limits of time and memory.
    """
    if inside or not WALLED:
        return function()
    with Walled(_Caller, doing=doing) as child:
        return cast("T", child.call("call", function, ()))


@atexit.register
def close() -> None:
    """End the warm children; the next call starts another one."""
    while _idle:
        _idle.pop().close()


# -- the start of a child ----------------------------------------------------------------------


def _fork(make: Callable[[], Any], its: socket.socket, watched: int, log: int, limit_s: float) -> int:
    limit = _address_space() + max(LEAST_BYTES, int(SHARE * available_memory()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        pid = os.fork()
    if pid:
        return pid
    try:
        _settle(its, watched, log, limit)
        _serve(make, its, limit_s)
    finally:
        os._exit(1)


def _settle(its: socket.socket, watched: int, log: int, limit: int) -> None:
    """Makes a fork a process of its own: its files, its signals, its limits."""
    import resource

    enter()
    os.environ.update(QUIET)
    gc.freeze()  # objects of the parent must not be collected: finalizers would delete its files
    os.setpgid(0, 0)  # Ctrl-C is the parent's
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # a thread that draws progress may hold the locks of the old ones for ever: here it does not run
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    kept = {0, 1, 2, its.fileno(), watched}
    for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    end_with_parent(watched, os.getpid())
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(make: Callable[[], Any], its: socket.socket, limit_s: float) -> None:
    """Makes the object and calls its methods until the parent closes the connection."""
    made: Any = None

    def start() -> None:
        nonlocal made
        made = make()

    if not _carry_out(its, start, limit_s):
        return
    while True:
        try:
            method, arguments, keywords, seconds = _receive(its)
        except (EOFError, ConnectionResetError):
            return
        _carry_out(its, lambda: getattr(made, method)(*arguments, **keywords), seconds)  # noqa: B023 - called here


def _carry_out(its: socket.socket, work: Callable[[], Any], seconds: float) -> bool:
    """Does one piece of work and sends its result or its exception; True if there was none."""
    if math.isfinite(seconds):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds + ALARM_S)
    try:
        answer = True, work()
    except MemoryError:
        answer = False, NativeError("memory ran out", hint="a tensor of the model may be larger than memory")
    except Exception as error:
        answer = False, error
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        _send(its, answer)
    except (pickle.PicklingError, TypeError, AttributeError):
        _send(its, (False, NativeError(f"{type(answer[1]).__name__}: {answer[1]}", hint=UNKNOWN)))
    return answer[0]


def end_with_parent(lifeline: int, owner: int) -> None:
    """Lets the kernel end this process as soon as the parent ends, even if native code holds Python's lock.

    It sends SIGIO, whose default action is that, when the other end of the pipe closes (O_ASYNC of open(2)).
    PR_SET_PDEATHSIG would come when the thread ends that started this process. Linux alone.

    Args:
        lifeline: A pipe whose other end the parent holds. Nothing may come through it, since the kernel sends
            the same signal for data, and may do so after the data was read.
        owner: The process to end, or the negative number of a process group.
    """
    import fcntl
    import select

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, owner)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline, 0)
    if closed.poll(0):  # it had closed before
        os._exit(1)


# -- messages ----------------------------------------------------------------------------------


def _send(connection: socket.socket, message: object) -> None:
    """Sends a pickled object; what is large goes through a file in memory that both map."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(raw)}Q", *(part.nbytes for part in raw))
    connection.settimeout(None)
    connection.sendall(_HEAD.pack(len(body), len(raw)) + sizes)
    parts = [memoryview(body), *raw]
    if sum(part.nbytes for part in parts) <= INLINE_BYTES:
        for part in parts:
            connection.sendall(part)
        return
    shared = _scratch("rewriter-message")
    try:
        for part in parts:
            _write(shared, part)
        socket.send_fds(connection, [b"m"], [shared])
    finally:
        os.close(shared)


def _receive(connection: socket.socket) -> Any:
    """The next object; its arrays are views of the memory that they came in."""
    length, count = _HEAD.unpack(_exactly(connection, _HEAD.size))
    sizes = struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))
    total = length + sum(sizes)
    if total <= INLINE_BYTES:
        content = memoryview(_exactly(connection, total))
    else:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise EOFError
        try:
            content = memoryview(mmap.mmap(descriptors[0], total))
        finally:
            os.close(descriptors[0])
    buffers, start = [], length
    for size in sizes:
        buffers.append(content[start : start + size])
        start += size
    return pickle.loads(content[:length], buffers=buffers)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return content


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _scratch(name: str) -> int:
    """A file in memory that goes when the last process closes it."""
    return os.memfd_create(name)


def _tail(descriptor: int, size: int = 4096) -> str:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    return os.pread(descriptor, size, max(0, end - size)).decode(errors="replace")


# -- what a child does ---------------------------------------------------------------------------


def _readable(connection: socket.socket, seconds: float) -> bool:
    return bool(select.select([connection], [], [], seconds)[0])


def _processor_s(pid: int) -> float:
    """Seconds on a processor, of all threads."""
    fields = _after_name(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)


def _wants_a_processor(pid: int) -> bool:
    """True if a thread runs, waits for its turn, or waits for a disk."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    return any(_after_name(task)[0] in "RD" for task in tasks)


def _after_name(stat: Path) -> list[str]:
    """The fields after the name, which may hold spaces; of an ended process, those of one that sleeps."""
    with contextlib.suppress(OSError):
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return ["S", *["0"] * 12]


# -- limits ------------------------------------------------------------------------------------


def _address_space() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE


def available_memory() -> int:
    """Bytes of memory that the machine can give without swapping; 0 if the system does not tell."""
    with contextlib.suppress(OSError, StopIteration), Path("/proc/meminfo").open(encoding="ascii") as table:
        return next(int(line.split()[1]) for line in table if line.startswith("MemAvailable:")) * 1024
    return 0
