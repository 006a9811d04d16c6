"""Runs the original on ONNX Runtime for the expected outputs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from rewriter.base.errors import ArithmeticRunError, UsageError
from rewriter.ir.graph import attribute, constant_value, reads, states
from rewriter.ir.graph.ops import LOOPS, RECURRENT
from rewriter.ir.model import Array, Model, load, walk_nodes
from rewriter.ir.model.graphs import subgraphs
from rewriter.ir.model.schemas import EXCHANGEABLE, NUMPY_TYPES
from rewriter.ir.plan import logical_name
from rewriter.runtime.emulation import reference, rounded
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.inputs import Samples
from rewriter.runtime.inputs.samples import Unshown
from rewriter.runtime.metrics.pairwise_error import is_float
from rewriter.runtime.metrics.parts import Part, parts_of
from rewriter.runtime.metrics.tolerances import RELATIVE_L2, precision_of

Outputs = Mapping[str, Array]

SELECTING, ANY = frozenset({"TopK", "NonMaxSuppression"}), "any"
"""Operators that select rows, and the number of rows of the second, which depends on its scores."""

MOST_SAMPLES = 16
"""Most samples that are compared; a warning reports that the others are not."""


@dataclass(frozen=True)
class Expected:
    """Outputs of the user's model, one dict for each sample.

    Attributes:
        exact: With every FP16 and BF16 tensor in FP32: the reference for the fixed model.
        as_written: Rounded where the model rounds: the reference for structural passes. The same as `exact`
            for an FP32 model.
        states: As `exact`, the final states of recurrences that nothing reads, by the names of `with_states`.
        own: The model's own outputs as `exact`, where these are another model's that it was made from.
    """

    exact: Sequence[Outputs]
    as_written: Sequence[Outputs]
    states: Sequence[Outputs] = ()
    own: Sequence[Outputs] = ()

    @property
    def of_model(self) -> Sequence[Outputs]:
        """The outputs of the user's model in FP32."""
        return self.own or self.exact

    @cached_property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """The parts of each output, by which it is judged, too."""
        return parts_of(self.exact)


def unshown(outputs: Sequence[Outputs]) -> Unshown:
    """Returns the outputs by which no error shows: without an element, or 0 throughout, on every sample.

    Zeros of integers beside other outputs are results, such as a label.
    """
    arrays = {name: [sample[name] for sample in outputs] for sample in outputs[:1] for name in sample}
    blank = {n: of for n, of in arrays.items() if not any(array.astype(bool).any() for array in of)}
    empty = tuple(name for name, of in blank.items() if not any(array.size for array in of))
    whole = bool(blank) and len(blank) == len(arrays)
    zeros = (name for name, of in blank.items() if name not in empty and (whole or is_float(of[0])))
    return Unshown(empty, tuple(zeros), whole)


def judging(samples: Samples, most: int = MOST_SAMPLES) -> list[int]:
    """The places of the samples that judge, in order: beyond `most`, the last and the widest.

    They are chosen before ranges are measured, so the widest have the largest inputs: no product exceeds
    its operand's L2 norm times its weights' (Cauchy-Schwarz).
    """
    last = len(samples) - 1
    if last < most:
        return [*range(last + 1)]
    wide = (
        np.nan_to_num(array.astype(np.float64), neginf=0.0)
        for index in range(last)
        for array in samples.feeds(index).values()
    )
    norms = np.array([*map(np.linalg.norm, wide)]).reshape(last, -1)
    sizes = (norms / np.maximum(norms.max(0), 1e-30)).sum(1)
    return [*sorted(np.argsort(-sizes, kind="stable")[: most - 1].tolist()), last]


def expected_outputs(model: Model, samples: Sequence[Outputs], against: Model | None = None) -> Expected:
    """Runs the user's model on ONNX Runtime, without optimisations.

    Args:
        against: The model that it was made from, whose outputs results are judged by.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the model.
        UsageError: `against` does not run, or an output of it has another shape.
    """
    own = {port.name for port in model.signature.outputs}
    everything = run_all(reference(with_states(model)), samples)
    exact, final = (
        [{name: value for name, value in run.items() if (name in own) is kept} for run in everything]
        for kept in (True, False)
    )
    as_written = exact if precision_of(model) == "fp32" else run_all(rounded(model), samples)
    if against is None:
        return Expected(exact, as_written, final)
    try:
        judging = run_all(reference(against), [as_declared(against, sample) for sample in samples])
    except ArithmeticRunError as error:
        what = f"it does not run on the samples: {error.what}"
        raise UsageError(what, option="against", hint="its inputs have to have the same shapes") from error
    for ours, theirs in zip(exact, judging, strict=True):
        if name := next((name for name in ours if ours[name].shape != theirs[name].shape), ""):
            shapes = f"{list(theirs[name].shape)}, not {list(ours[name].shape)}"
            what = f"its output {name} has the shape {shapes}"
            raise UsageError(what, option="against", hint="name the model that this one was made from")
    return Expected(judging, as_written, final, exact)


def require_same_ports(original: Model, other: Model, hint: str) -> None:
    """Refuses a model with inputs or outputs of other names than the original's; types may differ."""
    for ports in ("inputs", "outputs"):
        names = [[port.name for port in getattr(model.signature, ports)] for model in (original, other)]
        missing, extra = ([n for n in names[i] if n not in names[1 - i]] for i in (0, 1))
        if missing or extra:
            faults = [f"lacks {', '.join(missing)}"] if missing else []
            faults += [f"has {', '.join(extra)} in addition"] if extra else []
            what = f"it is not a version of {original.path or 'the original'}: of the {ports}, "
            raise UsageError(
                what + f"it {' and '.join(faults)}", where=str(other.path or "the other model"), hint=hint
            )


def load_origin(source: Any, model: Model, metric: str) -> Model | None:
    """The model of the option `against` for a user's model; None without one.

    Raises:
        UsageError: it is no version of the model, or the metric is not relative L2.
    """
    if source is None:
        return None
    if metric != RELATIVE_L2:
        hint = "`verify FLOAT.onnx FIXED.onnx` measures the whole loss by any metric"
        raise UsageError(f"it judges by relative L2, not by {metric}", option="against", hint=hint)
    origin = load(source)
    require_same_ports(model, origin, "`against` takes the model that it was made from, with the same names")
    return origin


def unread_states(model: Model) -> Iterator[tuple[NodeProto, int, int, str]]:
    """The final states of recurrences that no node reads: the node, the output's number and type, and a name.

    The name comes from an output that is read, so that it is the same where a pass dropped the others.
    """
    facts, graph = model.facts(), model.proto.graph
    read = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
    for node in (node for node in graph.node if node.op_type in LOOPS | RECURRENT):
        first = logical_name(next(filter(read.__contains__, node.output), ""))
        kept = [facts.main[n].dtype for n in node.input[:1] if n in facts.main] * (
            1 + (node.op_type == "LSTM")
        )
        outputs = list(enumerate(kept, 1))
        for body in subgraphs(node):
            types = {v.name: v.type.tensor_type.elem_type for v in body.output}
            outputs = [(index, types[after]) for index, (_, after) in enumerate(states(node, body))]
        for index, dtype in outputs:
            if dtype in EXCHANGEABLE and not read.intersection(node.output[index : index + 1]):
                yield node, index, dtype, f"{first}/state{index}"


def with_states(model: Model) -> Model:
    """`model` with the final states of its recurrences that nothing reads as outputs, too."""
    if not any(node.op_type in LOOPS | RECURRENT for node in model.proto.graph.node):
        return model
    result = model.copy()
    for node, index, dtype, name in list(unread_states(result)):
        node.output.extend([""] * (index + 1 - len(node.output)))
        node.output[index] = name
        result.proto.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    result.mark_edited()
    return result


def run_all(
    model: Model, samples: Iterable[Mapping[str, Array]], *, optimize: bool = False
) -> list[dict[str, Array]]:
    """Returns the outputs of an FP32 model on ONNX Runtime for each sample, as a rule not optimised."""
    fed = list(samples)
    if not fed:
        return []
    with Session(model, optimize=optimize) as session:
        return [session.run(sample) for sample in fed]


def as_declared(model: Model, sample: Mapping[str, Array]) -> dict[str, Array]:
    """Casts a sample to the types of the model's inputs, which `--io` may have changed."""
    types = {port.name: NUMPY_TYPES.get(port.dtype) for port in model.signature.inputs}
    return {n: a.astype(types[n], copy=False) if types.get(n) else a for n, a in sample.items()}


def selected_axes(model: Model) -> dict[str, tuple[int, ...]]:
    """The outputs whose rows a TopK or NonMaxSuppression may select and order, with the axes of these rows.

    They are on axis 1, or on axis 0 of outputs without a batch. Only outputs that are computed from the
    selection have such rows: a raw head beside it has its rows in the original's order.
    """
    if not any(node.op_type in SELECTING for node in walk_nodes(model.proto.graph)):
        return {}
    numbers = _numbers_of_rows(model)
    given = [port.shape or () for port in model.signature.inputs]
    named = {size for shape in given for size in shape if isinstance(size, str)}
    shapes = {port.name: port.shape or (None, None) for port in model.signature.outputs if numbers[port.name]}
    sizes = (
        {shape[0] for shape in shapes.values() if len(shape) in (1, 2)}
        - {shape[0] for shape in given if shape},
        {shape[1] for shape in shapes.values() if shape[1:]},
    )

    def axes(found: AbstractSet[int | str | None]) -> tuple[int, ...]:
        return tuple(
            axis
            for axis, rows in enumerate(rows - named for rows in sizes)
            if ANY in found or (rows and (found & rows or not all(isinstance(n, int) for n in found | rows)))
        )

    return {name: own for name in shapes if (own := axes(numbers[name]))}


def _numbers_of_rows(model: Model) -> Mapping[str, AbstractSet[int | str | None]]:
    """How many rows are selected where a tensor of the main graph comes from; an empty set for others.

    None is a number that depends on data, and `ANY` stands for a NonMaxSuppression. A TopK along a later axis
    selects none: it routes tokens to experts, or finds the neighbours of each point.
    """
    written = {n.output[0]: n for n in walk_nodes(model.proto.graph) if n.op_type == "Constant"}
    stored = {t.name: t for t in model.proto.graph.initializer}
    facts = model.facts().main

    def selects(node: NodeProto) -> bool:
        shape = (facts[node.input[0]].shape if node.input and node.input[0] in facts else None) or ()
        later = bool(shape) and attribute(node, "axis", -1) % len(shape) >= 2
        return node.op_type in SELECTING and not (node.op_type == "TopK" and later)

    def number(node: NodeProto) -> int | str | None:
        if node.op_type != "TopK":
            return ANY
        count = node.input[1] if node.input[1:] else ""
        value = model.array(stored[count]) if count in stored else None
        value = constant_value(written[count]) if count in written else value
        return None if value is None else int(value.item())

    numbers = defaultdict[str, AbstractSet[int | str | None]](frozenset)
    for node in model.proto.graph.node:
        inside = (inner for graph in subgraphs(node) for inner in walk_nodes(graph))
        own = frozenset(number(inner) for inner in (node, *inside) if selects(inner))
        found = own.union(*(numbers[name] for name in reads(node)))
        numbers.update(dict.fromkeys(node.output, found) if found else {})
    return numbers
