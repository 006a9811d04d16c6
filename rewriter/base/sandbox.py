"""Runs native code on a user's model in a worker process, so that its crash, hang or greed is an error.

    facts = sandbox.call(infer, proto_bytes, doing="shape inference")
    report, log = sandbox.run(build_here, path, options, doing="the TensorRT build", limit_s=600)

`call` uses a fork of this process, kept warm: it starts in milliseconds and shares this process's memory.
`worker` is such a fork with an object of its own. `run` starts an interpreter, which can use CUDA and can
have another environment. All three are a `Worker`: a process that answers calls through a socket.

A process whose other threads may compute is never forked: OpenBLAS, which NumPy has, ends its threads before
a fork, so that a product in another thread would wait for them forever; and a lock that another thread holds
stays locked in the child. There, workers are interpreters, which start in a second and get copies of weights.

A worker that crashes or exceeds its limits is gone: the call raises `NativeError`, and the next one starts
another. Forks are used on Linux only: they are not safe on macOS and do not exist on Windows, where `call`
and `worker` run the code in this process (`InProcessWorker`).
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from rewriter.base.errors import NativeError, RewriterError
from rewriter.base.stopwatch import OutOfTimeError, seconds_left, without_deadline

FORKS = sys.platform == "linux"

CALL_S = 60.0  # wall time of one call in seconds; shape inference of 50,000 nodes needs two

QUIET = {"ORT_DISABLE_TELEMETRY": "1"}
"""Environment in which ONNX Runtime keeps no records of the models that it runs, and opens no connection."""

LEAST_BYTES = 4 << 30  # address space that a fork may always take on top of this process's own

SHARE = 0.9  # share of the machine's available memory that a fork may take

LOG_BYTES = 256 * 1024
"""Size of the end of a worker's output that is kept: a builder can print gigabytes."""

WATCHERS = frozenset(
    """IPython.core.history ipykernel.control ipykernel.heartbeat ipykernel.iostream ipykernel.parentpoller
    ipykernel.shellchannel rewriter.report.progress rich.live tqdm._monitor""".split()
)
"""Modules whose threads draw or pass messages on, and compute nothing: a process forks beside them."""

UNKNOWN = "a native library raised it: run again with a smaller model to find the node"

T = TypeVar("T")

inside = False  # True in a worker: its own calls need no other


class Worker:
    """A worker process that holds one object and calls its methods, or calls functions.

    Raises:
        NativeError: the worker did not survive `make`, or exceeded a limit. Exceptions are passed on.
    """

    def __init__(
        self,
        # makes the object, in a fork, or pickled in an interpreter; None: an interpreter without an object
        make: Callable[[], Any] | None,
        *,
        doing: str,  # name of its work for messages: `a run on ONNX Runtime`
        # wall time of the start and, unless given there, of each call; a deadline (`within`) may be earlier
        limit_s: float,
        # environment variables of an interpreter, on top of this process's; None allows a fork
        env: Mapping[str, str] | None = None,
        # False for a fork that uses CUDA, which reserves far more addresses than it uses
        limited: bool = True,
    ) -> None:
        self.doing = doing
        self.bounded = True
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._log = cast("IO[bytes]", tempfile.TemporaryFile())  # noqa: SIM115 - `close` closes it
        self._owner = os.getpid()
        mine, its = socket.socketpair()
        self._socket: socket.socket | None = mine
        self._stream = mine.makefile("rb")
        with its, ExitStack() as failed:
            for file in (self._log, mine, self._stream):
                failed.callback(file.close)
            forks = make is not None and env is None and _alone()
            self._process: _Fork | subprocess.Popen[bytes] = (
                _Fork(make or _nothing, its, self._log, limited=limited)
                if forks
                else _interpreter(its, self._log, env or {}, limited=limited and make is not None)
            )
            failed.pop_all()
        try:
            self._answer(None, None if forks else make or _nothing)
        except BaseException:
            self.close()
            raise

    def call(self, function: str | Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> Any:
        """Call a method of the object by its name, or a function of a module; all values are pickled.

        Raises:
            NativeError: the worker crashed or exceeded a limit. Exceptions of the function are passed on.
        """
        with self._lock if self._own else contextlib.nullcontext():
            if self.bounded:
                seconds_left()
            if not self.alive:
                hint = "start again: it crashed before"
                raise NativeError(f"{self.doing}: its process has ended", hint=hint)
            return self._answer(limit_s, (function, arguments))

    @property
    def alive(self) -> bool:
        return self._socket is not None and self._own

    @property
    def _own(self) -> bool:
        """False in a fork of this worker's parent: two processes would read each other's answers."""
        return self._owner == os.getpid()

    @property
    def log(self) -> str:
        """End of the output so far, of Python and of native code."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End the worker and its own children."""
        if self._socket is None:
            return
        if self._own:
            self.kill()
            self._wait()
        self._stream.close()
        self._socket.close()
        self._socket = None
        self._log.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the worker and its own children: a call that waits for it raises NativeError."""
        if self._process.returncode is None:
            if sys.platform == "win32":
                self._process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, limit_s: float | None, message: object = None) -> Any:
        """Sends a message and waits for the answer; the worker is ended if there is none, or Ctrl-C comes."""
        assert self._socket is not None
        seconds = limit = max(0.0, self._limit_s if limit_s is None else limit_s)
        seconds = min(seconds, seconds_left()) if self.bounded else seconds
        try:
            if message is not None:
                _send(self._socket, message)
            if not select.select([self._socket], [], [], min(seconds, threading.TIMEOUT_MAX))[0]:
                if seconds < limit:
                    raise OutOfTimeError
                raise self._ended(after_s=seconds)
            success, value = _receive(self._stream)
        except (ConnectionError, EOFError):
            raise self._ended() from None
        except BaseException:
            self.close()
            raise
        if success:
            return value
        try:
            raise value
        finally:
            del value  # it has this frame, which would keep the worker until the next garbage collection

    def _ended(self, after_s: float | None = None) -> NativeError:
        """The error for a worker that is gone, or is ended now because its time was up."""
        self.kill()  # of a worker that has ended, the exit code is its own
        code, log = self._wait(), self.log
        self.close()
        if after_s is not None:
            what = f"{self.doing} gave no result within {after_s:.0f} s, and was stopped"
            hint = "the model may hold an endless loop, or grow without limit when it is expanded"
            return NativeError(what, hint=hint, cause="timeout", log=log)
        cause = signal.Signals(-code).name if -code in {*signal.Signals} else f"exit code {code}"
        hint = "the model makes a native library fail: look at the attributes and shapes of its nodes"
        if cause == "SIGKILL":
            hint = "the kernel sends SIGKILL when memory runs out: free some, or take a smaller model"
        return NativeError(f"{self.doing} crashed ({cause})", hint=hint, cause=cause, log=log)

    def _wait(self) -> int:
        """Waits for the end of the process, and counts its processor seconds as this thread's."""
        if self._process.returncode is None:
            if sys.platform == "win32":
                return self._process.wait()
            self._process.returncode, seconds = -signal.SIGKILL, 0.0
            with contextlib.suppress(ChildProcessError):
                _, status, usage = os.wait4(self._process.pid, 0)
                self._process.returncode = os.waitstatus_to_exitcode(status)
                seconds = usage.ru_utime + usage.ru_stime
            _spent.seconds = getattr(_spent, "seconds", 0.0) + seconds
        return int(self._process.returncode or 0)

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()


_idle: list[Worker] = []
"""Idle forks, ready for reuse: one, or as many as threads called at the same time."""

if FORKS:
    os.register_at_fork(after_in_child=_idle.clear)  # which does not own them


def call(function: Callable[..., T], *arguments: Any, doing: str) -> T:
    """Call a function of a module in the warm fork; arguments and result are pickled.

    Raises:
        NativeError: it crashed, or exceeded the limits of time and memory.
    """
    if inside or not FORKS:
        return function(*arguments)
    try:
        fork = _idle.pop()
    except IndexError:
        fork = Worker(_nothing, doing="a new process", limit_s=CALL_S)
    fork.doing = doing
    try:
        return cast("T", fork.call(function, *arguments, limit_s=CALL_S))
    finally:
        if fork.alive:
            _idle.append(fork)


class InProcessWorker:
    """An object in this process, called as one of a `Worker`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._object = make()

    def call(self, method: str, *arguments: Any, limit_s: float | None = None) -> Any:
        seconds_left()
        return getattr(self._object, method)(*arguments)

    def close(self) -> None:
        self._object.close()


AnyWorker = Worker | InProcessWorker


def worker(make: Callable[[], Any], *, doing: str, limit_s: float, limited: bool = True) -> AnyWorker:
    """An object in a fork of its own (see `Worker`), or in this process if it is a worker or cannot fork."""
    if inside or not FORKS:
        return InProcessWorker(make)
    return Worker(make, doing=doing, limit_s=limit_s, limited=limited)


def run(
    function: Callable[..., T],
    *arguments: Any,
    doing: str,
    limit_s: float,
    env: Mapping[str, str] | None = None,
) -> tuple[T, str]:
    """Call a function of a module in an interpreter of its own (see `Worker`); its result and its log.

    Raises:
        NativeError: it crashed, exceeded a limit, or raised what is no `RewriterError`.
    """
    with contextlib.closing(Worker(None, doing=doing, limit_s=limit_s, env=env)) as interpreter:
        try:
            return cast("T", interpreter.call(function, *arguments)), interpreter.log
        except RewriterError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise NativeError(what, hint=UNKNOWN, log=interpreter.log) from error


def _nothing() -> None:
    """The object of a worker that only calls functions."""


@atexit.register
def close() -> None:
    """End the idle forks; the next call starts others."""
    while _idle:
        _idle.pop().close()


_spent = threading.local()


def processor_s() -> float:
    """Processor seconds of this thread, and of the workers that it has ended, in which ONNX Runtime runs."""
    if inside or not FORKS:
        return time.process_time()
    return time.thread_time() + float(getattr(_spent, "seconds", 0.0))


class _Fork:
    """A fork as `Worker` uses a `subprocess.Popen`; `stdin` is a pipe that closes when this process ends."""

    def __init__(self, make: Callable[[], Any], its: socket.socket, log: IO[bytes], *, limited: bool) -> None:
        self.returncode: int | None = None
        watched, lifeline = os.pipe()
        self.stdin = os.fdopen(lifeline, "wb")
        try:
            self.pid = _fork(its.fileno(), watched, log.fileno(), make, limited=limited)
        except BaseException:
            self.stdin.close()
            raise
        finally:
            os.close(watched)


def _alone() -> bool:
    """True if no other thread of this process may compute, import or hold a lock: it may fork."""
    others = {*threading.enumerate()} - {threading.current_thread()}
    return FORKS and all((getattr(t, "_target", None) or type(t)).__module__ in WATCHERS for t in others)


def _fork(connection: int, watched: int, log: int, make: Callable[[], Any], *, limited: bool) -> int:
    """Forks this process; returns the number of the child, whose object is made by `make`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        pid = os.fork()
    if not pid:
        try:
            _detach(connection, watched, log)
            _serve(socket.socket(fileno=connection), make, limited=limited)
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):  # it does so, too; the first one counts
        os.setpgid(pid, pid)
    return pid


def _interpreter(
    its: socket.socket, log: IO[bytes], env: Mapping[str, str], *, limited: bool
) -> subprocess.Popen[bytes]:
    inherited = () if sys.platform == "win32" else (its.fileno(),)
    path = os.pathsep.join(sys.path)  # this process's, so that `rewriter` need not be installed
    life = "import sys; from rewriter.base.sandbox import _begin; _begin(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", life, "limited" * limited, *map(str, inherited)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **QUIET, "PYTHONPATH": path, **env},
        start_new_session=True,
        pass_fds=inherited,
    )
    if sys.platform == "win32":
        assert process.stdin is not None
        pickle.dump(its.share(process.pid), process.stdin)
        process.stdin.flush()
    return process


def _begin(limited: str, descriptor: str = "") -> None:
    """The life of an interpreter, which ends without the destructors of native libraries."""
    if sys.platform == "win32":
        its = socket.fromshare(pickle.load(sys.stdin.buffer))
    else:
        its = socket.socket(fileno=int(descriptor))
    _serve(its, None, limited=bool(limited))
    os._exit(0)


def _detach(connection: int, watched: int, log: int) -> None:
    """Makes a fork a process of its own: its files, its signals."""
    gc.freeze()  # objects of the parent must not be collected: finalizers would delete its files
    os.setpgid(0, 0)  # Ctrl-C is the parent's
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, source in ((0, watched), (1, log), (2, log)):
        os.dup2(source, descriptor)
    # a thread that draws progress may hold the locks of the old ones for ever: here it does not run
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for other in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2, connection}:
        with contextlib.suppress(OSError):
            os.close(other)


def _settle(*, limited: bool) -> None:
    """Gives a worker its environment, its limits, and its end with its parent."""
    global inside  # a process is a worker from its start to its end
    inside = True
    without_deadline()
    os.environ.update(QUIET)
    faulthandler.enable()
    if FORKS:
        _end_with_parent()
    else:
        threading.Thread(target=_wait_for_parent, daemon=True).start()
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limited:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            size = max(LEAST_BYTES, int(SHARE * memory("MemAvailable"))) + pages * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))


def _end_with_parent() -> None:
    """Lets the kernel end this group as soon as the parent ends, even if native code holds Python's lock.

    When the other end of stdin closes, it sends SIGIO, whose default action ends a process (O_ASYNC of
    open(2)). PR_SET_PDEATHSIG would come when the thread ends that started this process. Linux only. Nothing
    may come through stdin: the kernel sends the same signal for data, even after the data was read.
    """
    import fcntl

    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(0, 0)
    if closed.poll(0):  # it had closed before
        os._exit(1)


def _wait_for_parent() -> None:
    while os.read(0, 4096):
        pass
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(its: socket.socket, make: Callable[[], Any] | None, *, limited: bool) -> None:
    """Makes the object, which may come through the connection, and makes calls until the parent closes it."""
    _settle(limited=limited)
    target: list[Any] = []
    stream = its.makefile("rb")

    def carry_out() -> Any:
        function, arguments = _receive(stream)
        return (getattr(target[0], function) if isinstance(function, str) else function)(*arguments)

    if _answered(its, lambda: target.append((make or _receive(stream))())):
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                _answered(its, carry_out)


def _answered(its: socket.socket, work: Callable[[], Any]) -> bool:
    """Does one piece of work and sends its result or its exception; True if there was none."""
    try:
        answer = True, work()
    except EOFError:
        raise
    except MemoryError:
        answer = False, NativeError("memory ran out", hint="a tensor of the model may be larger than memory")
    except BaseException as error:
        traceback.print_exc()
        answer = False, error
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _send(its, answer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        problem = error if answer[0] else answer[1]
        _send(its, (False, NativeError(f"{type(problem).__name__}: {problem}", hint=UNKNOWN)))
    return answer[0]


def _send(connection: socket.socket, message: object) -> None:
    """Sends a pickled object, its arrays after it, which are not copied for that."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts: list[bytes | memoryview] = [body, *(buffer.raw() for buffer in buffers)]
    for part in [pickle.dumps([*map(len, parts)]), *parts]:
        connection.sendall(part)


def _receive(stream: BufferedReader) -> Any:
    """The next object; EOFError if the process at the other end closed the connection, or is gone."""
    parts = [bytearray(size) for size in pickle.load(stream)]
    for part in parts:
        if stream.readinto(part) < len(part):
            raise EOFError
    return pickle.loads(parts[0], buffers=parts[1:])


def memory(kind: str) -> int:
    """Bytes in a row of Linux's table of memory: `MemTotal`, `MemAvailable`; 0 if there is none."""
    with contextlib.suppress(OSError, StopIteration), Path("/proc/meminfo").open(encoding="ascii") as table:
        return next(int(line.split()[1]) for line in table if line.startswith(f"{kind}:")) * 1024
    return 0
