"""What reads bytes of strangers: each target ends in a result or in an error that a user can meet.

Anything else that is raised is a defect.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rewriter.base.errors import RewriterError
from rewriter.batch import models
from rewriter.ir.plan import plan_file
from rewriter.pipeline import config
from rewriter.pipeline import text as pipeline
from rewriter.pipeline.presets import PRESETS
from rewriter.report.html import html_of_saved
from rewriter.target import probes


@dataclass(frozen=True)
class FuzzTarget:
    """A reader of bytes, with valid inputs to start from."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]

    def survive(self, data: bytes) -> None:
        """Reads bytes; an error that a user can meet is an answer, too."""
        with contextlib.suppress(RewriterError):
            self.read(data)


def _plan(data: bytes) -> None:
    text = data.decode(errors="replace")
    saved_text = plan_file.to_text(plan_file.from_text(text))
    # not plans: a range may hold NaN, which equals nothing
    assert plan_file.to_text(plan_file.from_text(saved_text)) == saved_text


def _pipeline(data: bytes) -> None:
    text = data.decode(errors="replace")
    steps = pipeline.parse(text)
    assert pipeline.parse(pipeline.render(steps)) == steps


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Reads bytes as a file of this name, with a model beside it."""

    def target(data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="rewriter-fuzz-") as folder:
            (path := Path(folder) / name).write_bytes(data)
            (Path(folder) / "net.onnx").touch()
            read(path)

    return target


_PLAN = b"""{"schema": "rewriter-plan", "version": 1, "precision": "fp16", "io": "keep", "float_nodes": 3,
 "fp32": [{"node": "add", "op": "Add", "key": "0:a", "rule": "overflow", "reason": "big", "tensor": "a",
   "range": {"low": -1e6, "high": "inf", "mean_abs": 3.5, "finite": true}}],
 "norms_in_range": ["0:y"], "rescaled": {"0:a": -4}}"""
_CONFIGURATION = b"""
preset = "accurate"
keep-fp32 = ["*/attn/*"]
tolerance = 1e-3
input-shapes = {x = [1, 3, 8]}
fail-on = "error"
"""

_MANIFEST = b"""
preset = "accurate"
[[model]]
path = "net.onnx"
keep-fp32 = ["*/attn/*"]
tolerance = 1e-3
input-shapes = {x = [1, 3, 8]}
"""
_REPORT = b"""{"schema_version": 1, "page": {"verb": "fix", "subject": "m.onnx", "verdict": "Verified",
 "state": "good", "rows": [["Error", "0.079"]], "links": {"0.079": "cause-1"}, "sections": [{"id": "plan",
  "title": "Nodes", "lead": "l", "bodies": [
   {"template": "facts.html", "values": {"rows": [{"name": "Time", "value": "1 s", "code": true}]}},
   {"template": "table.html", "values": {"most": 5, "table": {"id": "t", "title": "T", "lead": "",
    "columns": {"Rule": "choice", "Nodes": "number"}, "rows": [
     [{"text": "a", "order": null, "state": "bad", "names": ["n"], "link": "",
      "page": ""},
      {"text": "3", "order": 3.0, "state": "plain", "names": [], "link": "", "page": ""}]]}}}]}]}}"""

TARGETS: Mapping[str, FuzzTarget] = {
    "plan": FuzzTarget(_plan, (_PLAN,)),
    "pipeline": FuzzTarget(_pipeline, tuple(preset.pipeline.encode() for preset in PRESETS.values())),
    "report": FuzzTarget(_in_file("r.json", html_of_saved), (_REPORT,)),
    "manifest": FuzzTarget(_in_file("m.toml", lambda p: models.listed(p, p.with_name("out"))), (_MANIFEST,)),
    "answers": FuzzTarget(
        _in_file("a.json", probes.read), (next(probes.RECORDED.glob("*.json")).read_bytes(),)
    ),
    "configuration": FuzzTarget(
        _in_file("rewriter.toml", lambda p: config.load(p.parent, {})), (_CONFIGURATION,)
    ),
}
"""By name; models have tests/corruption.py."""
