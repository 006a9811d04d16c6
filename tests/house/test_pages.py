"""README.md and docs/: commands and Python run, quoted output is what is printed, links lead somewhere."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import parsed
from doc_pages import ELSEWHERE, LINK, PAGES, Block, CommandLine, blocks, command_lines
from needs import needs_rtx, without_gpu
from onnx import parser
from paths import MODELS, ROOT
from typer.testing import CliRunner, Result

from rewriter.cli import app

COMMANDS = list(command_lines())
BLOCKS = list(blocks())
OUTPUT = "output of: "
JUDGES = {"verify", "locate", "compare-inputs", "scan"}  # commands whose exit code 1 is an answer

SCRIPT = """
import numpy as np
import onnxruntime as ort

session, values = ort.InferenceSession("model.onnx"), np.random.default_rng(0)
for _ in range(4):
    (y,) = session.run(None, {"x": values.random((1, 3, 32, 32), np.float32)})
print(y.mean())
"""

DETECTOR = """
<ir_version: 8, opset_import: ["" : 17, "TRT" : 1]>
net (float[1, 3, 32, 32] x) =>
    (int32[1, 1] num, float[1, 4, 4] boxes, float[1, 4] scores, int32[1, 4] classes) {
    ["/head/Conv"] a = Conv<strides = [8, 8]>(x, w) ["/head/Reshape"] rows = Reshape(a, shape)
    ["/head/Split"] edges, raw = Split<axis = 2>(rows, parts)
    ["/head/Sigmoid"] probabilities = Sigmoid(raw)
    ["/nms"] num, boxes, scores, classes = TRT.EfficientNMS_TRT(edges, probabilities)
}
"""

NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, h, w] x) => (float[n, 4, h, w] y) {
    ["/stem/Conv"] a = Conv<pads = [1, 1, 1, 1]>(x, stem) ["/norm1/Relu"] b = Relu(a)
    ["/head/Conv"] y = Conv(b, head)
}
"""


def net() -> onnx.ModelProto:
    """A stem, a node of a norm's name and a head, with seeded weights."""
    model = parser.parse_model(NET)
    values = np.random.default_rng(0)
    for name, shape in {"stem": (8, 3, 3, 3), "head": (4, 8, 1, 1)}.items():
        weight = values.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def detector() -> onnx.ModelProto:
    """A head that ends in a plugin, with seeded weights."""
    model, weight = parser.parse_model(DETECTOR), np.random.default_rng(0).normal(0, 0.3, (6, 3, 8, 8))
    arrays = {"w": weight.astype(np.float32), "shape": np.array([1, 16, 6]), "parts": np.array([4, 2])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    return model


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the pages name."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("desk")
    for name in ("model", "original", "other", "fixed", "model_fp16", "yolo", "model_int8"):
        onnx.save(net(), folder / f"{name}.onnx")
    onnx.save(detector(), folder / "detector.onnx")
    values = np.random.default_rng(1)
    pictures = values.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    samples = [(p.transpose(2, 0, 1)[None] / 255).astype(np.float32) for p in pictures]
    for name in ("data", "samples", "photos"):
        (folder / name).mkdir()
    for place, (picture, sample) in enumerate(zip(pictures, samples, strict=True)):
        np.savez(folder / "data" / f"{place}.npz", x=sample)
        np.savez(folder / "samples" / f"{place}.npz", x=sample)
        pillow.fromarray(picture).save(folder / "photos" / f"{place}.png")
    np.savez(folder / "data.npz", x=samples[0])
    np.savez(folder / "ours.npz", x=np.concatenate(samples))
    np.savez(folder / "theirs.npz", x=np.concatenate(samples)[:, ::-1])
    (folder / "my_script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        assert run(["record", "calls", "--", "python", "my_script.py"], folder, patch).exit_code == 0
    shutil.copytree(MODELS, folder / "models", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    return folder


def run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *, build: bool = False) -> Result:
    """Run the command in `folder`; where its output is not quoted, without building engines."""
    monkeypatch.setenv("REWRITER_BUILD", str(build).lower())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def reports(desk: Path) -> Path:
    """The desk with the fixed model, its report and its plan."""
    with pytest.MonkeyPatch.context() as patch:
        fix = "fix model.onnx -o fixed.onnx --inputs data.npz --report a.json --save-plan plan.json"
        verify = "verify model.onnx fixed.onnx --inputs data.npz --report here.json"
        for command in (fix, verify):
            done = run(list[str](command.split()), desk, patch)
            assert done.exit_code == 0, done.output
    return desk


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_runs(command: CommandLine, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.not_run:
        pytest.skip(command.not_run)
    done = run(command.words, reports, monkeypatch)
    allowed = {0, 1} if command.words[0] in JUDGES else {0}
    assert done.exit_code in allowed, done.output


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.not_run and "--install-completion" not in c.line], ids=str
)
def test_a_command_that_is_not_run_parses(command: CommandLine) -> None:
    parsed(command.line)


def test_there_are_commands_of_every_kind() -> None:
    names = {command.words[0] for command in COMMANDS}
    assert set("fix scan verify locate compare-inputs probe presets passes config".split()) <= names


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python" and b.page not in ELSEWHERE], ids=str
)
def test_a_python_block_runs(block: Block, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.not_run:
        pytest.skip(block.not_run)
    monkeypatch.chdir(reports)
    exec(compile(block.body, block.page, "exec"), {"__name__": "page"})


QUOTED = [block for block in BLOCKS if block.mark.startswith(OUTPUT)]


@needs_rtx
@without_gpu
@pytest.mark.parametrize("block", QUOTED, ids=str)
def test_quoted_output_is_as_printed(block: Block, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = block.mark.removeprefix(OUTPUT).split()[1:]
    done = run(words, reports, monkeypatch, build=True)
    lines = [line.rstrip() for line in done.output.splitlines()]
    start = lines.index(block.body.splitlines()[0])
    assert "\n".join(lines[start:]).startswith(block.body.rstrip())


def test_output_is_quoted() -> None:
    assert {block.page for block in QUOTED} >= {"README.md", "docs/getting-started.md"}


def anchors(path: Path) -> set[str]:
    """Fragments of the headings, as code hosts and the site make them."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        there = path.parent / target if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target + anchor


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 110
