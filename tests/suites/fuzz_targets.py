"""What reads bytes of strangers: each target ends in a result or in an error that a user can meet.

Anything else that is raised is a defect.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphs import graph

from rewriter.ir.errors import RewriterError
from rewriter.ir.model import facts, load
from rewriter.ir.plan import plan_file
from rewriter.pipeline import config
from rewriter.pipeline import text as pipeline
from rewriter.pipeline.presets import PRESETS


@dataclass(frozen=True)
class FuzzTarget:
    """A reader of bytes, with valid inputs to start from and words that its inputs are made of."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[str, ...] = ()

    def survive(self, data: bytes) -> None:
        """Reads bytes; an error that a user can meet is an answer, too."""
        with contextlib.suppress(RewriterError):
            self.read(data)


def _loader(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="rewriter-fuzz-") as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(data)
        facts.infer(load(path))


def _plan(data: bytes) -> None:
    text = data.decode(errors="replace")
    plan = plan_file.from_text(text)
    assert plan_file.from_text(plan_file.to_text(plan)) == plan


def _pipeline(data: bytes) -> None:
    text = data.decode(errors="replace")
    steps = pipeline.parse(text)
    assert pipeline.parse(pipeline.render(steps)) == steps


def _configuration(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="rewriter-fuzz-") as folder:
        (Path(folder) / "rewriter.toml").write_bytes(data)
        config.load(Path(folder), {})


_MODEL = graph(
    """g (float[2,3] x, bool c) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
        [add] a = Add(x, w)
        y = If (c) <
            then_branch = t () => (float[2,3] u) { u = Relu(a) },
            else_branch = e () => (float[2,3] v) { v = Clip(a) }
        >
    }"""
)
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

TARGETS: Mapping[str, FuzzTarget] = {
    "loader": FuzzTarget(_loader, (_MODEL.whole().SerializeToString(),)),
    "plan": FuzzTarget(
        _plan, (_PLAN,), ("schema", "rewriter-plan", "fp32", "key", "range", "rescaled", "NaN")
    ),
    "pipeline": FuzzTarget(
        _pipeline,
        tuple(preset.pipeline.encode() for preset in PRESETS.values()),
        tuple(step.name for step in PRESETS["accurate"].steps),
    ),
    "configuration": FuzzTarget(_configuration, (_CONFIGURATION,), ("preset", "keep-fp32", "[scan]")),
}
"""By name."""
