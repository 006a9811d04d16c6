"""Native code in child processes: crashes, hangs and greed are errors, and nobody else notices.

The faults are real: the functions below run in the child, a fork or an interpreter that imports this file.
"""

import contextlib
import ctypes
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import graph
from paths import ROOT
from rich.console import Console
from rich.progress import Progress

import rewriter
from rewriter.base import sandbox
from rewriter.base.errors import ArithmeticRunError, EngineError, ModelError, NativeError, RewriterError
from rewriter.base.stopwatch import OutOfTimeError, Stopwatch, within
from rewriter.ir.model import Array, Model
from rewriter.passes.base import Context, Refusal
from rewriter.passes.simplify import Simplify
from rewriter.runtime.engines import onnxruntime as engine
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.onnxruntime_library import NoKernelError

forks = pytest.mark.skipif(not sandbox.FORKS, reason="forks are used on Linux alone")
RELU = "g (float[2] x) => (float[2] y) { y = Relu(x) }"

ENDLESS = """
    g (float[2,4] x) => (float[2,4] y) <int64 trips = {1000000000000}, bool go = {1}> {
        first = Relu(x)
        [forever] y = Loop (trips, go, first) <body =
            b (int64 i, bool c, float[2,4] h) => (bool a, float[2,4] n) {
                a = And(c, c) n = Add(h, h)
            }>
    }"""


@pytest.fixture(autouse=True)
def a_child_with_the_patches_of_the_test() -> Iterator[None]:
    sandbox.close()
    yield
    sandbox.close()


# -- what runs in a child ---------------------------------------------------------------------
def doubled(array: Array) -> Array:
    sys.stdout.write("doubling\n")
    twice: Array = array * array.dtype.type(2)
    return twice


def crash(*_: object, **__: object) -> None:
    os.write(1, b"about to crash\n")
    os.kill(os.getpid(), signal.SIGFPE)


def read_address_zero() -> None:
    ctypes.string_at(0)


def leave(code: int) -> None:
    os._exit(code)


def hang(*_: object, **__: object) -> None:
    time.sleep(60)


def devour(count: int = 1 << 46) -> int:
    return len(bytearray(count))


def devour_in_c(count: int) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if libc.malloc(ctypes.c_size_t(count)) is None:
        libc.abort()  # what C++ does with an uncaught std::bad_alloc


def fail(*_: object) -> None:
    raise EngineError("it is wrong", where="m.onnx", hint="mend it")


def misbehave() -> Any:
    return lambda: None


class Unreadable:
    """Arguments that the child cannot make again."""

    def __reduce__(self) -> Any:
        return import_module, ("rewriter.no_such_thing",)


def print_from_c(text: str) -> None:
    libc = ctypes.CDLL(None)
    libc.puts(text.encode())
    libc.fflush(None)


def print_much(count: int) -> None:
    sys.stdout.write("x" * count + "the end")


def hang_with_a_child(pid_file: str) -> None:
    leave_grandchild(pid_file)
    os.write(1, b"hanging\n")
    if sandbox.FORKS:
        ctypes.PyDLL(None).sleep(600)  # with Python's lock, as native code may hang
    time.sleep(600)


def leave_grandchild(pid_file: str) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(f"{os.getpid()} {grandchild.pid}")


class Sleeper:
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"


# -- all kinds of children --------------------------------------------------------------------
def fork(function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "CALL_S", limit_s)
        return sandbox.call(function, *arguments, doing="the work")


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result(timeout=120)


def threaded(function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0) -> Any:
    """In an interpreter, since this thread lives, too."""
    return in_a_thread(partial(fork, function, *arguments, limit_s=limit_s))


def run(function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0, **more: Any) -> tuple[Any, str]:
    return sandbox.run(function, *arguments, doing="the work", limit_s=limit_s, **more)


def interpreter(function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0) -> Any:
    return run(function, *arguments, limit_s=limit_s)[0]


FORK, INTERPRETER = (
    pytest.param(fork, id="a fork", marks=forks),
    pytest.param(interpreter, id="an interpreter"),
)
THREADED = pytest.param(threaded, id="beside another thread", marks=forks)
WAYS = pytest.mark.parametrize("way", [FORK, THREADED, INTERPRETER])


@pytest.mark.parametrize("way", [FORK, INTERPRETER])
@pytest.mark.parametrize("size", [0, 1_000_000])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_arrays_go_there_and_back(way: Callable[..., Any], size: int, dtype: type) -> None:
    there: Array = np.arange(size).astype(dtype)
    np.testing.assert_array_equal(way(doubled, there), doubled(there))


ENDS = [
    pytest.param(crash, (), r"the work crashed \(SIGFPE\)", "SIGFPE", id="a signal"),
    pytest.param(read_address_zero, (), r"the work crashed \(SIGSEGV\)", "SIGSEGV", id="C reads address 0"),
    pytest.param(leave, (3,), r"the work crashed \(exit code 3\)", "exit code 3", id="a library calls exit"),
    pytest.param(hang, (), "the work gave no result within 2 s", "timeout", id="a hang"),
    pytest.param(devour, (), "memory ran out", "", id="too much memory"),
    pytest.param(misbehave, (), "pickle", "", id="a result that cannot be pickled"),
]


@WAYS
@pytest.mark.parametrize(("function", "arguments", "message", "cause"), ENDS)
def test_what_ends_a_child_is_an_error_and_the_next_call_works(
    way: Callable[..., Any],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    message: str,
    cause: str,
) -> None:
    with pytest.raises(NativeError, match=message) as caught:
        way(function, *arguments, limit_s=2.0 if function is hang else 60.0)
    assert caught.value.cause == cause
    assert way(os.getpid) != os.getpid()


@WAYS
def test_exceptions_come_back_whole(way: Callable[..., Any]) -> None:
    with pytest.raises(EngineError) as caught:
        way(fail)
    assert vars(caught.value) == vars(EngineError("it is wrong", where="m.onnx", hint="mend it"))


def test_errors_can_be_pickled() -> None:
    error: RewriterError = NoKernelError("my.Op", "node", "file")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.op, str(copy)) == (NoKernelError, "my.Op", str(error))


# -- interpreters -----------------------------------------------------------------------------
def test_the_log_of_an_interpreter_has_what_was_printed() -> None:
    assert run(doubled, np.ones(1))[1] == "doubling\n"
    assert sys.platform != "linux" or "from C" in run(print_from_c, "from C")[1]
    _, log = run(print_much, 4 * sandbox.LOG_BYTES)
    assert len(log) == sandbox.LOG_BYTES
    assert log.endswith("the end")


def test_the_log_of_a_crash_has_the_output_and_the_python_stack() -> None:
    with pytest.raises(NativeError) as caught:
        run(crash)
    assert "about to crash" in caught.value.log and "in crash" in caught.value.log


def test_environment_variables_are_added() -> None:
    assert run(os.getenv, "REWRITER_TEST", env={"REWRITER_TEST": "7"})[0] == "7"


@forks
@pytest.mark.parametrize(("function", "words"), [(devour, "memory ran out"), (devour_in_c, "SIGABRT")])
def test_memory_limit(function: Callable[[int], object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "LEAST_BYTES", 1 << 30)
    monkeypatch.setattr(sandbox, "SHARE", 0.0)
    with pytest.raises(NativeError, match=words):
        fork(function, 2 << 30)
    assert fork(devour, 1 << 20) == 1 << 20


def test_an_argument_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(NativeError, match="no_such_thing"):
        run(len, Unreadable())


# -- processes that are left ------------------------------------------------------------------
def is_running(pid: int) -> bool:
    """False for a zombie, too: in a container, nobody may reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def family(path: Path) -> list[int]:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def test_a_hang_and_its_children_are_killed_at_the_time_limit(pids: Path) -> None:
    for limit in (4.0, 40.0):  # an interpreter starts in 3 s, and on a busy machine in more than 8
        start = time.monotonic()
        with pytest.raises(NativeError, match=f"no result within {limit:g} s") as caught:
            run(hang_with_a_child, str(pids), limit_s=limit)
        assert limit - 0.5 <= time.monotonic() - start < limit + 60
        if pids.exists():
            break
    assert "hanging" in caught.value.log
    assert gone(*family(pids))


def test_processes_left_by_a_finished_child_are_killed(pids: Path) -> None:
    run(leave_grandchild, str(pids))
    assert gone(*family(pids))


LIVES = {
    "an idle fork": "t.fork(t.leave_grandchild, pids); t.hang()",
    "an idle interpreter": "t.threaded(t.leave_grandchild, pids); t.hang()",
    "an interpreter of a thread that hangs": (
        "t.threading.Thread(target=t.fork, args=(t.hang_with_a_child, pids), daemon=True).start(); t.hang()"
    ),
    "a fork that hangs": "t.fork(t.hang_with_a_child, pids)",
    "an interpreter that hangs": "t.run(t.hang_with_a_child, pids)",
}


@forks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "a kill of the parent"])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_children_end_with_their_parent(number: signal.Signals, life: str, pids: Path) -> None:
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as t; pids = {str(pids)!r}; {life}"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as parent:
        assert all(map(is_running, family(pids)))
        time.sleep(0.3)
        parent.send_signal(number)
        parent.wait(60)
    assert gone(*family(pids))


# -- forks ------------------------------------------------------------------------------------
@forks
def test_one_fork_serves_all_calls() -> None:
    assert fork(os.getpid) == fork(os.getpid)


@forks
def test_data_that_comes_while_a_child_works_does_not_end_it() -> None:
    """The kernel may announce an order after it was read, when the child works on it."""
    with contextlib.closing(sandbox.Worker(Sleeper, doing="a nap", limit_s=60.0)) as child:
        connection = child._socket
        assert connection is not None
        threading.Timer(0.2, connection.sendall, [b"!"]).start()
        assert child.call("sleep", 0.5) == "slept"


@forks
def test_a_fork_has_children_of_its_own() -> None:
    """Two processes that share a child would read each other's answers."""

    def answered() -> bool:
        return all(fork(os.getppid) == os.getpid() for _ in range(50))

    assert answered()
    with contextlib.closing(sandbox.Worker(Sleeper, doing="a nap", limit_s=60.0)) as child:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(NativeError):
                child.call("sleep", 0.0)
                os._exit(1)
            os._exit(0 if answered() else 1)
        assert answered()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert child.call("sleep", 0.0) == "slept"


@forks
def test_a_child_prints_whatever_its_parent_held_at_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that another thread draws holds the lock of the terminal now and then."""
    monkeypatch.setattr(sandbox, "WATCHERS", {*sandbox.WATCHERS, __name__})
    console, holds, over = Console(file=sys.stderr, force_terminal=True), threading.Event(), threading.Event()

    def draw() -> None:
        with console._lock:
            holds.set()
            over.wait(60)

    with Progress(console=console, transient=True) as bars:
        bars.add_task("drawn")
        threading.Thread(target=draw).start()
        holds.wait()
        try:
            assert fork(doubled, np.ones(1)) == 2.0
            assert not isinstance(sandbox._idle[-1]._process, subprocess.Popen)
        finally:
            over.set()


# -- threads ----------------------------------------------------------------------------------
@contextlib.contextmanager
def computing() -> Iterator[list[int]]:
    """Another thread in which OpenBLAS has its threads multiply; yields the products so far."""
    over, products, vector = threading.Event(), [0], np.ones(400_000)

    def multiply() -> None:
        while not over.is_set():
            vector.dot(vector)
            products[0] += 1

    thread = threading.Thread(target=multiply, daemon=True)
    thread.start()
    yield products
    over.set()
    thread.join(60)
    assert not thread.is_alive(), "a product waits for threads that OpenBLAS ended before a fork"


@forks
def test_no_fork_ends_the_threads_that_compute_for_another() -> None:
    with computing() as products:
        for _ in range(3):
            before = products[0]
            assert fork(doubled, np.ones(1)) == 2.0
            deadline = time.monotonic() + 60
            while products[0] == before and time.monotonic() < deadline:
                time.sleep(0.001)
            sandbox.close()


# -- libraries in forks -----------------------------------------------------------------------
@forks
def test_a_child_does_not_outlive_its_session() -> None:
    session = Session(graph(RELU))
    assert isinstance(session._worker, sandbox.Worker)
    pid = session._worker._process.pid
    assert is_running(pid)
    session.close()
    assert not is_running(pid)


@forks
def test_an_endless_loop_is_stopped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(graph(ENDLESS)) as session:
        monkeypatch.setattr(engine, "RUN_S", 1.0)
        for words in ("no result within 1 s, and was stopped: forever", "its process has ended"):
            with pytest.raises(ArithmeticRunError, match=words):
                session.run({"x": np.ones((2, 4), np.float32)})
    with pytest.raises(ArithmeticRunError, match="no result within 1 s, and was stopped: forever"):
        rewriter.fix(graph(ENDLESS).whole(), build=False)


@forks
def test_a_crash_of_onnx_runtime_is_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.runtime.engines.local_session.LocalSession.run", crash)
    with Session(graph(RELU)) as session, pytest.raises(ArithmeticRunError, match=r"crashed \(SIGFPE\)"):
        session.run({"x": np.ones(2, np.float32)})


@forks
def test_functions_that_expand_without_measure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one call that stands for 2^24 nodes."""
    text = """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[4] x) => (float[4] y) { [bomb] y = l.f0(x) }"""
    for level in range(24):
        inner = f"l.f{level + 1}" if level < 23 else "Relu"
        head = f'<domain: "l", opset_import: ["" : 17, "l" : 1]> f{level} (a) => (b)'
        text += f"{head} {{ m = {inner}(a) b = {inner}(m) }}"
    monkeypatch.setattr(sandbox, "CALL_S", 1.0)
    with pytest.raises(ModelError, match="shape inference gave no result within 1 s"):
        Model(onnx.parser.parse_model(text)).facts()


@forks
@pytest.mark.parametrize(
    ("end", "reason"),
    [(crash, "onnxsim crashed (SIGFPE)"), (hang, "onnxsim gave no result within 1 s, and was stopped")],
)
def test_onnxsim_crashes(end: Callable[[], None], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxsim.simplify", end)
    monkeypatch.setattr(sandbox, "CALL_S", 1.0 if end is hang else 60.0)
    source = graph("g (float[3] x) => (float[3] y) { i = Identity(x) y = Relu(i) }")
    (event,) = Simplify().rewrite_model(source, Context())
    assert isinstance(event, Refusal)
    assert event.reason == reason


def test_a_deadline_ends_a_call_and_what_comes_after_it_runs() -> None:
    start = time.monotonic()
    with contextlib.closing(sandbox.Worker(Sleeper, doing="a nap", limit_s=60.0)) as child:
        for seconds in (0.5, 10.0):  # on a busy machine, the call does not begin in the first
            with pytest.raises(OutOfTimeError), within(time.monotonic() + seconds):
                child.call("sleep", 60.0)
            if not child.alive:
                break
        assert not child.alive, "it would still compute"
    assert time.monotonic() - start < 50.0
    with pytest.raises(OutOfTimeError), within(start):
        sandbox.call(os.getpid, doing="a call after its deadline")
    with within(start + 600.0):
        assert sandbox.call(os.getpid, doing="a call in time") != os.getpid()
    with pytest.raises(OutOfTimeError), within(start), within(start + 600.0):
        Stopwatch(lambda stage, done, total: None).report("a stage after the deadline around it")


NAMES = ("if_loop", "mixed_casts", "qdq")


def digest(output: Path, name: str) -> str:
    model = ROOT / f"models/{name}.onnx"
    rewriter.fix(model, output, inputs=model.with_suffix(".npz"), build=False)
    return hashlib.sha256(output.read_bytes()).hexdigest()


@pytest.mark.skipif(not sandbox.FORKS, reason="forks are used on Linux alone")
def test_four_threads_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of each thread run in OpenBLAS's threads while the others start children."""
    monkeypatch.setattr("rewriter.jobs.fix.selection.AFFORDED_S", 300.0)  # what is tried is no matter of time
    one = {name: digest(tmp_path / f"{name}.onnx", name) for name in NAMES}
    with ThreadPoolExecutor(4) as threads:
        runs = [
            (name, threads.submit(digest, tmp_path / f"{name}.{number}.onnx", name))
            for number, name in product(range(2), NAMES)
        ]
        assert [(name, run.result(timeout=300)) for name, run in runs] == [(n, one[n]) for n, _ in runs]


def test_the_progress_of_a_long_stage_names_its_processor_seconds() -> None:
    lines = list[str]()
    for core_s in (3.0, 36.4):
        with Stopwatch(lambda stage, done, total: lines.append(stage))("running it unrepaired", core_s):
            pass
    assert lines == ["running it unrepaired", "running it unrepaired, up to 36 s of a core"]
