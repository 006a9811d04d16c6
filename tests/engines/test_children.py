"""Native code in child processes: crashes, hangs and greed are errors, and nobody else notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import graph
from paths import ROOT
from rich.console import Console
from rich.progress import Progress

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, ModelError, NativeError, RewriterError
from rewriter.ir.model import Array, Model, facts
from rewriter.passes.simplify import Simplify
from rewriter.runtime.engines import onnxruntime as engine
from rewriter.runtime.engines.onnxruntime import Session

pytestmark = pytest.mark.skipif(not children.FORKS, reason="forks are used on Linux alone")

ENDLESS = """
    g (float[2,4] x) => (float[2,4] y) <int64 trips = {1000000000000}, bool go = {1}> {
        first = Relu(x)
        [forever] y = Loop (trips, go, first) <body =
            b (int64 i, bool c, float[2,4] h) => (bool a, float[2,4] n) {
                a = Identity(c)
                n = Add(h, h)
            }>
    }"""


@pytest.fixture(autouse=True)
def a_child_with_the_patches_of_the_test() -> Iterator[None]:
    children.close()
    yield
    children.close()


def doubled(array: Array) -> Array:
    twice: Array = array * array.dtype.type(2)
    return twice


def crash(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGFPE)


def hang(*_: object, **__: object) -> None:
    time.sleep(60)


def devour(*_: object) -> bytearray:
    return bytearray(1 << 46)


def fail(*_: object) -> None:
    raise ModelError("it is wrong", where="m.onnx", hint="mend it")


def pid() -> int:
    return os.getpid()


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_arrays_go_there_and_back(size: int, dtype: type) -> None:
    there: Array = np.arange(size).astype(dtype)
    back = children.call(doubled, there, doing="a product")
    np.testing.assert_array_equal(back, doubled(there))


@pytest.mark.parametrize(
    ("function", "message", "cause"),
    [
        pytest.param(crash, r"the work crashed \(SIGFPE\)", "SIGFPE", id="a crash"),
        pytest.param(hang, "the work gave no result within 1 s", "timeout", id="a hang"),
        pytest.param(devour, "memory ran out", "", id="too much memory"),
    ],
)
def test_the_end_of_a_child_is_an_error_and_the_next_call_works(
    function: Callable[[], None], message: str, cause: str
) -> None:
    with pytest.raises(NativeError, match=message) as caught:
        children.call(function, doing="the work", limit_s=1)
    assert caught.value.cause == cause
    assert children.call(pid, doing="the next") != os.getpid()


def test_exceptions_come_back_whole() -> None:
    with pytest.raises(ModelError) as caught:
        children.call(fail, doing="the work")
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("it is wrong", "m.onnx", "mend it")


def test_one_child_serves_all_calls() -> None:
    assert children.call(pid, doing="one") == children.call(pid, doing="two")


def test_a_child_does_not_outlive_its_session() -> None:
    session = Session(graph("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    child = session._child
    assert child is not None
    os.kill(child.pid, 0)
    session.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_an_endless_loop_is_stopped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RUN_S", 1.0)
    with Session(graph(ENDLESS)) as session:
        with pytest.raises(ArithmeticRunError, match="no result within 1 s, and was stopped: forever"):
            session.run({"x": np.ones((2, 4), np.float32)})
        with pytest.raises(ArithmeticRunError, match="its process is gone"):
            session.run({"x": np.ones((2, 4), np.float32)})


def test_a_crash_of_onnx_runtime_is_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.runtime.engines.local_session.LocalSession.run", crash)
    session = Session(graph("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    with session, pytest.raises(ArithmeticRunError, match=r"ONNX Runtime crashed \(SIGFPE\)"):
        session.run({"x": np.ones(2, np.float32)})


def crash_at_conv(proto: onnx.ModelProto, *_: object) -> onnx.ModelProto:
    if any(node.op_type == "Conv" for node in proto.graph.node):
        crash()
    return proto


def test_the_node_at_which_inference_crashes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = graph(
        "g (float[1] x) => (float[1] y) { a = Relu(x) b = Neg(a) [bad] c = Conv(b, b) y = Neg(c) }"
    )
    monkeypatch.setattr(facts, "_inferred", crash_at_conv)
    with pytest.raises(ModelError, match=r"shape inference crashed \(SIGFPE\)") as caught:
        facts.infer(source)
    assert caught.value.where == "node bad (Conv)"


def test_functions_that_expand_without_measure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "CALL_S", 1.0)
    monkeypatch.setattr(facts, "PROBE_S", 0.5)
    with pytest.raises(ModelError, match="shape inference gave no result within 1 s") as caught:
        facts.infer(Model(expanding(24)))
    assert caught.value.where == "node bomb (f0)"


def expanding(depth: int) -> onnx.ModelProto:
    """A model of one call that stands for 2^depth nodes."""
    text = """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[4] x) => (float[4] y) { [bomb] y = l.f0(x) }"""
    for level in range(depth):
        inner = f"l.f{level + 1}" if level < depth - 1 else "Relu"
        head = f'<domain: "l", opset_import: ["" : 17, "l" : 1]> f{level} (a) => (b)'
        text += f"{head} {{ m = {inner}(a) b = {inner}(m) }}"
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("end", [crash, hang])
def test_a_crash_of_onnxsim_is_a_refusal(end: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from rewriter.ir.base import Context, Refusal

    monkeypatch.setattr("onnxsim.simplify", end)
    monkeypatch.setattr("rewriter.passes.simplify._skipped", lambda proto: [])
    monkeypatch.setattr(children, "CALL_S", 1.0)
    source = graph("g (float[3] x) => (float[3] y) { i = Identity(x) y = Relu(i) }")
    (event,) = Simplify().rewrite_model(source, Context())
    assert isinstance(event, Refusal)
    assert event.reason in ("onnxsim crashed (SIGFPE)", "onnxsim gave no result within 1 s, and was stopped")


BUSY = """
import ctypes, os, time
from rewriter.ir import children
def idle(): pass
def hang(): time.sleep(60)
def hang_with_the_lock_of_python(): ctypes.PyDLL(None).sleep(60)
def work(name):
    print(children.call(os.getpid, doing="a call"), flush=True)
    children.call(globals()[name], doing="a call")
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "a kill of the parent"])
@pytest.mark.parametrize("work", ["idle", "hang", "hang_with_the_lock_of_python"])
def test_children_end_with_their_parent(number: signal.Signals, work: str, tmp_path: Path) -> None:
    (tmp_path / "tests_of_children.py").write_text(BUSY)
    code = f"import tests_of_children; tests_of_children.work({work!r})"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        time.sleep(0.3)
        process.send_signal(number)
        process.wait(10)
    assert gone(child)


def gone(child: int) -> bool:
    """True if a process ends within five seconds; as somebody else's child, it may stay a zombie."""
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_data_that_comes_while_a_child_works_does_not_end_it() -> None:
    """The kernel may announce an order after it was read, when the child works on it."""
    with children.Child(Sleeper, doing="a nap") as child:
        connection = child._socket
        assert connection is not None
        threading.Timer(0.2, connection.sendall, [b"!"]).start()
        assert child.call("sleep", 0.5) == "slept"


def test_errors_can_be_pickled() -> None:
    import pickle

    from rewriter.runtime.engines.onnxruntime_library import NoKernelError

    error: RewriterError = NoKernelError("my.Op", "node", "file")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.op, str(copy)) == (NoKernelError, "my.Op", str(error))


def test_a_fork_has_children_of_its_own() -> None:
    """Two processes that share a warm child would read each other's answers."""
    assert children.call(os.getppid, doing="a question") == os.getpid()
    pid = os.fork()
    if not pid:
        os._exit(
            0 if all(children.call(os.getppid, doing="a question") == os.getpid() for _ in range(50)) else 1
        )
    assert all(children.call(os.getppid, doing="a question") == os.getpid() for _ in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Sleeper:
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"


def its_child_answers() -> bool:
    return all(children.call(os.getppid, doing="a question") == os.getpid() for _ in range(50))


def test_a_child_that_waits_for_a_processor_is_not_late() -> None:
    """Its time is what it computes, as long as it would compute."""
    os.sched_setaffinity(0, {min(everyone := os.sched_getaffinity(0))})
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert children.call(computed, 0.6, doing="a sum", limit_s=1.0) >= 0.6
        with pytest.raises(NativeError, match="no result within 1 s"):
            children.call(computed, 60.0, doing="a sum", limit_s=1.0)
    finally:
        os.sched_setaffinity(0, everyone)
        for rival in rivals:
            rival.kill()
            rival.wait()


def computed(seconds: float) -> float:
    """Computes for that long, whatever the clock on the wall says."""
    while (used := time.process_time()) < seconds:
        pass
    return used


def shout() -> str:
    sys.stderr.write("to the log\n")
    return "said"


def test_a_child_prints_whatever_its_parent_held_at_the_fork() -> None:
    """A bar that another thread draws holds the lock of the terminal now and then."""
    console = Console(file=sys.stderr, force_terminal=True)
    with Progress(console=console, transient=True) as bars, console._lock:
        bars.add_task("drawn")
        answers: list[str] = []
        caller = threading.Thread(target=lambda: answers.append(children.call(shout, doing="a shout")))
        caller.start()
        caller.join(30)
    assert answers == ["said"]
