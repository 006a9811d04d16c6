"""Checks arithmetic on ONNX Runtime: structure in FP32, then the emulated reduced precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rewriter.ir.base import Pass
from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Array, Model
from rewriter.judge.expected import Expected, Outputs, as_declared, run_all, selects_rows
from rewriter.judge.judge import Standard, weigh
from rewriter.judge.verdict import Check, Excuse
from rewriter.runtime.emulation import Accumulation, emulation, rounded, sums
from rewriter.runtime.emulation.divergence import NodeError, diverge
from rewriter.runtime.figures.outputs import OutputComparison, compare_samples
from rewriter.runtime.figures.pair import degenerate
from rewriter.runtime.figures.tolerances import RELATIVE_L2, TOLERANCES, USABLE, Tolerance

BOTH_ROUND = 2.0
"""Largest distance of two models that both round every tensor, in units of the distance of one from the exact
results, by the triangle inequality."""

REORDERED = 2.0
"""Errors that a check allows where the network's own conditioning exceeds a tolerance, in units of what
another order of FP32 sums was measured to change: both sides are off by that (triangle inequality)."""

AS_FP32 = 1.2
"""Errors of a model that is as accurate as the network's own FP32 engine, in units of that engine's: two
builds of one model were measured to differ by less."""

EXPLAINED = 3
"""Nodes with the largest added errors that a failed emulation names."""


def check_structure(
    expected: Expected,
    rewritten: Model,
    passes: Sequence[Pass],
    samples: Iterable[Mapping[str, Array]],
) -> Check:
    """Checks the structural passes together against the sum of their tolerances; all EXACT means bit-equal.

    The tolerances hold for FP32 sums in another order. If the user's model rounds to FP16 or BF16, such sums
    may round to the next number, so the error of the model's own rounding is added.

    Args:
        expected: Outputs of the original for the same samples.
        rewritten: The model after the structural passes.
        passes: Passes that changed something.
    """
    tolerance = sum(step.exactness.tolerance for step in passes)
    noise = _own_rounding(expected, rewritten) if tolerance else {}
    held = Standard(Tolerance(tolerance, RELATIVE_L2, "the passes"), as_sets=selects_rows(rewritten))
    fed = list(samples)
    gpu = expected.on_cpu is not None
    check = _compare_run("structure", expected.as_written, rewritten, fed, held, rounded, noise, gpu=gpu)
    if expected.on_cpu is not None and not check.passed:
        check = _compare_run("structure", expected.on_cpu(), rewritten, fed, held, rounded, noise)
    if check.passed is None:
        return check
    inexact = ", ".join(step.name for step in passes if step.exactness.tolerance)
    words = f"within {tolerance:.2g} ({inexact})" if tolerance else "bit-equal"
    if any(noise.values()):
        words += f" and {max(noise.values()):.2g} for the model's own rounding"
    verb = "is" if check.passed else "is NOT"
    return replace(check, summary=f"FP32 result {verb} {words}")


def _own_rounding(expected: Expected, model: Model) -> dict[str, float]:
    """Returns the error that rounding as written may add to each output; 0 if nothing finite is left."""
    found = compare_samples(expected.exact, expected.as_written, 0.0, as_sets=selects_rows(model))
    return {o.name: BOTH_ROUND * o.relative_l2 if np.isfinite(o.relative_l2) else 0.0 for o in found}


def check_emulation(
    expected: Expected,
    fixed: Model,
    precision: str,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp32",
    standard: Standard | None = None,
    *,
    tf32: bool = True,
) -> Check:
    """Compares the emulated reduced-precision model with the original in FP32.

    A model in FP32 is emulated with the TF32 products of TensorRT's FP32 engines; its check is called `tf32`.

    Args:
        tf32: Emulate products in FP32 in TF32, as in an engine built with TensorRT's defaults.
        accumulation: Type in which FP16 MatMul, Gemm and Conv accumulate, as for `emulation.emulation`.
        standard: How close the outputs have to be; by default what is known of the precision.
    """
    name, low, accumulation = (
        ("tf32", "tf32", "fp32") if precision == "fp32" else ("emulation", precision, accumulation)
    )
    held = standard or Standard(TOLERANCES[low], as_sets=selects_rows(fixed))
    emulate = partial(emulation, accumulation=accumulation, tf32=tf32)
    check = _compare_run(name, expected.exact, fixed, samples, held, emulate)
    if check.passed is None:
        return check
    how = low.upper() + " emulated"
    how += f", sums in {sums(fixed, accumulation)}" if accumulation == "fp16" else ""
    summary = f"{how}: {check.error_words(held.tolerance.value)}"
    if name == "tf32" and not check.passed:
        summary += "; --noTF32, or NVIDIA_TF32_OVERRIDE=0, makes it slower and exact"
    return replace(check, summary=summary)


def tf32_errors(
    expected: Expected, original: Model, samples: Iterable[Mapping[str, Array]]
) -> dict[str, float]:
    """Relative L2 error of each finite output of an FP32 model whose products are rounded to TF32."""
    check = check_emulation(expected, original, "fp32", samples)
    return {output.name: output.relative_l2 for output in check.outputs if output.finite}


def excused(check: Check, conditioning: Callable[[], Mapping[str, float]]) -> Check:
    """Judges a failed check again where another order of the original's own sums explains the error.

    Args:
        conditioning: As `expected.conditioning`; called for a failed check alone.
    """
    if check.passed is not False:
        return check
    reason = "another order of its own sums moves the result by"
    return allowing(check, conditioning(), reason, REORDERED, "conditioning")


def as_fp32(check: Check, errors: Callable[[], Mapping[str, float]], engine: str) -> Check:
    """Judges a failed check again where the network's own FP32 engine errs as much.

    Args:
        errors: Of the outputs of that engine; called for a failed check alone.
        engine: The engine, for the summary.
    """
    if check.passed is not False:
        return check
    reason = f"{engine} errs by"
    allowed = allowing(check, errors(), reason, AS_FP32, "as-fp32")
    return allowed if allowed.passed else check


def without_tf32(check: Check, exact: Callable[[], Check]) -> Check:
    """Adds to a check beyond its tolerance, excused or not, the error of the same file with TF32 off.

    All plans of a network may err alike by TF32, which hides how much their FP32 nodes bring.

    Args:
        exact: The check with exact FP32 products; called for such a check alone.
    """
    if check.passed is None or (check.passed and not check.excuse):
        return check
    other = exact()
    if other.passed is None:
        return check
    summary = f"{check.summary}; with TF32 off, {other.summary}" if other.passed else check.summary
    return replace(check, tf32_off=other.error, summary=summary)


def allowing(
    check: Check, errors: Mapping[str, float], reason: str, factor: float, excuse: Excuse = ""
) -> Check:
    """Judges a failed check again, where the network itself is less accurate than a tolerance.

    Args:
        errors: Error of each output that is not due to the fixed model.
        reason: The source of these errors, for the summary.
        factor: Errors that are allowed, in units of `errors`.
        excuse: Of the check if it passes so.
    """
    allowed = {name: min(USABLE, factor * error) for name, error in errors.items()}
    outputs = tuple(replace(o, tolerance=max(o.tolerance, allowed.get(o.name, 0.0))) for o in check.outputs)
    if check.passed is not False or outputs == check.outputs or check.value is not None:
        return check
    passed = all(o.passed for o in outputs)
    summary = f"{check.summary}; {reason} {max(errors.values()):.2g}"
    return replace(
        check, passed=passed, outputs=outputs, summary=summary, excuse=excuse if passed else check.excuse
    )


def explained(
    check: Check,
    original: Model,
    fixed: Model,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp32",
) -> Check:
    """Adds to a failed emulation the first tensor that diverges, and the nodes that add most error.

    Args:
        original: The model before its types changed.
    """
    tolerance = max((c.tolerance for c in check.outputs), default=0.0)
    try:
        nodes = diverge(original, fixed, samples, accumulation)
    except ArithmeticRunError as error:
        return replace(check, details=(*check.details, f"not explained: {error.what}"))
    first = next((node for node in nodes if not node.total <= tolerance), None)
    lines = [f"first beyond {tolerance:.2g}: {_place(first)}, {first.total:.2g}"] if first else []
    worst = tuple(sorted(nodes, key=lambda node: -node.added)[:EXPLAINED])
    lines += [f"adds {n.added:.2g}: {_place(n)}" for n in worst]
    return replace(check, details=(*check.details, *lines), worst=worst)


def _place(node: NodeError) -> str:
    return f"{node.tensor} of {node.node} ({node.op})"


def _compare_run(
    name: str,
    expected: Sequence[Outputs],
    model: Model,
    samples: Iterable[Mapping[str, Array]],
    standard: Standard,
    fp32_form: Callable[[Model], Model],
    noise: Mapping[str, float] | None = None,
    *,
    gpu: bool = False,
) -> Check:
    """Runs a model on ONNX Runtime and compares it with the expected outputs.

    Args:
        fp32_form: Makes the FP32 model that ONNX Runtime computes.
        standard: How close the outputs have to be. `noise` is added to its tolerance, by output.
    """
    start = time.perf_counter()
    fed = (as_declared(model, sample) for sample in samples)
    try:
        actual = run_all(fp32_form(model), fed, gpu=gpu)
    except ArithmeticRunError as error:
        return Check(name, None, f"not checked: {error.what}", seconds=time.perf_counter() - start)
    found = weigh(expected, actual, standard)
    outputs = tuple(
        replace(o, tolerance=o.tolerance + (noise or {}).get(o.name, 0.0)) for o in found.comparisons
    )
    value = found.value(standard.tolerance)
    passed = all(c.passed for c in outputs) and (value is None or value.met)
    details = () if passed else tuple(_degenerate(expected, outputs))
    seconds, worst = time.perf_counter() - start, found.worst
    return Check(name, passed, "", outputs, details, seconds, worst.statistics, worst.pictures, value=value)


def _degenerate(expected: Sequence[Outputs], outputs: Iterable[OutputComparison]) -> Iterator[str]:
    """Reports failed outputs whose reference is too small for a relative error."""
    for output in outputs:
        reasons = {degenerate(sample[output.name]) for sample in expected}
        if not output.passed and "" not in reasons:
            yield (
                f"output {output.name}: {sorted(reasons)[0]}, so that a relative error means nothing: is the "
                "data what the model expects, and are its weights trained?"
            )
