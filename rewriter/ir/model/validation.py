"""The boundary that files and protos of others pass before any code relies on them.

`onnx.checker` finds what a graph may not be. Here is what it, protobuf and NumPy let through or crash on:
text that is not UTF-8, tensors whose type, dims and data contradict each other, and versions beyond 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnx
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import TensorProto, numpy_helper

from rewriter.ir.errors import ModelError
from rewriter.ir.model.graphs import STANDARD_DOMAINS, walk_graphs, walk_nodes
from rewriter.ir.model.schemas import TYPE_ATTRIBUTES
from rewriter.ir.model.tensors import PACKED_TYPES

LARGEST_VERSION = 2**31 - 1
"""Versions are 64 bits in the file, and 32 bits in the libraries that read it."""

LARGEST_BYTES = 2**63 - 1
"""Files and arrays are measured with signed 64 bits."""

NOTES = frozenset({"doc_string", "producer_name", "producer_version"})
"""Text that no program looks up anything by; it stays as it is, whatever its encoding."""

MOST_EXPANDED = 10**7
"""Nodes of a function with all that it calls; the largest exports have 10^5."""

MOST_TURNS = 10**9
"""Of a Loop whose condition never changes: ONNX Runtime makes about a million in a second."""

ELEMENT_TYPES = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}

EXPORT_AGAIN = "export the model again, or copy it again from where it came"


def read_proto(path: Path) -> onnx.ModelProto:
    """Reads the proto in a file, without its external data.

    Raises:
        ModelError: no such file, or no ONNX model.
    """
    proto = onnx.ModelProto()
    try:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
            raise ModelError(what, where=str(path), hint="name an .onnx file")
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise _not_parsed(path, error) from error
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path),
                         hint="check its name and its permissions") from error  # fmt: skip
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError(
            "not an ONNX model: it holds no graph",
            where=str(path),
            hint="name an .onnx file; weights alone (.pt, .safetensors) have to be exported first",
        )
    return proto


def _not_parsed(path: Path, error: DecodeError) -> ModelError:
    if "MaxDepth" in str(error):
        return ModelError(
            "its graphs are nested more deeply than protobuf reads (100 messages, about 30 If or Loop)",
            where=str(path),
            hint="export it with fewer nested branches",
        )
    return ModelError(
        "not an ONNX model, or a truncated one (protobuf cannot parse it)",
        where=str(path),
        hint="compare the file's size with the original's; files from Git LFS may be pointers",
    )


def _broken(what: str, where: str) -> ModelError:
    return ModelError(what, where=where, hint=EXPORT_AGAIN)


def check_proto(proto: onnx.ModelProto, where: str) -> None:
    """Checks a model before its tensors are read.

    Args:
        where: The file, for messages.

    Raises:
        ModelError: text that is not UTF-8, an impossible version, or a tensor, input or output that is
            inconsistent; the message names the node or tensor.
    """
    _check_text(proto, where)
    _check_versions(proto, where)
    for function in proto.functions:
        _check_function(function, where)
    _check_expansion(proto, where)
    for graph in walk_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _check_value(value, where)
        for node in graph.node:
            _check_type_attribute(node, where)
            if not any(node.output):
                raise ModelError("it has no output", where=f"{where}: node {node.name or node.op_type!r}",
                                 hint="remove it: it computes nothing that anything uses")  # fmt: skip
            _check_end(node, graph, where)
        for tensor in graph.initializer:
            check_tensor(tensor, f"{where}: initializer {tensor.name!r}")
        for sparse in graph.sparse_initializer:
            for part in (sparse.values, sparse.indices):
                check_tensor(part, f"{where}: sparse initializer {sparse.values.name!r}")
    for owner, tensor in constant_tensors(proto):
        check_tensor(tensor, f"{where}: node {owner!r}: tensor {tensor.name!r}")


def _check_type_attribute(node: onnx.NodeProto, where: str) -> None:
    """Checks the attribute by which Cast and generators name an element type."""
    name = TYPE_ATTRIBUTES.get(node.op_type)
    for attribute in node.attribute if name else ():
        if attribute.name != name or attribute.type == onnx.AttributeProto.STRING:  # text in opsets 1 to 5
            continue
        if attribute.i not in ELEMENT_TYPES and (attribute.i or name == "to"):
            raise _broken(
                f"its attribute {name!r} is {attribute.i}, which is no element type of ONNX",
                f"{where}: node {node.name or node.op_type!r}",
            )


def _check_function(function: onnx.FunctionProto, where: str) -> None:
    """Checks what `onnx.checker` does not: a node or an input makes every tensor of a local function."""
    made = {"", *function.input}.union(*(node.output for node in function.node))
    reads = [(repr(node.name or node.op_type), "input", node.input) for node in function.node]
    for reader, port, names in (*reads, ("it", "output", function.output)):
        for name in (name for name in names if name not in made):
            raise _broken(
                f"no node makes the {port} {name!r} of {reader}", f"{where}: function {function.name!r}"
            )


def _check_expansion(proto: onnx.ModelProto, where: str) -> None:
    """Refuses functions that call each other so often that no computer holds the whole graph."""
    calls = {(f.domain, f.name): [(n.domain, n.op_type) for n in walk_nodes(f)] for f in proto.functions}
    sizes = dict.fromkeys(calls, 1)
    for _ in calls:
        grown = {key: sum(sizes.get(callee, 1) for callee in callees) for key, callees in calls.items()}
        if large := next((name for (_, name), size in grown.items() if size > MOST_EXPANDED), None):
            raise ModelError(f"it expands to more than {MOST_EXPANDED:.0e} nodes",
                             where=f"{where}: function {large!r}", hint=EXPORT_AGAIN)  # fmt: skip
        if grown == sizes:
            return
        sizes = grown


def _check_end(node: onnx.NodeProto, graph: onnx.GraphProto, where: str) -> None:
    """Refuses a Loop whose condition is never false, and that counts to no number that is ever reached."""
    if node.op_type != "Loop" or node.domain not in STANDARD_DOMAINS or len(node.input) < 2:
        return
    held = {t.name: t for t in graph.initializer}
    body = next((a.g for a in node.attribute if a.name == "body"), None)
    count, condition = (held.get(name) for name in node.input[:2])
    if body is None or len(body.input) < 2 or not body.output or (node.input[1] and condition is None):
        return
    kept = {n.output[0]: n.input[0] for n in body.node if n.op_type == "Identity" and n.input and n.output}
    turns = _number(count) if count is not None else 0 if node.input[0] else MOST_TURNS + 1
    true = condition is None or bool(_number(condition))
    if (
        true
        and turns > MOST_TURNS
        and kept.get(body.output[0].name, body.output[0].name) == body.input[1].name
    ):
        raise ModelError("it does not end: its condition is never false",
                         where=f"{where}: node {node.name or node.op_type!r}", hint=EXPORT_AGAIN)  # fmt: skip


def _number(tensor: onnx.TensorProto) -> int:
    """The value of a scalar; 0 for any other tensor."""
    if math.prod(tensor.dims) != 1 or tensor.data_location == TensorProto.EXTERNAL:
        return 0
    check_tensor(tensor, f"initializer {tensor.name!r}")
    return int(numpy_helper.to_array(tensor).item())


def constant_tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that is an attribute, with the name of its node."""
    bodies = [g.node for g in walk_graphs(proto.graph)] + [f.node for f in proto.functions]
    for nodes in bodies:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield node.name or node.op_type, attribute.t
                for tensor in attribute.tensors:
                    yield node.name or node.op_type, tensor


def check_tensor(tensor: onnx.TensorProto, where: str) -> None:
    """Checks that type and dims of a tensor are possible, and that its raw data fill them.

    Raises:
        ModelError: they do not; the message starts with `where`.
    """
    if tensor.data_type not in ELEMENT_TYPES:
        raise _broken(f"it has the element type {tensor.data_type}, which ONNX lacks", where)
    dims = list(tensor.dims)
    if any(size < 0 for size in dims):
        raise _broken(f"its shape {dims} has a negative size", where)
    needed = byte_size(tensor)
    if needed is not None and needed > LARGEST_BYTES:
        raise _broken(f"its shape {dims} is larger than any memory", where)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != needed:
        raise _broken(
            f"it holds {len(tensor.raw_data)} bytes, but its shape {dims} of {type_name(tensor)} "
            f"needs {needed}",
            where,
        )
    if not (tensor.HasField("raw_data") or tensor.data_location == TensorProto.EXTERNAL):
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        held, count = len(getattr(tensor, field)), _value_count(tensor)
        if held != count:
            raise _broken(f"it holds {held} values in {field}, but its shape {dims} needs {count}", where)


def _value_count(tensor: onnx.TensorProto) -> int:
    """The number of entries in the field that holds a tensor's values one by one."""
    if tensor.data_type in PACKED_TYPES:
        return byte_size(tensor) or 0
    parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
    return parts * math.prod(tensor.dims)


def byte_size(tensor: onnx.TensorProto) -> int | None:
    """Bytes that a tensor's data need by its type and dims; None for strings."""
    count = math.prod(tensor.dims)
    if bits := PACKED_TYPES.get(tensor.data_type):
        return (bits * count + 7) // 8
    if tensor.data_type == TensorProto.STRING:
        return None
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * count


def type_name(tensor: onnx.TensorProto) -> str:
    """The tensor's element type as ONNX calls it, in lower case."""
    return TensorProto.DataType.Name(tensor.data_type).lower()


def _check_versions(proto: onnx.ModelProto, where: str) -> None:
    imports = [*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)]
    for opset in imports:
        least = 1 if opset.domain in STANDARD_DOMAINS else 0
        if not least <= opset.version <= LARGEST_VERSION:
            name = opset.domain or "ai.onnx"
            raise _broken(f"operator set {name!r} cannot have the version {opset.version}", where)


def _check_value(value: onnx.ValueInfoProto, where: str) -> None:
    kind = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else TensorProto.UNDEFINED
    if kind != TensorProto.UNDEFINED and kind not in ELEMENT_TYPES:
        raise _broken(f"it has the element type {kind}, which ONNX lacks", f"{where}: tensor {value.name!r}")


def _check_text(proto: onnx.ModelProto, where: str) -> None:
    """Refuses names and other text that are not UTF-8: Python's protobuf yields them as bytes."""
    text = onnx.ModelProto()
    text.CopyFrom(proto)
    for tensor in text.graph.initializer:
        tensor.ClearField("raw_data")  # bytes, which are most of a model: 0.14 s instead of 0.84 s for 307 MB
    try:
        _strict_model().FromString(text.SerializeToString())
    except (DecodeError, EncodeError, ValueError):  # not UTF-8, or larger than one message
        for place, content in _broken_text(proto, ""):
            raise ModelError(
                f"it is not UTF-8: {content.decode('utf-8', 'backslashreplace')}",
                where=f"{where}: {place}",
                hint="rename it with the program that wrote the model, and export again",
            ) from None


@cache
def _strict_model() -> type[Message]:
    """`onnx.ModelProto` declared in proto3, whose parser demands UTF-8.

    It needs 0.2 s for 50,000 nodes, where a walk over all text in Python needs 5 s.
    """
    file = descriptor_pb2.FileDescriptorProto()
    onnx.ModelProto.DESCRIPTOR.file.CopyToProto(file)
    file.syntax = "proto3"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))


def _broken_text(message: Message, place: str) -> Iterator[tuple[str, bytes]]:
    """Text fields that are not UTF-8, with their place, as `graph.node[3].name`."""
    for field, value in message.ListFields():
        if field.name in NOTES:
            continue
        name = f"{place}.{field.name}".lstrip(".")
        for index, item in enumerate(value if field.is_repeated else [value]):
            here = f"{name}[{index}]" if field.is_repeated else name
            if isinstance(item, Message):
                yield from _broken_text(item, here)
            elif field.type == FieldDescriptor.TYPE_STRING and isinstance(item, bytes):
                yield here, item
