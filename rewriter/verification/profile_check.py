"""The engine at shapes of its optimisation profile that no sample has, with the data of the samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.engines.deployment import shown
from rewriter.runtime.engines.protocol import EngineOutcome
from rewriter.runtime.engines.tensor_files import Shape, Span
from rewriter.runtime.metrics.parts import Parts
from rewriter.verification.compare_runs import Standard, compare_outputs
from rewriter.verification.expected import Outputs
from rewriter.verification.verdict import PROFILE, Check, remark

Shapes = Mapping[str, Shape]

MOST_ELEMENTS = 2**26
"""Most elements of all inputs at a shape that is run: 256 MiB, as the reference and the engine hold it."""

MOST_ROWS = 64
"""Most rows of a batch that are compared, the first and the last among them."""

SAME_DATA = 2.0
"""Error that a row may have, in units of its output's at the samples' shapes: errors of one network vary by
less from sample to sample, as `SAME_SAMPLE` has it."""


def ends(spans: Mapping[str, Span], samples: Sequence[Outputs]) -> Iterator[Shapes]:
    """The smallest, usual and largest shapes of a profile that no sample has, each once."""
    seen = [{name: sample[name].shape for name in spans if name in sample} for sample in samples]
    for at in range(3):
        shapes = {name: span[at] for name, span in spans.items()}
        known = all(name in seen[0] and len(shape) == len(seen[0][name]) for name, shape in shapes.items())
        if known and shapes not in seen and sum(map(np.prod, shapes.values())) <= MOST_ELEMENTS:
            seen.append(shapes)
            yield shapes


def by_rows(outputs: Outputs, batch: int) -> list[dict[str, Array]]:
    """The outputs of single rows if all outputs have `batch` of them; else the outputs themselves."""
    if batch < 2 or any(array.ndim < 2 or len(array) != batch for array in outputs.values()):
        return [dict(outputs)]
    rows = np.unique(np.linspace(0, batch - 1, min(batch, MOST_ROWS)).astype(int))
    return [{name: array[row : row + 1] for name, array in outputs.items()} for row in rows]


def profile_check(
    shapes: Sequence[Shapes],
    exact: Sequence[Outputs],
    outcome: EngineOutcome,
    standard: Standard,
    run: Check,
    parts: Parts,
    seconds: float,
) -> Check:
    """Compares an engine with the original at each of some shapes, row by row.

    Args:
        exact: Outputs of the original in FP32 at these shapes.
        run: The check at the shapes of the samples, whose errors allow as much again.
    """
    where = " and ".join(", ".join(f"{n} at {shown(s)}" for n, s in each.items()) for each in shapes)
    if not outcome.ran:
        failed = remark("profile-failed", shapes=where, reason=outcome.problem)
        passed = None if outcome.status == "timeout" else False
        return Check(PROFILE, passed, failed, seconds=seconds, device=outcome.device, advice=ADVICE)
    own = max((o.relative_l2 for o in run.outputs if o.passed and not o.of), default=0.0)
    held = standard.tolerance
    if run.value is None:
        held = replace(held, value=max(held.value, SAME_DATA * own))
    batches = [next((shape[0] for shape in each.values() if shape), 1) for each in shapes]
    actual = [outcome.values(index) for index in range(len(shapes))]
    rows, own_rows = ([*chain.from_iterable(map(by_rows, side, batches))] for side in (exact, actual))
    judged = compare_outputs(rows, own_rows, replace(standard, tolerance=held), parts=parts)
    return Check(
        PROFILE,
        judged.passed,
        remark("profile"),
        judged.comparisons,
        seconds=seconds,
        value=judged.value(held),
        rounds=judged.rounds,
        device=outcome.device,
        advice="" if judged.passed else ADVICE,
        shapes=where,
    )


ADVICE = "give samples of these shapes, too, so that ranges, plan and checks see them; or a narrower profile"
