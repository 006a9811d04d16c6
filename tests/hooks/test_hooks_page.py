"""docs/hooks.md is what runs: its blocks, and the example training repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from rewriter.ir.model import load

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[hooks]'")
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "training-repo"

EXAMPLE_SECONDS = 600
"""It takes 20 s on an idle core; a machine that does much else gets its time, too."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error::rewriter.hooks.fixing.FixWarning")
def test_the_page_s_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install '.[hooks-test]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "optimum").mkdir()
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```python")
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/hooks.md", "exec"), names)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.onnx"))
    assert written == [
        "model.onnx", "model.raw.onnx", "optimum/model.onnx", "other.onnx",
    ]  # fmt: skip
    for name in written:
        casts = [node.op_type for node in load(name).proto.graph.node].count("Cast")
        assert (casts > 0) == (name != "model.raw.onnx"), name


def test_the_example_repository(tmp_path: Path) -> None:
    """One command: FP32's quality in FP16 with the hook, more than 3 dB less without."""
    command = [sys.executable, str(EXAMPLE / "run.py"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=EXAMPLE_SECONDS, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lost = [float(found) for found in re.findall(r"\(([+-][\d.]+) dB\)", done.stdout)]
    assert len(lost) == 2, done.stdout
    plain, fixed = lost
    assert plain < -3
    assert fixed >= -0.05
    assert "is the plain export, not fixed" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "denoiser.onnx", "denoiser.plain.onnx", "denoiser.pt",
    ]  # fmt: skip
