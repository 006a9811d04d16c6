"""The boundary that files and protos of others pass before any code relies on them.

`onnx.checker` finds what a graph may not be. Here is what it, protobuf and NumPy let through or crash on:
text that is not UTF-8, tensors whose type, dims and data contradict each other, and versions beyond 32 bits.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import TensorProto, numpy_helper

from rewriter.base.errors import SLIP, ModelError, did_you_mean
from rewriter.ir.model.graphs import STANDARD_DOMAINS, all_graphs, walk_nodes
from rewriter.ir.model.schemas import TYPE_ATTRIBUTES
from rewriter.ir.model.tensors import PACKED_TYPES

LARGEST_DENSE = 2**31 - 1
"""Bytes of a sparse tensor that is written out, as protobuf limits them; a small file can declare more."""

LARGEST_VERSION = 2**31 - 1
"""Versions are 64 bits in the file, and 32 bits in the libraries that read it."""

MOST_EXPANDED, MOST_CALLED = 10**5, 10
"""Nodes of a model after all functions are inlined, in total and per node in the file: one of the two may be
exceeded. The largest exports have 10^5 nodes, and no function that is called so often."""

MOST_TURNS = 10**9
"""Iterations of a Loop whose condition never changes: ONNX Runtime runs about a million per second."""

MOST_AXES = 64  # most axes of a NumPy array; TensorRT's tensors have 8

POSITIVE = frozenset(
    "group num_groups strides dilations kernel_shape blocksize size hidden_size num_outputs".split()
)
"""ONNX's own attributes that must be positive: ONNX Runtime refuses 0 and less, or divides by them."""

NOTES = frozenset({"doc_string", "producer_name", "producer_version"})
"""Text that no program looks up anything by; it stays as it is, whatever its encoding."""

ELEMENT_TYPES = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}


def read_proto(path: Path) -> onnx.ModelProto:
    """Reads the proto in a file, without its external data; a ModelError if it holds none."""
    proto, what, hint = onnx.ModelProto(), "", "name an .onnx file"
    try:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
        else:
            proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        what = "not an ONNX model, or a truncated one (protobuf cannot parse it)"
        hint = "compare the file's size with the original's, and copy or export it again"
        if "MaxDepth" in str(error):
            what = "its graphs are nested more deeply than protobuf reads (100 messages, about 30 If or Loop)"
            hint = "export it with fewer nested branches"
    except OSError as error:
        what, hint = f"cannot be read: {error.strerror or error}", "check its name and its permissions"
    if path.is_file() and (other := _other_kind(path)):
        what, hint = f"not an ONNX model, but {other[0]}", other[1]
    elif what == "no such file":
        hint = did_you_mean(path.name, [one.name for one in path.parent.glob("*.onnx")], SLIP) or hint
    if not what and not (proto.ir_version and proto.HasField("graph")):
        what = "not an ONNX model: it holds no graph"
        hint = "name an .onnx file, or export the network again"
    if what:
        raise ModelError(what, where=path, hint=hint)
    return proto


OTHER_KINDS = (
    (0, b"version https://git-lfs", "a pointer of Git LFS", "`git lfs pull` fetches the file itself"),
    (4, b"TFL3", "a model of TensorFlow Lite", "python -m tf2onnx.convert --tflite FILE --output model.onnx"),
    (0, b"PK\x03\x04", "an archive (PyTorch, NumPy)", "torch.onnx.export(module, inputs, 'model.onnx')"),
    (0, b"\x89HDF", "a model of Keras", "export it to ONNX: module.export('model.onnx', format='onnx')"),
    (0, b"ftrt", "an engine of TensorRT", "name the ONNX file that it was built from"),
    (8, b"{", "weights without a graph (safetensors)", "optimum-cli export onnx --model FOLDER OUT"),
)
"""Files of other kinds: a position and the bytes there, what it is, and how it becomes an ONNX model."""


def _other_kind(path: Path) -> tuple[str, str] | None:
    """Names the kind of a file that is no model, and the way to one; None if the kind is not known."""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(64)
        for position, magic, kind, hint in OTHER_KINDS:
            if start[position:].startswith(magic) and (magic != b"{" or path.suffix == ".safetensors"):
                return kind, hint
    return None


def _broken(what: str, where: str) -> ModelError:
    return ModelError(what, where=where, hint="export the model again, or copy it again from its source")


def check_proto(proto: onnx.ModelProto, where: str) -> None:
    """Checks a model, of the file `where`, before its tensors are read.

    Raises:
        ModelError: text that is not UTF-8, an impossible version, or a tensor, input or output that is
            inconsistent; the message names the node or tensor.
    """
    _check_text(proto, where)
    for opset in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        least = 1 if opset.domain in STANDARD_DOMAINS else 0
        if not least <= opset.version <= LARGEST_VERSION:
            name = opset.domain or "ai.onnx"
            raise _broken(f"operator set {name!r} cannot have the version {opset.version}", where)
    for graph in all_graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            path, tensor_type = f"{where}: tensor {value.name!r}", value.type.tensor_type
            _check_type(tensor_type.elem_type, "", path)
            _check_axes(len(tensor_type.shape.dim), path)
        for tensor in graph.initializer:  # before a Loop reads its count
            check_tensor(tensor, f"{where}: initializer {tensor.name!r}")
        held = {t.name: t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL}
        for node in graph.node:
            _check_node(node, held, f"{where}: node {node.name or node.op_type!r}")
    _check_references(proto.graph, where)
    for function in proto.functions:
        for node in function.node:
            _check_node(node, {}, f"{where}: function {function.name!r}: node {node.name or node.op_type!r}")
    for owner, tensor in constant_tensors(proto):
        check_tensor(tensor, f"{where}: node {owner!r}: tensor {tensor.name!r}")
    _check_expansion(proto, where)


def _check_references(graph: onnx.GraphProto, where: str) -> None:
    """Refuses references to attributes of a function in nodes that are in none."""
    for node in walk_nodes(graph):
        if reference := next((a for a in node.attribute if a.ref_attr_name), None):
            what = f"its attribute {reference.name!r} refers to one of a function, and it is in none"
            raise _broken(what, f"{where}: node {node.name or node.op_type!r}")


def _check_expansion(proto: onnx.ModelProto, where: str) -> None:
    """Refuses functions that call themselves, or each other so often that the whole graph is too large."""
    bodies: dict[object, onnx.GraphProto | onnx.FunctionProto] = {
        (f.domain, f.name): f for f in proto.functions
    }
    bodies[None] = proto.graph
    calls = {key: Counter((n.domain, n.op_type) for n in walk_nodes(body)) for key, body in bodies.items()}
    limit = max(MOST_EXPANDED, MOST_CALLED * sum(count.total() for count in calls.values()))
    sizes, begun, stack = dict[object, int](), set[object](), list(bodies)
    while stack:
        key = stack[-1]
        waiting = [callee for callee in calls[key] if callee in bodies and callee not in sizes]
        path = where if key is None else f"{where}: function {bodies[key].name!r}"
        if waiting and key in begun:
            raise _broken("it calls itself, itself or through other functions", path)
        begun.add(key)
        stack.extend(waiting)
        if not waiting:
            sizes[stack.pop()] = size = sum(n * sizes.get(callee, 1) for callee, n in calls[key].items())
            if size > limit:
                raise _broken(f"its functions expand to more than {limit} nodes", path)


def _check_node(node: onnx.NodeProto, held: Mapping[str, TensorProto], where: str) -> None:
    if not any(node.output):
        hint = "remove it: no node uses its result"
        raise ModelError("it has no output", where=where, hint=hint)
    for attribute in node.attribute if node.op_type in TYPE_ATTRIBUTES else ():
        if attribute.name == TYPE_ATTRIBUTES[node.op_type]:
            _check_type(attribute.i, f"its attribute {attribute.name!r}: ", where)
    if node.domain not in STANDARD_DOMAINS:
        return
    for attribute in node.attribute:
        sizes = [*attribute.ints, *([attribute.i] if attribute.type == attribute.INT else [])]
        if attribute.name in POSITIVE and min(sizes, default=1) < 1:
            raise _broken(f"its attribute {attribute.name!r} is {min(sizes)}, and has to be positive", where)
    divisor = held.get(node.input[1]) if node.op_type in ("Div", "Mod") and len(node.input) > 1 else None
    if divisor is not None:
        value = numpy_helper.to_array(divisor)
        if value.dtype.kind in "iu" and not value.all():
            raise _broken(f"it divides integers by {divisor.name!r}, which holds a zero", where)
    if node.op_type == "Loop" and _is_endless(node, held):
        raise _broken("it does not end: its condition stays true, and its iterations have no limit", where)


def _is_endless(loop: onnx.NodeProto, held: Mapping[str, TensorProto]) -> bool:
    """True for a Loop whose body returns its constant condition, and whose count is never reached."""
    body = next((a.g for a in loop.attribute if a.name == "body"), None)
    if body is None or len(loop.input) < 2 or len(body.input) < 2 or not body.output:
        return False
    scalars = (t if t is not None and t.dims in ([], [1]) else None for t in map(held.get, loop.input[:2]))
    count, condition = (() if tensor is None else numpy_helper.to_array(tensor).flat for tensor in scalars)
    identities = (n for n in body.node if n.op_type == "Identity" and n.input and n.output)
    handed_on = {n.output[0]: n.input[0] for n in identities}
    same = handed_on.get(body.output[0].name, body.output[0].name) == body.input[1].name
    true = not loop.input[1] or any(condition)
    return same and true and (not loop.input[0] or any(turns > MOST_TURNS for turns in count))


def constant_tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that is an attribute, with the name of its node."""
    held: list[onnx.GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    for graph in held:
        for node in walk_nodes(graph):
            for attribute in node.attribute:
                for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                    yield node.name or node.op_type, tensor


def _check_axes(axes: int, where: str) -> None:
    if axes > MOST_AXES:
        raise _broken(f"it has {axes} axes, and an array has at most {MOST_AXES}", where)


def _check_type(dtype: int, what: str, where: str) -> None:
    if dtype not in ELEMENT_TYPES and dtype != TensorProto.UNDEFINED:
        raise _broken(f"{what}it has the element type {dtype}, which ONNX lacks", where)


def check_tensor(tensor: onnx.TensorProto, where: str) -> None:
    """Checks that type and dims of a tensor are possible and its data fill them, or raises a ModelError."""
    if tensor.data_type not in ELEMENT_TYPES:
        raise _broken(f"it has the element type {tensor.data_type}, which ONNX lacks", where)
    _check_axes(len(tensor.dims), where)
    if any(size < 0 for size in tensor.dims):
        raise _broken(f"its shape {list(tensor.dims)} has a negative size", where)
    if tensor.data_location != TensorProto.EXTERNAL:
        try:
            numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            kind = TensorProto.DataType.Name(tensor.data_type).lower()
            shape = f"its shape {list(tensor.dims)} of {kind}"
            raise _broken(f"its data do not fit {shape}: {error}", where) from error


def make_dense(proto: onnx.ModelProto, where: str) -> None:
    """Writes sparse initializers and Constants out, as ONNX Runtime does: TensorRT's parser takes neither.

    Raises:
        ModelError: impossible indices, or values in another file.
    """
    for graph in all_graphs(proto):
        graph.initializer.extend(_dense(sparse, where) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    held: list[onnx.GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    for node in (node for graph in held for node in walk_nodes(graph) if node.op_type == "Constant"):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                value = onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor, where))
                attribute.CopyFrom(value)


def _dense(sparse: onnx.SparseTensorProto, where: str) -> onnx.TensorProto:
    """A tensor of shape `sparse.dims`, with 0 where no index [NNZ] or [NNZ, rank] names a value [NNZ]."""
    where = f"{where}: sparse tensor {sparse.values.name!r}"
    for tensor in (sparse.values, sparse.indices):
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ModelError(
                "its data are in a file of their own", where=where, hint="export it as a dense tensor"
            )
        check_tensor(tensor, where)
    try:
        indices = numpy_helper.to_array(sparse.indices)
        values = numpy_helper.to_array(sparse.values)
        if (size := math.prod(sparse.dims) * values.itemsize) > LARGEST_DENSE:
            raise ValueError(f"it would have {size} bytes, more than a file can hold")
        result = np.zeros(tuple(sparse.dims), values.dtype)
        np.put(
            result, indices if indices.ndim == 1 else np.ravel_multi_index(indices.T, result.shape), values
        )
    except (ValueError, IndexError, MemoryError, OSError) as error:
        raise _broken(f"its values and indices make no tensor {list(sparse.dims)}: {error}", where) from error
    return numpy_helper.from_array(result, sparse.values.name)


def byte_size(tensor: onnx.TensorProto) -> int | None:
    """Bytes that a tensor's data need by its type and dims; None for strings."""
    count = math.prod(tensor.dims)
    if bits := PACKED_TYPES.get(tensor.data_type):
        return (bits * count + 7) // 8
    if tensor.data_type == TensorProto.STRING:
        return None
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * count


def _check_text(proto: onnx.ModelProto, where: str) -> None:
    """Refuses names and other text that are not UTF-8: Python's protobuf yields them as bytes."""
    text = onnx.ModelProto()  # without weights, most of a model: 0.14 s instead of 0.84 s for 307 MB
    try:
        _copy_fields(proto, text, set(proto.DESCRIPTOR.fields_by_name) - {"graph"})
        _copy_fields(proto.graph, text.graph, set(proto.graph.DESCRIPTOR.fields_by_name) - {"initializer"})
        for tensor in proto.graph.initializer:
            _copy_fields(tensor, text.graph.initializer.add(), {"name", "doc_string", "external_data"})
        _strict_model().FromString(text.SerializeToString())
    except (DecodeError, EncodeError, ValueError):  # not UTF-8, or larger than one message
        for path, content in _broken_text(proto, ""):
            what = f"it is not UTF-8: {content.decode('utf-8', 'backslashreplace')}"
            hint = "rename it with the program that wrote the model, and export again"
            raise ModelError(what, where=f"{where}: {path}", hint=hint) from None


def _copy_fields(source: Message, copy: Message, names: set[str]) -> None:
    for field, value in source.ListFields():
        if field.name not in names:
            continue
        if field.is_repeated:
            getattr(copy, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)


@cache
def _strict_model() -> type[Message]:
    """`onnx.ModelProto` in proto3, whose parser demands UTF-8: 0.2 s for 50,000 nodes, in Python 5 s."""
    file = descriptor_pb2.FileDescriptorProto()
    onnx.ModelProto.DESCRIPTOR.file.CopyToProto(file)
    file.syntax = "proto3"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))


def _broken_text(message: Message, path: str) -> Iterator[tuple[str, bytes]]:
    """Text fields that are not UTF-8, with their place, as `graph.node[3].name`."""
    for field, value in message.ListFields():
        if field.name in NOTES:
            continue
        name = f"{path}.{field.name}".lstrip(".")
        for index, item in enumerate(value if field.is_repeated else [value]):
            here = f"{name}[{index}]" if field.is_repeated else name
            if isinstance(item, Message):
                yield from _broken_text(item, here)
            elif field.type == FieldDescriptor.TYPE_STRING and isinstance(item, bytes):
                yield here, item
