"""Checks one case of ONNX's backend suite: FP32 structure, then FP16. It runs in a child process."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from backend_cases import Case
from nightly import NIGHTLY

import rewriter
from rewriter.base import sandbox
from rewriter.base.errors import ArithmeticRunError, RewriterError
from rewriter.ir.model import Model, load, walk_graphs
from rewriter.pipeline.text import own_passes
from rewriter.report.remarks import worded
from rewriter.runtime.metrics.pairwise_error import Pair, is_float
from rewriter.verification.arithmetic_checks import check_emulation
from rewriter.verification.expected import expected_outputs

Outcome = Literal["good", "repaired", "declined", "not compared", "bad", "crash"]
NEWEST_IR = 11  # IR version that ONNX Runtime takes; newer ones add nothing that it needs

RANDOM = {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
RANDOM |= {"RandomUniformLike"}
"""Operators whose results differ from run to run."""

ROUNDING: dict[int, float] = {onnx.TensorProto.FLOAT16: 2.0**-11, onnx.TensorProto.BFLOAT16: 2.0**-8}
"""Spacing that an FP16 or BF16 result may move by when FP32 sums before it move by less."""


@dataclass(frozen=True)
class Finding:
    """What one question to a case gave. `detail` is the message of a refusal or the figures of an error."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Answer:
    """Both findings on a case."""

    structure: Finding  # `good`: the rewritten FP32 model gives the original's results
    # `good`: the emulation is within FP16's tolerance; `repaired`: it was not, and `fix` with its checks
    # found that and repaired it
    fp16: Finding


def check(case: Case) -> Answer:
    """Both findings on a case."""
    sandbox.inside = not NIGHTLY  # the worker is a wall; one inside it costs a third of the suite's time
    warnings.simplefilter("ignore")  # of NumPy, about overflows that some cases are about
    return Answer(_finding(structure, case), _finding(fp16, case))


def _finding(question: Callable[[Case], Finding], case: Case) -> Finding:
    try:
        return question(case)
    except RewriterError as error:
        return Finding("declined", str(error))
    except Exception:  # a defect of the library, which is what the suite is for
        return Finding("crash", traceback.format_exc())


def structure(case: Case) -> Finding:
    """Structural passes keep the results, within the tolerances of those that changed something."""
    original = onnx.ModelProto.FromString(case.model)
    inputs = (
        case.feeds if case.feeds and _are_finite(case.feeds) else None
    )  # others are refused, and not needed
    fixed = rewriter.fix(original, inputs=inputs, preset="structure-only", verify=False)
    changed = [done.name for done in fixed.passes if done.changes]
    if not changed:
        return Finding("good", "unchanged")
    if RANDOM & {node.op_type for node in _nodes(original)}:
        return Finding("not compared", "random numbers")
    feeds = case.feeds or _ones(fixed.model)
    tolerance = sum(own_passes()[name].exactness.tolerance for name in changed)
    if tolerance:
        tolerance += max(ROUNDING.get(port.dtype, 0.0) for port in fixed.model.signature.outputs)
    reasons = []
    for evaluate in (_on_onnxruntime, _on_reference):
        try:
            wanted = evaluate(original, feeds)
        except Exception as error:  # whatever the evaluator raises: it lacks the operator
            reasons.append(str(error))
            continue
        return _compared(wanted, evaluate(fixed.proto, feeds), tolerance, changed)
    return Finding("not compared", "neither runs the original: " + " | ".join(reasons))


def _are_finite(feeds: Mapping[str, Any]) -> bool:
    floats = [array for value in feeds.values() for array in _leaves(value) if is_float(array)]
    return all(np.isfinite(array.astype(np.float64)).all() for array in floats)


def _compared(wanted: Sequence[Any], found: Sequence[Any], tolerance: float, changed: list[str]) -> Finding:
    for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
        for one, other in zip(_leaves(a), _leaves(b), strict=True):
            if one.dtype != other.dtype or one.shape != other.shape:
                return Finding("bad", f"output {number}: {one.dtype}{one.shape}, {other.dtype}{other.shape}")
            if one.dtype.kind in "OUS":
                error = float(not (one == other).all())
            else:
                pair = Pair(one, other)
                error = pair.relative_l2
            if error > tolerance:
                return Finding("bad", f"output {number}: error {error:.2g} after {', '.join(changed)}")
    return Finding("good", "within " + f"{tolerance:.2g}" if tolerance else "bit-equal")


def _leaves(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays in an output, which may be a sequence, a map or nothing."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield np.asarray(value)


def fp16(case: Case) -> Finding:
    """The default preset keeps results within FP16's tolerance, or `fix` finds and repairs what is beyond."""
    original = load(onnx.ModelProto.FromString(case.model))
    feeds = case.feeds or None
    fixed = rewriter.fix(original.whole(), inputs=feeds, verify=False).model
    if RANDOM & {node.op_type for node in _nodes(original.proto)}:
        return Finding("not compared", "random numbers")
    samples = [case.feeds or _ones(original)]
    try:
        expected = expected_outputs(original, samples)
    except ArithmeticRunError as error:
        return Finding("not compared", error.what)
    verdict = worded(check_emulation(expected, fixed, "fp16", samples))
    if verdict.passed is None:
        return Finding("not compared", verdict.summary)
    if verdict.passed:
        return Finding("good", verdict.summary)
    checked = rewriter.fix(original.whole(), inputs=feeds, build=False)
    if checked.verified and checked.repairs:
        return Finding("repaired", verdict.summary)
    return Finding("bad", verdict.summary)


def _on_onnxruntime(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> Sequence[Any]:
    import onnxruntime as ort

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.ir_version = min(copy.ir_version, NEWEST_IR)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: value for name, value in feeds.items() if value is not None}))


def _on_reference(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> Sequence[Any]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(proto).run(None, dict(feeds)))


def _nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    inner = [node for function in proto.functions for node in function.node]
    return [node for graph in walk_graphs(proto.graph) for node in graph.node] + inner


def _ones(model: Model) -> dict[str, Any]:
    """Feeds of a case without data."""
    rng = np.random.default_rng(0)
    shapes = {
        port.name: tuple(d if isinstance(d, int) else 1 for d in port.shape or ())
        for port in model.signature.inputs
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
