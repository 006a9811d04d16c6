"""The closed loop: scripts that know nothing of it, run with other files in place of theirs."""

import hashlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import graphs
import numpy as np
import pytest
from onnx import TensorProto
from tables import values

from rewriter.ir.model import Model, load, save
from rewriter.jobs.closed_loop.job import closed_loop, loop_of
from rewriter.jobs.closed_loop.result import LoopResult, Step
from rewriter.jobs.closed_loop.traces import Trace, compared
from rewriter.jobs.fix.before import lowered
from rewriter.pipeline.options import FixOptions
from rewriter.runtime.recording.record import Link, RecordedFile, Recording, State

MEAN = """
    g (float[1,8] level, float[1,8] mean) => (float[1,8] gain, float[1,8] new_mean) {
        alpha = Constant<value = float {0.01}>() keep = Constant<value = float {0.99}>()
        part = Mul(level, alpha) old = Mul(mean, keep) new_mean = Add(part, old)
        away = Sub(level, new_mean) gain = Sigmoid(away) }"""
"""A running mean that moves by less than FP16's last place, and a gain that depends on it."""

WORDS = """
    g (int64[1] word) => (float[1,4] logits)
        <float[4,4] table = {0,1,0,0, 0,0,1,0, 0,0,0,1, 2999.4,2999.5,0,0}> {
        logits = Gather<axis = 0>(table, word) }"""
"""The word after 3 is 1, by a margin that FP16 does not have: it takes 0, the first of equals."""

STREAM = """
import sys, numpy as np, onnxruntime as ort
session = ort.InferenceSession(sys.argv[1])
mean, gains = np.full((1, 8), -60, np.float32), []
rng = np.random.default_rng({seed})
for t in range(600):
    level = (-80 + rng.standard_normal((1, 8))).astype(np.float32)
    gain, mean = session.run(["gain", "new_mean"], {{"level": level, "mean": mean}})
    gains.append(gain)
print(np.round(np.mean(gains), 3), "after", __import__("time").perf_counter())
"""

CHAIN = """
import sys, numpy as np, onnxruntime as ort
first, second = (ort.InferenceSession(path) for path in sys.argv[1:])
value = np.ones((1, 8), np.float32)
for t in range(20):
    value, = first.run(None, {"x": value})
    binding = second.io_binding()
    binding.bind_cpu_input("x", value)
    binding.bind_output("y")
    second.run_with_iobinding(binding)
    value = binding.copy_outputs_to_cpu()[0]
print(value.shape)
"""

GREEDY = """
import sys, numpy as np, onnxruntime as ort
session, word = ort.InferenceSession(sys.argv[1]), 0
for t in range(12):
    logits, = session.run(None, {"word": np.array([word])})
    word = int(logits.argmax())
    print(word)
"""


def recorded(folder: Path, script: str, **models: Model) -> tuple[Recording, dict[str, Path]]:
    """A recording of a script that gets the paths of its models, and plain FP16 files in their place."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    files, fixed = list[RecordedFile](), dict[str, Path]()
    for name, model in models.items():
        path, fixed[name] = folder / f"{name}.onnx", folder / f"{name}.fixed.onnx"
        save(model, path)
        save(lowered(model, "fp16"), fixed[name])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(RecordedFile(name, str(path), digest, name, 1, {}))
    command = (sys.executable, str(folder / "script.py"), *(file.model for file in files))
    return Recording(command, tuple(files), (), (), (), "", 0, {}), fixed


def streaming(folder: Path, seed: str) -> tuple[Recording, dict[str, Path]]:
    recording, fixed = recorded(folder, STREAM.format(seed=seed), enhancer=graphs.graph(MEAN))
    links = (Link("enhancer", "new_mean", "enhancer", "mean", None, 599),)
    states = (State("enhancer", "mean", "new_mean", 1.0),)
    return Recording(recording.command, recording.files, (), links, states, "", 0, {}), fixed


def run(
    recording: Recording, fixed: dict[str, Path], repair: Callable[..., bool] | None = None
) -> LoopResult:
    return closed_loop(recording, fixed, 120.0, repair)


def test_a_slow_state_fails_and_is_repaired(tmp_path: Path) -> None:
    recording, fixed = streaming(tmp_path, "0")
    tried = list[tuple[str, Step]]()

    def repair(file: RecordedFile, step: Step, share: float) -> bool:
        assert 0 < share < 1
        tried.append((file.name, step))
        if step == "search":
            save(load(file.model), fixed[file.name])
        return step != "states"

    result = run(recording, fixed, repair)
    assert (result.culprit, result.state) == ("enhancer", "new_mean")
    assert tried == [("enhancer", "states"), ("enhancer", "search")]
    assert [(r.step, r.helped) for r in result.repairs] == [("search", True)]
    assert result.ending == "as-original" and result.fixed is not None
    assert result.plain is not None and result.plain.error > 0.05 > result.limit > result.fixed.error
    assert result.fixed.calls == result.calls == 600
    assert result.fixed.printed == 2  # the time is left out
    assert result.plain.other_printed
    assert run(recording, fixed).ending == "as-original"


def test_a_script_that_draws_without_a_seed(tmp_path: Path) -> None:
    result = run(*streaming(tmp_path, ""))
    assert (result.ending, result.refusal, result.detail) == ("refused", "random", "1")


@pytest.mark.parametrize("overflows", ["first", "second"])
def test_the_culprit_among_two_files(tmp_path: Path, overflows: str) -> None:
    safe = graphs.graph("g (float[1,8] x) => (float[1,8] y) { y = Tanh(x) }")
    wide = graphs.graph(
        """g (float[1,8] x) => (float[1,8] y) {
            large = Constant<value = float {1e5}>() up = Mul(x, large) y = Div(up, large) }"""
    )
    models = {name: wide if name == overflows else safe for name in ("first", "second")}
    result = run(*recorded(tmp_path, CHAIN, **models))
    assert (result.ending, result.culprit, result.state) == ("failed", overflows, "")
    assert result.single.keys() == models.keys()
    assert result.single[overflows] > result.limit > min(result.single.values())


def test_a_word_by_a_margin_that_fp16_does_not_have(tmp_path: Path) -> None:
    result = run(*recorded(tmp_path, GREEDY, lm=graphs.graph(WORDS)))
    assert result.ending == "within-limit" and result.fixed is not None
    assert result.tf32 is not None and result.tf32.same
    other = result.fixed.other
    assert other is not None and (other.call, other.output, other.usual_margin) == (3, "logits", 1.0)
    assert other.margin == pytest.approx(0.1, rel=1e-3)
    assert result.fixed.calls == 4


@values
def test_what_is_refused(tmp_path: Path, command: tuple[str, ...], code: int, refusal: str) -> None:
    recording, fixed = streaming(tmp_path, "0")
    full = (sys.executable, *command) if command else ()
    other = Recording(full, recording.files, (), (), (), "", code, {})
    assert run(other, fixed).refusal == refusal
    assert closed_loop(recording, fixed, 0.0).refusal == "no-time"


def test_a_script_that_waits_is_ended_at_the_limit(tmp_path: Path) -> None:
    recording, fixed = streaming(tmp_path, "0")
    silent = replace(recording, command=(sys.executable, "-c", "import time; time.sleep(300)"))
    result = closed_loop(silent, fixed, 5.0)
    assert (result.refusal, result.stopped) == ("no-time", True)
    assert result.seconds < 200


def test_noise_in_silence_is_no_error() -> None:
    original, other = Trace(), Trace()
    for trace, noise in ((original, 0.0), (other, 1e-4)):
        for size in (1.0, 1.0, 0.0):
            trace.add("f", ["y"], {"x": np.ones(2, np.float32)}, [np.full(2, size + noise, np.float32)])
    stream = compared(original, None, other, frozenset())
    assert stream.same
    assert max(stream.errors) < 2e-4


def test_a_mask_has_to_be_a_mask_and_hides_no_error() -> None:
    """Two calls give -inf beside a number; the other model first has the same, then a number or 1 % more."""
    values = np.array([-np.inf, 1.0], np.float32)
    for changed, error in ((values, 0.0), (np.array([-9.0, 1.0], np.float32), np.inf), (1.01 * values, 0.01)):
        original, other = Trace(), Trace()
        for _ in range(2):
            original.add("a.onnx", ["y"], {}, [values])
            other.add("a.onnx", ["y"], {}, [changed])
        stream = compared(original, None, other, frozenset())
        assert stream.errors == pytest.approx((error, error), rel=1e-3)


def test_engines_answer_where_one_runs(tmp_path: Path) -> None:
    """ONNX Runtime counts as an engine, whose FP16 kernels round the state, too."""
    recording, fixed = streaming(tmp_path, "0")
    recording.write(tmp_path)
    (tmp_path / "enhancer").mkdir()
    np.savez(tmp_path / "enhancer" / "0.npz", level=np.zeros((1, 8)), mean=np.zeros((1, 8)))
    result = loop_of(tmp_path, fixed, FixOptions(engine="onnxruntime", repair=False), 120.0)
    assert (result.engine, result.ending, result.calls) == ("onnxruntime", "failed", 600)
    assert result.error > 0.05


def test_slow_states_are_kept_in_fp32_on_request_of_the_loop(tmp_path: Path) -> None:
    recording, fixed = streaming(tmp_path, "0")
    recording.write(tmp_path)
    (tmp_path / "enhancer").mkdir()
    rng = np.random.default_rng(1)
    for number in range(3):
        level = (-80 + rng.standard_normal((1, 8))).astype(np.float32)
        np.savez(tmp_path / "enhancer" / f"{number}.npz", level=level, mean=np.full((1, 8), -80, np.float32))
    result = loop_of(tmp_path, fixed, FixOptions(engine="emulation", build=False, verify=False), 120.0)
    assert [(repair.step, repair.helped) for repair in result.repairs] == [("states", True)]
    assert result.passed
    repaired = load(fixed["enhancer"])
    types = {name: tensor.dtype for name, tensor in repaired.facts().main.items()}
    assert types["new_mean"] == TensorProto.FLOAT


def test_a_long_script_is_compared_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each call takes a second: the five runs share 500 of them."""
    clock = SimpleNamespace(monotonic=partial(next, itertools.count()))
    monkeypatch.setattr("rewriter.jobs.closed_loop.job.time", clock)
    result = closed_loop(*streaming(tmp_path, "0"), 500.0)
    assert result.stopped and result.fixed is not None
    assert 90 < result.fixed.calls <= result.calls < 110
    assert result.ending != "refused"


def test_a_loop_ends_where_the_recording_ended(tmp_path: Path) -> None:
    recording, fixed = streaming(tmp_path, "0")
    result = run(replace(recording, calls=(("enhancer", 0),) * 100), fixed)
    assert (result.calls, result.stopped) == (100, True)
    assert result.fixed is not None and result.fixed.calls == 100
