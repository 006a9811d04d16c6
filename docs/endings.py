"""Writes docs/endings.md: every ending with its command, its exit code and its first lines, from runs.

python -m docs.endings            # needs tensorrt-rtx, and no GPU
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import parser
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "endings.md"
LINES = 3
"""First lines of a report that the page quotes."""

HEADER = '<ir_version: 8, opset_import: ["" : 18, "TRT" : 1]>\n'
VARYING = re.compile(
    r"\b\d+\.\d+\.\d+(?:\.\d+)?\b|(?<=built )\d+(?= layers)|[\d.]+(?= MiB)|[\d.]+(?= s; types)"
)
"""The release of TensorRT and its figures of a build, which vary: the page has `N` for them."""

Array = np.ndarray[Any, Any]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = drawn(1, 64)
PRODUCT = "net (float[1,64] x) => (float[1,512] y) { h = MatMul(x, w) y = Relu(h) }"
LOST = """net (float[1,64] x) => (float[1,64] y) <float k = {300.0}, float share = {0.37}, int64[1] mid = {1},
    float[1,1,3] copy = {0, 1, 0}> {
        h = Unsqueeze(x, mid) v = Conv <pads = [1, 1]> (h, copy) i = Squeeze(v, mid) a = Add(i, k)
        t = Tanh(a) u = Mul(t, share) b = Sub(a, k) c = Mul(b, share) y = Add(c, u) }"""
"""FP16 keeps two digits of x beside 300, which no rule sees: the Conv is a layer."""

DETECTOR = """net (float[1,64] x) => (float[1,4] boxes) <float half = {0.5}> {
    h = MatMul(x, w) raw = Relu(h) kept = TRT.EfficientNMS_TRT(raw) boxes = Mul(kept, half) }"""

COARSE = """net (float[1,64] x) => (float[1,512] y) <float step = {1.0}, int8 zero = {0}> {
    q = QuantizeLinear(x, step, zero) d = DequantizeLinear(q, step, zero) h = MatMul(d, w) y = Relu(h) }"""
"""PRODUCT with an input that is rounded to whole numbers."""

SQUARED = "net (float[1,64] x) => (float[1,64] y) { y = Mul(x, x) }"
FLOOR = "net (float[1,64] x) => (float[1,64] y) <float k = {0.01}> { a = Floor(x) b = Mul(a, k) y = Tanh(b) }"
"""An input of 0.9999999 is 1.0 in FP16, and Floor makes another integer of it."""

ROUNDED = """net (float[2,8] x) => (float[2,2] y) <float[8,2] w = {2049.0, 2049.0, -2048.0, -2048.0, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}> { y = MatMul(x, w) }"""


@dataclass(frozen=True)
class Case:
    """A model that ends in one way, and the commands that show it.

    `samples` are those of the inputs, or none; `weights` are initializers beside the text, and `plan` is the
    text of plan.json, and `before` the model that `--against` names.
    """

    means: str
    text: str
    samples: Sequence[Mapping[str, Array]] = ({"x": X},)
    options: str = ""
    weights: Mapping[str, Array] = field(default_factory=dict)
    plan: str = ""
    before: str = ""

    def model(self, text: str = "") -> onnx.ModelProto:
        model = parser.parse_model(HEADER + (text or self.text))
        for name, value in self.weights.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        return model


BF16 = """{"schema": "rewriter-plan", "version": 1, "precision": "fp16", "io": "keep", "float_nodes": 2,
    "bf16": [{"node": "Relu(y)", "op": "Relu", "key": "0:y", "rule": "user", "reason": "mine"}]}"""
"""A plan with one node in BF16, which has three bits less than FP16."""

W = {"w": drawn(64, 512, seed=1) / np.float32(8)}
CASES = {
    "verified": Case(
        "every check passed, on samples of yours; the gain is measured on a GPU, else estimated",
        PRODUCT,
        weights=W,
    ),
    "samples smaller than the profile": Case(
        "the engine takes larger inputs than the samples are, and rows do not depend on each other",
        PRODUCT.replace("[1,", "[n,"),
        options="--max-shapes x:8x64",
        weights=W,
    ),
    "with ONNX Runtime": Case(
        "ONNX Runtime runs the file on the CPU, or on CUDA, at the ends of the profile, too",
        PRODUCT.replace("[1,", "[n,"),
        options="--engine onnxruntime --max-shapes x:8x64",
        weights=W,
    ),
    "not built": Case("no engine was built: `Missing` says why", PRODUCT, options="--no-build", weights=W),
    "random data": Case("no samples were given", PRODUCT, (), weights=W),
    "constant samples": Case("every sample is constant", PRODUCT, ({"x": np.zeros_like(X)},), weights=W),
    "one sample, repeated": Case("all samples are the same", PRODUCT, ({"x": X},) * 3, weights=W),
    "less accurate than plain FP16": Case(
        "plain FP16 passes, and an option keeps it from being taken",
        PRODUCT,
        options="--plan plan.json",
        weights=W,
        plan=BF16,
    ),
    "plugins": Case("the library of a plugin is not on this machine", DETECTOR, weights=W),
    "TF32": Case(
        "the original misses the tolerance with TF32, TensorRT's default",
        ROUNDED,
        ({"x": 1 + drawn(2, 8) / np.float32(1000)},),
    ),
    "as inaccurate as the original": Case(
        "`--against` names the model before quantisation, from which the original is too far",
        COARSE,
        options="--against float.onnx",
        weights=W,
        before=PRODUCT,
    ),
    "no gain": Case("plain FP16 is wrong, and its repair takes what FP16 gains", LOST),
    "nothing in FP16": Case("rules or options leave nothing in FP16", SQUARED, ({"x": 1e4 * X},)),
    "no floats": Case(
        "there is nothing to lower",
        "net (int64[4] x) => (int64[4] y) { y = Add(x, x) }",
        ({"x": np.arange(4)},),
    ),
    "failed": Case("a check failed: `Limit` and `Remedy` say why", LOST, options="--no-repair"),
    "an option is not kept": Case(
        "a check fails with an option, and passes without it",
        FLOOR,
        ({"x": np.full_like(X, 0.9999999)}, {"x": X}),
        options="--io fp16",
    ),
    "nothing written": Case("`--strict` writes only what is proven", PRODUCT, (), "--strict", W),
    "no check": Case(
        "ONNX Runtime cannot run the original, and nothing built it",
        "net (float[1,64] x) => (float[1,64] y) { p = TRT.Preprocess_TRT(x) y = Relu(p) }",
    ),
    "not verified": Case("the user switched the checks off", PRODUCT, options="--no-verify", weights=W),
    "refused": Case(
        "TensorRT refuses a node of the original", "net (float[1,64] x) => (float[n] y) { y = Unique(x) }"
    ),
    "bad samples": Case(
        "nothing was started, and nothing is written", PRODUCT, ({"x": np.full_like(X, np.nan)},), weights=W
    ),
}
"""The endings of `fix`, by a word or two."""


INTRODUCTION = """\
# Every ending

Written by `python -m docs.endings` from runs on a machine with TensorRT-RTX and no GPU. Each ending has its
exit codes, and the first three lines of `fix`, `verify` and `scan`; `N` is a figure that varies. On a GPU
the first line names it, with measured latencies. [What “Verified” means](verified.md) explains them.
"""


@dataclass(frozen=True)
class Run:
    command: str
    code: int
    lines: tuple[str, ...]


def runs(case: Case, folder: Path) -> Iterator[Run]:
    """Runs `fix`, then `verify` if a file was written, then `scan`, in a folder."""
    onnx.save(case.model(), folder / "net.onnx")
    if case.plan:
        (folder / "plan.json").write_text(case.plan, encoding="utf-8")
    if case.before:
        onnx.save(case.model(case.before), folder / "float.onnx")
    data = ""
    if case.samples:
        (folder / "data").mkdir()
        for number, sample in enumerate(case.samples):
            np.savez(folder / "data" / f"{number}.npz", **sample)  # type: ignore[arg-type]
        data = " --inputs data"
    options = f" {case.options}" if case.options else ""
    with chdir(folder):
        yield run(f"fix net.onnx -o fixed.onnx{data}{options}")
        if (folder / "fixed.onnx").exists():
            yield run(f"verify net.onnx fixed.onnx{data}{options if case.before else ''}")
        yield run(f"scan net.onnx{data}")


def run(command: str) -> Run:
    """Runs a command in this process, at 100 columns."""
    from rewriter.cli import app

    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "100"})
    printed = done.stdout or done.stderr
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("search: ")][:LINES]
    return Run(command, done.exit_code, tuple(VARYING.sub("N", line) for line in kept))


def section(name: str) -> str:
    """The part of the page on one ending."""
    case = CASES[name]
    parts = [f"## {name[0].upper()}{name[1:]}\n\n{case.means[0].upper()}{case.means[1:]}.\n"]
    with tempfile.TemporaryDirectory() as folder:
        for one in runs(case, Path(folder)):
            parts.append(f"`rewriter {one.command}`: exit code {one.code}\n")
            parts.append("```text\n" + "\n".join(one.lines) + "\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text("\n".join([INTRODUCTION, *map(section, CASES)]), encoding="utf-8")
