"""`verify`: figures that are checked by hand, and verdicts on sound and broken models."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from graphs import graph
from needs import needs_rtx
from tables import values
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import ArithmeticRunError, EngineError, InputsError, UsageError
from rewriter.cli import app
from rewriter.ir.model import Array, save
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime
from rewriter.runtime.metrics.tolerances import Tolerance

ORIGINAL = """
    g (float[n,4] x) => (float[n,4] y, float[n] total) {
        a = Mul(x, x) total = ReduceSum<keepdims = 0>(a, axis) y = Sqrt(a) }"""

FIXED = """
    g (float[n,4] x) => (float[n,4] y, float[n] total) {
        h = Cast<to = 10>(x) b = Mul(h, h) a = Cast<to = 1>(b)
        total = ReduceSum<keepdims = 0>(a, axis) y = Sqrt(a) }"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An original, and a version that squares in FP16: fine up to 255, infinite from 256 on."""
    paths = []
    for name, text in (("original", ORIGINAL), ("fixed", FIXED)):
        source = graph(text.replace("{\n", "\n<int64[1] axis = {1}> {\n", 1))
        paths.append(save(source, tmp_path / f"{name}.onnx"))
    return paths[0], paths[1]


def feeds(*scales: float) -> list[dict[str, Array]]:
    return [{"x": np.linspace(0.5, scale, 8, dtype=np.float32).reshape(2, 4)} for scale in scales]


def test_a_sound_model_is_verified_by_emulation_and_the_result_says_so(files: tuple[Path, Path]) -> None:
    start = time.perf_counter()
    result = rewriter.verify(*files, inputs=feeds(3.0, 100.0), engine="emulation")
    assert result.passed
    assert all(0.0 < check.seconds <= time.perf_counter() - start for check in result.checks)
    assert (result.engine, result.device) == ("emulation", "CPU")
    assert [check.name for check in result.checks] == ["emulation", "build"]
    assert "NOT run on a GPU" in result.warnings[0]
    assert "no GPU was used" in result.checks[0].summary and result.tolerance.value == 5e-3
    assert "H200" in result.tolerance.source
    assert [output.name for output in result.outputs] == ["y", "total"]
    assert 1e-5 < result.outputs[1].relative_l2 < 1e-3


@values
def test_what_the_emulation_sums_in_is_told(tmp_path: Path, opset: int, told: str) -> None:
    path = tmp_path / "half.onnx"
    text = "g (float16[1,8] x, float16[8,2] w) => (float16[1,2] y) { y = MatMul(x, w) }"
    save(graph(text, opset=opset), path)
    sample = {"x": np.ones((1, 8), np.float16), "w": np.ones((8, 2), np.float16)}
    result = rewriter.verify(path, path, inputs=[sample], engine="emulation", accumulation="fp16")
    assert told in result.checks[0].summary


NORM = """g ({0}[2,8] x) => ({0}[2,8] y) <{0} e = {{{1}}}, {0} two = {{{2}}}, int64[1] last = {{-1}}> {{
    s = Pow(x, two) v = ReduceMean<axes = [-1]>(s) a = Add(v, e) q = Sqrt(a) y = Div(x, q) }}"""


@needs_rtx
def test_a_norm_in_fp16_whose_squares_stay_in_range_is_no_fault() -> None:
    """TensorRT warns of each; data of the user's decide, and random data do not."""
    original, fixed = graph(NORM.format("float", 1e-5, 2)), graph(NORM.format("float16", 168, 16384))
    data = [{"x": np.linspace(-3, 3, 16, dtype=np.float32).reshape(2, 8)}]
    assert rewriter.verify(original, fixed, inputs=data).passed
    assert not rewriter.verify(original, fixed).passed
    assert not rewriter.verify(original, fixed, inputs=[{"x": 100 * data[0]["x"]}]).passed


def test_an_overflow_in_one_sample_is_found(files: tuple[Path, Path]) -> None:
    result = rewriter.verify(*files, inputs=feeds(3.0, 300.0), engine="emulation")
    assert not result.passed
    assert [check.passed for check in result.checks if check.name == "emulation"] == [False]
    assert {(output.sample, output.not_finite > 0) for output in result.outputs} == {(1, True)}


def test_onnx_runtime_runs_the_file_itself_several_times(files: tuple[Path, Path]) -> None:
    result = rewriter.verify(*files, inputs=feeds(3.0), engine="onnxruntime", builds=2)
    assert result.engine == f"onnxruntime {import_onnxruntime().__version__}"
    assert result.passed
    assert [check.name for check in result.checks] == ["reference", "run"]
    assert [check.passed for check in result.checks] == [True, True]
    assert len(result.builds) == 2
    assert result.latency is not None and result.reference_latency is not None
    assert "over 2 builds" in result.checks[1].summary


def test_the_user_sets_the_tolerance(files: tuple[Path, Path]) -> None:
    strict = rewriter.verify(*files, inputs=feeds(3.0), engine="emulation", tolerance=1e-7)
    assert not strict.passed
    assert strict.tolerance == Tolerance(1e-7, "relative-l2", "`tolerance`")
    loose = rewriter.verify(
        *files, inputs=feeds(3.0), engine="onnxruntime", tolerance=40.0, metric="psnr", timing=False
    )
    assert loose.passed


PORTS = "g (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }"


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        pytest.param(PORTS.replace(" y", " z"), "outputs, it lacks y and has z in addition", id="renamed"),
        pytest.param(PORTS.replace("(x)", "(w)").replace(" x", " w"), "of the inputs, it lacks x", id="in"),
        pytest.param(
            PORTS.replace("[2,3] y)", "[2,3] y, float[2,3] z)").replace("}", "z = Neg(x) }"),
            "of the outputs, it has z in addition",
            id="one more",
        ),
    ],
)
def test_models_that_are_no_versions_of_each_other_are_refused(
    fixed: str, words: str, tmp_path: Path
) -> None:
    paths = [save(graph(text), tmp_path / f"{number}.onnx") for number, text in enumerate((PORTS, fixed))]
    with pytest.raises(UsageError, match=words) as caught:
        rewriter.verify(paths[0], paths[1])
    assert str(caught.value).startswith(f"{paths[1]}: it is not a version of {paths[0]}: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"metric": "psnr"}, "there is no default tolerance for psnr"),
        ({"min_shapes": {"x": (4, 4)}, "max_shapes": {"x": (2, 4)}}, "not in order"),
        ({"max_shapes": {"image": (2, 4)}}, "no input 'image'"),
        ({"max_shapes": {"x": (2, 5)}}, "axis 1 must be 4, not 5"),
        ({"inputs": feeds(3.0), "max_shapes": {"x": (1, 4)}}, "is 2x4 in the data, and the profile goes"),
    ],
)
def test_bad_options_are_refused(files: tuple[Path, Path], arguments: dict[str, object], told: str) -> None:
    with pytest.raises((UsageError, InputsError), match=told):
        rewriter.verify(*files, engine="emulation", **arguments)  # type: ignore[arg-type]


def run_cli(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_command_begins_with_the_verdict(files: tuple[Path, Path], tmp_path: Path) -> None:
    for scale in (3.0, 300.0):
        np.savez(tmp_path / f"{scale:g}.npz", x=feeds(scale)[0]["x"])
    report = tmp_path / "report.json"
    code, text = run_cli(
        *files, "--inputs", tmp_path / "3.npz", "--engine", "onnxruntime", "--json", report, "--builds", 2
    )
    assert code == 0, text
    assert text.splitlines()[0].startswith("Verified with ONNX Runtime on the CPU ")
    told = json.loads(report.read_text())
    assert told["passed"] is True and told["tolerance"]["source"] and len(told["builds"]) == 2
    code, text = run_cli(*files, "--inputs", tmp_path / "300.npz", "--engine", "emulation", "-q")
    assert code == 1
    assert text.startswith("VERIFICATION FAILED (emulation): ")


CUSTOM = "g (float[2,4] x) => (float[2,4] y) { y = Acme(x) }"
PLAIN = "g (float[2,4] x) => (float[2,4] y) <float k = {K}> { a = Mul(x, k) y = Relu(a) }"


def verified(folder: Path, original: str, fixed: str) -> rewriter.VerifyResult:
    """Runs with the engine of ONNX Runtime in place of TensorRT: the outputs are handled in the same way."""
    files = [
        save(graph(text), folder / f"{n}.onnx") for n, text in (("original", original), ("fixed", fixed))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewriter.jobs.verify._without_reference", lambda *_: "no kernel for Acme")
        sample = {"x": np.ones((2, 4), np.float32)}
        return rewriter.verify(files[0], files[1], inputs=[sample], engine="onnxruntime", timing=False)


@pytest.mark.parametrize(("factor", "passed"), [("2.0", True), ("2.1", False)], ids=["equal", "5 % off"])
def test_the_original_s_engine_replaces_the_reference(tmp_path: Path, factor: str, passed: bool) -> None:
    found = verified(tmp_path, PLAIN.replace("K", "2.0"), PLAIN.replace("K", factor))
    assert [(check.name, check.passed) for check in found.checks] == [("reference", None), ("run", passed)]
    words = "not checked: no kernel for Acme; the fixed model is compared with the original's FP32 engine"
    assert found.checks[0].summary == words
    assert found.outputs[0].relative_l2 == pytest.approx(float(factor) / 2.0 - 1.0, abs=1e-6)


def test_nothing_is_compared_if_the_original_s_engine_fails_too(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing can be compared: no kernel for Acme, and the original"):
        verified(tmp_path, CUSTOM, CUSTOM)


def test_without_a_gpu_a_plugin_operator_is_an_error_with_a_hint(tmp_path: Path) -> None:
    model = save(graph(CUSTOM), tmp_path / "custom.onnx")
    with pytest.raises(ArithmeticRunError, match="no kernel for Acme") as caught:
        rewriter.verify(model, model, engine="onnxruntime")
    assert "`plugin-lib`" in caught.value.hint
