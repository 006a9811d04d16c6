"""docs/library.md is what runs: its blocks, in order, as a notebook would run them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph
from paths import ROOT

import rewriter

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SOURCE = """
    g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
        ["/head/MatMul"] m = MatMul(x, w) y = Relu(m) }"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewriter.save(graph(SOURCE), Path("model.onnx"))
    np.savez("data.npz", x=np.ones((2, 3), np.float32))
    blocks = BLOCK.findall((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec", dont_inherit=True), names)
    assert len(blocks) == 7
    assert names["y"].shape == (2, 4)
    assert names["checked"].passed and names["found"].first is None
    assert names["compared"].samples[0].arrays[0].sentence == "theirs is BGR (if ours is RGB)"
    assert names["again"].plan == names["plan"]
    assert [n.name for n in names["named"].proto.graph.node if n.op_type == "Relu"] == ["act_1"]
    assert any(d.rule == "user-rule" for d in names["result"].plan.decisions)
    assert Path("fixed.onnx").is_file()
