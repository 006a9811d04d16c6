"""collect-loop-outputs: lets a Loop stack what it appends to a tensor or a list in every turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, helper

from rewriter.ir.graph import GraphEditor, attribute, display_name, open_graphs
from rewriter.ir.graph.match import produced
from rewriter.ir.model import Model, replace_items, walk_nodes
from rewriter.passes.base import Change, Context, Event, ModelPass, Refusal, Requires


@dataclass(frozen=True)
class CollectLoopOutputs(ModelPass):
    """A Loop whose state gets longer in every turn does not build: TensorRT's states keep their shape.

    Scripted PyTorch code has them: `ys.append(y)`, then `torch.stack(ys)`, is a list, which TensorRT's parser
    refuses by its operators; `ys = torch.cat((ys, y))` builds no engine (TensorRT-RTX 1.7.1:
    "IRecurrenceLayer must have inputs with same shape"). A scan output of the Loop is the same, and builds.
    A Loop without a condition gets one that is true: the parser refuses bodies that read it.

    Declines:
        - a list that has entries before the Loop, is an output, or is read by another operator than
          ConcatFromSequence
        - appended tensors of unknown rank
    """

    requires = Requires(opset=15)  # Shape of some axes
    example = """
         g (float[4,8] x, int64 n, bool c) => (float[4,k,8] y) {
        -    none = SequenceEmpty()
        -    rows = Loop(n, c, none) <body = b (int64 i, bool d, seq(float) s) => (bool e, seq(float) t) {
        +    rows = Loop(n, c) <body = b (int64 i, bool d) => (bool e, float[4,8] row) {
                 e = Identity(d)
        -        t = SequenceInsert(s, x)
        +        row = Identity(x)
             }>
        -    y = ConcatFromSequence<axis = 1, new_axis = 1>(rows)
        +    y = Transpose<perm = [1, 0, 2]>(rows)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        refusals = dict[Refusal, None]()
        if not any(node.op_type == "Loop" for node in walk_nodes(model.proto.graph)):
            return  # before all graphs are opened
        for graph in reversed(open_graphs(model, self.name)):
            yield from _with_conditions(graph)
        while event := self._edit(model, refusals):
            yield event
        yield from refusals

    def _edit(self, model: Model, refusals: dict[Refusal, None]) -> Change | None:
        """Makes one state a scan output: every edit needs the graphs opened anew."""
        for body in open_graphs(model, self.name):
            loop, outer = body.owner, body.parent
            if loop is None or loop.op_type != "Loop" or not isinstance(outer, GraphEditor):
                continue
            for state in _growing_states(body, outer, loop):
                if state.reason:
                    refusals[Refusal(display_name(loop), state.reason)] = None
                    continue
                _collect(body, outer, loop, state)
                return Change(display_name(loop), f"{state.append.op_type} in its body became a scan output")
        return None


def _with_conditions(graph: GraphEditor) -> Iterator[Change]:
    with graph:
        for loop in graph.nodes:
            if loop.op_type == "Loop" and len(loop.input) > 1 and not loop.input[1]:
                graph.set_input(
                    loop, 1, graph.add_constant(f"{display_name(loop)}/condition", np.array(True))
                )
                yield Change(display_name(loop), "it got the condition that it left out")


class _GrowingState(NamedTuple):
    """A state of a Loop that each turn makes longer by `elements`; `reason` says why it stays."""

    place: int  # its place among the Loop's states
    append: NodeProto  # Concat or SequenceInsert
    elements: Sequence[str]
    rank: int = 0
    readers: Sequence[NodeProto] = ()  # of a list
    reason: str = ""


def _growing_states(body: GraphEditor, outer: GraphEditor, loop: NodeProto) -> Iterator[_GrowingState]:
    for index, (given, made) in enumerate(zip(body.graph.input[2:], body.graph.output[1:], strict=False)):
        node = body.producer(made.name)
        if node is None or body.consumers(made.name) or node.input[0] != given.name:
            continue
        if body.only_consumer(given.name) is not node or list(node.input).count(given.name) > 1:
            continue
        ranks = [*map(body.rank, node.input)]
        if node.op_type == "Concat":
            ranks.append(outer.rank(loop.input[2 + index]))
            state = _GrowingState(index, node, node.input[1:])
        elif node.op_type == "SequenceInsert" and not any(node.input[2:]):
            state = _GrowingState(index, node, node.input[1:2], readers=outer.consumers(loop.output[index]))
        else:
            continue
        if rank := next(filter(None, ranks), 0):
            yield state._replace(rank=rank, reason=_obstacle(outer, loop, state))
        else:
            yield state._replace(reason=f"the rank of {state.elements[0]}, which it appends, is not known")


def _obstacle(outer: GraphEditor, loop: NodeProto, state: _GrowingState) -> str:
    result, initial = loop.output[state.place], loop.input[2 + state.place]
    if state.append.op_type == "Concat":
        return ""
    if produced(outer, initial, "SequenceEmpty") is None or outer.is_output(result):
        return f"the list {result} has entries before the Loop, or is an output"
    other = next((n.op_type for n in state.readers if n.op_type != "ConcatFromSequence"), "")
    return f"{other} reads the list {result}" if other else ""


def _collect(body: GraphEditor, outer: GraphEditor, loop: NodeProto, state: _GrowingState) -> None:
    """Makes the state a scan output: the last one, so that others keep their places."""
    with body:
        element = body.tensor(f"{state.elements[0]}/row", dtype=body.dtype(state.elements[0]))
        several = len(state.elements) > 1  # torch.jit unrolls loops
        last = body.clone_node(state.append, state.elements, [element]) if several else None
        body.insert(last or body.make("Identity", state.elements, [element]), before=state.append)
        body.remove(state.append)
    graph, dtype = body.graph, body.dtype(element) or 0
    replace_items(graph.input, [v for i, v in enumerate(graph.input) if i != 2 + state.place])
    scan = helper.make_tensor_value_info(element, dtype, [None] * state.rank)
    replace_items(graph.output, [*(v for i, v in enumerate(graph.output) if i != 1 + state.place), scan])
    with outer:
        result, initial = loop.output[state.place], loop.input[2 + state.place]
        stacked = outer.tensor(f"{result or element}/turns", dtype=dtype)
        inputs = [name for i, name in enumerate(loop.input) if i != 2 + state.place]
        outputs = [*(name for i, name in enumerate(loop.output) if i != state.place), stacked]
        outer.insert(outer.clone_node(loop, inputs, outputs, name=loop.name), before=loop)
        for reader in state.readers:
            own = bool(attribute(reader, "new_axis", 0))
            outer.insert(*_joined(outer, stacked, reader.output[0], reader, state.rank, own=own), before=loop)
        if result and not state.readers:
            outer.insert(*_joined(outer, stacked, result, state.append, state.rank, initial), before=loop)
        for old in (*state.readers, loop):
            outer.remove(old, keep=old.output)


def _joined(
    graph: GraphEditor,
    stacked: str,
    name: str,
    node: NodeProto,
    rank: int,
    initial: str = "",
    *,
    own: bool = False,
) -> Iterator[NodeProto]:
    """Yields nodes that make `name` of `stacked` [turns, ...]: the turns join the axis of `node`, or are one.

    What a turn appends has `rank` axes; `initial` comes before it.
    """
    axis = int(attribute(node, "axis")) % (rank + own)
    moved = name if own else graph.fresh(f"{name}/moved")
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
    yield graph.make("Transpose", [stacked], [moved], perm=order)
    if own:
        return
    before, after, shape = (graph.fresh(f"{name}/{part}") for part in ("before", "after", "shape"))
    yield graph.make("Shape", [moved], [before], start=0, end=axis)
    yield graph.make("Shape", [moved], [after], start=axis + 2)
    yield graph.make("Concat", [before, graph.add_ints(f"{name}/joined", -1), after], [shape], axis=0)
    empty = not initial or graph.size(initial, axis) == 0
    joined = name if empty else graph.fresh(f"{name}/new")
    yield graph.make("Reshape", [moved, shape], [joined])
    if not empty:
        yield graph.make("Concat", [initial, joined], [name], axis=axis)
