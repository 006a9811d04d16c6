"""Checks arithmetic on ONNX Runtime: structure in FP32, then the emulated reduced precision."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, cycle
from typing import Literal

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.base.errors import ArithmeticRunError
from rewriter.ir.graph import draws_noise, reads
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.graph.ops import SELECTIONS, TENSOR_CORE
from rewriter.ir.model import Array, Model, replace_items, walk_graphs, walk_nodes
from rewriter.passes.base import Pass
from rewriter.runtime.emulation import Accumulation, emulation, reference, rounded, sums
from rewriter.runtime.emulation.divergence import NodeError, diverge
from rewriter.runtime.emulation.recurrences import kept_whole
from rewriter.runtime.metrics.detections import Detections
from rewriter.runtime.metrics.outputs import Allowance, OutputComparison, worst_of_samples
from rewriter.runtime.metrics.pairwise_error import degenerate
from rewriter.runtime.metrics.parts import Parts, chance
from rewriter.runtime.metrics.tolerances import RELATIVE_L2, TOLERANCES, USABLE, Tolerance, precision_of
from rewriter.verification.compare_runs import RunComparison, Standard, compare_outputs
from rewriter.verification.expected import Expected, Outputs, as_declared, run_all, selected_axes, with_states
from rewriter.verification.verdict import Check, remark

SMALL_STATE = 1e-2
"""Root mean square below which a final state counts as one of this size: a residual is small on purpose."""

BOTH_ROUND = 2.0
"""Largest distance of two models that both round every tensor, in units of the distance of one from the exact
results, by the triangle inequality."""

FLIPS = (
    (TensorProto.FLOAT16, 1.0, 1.0),
    (TensorProto.FLOAT16, 1.4, 1.0),
    (TensorProto.BFLOAT16, 1.0, 8.0**-0.5),
)
"""Roundings of what quantisers read: type, factor before it, and share of the error that counts. Each flips
other buckets. BF16 flips 8 times as many, so that a small network shows some, and squared errors add up.
On 60 samples of ten networks plain FP16 had up to 1.8 times their largest error, and once 3.8 times."""

REORDERED = 2.0
"""Errors that a check allows where the network's own conditioning exceeds a tolerance, in units of what
another order of FP32 sums was measured to change: both sides are off by that (triangle inequality)."""

AS_FP32 = math.sqrt(2.0)
"""Largest error of a model that is as accurate as the network's own FP32 engine, in units of that engine's:
half a bit. TF32 rounds the operands of products to the 11 bits of FP16; where as many results are rounded,
too, the squared error doubles. At 1.2, a DLA-169 (FP16 5.1e-3, TF32 3.7e-3, measured) took 39 % more time."""

SAME_SAMPLE = 2.0
"""The same for one sample, in units of the engine's error on that sample, which varies by chance: with our
passes, the error of TF32 (emulated) is 0.2 to 1.6 times the error without them on samples of MobileOne-S4,
SKResNet-50 and RT-DETR. 2 still rejects the rules' plan of RexNet-R 150, which has an error of 0.010 to 0.022
on all samples, where TF32 has 0.012 on one and 0.005 on four."""

NO_WORSE = 1.15
"""Ratio of two errors up to which one is no worse than the other: random rounding changes errors of one
network by less. No search has a goal that is closer to FP32's error."""

Rounds = Sequence[Sequence[OutputComparison]]
"""The outputs of an engine for each sample, or none if it does not run."""

EXPLAINED = 3
"""Nodes with the largest added errors that a failed emulation names."""


def check_structure(
    expected: Expected,
    rewritten: Model,
    passes: Sequence[Pass],
    samples: Iterable[Mapping[str, Array]],
    outputs: Sequence[Outputs] | None = None,
) -> Check:
    """Checks the structural passes together against the sum of their tolerances; all EXACT means bit-equal.

    The tolerances hold for FP32 sums in another order. If the user's model rounds to FP16 or BF16, such sums
    may round to the next number, so the error of the model's own rounding is added.

    Args:
        expected: Outputs of the original for the same samples.
        rewritten: The model after the structural passes.
        passes: Passes that changed something.
        outputs: Of `rewritten`, if it has run already.
    """
    tolerance = sum(step.exactness.tolerance for step in passes)
    own = compare_outputs(expected.of_model, expected.as_written, _distance(rewritten)) if tolerance else None
    finite = [o for o in own.comparisons if np.isfinite(o.relative_l2)] if own else []
    noise = {o.name: BOTH_ROUND * o.relative_l2 for o in finite}
    held = Standard(Tolerance(tolerance, RELATIVE_L2, "the passes"), as_sets=selected_axes(rewritten))
    run = (lambda: outputs) if outputs is not None else partial(_run, rewritten, samples, rounded)
    check = _compare_run("structure", expected.as_written, run, held, noise)
    if check.passed is None:
        return check
    inexact = ", ".join(step.name for step in passes if step.exactness.tolerance)
    limits = {"allowed": tolerance, "passes": inexact, "rounding": max(noise.values(), default=0.0) or None}
    kind = "within" if tolerance else "bit-equal"
    return replace(check, remarks=remark(kind, met=check.passed, **limits))


def _distance(model: Model) -> Standard:
    """The standard that measures any error, for which rows in another order are none."""
    return Standard(Tolerance(0.0, RELATIVE_L2, "another form of the network"), as_sets=selected_axes(model))


def check_emulation(
    expected: Expected,
    fixed: Model,
    precision: str,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp32",
    standard: Standard | None = None,
    *,
    tf32: bool = True,
    float64: str = "",
) -> Check:
    """Compares the emulated reduced-precision model with the original in FP32.

    A model in FP32 is emulated with the TF32 products of TensorRT's FP32 engines; its check is called `tf32`.

    Args:
        tf32: Emulate FP32 products in TF32, as in an engine built with TensorRT's defaults.
        accumulation: Type in which FP16 MatMul, Gemm and Conv accumulate, as for `emulation.emulation`.
        standard: How close the outputs have to be; by default the tolerance of the precision.
        float64: Where float32 is not accurate enough to replace float64, as a phrase; "" if it is.
    """
    fp32 = precision == "fp32"
    name, low, accumulation = ("tf32", "tf32", "fp32") if fp32 else ("emulation", precision, accumulation)
    held = standard or Standard(TOLERANCES[low], as_sets=selected_axes(fixed))
    emulate = partial(emulation, accumulation=accumulation, tf32=tf32)
    runs = list[Outputs]()

    def run() -> Sequence[Outputs]:
        runs.extend(_run(with_states(fixed) if expected.states else fixed, samples, emulate))
        return runs

    check = _compare_run(name, expected.exact, run, held, parts=expected.parts)
    if check.passed is None:
        return check
    errors = sorted(state_errors(expected.states, runs).items())
    wrong = tuple((state, error) for state, error in errors if not error <= held.tolerance.value)
    summed = sums(fixed, accumulation) if accumulation == "fp16" else None
    how = remark("emulated", types=low.upper(), sums=summed, reason="; ".join(kept_whole(fixed)) or None)
    check = replace(check, passed=check.passed and not wrong, wrong_states=wrong, remarks=how)
    if float64 and not check.passed:
        advice = f"{float64}: compute the difference outside, and pass it as an input"
        lost = how + remark("lost-float64")
        return replace(check, remarks=lost, advice=advice, details=(*check.details, advice))
    return replace(check, remarks=how + remark("avoid-tf32")) if fp32 and not check.passed else check


def state_errors(expected: Sequence[Outputs], runs: Sequence[Outputs]) -> dict[str, float]:
    """The relative L2 error of each final state in its worst sample."""
    errors: dict[str, float] = {}
    for exact, run in zip(expected, runs, strict=False):
        for name in exact.keys() & run.keys():
            wide = exact[name].astype(np.float64)
            size = max(float(np.linalg.norm(wide)), SMALL_STATE * math.sqrt(wide.size))
            error = float(np.linalg.norm(run[name] - wide)) / size if size else 0.0
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def conditioning(model: Model, samples: Sequence[Outputs], expected: Expected) -> dict[str, float]:
    """Relative L2 error of each output when its FP32 sums run in another order.

    ONNX Runtime with its graph optimisations computes the same model with fused kernels. No result can be
    judged closer than that: a network whose boxes move by 1.6e-2 then has no outputs to that precision.

    A quantised network also runs with only the inputs of its quantisers rounded, which is the least that FP16
    does to it: values near the border of two buckets fall into the other one (`FLIPS`).

    Returns:
        Errors of finite outputs, the worst of the samples and runs; empty if none of them runs, or if the
        network draws noise, which is another one with optimisations.
    """
    if any(map(draws_noise, walk_nodes(model.proto.graph))):
        return {}
    wide, errors = reference(model), dict[str, float]()
    flips = FLIPS if quantisers(wide) else ()
    flipped = ((_rounded_before_quantisers(wide, dtype, unit), share) for dtype, unit, share in flips)
    for variant, share in chain([(wide, 1.0)], flipped):
        try:
            outputs = run_all(variant, samples, optimize=variant is wide)
        except ArithmeticRunError:
            continue
        judged = compare_outputs(expected.of_model, outputs, _distance(model), parts=expected.parts)
        for output in (o for o in judged.comparisons if o.finite):
            errors[output.name] = max(errors.get(output.name, 0.0), share * output.relative_l2)
    return errors


def quantisers(model: Model) -> dict[int, NodeProto]:
    """The nodes that quantise a computed tensor, by identity; a quantised network has some."""
    constants = {tensor.name for tensor in model.proto.graph.initializer}
    nodes = (node for node in model.proto.graph.node if node.op_type == "QuantizeLinear")
    return {id(node): node for node in nodes if node.input[0] not in constants}


def _rounded_before_quantisers(wide: Model, dtype: int, factor: float) -> Model:
    """The model with each computed input of a QuantizeLinear rounded to `dtype`, in units of 1 / `factor`."""
    model = wide.copy()
    graph, quantising = model.proto.graph, quantisers(model)
    nodes = list[NodeProto]()
    emit = NodeList(map("rewriter/rounded/{}".format, count()), model.opset, nodes)
    for node in graph.node:
        if id(node) in quantising:
            text = f"y = Div(Cast<to = 1>(Cast<to = {dtype}>(Mul(x, {factor}))), {factor})"
            node.input[0] = emit.write(text, x=node.input[0])["y"]
        nodes.append(node)
    replace_items(graph.node, nodes)
    model.mark_edited()
    return model


def excused(
    check: Check, conditioning: Callable[[], Mapping[str, float]], *, quantised: bool = False
) -> Check:
    """Judges a failed check again where another order of the original's own sums explains the error.

    Args:
        conditioning: As the function of that name; only called where it may count.
        quantised: True for a quantised network, whose limits are these for every result (docs/int8-fp8.md).
    """
    if check.passed is None or (check.passed and not quantised):
        return check
    errors = conditioning()
    limits = {name: REORDERED * error for name, error in errors.items()}
    return _allowing(check, [limits], "conditioning", errors)


def as_original(check: Check, own: RunComparison, *, asked: bool = False) -> Check:
    """Allows outputs the original's error against the model that it was made from, and the tolerance.

    A result in other types is another draw of the quantiser's noise: on 40 samples of five networks in INT8
    and FP8, with 20 outputs each, plain FP16 was 0.65 to 1.5 times as far as the original (docs/int8-fp8.md).

    Args:
        own: The original's outputs, compared with that model's.
        asked: True for a tolerance of the user's, which chance makes no larger.
    """
    if check.passed is None or not own.rounds:
        return check
    by_name = {output.name: output for output in own.comparisons if output.finite}
    rounds = tuple(
        tuple(_as_original(o, by_name, {p.name: p.relative_l2 for p in same}, asked) for o in outputs)
        for outputs, same in zip(check.rounds, cycle(own.rounds), strict=False)
    )
    outputs, boxes = worst_of_samples(rounds), check.detections
    found = boxes is None or asked or boxes.no_worse(own.detections or Detections())
    passed = found and not check.wrong_states and all(o.passed for o in outputs)
    return replace(check, outputs=outputs, rounds=rounds, passed=passed)


def _as_original(
    output: OutputComparison, worst: Mapping[str, OutputComparison], same: Mapping[str, float], asked: bool
) -> OutputComparison:
    """An output in one sample; `worst` has the original's in its worst sample, `same` in this one."""
    own = worst.get(output.name)
    if own is None:
        return output
    few = output.chance if output.of else chance(int(own.carriers))
    error = own.relative_l2 * (1.0 if asked else max(NO_WORSE, few))
    if few < AS_FP32:  # else chance decides on which sample it is far
        error = min(error, SAME_SAMPLE * same[output.name])
    limit = max(output.tolerance, error + output.usual)
    allowance = Allowance("as-original", output.usual, own.relative_l2)
    return replace(output, tolerance=limit, allowance=allowance)


def as_fp32(
    check: Check,
    rounds: Callable[[], Rounds],
    *,
    by_chance: bool = False,
    parts_alone: bool = False,
) -> Check:
    """Judges a failed check again if the network's own FP32 engine is as inaccurate.

    The error of a sample may be `AS_FP32` times the engine's largest, and `SAME_SAMPLE` times the engine's on
    the same sample, unless it is chance on which samples errors occur. A single row of probabilities may move
    `AS_FP32` times as far as the engine moves one in any sample, if the mean distance of the rows is within
    its tolerance: chance decides which row's class depends on rounding. On four pages of text TF32 moves one
    row of PP-OCRv4's recogniser by 0.62, the fixed file two, by 0.52 and 0.51, and all lines are equal.

    Args:
        rounds: The outputs of that engine for each sample; only called for a failed check.
        by_chance: The result of `errs_by_chance` for the file.
        parts_alone: Only excuse parts of outputs: for a tolerance of the user's. In a part with few entries,
            both errors are determined by chance.
    """
    if check.passed is not False:
        return check
    own = [[o for o in outputs if o.finite and (o.of or not parts_alone)] for outputs in rounds()]
    worst = {name: max(errors) for name, errors in _by_name(own).items()}
    limits = [
        {
            o.name: min(
                math.inf if by_chance or o.of else SAME_SAMPLE * o.relative_l2,
                AS_FP32 * worst[o.name] * o.chance**2,
            )
            for o in outputs
        }
        for outputs in own
    ]
    rows = dict[str, float]()
    for output in (o for outputs in own for o in outputs):
        if output.probability is not None:
            rows[output.name] = max(rows.get(output.name, 0.0), AS_FP32 * output.probability.difference)
    allowed = _allowing(check, limits, "as-fp32", worst, rows)
    return allowed if allowed.passed else check


def errs_by_chance(fixed: Model) -> bool:
    """True if it is chance on which samples a file that is as accurate as FP32 has errors.

    So it is for a file that is all FP32, and for a model that computes with what it selects: with TF32, an
    RT-DETR selects others in one of three samples (errors 0.003, 0.011, 0.001), in FP16 in two (0.007, 0.012,
    0.012); on a GPU its error was 0.044 in FP32 and 0.048 in FP16. A router of nearly equal experts does so.
    """
    nodes = list(walk_nodes(fixed.proto.graph))
    read = {name for node in nodes for name in reads(node)}
    routes = any(node.op_type in SELECTIONS and not read.isdisjoint(node.output) for node in nodes)
    return precision_of(fixed) == "fp32" or routes or bool(selected_axes(fixed))


def fp32_products(fixed: Model) -> bool:
    """True if a file has products in FP32, which TF32 rounds."""
    pairs = zip(walk_graphs(fixed.proto.graph), fixed.facts().scopes, strict=False)
    return any(
        node.op_type in TENSOR_CORE and scope[node.output[0]].dtype == TensorProto.FLOAT
        for graph, scope in pairs
        for node in graph.node
        if node.output[0] in scope
    )


def beyond_tf32(check: Check, rounds: Callable[[], Rounds]) -> bool:
    """True if an output fails by more than TF32 does to the original, by `rounds`: squared errors add up."""
    failed = [output for output in check.outputs if not output.passed]
    own = _by_name(rounds()) if failed else {}
    return any(
        o.relative_l2 > math.hypot(o.tolerance, AS_FP32 * max(own.get(o.name, [math.inf]))) for o in failed
    )


def without_tf32(check: Check, exact: Callable[[], Check]) -> Check:
    """Adds to a check beyond its tolerance, excused or not, the error of the same file with TF32 off.

    All plans of a network may have the same error by TF32, which hides how much their FP32 nodes help.

    Args:
        exact: The check with exact FP32 products; only called for such a check.
    """
    if check.passed is None or (check.passed and not check.excuse):
        return check
    other = exact()
    return check if other.passed is None else replace(check, tf32_off=other.error)


def limited_by_tf32(check: Check, rounds: Callable[[], Rounds], *, asked: bool = False) -> Check:
    """Judges a check beyond its tolerance at last, where the original with TF32 misses the tolerance, too.

    A file that is right with TF32 off passes so, and one whose errors are no larger than the
    original's with TF32, in the worst sample and in the root mean square of all, passes as accurate as FP32.

    Args:
        rounds: The outputs of the original's FP32 engine; only called for such a check.
        asked: True for a tolerance of the user's, which only a build with TF32 off can meet.
    """
    if check.value is not None or check.passed is None or (check.passed and check.excuse != "as-fp32"):
        return check
    own = _by_name(rounds())
    beyond = [o for o in check.outputs if not o.passed or o.allowance is not None]
    if not any(max(own.get(o.name, [0.0])) > o.usual for o in beyond):
        return check
    if check.tf32_off is not None and check.tf32_off <= 1.0:
        return replace(check, passed=True, excuse="tf32-off")
    failed, errors = [o for o in beyond if not o.passed], _by_name(check.rounds)
    fair = all(o.finite and o.name in own and o.relative_l2 <= USABLE for o in failed)
    if asked or not fair or not all(no_worse(errors[o.name], own[o.name]) for o in failed):
        return check
    outputs = tuple(o if o not in failed else _as_wrong(o, max(own[o.name])) for o in check.outputs)
    return replace(check, passed=True, excuse="tf32", outputs=outputs)


def no_worse(errors: Sequence[float], own: Sequence[float]) -> bool:
    """True if errors are no larger than others, in the worst and in the root mean square."""
    return max(errors) <= max(own) and np.linalg.norm(errors) / len(errors) ** 0.5 <= (
        np.linalg.norm(own) / len(own) ** 0.5
    )


def _by_name(rounds: Rounds) -> dict[str, list[float]]:
    """The error of each output in each sample."""
    errors = dict[str, list[float]]()
    for output in (o for outputs in rounds for o in outputs if o.finite):
        errors.setdefault(output.name, []).append(output.relative_l2)
    return errors


def _as_wrong(output: OutputComparison, own: float) -> OutputComparison:
    return replace(output, tolerance=min(USABLE, own), allowance=Allowance("as-fp32", output.usual, own))


def _allowing(
    check: Check,
    limits: Sequence[Mapping[str, float]],
    reason: Literal["conditioning", "as-fp32"],
    measured: Mapping[str, float],
    rows: Mapping[str, float] | None = None,
) -> Check:
    """Judges a failed check again, where the network itself is less accurate than a tolerance.

    Args:
        limits: For each sample, or for all: relative L2 errors of outputs that pass, whatever the tolerance.
        reason: The excuse of the check if it passes so. `measured`: the network's own error of each output.
        rows: Largest difference of a single row, of outputs of probabilities.
    """
    if check.value is not None or not limits:
        return check

    def allowed_by(limit: Mapping[str, float], o: OutputComparison) -> OutputComparison:
        """One that passes without, such as by its probabilities, needs none: FP32 excuses nothing there."""
        fair = o.probability and replace(o.probability, of_fp32=(rows or {}).get(o.name, 0.0))
        error = min(USABLE, limit.get(o.name, 0.0))
        if error <= o.tolerance or o.passed:
            return replace(o, probability=fair)
        allowance = Allowance(reason, o.tolerance, measured.get(o.name, 0.0))
        return replace(o, tolerance=error, probability=fair, allowance=allowance)

    pairs = zip(check.rounds, cycle(limits), strict=False)
    rounds = tuple(tuple(allowed_by(limit, o) for o in outputs) for outputs, limit in pairs)
    if rounds == check.rounds:
        return check
    outputs = worst_of_samples(rounds)
    check = replace(check, outputs=outputs, rounds=rounds)
    excuses = not check.passed and not check.wrong_states and all(o.passed for o in outputs)
    return replace(check, passed=True, excuse=reason) if excuses else check


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
    tolerance = max((c.tolerance for c in check.outputs if not c.of), default=0.0)
    try:
        nodes = diverge(original, fixed, samples, accumulation)
    except ArithmeticRunError as error:
        return replace(check, details=(*check.details, f"not explained: {error.what}"))
    first = next((node for node in nodes if not node.total <= tolerance), None)
    lines = [f"first beyond {tolerance:.2g}: {_named(first)}, {first.total:.2g}"] if first else []
    worst = tuple(sorted(nodes, key=lambda node: -node.added)[:EXPLAINED])
    lines += [f"adds {n.added:.2g}: {_named(n)}" for n in worst]
    return replace(check, details=(*check.details, *lines), worst=worst)


def _named(node: NodeError) -> str:
    return f"{node.tensor} of {node.node} ({node.op})"


def _run(
    model: Model, samples: Iterable[Mapping[str, Array]], fp32_form: Callable[[Model], Model]
) -> Sequence[Outputs]:
    """Runs the FP32 form of a model on ONNX Runtime."""
    return run_all(fp32_form(model), (as_declared(model, sample) for sample in samples))


def _compare_run(
    name: str,
    expected: Sequence[Outputs],
    run: Callable[[], Sequence[Outputs]],
    standard: Standard,
    noise: Mapping[str, float] | None = None,
    parts: Parts | None = None,
) -> Check:
    """Runs a model and compares its outputs; `noise` is added to the standard's tolerance, by output."""
    start = time.perf_counter()
    try:
        actual = run()
    except ArithmeticRunError as error:
        reason, seconds = remark("not-checked", reason=error.what), time.perf_counter() - start
        return Check(name, None, reason, seconds=seconds)
    weighed = compare_outputs(expected, actual, standard, parts=parts)
    rounds = tuple(
        tuple(replace(o, tolerance=o.tolerance + (noise or {}).get(o.name, 0.0)) for o in outputs)
        for outputs in weighed.rounds
    )
    judged = replace(weighed, rounds=rounds)
    value, found = judged.value(standard.tolerance), weighed.detections
    passed = all(c.passed for c in judged.comparisons) and (value is None or value.met)
    details = () if passed else tuple(_degenerate(expected, judged.comparisons))
    passed = passed and (weighed.passed or found is None or found.passed)
    seconds = time.perf_counter() - start
    return judged.check(name, passed, standard.tolerance, details=details, seconds=seconds)


def _degenerate(expected: Sequence[Outputs], outputs: Iterable[OutputComparison]) -> Iterator[str]:
    """Reports failed outputs whose reference is too small for a relative error."""
    for output in outputs:
        reasons = {degenerate(sample[output.output]) for sample in expected}
        if not (output.passed or output.of) and "" not in reasons:
            yield (
                f"output {output.name}: {sorted(reasons)[0]}, so that a relative error means nothing: is the "
                "data what the model expects, and are its weights trained?"
            )
