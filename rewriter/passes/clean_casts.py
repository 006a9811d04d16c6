"""clean-casts: removes Casts that change no value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.ops import VIEWS
from rewriter.ir.model.schemas import INTEGERS, KNOWN, SIGNIFICAND, embeds
from rewriter.passes.base import Change, Context, Event, GraphPass, Refusal

_MOVING = VIEWS - {"Identity", "Concat", "Split"}
"""Views with one tensor of data, their first input, and one result."""


@dataclass(frozen=True)
class CleanCasts(GraphPass):
    """Exporters write many Casts that change nothing (166 of 191 in one Swin), and they hide patterns.

    Removed are Casts to the type of their input, widening Casts before another Cast (f16-f32-f16,
    int32-int64-float), and second Casts of one tensor to one type. Casts that round on the way (f32-f16-f32)
    or truncate (float-int-float) stay, without a report. `simplify` folds Casts of constants.

    TensorRT only casts UINT8, and moves none. So the Cast of an image's bytes moves before their Transpose,
    Slice or other view, and the Cast of a result to bytes moves behind its views and its Pad.

    Declines:
        - a Cast whose input and output are both inputs or outputs of the graph
        - a view of UINT8 that something else reads than one Cast
    """

    example = """
         g (float16[2,3] x) => (float16[2,3] y) {
        -    wide = Cast<to = 1>(x)
        -    same = Cast<to = 1>(wide)
        -    narrow = Cast<to = 10>(same)
        -    y = Relu(narrow)
        +    y = Relu(x)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        # Producers come first, so each Cast reads Casts that are clean already: one sweep suffices.
        first: dict[tuple[str, int], NodeProto] = {}
        for cast in filter(_is_cast, graph.nodes):
            to = int(attribute(cast, "to"))
            yield from _lift(graph, cast, to)
            yield from _shorten(graph, cast, to)
            if (event := _drop(graph, cast, to) or _share(graph, cast, to, first)) is not None:
                yield event
        for node in graph.nodes:
            if _is_cast(node) and attribute(node, "to") == TensorProto.UINT8:
                yield from _sink(graph, node)
        for node in graph.nodes:
            if _moves_bytes(node, graph):
                reason = f"{node.output[0]} is UINT8, and not only read by one Cast: cast it first"
                yield Refusal(display_name(node), reason)


def _lift(graph: GraphEditor, cast: NodeProto, to: int) -> Iterator[Event]:
    """Moves a Cast from UINT8 before the views that it reads, the last one first."""
    while _moves_bytes(view := graph.producer(cast.input[0]), graph):
        if graph.only_consumer(view.output[0]) is not cast:
            return
        source, result = view.input[0], cast.output[0]
        wide = graph.tensor(f"{result}/cast", dtype=to)
        first = graph.clone_node(cast, [source], [wide])
        moved = graph.clone_node(view, [wide, *view.input[1:]], [result], name=view.name)
        graph.replace_producer(result, first, moved)
        graph.erase_if_dead(view.output[0])
        cast = first
        yield Change(display_name(moved), f"a Cast of {source} moved before it: TensorRT moves no UINT8")


def _sink(graph: GraphEditor, cast: NodeProto) -> Iterator[Event]:
    """Moves a Cast to UINT8 behind the views and Pads that only read it, the first one first."""
    while is_op(view := graph.only_consumer(cast.output[0]), *_MOVING, "Pad"):
        (source, result), inputs = (cast.input[0], view.output[0]), list(view.input)
        if inputs[0] != cast.output[0]:
            return
        if is_op(view, "Pad") and (filling := optional_input(view, 2)):
            value, dtype = graph.constant(filling), graph.dtype(source)
            if value is None or dtype is None or not embeds(TensorProto.UINT8, dtype):
                return
            inputs[2] = graph.add_constant(filling, value, like=source)
        inputs[0] = source
        wide = graph.tensor(f"{result}/wide", dtype=graph.dtype(source))
        moved = graph.clone_node(view, inputs, [wide], name=view.name)
        last = graph.clone_node(cast, [wide], [result])
        graph.replace_producer(result, moved, last)
        graph.erase_if_dead(cast.output[0])
        cast = last
        yield Change(display_name(moved), f"the Cast to {result} moved behind it: TensorRT moves no UINT8")


def _moves_bytes(node: NodeProto | None, graph: GraphEditor) -> TypeGuard[NodeProto]:
    """True for a view of computed UINT8."""
    if not is_op(node, *_MOVING) or graph.constant(node.input[0]) is not None:
        return False
    return graph.dtype(node.input[0]) == TensorProto.UINT8


def _shorten(graph: GraphEditor, cast: NodeProto, to: int) -> Iterator[Event]:
    """Lets the Cast read the input of the Casts before it, as long as those change nothing."""
    while _is_cast(earlier := graph.producer(cast.input[0])):
        start, middle = graph.dtype(earlier.input[0]), graph.dtype(cast.input[0])
        if start is None or middle is None or not _skips(start, middle, to):
            return
        graph.set_input(cast, 0, earlier.input[0])
        graph.erase_if_dead(earlier.output[0])
        yield Change(display_name(cast), f"{_names(start, middle, to)} became {_names(start, to)}")


def _skips(start: int, middle: int, to: int) -> bool:
    """True if start-middle-to and start-to give the same for every value.

    The middle type must hold every value of the start type. From a float to an integer the values must
    fit as well: ONNX does not define the result of a float beyond the integer's range.
    """
    if not embeds(start, middle) or not {start, middle, to} <= KNOWN:
        return False
    integers = {start, middle} <= INTEGERS.keys()
    return to in SIGNIFICAND or to == TensorProto.BOOL or integers or embeds(start, to)


def _drop(graph: GraphEditor, cast: NodeProto, to: int) -> Event | None:
    """Removes a Cast to the type that its input has."""
    source, result = cast.input[0], cast.output[0]
    if graph.dtype(source) != to:
        return None
    if graph.is_output(result):
        if graph.producer(source) is None or graph.is_output(source):
            return Refusal(display_name(cast), f"{result} is an output, and so is {source}, or an input")
        graph.rename(source, result)
    else:
        graph.replace_all_uses_with(result, source)
    graph.remove(cast)
    return Change(display_name(cast), f"a Cast of {_names(to)} to itself")


def _share(
    graph: GraphEditor, cast: NodeProto, to: int, first: dict[tuple[str, int], NodeProto]
) -> Event | None:
    """Lets one Cast serve all consumers that read a tensor in one type."""
    key = (cast.input[0], to)
    other = first.setdefault(key, cast)
    if other is cast or to not in KNOWN:
        return None
    if graph.producer(other.output[0]) is not other:  # removed by now
        first[key] = cast
        return None
    keep, drop = (cast, other) if graph.is_output(cast.output[0]) else (other, cast)
    if graph.is_output(drop.output[0]):
        return Refusal(display_name(cast), f"{keep.output[0]} and {drop.output[0]} are both outputs")
    first[key] = keep
    graph.replace_all_uses_with(drop.output[0], keep.output[0])
    graph.remove(drop)
    return Change(display_name(drop), f"{display_name(keep)} gives the same")


def _is_cast(node: NodeProto | None) -> TypeGuard[NodeProto]:
    """True for a Cast of opset 6 or later; before, `to` was a string."""
    return is_op(node, "Cast") and isinstance(attribute(node, "to"), int)


def _names(*types: int) -> str:
    return "-".join(TensorProto.DataType.Name(t).lower() for t in types)
