"""Every way in which a script can call ONNX Runtime is seen, and can be answered by something else."""

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from graphs import graph
from onnx import TensorProto

from rewriter.ir.model import save
from rewriter.runtime.recording.interception import METHODS, SESSIONS, hooked, model_of, run_script

ONE = np.ones((1, 2), np.float32)


class Doubling:
    """Counts calls, and doubles what the model returns."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor, self.calls, self.ended = factor, list[Any](), False

    def load(self, session: Any, model: Any) -> Any:
        return model

    def call(self, session: Any, names: Sequence[str], feeds: dict[str, Any], run: Callable[[], Any]) -> Any:
        outputs = run()
        self.calls.append((names, feeds, model_of(session)))
        return outputs if self.factor == 1 else [value * np.float32(self.factor) for value in outputs]

    def finish(self) -> None:
        self.ended = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = graph("g (float[1, 2] x) => (float[1, 2] y) { y = Add (x, x) }")
    save(made, tmp_path / "double.onnx")
    return tmp_path / "double.onnx"


def by_run(session: ort.InferenceSession) -> Any:
    return session.run(None, {"x": ONE})[0]


def by_ort_values(session: ort.InferenceSession) -> Any:
    return session.run_with_ort_values(["y"], {"x": ort.OrtValue.ortvalue_from_numpy(ONE)})[0].numpy()


def by_cpu_binding(session: ort.InferenceSession) -> Any:
    binding = session.io_binding()
    binding.bind_cpu_input("x", ONE)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


def by_address(session: ort.InferenceSession) -> Any:
    binding, result = session.io_binding(), np.zeros((1, 2), np.float32)
    binding.bind_input("x", "cpu", 0, TensorProto.FLOAT, (1, 2), ONE.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, (1, 2), result.ctypes.data)
    session.run_with_iobinding(binding)
    return result


def by_callback(session: ort.InferenceSession) -> Any:
    results, ended = list[Any](), threading.Event()

    def callback(outputs: Any, data: Any, error: str) -> None:
        results.append(outputs[0])
        ended.set()

    session.run_async(["y"], {"x": ONE}, callback, None)
    assert ended.wait(30)
    return results[0]


CALLS = [by_run, by_ort_values, by_cpu_binding, by_address, by_callback]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["watched", "answered"])
def test_each_call_is_seen_and_may_be_answered(call: Callable[[Any], Any], factor: float, path: Path) -> None:
    hook = Doubling(factor)
    with hooked(hook):
        result = call(ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"]))
    ((names, feeds, source),) = hook.calls
    assert (names, list(feeds), source) == (["y"], ["x"], path.read_bytes())
    assert np.array_equal(feeds["x"], ONE)
    assert np.array_equal(result, 2 * factor * ONE)
    assert hook.ended


def test_arguments_have_the_names_of_the_originals() -> None:
    """A script may name each of them."""
    module = importlib.import_module(SESSIONS)
    for (owner, name), method in METHODS.items():
        taken = inspect.signature(vars(getattr(module, owner))[name]).parameters.values()
        named = {one.name: None for one in taken if one.name != "self" and one.kind is not one.VAR_KEYWORD}
        inspect.signature(method).bind("hook", "original", "object", **named)


def test_a_session_that_exists_is_seen_inside_the_block_alone(path: Path) -> None:
    session, hook = ort.InferenceSession(path, providers=["CPUExecutionProvider"]), Doubling()
    before = by_run(session)
    with hooked(hook):
        assert np.array_equal(by_run(session), 2 * before)
    assert np.array_equal(by_run(session), before)
    assert [source for *_, source in hook.calls] == [str(path)]


HOOK = """
class Ten:
    def __init__(self, factor):
        self.factor = factor

    def load(self, session, model):
        return model

    def call(self, session, names, feeds, run):
        return [value * self.factor for value in run()]

    def finish(self):
        print("finished")
"""

SCRIPT = """
import importlib
import inspect
import sys
import numpy as np
from onnxruntime import InferenceSession
print(InferenceSession(sys.argv[1]).run(None, {"x": np.ones((1, 2), np.float32)})[0].sum())
sys.exit(3)
"""


def test_a_script_is_hooked_and_its_output_and_exit_code_pass_through(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hook_of_a_test.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, str(tmp_path / "script.py"), str(path)]
    run = run_script(command, "hook_of_a_test:Ten", {"factor": 10})
    assert (run.exit_code, run.printed) == (3, "40.0\nfinished\n")
    assert capsys.readouterr().out == run.printed
