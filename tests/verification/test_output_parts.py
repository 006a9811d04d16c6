"""`verify`, `fix` and `locate` judge outputs by their parts: small forms of networks that were "Verified"."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from graphs import with_weights
from tables import values

import rewriter
from rewriter.ir.model import Array, Model, save
from rewriter.jobs.fix.before import lowered
from rewriter.jobs.locate import locate
from rewriter.report.fix import rows as fix_rows
from rewriter.report.scan import rows as scan_rows
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.verification.arithmetic_checks import as_fp32
from rewriter.verification.verdict import Check

YOLO = """g (float[1,16,400] x, float[1,4,16] b, float[1,20,16] c) => (float[1,24,400] y) {
    size = Constant <value = float {640.0}> () dim = Constant <value = float {FACTOR}> ()
    l = MatMul(b, x) s = Sigmoid(l) boxes = Mul(s, size) m = MatMul(c, x) t = Sigmoid(m) scores = Mul(t, dim)
    y = Concat<axis = 1>(boxes, scores) }"""
LOGITS = """g (float[4,64] x, float[64,70] w, float[70] mask) => (float[4,70] y) {
    sign = Constant <value = float {FACTOR}> () l = MatMul(x, w) s = Mul(l, sign) y = Add(s, mask) }"""
WEIGHTS = {
    name: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, (name, shape) in enumerate({"b": (1, 4, 16), "c": (1, 20, 16), "w": (64, 70)}.items())
}


def network(folder: Path, text: str, factor: str, **more: Array) -> Path:
    held = {name: value for name, value in (WEIGHTS | more).items() if f" {name}" in text.partition("=>")[0]}
    folder.mkdir(exist_ok=True)
    return save(with_weights(text.replace("FACTOR", factor), held), folder / f"{factor}.onnx")


def data(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(9).normal(size=shape).astype(np.float32)}


def test_destroyed_scores_beside_boxes_fail_and_are_located(tmp_path: Path) -> None:
    right, wrong = network(tmp_path, YOLO, "1.0"), network(tmp_path, YOLO, "0.0002")
    result = rewriter.verify(right, wrong, inputs=data(1, 16, 400), build=False)
    whole, scores = result.checks[0].outputs
    assert not result.passed and whole.passed and whole.relative_l2 < 0.005
    assert "rows 4 to 23 of axis 1" in result.checks[0].summary
    assert scores.name == "y (rows 4 to 23 of axis 1)" and scores.relative_l2 == pytest.approx(1.0, abs=0.01)
    found = locate(right, wrong, inputs=data(1, 16, 400))
    assert (
        found.first is not None
        and found.first.tensor in ("scores", "y")
        and any(scores.name in n for n in found.notes)
    )


def test_numbered_tensors_of_another_export_are_matched_by_what_computes_them(tmp_path: Path) -> None:
    """One more Mul gives each later tensor the name of another one, of the same shape or of another."""
    head = "g (float[1,16,400] x, float[1,4,16] b, float[1,20,16] c) => (float[1,24,400] y) {"
    right = (
        head
        + """ t1 = MatMul(b, x) t2 = Sigmoid(t1) t3 = MatMul(c, x) t4 = Sigmoid(t3)
        t5 = Tanh(t4) y = Concat<axis = 1>(t2, t5) }"""
    )
    wrong = (
        head
        + """ k = Constant <value = float {3.0}> () t1 = MatMul(b, x) t2 = Sigmoid(t1) t3 = MatMul(c, x)
        t4 = Mul(t3, k) t5 = Sigmoid(t4) t6 = Tanh(t5) y = Concat<axis = 1>(t2, t6) }"""
    )
    more = (
        head
        + """ k = Constant <value = float {1.0}> () t1 = Mul(x, k) t2 = MatMul(b, x) t3 = Sigmoid(t2)
        t4 = MatMul(c, x) t5 = Sigmoid(t4) t6 = Tanh(t5) y = Concat<axis = 1>(t6, t3) }"""
    )
    files = [network(tmp_path / name, text, name) for name, text in (("r", right), ("w", wrong), ("m", more))]
    found = locate(files[0], files[2], inputs=data(1, 16, 400))
    assert found.first is not None and found.first.tensor == "y"
    assert any("both files use names for different tensors (t2, t3, t4 ...)" in note for note in found.notes)
    first = (
        head
        + """ k = Constant <value = float {3.0}> () t1 = Mul(b, k) t2 = MatMul(t1, x) t3 = Sigmoid(t2)
        u = Mul(c, k) t4 = MatMul(u, x) t5 = Sigmoid(t4) t6 = Tanh(t5) y = Concat<axis = 1>(t3, t6) }"""
    )
    found = locate(files[0], network(tmp_path / "f", first, "f"), inputs=data(1, 16, 400))
    assert found.first is not None and found.first.tensor == "y", "nothing else has a name of its own"
    same = locate(files[0], files[1], inputs=data(1, 16, 400))
    assert same.first is not None and same.first.tensor == "t4", "no name is another tensor's"
    assert not any("both files use" in note for note in same.notes)


@pytest.mark.parametrize("value", [float(np.finfo(np.float32).min), -1e9, -1e4])
def test_logits_beside_a_mask_are_judged_without_it(value: float, tmp_path: Path) -> None:
    mask = np.where(np.arange(70) % 7, 0.0, value).astype(np.float32)
    right, wrong = (network(tmp_path, LOGITS, sign, mask=mask) for sign in ("1.0", "-3.0"))
    result = rewriter.verify(right, wrong, inputs=data(4, 64), build=False)
    whole, rest = result.checks[0].outputs
    assert not result.passed and whole.passed is (value < -1e4)
    assert rest.relative_l2 == pytest.approx(4.0, rel=0.01)
    assert rewriter.verify(right, right, inputs=data(4, 64), build=False).passed


def test_fix_ends_alike_for_parts_and_for_outputs(tmp_path: Path) -> None:
    """exp(-d^2/2) of d^2 = |x|^2 - 2xp + |p|^2 beside boxes in pixels, in one output and in two."""
    text = """g (float[1,200,4] x, float[4,2] w, float[2,10] p, float[1,1,10] pp, float[4,4] b) => (OUT) {
        axis = Constant <value = int64[1] {-1}> () two = Constant <value = float {2.0}> ()
        half = Constant <value = float {-0.5}> () size = Constant <value = float {640.0}> ()
        k = MatMul(x, w) kk = Mul(k, k) n = ReduceSum(kk, axis) kp = MatMul(k, p) t = Mul(kp, two)
        d = Sub(n, t) e = Add(d, pp) r = Relu(e) m = Mul(r, half) LAST }"""
    drawn = np.random.default_rng(3)
    x, w = (
        drawn.normal(size=(1, 200, 4)).astype(np.float32),
        20 * drawn.normal(size=(4, 2)).astype(np.float32),
    )
    p = (x[0, :10] @ w).T + 0.5
    weights = {
        "w": w,
        "p": p,
        "pp": (p * p).sum(0)[None, None],
        "b": drawn.normal(size=(4, 4)).astype(np.float32),
    }
    boxes = "l = MatMul(x, b) g = Sigmoid(l) boxes = Mul(g, size) "
    for outputs, last in (
        ("float[1,200,14] y", f"s = Exp(m) {boxes} y = Concat<axis = 2>(boxes, s)"),
        ("float[1,200,4] boxes, float[1,200,10] s", f"s = Exp(m) {boxes}"),
    ):
        source = with_weights(text.replace("OUT", outputs).replace("LAST", last), weights)
        plain = rewriter.fix(source.proto, tmp_path / "o.onnx", inputs={"x": x}, build=False)
        worst = max(o.relative_l2 for o in plain.before)
        assert not all(o.passed for o in plain.before) and worst > 0.1, outputs
        assert not plain.verified or not any(o.relative_l2 > 0.1 for o in plain.checks[-1].outputs)


def part(error: float, entries: int) -> OutputComparison:
    few = 1.0 + 1.6 / math.sqrt(entries)
    return OutputComparison("y (p)", error, error, 1.0, True, 0.005 * few, of="y", chance=few)


@values
@pytest.mark.parametrize("asked", [False, True], ids=["", "a tolerance of the user's"])
def test_fp32_excuses_parts(error: float, own: float, entries: int, passed: bool, asked: bool) -> None:
    rounds = ((part(error, entries),),)
    check = Check("run", False, (), rounds[0], rounds=rounds)
    judged = as_fp32(check, lambda: [[part(own, entries)]], parts_alone=asked)
    assert judged.passed is passed


DISTANCES = """g (float[1,16,400] x, float[1,4,16] b, float[1,20,16] c) => (float[1,24,400] y) {
    size = Constant <value = float {640.0}> () far = Constant <value = float {FACTOR}> ()
    l = MatMul(b, x) s = Sigmoid(l) boxes = Mul(s, size) m = MatMul(c, x) near = Add(m, far)
    d = Sub(near, far) t = Sigmoid(d) y = Concat<axis = 1>(boxes, t) }"""


def test_the_error_line_has_the_figure_of_the_part_that_fails(tmp_path: Path) -> None:
    """Scores by distances: 4 decimals of 3000.5 are lost, and the boxes' figure would hide it."""
    path, inputs = network(tmp_path, DISTANCES, "3000.0"), data(1, 16, 400)
    scores = "relative L2 of y (rows 4 to 23 of axis 1)"
    told = rewriter.scan(path, inputs=inputs)
    (line,) = [text for label, text in scan_rows(told) if label == "Error"]
    assert told.plain is not None and re.match(r"0\.[1-9]\d* in plain FP16, NOT within 0\.0", line), line
    assert scores in line
    fixed = rewriter.fix(path, inputs=inputs, build=False)
    line = next(text for label, text in fix_rows(fixed, everything=False) if label == "Error")
    assert re.match(rf"0\.[1-9]\d* in plain FP16, now 0\.00\d+, within .*{re.escape(scores)}", line), line
    failed = rewriter.fix(
        path, inputs=inputs, build=False, repair=False, passes="mixed-precision", lower=["*"]
    )
    line = next(text for label, text in fix_rows(failed, everything=False) if label == "Error")
    assert not failed.verified and "NOT within 0.0" in line and scores in line, line


SHAPES = {
    "a quiet clip's scores": ((3, 16, 200), (24, 1), (3, 1, 1)),
    "channels of a quiet head": ((4, 16, 64), (12, 1), (4, 1, 1)),
    "sigma of a quiet item": ((6, 16, 40), (2, 1), (6, 1, 1)),
    "channels beside an outlier, tokens beside a sink": ((1, 16, 300), (32, 1), (1, 1, 300)),
}
TEXT = """g (float[{x}] x, float[{n},16] w, float[{n},16] v, float[{columns}] columns, float[{items}] items,
    float[{shape}] spoiled) => (float[{shape}] y) {{
    l = MatMul(w, x) t = Tanh(l) m = MatMul(v, x) s = Sigmoid(m) p = Mul(t, s) c = Mul(p, columns)
    i = Mul(c, items) y = Mul(i, spoiled) }}"""


def nested(form: str, seed: int, spoil: float) -> Model:
    """Columns and items of two scales each; small columns in small items are off by `spoil`."""
    x, column, item = SHAPES[form]
    drawn = np.random.default_rng(seed)
    columns, items = np.full(column, drawn.uniform(100, 600)), np.ones(item)
    fewest = 1 + column[0] // 8  # of two large channels that one token makes, scales may be chance
    columns[drawn.integers(fewest, column[0]) :] = drawn.uniform(0.1, 1.0)
    if drawn.integers(2) and len(columns) > 4:
        columns = columns * drawn.uniform(0.5, 2.0, columns.shape)
    flat = items.reshape(-1)
    flat[1:] = drawn.uniform(0.5, 1.0, flat.size - 1)
    small = np.s_[-1:] if drawn.integers(2) or flat.size < 3 else np.s_[-2:]
    small = np.s_[1:] if item[-1] > 1 else small
    flat[small] *= drawn.uniform(0.002, 0.02)
    shape = (x[0], column[0], x[2])
    inner = (columns < columns.max() / 16) & (items < items.max() / 16)
    noise = np.where(inner, 1.0 + spoil * np.sign(drawn.normal(size=shape)), 1.0)
    names = {"x": x, "columns": column, "items": item, "shape": shape}
    text = TEXT.format(n=column[0], **{name: ",".join(map(str, size)) for name, size in names.items()})
    weights: dict[str, Array] = {"columns": columns, "items": items, "spoiled": noise}
    weights |= {name: drawn.normal(size=(column[0], 16)) / 4 for name in ("w", "v")}
    return with_weights(text, {name: value.astype(np.float32) for name, value in weights.items()})


def verified(form: str, seed: int, right: Model, folder: Path) -> rewriter.VerifyResult:
    data = [
        {"x": np.random.default_rng((seed, n)).normal(size=SHAPES[form][0]).astype(np.float32)}
        for n in (0, 1)
    ]
    other = save(right, folder / "other.onnx")
    return rewriter.verify(nested(form, seed, 0.0).whole(), other, inputs=data, build=False)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("seed", range(7))
def test_plain_fp16_of_parts_within_parts_is_verified(form: str, seed: int, tmp_path: Path) -> None:
    result = verified(form, seed, lowered(nested(form, seed, 0.0), "fp16"), tmp_path)
    assert result.passed, result.checks[0].summary


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("seed", range(7))
def test_a_wrong_part_within_a_part_fails_and_is_named(form: str, seed: int, tmp_path: Path) -> None:
    result = verified(form, seed, nested(form, seed, 0.3), tmp_path)
    assert not result.passed and "of axis" in result.checks[0].summary
    worst = max(result.checks[0].outputs, key=lambda output: output.relative_l2)
    assert ", in " in worst.name and worst.relative_l2 > 0.2
