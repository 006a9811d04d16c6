"""The verdict: structure on ONNX Runtime, arithmetic by emulation, and a real TensorRT build."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from rewriter.base import Pass
from rewriter.emulation import Accumulation, emulation, reference, rounded, sums
from rewriter.emulation.divergence import NodeError, diverge
from rewriter.engines.measure import shape_values
from rewriter.engines.onnxruntime import Session
from rewriter.engines.protocol import Span
from rewriter.errors import ArithmeticRunError
from rewriter.figures.compare import OutputComparison, compare, degenerate, worst
from rewriter.figures.tolerances import EMULATION_TOLERANCE
from rewriter.model import Array, Model, walk_graphs
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.verification.build_check import check_build, expectation
from rewriter.verification.verdict import Check

BOTH_ROUND = 2.0
"""How far two models of the same arithmetic are apart, in distances of one of them from its exact results,
where each rounds every tensor: by the triangle inequality, if the other is as far from them."""

EXPLAINED = 3
"""Nodes that a failed emulation names for the error that they add."""

Outputs = dict[str, Array]


@dataclass(frozen=True)
class Expected:
    """Outputs of the user's model, one dict for each sample.

    Attributes:
        exact: With every FP16 and BF16 tensor in FP32: what the fixed model shall come close to.
        as_written: Rounded where the model rounds: what rewrites of its structure must keep. The
            same as `exact` for an FP32 model.
    """

    exact: list[Outputs]
    as_written: list[Outputs]


def expected_outputs(model: Model, samples: Sequence[Mapping[str, Array]]) -> Expected:
    """Run the user's model on ONNX Runtime, optimisations off.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
    """
    facts = tensor_facts.infer(model)
    exact = run_all(reference(model, facts), samples)
    low = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    rounds = any(tensor.dtype in low for scope in facts.scopes for tensor in scope.values())
    return Expected(exact, run_all(rounded(model, facts), samples) if rounds else exact)


def run_all(model: Model, samples: Iterable[Mapping[str, Array]]) -> list[Outputs]:
    """Outputs of an FP32 model on ONNX Runtime for each sample, optimisations off."""
    with Session(model) as session:
        return [session.run(sample) for sample in samples]


def check_structure(
    expected: Expected,
    rewritten: Model,
    passes: Sequence[Pass],
    samples: Iterable[Mapping[str, Array]],
) -> Check:
    """Hold the structural passes together to the sum of their tolerances; all EXACT means bit-equal.

    Their tolerances are of FP32 sums in another order. Where the user's model rounds to FP16 or BF16, such
    sums may round to the next number, and what the model's own rounding does to an output comes on top.

    Args:
        expected: Outputs of the original for the same samples.
        rewritten: The model after the structural passes.
        passes: Those that changed something.
    """
    tolerance = sum(step.exactness.tolerance for step in passes)
    noise = _own_rounding(expected, rewritten) if tolerance else {}
    check = _compare_run("structure", expected.as_written, rewritten, samples, tolerance, rounded, noise)
    if check.passed is None:
        return check
    inexact = ", ".join(step.name for step in passes if step.exactness.tolerance)
    held = f"within {tolerance:.2g} ({inexact})" if tolerance else "bit-equal"
    if any(noise.values()):
        held += f" and {max(noise.values()):.2g} for the model's own rounding"
    verb = "is" if check.passed else "is NOT"
    return replace(check, summary=f"FP32 result {verb} {held}")


def _own_rounding(expected: Expected, model: Model) -> dict[str, float]:
    """What rounding as written may add to the error of each output; 0 where it leaves nothing finite."""
    as_sets = selects_rows(model)
    pairs = zip(expected.exact, expected.as_written, strict=True)
    found = worst([compare(exact, own, 0.0, as_sets=as_sets) for exact, own in pairs])
    return {o.name: BOTH_ROUND * o.relative_l2 if np.isfinite(o.relative_l2) else 0.0 for o in found}


def check_emulation(
    expected: Expected,
    fixed: Model,
    precision: str,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp32",
) -> Check:
    """Compare the emulated reduced-precision model with the original in FP32.

    What it keeps in FP32 multiplies in TF32, as it does in an engine built with TensorRT's defaults.

    Args:
        accumulation: Type in which FP16 MatMul, Gemm and Conv sum up, as for `emulation.emulation`.
    """
    tolerance = EMULATION_TOLERANCE[precision]
    stand_in = partial(emulation, accumulation=accumulation, tf32=True)
    check = _compare_run("emulation", expected.exact, fixed, samples, tolerance, stand_in)
    if check.passed is None:
        return check
    told = f", sums in {sums(fixed, accumulation)}" if accumulation == "fp16" else ""
    return replace(check, summary=f"{precision.upper()} emulated{told}: {_largest(check, tolerance)}")


def check_tf32(expected: Expected, fixed: Model, samples: Iterable[Mapping[str, Array]]) -> Check:
    """Compare an FP32 model with TF32 products, which TensorRT's FP32 engines have, with the original."""
    tolerance = EMULATION_TOLERANCE["fp32"]
    check = _compare_run("tf32", expected.exact, fixed, samples, tolerance, partial(emulation, tf32=True))
    if check.passed is None:
        return check
    way_out = "" if check.passed else "; --noTF32, or NVIDIA_TF32_OVERRIDE=0, makes it slower and exact"
    return replace(check, summary=f"TF32 emulated: {_largest(check, tolerance)}{way_out}")


def _largest(check: Check, tolerance: float) -> str:
    """The error that is largest for what is allowed, which differs where rows were matched as sets."""
    known = [(c.relative_l2, c.tolerance) for c in check.outputs if c.tolerance]
    error, allowed = max(known, key=lambda pair: pair[0] / pair[1], default=(0.0, tolerance))
    return f"largest error {error:.2g}, {'within' if check.passed else 'NOT within'} {allowed:.2g}"


def explained(
    check: Check,
    original: Model,
    fixed: Model,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp32",
) -> Check:
    """A failed emulation with the tensor that diverges first and the nodes that add most, as details.

    Args:
        original: The model before its types changed.
    """
    tolerance = max((c.tolerance for c in check.outputs), default=0.0)
    try:
        found = diverge(original, fixed, samples, accumulation)
    except ArithmeticRunError as error:
        return replace(check, details=(*check.details, f"not explained: {error.what}"))
    first = found.first(tolerance)
    lines = [f"first beyond {tolerance:.2g}: {_told(first)}, {first.total:.2g}"] if first else []
    lines += [f"adds {n.added:.2g}: {_told(n)}" for n in found.worst(EXPLAINED)]
    return replace(check, details=(*check.details, *lines))


def _told(node: NodeError) -> str:
    return f"{node.tensor} of {node.node} ({node.op})"


def check_engine(
    model: Model,
    path: Path,
    sample: Mapping[str, Array],
    spans: Mapping[str, Span],
    timeout_s: float,
    norms_in_range: frozenset[str] = frozenset(),
    *,
    plugins: Sequence[Path] = (),
    engine: Path | None = None,
    library: str | None = None,
) -> Check:
    """Build the written file with the TensorRT that is installed and read the network back.

    Args:
        sample: One sample, for the shapes and for the values of inputs that are shapes themselves.
        spans: Smallest, usual and largest shape of inputs, where several samples tell them.
        norms_in_range: As in the plan.
        plugins, engine, library: As for `check_build`.
    """
    return check_build(
        path,
        expectation(model, tensor_facts.infer(model), norms_in_range),
        shapes={name: array.shape for name, array in sample.items()} | dict(spans),
        values=shape_values(sample),
        timeout_s=timeout_s,
        plugins=plugins,
        engine=engine,
        library=library,
    )


def _compare_run(
    name: str,
    expected: Sequence[Outputs],
    model: Model,
    samples: Iterable[Mapping[str, Array]],
    tolerance: float,
    stand_in: Callable[[Model, Facts], Model],
    noise: Mapping[str, float] | None = None,
) -> Check:
    """Compare the FP32 model that stands in for a model with what was expected of it.

    Args:
        noise: What comes on top of the tolerance, by output.
    """
    start = time.perf_counter()
    fed = (as_declared(model, sample) for sample in samples)
    try:
        actual = run_all(stand_in(model, tensor_facts.infer(model)), fed)
    except ArithmeticRunError as error:
        return Check(name, None, f"not checked: {error.what}", seconds=time.perf_counter() - start)
    as_sets = selects_rows(model)
    rounds: list[tuple[OutputComparison, ...]] = [
        compare(e, a, tolerance, as_sets=as_sets) for e, a in zip(expected, actual, strict=True)
    ]
    outputs = tuple(replace(o, tolerance=o.tolerance + (noise or {}).get(o.name, 0.0)) for o in worst(rounds))
    passed = all(c.passed for c in outputs)
    details = () if passed else tuple(_degenerate(expected, outputs))
    return Check(name, passed, "", outputs, details, time.perf_counter() - start)


def _degenerate(expected: Sequence[Outputs], outputs: Iterable[OutputComparison]) -> Iterator[str]:
    """Outputs that fail because there is nothing to be relative to."""
    for output in outputs:
        reasons = {degenerate(sample[output.name]) for sample in expected}
        if not output.passed and "" not in reasons:
            yield (
                f"output {output.name}: {sorted(reasons)[0]}, so that a relative error says nothing: is the "
                "data what the model expects, and are its weights trained?"
            )


def as_declared(model: Model, sample: Mapping[str, Array]) -> dict[str, Array]:
    """The sample in the types of the model's inputs, which `--io` may have changed."""
    from rewriter.graph.float_types import NUMPY_TYPES

    types = {port.name: NUMPY_TYPES.get(port.dtype) for port in model.signature.inputs}
    return {n: a.astype(types[n], copy=False) if types.get(n) else a for n, a in sample.items()}


def selects_rows(model: Model) -> bool:
    """Whether a TopK or NonMaxSuppression decides which rows come out, and in which order."""
    selecting = {"TopK", "NonMaxSuppression"}
    return any(n.op_type in selecting for g in walk_graphs(model.proto.graph) for n in g.node)
