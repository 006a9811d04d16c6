"""Models and their changes by passes as text, in the syntax of onnx.parser.

A text without a header has opset 17. A constant that is declared without values, such as `float[64,64] w`
between the angle brackets, gets normal random values; `render` writes large constants like that.
"""

import difflib
import re
import textwrap
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx.printer
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from rewriter.ir.model import Model, replace_items, walk_graphs
from rewriter.pipeline.driver import PassResult

_OF_THE_RESULT = re.compile(r"^\+.*$|^(changed|declined) .*: .*$|^-", re.MULTILINE)
"""Lines that `outcome` adds to the text of a graph."""

_LARGE = 16  # float constants of more elements are written without values
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WIDTH = 108
_HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'  # header of a text that has none


def with_header(text: str) -> str:
    """Returns a text as a whole model for onnx.parser: one without a header is of opset 17."""
    text = textwrap.dedent(text).strip()
    return text if text.startswith("<") else _HEADER + text


def sides(example: str) -> tuple[str, str]:
    """The graph of a pass's example before the pass, and after it."""
    text = textwrap.dedent(example)
    before, after = (re.sub(rf"^{other}.*\n?|^[-+ ]", "", text, flags=re.MULTILINE) for other in (r"\+", "-"))
    return before, after


def parse(text: str) -> ModelProto:
    """Reads a model from text; an onnx.parser.ParseError has the line and the column."""
    proto: ModelProto = onnx.parser.parse_model(with_header(_OF_THE_RESULT.sub("", text)))
    for graph in walk_graphs(proto.graph):
        _add_random_weights(graph)
    return proto


def _add_random_weights(graph: GraphProto) -> None:
    outputs = {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in outputs]:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        assert kind.elem_type in _FLOATS and all(shape), f"only a float can have no values: {value.name}"
        graph.initializer.append(_random(value.name, kind.elem_type, shape))
        graph.value_info.remove(value)


def _random(name: str, dtype: int, shape: Iterable[int]) -> TensorProto:
    """A tensor of random values that only depend on its name, type and shape."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return numpy_helper.from_array(np.asarray(values, onnx.helper.tensor_dtype_to_np_dtype(dtype)), name)


def render(model: ModelProto) -> str:
    """Writes a model as text, each node of the main graph in a line.

    Types of tensors between nodes are left out where shape inference finds them.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    for graph in walk_graphs(copy.graph):
        unknown = [node for node in graph.node if not onnx.defs.has(node.op_type, domain=node.domain)]
        outputs = {name for node in unknown for name in node.output}
        values = [value for value in graph.value_info if value.name in outputs]
        for tensor in graph.initializer:
            if _is_random(tensor) or (tensor.data_type in _FLOATS and np.prod(tensor.dims) > _LARGE):
                values.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        hidden = {value.name for value in values}
        replace_items(graph.initializer, [_listed(t) for t in graph.initializer if t.name not in hidden])
        replace_items(graph.value_info, values)
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            if attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.CopyFrom(_listed(attribute.t))
    text = re.sub(
        r"<\n +(\w+: .*,)\n +(opset_import: .*)\n>", r"<\1 \2>", onnx.printer.to_text(copy).rstrip()
    )
    return "\n".join(_broken(line.rstrip()) for line in text.split("\n")).removeprefix(_HEADER)


def _is_random(tensor: TensorProto) -> bool:
    if tensor.data_type not in _FLOATS or 0 in tensor.dims:
        return False
    random = numpy_helper.to_array(_random(tensor.name, tensor.data_type, tensor.dims))
    return np.array_equal(numpy_helper.to_array(tensor), random)


def _listed(tensor: TensorProto) -> TensorProto:
    """The tensor with its elements in the field of its type: the printer reads raw data of few types."""
    array = numpy_helper.to_array(tensor)
    return onnx.helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, array.reshape(-1).tolist())


def _broken(line: str) -> str:
    """Breaks a long list of constants into lines, so that a diff shows which of them changed."""
    if len(line) <= _WIDTH or not line.startswith("   <"):
        return line
    return re.sub(r", (?=[a-z0-9]+(?:\[[^\]]*\])? \S+(?: =|[,>]))", ",\n    ", line)


def outcome(before: Model, after: Model, results: Sequence[PassResult]) -> list[str]:
    """The changes by passes, as lines of text that `parse` reads as the model before them.

    Removed lines have a minus, added ones a plus. Changes and refusals are below the graph.
    """
    old, new = (render(model.whole()).split("\n") for model in (before, after))
    marked = list(difflib.unified_diff(old, new, n=len(old), lineterm=""))[3:]
    changes = [f"changed {change.node}: {change.what}" for result in results for change in result.changes]
    refusals = [
        f"declined {refusal.node}: {refusal.reason}" for result in results for refusal in result.refusals
    ]
    return [*(marked or [f" {line}" for line in old]), *changes, *refusals]
