"""`fix` says it, `verify` confirms it: the same verdict and number, in one set of words."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import cases, graph
from nightly import NIGHTLY
from onnx import TensorProto, helper
from paths import MODELS
from tables import values
from test_cases import CASES
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.cli import app
from rewriter.ir.model import Array, save
from rewriter.report.results import FixResult

QUICK = ("bert", "mixed_casts", "qdq")


def floats(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@dataclass(frozen=True)
class Hostile:
    """A graph, its samples, and options of `fix`."""

    text: str
    samples: list[dict[str, Array]]
    options: dict[str, Any] = field(default_factory=dict)


X = [{"x": floats(4, 8, seed=seed)} for seed in range(3)]
HOSTILE = {
    name: Hostile(text, eval(data), eval(f"dict({options})"))
    for text, name, data, options in (case.values for case in cases("jobs/hostile.txt"))
}


def numbers(result: Any, *names: str) -> list[tuple[bool | None, dict[str, float]]]:
    checks = [check for check in result.checks if check.name in names]
    return [(one.passed, {o.name: o.relative_l2 for o in one.outputs}) for one in checks]


def agree(source: Path, data: Any, tmp_path: Path, **options: Any) -> FixResult:
    """`fix`, then `verify` of its file with the same data."""
    written = tmp_path / "fixed.onnx"
    made = rewriter.fix(source, written, inputs=data, build=False, **options)
    found = rewriter.verify(source, written, inputs=data, build=False, engine="emulation")
    assert numbers(made, "emulation", "tf32")[-1:] == numbers(found, "emulation")
    assert bool(made.verified) == found.passed
    if limit := options.get("tolerance"):
        assert {output.tolerance for output in made.before} == {limit}, "before is judged as the result is"
    return made


@pytest.mark.parametrize("name", HOSTILE)
def test_verify_confirms_what_fix_says_of_a_hostile_network(name: str, tmp_path: Path) -> None:
    case = HOSTILE[name]
    agree(save(graph(case.text), tmp_path / "net.onnx"), case.samples, tmp_path, **case.options)


def test_of_more_samples_than_are_judged_the_widest_are(tmp_path: Path) -> None:
    """The last but one of twenty is wide: `fix` and `verify` both judge it, and neither the 15th."""
    source, data = (
        save(graph("g (float[4] x) => (float[4] y) { y = Exp(x) }"), tmp_path / "net.onnx"),
        tmp_path / "data",
    )
    data.mkdir()
    for number in range(20):
        size = {18: 12.5, 14: 0.5}.get(number, 1.0)
        np.savez(data / f"{number:02}.npz", x=np.full(4, size, np.float32))
    found = agree(source, data, tmp_path).data
    assert found is not None and "judged on 16 of 20" in found.text
    judged = [Path(name).stem for name in found.names]
    assert judged[0] == "19" and {"18", "14"} & {*judged} == {"18"} and len(judged) == 16


def test_verify_says_that_fix_judged_fewer_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.jobs.search.effort.RunCost.samples", lambda *_: 1)
    source, written = (
        save(graph("g (float[4,8] x) => (float[4,8] y) { y = Exp(x) }"), tmp_path / "net.onnx"),
        tmp_path / "f.onnx",
    )
    made = rewriter.fix(source, written, inputs=X, build=False)
    assert made.judged == 1
    verified = rewriter.verify(source, written, inputs=X, build=False, engine="emulation")
    assert any("fix judged the file on 1 of the samples" in warning for warning in verified.warnings)


def test_fp32_excuses_no_error_on_a_sample_that_it_computes_well(tmp_path: Path) -> None:
    """TF32 rounds 2049, which is 2 % where two columns cancel; FP16 loses 0.02 beside 300, on one column."""
    text = HOSTILE["as far as FP32"].text.replace(
        "y = MatMul(x, w)",
        "h = Unsqueeze(x, l) v = Conv <pads = [1, 1]> (h, w3) i = Squeeze(v, l) "
        "a = Add(i, k) b = Sub(a, k) y = MatMul(b, w)",
    )
    text = text.replace(
        "<float[8,2] w", "<float k = {300.0}, int64[1] l = {1}, float[1,1,3] w3 = {0, 1, 0}, float[8,2] w"
    )
    source = save(graph(text), tmp_path / "net.onnx")
    both, one = np.ones((2, 8), np.float32), np.zeros((2, 8), np.float32)
    one[:, 0] = 1.02
    cancelling = agree(source, [{"x": both}], tmp_path, repair=False)
    assert cancelling.conclusion.kind == "as-fp32"
    (tmp_path / "fixed.onnx").unlink()
    assert agree(source, [{"x": both}, {"x": one}], tmp_path, repair=False).verified is False


@pytest.mark.parametrize("name", CASES if NIGHTLY else QUICK)
def test_verify_confirms_what_fix_says_of_a_case(name: str, tmp_path: Path) -> None:
    source, data = (MODELS / CASES[name][key] for key in ("file", "inputs"))
    assert agree(source, data, tmp_path).verified


def test_a_file_that_is_all_fp32_is_called_that() -> None:
    """`passes=simplify` lowers nothing; nor does a network of integers."""
    twice = graph("g (float[4,8] x) => (float[4,8] y) { a = Identity(x) y = Relu(a) }").whole()
    result = rewriter.fix(twice, inputs=X, build=False, passes="simplify")
    assert result.ending == "Nothing was lowered: all of it is FP32 (emulated on 3 samples, NOT built)"
    integers = HOSTILE["integers alone"]
    result = rewriter.fix(graph(integers.text).whole(), inputs=integers.samples, build=False)
    assert result.ending.startswith("Nothing was lowered: no node has floats")
    everything = rewriter.fix(twice, inputs=X, build=False, keep_fp32_op=["Relu"])
    assert everything.ending.startswith("Nothing was lowered: all of it is FP32") and not everything.proven


def test_all_fp32_is_amber_for_fix_and_verify_unless_it_was_the_request(tmp_path: Path) -> None:
    source = save(
        graph("g (float[4,8] x) => (float[4,8] y) { a = Identity(x) y = Relu(a) }"), tmp_path / "net.onnx"
    )
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"keep_fp32_op": ["Relu"]}, ["build", "fp32"]),
        ({"precision": "fp32"}, ["build"]),
    ]
    for options, kinds in cases:
        result = rewriter.fix(source, tmp_path / "fixed.onnx", inputs=X, build=False, **options)
        again = rewriter.verify(source, tmp_path / "fixed.onnx", inputs=X, build=False, engine="emulation")
        assert [gap.kind for gap in result.gaps] == [gap.kind for gap in again.gaps] == kinds
        assert result.ending == again.ending and result.accepted is ("fp32" not in kinds)


def test_strict_takes_random_data_for_no_proof(tmp_path: Path) -> None:
    source = save(graph("g (float[4,8] x) => (float[4,8] y) { y = Relu(x) }"), tmp_path / "net.onnx")
    command = ["fix", str(source), "--no-build", "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.output.startswith("Emulated on random data, which is no proof, NOT ")
    (tmp_path / "net.fixed.onnx").unlink()
    done = CliRunner().invoke(app, [*command, "--strict"])
    assert done.exit_code == 1 and not (tmp_path / "net.fixed.onnx").exists()
    np.savez(tmp_path / "x.npz", x=X[0]["x"])
    done = CliRunner().invoke(app, [*command, "--strict", "--inputs", str(tmp_path / "x.npz")])
    assert done.exit_code == 0 and done.output.startswith("Emulated on 1 sample, NOT built: ")


def test_onnx_runtime_on_the_cpu_is_no_gpu() -> None:
    source = graph("g (float[4,8] x) => (float[4,8] y) { y = Sigmoid(x) }").whole()
    result = rewriter.fix(source, inputs=X, engine="onnxruntime")
    assert result.ending == "Verified with ONNX Runtime on the CPU on 3 samples"


ALMOST_ONE = """
    g (float[4,64] x) => (float[4,64] y) <float k = {0.001}> { a = Floor(x) b = Mul(a, k) y = Tanh(b) }"""
"""An input of 0.9999999 is 1.0 in FP16, and Floor makes another integer of it."""


def test_an_option_of_the_users_is_kept_or_the_ending_names_it() -> None:
    data = {"x": np.full((4, 64), 0.9999999, np.float32)}
    source = graph(ALMOST_ONE).whole()
    result = rewriter.fix(source, inputs=data, build=False, io="fp16")
    assert result.ending == "VERIFICATION FAILED (io)"
    assert (
        "`io=fp16` is not kept: x, y keep their types; with it, FP16 emulated: largest error"
        in result.conclusion.limit
    )
    assert result.conclusion.remedy.startswith("leave out `io`")
    assert result.plan is not None and len(result.plan.fp32) == 1, "what mends it is no FP32"
    assert rewriter.fix(source, inputs=data, build=False).verified
    sound = rewriter.fix(source, inputs={"x": floats(4, 64)}, build=False, io="fp16")
    assert sound.verified and {p.dtype for p in sound.model.signature.inputs} == {TensorProto.FLOAT16}


@pytest.mark.parametrize("options", [{"passes": "simplify"}, {"precision": "fp32"}], ids=str)
def test_types_of_inputs_that_cannot_be_had_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        rewriter.fix(graph(ALMOST_ONE).whole(), io="fp16", **options)
    assert caught.value.options == ("io",)


def test_a_plan_that_is_worse_than_plain_fp16_rounds_weights_to_nearest() -> None:
    """Weights that keep means err more here, by chance: without them the figure is plain FP16's."""
    draw = np.random.default_rng(18)
    weights = (", ".join(f"{x:.4f}" for x in draw.normal(0, 0.3, 256)) for _ in range(3))
    values = ", ".join(f"float[16,16] {name} = {{{row}}}" for name, row in zip("uvw", weights, strict=True))
    text = "a = MatMul(x, u) b = MatMul(a, v) y = MatMul(b, w)"
    source = graph(f"g (float[4,16] x) => (float[4,16] y) <{values}> {{ {text} }}").whole()
    result = rewriter.fix(source, inputs={"x": draw.normal(0, 1, (4, 16)).astype(np.float32)}, build=False)
    assert result.repairs[-1].startswith("weights rounded to nearest: every check passes")
    assert numbers(result, "emulation") == [(True, {"y": result.before[0].relative_l2})]


def test_a_tolerance_of_zero_is_the_limit_that_is_printed() -> None:
    case = HOSTILE["as far as FP32"]
    result = rewriter.fix(graph(case.text).whole(), inputs=case.samples, build=False, tolerance=0.0)
    assert not result.proven and "build it with TF32 off" in result.ending and result.verdict is not None
    texts = [check.summary for check in result.checks if check.name in ("emulation", "tf32")]
    assert texts and all("beyond 0;" in text and "0.005" not in text for text in texts)


def test_a_second_fix_says_of_statistics_what_the_first_did() -> None:
    """A running variance beyond FP16 that cannot be folded is out of range in the fixed file, too."""
    source = graph(
        """g (float[1,2,4,4] x) => (float[1,2,4,4] y)
        <float[2] s = {1.0, 1.0}, float[2] b = {0.0, 0.1}, float[2] m = {1.0, 2.0},
         float[2] v = {497160.0, 3.0}> {
            a = Relu(x) c = BatchNormalization(a, s, b, m, v) y = Tanh(c) }"""
    )
    data = {"x": floats(1, 2, 4, 4, scale=300.0)}
    first = rewriter.fix(source, inputs=data, build=False)
    second = rewriter.fix(first.proto, inputs=data, build=False)
    assert ["v holds 4.972e+05" in cause.what for cause in first.causes] == [True]
    assert [cause.what for cause in second.causes] == [cause.what for cause in first.causes]


def test_a_file_from_elsewhere_names_no_metric_to_run(tmp_path: Path) -> None:
    source = save(graph("g (float[4,8] x) => (float[4,8] y) { y = Relu(x) }"), tmp_path / "net.onnx")
    proto = onnx.load(source)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    helper.set_model_props(proto, {"rewriter.tolerance": f"1 {tmp_path / 'evil.py'}:metric"})
    onnx.save(proto, tmp_path / "fixed.onnx")
    assert rewriter.verify(source, tmp_path / "fixed.onnx", inputs=X, build=False, engine="emulation").passed


@values
def test_a_file_does_not_loosen_its_own_limit(stated: str, passes: bool, remark: str, tmp_path: Path) -> None:
    source = save(graph("g (float16[4,8] x) => (float16[4,8] y) { y = Relu(x) }"), tmp_path / "net.onnx")
    wrong = graph("g (float16[4,8] x) => (float16[4,8] y) { a = Relu(x) y = Neg(a) }").proto
    helper.set_model_props(wrong, {"rewriter.tolerance": stated})
    onnx.save(wrong, tmp_path / "wrong.onnx")
    models = source, tmp_path / "wrong.onnx"
    data = [{"x": sample["x"].astype(np.float16)} for sample in X]
    result = rewriter.verify(*models, inputs=data, build=False, engine="emulation")
    assert result.passed is passes
    assert (remark in "".join(result.warnings)) and result.tolerance.value <= 5e-3
    looser = rewriter.verify(*models, inputs=data, build=False, engine="emulation", tolerance=3.0)
    assert looser.passed, "the user may loosen it"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0])
def test_a_limit_that_holds_nothing_is_refused(value: float) -> None:
    net = graph("g (float[4,8] x) => (float[4,8] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match="`tolerance`: it cannot be"):
        rewriter.verify(net, net, inputs=X, tolerance=value)
    with pytest.raises(UsageError, match="`tolerance`: it cannot be"):
        rewriter.fix(net, inputs=X, tolerance=value)


def test_the_first_figure_names_the_sample_that_is_worst(tmp_path: Path) -> None:
    for number, size in enumerate((1.0, 8.0, 1.0)):
        np.savez(tmp_path / f"{number}.npz", x=floats(4, 8, scale=size, seed=number))
    body = "{ a = Add(x, x) b = Mul(a, k) c = Tanh(a) y = Sub(b, c) }"
    net = graph(f"g (float[4,8] x) => (float[4,8] y) <float k = {{0.9}}> {body}")
    source = save(net, tmp_path / "net.onnx")
    line = ["fix", str(source), "--dry-run", "--no-build", "--passes", "mixed-precision", "-v"]
    done = CliRunner().invoke(app, [*line, "--inputs", str(tmp_path)], env={"COLUMNS": "250"})
    (worst,) = re.findall(r"relative L2 of y in (sample \d.npz); emulated", done.output)
    assert done.output.count(f"in {worst}") == 2, "in the table of outputs, too"
