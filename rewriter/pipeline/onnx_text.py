"""Models, and what passes do to them, as text in the syntax of onnx.parser: for tests and reports of bugs.

Without a header, a text is of opset 17. A constant that is declared and has no values, such as
`float[64,64] w` between the angle brackets, has normal random ones; `render` writes large constants so.
"""

from __future__ import annotations

import difflib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from rewriter.ir.base import with_header
from rewriter.ir.errors import ModelError
from rewriter.ir.model import Model, walk_graphs
from rewriter.pipeline.driver import PassResult

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SYNTAX = (
    "`rewriter passes show NAME` shows such a text; the syntax: https://onnx.ai/onnx/repo-docs/Syntax.html"
)

_OF_THE_RESULT = re.compile(r"^\+.*$|^(changed|declined) .*: .*$|^-", re.MULTILINE)
"""What `outcome` adds to the text of a graph."""

_LARGE = 16
"""Float constants of more elements are written without values."""

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WIDTH = 108

_BY_BITS = {8: np.uint8, 16: np.uint16, 32: np.float32, 64: np.float64}
"""How the parser takes floats of so many bits."""


def read(path: Path) -> ModelProto:
    """Reads a model from a text file.

    Raises:
        ModelError: as `parse`; or the file cannot be read.
    """
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"it cannot be read as text: {error}",
            where=str(path),
            hint="name a text file or an .onnx file",
        ) from error


def parse(text: str) -> ModelProto:
    """Reads a model from text.

    Raises:
        ModelError: it is not in the syntax of onnx.parser; the message has the line and the column.
    """
    try:
        proto = onnx.parser.parse_model(with_header(_OF_THE_RESULT.sub("", text)))
    except onnx.parser.ParseError as error:
        raise ModelError(f"it is not ONNX text: {_parser_message(error)}", hint=_SYNTAX) from error
    for graph in walk_graphs(proto.graph):
        _add_random_weights(graph)
    return proto


def _parser_message(error: onnx.parser.ParseError) -> str:
    text = error.args[0]
    return (text.decode() if isinstance(text, bytes) else str(text)).replace("\n", " ")


def _add_random_weights(graph: GraphProto) -> None:
    outputs = {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in outputs]:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type not in _FLOATS or not all(shape):
            raise ModelError(
                "only a float constant of known shape can have no values", where=value.name, hint=_SYNTAX
            )
        graph.initializer.append(_random(value.name, kind.elem_type, shape))
        graph.value_info.remove(value)


def _random(name: str, dtype: int, shape: Iterable[int]) -> TensorProto:
    """The same values for a name, whatever other constants there are."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return numpy_helper.from_array(np.asarray(values, onnx.helper.tensor_dtype_to_np_dtype(dtype)), name)


def render(model: ModelProto) -> str:
    """Writes a model as text, each node of the main graph in a line."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    default = opsets == {"": 17} and model.ir_version == 8
    header = "" if default else f"<ir_version: {model.ir_version}, opset_import: {_imports(opsets)}>\n"
    return "\n".join([header + _graph(model.graph), *map(_function, model.functions)])


def _function(function: onnx.FunctionProto) -> str:
    opsets = _imports({entry.domain: entry.version for entry in function.opset_import})
    signature = f"({_names(function.input)}) => ({_names(function.output)})"
    return (
        f"<domain: {json.dumps(function.domain)}, opset_import: {opsets}>\n"
        f"{_name(function.name)} {_angled(map(_name, function.attribute))}{signature}"
        f" {_block(function.node, '')}"
    )


def _imports(opsets: dict[str, int]) -> str:
    return f"[{', '.join(f'{json.dumps(domain)} : {version}' for domain, version in opsets.items())}]"


def _graph(graph: GraphProto, indent: str = "") -> str:
    constants = [*map(_constant, graph.initializer), *_types_of_unknown_operators(graph)]
    signature = f"{_name(graph.name)} ({_values(graph.input)}) => ({_values(graph.output)})"
    line = f"{signature} {_angled(constants)}".rstrip()
    if len(line) > _WIDTH and constants:
        line = (
            f"{signature} <\n"
            + ",\n".join(f"{indent}    {constant}" for constant in constants)
            + f"\n{indent}>"
        )
    return f"{line} {_block(graph.node, indent)}"


def _values(values: Iterable[onnx.ValueInfoProto]) -> str:
    return ", ".join(f"{_type(value.type)} {_name(value.name)}" for value in values)


def _types_of_unknown_operators(graph: GraphProto) -> Iterator[str]:
    """Types that shape inference cannot find out."""
    unknown = [n for n in graph.node if not onnx.defs.has(n.op_type, domain=n.domain)]
    outputs = {name for node in unknown for name in node.output}
    return (f"{_type(v.type)} {_name(v.name)}" for v in graph.value_info if v.name in outputs)


def _block(nodes: Iterable[NodeProto], indent: str) -> str:
    lines = [_node(node, indent + "    ") for node in nodes]
    short = f"{{ {' '.join(lines)} }}"
    if indent and len(lines) <= 2 and "\n" not in short and len(short) < _WIDTH / 2:
        return short
    return "{\n" + "\n".join(f"{indent}    {line}" for line in lines) + f"\n{indent}}}"


def _node(node: NodeProto, indent: str) -> str:
    name = f"[{_name(node.name)}] " if node.name else ""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    attributes = _angled(_attribute(attribute, indent) for attribute in node.attribute).rstrip()
    return f"{name}{_names(node.output)} = {operator}{attributes}({_names(node.input)})"


def _attribute(attribute: AttributeProto, indent: str) -> str:
    name, kind = _name(attribute.name), AttributeProto.AttributeType.Name(attribute.type).lower()
    if attribute.ref_attr_name:
        return f"{name}: {kind} = @{_name(attribute.ref_attr_name)}"
    if attribute.type == AttributeProto.GRAPH:
        return f"{name} = {_graph(attribute.g, indent)}"
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return f"{name} = {_tensor_type(value)} {_elements(value)}"
    if isinstance(value, list):
        return f"{name}{'' if value else f': {kind}'} = [{', '.join(map(_literal, value))}]"
    return f"{name} = {_literal(value)}"


def _literal(value: object) -> str:
    if isinstance(value, bytes):
        return json.dumps(value.decode())
    return str(np.float32(value)) if isinstance(value, float) else str(value)


def _constant(tensor: TensorProto) -> str:
    declared = f"{_tensor_type(tensor)} {_name(tensor.name)}"
    large = tensor.data_type in _FLOATS and np.prod(tensor.dims) > _LARGE
    return declared if large or _is_random(tensor) else f"{declared} = {_elements(tensor)}"


def _is_random(tensor: TensorProto) -> bool:
    if tensor.data_type not in _FLOATS or 0 in tensor.dims:
        return False
    random = numpy_helper.to_array(_random(tensor.name, tensor.data_type, tensor.dims))
    return np.array_equal(numpy_helper.to_array(tensor), random)


def _elements(tensor: TensorProto) -> str:
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "fiubOSU" or (array.dtype.kind == "f" and array.itemsize == 2):
        array = array.view(_BY_BITS[array.itemsize * 8])
    if array.dtype.kind == "b":
        array = array.astype(np.int8)
    text = [json.dumps(str(x)) if array.dtype.kind in "OSU" else str(x) for x in array.reshape(-1)]
    return f"{{{', '.join(text)}}}"


def _tensor_type(tensor: TensorProto) -> str:
    dims = f"[{','.join(map(str, tensor.dims))}]" if tensor.dims else ""
    return TensorProto.DataType.Name(tensor.data_type).lower() + dims


def _type(kind: TypeProto) -> str:
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        inner = kind.sequence_type if which == "sequence_type" else kind.optional_type
        return f"{'seq' if which == 'sequence_type' else 'optional'}({_type(inner.elem_type)})"
    tensor = kind.tensor_type
    dims = ",".join(
        str(d.dim_value) if d.HasField("dim_value") else _name(d.dim_param) or "?" for d in tensor.shape.dim
    )
    shape = ("" if not dims else f"[{dims}]") if tensor.HasField("shape") else "[]"
    return TensorProto.DataType.Name(tensor.elem_type).lower() + shape


def _names(names: Iterable[str]) -> str:
    return ", ".join(_name(name) or '""' for name in names)


def _name(name: str) -> str:
    return name if not name or _PLAIN.fullmatch(name) else json.dumps(name)


def _angled(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f"<{text}> " if text else ""


def outcome(before: Model, after: Model, results: Sequence[PassResult]) -> str:
    """What passes did to a model, as text that `parse` reads as the model before.

    Lines that they removed have a minus, their own ones a plus. Changes and refusals are below the graph.
    """
    old, new = (render(model.whole()).split("\n") for model in (before, after))
    marked = list(difflib.unified_diff(old, new, n=len(old), lineterm=""))[3:]
    changes = [f"changed {change.node}: {change.what}" for result in results for change in result.changes]
    refusals = [
        f"declined {refusal.node}: {refusal.reason}" for result in results for refusal in result.refusals
    ]
    return "\n".join([*(marked or [f" {line}" for line in old]), *changes, *refusals])
