"""compensate-rounding: rounds the weights of a product together, so that their errors cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from onnx import TensorProto

from rewriter.base import Calibration, Change, Context, Event, Exactness, ModelPass, Refusal, Stage, Target
from rewriter.emulation import reference
from rewriter.engines.onnxruntime_errors import NoKernelError
from rewriter.graph import GraphEditor, open_graphs
from rewriter.model import Array, Model, facts
from rewriter.model.tensors import release
from rewriter.plan import Plan
from rewriter.planning.planner import LOW_TYPES, SEARCHED, node_key
from rewriter.rewriting.rounding import (
    FittingData,
    Grid,
    Layer,
    Reader,
    Rounded,
    Skipped,
    Types,
    Used,
    Worth,
    compensate,
    layers,
    used,
)


@dataclass(frozen=True)
class CompensateRounding(ModelPass):
    """Rounded weights cause a third to almost all of the error of a well-conditioned FP16 network.

    Rounding to nearest is best for each weight, but not for a product: the errors of weights whose inputs
    are correlated add up. This pass rounds the weights of MatMul, Gemm and Conv one input channel after the
    other. Later channels compensate the error of earlier ones, as far as the inputs seen on samples allow.
    That is GPTQ (Frantar et al. 2022, arXiv 2210.17323) with the numbers of FP16 or BF16 as its grid.
    Weights also compensate the rounding of a Conv's or Gemm's bias.

    Weights stay FP32 and hold numbers of the lower type, so converting them later is exact. Zeros stay zero
    and no weight changes its sign. The latency does not change. docs/weights.md has the method and the
    measurements.

    The pass needs samples (`fix --inputs`) and holds some rows out. Weights that err no less on those rows
    than weights rounded to nearest are rounded to nearest. If the whole network errs more on the sample held
    out, only the blocks of layers are used with which it errs less. Weights of nodes that a search put in
    FP32 are rounded together, too: TF32 rounds them to as many bits.

    Deep Convs err mostly by their FP16 sums. The pass estimates the share of the squared error that is due
    to weights, and rounds those together whose share is large enough.

    Options:
        rows: Most rows of a layer's input that are looked at, including those held out.
        tf32: Also round the weights of products that the plan keeps in FP32, to what TF32 holds of them;
            TensorRT rounds them to nearest otherwise. Biases of such products stay FP32. The pass runs
            once more after a search. Weights of nodes that the user keeps in FP32 stay unchanged.
        share: Least share of the squared error, by the estimate, that rounded weights must cause: of each
            product, and of the network. 0 rounds all weights together.

    Declines:
        - a model without samples, or with random ones
        - weights that gain nothing on the rows held out, or that the lower type cannot hold
        - all weights if the network gains nothing, and those that add little to the error of FP16 sums
        - weights that are read in different ways, batched weights, weights inside If, Loop and Scan
    """

    name = "compensate-rounding"
    exactness = Exactness(5e-3, "that of mixed-precision, whose rounding of weights it takes over")
    stage = Stage.ROUNDING
    rows: int = 2048
    tf32: bool = False
    share: float = 0.05
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64,1] x) => (float[64,1] y) <float[2,1] w = {1.0004, 1.0004}> {
            d = Concat<axis = 1>(x, x)
            y = MatMul(d, w)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64,1] x) => (float[64,1] y) <float[2,1] w = {1.0009765625, 1.0}> {
            d = Concat<axis = 1>(x, x)
            y = MatMul(d, w)
        }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        known = facts.infer(model)
        graph, *inner = open_graphs(model, known, tag=self.name)
        found = list(layers(graph, self._types(context.plan or Plan("fp16"))))
        if not found and not any(map(_has_weights, inner)):
            return
        given = context.calibration
        if given is None or not given.real:
            why = "there is no data" if given is None else "the data is random"
            yield Refusal("model", f"{why}: give --inputs to round weights together")
            return
        yield from _refusals([one for one in found if isinstance(one, Skipped)])
        chosen = [layer for layer in found if isinstance(layer, Layer)]
        sources = tuple(dict.fromkeys(source for layer in chosen for source in layer.sources))
        data = FittingData(
            reference(model, known), given.samples, len(given.samples), self.rows, sources, given.seed
        )
        worth = Worth.of(data.model, data.shapes, self.share, fp16_sums=_sums_in_fp16(context.target))
        kept = [layer for layer in chosen if worth.share([layer]) >= self.share]
        lost = [layer for layer in chosen if worth.share([layer]) < self.share]
        if worth.share(kept, lost) < self.share:
            yield from _not_worth(chosen, worth)
        else:
            yield from _not_worth(lost, worth)
            yield from _rounded(model, graph, kept, data, given)
        if any(map(_has_weights, inner)):
            yield Refusal("model", "weights inside If, Loop and Scan are rounded to nearest")

    def _types(self, plan: Plan) -> Types:
        """Returns the type that each product of the main graph computes in; None for other planned types."""
        low = LOW_TYPES[plan.precision]
        found: dict[str, int | None] = {}
        for decision in plan.decisions:
            if self.tf32 and decision.repair == "fp32" and decision.rule != "user":
                found[decision.key] = LOW_TYPES["fp32"]
            elif decision.rule != SEARCHED:
                found[decision.key] = None
        return lambda node: found.get(node_key(0, node), low)


def _sums_in_fp16(target: Target) -> bool:
    """True if the target sums FP16 Convs in FP16; a target without probe results is assumed to."""
    return target.answers.get("conv-accumulation", "fp16") == "fp16"


def _not_worth(found: Sequence[Layer], worth: Worth) -> Iterator[Refusal]:
    """Yields one refusal for all layers whose weights are too small a share of the error."""
    if not found:
        return
    share = worth.share(found)
    reason = (
        f"rounded to nearest, weights cause too little of the error: {share:.1%} of its square, by estimate; "
        f"FP16 sums most of the rest; {CompensateRounding.name}{{share=0}} rounds them together all the same"
    )
    yield from _refusals([Skipped(layer.node, reason) for layer in found])


def _rounded(
    model: Model, graph: GraphEditor, chosen: Sequence[Layer], data: FittingData, given: Calibration
) -> Iterator[Event]:
    """Rounds the weights, and uses them if the whole network gains on the sample held out."""
    weights = {name: graph.value(name) for layer in chosen for name in (layer.weight, layer.bias) if name}
    reader = data.reader(weights)
    done = list(compensate(weights, chosen, data, reader, given.kept))
    place = {layer.weight: number for number, layer in enumerate(chosen)}
    rounded = sorted(
        (one for one in done if isinstance(one, Rounded)), key=lambda one: place[one.layer.weight]
    )
    if any(one.gains for one in rounded):
        yield from _judged(model, weights, rounded, data, reader)
    yield from _refusals([one for one in done if isinstance(one, Skipped)])
    yield from _refusals([_no_gain(one) for one in rounded if not one.gains])


def _has_weights(graph: GraphEditor) -> bool:
    return any(isinstance(found, Layer) for found in layers(graph, lambda _: int(TensorProto.FLOAT16)))


def _judged(
    model: Model, weights: Mapping[str, Array], rounded: Sequence[Rounded], data: FittingData, reader: Reader
) -> Iterator[Event]:
    """Stores the rounded weights with which the network errs no more."""
    together = {name: value for one in rounded for name, value in one.stored().items()}
    given = {
        name: Grid(one.layer.dtype).nearest(weights[name]) if value.dtype == np.float32 else weights[name]
        for one in rounded
        for name, value in one.stored().items()
    }
    try:
        found = used(data.model, data.last, reader.results(), rounded, together, given)
    except NoKernelError:  # parts of the network were read, the whole does not run here
        found = None
    chosen = rounded if found is None else found.layers
    if found is not None and len(chosen) < len(rounded):
        yield Refusal("model", _loses(found, len(rounded)))
    if not any(one.gains for one in chosen):
        return
    for value in given.values():
        release(value)
    _adopt(model, {name: together[name] for one in chosen for name in one.stored()})
    yield Change("model", _summary([one for one in chosen if one.gains], found))


def _adopt(model: Model, values: Mapping[str, Array]) -> None:
    """Stores all rounded weights: a second run would judge those that gain nothing by other inputs."""
    stored = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    for name, value in values.items():
        stored[name].CopyFrom(model.detached_tensor(name, value.astype(np.float32)))


def _summary(rounded: Sequence[Rounded], whole: Used | None) -> str:
    error, nearest = median(one.error for one in rounded), median(one.nearest for one in rounded)
    many = f"{len(rounded)} weights" if len(rounded) > 1 else "a weight"
    products = (
        f"{many} rounded together: {error:.1e} of each product instead of {nearest:.1e}, on rows held out"
    )
    if whole is None:
        return products
    return f"{products}; {whole.together:.1e} of the network's results instead of {whole.nearest:.1e}"


def _loses(found: Used, layers: int) -> str:
    why = "the network errs more with weights rounded together than with weights rounded to nearest"
    if found.layers:
        return f"{why}: {layers - len(found.layers)} of {layers} layers are rounded to nearest"
    return f"{why}: {found.together:.2g}, not {found.nearest:.2g}"


def _no_gain(one: Rounded) -> Skipped:
    figures = f"{one.nearest:.2g} of the product, not {one.error:.2g}"
    return Skipped(one.layer.node, f"rounded to nearest, it errs no more on the rows held out: {figures}")


def _refusals(left: Sequence[Skipped]) -> Iterator[Refusal]:
    """Yields one refusal for each reason (figures aside), on the first of its nodes."""
    by_reason: dict[str, list[Skipped]] = {}
    for one in left:
        by_reason.setdefault(one.reason.partition(":")[0], []).append(one)
    for ones in by_reason.values():
        more = f" (and {len(ones) - 1} more)" if len(ones) > 1 else ""
        yield Refusal(ones[0].node, ones[0].reason + more)
