"""Random valid models through all passes in random order: results stay, and the driver's contract holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import onnx
from graphs import random_feeds, run
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from nightly import sized
from random_graphs import models

import rewriter
from rewriter.ir.base import Context, Pass, Stage, Target
from rewriter.ir.model import Array, Model
from rewriter.passes import ALL
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import render
from rewriter.runtime.emulation import emulation
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.figures.pair import Pair
from rewriter.runtime.figures.tolerances import TOLERANCES

STRUCTURAL = tuple(kind() for kind in ALL if kind.stage is Stage.STRUCTURE and kind.keeps_signature)
LATER = tuple(sorted((kind() for kind in ALL if kind.stage > Stage.STRUCTURE), key=lambda step: step.stage))
"""Passes with data. A pipeline has them in the order of their stages."""

AMPLIFIED = 64.0
"""Changes of an output that a tolerance allows, in units of what a change of the inputs by it does: each of
the network's own roundings is of that size, and a random graph has up to some dozens of them in a row."""

random_models = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    parent=settings(),
)


def sensitivity(source: Model, feeds: dict[str, Array], change: float) -> list[float]:
    """Relative L2 change of each output when inputs and weights change by that share, at random."""
    rng = np.random.default_rng(1)

    def nudged(value: Array) -> Array:
        if value.dtype != np.float32:
            return value
        return (value * (1 + change * rng.uniform(-1, 1, value.shape))).astype(np.float32)

    moved = copy.copy(source)
    moved.weights = {name: nudged(value) for name, value in source.weights.items()}
    before, after = run(source, feeds), run(moved, {name: nudged(value) for name, value in feeds.items()})
    return [Pair(a, b).relative_l2 for a, b in zip(before, after, strict=True)]


def assert_kept(source: Model, result: Model, changed: Sequence[Pass]) -> None:
    """FP32 results are those of the source within what the passes declare, and the signature is the same."""
    assert result.signature == source.signature
    onnx.checker.check_model(result.whole(), full_check=True)
    feeds = random_feeds(source)
    tolerance = sum(step.exactness.tolerance for step in changed)
    own = sensitivity(source, feeds, tolerance) if tolerance else None
    for number, (wanted, found) in enumerate(zip(run(source, feeds), run(result, feeds), strict=True)):
        pair = Pair(wanted, found)
        allowed = tolerance + AMPLIFIED * own[number] if own is not None else 0.0
        assert pair.finite or not np.isfinite(wanted).all()
        assert not pair.finite or pair.relative_l2 <= allowed, f"output {number}: {changed}"


@settings(random_models, max_examples=sized(14, 7000))
@given(source=models(), steps=st.permutations(STRUCTURAL))
def test_structural_passes_keep_the_results_in_any_order(source: Model, steps: list[Pass]) -> None:
    untouched = source.copy()
    context = Context(opset=17, target=Target())
    result, reports = Driver().run(source, steps, context)
    assert source.same_as(untouched)
    changed = [step for step, report in zip(steps, reports, strict=True) if report.changes]
    assert_kept(source, result, changed)
    for step in changed:
        once, _ = Driver().run(source, [step], context)
        again, (second,) = Driver().run(once, [step], context)
        assert again is once, f"{step.name} changes its own result: {second.changes}"


@settings(random_models, max_examples=sized(6, 3000))
@given(source=models(), steps=st.permutations(STRUCTURAL), data=st.data())
def test_fix_takes_any_pipeline(source: Model, steps: list[Pass], data: st.DataObject) -> None:
    """Precision passes after structural ones in any order: a valid model whose FP16 errors are FP16's."""
    chosen = steps[: data.draw(st.integers(0, len(steps)))]
    later = [step for step in LATER if step.name == "mixed-precision" or data.draw(st.booleans())]
    passes = render([*chosen, *later])
    note(passes)
    feeds = random_feeds(source)
    fixed = rewriter.fix(source.whole(), inputs=feeds, passes=passes, verify=False, precision="fp16").model
    onnx.checker.check_model(fixed.whole(), full_check=True)
    assert [p.name for p in fixed.signature.outputs] == [p.name for p in source.signature.outputs]
    with Session(emulation(fixed, tf32=True)) as session:
        found = session.run(feeds)
    own = sensitivity(source, feeds, 2.0**-11)
    limit = TOLERANCES["fp16"].value
    for port, wanted, moved in zip(source.signature.outputs, run(source, feeds), own, strict=True):
        pair = Pair(wanted, found[port.name])
        assert pair.finite or not np.isfinite(wanted).all(), port.name
        assert not pair.finite or pair.relative_l2 <= limit + AMPLIFIED * moved, port.name
