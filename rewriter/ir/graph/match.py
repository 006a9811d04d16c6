"""Questions about the operands and neighbours of a node, asked from the end of a pattern to its inputs."""

from collections.abc import Callable, Iterator

from onnx import NodeProto

from rewriter.ir.graph.nodes import is_op
from rewriter.ir.graph.view import GraphView

COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "Sum"})
"""Binary operators whose operands may be exchanged."""


def optional_input(node: NodeProto, index: int) -> str:
    """The name of an input that may be left out; "" if it is."""
    return str(node.input[index]) if index < len(node.input) else ""


def operands(node: NodeProto) -> Iterator[tuple[str, str]]:
    """Both operands of a binary node: as written, and exchanged if the operator is commutative."""
    if len(node.input) == 2:
        left, right = node.input
        yield left, right
        if node.op_type in COMMUTATIVE:
            yield right, left


def other_operand(node: NodeProto, tensor: str) -> str | None:
    """The other operand of a binary node; None if it has none, or reads `tensor` twice or not at all."""
    if len(node.input) != 2 or list(node.input).count(tensor) != 1:
        return None
    return str(node.input[1 if node.input[0] == tensor else 0])


def with_scalar(graph: GraphView, node: NodeProto) -> tuple[str, float] | None:
    """The tensor and the scalar that a binary node combines; the scalar is second unless it commutes."""
    for tensor, constant in operands(node):
        value = graph.scalar(constant)
        if value is not None:
            return tensor, value
    return None


def produced(graph: GraphView, tensor: str, *ops: str) -> NodeProto | None:
    """The node that computes `tensor`, if its operator is one of `ops`."""
    node = graph.producer(tensor)
    return node if is_op(node, *ops) else None


def consumed(graph: GraphView, tensor: str, *ops: str) -> NodeProto | None:
    """The only consumer of `tensor`, if its operator is one of `ops`; None for graph outputs."""
    node = graph.only_consumer(tensor)
    return node if is_op(node, *ops) else None


def walk_down(
    graph: GraphView, tensor: str, passes: Callable[[NodeProto], bool]
) -> tuple[list[NodeProto], str]:
    """The chain of only consumers that `passes`, and the tensor in which it ends."""
    chain: list[NodeProto] = []
    while (node := graph.only_consumer(tensor)) is not None and passes(node):
        chain.append(node)
        tensor = node.output[0]
    return chain, tensor


def walk_up(
    graph: GraphView, tensor: str, passes: Callable[[NodeProto], bool]
) -> tuple[list[NodeProto], str]:
    """The chain of producers that `passes`, each by its first input, and the tensor in which it begins."""
    chain: list[NodeProto] = []
    while (node := graph.producer(tensor)) is not None and passes(node):
        chain.append(node)
        tensor = node.input[0]
    return chain, tensor


def is_only_divisor(graph: GraphView, tensor: str) -> bool:
    """True if a tensor is nothing but a divisor, expanded or not."""
    readers = graph.consumers(tensor) if not graph.is_output(tensor) else []
    return bool(readers) and all(
        is_only_divisor(graph, reader.output[0])
        if reader.op_type in {"Expand", "Cast"}
        else reader.op_type == "Div" and reader.input[0] != tensor
        for reader in readers
    )
